//! Bytes a program takes, from the plan alone.

use lily_device::{Limits, MemoryNeed, ScratchLayout};
use lily_ops::{Op, Plan, ValueId};

use super::shapes::{attention_shape, code_kind, is_vector};
use crate::kernels::attention::AttentionScratch;
use crate::kernels::linear::{RowGroup, scratch_bytes};
use crate::kernels::quantize::GROUP;

/// The operand that a kernel overwrites with its result.
pub(super) fn in_place(op: &Op) -> Option<ValueId> {
    match op {
        Op::Add(op) => Some(op.a),
        Op::SwiGlu(op) => Some(op.gate),
        Op::AttentionGate(op) => Some(op.x),
        Op::QkL2Norm(op) => Some(op.x),
        Op::GatedRmsNorm(op) => Some(op.y),
        Op::MoeCombine(op) => Some(op.residual),
        _ => None,
    }
}

/// Places of all values.
pub(super) fn layout(plan: &Plan, limits: &Limits) -> ScratchLayout {
    ScratchLayout::new(plan, limits.rows, limits.outputs, in_place)
}

/// Work space beside the values: what grows with the rows of a step. In elements, but for the codes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WorkSpace {
    /// Most bytes of codes of an input that is quantized.
    pub codes: usize,
    /// Most groups of an input that is quantized.
    pub groups: usize,
    /// Largest result of an up projection.
    pub up: usize,
    /// Rows routed to experts.
    pub routed: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Rotary angles.
    pub angles: usize,
}

impl WorkSpace {
    pub fn new(plan: &Plan, limits: &Limits) -> Self {
        let mut space = Self::default();
        let count = |id: ValueId| {
            let value = plan.value(id);
            value.rows.count(limits.rows, limits.outputs).saturating_mul(value.width)
        };
        for node in plan.nodes() {
            let input = match &node.op {
                Op::Linear(op) => Some((op.x, op.activation)),
                Op::ExpertsIn(op) => Some((op.x, op.activation)),
                Op::ExpertsOut(op) => Some((op.x, op.activation)),
                _ => None,
            };
            if let Some((count, kind)) = input.and_then(|(x, a)| Some((count(x), code_kind(a)?))) {
                space.codes = space.codes.max(count.saturating_mul(kind.planes()));
                space.groups = space.groups.max(count / GROUP);
            }
            match &node.op {
                Op::ExpertsIn(op) => {
                    space.up = space.up.max(count(op.out));
                    space.routed = space.routed.max(count(op.ids));
                    space.experts = space.experts.max(plan.weight(op.gate).matrices);
                }
                Op::AttentionPrep(op) => {
                    // Cosines and sines of half as many angles.
                    space.angles = space.angles.max(limits.rows.saturating_mul(op.rope.dims / 2));
                }
                _ => {}
            }
        }
        space
    }

    /// Bytes, with two quantized inputs held at once.
    pub fn bytes(&self) -> u64 {
        sum([
            product(self.codes, 2),
            product(self.groups, 2 * 8),
            product(self.up, 4),
            product(self.routed, 8),
            product(self.experts + 1, 4),
            product(self.experts, size_of::<RowGroup>()),
            product(self.angles, 8),
        ])
    }
}

/// Absurd limits give absurd figures, which are then refused; they must not wrap into plausible ones.
fn product(count: usize, bytes: usize) -> u64 {
    (count as u64).saturating_mul(bytes as u64)
}

fn sum<const N: usize>(parts: [u64; N]) -> u64 {
    parts.into_iter().fold(0, u64::saturating_add)
}

/// Bytes that each thread keeps for the widest matrix.
fn thread_bytes(plan: &Plan) -> u64 {
    plan.weights.iter().map(|w| scratch_bytes(w.cols) as u64).max().unwrap_or(0)
}

/// Bytes that [`prepare`](lily_device::Device::prepare) allocates, and what grows while steps run.
pub(crate) fn memory_need(plan: &Plan, limits: &Limits, threads: usize) -> MemoryNeed {
    let state = &plan.state;
    let attention = attention_shape(plan)
        .map_or(0, |(shape, _)| AttentionScratch::bytes(&shape, threads) as u64);
    let vectors = plan.weights.iter().filter(|w| is_vector(plan, w)).map(|w| w.rows * w.cols * 4);
    MemoryNeed {
        kv: product(limits.pages, state.page_bytes()),
        // Twice where a step can be taken back.
        state: product(limits.slots, state.recurrent_bytes() + state.conv_bytes())
            .saturating_mul(1 + u64::from(limits.undo)),
        scratch: sum([
            layout(plan, limits).bytes(),
            WorkSpace::new(plan, limits).bytes(),
            attention,
            (threads as u64).saturating_mul(thread_bytes(plan)),
            // Room for the logits of one row a slot.
            product(limits.slots, plan.vocab * 4),
        ]),
        weights: vectors.sum::<usize>() as u64,
    }
}
