//! Matrix products of 1 to 8 rows: decode, and the logits of a few rows.

use lily_ops::ElementType;

use crate::kernel_args;
use crate::kernels::common::{Context, DeviceWeight, Matrix};
use crate::list::{Access, Binding, Operand, Recorder};
use crate::profile::Profile;
use crate::text::large_memory;

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
/// and the device decides.
pub(crate) fn lanes(profile: &Profile, matrix: &Matrix) -> u32 {
    let packets = (matrix.cols / packet_elements(matrix.format)).next_power_of_two();
    packets.clamp(1, profile.thresholds.gemv_lanes)
}

/// Rows of x at most that a step multiplies by vectors.
pub fn most_rows(c: &Context) -> u32 {
    match c.step.is_decode() {
        true => MAX_ROWS,
        false => c.profile.thresholds.vector_rows,
    }
}

/// The policy for `x_rows` rows of x. `simdgroups` is the number of simdgroups that the launch needs if each lane
/// works on one row of weights.
pub fn policy(profile: &Profile, x_rows: u32, simdgroups: u32) -> Policy {
    // Four rows a lane share what is read of x; but every core should be full.
    let resident = profile.cores * (profile.threads_per_core / profile.thresholds.gemv_share / 32);
    let wanted = if simdgroups / 4 >= resident { 4 } else { 2 };
    let (_, rows, kernel) = KERNELS
        .into_iter()
        .filter(|(m, _, _)| *m >= x_rows)
        .min_by_key(|(m, r, _)| (*m, r.abs_diff(wanted)))
        .unwrap_or(KERNELS[KERNELS.len() - 1]);
    let total = simdgroups.div_ceil(rows);
    // One wave: threadgroups that stay load x once, and the next rows while they work.
    // On an H200 smaller threadgroups were slower for every launch of the real model but one, even where they would have spread
    // over more cores.
    let simds = profile.thresholds.gemv_simds;
    Policy { kernel, rows, simds, repeat: total.div_ceil(resident).max(1) }
}

/// Whether a norm is worth repeating in every threadgroup of the launch, rather than being a kernel of its own: for few rows,
/// and not for a launch as large as that of the logits.
pub fn fuses_norm(profile: &Profile, rows: u32, simdgroups: u32, cols: u32) -> bool {
    let most_cols = if profile.mma { MMA_COLS } else { u32::MAX };
    let most_rows = if profile.mma { mma_normed(cols) } else { u32::MAX };
    rows <= profile.thresholds.norm_rows.min(most_rows)
        && cols <= most_cols
        && cols.is_multiple_of(8)
        && simdgroups <= profile.cores * profile.thresholds.norm_groups
}

/// Rows of a matrix that a simdgroup takes at once for the matrix units.
const TILE_ROWS: u32 = 16;

/// Columns of rows that `gemv_mma_…` take, of those that share x in threadgroup memory, and rows that these normalize on the way.
const MMA_COLS: u32 = 4096;
const MMA_STAGED: u32 = 2048;
const MMA_NORMED: u32 = 2;

/// Elements of a slice of 4-bit codes.
pub(crate) const SLICE_Q4: u32 = 512;

/// Rows that are normalized on the way: `gemv_mma_8_wide` has them in registers, slice by slice.
fn mma_normed(cols: u32) -> u32 {
    if cols <= MMA_STAGED { MMA_NORMED } else { 1 }
}

/// Simdgroups of a threadgroup of kernels for the matrix units.
pub(crate) const MMA_SIMDS: u32 = 8;

/// Threadgroups with one row of x that a core holds at once.
pub(crate) const MMA_RESIDENT: u32 = 3;

/// The kernel for that many rows of x, and the threadgroups that a core of an H200 holds at once: what they keep of x decides, in
/// threadgroup memory or in registers.
fn mma_kernel(x_rows: u32, cols: u32) -> (&'static str, u32) {
    match (x_rows, cols) {
        (1, _) => ("gemv_mma_1", MMA_RESIDENT),
        (_, ..=MMA_STAGED) => ("gemv_mma_8", 3),
        _ => ("gemv_mma_8_wide", 1),
    }
}

/// Whether matrix units can take products with rows of that many columns of x. For any number of rows: their bits must not depend on it.
pub(crate) fn mma_takes(c: &Context, cols: u32) -> bool {
    c.tuning.matrix_gemv && mma_fits(c.profile, cols)
}

fn mma_fits(profile: &Profile, cols: u32) -> bool {
    profile.mma
        && [1, MAX_ROWS]
            .iter()
            .all(|rows| large_memory(mma_kernel(*rows, cols).0) <= profile.large_memory)
        && cols.is_multiple_of(lily_ops::plan::GROUP as u32)
        && cols <= MMA_COLS
}

/// Whether matrix units can take the launch.
fn matrix_units(c: &Context, input: &GemvInput, outputs: &[GemvOutput]) -> bool {
    mma_takes(c, outputs[0].weight.matrix.cols)
        && (input.norm.is_none() || input.rows <= mma_normed(outputs[0].weight.matrix.cols))
        && outputs.iter().all(mma_format)
}

/// Whether matrix units can take the output's format: f32 goes lane by lane.
fn mma_format(output: &GemvOutput) -> bool {
    output.weight.matrix.format <= 2
}

/// Simdgroups that share a tile of 16 rows, each with slices of 256 bytes of a row: of a pair of matrices four at most, since both tiles are in
/// one threadgroup. The matrix alone decides, since sums depend on it.
pub(crate) fn split(matrix: &Matrix, paired: bool) -> u32 {
    let slice = match matrix.format {
        0 => SLICE_Q4,
        1 => 256,
        _ => 128,
    };
    let most = if paired { MMA_SIMDS / 2 } else { MMA_SIMDS };
    matrix.cols.div_ceil(slice).next_power_of_two().min(most)
}

/// Rows of a matrix that a threadgroup takes at once.
pub(crate) fn mma_block(matrix: &Matrix, paired: bool) -> u32 {
    MMA_SIMDS / split(matrix, paired) / if paired { 2 } else { 1 } * TILE_ROWS
}

/// Blocks of a threadgroup from which on simdgroups have two slices, and threadgroups of those that a core of an H200 holds at once.
const MMA_DEEP: (u32, u32) = (4, 2);

/// How a launch for the matrix units is cut: `blocks` blocks of rows in all. `single`: simdgroups have one slice of 4-bit codes a row each. Of
/// several rows x leaves no room for a second slice; with x in registers it was slower (H200, logits of 8 rows: 111 us, with one slice 98).
fn mma_policy(profile: &Profile, x_rows: u32, cols: u32, blocks: u32, single: bool) -> Policy {
    // One wave: threadgroups that stay put x in its place once.
    let policy = |(kernel, resident)| {
        let repeat = blocks.div_ceil(profile.cores * resident).max(1);
        Policy { kernel, rows: TILE_ROWS, simds: MMA_SIMDS, repeat }
    };
    let once = policy(mma_kernel(x_rows, cols));
    let deep = "gemv_mma_1_deep";
    let twice = x_rows == 1 && single && once.repeat >= MMA_DEEP.0;
    match twice && large_memory(deep) <= profile.large_memory {
        true => policy((deep, MMA_DEEP.1)),
        false => once,
    }
}

/// Whether each simdgroup has one slice of 4-bit codes of a row at most, and its rows are bf16.
fn one_slice(input: &GemvInput, output: &GemvOutput) -> bool {
    let matrix = &output.weight.matrix;
    let slices = split(matrix, members(output) == 2) * SLICE_Q4;
    input.norm.is_none() && matrix.format == 0 && matrix.cols <= slices
}

/// Blocks of rows of an output.
fn mma_blocks(output: &GemvOutput) -> u32 {
    let matrix = &output.weight.matrix;
    matrix.rows.div_ceil(mma_block(matrix, members(output) == 2))
}

/// The entry of an output whose threadgroups begin at `end`, which moves behind them.
fn mma_entry(profile: &Profile, output: &GemvOutput, policy: Policy, end: &mut u32) -> GemvMatrix {
    let mut entry = matrix_entry(profile, output, policy, &mut 0);
    *end += mma_blocks(output).div_ceil(policy.repeat);
    (entry.lanes, entry.end) = (split(&output.weight.matrix, members(output) == 2), *end);
    entry
}

/// Simdgroups that a matrix needs if each lane works on one row.
pub fn simdgroups(profile: &Profile, weight: &DeviceWeight) -> u32 {
    weight.matrix.rows.div_ceil(32 / lanes(profile, &weight.matrix))
}

/// Whether two matrices can be a [`Epilogue::Gated`] pair.
pub fn can_pair(gate: &DeviceWeight, up: &DeviceWeight) -> bool {
    let shape = |w: &DeviceWeight| (w.matrix.rows, w.matrix.cols, w.matrix.format, w.matrices);
    shape(gate) == shape(up) && gate.slab == up.slab
}

/// Records the products of one input with any number of matrices: one launch for up to [`MAX_OUTPUTS`] in one slab. Those that matrix units
/// cannot take have launches of their own: who else is there must not decide on a matrix's bits.
pub fn gemv(r: &mut Recorder, c: &Context, mut input: GemvInput, outputs: &[GemvOutput]) {
    let mut rest = if input.rows > 0 { outputs } else { &[] };
    while let Some(first) = rest.first() {
        let units = mma_takes(c, first.weight.matrix.cols);
        let same = rest.iter().take(MAX_OUTPUTS).take_while(|o| {
            o.weight.slab == first.weight.slab && (!units || mma_format(o) == mma_format(first))
        });
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
    let needed = outputs.iter().map(|o| simdgroups(c.profile, o.weight) * members(o)).sum();
    let units = matrix_units(c, &input, outputs);
    let policy = match units {
        true => {
            let single = outputs.iter().all(|o| one_slice(&input, o));
            mma_policy(c.profile, rows, cols, outputs.iter().map(mma_blocks).sum(), single)
        }
        false => policy(c.profile, rows, needed),
    };
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
            true => mma_entry(c.profile, output, policy, &mut end),
            false => matrix_entry(c.profile, output, policy, &mut end),
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
    let elements = |o: &GemvOutput| u64::from(members(o)) * o.weight.matrix.elements();
    r.worth(u64::from(rows) * outputs.iter().map(elements).sum::<u64>());
}

/// Matrices behind an output.
fn members(output: &GemvOutput) -> u32 {
    if matches!(output.epilogue, Epilogue::Gated(_)) { 2 } else { 1 }
}

/// The entry of an output whose threadgroups begin at `end`, which moves behind them.
fn matrix_entry(
    profile: &Profile,
    output: &GemvOutput,
    policy: Policy,
    end: &mut u32,
) -> GemvMatrix {
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
    let lanes = lanes(profile, &weight);
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
    fn matrix_units_policies() {
        let h200 = Profile::named("h200").unwrap();
        let matrix =
            |rows, cols, format| Matrix { rows, cols, format, ..bytemuck::Zeroable::zeroed() };
        for (rows, cols, format, paired, want) in [
            // The real model: eight simdgroups have a slice of 256 bytes of a row each. In-projections and logits: two tiles.
            (12_352, 2048, 0, false, (4, 32)),
            // Out-projections: a tile.
            (2048, 4096, 0, false, (8, 16)),
            // Experts and the shared one: a tile of both matrices.
            (512, 2048, 0, true, (4, 16)),
            // The router's codes have 8 bits.
            (256, 2048, 1, false, (8, 16)),
            // Rows of less than a slice.
            (100, 64, 0, false, (1, 128)),
            (100, 64, 0, true, (1, 64)),
            // Several slices a simdgroup; of a pair twice as many.
            (100, 2048, 2, false, (8, 16)),
            (100, 4096, 0, true, (4, 16)),
        ] {
            let m = matrix(rows, cols, format);
            let got = (split(&m, paired), mma_block(&m, paired));
            assert_eq!(got, want, "{rows}x{cols}, format {format}, paired: {paired}");
        }
        // H200, 128 threads a threadgroup, slices of 512 bytes: 1,900 us a step, as here 1,633; 8 slots 4,766 and 4,207.
        for (rows, cols, blocks, want) in [
            (1, 2048, 386, ("gemv_mma_1", 1)),
            (1, 4096, 128, ("gemv_mma_1", 1)),
            // Logits: threadgroups that stay.
            (1, 2048, 7760, ("gemv_mma_1_deep", 30)),
            (8, 2048, 7760, ("gemv_mma_8", 20)),
            (2, 2048, 386, ("gemv_mma_8", 1)),
            (8, 4096, 128, ("gemv_mma_8_wide", 1)),
            (8, 4096, 390, ("gemv_mma_8_wide", 3)),
        ] {
            let got = mma_policy(&h200, rows, cols, blocks, true);
            assert_eq!((got.kernel, got.repeat), want, "{rows} rows of {cols}, {blocks} blocks");
        }
        let rare = mma_policy(&h200, 1, 2048, 7760, false);
        assert_eq!((rare.kernel, rare.repeat), ("gemv_mma_1", 20));
    }

    #[test]
    fn matrix_units_need_memory() {
        let takes = |large_memory, cols| {
            mma_fits(&Profile { large_memory, ..Profile::named("h200").unwrap() }, cols)
        };
        // Bytes a block may have by compute capability: 9.0, 8.0, 8.6 and 8.9. For all rows or none.
        assert!(takes(227 << 10, 4096) && takes(163 << 10, 2048) && takes(99 << 10, 4096));
        assert!(takes(99 << 10, 2048) && !takes(48 << 10, 2048) && !takes(227 << 10, 4160));
    }

    #[test]
    fn norms_are_repeated_where_that_is_cheap() {
        let h200 = Profile::named("h200").unwrap();
        assert!(fuses_norm(&h200, 1, 12_352, 2048));
        assert!(!fuses_norm(&h200, 4, 12_352, 2048));
        assert!(!fuses_norm(&h200, 1, 248_320, 2048));
        assert!(fuses_norm(&h200, 2, 1024, 2048) && !fuses_norm(&h200, 2, 1024, 4096));
    }
}
