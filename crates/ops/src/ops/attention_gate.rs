use super::{expect_f32, sigmoid};
use crate::case::{Case, CaseBuilder, NO_STATE, SEGMENTS, Tolerance};
use crate::op::Contract;
use crate::plan::{Plan, Rows, StateLayout, ValueId};
use crate::reference::Reference;
use crate::tensor::{ElementType, HostTensor};

/// `out = x · sigmoid(gate)`, where the gate of a head lies behind its query in `qg`.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionGate {
    /// `Tokens × heads · head_dim`: attention's output.
    pub x: ValueId,
    /// `Tokens × 2 · heads · head_dim`: in each head the query, then the gate.
    pub qg: ValueId,
    /// As `x`.
    pub out: ValueId,
}

impl Contract for AttentionGate {
    const NAME: &'static str = "attention_gate";

    fn reads(&self) -> Vec<ValueId> {
        vec![self.x, self.qg]
    }
    fn writes(&self) -> Vec<ValueId> {
        vec![self.out]
    }
    fn check(&self, plan: &Plan) -> Result<(), String> {
        let width = plan.value(self.x).width;
        expect_f32(plan, "x", self.x, Rows::Tokens, width)?;
        expect_f32(plan, "qg", self.qg, Rows::Tokens, 2 * width)?;
        expect_f32(plan, "out", self.out, Rows::Tokens, width)?;
        match width.is_multiple_of(plan.state.head_dim) {
            true => Ok(()),
            false => Err(format!("{width} is no multiple of {}", plan.state.head_dim)),
        }
    }
    fn reference(&self, run: &mut Reference) {
        let d = run.plan.state.head_dim;
        let gates = run.f32(self.qg).chunks(2 * d).flat_map(|head| &head[d..]);
        let out = run.f32(self.x).iter().zip(gates).map(|(x, &g)| x * sigmoid(g)).collect();
        run.set(self.out, HostTensor::F32(out));
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::F32
    }
    fn cases() -> Vec<Case> {
        SEGMENTS
            .iter()
            .flat_map(|s| [(4, 64), (3, 256)].map(|shape| (s, shape)))
            .map(|(&(name, segments), (heads, head_dim))| {
                let state = StateLayout { head_dim, ..NO_STATE };
                let variant = format!("{name}/{heads}x{head_dim}");
                let mut b = CaseBuilder::new::<Self>(&variant, segments, state);
                let x = b.input(Rows::Tokens, heads * head_dim, 1.0);
                let qg = b.input(Rows::Tokens, 2 * heads * head_dim, 3.0);
                let out = b.output(Rows::Tokens, heads * head_dim, ElementType::F32);
                b.build(Self { x, qg, out })
            })
            .collect()
    }
}
