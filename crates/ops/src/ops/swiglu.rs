use super::{expect_f32, silu};
use crate::case::{Case, CaseBuilder, NO_STATE, SEGMENTS, Tolerance};
use crate::op::Contract;
use crate::plan::{Plan, Rows, ValueId};
use crate::reference::Reference;
use crate::tensor::{ElementType, HostTensor};

/// `out = silu(gate) · up`.
#[derive(Clone, Debug, PartialEq)]
pub struct SwiGlu {
    /// `rows × width`.
    pub gate: ValueId,
    /// As `gate`.
    pub up: ValueId,
    /// As `gate`.
    pub out: ValueId,
}

impl Contract for SwiGlu {
    const NAME: &'static str = "swiglu";

    fn reads(&self) -> Vec<ValueId> {
        vec![self.gate, self.up]
    }
    fn writes(&self) -> Vec<ValueId> {
        vec![self.out]
    }
    fn check(&self, plan: &Plan) -> Result<(), String> {
        let g = plan.value(self.gate);
        expect_f32(plan, "up", self.up, g.rows, g.width)?;
        expect_f32(plan, "out", self.out, g.rows, g.width)
    }
    fn reference(&self, run: &mut Reference) {
        let pairs = run.f32(self.gate).iter().zip(run.f32(self.up));
        let out = pairs.map(|(&g, &u)| silu(g) * u).collect();
        run.set(self.out, HostTensor::F32(out));
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::F32
    }
    fn cases() -> Vec<Case> {
        SEGMENTS
            .iter()
            .flat_map(|s| [(192, 2.0), (50, 200.0)].map(|shape| (s, shape)))
            .map(|(&(name, segments), (width, spread))| {
                let variant = format!("{name}/{width}");
                let mut b = CaseBuilder::new::<Self>(&variant, segments, NO_STATE);
                let gate = b.input(Rows::Tokens, width, spread);
                let up = b.input(Rows::Tokens, width, 1.0);
                let out = b.output(Rows::Tokens, width, ElementType::F32);
                b.build(Self { gate, up, out })
            })
            .collect()
    }
}
