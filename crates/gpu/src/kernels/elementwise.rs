//! Element by element: embedding rows, norms, sums, gates.

use lily_ops::ElementType;

use crate::kernel_args;
use crate::kernels::common::{Context, DeviceWeight, LAST_SAMPLED, Matrix, SLAB_UNIT};
use crate::list::{Access, Binding, Operand, Recorder};

kernel_args! {
    /// Of `embed`.
    pub struct EmbedArgs {
        /// The table.
        table: Matrix,
        /// The token that stands for the one sampled last.
        last_sampled: u32,
    }

    /// Of `rms_norm`.
    pub struct NormArgs {
        /// Where the weight lies in its slab, in units of 16 bytes.
        weight: u32,
        /// Elements of a row.
        cols: u32,
        /// Added to the mean of squares.
        eps: f32,
    }

    /// Of kernels over a number of elements.
    pub struct CountArgs {
        /// Elements.
        count: u32,
    }
}

/// Threads of a threadgroup.
const THREADS: u32 = 256;

/// Elements of a threadgroup that takes four a thread.
const BLOCK: u32 = 4 * THREADS;

fn read(operand: Operand) -> Binding {
    Binding::new(operand, Access::Read)
}

fn write(operand: Operand) -> Binding {
    Binding::new(operand, Access::Write)
}

fn constant(operand: Operand) -> Binding {
    Binding::new(operand, Access::Constant)
}

/// Elements of an operand.
fn count(operand: Operand) -> u32 {
    (operand.bytes / operand.element.size() as u64) as u32
}

/// The row of `table` for the token of each row of the step, f32.
pub fn embed(r: &mut Recorder, c: &Context, table: &DeviceWeight, out: Operand) {
    let rows = c.step.rows();
    let Matrix { rows: vocab, cols, .. } = table.matrix;
    debug_assert!(out.element == ElementType::F32 && cols.is_multiple_of(8));
    let tables = c.tables;
    let bindings = vec![
        read(tables.tokens),
        read(tables.row_segments),
        read(tables.segments),
        read(tables.headers),
        constant(table.slab),
        write(out),
    ];
    let args = EmbedArgs { table: table.matrix, last_sampled: LAST_SAMPLED };
    let row = table.bytes / u64::from(vocab.max(1)) + 4 * u64::from(cols);
    let groups = [(cols / 8).div_ceil(THREADS), rows, 1];
    r.dispatch("embed", groups, THREADS, bindings, &args, u64::from(rows) * row);
}

/// RMS norm of `rows` rows of the residual stream: f32 to bf16.
pub fn rms_norm(
    r: &mut Recorder,
    _c: &Context,
    x: Operand,
    weight: &DeviceWeight,
    eps: f32,
    out: Operand,
    rows: u32,
) {
    let cols = weight.matrix.cols;
    debug_assert!(x.element == ElementType::F32 && out.element == ElementType::Bf16);
    debug_assert!(cols.is_multiple_of(4) && weight.matrix.format == 3);
    let args = NormArgs { weight: weight.matrix.codes, cols, eps };
    let bindings = vec![read(x), constant(weight.slab), write(out)];
    let traffic = u64::from(rows) * u64::from(cols) * 6 + u64::from(cols) * 4;
    r.dispatch("rms_norm", [rows, 1, 1], THREADS, bindings, &args, traffic);
}

fn flat(r: &mut Recorder, kernel: &'static str, inputs: &[Operand], out: Operand, traffic: u64) {
    let args = CountArgs { count: count(out) };
    let groups = [args.count.div_ceil(BLOCK), 1, 1];
    let bindings = inputs.iter().map(|x| read(*x)).chain([write(out)]).collect();
    r.dispatch(kernel, groups, THREADS, bindings, &args, traffic);
}

/// `out = a + b`: a branch's result (bf16) onto the residual stream (f32). As many elements as `out` has.
pub fn add(r: &mut Recorder, _c: &Context, a: Operand, b: Operand, out: Operand) {
    debug_assert!(a.element == ElementType::F32 && b.element == ElementType::Bf16);
    debug_assert!(out.element == ElementType::F32);
    flat(r, "add_rows", &[a, b], out, a.bytes + b.bytes + out.bytes);
}

/// `out = silu(gate) · up`, all bf16. As many elements as `out` has.
pub fn swiglu(r: &mut Recorder, _c: &Context, gate: Operand, up: Operand, out: Operand) {
    debug_assert!([gate, up, out].iter().all(|x| x.element == ElementType::Bf16));
    flat(r, "swiglu", &[gate, up], out, gate.bytes + up.bytes + out.bytes);
}

/// `out = x · sigmoid(gate)`, where the gate of a head lies behind its query in `qg`; all bf16.
pub fn attention_gate(r: &mut Recorder, c: &Context, x: Operand, qg: Operand, out: Operand) {
    debug_assert!([x, qg, out].iter().all(|x| x.element == ElementType::Bf16));
    debug_assert!(count(x).is_multiple_of(c.shape.head_dim));
    flat(r, "attention_gate", &[x, qg], out, x.bytes + qg.bytes / 2 + out.bytes);
}

/// The rows of the residual stream whose logits are asked for; `width` elements a row, a multiple of 4.
pub fn gather_rows(r: &mut Recorder, c: &Context, x: Operand, out: Operand, width: u32) {
    debug_assert!(x.element == ElementType::F32 && out.element == ElementType::F32);
    debug_assert!(width.is_multiple_of(4));
    let rows = c.step.outputs;
    let bindings = vec![read(x), read(c.tables.output_rows), write(out)];
    let traffic = u64::from(rows) * (8 * u64::from(width) + 4);
    let groups = [width.div_ceil(BLOCK), rows, 1];
    r.dispatch("gather_rows", groups, THREADS, bindings, &CountArgs { count: width }, traffic);
}

/// Whether kernels can read a weight row by row in pieces of 16 bytes; if not, why.
pub fn supports(weight: &DeviceWeight) -> Result<(), String> {
    let Matrix { cols, format, .. } = weight.matrix;
    let multiple = if format < 2 { 64 } else { 8 };
    match cols.is_multiple_of(multiple) && SLAB_UNIT == 16 {
        true => Ok(()),
        false => Err(format!("rows of {cols} elements; kernels take multiples of {multiple}")),
    }
}
