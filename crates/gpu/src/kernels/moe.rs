//! Products with the experts that each row selected, and their weighted sum.

use lily_ops::ElementType;

use crate::kernel_args;
use crate::kernels::common::{Context, DeviceWeight, Matrix, StepShape};
use crate::kernels::gemm::{Source, TILE_THREADS};
use crate::kernels::route::Routes;
use crate::list::{Access, Binding, Operand, Recorder};
use crate::scratch::Scratch;

kernel_args! {
    /// Of the `experts_in_*` and `decode_experts_in_*` kernels.
    pub struct ExpertsInArgs {
        /// Gate projections.
        gate: Matrix,
        /// Up projections.
        up: Matrix,
        /// Selected experts a row.
        k: u32,
    }

    /// Of the `experts_out_*` kernels.
    pub struct ExpertsOutArgs {
        /// Down projections.
        down: Matrix,
    }

    /// Of the `decode_experts_*` kernels with one projection.
    pub struct ExpertsArgs {
        /// The projections.
        w: Matrix,
        /// Entries that share a row of activations.
        share: u32,
    }

    /// Of the `decode_experts_out_*` kernels.
    pub struct ExpertsSumArgs {
        /// Down projections.
        down: Matrix,
        /// The shared expert's.
        shared_down: Matrix,
        /// Selected experts a row.
        k: u32,
    }

    /// Of `moe_combine`.
    pub struct CombineArgs {
        /// Selected experts a row.
        k: u32,
        /// Elements of a row.
        width: u32,
    }

    /// Of `gate_product`.
    pub struct GateProductArgs {
        /// Elements.
        count: u32,
    }
}

/// Whether that many rows are computed row by row; more are grouped by expert.
pub fn few(rows: u32) -> bool {
    rows <= StepShape::DECODE_ROWS
}

/// A kernel of each format, and one for formats that are rare or differ among its weights.
type Kernels = [&'static str; 3];

fn pick(kernels: Kernels, formats: [u32; 2]) -> &'static str {
    match formats {
        [0, 0] => kernels[0],
        [1, 1] => kernels[1],
        _ => kernels[2],
    }
}

/// Bytes of the weights that `entries` routed rows select, at most.
fn selected_bytes(weight: &DeviceWeight, entries: u32) -> u64 {
    let matrices = u64::from(weight.matrices.max(1));
    weight.bytes / matrices * matrices.min(entries.into())
}

fn constant(weight: &DeviceWeight) -> Binding {
    Binding::new(weight.slab, Access::Constant)
}

fn read(operand: Operand) -> Binding {
    Binding::new(operand, Access::Read)
}

fn write(operand: Operand) -> Binding {
    Binding::new(operand, Access::Write)
}

/// Gate and up projections of the selected experts, and the gated activation.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsIn<'a> {
    /// bf16 `[rows][cols]`.
    pub x: Operand,
    /// u32 `[rows][k]`.
    pub ids: Operand,
    /// Rows.
    pub rows: u32,
    /// Selected experts a row.
    pub k: u32,
    /// Gate projections.
    pub gate: &'a DeviceWeight,
    /// Up projections.
    pub up: &'a DeviceWeight,
    /// bf16 `[rows · k][width]`.
    pub out: Operand,
}

/// Records the experts' in-projections; `routes` of the same ids for more than a [`few`] rows.
pub fn experts_in(
    r: &mut Recorder,
    c: &Context,
    scratch: &mut Scratch,
    routes: Option<&Routes>,
    op: &ExpertsIn,
) {
    match routes {
        Some(routes) => grouped_experts_in(r, c, scratch, routes, op),
        None if c.tuning.fuse_experts_in => decode_experts_in(r, op),
        None => separate_experts_in(r, scratch, op),
    }
}

fn grouped_experts_in(
    r: &mut Recorder,
    c: &Context,
    scratch: &mut Scratch,
    routes: &Routes,
    op: &ExpertsIn,
) {
    let entries = op.rows * op.k;
    let gate = Source::new(r, c, op.gate, scratch);
    let up = Source::new(r, c, op.up, scratch);
    let (g, u) = (gate.weight.matrix, up.weight.matrix);
    let kernels = ["experts_in_q4", "experts_in_q8", "experts_in_any"];
    r.dispatch(
        pick(kernels, [g.format, u.format]),
        [g.rows.div_ceil(32), routes.most_blocks, 1],
        TILE_THREADS,
        vec![
            gate.binding(),
            up.binding(),
            read(op.x),
            read(routes.order),
            read(routes.blocks),
            write(op.out),
        ],
        &ExpertsInArgs { gate: g, up: u, k: op.k },
        selected_bytes(&gate.weight, entries)
            + selected_bytes(&up.weight, entries)
            + op.x.bytes
            + routes.order.bytes
            + routes.blocks.bytes
            + op.out.bytes,
    );
}

fn decode_experts_in(r: &mut Recorder, op: &ExpertsIn) {
    let entries = op.rows * op.k;
    let (gate, up) = (op.gate.matrix, op.up.matrix);
    let kernels = ["decode_experts_in_q4", "decode_experts_in_q8", "decode_experts_in_any"];
    r.dispatch(
        pick(kernels, [gate.format, up.format]),
        [gate.rows.div_ceil(8), entries, 1],
        128,
        vec![constant(op.gate), constant(op.up), read(op.x), read(op.ids), write(op.out)],
        &ExpertsInArgs { gate, up, k: op.k },
        selected_bytes(op.gate, entries)
            + selected_bytes(op.up, entries)
            + op.x.bytes
            + op.ids.bytes
            + op.out.bytes,
    );
}

/// Without fusion: both projections go to memory, and their product is a kernel of its own.
fn separate_experts_in(r: &mut Recorder, scratch: &mut Scratch, op: &ExpertsIn) {
    let entries = op.rows * op.k;
    let count = u64::from(entries) * u64::from(op.gate.matrix.rows);
    let gate = scratch.take(count, ElementType::Bf16);
    let up = scratch.take(count, ElementType::Bf16);
    decode_experts(r, op.gate, op.x, op.ids, gate, entries, op.k);
    decode_experts(r, op.up, op.x, op.ids, up, entries, op.k);
    r.dispatch(
        "gate_product",
        [(count as u32).div_ceil(256), 1, 1],
        256,
        vec![read(gate), read(up), write(op.out)],
        &GateProductArgs { count: count as u32 },
        count * 6,
    );
}

/// One projection of each entry's expert.
fn decode_experts(
    r: &mut Recorder,
    weight: &DeviceWeight,
    x: Operand,
    ids: Operand,
    out: Operand,
    entries: u32,
    share: u32,
) {
    let w = weight.matrix;
    let kernels = ["decode_experts_q4", "decode_experts_q8", "decode_experts_any"];
    r.dispatch(
        pick(kernels, [w.format; 2]),
        [w.rows.div_ceil(8), entries, 1],
        128,
        vec![constant(weight), read(x), read(ids), write(out)],
        &ExpertsArgs { w, share },
        selected_bytes(weight, entries) + x.bytes + ids.bytes + out.bytes,
    );
}

/// Down projection of the selected experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsOut<'a> {
    /// bf16 `[rows · k][cols]`.
    pub x: Operand,
    /// u32 `[rows][k]`.
    pub ids: Operand,
    /// Rows.
    pub rows: u32,
    /// Selected experts a row.
    pub k: u32,
    /// Down projections.
    pub down: &'a DeviceWeight,
    /// bf16 `[rows · k][width]`.
    pub out: Operand,
}

/// Records the experts' down projections; `routes` of the same ids for more than a [`few`] rows.
pub fn experts_out(
    r: &mut Recorder,
    c: &Context,
    scratch: &mut Scratch,
    routes: Option<&Routes>,
    op: &ExpertsOut,
) {
    let entries = op.rows * op.k;
    let Some(routes) = routes else {
        return decode_experts(r, op.down, op.x, op.ids, op.out, entries, 1);
    };
    let down = Source::new(r, c, op.down, scratch);
    let d = down.weight.matrix;
    r.dispatch(
        pick(["experts_out_q4", "experts_out_q8", "experts_out_any"], [d.format; 2]),
        [d.rows.div_ceil(64), routes.most_blocks, 1],
        TILE_THREADS,
        vec![down.binding(), read(op.x), read(routes.order), read(routes.blocks), write(op.out)],
        &ExpertsOutArgs { down: d },
        selected_bytes(&down.weight, entries)
            + op.x.bytes
            + routes.order.bytes
            + routes.blocks.bytes
            + op.out.bytes,
    );
}

/// The experts' weighted sum, the shared expert and the residual.
#[derive(Clone, Copy, Debug)]
pub struct Combine {
    /// f32 `[rows][width]`.
    pub residual: Operand,
    /// bf16 `[rows · k][width]`.
    pub routed: Operand,
    /// f32 `[rows][k]`.
    pub weights: Operand,
    /// bf16 `[rows][width]`.
    pub shared: Operand,
    /// f32 `[rows]`.
    pub shared_gate: Operand,
    /// f32 `[rows][width]`.
    pub out: Operand,
    /// Rows.
    pub rows: u32,
    /// Selected experts a row.
    pub k: u32,
    /// Elements of a row.
    pub width: u32,
}

/// Records the weighted sum.
pub fn combine(r: &mut Recorder, _c: &Context, op: &Combine) {
    let inputs = [op.residual, op.routed, op.weights, op.shared, op.shared_gate];
    let mut bindings: Vec<Binding> = inputs.map(read).into();
    bindings.push(write(op.out));
    let traffic = inputs.iter().map(|o| o.bytes).sum::<u64>() + op.out.bytes;
    let args = CombineArgs { k: op.k, width: op.width };
    // A row of the real model is one threadgroup.
    let groups = [op.width.div_ceil(8 * 256), op.rows, 1];
    r.dispatch("moe_combine", groups, 256, bindings, &args, traffic);
}

/// Decode: all down projections, the weighted sum and the residual.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsSum<'a> {
    /// The routed experts' activations, bf16 `[rows · k][cols]`.
    pub x: Operand,
    /// u32 `[rows][k]`.
    pub ids: Operand,
    /// f32 `[rows][k]`.
    pub weights: Operand,
    /// Rows.
    pub rows: u32,
    /// Selected experts a row.
    pub k: u32,
    /// Down projections.
    pub down: &'a DeviceWeight,
    /// The shared expert's activations, bf16 `[rows][shared cols]`.
    pub shared_x: Operand,
    /// Its down projection.
    pub shared_down: &'a DeviceWeight,
    /// f32 `[rows]`.
    pub shared_gate: Operand,
    /// f32 `[rows][width]`.
    pub residual: Operand,
    /// f32 `[rows][width]`.
    pub out: Operand,
}

/// Records the chain of down projections, shared expert and weighted sum as one launch, for a [`few`] rows.
pub fn decode_experts_out(r: &mut Recorder, _c: &Context, op: &ExpertsSum) {
    let (down, shared_down) = (op.down.matrix, op.shared_down.matrix);
    let kernels = ["decode_experts_out_q4", "decode_experts_out_q8", "decode_experts_out_any"];
    let inputs =
        [op.x, op.ids, op.weights, op.shared_x, op.shared_gate, op.residual].map(|o| o.bytes);
    r.dispatch(
        pick(kernels, [down.format, shared_down.format]),
        [down.rows.div_ceil(8), op.rows, 1],
        128,
        vec![
            constant(op.down),
            constant(op.shared_down),
            read(op.x),
            read(op.ids),
            read(op.weights),
            read(op.shared_x),
            read(op.shared_gate),
            read(op.residual),
            write(op.out),
        ],
        &ExpertsSumArgs { down, shared_down, k: op.k },
        selected_bytes(op.down, op.rows * op.k)
            + op.shared_down.bytes
            + inputs.iter().sum::<u64>()
            + op.out.bytes,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_by_format() {
        let kernels = ["q4", "q8", "any"];
        for (formats, want) in
            [([0, 0], "q4"), ([1, 1], "q8"), ([0, 1], "any"), ([2, 2], "any"), ([3, 3], "any")]
        {
            assert_eq!(pick(kernels, formats), want);
        }
    }

    #[test]
    fn a_few_rows_go_row_by_row() {
        // Up to 8 rows the same experts are rarely chosen twice, so that grouping saves no bytes.
        assert!(few(1) && few(8) && !few(9));
    }
}
