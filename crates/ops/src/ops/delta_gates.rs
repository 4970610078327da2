use super::{expect_f32, expect_weight, sigmoid};
use crate::case::{Case, CaseBuilder, NO_STATE, SEGMENTS, Tolerance};
use crate::op::Contract;
use crate::plan::{Plan, Rows, ValueId, WeightFormat, WeightId};
use crate::reference::Reference;
use crate::tensor::{ElementType, HostTensor};

/// The delta rule's gates per value head: decay `g = exp(−exp(A_log) · softplus(a + dt_bias))` in (0, 1)
/// and learning rate `β = sigmoid(b)`.
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaGates {
    /// `Tokens × heads`.
    pub a: ValueId,
    /// `Tokens × heads`.
    pub b: ValueId,
    /// `[1, heads]`.
    pub a_log: WeightId,
    /// `[1, heads]`.
    pub dt_bias: WeightId,
    /// `Tokens × heads`: g.
    pub decay: ValueId,
    /// `Tokens × heads`: β.
    pub beta: ValueId,
}

impl Contract for DeltaGates {
    const NAME: &'static str = "delta_gates";

    fn reads(&self) -> Vec<ValueId> {
        vec![self.a, self.b]
    }
    fn writes(&self) -> Vec<ValueId> {
        vec![self.decay, self.beta]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![self.a_log, self.dt_bias]
    }
    fn check(&self, plan: &Plan) -> Result<(), String> {
        let heads = plan.state.heads;
        for (what, id) in [("a", self.a), ("b", self.b), ("decay", self.decay), ("beta", self.beta)]
        {
            expect_f32(plan, what, id, Rows::Tokens, heads)?;
        }
        expect_weight(plan, "A_log", self.a_log, [1, 1, heads])?;
        expect_weight(plan, "dt_bias", self.dt_bias, [1, 1, heads])
    }
    fn reference(&self, run: &mut Reference) {
        let (a_log, dt_bias) = (run.vector(self.a_log), run.vector(self.dt_bias));
        let heads = a_log.len();
        let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
        let decay = run
            .f32(self.a)
            .iter()
            .enumerate()
            .map(|(i, &a)| {
                let h = i % heads;
                (-f64::from(a_log[h]).exp() * softplus(f64::from(a + dt_bias[h]))).exp() as f32
            })
            .collect();
        let beta = run.f32(self.b).iter().map(|&b| sigmoid(b)).collect();
        run.set(self.decay, HostTensor::F32(decay));
        run.set(self.beta, HostTensor::F32(beta));
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::F32
    }
    fn cases() -> Vec<Case> {
        SEGMENTS
            .iter()
            .flat_map(|s| {
                [(ElementType::Bf16, 2.0), (ElementType::F32, 40.0)].map(|kind| (s, kind))
            })
            .map(|(&(name, segments), (element, spread))| {
                let variant = format!("{name}/{element:?}");
                let state = crate::plan::StateLayout { heads: 20, ..NO_STATE };
                let mut b = CaseBuilder::new::<Self>(&variant, segments, state);
                let a = b.input(Rows::Tokens, 20, spread);
                let beta_in = b.input(Rows::Tokens, 20, spread);
                let a_log = b.weight(WeightFormat::Dense(element), 1, 1, 20);
                let dt_bias = b.weight(WeightFormat::Dense(ElementType::Bf16), 1, 1, 20);
                let decay = b.output(Rows::Tokens, 20, ElementType::F32);
                let beta = b.output(Rows::Tokens, 20, ElementType::F32);
                b.build(Self { a, b: beta_in, a_log, dt_bias, decay, beta })
            })
            .collect()
    }
}
