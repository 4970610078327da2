//! Products with the experts that each row selected, and their weighted sum.

use std::mem::offset_of;

use lily_ops::ElementType;

use crate::kernel_args;
use crate::kernels::common::{Context, DeviceWeight, Matrix, StepShape};
use crate::kernels::gemm::{Source, TILE_THREADS};
use crate::kernels::route::Routes;
use crate::kernels::{elementwise, gemv};
use crate::list::{Access, Binding, Operand, Recorder};
use crate::scratch::Scratch;

kernel_args! {
    /// Of the `experts_in_*` kernels.
    pub struct ExpertsInArgs {
        /// Gate projections.
        gate: Matrix,
        /// Up projections.
        up: Matrix,
        /// Selected experts a row.
        k: u32,
        /// Blocks of rows in front of the dispatch's, where it is one of several.
        first: u32,
    }

    /// Of the `experts_out_*` kernels.
    pub struct ExpertsOutArgs {
        /// Down projections.
        down: Matrix,
        /// Blocks of rows in front of the dispatch's, where it is one of several.
        first: u32,
    }

    /// Of `decode_experts` and `decode_experts_mma`.
    pub struct ExpertsArgs {
        /// The projections, of gates if they are paired.
        a: Matrix,
        /// What goes up, if they are paired.
        b: Matrix,
        /// Entries that share a row of activations.
        share: u32,
        /// Lanes that share a row of the matrix; of `decode_experts_mma` simdgroups that share a tile.
        lanes: u32,
        /// Whether the result is `silu(a) · b`.
        paired: u32,
        /// Of `decode_experts_mma`: blocks of rows of a matrix.
        blocks: u32,
        /// Likewise: blocks of all entries.
        tasks: u32,
    }

    /// Of `decode_experts_out` and `decode_experts_out_mma`.
    pub struct ExpertsSumArgs {
        /// Down projections.
        down: Matrix,
        /// The shared expert's.
        shared_down: Matrix,
        /// Selected experts a row.
        k: u32,
        /// Lanes that share a column, but of `decode_experts_out_mma`.
        lanes: u32,
    }

    /// Of `moe_combine`.
    pub struct CombineArgs {
        /// Selected experts a row.
        k: u32,
        /// Elements of a row.
        width: u32,
    }
}

/// Whether that many rows are computed row by row; more are grouped by expert.
pub fn few(rows: u32) -> bool {
    rows <= StepShape::DECODE_ROWS
}

/// Rows at most whose experts a step computes row by row.
pub fn most_rows(c: &Context) -> u32 {
    match c.step.is_decode() {
        true => StepShape::DECODE_ROWS,
        false => c.profile.thresholds.expert_rows,
    }
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

/// Read before the stage before has ended, where that does not write it.
fn ahead(operand: Operand) -> Binding {
    Binding::new(operand, Access::ReadAhead)
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

/// Records the experts' in-projections; `routes` of the same ids for more than [`most_rows`].
pub fn experts_in(
    r: &mut Recorder,
    c: &Context,
    scratch: &mut Scratch,
    routes: Option<&Routes>,
    op: &ExpertsIn,
) {
    match routes {
        Some(routes) => grouped_experts_in(r, c, scratch, routes, op),
        None if c.tuning.fuse_experts_in && can_pair(op.gate, op.up) => decode_experts_in(r, c, op),
        None => separate_experts_in(r, c, scratch, op),
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
        &ExpertsInArgs { gate: g, up: u, k: op.k, first: 0 },
        selected_bytes(&gate.weight, entries)
            + selected_bytes(&up.weight, entries)
            + op.x.bytes
            + routes.order.bytes
            + routes.blocks.bytes
            + op.out.bytes,
    );
    r.worth(2 * u64::from(entries) * u64::from(g.rows) * u64::from(g.cols));
    r.may_cut(1, offset_of!(ExpertsInArgs, first));
}

/// Whether one kernel can read both weights: their slabs may differ.
fn can_pair(gate: &DeviceWeight, up: &DeviceWeight) -> bool {
    let shape = |w: &Matrix| (w.rows, w.cols, w.format);
    shape(&gate.matrix) == shape(&up.matrix)
}

fn decode_experts_in(r: &mut Recorder, c: &Context, op: &ExpertsIn) {
    let (gate, up) = (op.gate, op.up);
    decode_experts(r, c, [gate, up], op.x, op.ids, op.out, op.rows * op.k, op.k);
}

/// Both projections go to memory, and their product is a kernel of its own.
fn separate_experts_in(r: &mut Recorder, c: &Context, scratch: &mut Scratch, op: &ExpertsIn) {
    let entries = op.rows * op.k;
    let count = u64::from(entries) * u64::from(op.gate.matrix.rows);
    let [gate, up] = [op.gate, op.up].map(|weight| {
        let out = scratch.take(count, ElementType::Bf16);
        decode_experts(r, c, [weight, weight], op.x, op.ids, out, entries, op.k);
        out
    });
    elementwise::swiglu(r, c, gate, up, op.out);
}

/// Columns of a threadgroup of `decode_experts`: 8 simdgroups, each with 4 rows of weights a lane.
fn block(lanes: u32, paired: bool) -> u32 {
    8 * (32 / lanes) * if paired { 2 } else { 4 }
}

/// One projection of each entry's expert, or a pair of them.
#[allow(clippy::too_many_arguments)] // what an operation has
fn decode_experts(
    r: &mut Recorder,
    c: &Context,
    [a, b]: [&DeviceWeight; 2],
    x: Operand,
    ids: Operand,
    out: Operand,
    entries: u32,
    share: u32,
) {
    let paired = a != b;
    let units = gemv::mma_takes(c, a.matrix.cols) && a.matrix.format == 0 && b.matrix.format == 0;
    let lanes =
        if units { gemv::split(&a.matrix, paired) } else { gemv::lanes(c.profile, &a.matrix) };
    let block = if units { gemv::mma_block(&a.matrix, paired) } else { block(lanes, paired) };
    let blocks = a.matrix.rows.div_ceil(block);
    let tasks = blocks * entries;
    // Threadgroups that stay have the next block's weights on their way.
    let (kernel, groups) = match units {
        true => ("decode_experts_mma", [tasks.min(c.profile.cores * gemv::MMA_RESIDENT), 1, 1]),
        false => ("decode_experts", [blocks, entries, 1]),
    };
    let weights = selected_bytes(a, entries) + if paired { selected_bytes(b, entries) } else { 0 };
    r.dispatch(
        kernel,
        groups,
        256,
        vec![
            constant(a),
            constant(b),
            if units { ahead(x) } else { read(x) },
            read(ids),
            write(out),
        ],
        &ExpertsArgs {
            a: a.matrix,
            b: b.matrix,
            share,
            lanes,
            paired: paired.into(),
            blocks,
            tasks,
        },
        weights + x.bytes + ids.bytes + out.bytes,
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

/// Records the experts' down projections; `routes` of the same ids for more than [`most_rows`].
pub fn experts_out(
    r: &mut Recorder,
    c: &Context,
    scratch: &mut Scratch,
    routes: Option<&Routes>,
    op: &ExpertsOut,
) {
    let entries = op.rows * op.k;
    let Some(routes) = routes else {
        return decode_experts(r, c, [op.down; 2], op.x, op.ids, op.out, entries, 1);
    };
    let down = Source::new(r, c, op.down, scratch);
    let d = down.weight.matrix;
    r.dispatch(
        pick(["experts_out_q4", "experts_out_q8", "experts_out_any"], [d.format; 2]),
        [d.rows.div_ceil(64), routes.most_blocks, 1],
        TILE_THREADS,
        vec![down.binding(), read(op.x), read(routes.order), read(routes.blocks), write(op.out)],
        &ExpertsOutArgs { down: d, first: 0 },
        selected_bytes(&down.weight, entries)
            + op.x.bytes
            + routes.order.bytes
            + routes.blocks.bytes
            + op.out.bytes,
    );
    r.worth(u64::from(entries) * u64::from(d.rows) * u64::from(d.cols));
    r.may_cut(1, offset_of!(ExpertsOutArgs, first));
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

/// Elements of activations that a threadgroup of `decode_experts_out` has room for.
const SUM_ELEMENTS: u32 = 6144;

/// Lanes that share a column: the most that have whole packets of both matrices' rows, all the same number of them.
fn sum_lanes(down: &Matrix, shared_down: &Matrix) -> u32 {
    let packets = |m: &Matrix| m.cols / gemv::packet_elements(m.format);
    let common = packets(down) | packets(shared_down) | 32;
    1 << common.trailing_zeros()
}

/// Whether [`decode_experts_out`] takes these weights; if not, the operations are recorded one by one.
pub fn fits_sum(down: &DeviceWeight, shared_down: &DeviceWeight, rows: u32, k: u32) -> bool {
    let (d, s) = (&down.matrix, &shared_down.matrix);
    few(rows)
        && (d.format, d.rows) == (s.format, s.rows)
        && d.cols.is_multiple_of(gemv::packet_elements(d.format))
        && s.cols.is_multiple_of(gemv::packet_elements(s.format))
        && k.saturating_mul(d.cols).saturating_add(s.cols) <= SUM_ELEMENTS
}

/// Columns of a row of an expert that `decode_experts_out_mma` takes, and experts beside the shared one.
const SUM_UNITS: (u32, u32) = (512, 8);

/// Whether matrix units can take the sum.
fn sum_units(c: &Context, down: &Matrix, shared_down: &Matrix, k: u32) -> bool {
    let fits = |m: &Matrix| gemv::mma_takes(c, m.cols) && m.cols <= SUM_UNITS.0;
    fits(down) && fits(shared_down) && down.format == 0 && k <= SUM_UNITS.1
}

/// Records the chain of down projections, shared expert and weighted sum as one launch, for what [`fits_sum`].
pub fn decode_experts_out(r: &mut Recorder, c: &Context, op: &ExpertsSum) {
    let (down, shared_down) = (op.down.matrix, op.shared_down.matrix);
    let lanes = sum_lanes(&down, &shared_down);
    let (kernel, columns, threads) = match sum_units(c, &down, &shared_down, op.k) {
        true => ("decode_experts_out_mma", 16, (op.k + 1) * 32),
        false => ("decode_experts_out", 256 / lanes, 256),
    };
    let inputs = [op.x, op.ids, op.weights, op.shared_x, op.shared_gate, op.residual];
    let mut bindings = vec![constant(op.down), constant(op.shared_down)];
    bindings.extend(inputs.map(read));
    bindings[3] = ahead(op.ids);
    bindings.push(write(op.out));
    r.dispatch(
        kernel,
        [down.rows.div_ceil(columns), op.rows, 1],
        threads,
        bindings,
        &ExpertsSumArgs { down, shared_down, k: op.k, lanes },
        selected_bytes(op.down, op.rows * op.k)
            + op.shared_down.bytes
            + inputs.iter().map(|o| o.bytes).sum::<u64>()
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
    fn lanes_of_the_sum() {
        let matrix = |cols, format| Matrix { cols, format, ..bytemuck::Zeroable::zeroed() };
        for (down, shared, format, want) in [
            // The real model: 512 elements are 16 packets of 32.
            (512, 512, 0, 16),
            (512, 512, 1, 32),
            (512, 512, 2, 32),
            (64, 64, 0, 2),
            // 6 packets and 4: all lanes have as many.
            (192, 128, 0, 2),
            (96, 96, 0, 1),
        ] {
            assert_eq!(sum_lanes(&matrix(down, format), &matrix(shared, format)), want, "{down}");
        }
    }

    #[test]
    fn a_few_rows_go_row_by_row() {
        // Up to 8 rows the same experts are rarely chosen twice, so that grouping saves no bytes.
        assert!(few(1) && few(8) && !few(9));
    }
}
