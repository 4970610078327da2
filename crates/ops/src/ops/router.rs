use std::cmp::Ordering;

use super::{expect, expect_f32};
use crate::case::{Case, CaseBuilder, NO_STATE, SEGMENTS, Tolerance};
use crate::op::Contract;
use crate::plan::{Plan, Rows, ValueId};
use crate::reference::Reference;
use crate::tensor::{ElementType, HostTensor};

/// Expert selection: softmax over all experts, the `k` largest in descending order (equal ones: lower id
/// first), renormalized to sum to one.
#[derive(Clone, Debug, PartialEq)]
pub struct Router {
    /// `Tokens × experts`.
    pub logits: ValueId,
    /// Selected experts a token.
    pub k: usize,
    /// `Tokens × k` ids.
    pub ids: ValueId,
    /// `Tokens × k` weights.
    pub weights: ValueId,
}

impl Contract for Router {
    const NAME: &'static str = "router";

    fn reads(&self) -> Vec<ValueId> {
        vec![self.logits]
    }
    fn writes(&self) -> Vec<ValueId> {
        vec![self.ids, self.weights]
    }
    fn check(&self, plan: &Plan) -> Result<(), String> {
        let experts = plan.value(self.logits).width;
        expect_f32(plan, "logits", self.logits, Rows::Tokens, experts)?;
        expect(plan, "ids", self.ids, Rows::Tokens, self.k, ElementType::U32)?;
        expect_f32(plan, "weights", self.weights, Rows::Tokens, self.k)?;
        match (1..=experts).contains(&self.k) {
            true => Ok(()),
            false => Err(format!("{} of {experts} experts", self.k)),
        }
    }
    fn reference(&self, run: &mut Reference) {
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        for logits in run.f32(self.logits).chunks(run.width(self.logits)) {
            let max = logits.iter().fold(f32::NEG_INFINITY, |m, &x| m.max(x));
            let p: Vec<f64> = logits.iter().map(|&x| f64::from(x - max).exp()).collect();
            let mut order: Vec<usize> = (0..p.len()).collect();
            // A stable sort keeps equal ones, −0 and 0 among them, in the order of their ids.
            order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap_or(Ordering::Equal));
            order.truncate(self.k);
            let sum: f64 = order.iter().map(|&e| p[e]).sum();
            ids.extend(order.iter().map(|&e| e as u32));
            weights.extend(order.iter().map(|&e| (p[e] / sum) as f32));
        }
        run.set(self.ids, HostTensor::U32(ids));
        run.set(self.weights, HostTensor::F32(weights));
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::F32
    }
    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for &(name, segments) in SEGMENTS {
            for (experts, k) in [(10, 3), (256, 8), (4, 4), (300, 8)] {
                for ties in [false, true] {
                    let kind = if ties { "ties" } else { "random" };
                    let variant = format!("{name}/{k}of{experts}/{kind}");
                    let mut b = CaseBuilder::new::<Self>(&variant, segments, NO_STATE);
                    let n = b.rows() * experts;
                    let data = (0..n)
                        .map(|_| {
                            let x = b.rng().unit() * 4.0;
                            if ties { x.round() } else { x }
                        })
                        .collect();
                    let logits = b.input_with(Rows::Tokens, experts, HostTensor::F32(data));
                    let ids = b.output(Rows::Tokens, k, ElementType::U32);
                    let weights = b.output(Rows::Tokens, k, ElementType::F32);
                    cases.push(b.build(Self { logits, k, ids, weights }));
                }
            }
        }
        cases
    }
}
