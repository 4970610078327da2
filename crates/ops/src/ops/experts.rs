use super::linear::{LinearInput, check_activation};
use super::{expect, expect_f32, expect_weight, silu};
use crate::case::{Case, CaseBuilder, NO_STATE, Tolerance};
use crate::op::Contract;
use crate::plan::{Activation, Plan, Rows, ValueId, WeightFormat, WeightId};
use crate::reference::Reference;
use crate::tensor::{ElementType, HostTensor};

/// Gate and up projections of each token's selected experts: `out = silu(x · Gᵀ) · (x · Uᵀ)`.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsIn {
    /// `Tokens × cols`.
    pub x: ValueId,
    /// `Tokens × k`: selected experts.
    pub ids: ValueId,
    /// `experts × [width, cols]`.
    pub gate: WeightId,
    /// `experts × [width, cols]`.
    pub up: WeightId,
    /// How the input is taken.
    pub activation: Activation,
    /// `Routed(k) × width`.
    pub out: ValueId,
}

/// Down projection of each token's selected experts.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsOut {
    /// `Routed(k) × cols`.
    pub x: ValueId,
    /// `Tokens × k`: selected experts.
    pub ids: ValueId,
    /// `experts × [width, cols]`.
    pub down: WeightId,
    /// How the input is taken.
    pub activation: Activation,
    /// `Routed(k) × width`.
    pub out: ValueId,
}

/// Bytes of the `k` experts that one token selects.
fn selected_bytes(plan: &Plan, ids: ValueId, weights: &[WeightId]) -> Vec<(WeightId, u64)> {
    let k = plan.value(ids).width as u64;
    weights.iter().map(|&w| (w, k * plan.weight(w).matrix_bytes())).collect()
}

impl Contract for ExpertsIn {
    const NAME: &'static str = "experts_in";

    fn reads(&self) -> Vec<ValueId> {
        vec![self.x, self.ids]
    }
    fn writes(&self) -> Vec<ValueId> {
        vec![self.out]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![self.gate, self.up]
    }
    fn check(&self, plan: &Plan) -> Result<(), String> {
        let k = plan.value(self.ids).width;
        let g = plan.weight(self.gate);
        expect(plan, "ids", self.ids, Rows::Tokens, k, ElementType::U32)?;
        expect_f32(plan, "x", self.x, Rows::Tokens, g.cols)?;
        expect_f32(plan, "out", self.out, Rows::Routed(k as u32), g.rows)?;
        expect_weight(plan, "up", self.up, [g.matrices, g.rows, g.cols])?;
        check_activation(g, self.activation)?;
        check_activation(plan.weight(self.up), self.activation)
    }
    fn reference(&self, run: &mut Reference) {
        let ((gate, g), (up, u)) = (run.weight(self.gate), run.weight(self.up));
        let k = run.width(self.ids);
        let ids = run.get(self.ids).u32();
        let mut out = Vec::new();
        for (i, &e) in ids.iter().enumerate() {
            let x = LinearInput::new(run.row(self.x, i / k), self.activation);
            let e = e as usize;
            out.extend((0..gate.rows).map(|r| silu(x.dot(gate, &g, e, r)) * x.dot(up, &u, e, r)));
        }
        run.set(self.out, HostTensor::F32(out));
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::F32_SUM
    }
    fn weight_bytes_per_token(&self, plan: &Plan) -> Vec<(WeightId, u64)> {
        selected_bytes(plan, self.ids, &[self.gate, self.up])
    }
    fn cases() -> Vec<Case> {
        expert_cases::<Self>(&|b, ids, kind| {
            let x = b.input(Rows::Tokens, 128, 1.5);
            let gate = b.weight(kind.format, EXPERTS, 64, 128);
            let up = b.weight(kind.format, EXPERTS, 64, 128);
            let out = b.output(Rows::Routed(K as u32), 64, ElementType::F32);
            Self { x, ids, gate, up, activation: kind.activation, out }
        })
    }
}

impl Contract for ExpertsOut {
    const NAME: &'static str = "experts_out";

    fn reads(&self) -> Vec<ValueId> {
        vec![self.x, self.ids]
    }
    fn writes(&self) -> Vec<ValueId> {
        vec![self.out]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![self.down]
    }
    fn check(&self, plan: &Plan) -> Result<(), String> {
        let k = plan.value(self.ids).width;
        let d = plan.weight(self.down);
        expect(plan, "ids", self.ids, Rows::Tokens, k, ElementType::U32)?;
        expect_f32(plan, "x", self.x, Rows::Routed(k as u32), d.cols)?;
        expect_f32(plan, "out", self.out, Rows::Routed(k as u32), d.rows)?;
        check_activation(d, self.activation)
    }
    fn reference(&self, run: &mut Reference) {
        let (down, d) = run.weight(self.down);
        let mut out = Vec::new();
        for (i, &e) in run.get(self.ids).u32().iter().enumerate() {
            let x = LinearInput::new(run.row(self.x, i), self.activation);
            out.extend((0..down.rows).map(|r| x.dot(down, &d, e as usize, r)));
        }
        run.set(self.out, HostTensor::F32(out));
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::F32_SUM
    }
    fn weight_bytes_per_token(&self, plan: &Plan) -> Vec<(WeightId, u64)> {
        selected_bytes(plan, self.ids, &[self.down])
    }
    fn cases() -> Vec<Case> {
        expert_cases::<Self>(&|b, ids, kind| {
            let x = b.input(Rows::Routed(K as u32), 64, 1.5);
            let down = b.weight(kind.format, EXPERTS, 100, 64);
            let out = b.output(Rows::Routed(K as u32), 100, ElementType::F32);
            Self { x, ids, down, activation: kind.activation, out }
        })
    }
}

const EXPERTS: usize = 12;
const K: usize = 3;

#[derive(Clone, Copy)]
struct Kind {
    format: WeightFormat,
    activation: Activation,
}

/// Cases whose experts get no row, one, around a tile of 16 or 32, or all rows.
fn expert_cases<C: Contract + Into<crate::Op>>(
    make: &dyn Fn(&mut CaseBuilder, ValueId, Kind) -> C,
) -> Vec<Case> {
    let q4 = WeightFormat::Affine { bits: 4 };
    let f32s = |format| Kind { format, activation: Activation::F32 };
    let kinds = [
        ("q4-i8", Kind { format: q4, activation: Activation::I8G64 }),
        ("q4-i16", Kind { format: q4, activation: Activation::I16G64 }),
        ("q4-f32", f32s(q4)),
        ("bf16-f32", f32s(WeightFormat::Dense(ElementType::Bf16))),
        ("q8-f32", f32s(WeightFormat::Affine { bits: 8 })),
        ("f32-f32", f32s(WeightFormat::Dense(ElementType::F32))),
    ];
    let mut cases = Vec::new();
    for (name, kind) in kinds {
        for rows in [1, 2, 5, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65] {
            for spread in ["even", "one", "tile"] {
                // Of rare formats both sides of what GPUs compute row by row.
                let rare = ["q8-f32", "f32-f32"].contains(&name);
                if rare && (![8, 33].contains(&rows) || spread != "even") {
                    continue;
                }
                if [8, 9, 64].contains(&rows) && spread == "tile" {
                    continue;
                }
                // Beside a tile's rows only an expert with all of them is new.
                if [16, 31, 33].contains(&rows) && spread != "one" {
                    continue;
                }
                let variant = format!("{name}/{rows}/{spread}");
                let mut b = CaseBuilder::new::<C>(&variant, &[(rows, 0)], NO_STATE);
                let mut ids = Vec::new();
                for row in 0..rows {
                    let first = match spread {
                        // All rows on the same experts.
                        "one" => 4,
                        // 16 rows on one expert, the rest elsewhere.
                        "tile" => {
                            if row < 16 {
                                0
                            } else {
                                6
                            }
                        }
                        _ => b.rng().bits() as usize % EXPERTS,
                    };
                    ids.extend((0..K).map(|j| ((first + 5 * j) % EXPERTS) as u32));
                }
                let ids = b.input_with(Rows::Tokens, K, HostTensor::U32(ids));
                let op = make(&mut b, ids, kind);
                cases.push(b.build(op));
            }
        }
    }
    cases
}
