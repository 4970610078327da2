//! One operation of a plan to dispatches: the unfused form of each.

use lily_ops::{Op, Plan, ValueId, WeightId};

use crate::kernels::common::{Context, DeviceWeight};
use crate::kernels::elementwise;
use crate::kernels::gemv::{self, Epilogue, GemvInput, GemvOutput};
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
        Op::Embed(op) => {
            let table = b.weight(op.table);
            elementwise::supports(table)?;
            elementwise::embed(r, c, table, b.value(op.out));
        }
        Op::RmsNorm(op) => {
            let (x, out, rows) = (b.value(op.x), b.value(op.out), b.rows(c, op.x));
            elementwise::rms_norm(r, c, x, b.weight(op.weight), op.eps, out, rows);
        }
        Op::Linear(op) if b.rows(c, op.x) <= gemv::MAX_ROWS => {
            let (weight, rows) = (b.weight(op.weight), b.rows(c, op.x));
            elementwise::supports(weight)?;
            let input = GemvInput { x: b.value(op.x), norm: None, rows };
            let out = GemvOutput { weight, out: b.value(op.out), epilogue: Epilogue::Store };
            gemv::gemv(r, c, input, &[out]);
        }
        Op::SwiGlu(op) => {
            elementwise::swiglu(r, c, b.value(op.gate), b.value(op.up), b.value(op.out));
        }
        Op::Add(op) => elementwise::add(r, c, b.value(op.a), b.value(op.b), b.value(op.out)),
        Op::AttentionGate(op) => {
            elementwise::attention_gate(r, c, b.value(op.x), b.value(op.qg), b.value(op.out));
        }
        Op::GatherRows(op) => {
            elementwise::gather_rows(r, c, b.value(op.x), b.value(op.out), b.width(op.x));
        }
        op => return Err(format!("{} has no kernel", op.name())),
    }
    Ok(())
}
