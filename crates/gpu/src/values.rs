//! Element types of values on a GPU.

use lily_ops::{ElementType, Op, Plan};

/// The element type in which a GPU keeps each value of a plan: f32 for the residual stream, for what steers
/// the rest (routing, gates of the delta rule) and for logits; bf16 for what a matrix or attention reads or writes.
pub fn elements(plan: &Plan) -> Vec<ElementType> {
    let mut elements = vec![ElementType::Bf16; plan.values.len()];
    for (value, element) in plan.values.iter().zip(&mut elements) {
        if value.element == ElementType::U32 {
            *element = ElementType::U32;
        }
    }
    for node in plan.nodes() {
        let full = match &node.op {
            Op::Embed(op) => vec![op.out],
            Op::RmsNorm(op) => vec![op.x],
            Op::Add(op) => vec![op.a, op.out],
            Op::GatherRows(op) => vec![op.x, op.out],
            Op::MoeCombine(op) => vec![op.residual, op.weights, op.shared_gate, op.out],
            Op::Router(op) => vec![op.logits, op.weights],
            Op::DeltaGates(op) => vec![op.a, op.b, op.decay, op.beta],
            Op::DeltaScan(op) => vec![op.decay, op.beta],
            _ => Vec::new(),
        };
        for id in full {
            elements[id.0 as usize] = ElementType::F32;
        }
    }
    // A plan of one operation, as test cases have, has no logits.
    if !plan.body.is_empty() && plan.head.iter().any(|n| n.op.writes().contains(&plan.logits)) {
        elements[plan.logits.0 as usize] = ElementType::F32;
    }
    elements
}
