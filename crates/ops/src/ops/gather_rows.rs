use super::expect_f32;
use crate::case::{Case, CaseBuilder, NO_STATE, Tolerance};
use crate::op::Contract;
use crate::plan::{Plan, Rows, ValueId};
use crate::reference::Reference;
use crate::tensor::{ElementType, HostTensor};

/// The rows whose logits are asked for: `out[i] = x[output_rows[i]]`.
#[derive(Clone, Debug, PartialEq)]
pub struct GatherRows {
    /// `Tokens × width`.
    pub x: ValueId,
    /// `Outputs × width`.
    pub out: ValueId,
}

impl Contract for GatherRows {
    const NAME: &'static str = "gather_rows";

    fn reads(&self) -> Vec<ValueId> {
        vec![self.x]
    }
    fn writes(&self) -> Vec<ValueId> {
        vec![self.out]
    }
    fn check(&self, plan: &Plan) -> Result<(), String> {
        let width = plan.value(self.x).width;
        expect_f32(plan, "x", self.x, Rows::Tokens, width)?;
        expect_f32(plan, "out", self.out, Rows::Outputs, width)
    }
    fn reference(&self, run: &mut Reference) {
        let rows = run.output_rows.iter();
        let out = rows.flat_map(|&r| run.row(self.x, r).to_vec()).collect();
        run.set(self.out, HostTensor::F32(out));
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::EXACT
    }
    fn cases() -> Vec<Case> {
        let kinds: [(&str, usize, Vec<usize>); 4] = [
            ("none", 3, vec![]),
            ("last", 5, vec![4]),
            ("all", 4, vec![0, 1, 2, 3]),
            ("some", 70, vec![0, 17, 69]),
        ];
        kinds
            .into_iter()
            .map(|(name, rows, outputs)| {
                let mut b = CaseBuilder::new::<Self>(name, &[(rows, 0)], NO_STATE);
                b.output_rows(outputs);
                let x = b.input(Rows::Tokens, 96, 1.0);
                let out = b.output(Rows::Outputs, 96, ElementType::F32);
                b.build(Self { x, out })
            })
            .collect()
    }
}
