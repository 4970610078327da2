//! Matrix products of 1 to 8 rows: decode, and the logits of a few rows.

use lily_ops::ElementType;

use crate::kernel_args;
use crate::kernels::common::{Context, DeviceWeight, Matrix};
use crate::list::{Access, Binding, Operand, Recorder};
use crate::profile::Profile;

kernel_args! {
    /// One of the matrices of a launch.
    pub struct GemvMatrix {
        /// The matrix.
        weight: Matrix,
        /// Its partner, if the result is `silu(weight x) · up x`.
        up: Matrix,
        /// One past its last threadgroup.
        end: u32,
        /// 0: bf16, 1: f32, 2: added to the residual stream, 3: gated.
        epilogue: u32,
        /// Lanes that share a row; of `gemv_mma_…` simdgroups that share a tile.
        lanes: u32,
    }

    /// Of all `gemv_…` and `gemv_mma_…`.
    pub struct GemvArgs {
        /// Rows of x.
        rows: u32,
        /// Elements of a row of x.
        cols: u32,
        /// Simdgroups of a threadgroup.
        simds: u32,
        /// Blocks of rows that a threadgroup takes one after another.
        repeat: u32,
        /// Matrices.
        count: u32,
        /// Whether x is the residual stream, to be normalized.
        normed: u32,
        /// Whether the normalized rows are stored too.
        keeps_normed: u32,
        /// Where the norm's weight lies in its slab, in units of 16 bytes.
        norm: u32,
        /// The norm's addend to the mean of squares.
        eps: f32,
        /// The matrices, in the order of their threadgroups.
        matrices: [GemvMatrix; 6],
    }
}

/// Matrices of one launch at most.
pub const MAX_OUTPUTS: usize = 6;

/// Rows of x at most.
pub const MAX_ROWS: u32 = 8;

/// What a GEMV multiplies.
#[derive(Clone, Copy, Debug)]
pub struct GemvInput<'a> {
    /// `rows × cols`: bf16, or with a norm the residual stream, f32.
    pub x: Operand,
    /// Norm to be applied to x first: weight and the addend to the mean of squares. The result has the bits that
    /// [`rms_norm`](super::elementwise::rms_norm) gives.
    pub norm: Option<(&'a DeviceWeight, f32)>,
    /// Where the normalized rows go, bf16, if something else reads them.
    pub keep: Option<Operand>,
    /// Rows, 1 to [`MAX_ROWS`].
    pub rows: u32,
}

/// What becomes of a product.
#[derive(Clone, Copy, Debug)]
pub enum Epilogue<'a> {
    /// Stored in the element type of the operand, bf16 or f32.
    Store,
    /// Rounded to bf16 and added to this f32 operand; the sum is stored. The operand may be the output itself. All
    /// outputs of a launch that use it name the same one.
    AddTo(Operand),
    /// The matrix is a gate and this one, of the same shape and format, goes up: `silu(gate x) · up x`, each
    /// product rounded to bf16, is stored as bf16.
    Gated(&'a DeviceWeight),
}

/// One matrix of a launch.
#[derive(Clone, Copy, Debug)]
pub struct GemvOutput<'a> {
    /// The matrix.
    pub weight: &'a DeviceWeight,
    /// `rows × weight.rows`.
    pub out: Operand,
    /// What becomes of the product.
    pub epilogue: Epilogue<'a>,
}

/// How a launch is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The kernel.
    pub kernel: &'static str,
    /// Rows of weights that a lane works on at once.
    pub rows: u32,
    /// Simdgroups of a threadgroup.
    pub simds: u32,
    /// Blocks of rows that a threadgroup takes one after another.
    pub repeat: u32,
}

/// Kernels by rows of x at most and rows of weights a lane.
const KERNELS: [(u32, u32, &str); 5] = [
    (1, 2, "gemv_1x2"),
    (1, 4, "gemv_1x4"),
    (2, 2, "gemv_2x2"),
    (4, 2, "gemv_4x2"),
    (8, 2, "gemv_8x2"),
];

/// Elements of a packet, which a lane reads at once.
pub(crate) fn packet_elements(format: u32) -> u32 {
    match format {
        0 => 32,
        1 => 16,
        _ => 8,
    }
}

/// Lanes that share a row: as many as have a packet to read, a power of two. Sums depend on it, so that nothing but the matrix
/// decides.
pub(crate) fn lanes(matrix: &Matrix) -> u32 {
    (matrix.cols / packet_elements(matrix.format)).next_power_of_two().clamp(1, 32)
}

/// The policy for `x_rows` rows of x. `simdgroups` is the number of simdgroups that the launch needs if each lane
/// works on one row of weights.
pub fn policy(profile: &Profile, x_rows: u32, simdgroups: u32) -> Policy {
    // Four rows a lane share what is read of x; but every core should be full.
    let resident = profile.cores * (profile.threads_per_core / RESIDENT_SHARE / 32);
    let wanted = if simdgroups / 4 >= resident { 4 } else { 2 };
    let (_, rows, kernel) = KERNELS
        .into_iter()
        .filter(|(m, _, _)| *m >= x_rows)
        .min_by_key(|(m, r, _)| (*m, r.abs_diff(wanted)))
        .unwrap_or(KERNELS[KERNELS.len() - 1]);
    let total = simdgroups.div_ceil(rows);
    // One wave: threadgroups that stay load x once, and the next rows while they work.
    Policy { kernel, rows, simds: SIMDS, repeat: total.div_ceil(resident).max(1) }
}

/// A core's threads divided by those of a GEMV that it runs at once, whose registers are many.
const RESIDENT_SHARE: u32 = 4;

/// Simdgroups of a threadgroup, which share the work of fetching x. On an H200 smaller threadgroups were slower for every
/// launch of the real model but one, even where they would have spread over more cores.
const SIMDS: u32 = 8;

/// Whether a norm is worth repeating in every threadgroup of the launch, rather than being a kernel of its own: for few rows,
/// and not for a launch as large as that of the logits.
pub fn fuses_norm(profile: &Profile, rows: u32, simdgroups: u32, cols: u32) -> bool {
    let (most_cols, most_rows) = if profile.mma { MMA_STAGED } else { (u32::MAX, 2) };
    rows <= most_rows
        && cols <= most_cols
        && cols.is_multiple_of(8)
        && simdgroups <= profile.cores * 512
}

/// Rows of a matrix that a simdgroup takes at once for the matrix units.
const TILE_ROWS: u32 = 16;

/// Columns of rows that `gemv_mma_…` normalizes on the way, and such rows.
const MMA_STAGED: (u32, u32) = (4096, 2);

/// Whether matrix units can take the launch.
fn matrix_units(c: &Context, input: &GemvInput, outputs: &[GemvOutput]) -> bool {
    let cols = outputs[0].weight.matrix.cols;
    let staged = input.norm.is_none() || (cols <= MMA_STAGED.0 && input.rows <= MMA_STAGED.1);
    c.profile.mma
        && c.tuning.matrix_gemv
        && staged
        && cols.is_multiple_of(lily_ops::plan::GROUP as u32)
        && outputs.iter().all(|o| o.weight.matrix.format <= 2)
}

/// Simdgroups that share a tile's columns: so many that a matrix of the real model fills the device. The matrix alone decides, since
/// sums depend on it.
pub fn split(matrix: &Matrix) -> u32 {
    let tiles = matrix.rows.div_ceil(TILE_ROWS);
    match tiles {
        0..512 => 8,
        512..2048 => 4,
        _ => 1,
    }
}

/// How a launch for the matrix units is cut.
fn mma_policy(profile: &Profile, outputs: &[GemvOutput]) -> Policy {
    let tasks = |o: &GemvOutput| {
        let matrix = &o.weight.matrix;
        matrix.rows.div_ceil(TILE_ROWS) * members(o) * split(matrix)
    };
    let needed: u32 = outputs.iter().map(tasks).sum();
    let resident = profile.cores * (profile.threads_per_core / RESIDENT_SHARE / 32);
    // Pairs of matrices need both tiles in one simdgroup; else two share what is read of x, where there is enough for all cores.
    let pairs = outputs.iter().any(|o| members(o) == 2);
    let (kernel, rows) =
        if pairs || needed >= resident { ("gemv_mma_2", 2) } else { ("gemv_mma_1", 1) };
    let total = needed.div_ceil(rows);
    Policy { kernel, rows, simds: SIMDS, repeat: total.div_ceil(resident).max(1) }
}

/// The entry of an output whose threadgroups begin at `end`, which moves behind them.
fn mma_entry(output: &GemvOutput, policy: Policy, end: &mut u32) -> GemvMatrix {
    let split = split(&output.weight.matrix);
    let block = SIMDS / split * policy.rows / members(output) * TILE_ROWS;
    let mut entry = matrix_entry(output, policy, &mut 0);
    *end += entry.weight.rows.div_ceil(block * policy.repeat);
    (entry.lanes, entry.end) = (split, *end);
    entry
}

/// Simdgroups that a matrix needs if each lane works on one row.
pub fn simdgroups(weight: &DeviceWeight) -> u32 {
    weight.matrix.rows.div_ceil(32 / lanes(&weight.matrix))
}

/// Whether two matrices can be a [`Epilogue::Gated`] pair.
pub fn can_pair(gate: &DeviceWeight, up: &DeviceWeight) -> bool {
    let shape = |w: &DeviceWeight| (w.matrix.rows, w.matrix.cols, w.matrix.format, w.matrices);
    shape(gate) == shape(up) && gate.slab == up.slab
}

/// Records the products of one input with any number of matrices: one launch for up to [`MAX_OUTPUTS`] in one slab.
pub fn gemv(r: &mut Recorder, c: &Context, mut input: GemvInput, outputs: &[GemvOutput]) {
    let mut rest = if input.rows > 0 { outputs } else { &[] };
    while let Some(first) = rest.first() {
        let same = rest.iter().take(MAX_OUTPUTS).take_while(|o| o.weight.slab == first.weight.slab);
        let (now, later) = rest.split_at(same.count());
        launch(r, c, input, now);
        input.keep = None;
        rest = later;
    }
}

fn launch(r: &mut Recorder, c: &Context, input: GemvInput, outputs: &[GemvOutput]) {
    let GemvInput { x, norm, keep, rows } = input;
    let cols = outputs[0].weight.matrix.cols;
    debug_assert!((1..=MAX_ROWS).contains(&rows), "{rows} rows");
    debug_assert_eq!(x.element == ElementType::F32, norm.is_some());
    debug_assert!(keep.is_none() || norm.is_some());
    let needed = outputs.iter().map(|o| simdgroups(o.weight) * members(o)).sum();
    let units = matrix_units(c, &input, outputs);
    let policy =
        if units { mma_policy(c.profile, outputs) } else { policy(c.profile, rows, needed) };
    let mut args = GemvArgs {
        rows,
        cols,
        simds: policy.simds,
        repeat: policy.repeat,
        count: outputs.len() as u32,
        normed: u32::from(norm.is_some()),
        keeps_normed: u32::from(keep.is_some()),
        norm: norm.map_or(0, |(w, _)| w.matrix.codes),
        eps: norm.map_or(0.0, |(_, eps)| eps),
        matrices: bytemuck::Zeroable::zeroed(),
    };
    let mut end = 0;
    for (entry, output) in args.matrices.iter_mut().zip(outputs) {
        debug_assert_eq!(output.weight.matrix.cols, cols);
        *entry = match units {
            true => mma_entry(output, policy, &mut end),
            false => matrix_entry(output, policy, &mut end),
        };
    }
    let residual = outputs.iter().find_map(|o| match o.epilogue {
        Epilogue::AddTo(residual) => Some(residual),
        _ => None,
    });
    let slab = outputs[0].weight.slab;
    let mut bindings = vec![
        Binding::new(x, Access::Read),
        Binding::new(norm.map_or(slab, |(w, _)| w.slab), Access::Constant),
        Binding::new(slab, Access::Constant),
    ];
    // Outputs that are not there are bound as the first one and not touched.
    let outs = (0..MAX_OUTPUTS).map(|i| outputs.get(i).unwrap_or(&outputs[0]).out);
    bindings.extend(outs.map(|out| Binding::new(out, Access::Write)));
    bindings.push(Binding::new(residual.unwrap_or(x), Access::Read));
    bindings.push(Binding::new(keep.unwrap_or(outputs[0].out), Access::Write));
    let traffic = traffic(&input, cols, outputs);
    r.dispatch(policy.kernel, [end, 1, 1], policy.simds * 32, bindings, &args, traffic);
}

/// Matrices behind an output.
fn members(output: &GemvOutput) -> u32 {
    if matches!(output.epilogue, Epilogue::Gated(_)) { 2 } else { 1 }
}

/// The entry of an output whose threadgroups begin at `end`, which moves behind them.
fn matrix_entry(output: &GemvOutput, policy: Policy, end: &mut u32) -> GemvMatrix {
    let weight = output.weight.matrix;
    let (epilogue, up) = match output.epilogue {
        Epilogue::Store if output.out.element == ElementType::F32 => (1, weight),
        Epilogue::Store => (0, weight),
        Epilogue::AddTo(_) => (2, weight),
        Epilogue::Gated(up) => {
            debug_assert!(can_pair(output.weight, up));
            (3, up.matrix)
        }
    };
    let lanes = lanes(&weight);
    let block = policy.rows / members(output) * policy.simds * (32 / lanes);
    *end += weight.rows.div_ceil(block * policy.repeat);
    GemvMatrix { weight, up, end: *end, epilogue, lanes }
}

fn traffic(input: &GemvInput, cols: u32, outputs: &[GemvOutput]) -> u64 {
    let row_bytes =
        |width: u32, o: Operand| u64::from(input.rows) * u64::from(width) * o.element.size() as u64;
    let norm = input.norm.map_or(0, |_| u64::from(cols) * 4);
    let each = outputs.iter().map(|o| {
        let (weights, residual) = match o.epilogue {
            Epilogue::Store => (o.weight.bytes, 0),
            Epilogue::AddTo(residual) => {
                (o.weight.bytes, row_bytes(o.weight.matrix.rows, residual))
            }
            Epilogue::Gated(up) => (o.weight.bytes + up.bytes, 0),
        };
        weights + residual + row_bytes(o.weight.matrix.rows, o.out)
    });
    let keep = input.keep.map_or(0, |o| row_bytes(cols, o));
    row_bytes(cols, input.x) + norm + keep + each.sum::<u64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies() {
        // Rows of weights a lane works on at once, and simdgroups of a threadgroup, of the real model's launches.
        let table = [
            // 12,352 rows of 2048: four rows a lane fill any device. H200: 10.1 us with repeat 2, 11.1 us with 1.
            ("h200", 1, 12_352, "gemv_1x4", 8, 2),
            ("m4-max", 1, 12_352, "gemv_1x4", 8, 10),
            // 2048 rows of 4096 do not. H200: 6.4 us; four rows a lane 7.2 us, threadgroups of 4 or 2 6.6 and 7.6 us.
            ("h200", 1, 2048, "gemv_1x2", 8, 1),
            ("m4-max", 1, 2048, "gemv_1x4", 8, 2),
            // A router and a shared expert. H200: 6.2 us; threadgroups of 4 or 2 6.5 and 6.8 us.
            ("h200", 1, 1281, "gemv_1x2", 8, 1),
            // Logits. H200: 108 us with repeat 30, 132 us with 1.
            ("h200", 1, 248_320, "gemv_1x4", 8, 30),
            // More rows of x take the next larger kernel.
            ("h200", 2, 12_352, "gemv_2x2", 8, 3),
            ("h200", 3, 12_352, "gemv_4x2", 8, 3),
            ("h200", 5, 2048, "gemv_8x2", 8, 1),
            ("h200", 8, 248_320, "gemv_8x2", 8, 59),
        ];
        for (device, rows, simdgroups, kernel, simds, repeat) in table {
            let profile = Profile::named(device).unwrap();
            let got = policy(&profile, rows, simdgroups);
            let want = Policy { kernel, simds, repeat, rows: got.rows };
            assert_eq!(got, want, "{device}, {rows} rows, {simdgroups} simdgroups");
            assert!(kernel.ends_with(&got.rows.to_string()));
        }
    }

    #[test]
    fn norms_are_repeated_where_that_is_cheap() {
        let h200 = Profile::named("h200").unwrap();
        assert!(fuses_norm(&h200, 1, 12_352, 2048));
        assert!(!fuses_norm(&h200, 4, 12_352, 2048));
        assert!(!fuses_norm(&h200, 1, 248_320, 2048));
    }
}
