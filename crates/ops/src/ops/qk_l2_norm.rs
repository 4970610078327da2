use super::expect_f32;
use crate::case::{Case, CaseBuilder, NO_STATE, SEGMENTS, Tolerance};
use crate::op::Contract;
use crate::plan::{Plan, Rows, StateLayout, ValueId};
use crate::reference::Reference;
use crate::tensor::{ElementType, HostTensor};

/// L2-normalizes q and k per head: `x / sqrt(Σx² + 1e-6)`; q is also multiplied by `dk^−½`.
///
/// `x` is the convolution's output `[q | k | v]`; v passes through.
#[derive(Clone, Debug, PartialEq)]
pub struct QkL2Norm {
    /// `Tokens × channels`, of which the first `2 · heads · dk` are normalized.
    pub x: ValueId,
    /// Key heads.
    pub heads: usize,
    /// Elements of a head.
    pub dk: usize,
    /// As `x`.
    pub out: ValueId,
}

/// Added to the sum of squares.
pub const L2_EPS: f32 = 1e-6;

impl Contract for QkL2Norm {
    const NAME: &'static str = "qk_l2_norm";

    fn reads(&self) -> Vec<ValueId> {
        vec![self.x]
    }
    fn writes(&self) -> Vec<ValueId> {
        vec![self.out]
    }
    fn check(&self, plan: &Plan) -> Result<(), String> {
        let width = 2 * self.heads * self.dk;
        let x = plan.value(self.x);
        expect_f32(plan, "x", self.x, Rows::Tokens, x.width)?;
        expect_f32(plan, "out", self.out, Rows::Tokens, x.width)?;
        let v = plan.state.heads * plan.state.dv;
        match x.width == width + v {
            true => Ok(()),
            false => {
                Err(format!("x has {} elements a row, q, k and v take {}", x.width, width + v))
            }
        }
    }
    fn reference(&self, run: &mut Reference) {
        let mut out = Vec::new();
        for row in 0..run.rows() {
            let x = run.row(self.x, row);
            for head in 0..2 * self.heads {
                let x = &x[head * self.dk..][..self.dk];
                let sum: f64 = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
                let r = (1.0 / (sum + f64::from(L2_EPS)).sqrt()) as f32;
                let scale = if head < self.heads { (self.dk as f32).powf(-0.5) } else { 1.0 };
                out.extend(x.iter().map(|&v| v * r * scale));
            }
            out.extend_from_slice(&run.row(self.x, row)[2 * self.heads * self.dk..]);
        }
        run.set(self.out, HostTensor::F32(out));
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::F32
    }
    fn cases() -> Vec<Case> {
        SEGMENTS
            .iter()
            .flat_map(|s| [(2, 32), (1, 128)].map(|shape| (s, shape)))
            .map(|(&(name, segments), (heads, dk))| {
                let variant = format!("{name}/{heads}x{dk}");
                let mut b = CaseBuilder::new::<Self>(
                    &variant,
                    segments,
                    StateLayout { heads, dk, ..NO_STATE },
                );
                let x = b.input(Rows::Tokens, 2 * heads * dk + heads * NO_STATE.dv, 1.0);
                let out =
                    b.output(Rows::Tokens, 2 * heads * dk + heads * NO_STATE.dv, ElementType::F32);
                b.build(Self { x, heads, dk, out })
            })
            .collect()
    }
}
