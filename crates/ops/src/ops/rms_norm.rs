use super::{expect_f32, expect_weight};
use crate::case::{Case, CaseBuilder, NO_STATE, SEGMENTS, Tolerance};
use crate::op::Contract;
use crate::plan::{Plan, Rows, ValueId, WeightFormat, WeightId};
use crate::reference::Reference;
use crate::tensor::{ElementType, HostTensor};

/// `out = x / sqrt(mean(x²) + eps) · w`, row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct RmsNorm {
    /// `rows × width`.
    pub x: ValueId,
    /// `[1, width]`, the scale itself (an offset of one is already in it).
    pub weight: WeightId,
    /// Added to the mean of squares.
    pub eps: f32,
    /// As `x`.
    pub out: ValueId,
}

/// `x / sqrt(mean(x²) + eps) · w` of one row, accumulated in f64.
pub(crate) fn rms_norm(x: &[f32], w: Option<&[f32]>, eps: f32) -> Vec<f32> {
    let mean = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / x.len() as f64;
    let r = (1.0 / (mean + f64::from(eps)).sqrt()) as f32;
    x.iter().enumerate().map(|(i, &v)| v * r * w.map_or(1.0, |w| w[i])).collect()
}

impl Contract for RmsNorm {
    const NAME: &'static str = "rms_norm";

    fn reads(&self) -> Vec<ValueId> {
        vec![self.x]
    }
    fn writes(&self) -> Vec<ValueId> {
        vec![self.out]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![self.weight]
    }
    fn check(&self, plan: &Plan) -> Result<(), String> {
        let x = plan.value(self.x);
        expect_f32(plan, "out", self.out, x.rows, x.width)?;
        expect_weight(plan, "weight", self.weight, [1, 1, x.width])
    }
    fn reference(&self, run: &mut Reference) {
        let w = run.vector(self.weight);
        let width = run.width(self.x);
        let out =
            run.f32(self.x).chunks(width).flat_map(|x| rms_norm(x, Some(&w), self.eps)).collect();
        run.set(self.out, HostTensor::F32(out));
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::F32
    }
    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for &(name, segments) in SEGMENTS {
            for (width, element) in [(128, ElementType::Bf16), (2048, ElementType::F32)] {
                let mut b =
                    CaseBuilder::new::<Self>(&format!("{name}/{width}"), segments, NO_STATE);
                let x = b.input(Rows::Tokens, width, 3.0);
                let weight = b.weight(WeightFormat::Dense(element), 1, 1, width);
                let out = b.output(Rows::Tokens, width, ElementType::F32);
                cases.push(b.build(Self { x, weight, eps: 1e-6, out }));
            }
        }
        cases
    }
}
