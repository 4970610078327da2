//! One operation of a plan to dispatches: the unfused form of each.

use lily_ops::{Op, Plan, ValueId, WeightId};

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
pub fn op(_r: &mut Recorder, _c: &Context, _b: &mut Bound, op: &Op) -> Result<(), String> {
    Err(format!("{} has no kernel", op.name()))
}
