//! One operation of a plan to dispatches: the unfused form of each.

use lily_ops::{Op, Plan, ValueId, WeightId};

use crate::kernels::common::{Context, DeviceWeight};
use crate::kernels::delta;
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
    let layers = b.plan.state.recurrent_layers;
    match op {
        Op::CausalConv(op) => {
            let (x, out) = (b.value(op.x), b.value(op.out));
            delta::causal_conv(r, c, x, b.weight(op.weight), op.layer, layers, out);
        }
        Op::QkL2Norm(op) => delta::qk_l2_norm(r, c, b.value(op.x), op.heads, b.value(op.out)),
        Op::DeltaGates(op) => {
            let [a, beta_in, decay, beta] = [op.a, op.b, op.decay, op.beta].map(|v| b.value(v));
            let (a_log, dt_bias) = (b.weight(op.a_log), b.weight(op.dt_bias));
            delta::delta_gates(r, c, a, beta_in, a_log, dt_bias, decay, beta);
        }
        Op::DeltaScan(op) => {
            let [qkv, decay, beta, out] = [op.qkv, op.decay, op.beta, op.out].map(|v| b.value(v));
            let inputs = delta::ScanInputs { qkv, decay, beta, key_heads: op.key_heads };
            delta::delta_scan(r, c, inputs, op.layer, layers, out);
        }
        Op::GatedRmsNorm(op) => {
            let [y, z, out] = [op.y, op.z, op.out].map(|v| b.value(v));
            delta::gated_rms_norm(r, c, y, z, b.weight(op.weight), op.eps, out);
        }
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
