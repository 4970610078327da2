//! Products with the experts that each row selected, and their weighted sum.

use std::mem::offset_of;

use lily_ops::ElementType;

use crate::kernel_args;
use crate::kernels::common::{Context, DeviceWeight, Matrix, StepShape};
use crate::kernels::gemm::{Source, TILE_THREADS, WIDE};
use crate::kernels::route::Routes;
use crate::kernels::{elementwise, gemv};
use crate::list::{Access, Binding, Operand, Recorder};
use crate::profile::Profile;
use crate::scratch::Scratch;
use crate::text::large_memory;

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

    /// Of `decode_experts`, `decode_experts_mma` and `decode_experts_mma_deep`.
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
        /// Of `decode_experts_mma_deep`: neighbouring tasks of a threadgroup.
        each: u32,
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

/// A kernel of grouped products, columns of its tiles, and its threads.
type Grouped = (&'static str, u32, u32);
/// A kernel of each format, and one for formats that are rare or differ among its weights.
type Kernels = [Grouped; 3];

const EXPERTS_IN: Kernels = [
    ("experts_in_q4", 64, TILE_THREADS),
    ("experts_in_q8", 64, TILE_THREADS),
    ("experts_in_any", 64, TILE_THREADS),
];
const EXPERTS_OUT: Kernels = [
    ("experts_out_q4", 64, TILE_THREADS),
    ("experts_out_q8", 64, TILE_THREADS),
    ("experts_out_any", 64, TILE_THREADS),
];
const EXPERTS_IN_MMA: Kernels = [
    ("experts_in_mma_q4", 128, TILE_THREADS),
    ("experts_in_mma_q8", 64, TILE_THREADS),
    ("experts_in_mma_any", 64, TILE_THREADS),
];
const EXPERTS_OUT_MMA: Kernels = [
    ("experts_out_mma_q4", 128, TILE_THREADS),
    ("experts_out_mma_q8", 64, TILE_THREADS),
    ("experts_out_mma_any", 64, TILE_THREADS),
];
const EXPERTS_IN_WGMMA: Grouped = ("experts_in_wgmma_q4", WIDE.0, WIDE.1);
const EXPERTS_OUT_WGMMA: Grouped = ("experts_out_wgmma_q4", WIDE.0, WIDE.1);

/// The kernel of grouped products on a device: by simdgroups, by `mma.sync`, by `wgmma`.
fn pick(
    profile: &Profile,
    simdgroups: Kernels,
    units: Kernels,
    wide: Grouped,
    formats: [u32; 2],
) -> Grouped {
    if profile.wgmma && formats == [0, 0] {
        return wide;
    }
    let kernels = if profile.mma { units } else { simdgroups };
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
    let formats = [g.format, u.format];
    let (kernel, columns, threads) =
        pick(c.profile, EXPERTS_IN, EXPERTS_IN_MMA, EXPERTS_IN_WGMMA, formats);
    r.dispatch(
        kernel,
        [g.rows.div_ceil(columns / 2), routes.most_blocks, 1],
        threads,
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
    r.worth(u64::from(entries) * (g.elements() + u.elements()));
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

/// Threadgroups of `decode_experts_mma_deep` that a core of an H200 holds at once.
const DEEP_RESIDENT: u32 = 2;

/// Kernel, threadgroups, and tasks of each for the matrix units, with `split` simdgroups a tile.
fn units_policy(
    profile: &Profile,
    matrix: &Matrix,
    split: u32,
    tasks: u32,
) -> (&'static str, [u32; 3], u32) {
    let wave = profile.cores * gemv::MMA_RESIDENT;
    let kernel = "decode_experts_mma_deep";
    let deep =
        matrix.cols <= split * gemv::SLICE_Q4 && large_memory(kernel) <= profile.large_memory;
    if tasks > wave && deep {
        // One wave: the next task's weights come while one is multiplied.
        let each = tasks.div_ceil(profile.cores * DEEP_RESIDENT);
        return (kernel, [tasks.div_ceil(each), 1, 1], each);
    }
    ("decode_experts_mma", [tasks.min(wave), 1, 1], 1)
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
    let (kernel, groups, each) = match units {
        true => units_policy(c.profile, &a.matrix, lanes, tasks),
        false => ("decode_experts", [blocks, entries, 1], 1),
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
            each,
        },
        weights + x.bytes + ids.bytes + out.bytes,
    );
    let elements = a.matrix.elements() + if paired { b.matrix.elements() } else { 0 };
    r.worth(u64::from(entries) * elements);
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
    let (kernel, columns, threads) =
        pick(c.profile, EXPERTS_OUT, EXPERTS_OUT_MMA, EXPERTS_OUT_WGMMA, [d.format; 2]);
    r.dispatch(
        kernel,
        [d.rows.div_ceil(columns), routes.most_blocks, 1],
        threads,
        vec![down.binding(), read(op.x), read(routes.order), read(routes.blocks), write(op.out)],
        &ExpertsOutArgs { down: d, first: 0 },
        selected_bytes(&down.weight, entries)
            + op.x.bytes
            + routes.order.bytes
            + routes.blocks.bytes
            + op.out.bytes,
    );
    r.worth(u64::from(entries) * d.elements());
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

/// Threadgroups of `decode_experts_out_mma` that a core of an H200 holds at once.
const SUM_RESIDENT: u32 = 3;

/// Threadgroups for a row's `blocks` of columns: one wave.
fn sum_groups(profile: &Profile, blocks: u32, rows: u32) -> u32 {
    blocks.div_ceil((blocks * rows).div_ceil(profile.cores * SUM_RESIDENT).max(1))
}

/// Whether matrix units can take the sum.
fn sum_units(c: &Context, down: &Matrix, shared_down: &Matrix, k: u32) -> bool {
    let fits = |m: &Matrix| gemv::mma_takes(c, m.cols) && m.cols <= SUM_UNITS.0;
    fits(down) && fits(shared_down) && down.format == 0 && k <= SUM_UNITS.1
}

/// Records the chain of down projections, shared expert and weighted sum as one launch, for what [`fits_sum`].
pub fn decode_experts_out(r: &mut Recorder, c: &Context, op: &ExpertsSum) {
    let (down, shared_down) = (op.down.matrix, op.shared_down.matrix);
    let lanes = sum_lanes(&down, &shared_down);
    let (kernel, groups, threads) = match sum_units(c, &down, &shared_down, op.k) {
        true => {
            let groups = sum_groups(c.profile, down.rows.div_ceil(16), op.rows);
            ("decode_experts_out_mma", groups, (op.k + 1) * 32)
        }
        false => ("decode_experts_out", down.rows.div_ceil(256 / lanes), 256),
    };
    let inputs = [op.x, op.ids, op.weights, op.shared_x, op.shared_gate, op.residual];
    let mut bindings = vec![constant(op.down), constant(op.shared_down)];
    bindings.extend(inputs.map(read));
    bindings[3] = ahead(op.ids);
    bindings.push(write(op.out));
    r.dispatch(
        kernel,
        [groups, op.rows, 1],
        threads,
        bindings,
        &ExpertsSumArgs { down, shared_down, k: op.k, lanes },
        selected_bytes(op.down, op.rows * op.k)
            + op.shared_down.bytes
            + inputs.iter().map(|o| o.bytes).sum::<u64>()
            + op.out.bytes,
    );
    let elements = u64::from(op.k) * down.elements() + shared_down.elements();
    r.worth(u64::from(op.rows) * elements);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_by_format() {
        let [h200, softgpu] = ["h200", "softgpu"].map(|n| Profile::named(n).unwrap());
        let ampere = Profile { wgmma: false, ..h200.clone() };
        for (profile, formats, want) in [
            (&softgpu, [0, 0], "experts_in_q4"),
            (&softgpu, [1, 1], "experts_in_q8"),
            (&softgpu, [0, 1], "experts_in_any"),
            (&softgpu, [2, 2], "experts_in_any"),
            (&ampere, [0, 0], "experts_in_mma_q4"),
            (&ampere, [3, 3], "experts_in_mma_any"),
            (&h200, [0, 0], "experts_in_wgmma_q4"),
            (&h200, [1, 1], "experts_in_mma_q8"),
            (&h200, [0, 1], "experts_in_mma_any"),
        ] {
            let kernel = pick(profile, EXPERTS_IN, EXPERTS_IN_MMA, EXPERTS_IN_WGMMA, formats);
            assert_eq!(kernel.0, want, "{}", profile.name);
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
    fn matrix_units_stay_for_several_rows() {
        let h200 = Profile::named("h200").unwrap();
        let matrix = |cols| Matrix { rows: 512, cols, ..bytemuck::Zeroable::zeroed() };
        for (cols, split, tasks, want) in [
            // 32 blocks an entry, 8 entries a row: 1, 2 and 8 rows.
            (2048, 4, 256, ("decode_experts_mma", 256, 1)),
            (2048, 4, 512, ("decode_experts_mma_deep", 256, 2)),
            (2048, 4, 2048, ("decode_experts_mma_deep", 256, 8)),
            // Several slices of a row a simdgroup.
            (4096, 4, 2048, ("decode_experts_mma", 396, 1)),
        ] {
            let (kernel, groups, each) = units_policy(&h200, &matrix(cols), split, tasks);
            assert_eq!((kernel, groups[0], each), want, "{cols} columns, {tasks} tasks");
        }
        // Down projections: 396 threadgroups are a wave.
        assert_eq!(
            [1, 2, 4, 5, 8].map(|rows| sum_groups(&h200, 128, rows)),
            [128, 128, 64, 64, 43]
        );
    }

    #[test]
    fn a_few_rows_go_row_by_row() {
        // Up to 8 rows the same experts are rarely chosen twice, so that grouping saves no bytes.
        assert!(few(1) && few(8) && !few(9));
    }
}
