use super::{expect_f32, sigmoid};
use crate::case::{Case, CaseBuilder, NO_STATE, SEGMENTS, Tolerance};
use crate::op::Contract;
use crate::plan::{Plan, Rows, ValueId};
use crate::reference::Reference;
use crate::tensor::{ElementType, HostTensor};

/// `out = residual + Σ_rank weight · routed + sigmoid(shared_gate) · shared`: the experts in the order of
/// their rank, the shared expert last.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeCombine {
    /// `Tokens × width`.
    pub residual: ValueId,
    /// `Routed(k) × width`.
    pub routed: ValueId,
    /// `Tokens × k`.
    pub weights: ValueId,
    /// `Tokens × width`.
    pub shared: ValueId,
    /// `Tokens × 1`.
    pub shared_gate: ValueId,
    /// `Tokens × width`.
    pub out: ValueId,
}

impl Contract for MoeCombine {
    const NAME: &'static str = "moe_combine";

    fn reads(&self) -> Vec<ValueId> {
        vec![self.residual, self.routed, self.weights, self.shared, self.shared_gate]
    }
    fn writes(&self) -> Vec<ValueId> {
        vec![self.out]
    }
    fn check(&self, plan: &Plan) -> Result<(), String> {
        let width = plan.value(self.residual).width;
        let k = plan.value(self.weights).width;
        for (what, id) in [("residual", self.residual), ("shared", self.shared), ("out", self.out)]
        {
            expect_f32(plan, what, id, Rows::Tokens, width)?;
        }
        expect_f32(plan, "routed", self.routed, Rows::Routed(k as u32), width)?;
        expect_f32(plan, "weights", self.weights, Rows::Tokens, k)?;
        expect_f32(plan, "shared_gate", self.shared_gate, Rows::Tokens, 1)
    }
    fn reference(&self, run: &mut Reference) {
        let k = run.width(self.weights);
        let width = run.width(self.residual);
        let mut out = Vec::new();
        for row in 0..run.rows() {
            let gate = sigmoid(run.row(self.shared_gate, row)[0]);
            let (residual, shared) = (run.row(self.residual, row), run.row(self.shared, row));
            let weights = run.row(self.weights, row);
            let routed = &run.f32(self.routed)[row * k * width..][..k * width];
            out.extend((0..width).map(|c| {
                let sum = (0..k).fold(0f32, |a, r| weights[r].mul_add(routed[r * width + c], a));
                residual[c] + gate.mul_add(shared[c], sum)
            }));
        }
        run.set(self.out, HostTensor::F32(out));
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::F32
    }
    fn cases() -> Vec<Case> {
        SEGMENTS
            .iter()
            .flat_map(|s| [(8, 128), (3, 50)].map(|shape| (s, shape)))
            .map(|(&(name, segments), (k, width))| {
                let variant = format!("{name}/{k}x{width}");
                let mut b = CaseBuilder::new::<Self>(&variant, segments, NO_STATE);
                let residual = b.input(Rows::Tokens, width, 1.0);
                let routed = b.input(Rows::Routed(k as u32), width, 1.0);
                let weights = b.input(Rows::Tokens, k, 0.3);
                let shared = b.input(Rows::Tokens, width, 1.0);
                let shared_gate = b.input(Rows::Tokens, 1, 2.0);
                let out = b.output(Rows::Tokens, width, ElementType::F32);
                b.build(Self { residual, routed, weights, shared, shared_gate, out })
            })
            .collect()
    }
}
