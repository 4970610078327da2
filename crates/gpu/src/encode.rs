//! One operation of a plan to dispatches: the unfused form of each.

use lily_ops::{ElementType, Op, Plan, ValueId, WeightId};

use crate::kernels::attention::{Attend, Prep, attention, attention_prep, attention_scratch_bytes};
use crate::kernels::common::{Context, DeviceWeight};
use crate::list::{Operand, Recorder};
use crate::scratch::Scratch;

/// What the operands of a plan are bound to while a list is recorded.
#[derive(Debug)]
pub struct Bound<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// Each value, in the element type of [`elements`](crate::values::elements).
    pub values: &'a [Operand],
    /// Each weight.
    pub weights: &'a [DeviceWeight],
    /// Work space for what is no value of the plan.
    pub scratch: &'a mut Scratch,
}

impl Bound<'_> {
    /// A value.
    pub fn value(&self, id: ValueId) -> Operand {
        self.values[id.0 as usize]
    }

    /// A weight.
    pub fn weight(&self, id: WeightId) -> &DeviceWeight {
        &self.weights[id.0 as usize]
    }

    /// Elements a row of a value.
    pub fn width(&self, id: ValueId) -> u32 {
        self.plan.value(id).width as u32
    }

    /// Rows of a value in the step.
    pub fn rows(&self, c: &Context, id: ValueId) -> u32 {
        let rows = self.plan.value(id).rows;
        rows.count(c.step.rows() as usize, c.step.outputs as usize) as u32
    }
}

/// Records an operation, each with kernels of its own.
///
/// An error names what has no kernel.
pub fn op(r: &mut Recorder, c: &Context, b: &mut Bound, op: &Op) -> Result<(), String> {
    match op {
        Op::AttentionPrep(op) => {
            let x = Prep {
                qg: b.value(op.qg),
                k: b.value(op.k),
                v: b.value(op.v),
                q_norm: b.weight(op.q_norm),
                k_norm: b.weight(op.k_norm),
                kv_heads: b.plan.state.kv_heads as u32,
                out: b.value(op.out),
            };
            attention_prep(r, c, op, &x);
        }
        Op::Attention(op) => {
            let bytes = attention_scratch_bytes(c, op.heads as u32);
            let scratch = b.scratch.take(bytes / 4, ElementType::F32);
            let (q, out) = (b.value(op.q), b.value(op.out));
            let attend = Attend { q, heads: op.heads as u32, layer: op.layer, out };
            attention(r, c, &attend, scratch);
        }
        _ => return Err(format!("{} has no kernel", op.name())),
    }
    Ok(())
}
