use super::expect_f32;
use crate::case::{Case, CaseBuilder, NO_STATE, Tolerance};
use crate::op::Contract;
use crate::plan::{Plan, Rows, ValueId, WeightFormat, WeightId};
use crate::reference::Reference;
use crate::tensor::{ElementType, HostTensor};

/// `out[row] = table[token[row]]`, dequantized; no scaling and no positional term.
#[derive(Clone, Debug, PartialEq)]
pub struct Embed {
    /// `[vocab, width]`.
    pub table: WeightId,
    /// `Tokens × width`.
    pub out: ValueId,
}

impl Contract for Embed {
    const NAME: &'static str = "embed";

    fn reads(&self) -> Vec<ValueId> {
        Vec::new()
    }
    fn writes(&self) -> Vec<ValueId> {
        vec![self.out]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![self.table]
    }
    fn check(&self, plan: &Plan) -> Result<(), String> {
        expect_f32(plan, "out", self.out, Rows::Tokens, plan.weight(self.table).cols)
    }
    fn reference(&self, run: &mut Reference) {
        let (spec, w) = run.weight(self.table);
        let out = run.tokens.iter().flat_map(|&t| w.row(spec, 0, t as usize)).collect();
        run.set(self.out, HostTensor::F32(out));
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::EXACT
    }
    fn weight_bytes_per_token(&self, plan: &Plan) -> Vec<(WeightId, u64)> {
        let w = plan.weight(self.table);
        vec![(self.table, w.bytes() / w.rows as u64)]
    }
    fn cases() -> Vec<Case> {
        let formats = [
            ("q4", WeightFormat::Affine { bits: 4 }),
            ("q8", WeightFormat::Affine { bits: 8 }),
            ("bf16", WeightFormat::Dense(ElementType::Bf16)),
            ("f32", WeightFormat::Dense(ElementType::F32)),
        ];
        formats
            .iter()
            .flat_map(|&(name, format)| [1, 5, 70].map(|rows| (name, format, rows)))
            .map(|(name, format, rows)| {
                let mut b =
                    CaseBuilder::new::<Self>(&format!("{name}/{rows}"), &[(rows, 0)], NO_STATE);
                b.tokens(37);
                let table = b.weight(format, 1, 37, 192);
                let out = b.output(Rows::Tokens, 192, ElementType::F32);
                b.build(Self { table, out })
            })
            .collect()
    }
}
