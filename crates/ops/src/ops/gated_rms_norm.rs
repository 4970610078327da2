use super::rms_norm::rms_norm;
use super::{expect_f32, expect_weight, silu};
use crate::case::{Case, CaseBuilder, NO_STATE, SEGMENTS, Tolerance};
use crate::op::Contract;
use crate::plan::{Plan, Rows, StateLayout, ValueId, WeightFormat, WeightId};
use crate::reference::Reference;
use crate::tensor::{ElementType, HostTensor};

/// `out = rms_norm(y) · w · silu(z)` per value head: the norm first, the gate after it.
#[derive(Clone, Debug, PartialEq)]
pub struct GatedRmsNorm {
    /// `Tokens × heads · dv`.
    pub y: ValueId,
    /// `Tokens × heads · dv`.
    pub z: ValueId,
    /// `[1, dv]`, shared by all heads.
    pub weight: WeightId,
    /// Added to the mean of squares.
    pub eps: f32,
    /// `Tokens × heads · dv`.
    pub out: ValueId,
}

impl Contract for GatedRmsNorm {
    const NAME: &'static str = "gated_rms_norm";

    fn reads(&self) -> Vec<ValueId> {
        vec![self.y, self.z]
    }
    fn writes(&self) -> Vec<ValueId> {
        vec![self.out]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![self.weight]
    }
    fn check(&self, plan: &Plan) -> Result<(), String> {
        let s = &plan.state;
        for (what, id) in [("y", self.y), ("z", self.z), ("out", self.out)] {
            expect_f32(plan, what, id, Rows::Tokens, s.heads * s.dv)?;
        }
        expect_weight(plan, "weight", self.weight, [1, 1, s.dv])
    }
    fn reference(&self, run: &mut Reference) {
        let w = run.vector(self.weight);
        let normed = run.f32(self.y).chunks(w.len()).flat_map(|y| rms_norm(y, Some(&w), self.eps));
        let out = normed.zip(run.f32(self.z)).map(|(n, &z)| n * silu(z)).collect();
        run.set(self.out, HostTensor::F32(out));
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::F32
    }
    fn cases() -> Vec<Case> {
        SEGMENTS
            .iter()
            .flat_map(|s| [(4, 64), (2, 128)].map(|shape| (s, shape)))
            .map(|(&(name, segments), (heads, dv))| {
                let state = StateLayout { heads, dv, ..NO_STATE };
                let variant = format!("{name}/{heads}x{dv}");
                let mut b = CaseBuilder::new::<Self>(&variant, segments, state);
                let y = b.input(Rows::Tokens, heads * dv, 0.3);
                let z = b.input(Rows::Tokens, heads * dv, 2.0);
                let weight = b.weight(WeightFormat::Dense(ElementType::Bf16), 1, 1, dv);
                let out = b.output(Rows::Tokens, heads * dv, ElementType::F32);
                b.build(Self { y, z, weight, eps: 1e-6, out })
            })
            .collect()
    }
}
