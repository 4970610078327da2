use super::expect_f32;
use crate::case::{Case, CaseBuilder, NO_STATE, SEGMENTS, Tolerance};
use crate::op::Contract;
use crate::plan::{Plan, Rows, ValueId};
use crate::reference::Reference;
use crate::tensor::{ElementType, HostTensor};

/// `out = a + b`.
#[derive(Clone, Debug, PartialEq)]
pub struct Add {
    /// `rows × width`.
    pub a: ValueId,
    /// As `a`.
    pub b: ValueId,
    /// As `a`.
    pub out: ValueId,
}

impl Contract for Add {
    const NAME: &'static str = "add";

    fn reads(&self) -> Vec<ValueId> {
        vec![self.a, self.b]
    }
    fn writes(&self) -> Vec<ValueId> {
        vec![self.out]
    }
    fn check(&self, plan: &Plan) -> Result<(), String> {
        let a = plan.value(self.a);
        expect_f32(plan, "b", self.b, a.rows, a.width)?;
        expect_f32(plan, "out", self.out, a.rows, a.width)
    }
    fn reference(&self, run: &mut Reference) {
        let out = run.f32(self.a).iter().zip(run.f32(self.b)).map(|(a, b)| a + b).collect();
        run.set(self.out, HostTensor::F32(out));
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::EXACT
    }
    fn cases() -> Vec<Case> {
        SEGMENTS
            .iter()
            .map(|&(name, segments)| {
                let mut b = CaseBuilder::new::<Self>(name, segments, NO_STATE);
                let x = b.input(Rows::Tokens, 130, 1.0);
                let y = b.input(Rows::Tokens, 130, 1.0);
                let out = b.output(Rows::Tokens, 130, ElementType::F32);
                b.build(Self { a: x, b: y, out })
            })
            .collect()
    }
}
