//! Gated DeltaNet: causal convolution, q/k normalization, gates, the recurrence, the gated norm.
//!
//! A step reads a slot's current state and writes the other one, in prefill and in decode, recurrent part and
//! convolution alike; the last kernel of the step turns them round.

use crate::kernel_args;
use crate::kernels::common::{Context, DeviceWeight};
use crate::kernels::delta_chunk;
use crate::list::{Access, Binding, Operand, Recorder};
use crate::profile::Profile;
use crate::scratch::Scratch;
use crate::text::Shape;

kernel_args! {
    /// Of `causal_conv`.
    pub struct ConvArgs {
        /// Where the taps begin in their slab, in units of 16 bytes: f32 `[channel][tap]`.
        taps: u32,
        /// Elements of a row.
        channels: u32,
        /// Strips of a row: `KEY_DIM` channels each, the last may have fewer.
        strips: u32,
        /// Simdgroups of a threadgroup.
        simds: u32,
        /// Rows of a segment that one simdgroup goes through.
        block: u32,
        /// Recurrent layer.
        layer: u32,
        /// Words of one state.
        state_words: u32,
        /// First word of the convolution's part of a state.
        conv_at: u32,
    }

    /// Of `qk_l2_norm`.
    pub struct QkNormArgs {
        /// Elements of a row.
        channels: u32,
        /// Strips of a row.
        strips: u32,
        /// Simdgroups of a threadgroup.
        simds: u32,
        /// Key heads.
        key_heads: u32,
    }

    /// Of `delta_gates`.
    pub struct GateArgs {
        /// `A_log` in its slab, in units of 16 bytes.
        a_log: u32,
        /// `dt_bias` in its slab.
        dt_bias: u32,
        /// Value heads.
        heads: u32,
        /// Rows × heads.
        count: u32,
    }

    /// Of `conv_prep`.
    pub struct PrepArgs {
        /// The convolution's.
        conv: ConvArgs,
        /// Key heads.
        key_heads: u32,
        /// Value heads.
        heads: u32,
        /// `A_log` in its slab, in units of 16 bytes.
        a_log: u32,
        /// `dt_bias` in its slab.
        dt_bias: u32,
    }

    /// Of `delta_scan_*`.
    pub struct ScanArgs {
        /// Elements of a row of q, k and v.
        channels: u32,
        /// Key heads.
        key_heads: u32,
        /// Value heads.
        heads: u32,
        /// Recurrent layer.
        layer: u32,
        /// Words of one state.
        state_words: u32,
        /// First row of each segment that takes part.
        start: u32,
        /// Rows of a segment that take part, at most.
        count: u32,
        /// Simdgroups of a threadgroup.
        simds: u32,
        /// Segments of fewer rows than this take part.
        below: u32,
    }

    /// Of `gated_rms_norm`.
    pub struct GatedNormArgs {
        /// The weight in its slab, in units of 16 bytes.
        weight: u32,
        /// Rows × heads.
        units: u32,
        /// Simdgroups of a threadgroup.
        simds: u32,
        /// Added to the mean of squares.
        eps: f32,
    }

    /// Of `scan_norm_*`.
    pub struct ScanNormArgs {
        /// Elements of a row of q, k and v.
        channels: u32,
        /// Key heads.
        key_heads: u32,
        /// Value heads.
        heads: u32,
        /// Recurrent layer.
        layer: u32,
        /// Words of one state.
        state_words: u32,
        /// The norm's weight in its slab, in units of 16 bytes.
        weight: u32,
        /// Added to the mean of squares.
        eps: f32,
    }
}

/// Simdgroups of a threadgroup, where they do not work together.
const SIMDS: u32 = 4;

/// Tokens between two visits of the state in memory, with `register_scan` off.
const BLOCK_TOKENS: u32 = 32;

/// Whether the kernels are right for these sizes; if not, why, and what to do.
pub fn supported(shape: &Shape) -> Result<(), String> {
    let Shape { key_dim, value_dim, conv_taps, value_heads_per_key, .. } = *shape;
    // A lane has key_dim / 32 neighbouring channels, of which none may lie behind the last one.
    let ok = key_dim > 0
        && key_dim.is_multiple_of(32)
        && value_dim > 0
        && value_dim.is_multiple_of(32)
        && value_dim.is_multiple_of(key_dim / 32)
        && (2..=9).contains(&conv_taps)
        && value_heads_per_key > 0;
    match ok {
        true => Ok(()),
        false => Err(format!(
            "recurrent heads of {key_dim} × {value_dim} with {conv_taps} taps: the GPU kernels take head sizes \
             that are multiples of 32, the second one of the first one's 32nd part, and 2 to 9 taps; use --device cpu"
        )),
    }
}

/// Rows of a segment that one simdgroup convolves. More rows read the window's past less often (3 rows a block); fewer give the device more
/// simdgroups.
pub fn conv_block(rows: u32, strips: u32, profile: &Profile) -> u32 {
    let enough = profile.thresholds.conv_groups * profile.cores;
    [64, 32, 16].into_iter().find(|block| rows.div_ceil(*block) * strips >= enough).unwrap_or(8)
}

/// Rows of the state that one simdgroup of the scan keeps. More rows share the conversion of k and q and the shuffles of the sums; but a token is a
/// chain of sums over the lanes, so there must be simdgroups to fill the time. (H200, 2,048 tokens with two sums in turn and 7.8
/// simdgroups a core: 815 cycles a token, where the instructions of a core's share take 260.)
pub fn scan_rows(heads: u32, segments: u32, shape: &Shape, profile: &Profile) -> u32 {
    let rows = heads * segments * shape.value_dim;
    let enough = profile.thresholds.scan_groups * profile.cores;
    [8, 4, 2].into_iter().find(|r| rows / r >= enough).unwrap_or(1)
}

/// Rows of the state that one simdgroup of the fused decode kernel keeps, for `heads` heads of all slots: a head has a threadgroup of at
/// most 32 simdgroups. `None`: the head is too large for one. A core of an H200 holds one head of 128 rows with four rows a simdgroup, with
/// eight two, and the second one's state is on its way, too.
pub fn scan_norm_rows(shape: &Shape, profile: &Profile, heads: u32) -> Option<u32> {
    let several = heads > profile.cores && profile.threads_per_core >= 2048;
    let rows = if several { [8, 4] } else { [4, 8] };
    rows.into_iter().find(|r| shape.value_dim / r <= 32)
}

/// Whether [`scan_norm`] serves this step.
pub fn scan_norm_applies(c: &Context) -> bool {
    c.tuning.fuse_scan_norm && c.step.is_decode() && scan_norm_rows(c.shape, c.profile, 0).is_some()
}

pub(super) fn tables(c: &Context) -> [Binding; 2] {
    [
        Binding::new(c.tables.segments, Access::Constant),
        Binding::new(c.tables.headers, Access::Read),
    ]
}

fn constant(weight: &DeviceWeight) -> Binding {
    Binding::new(weight.slab, Access::Constant)
}

pub(super) fn read(operand: Operand) -> Binding {
    Binding::new(operand, Access::Read)
}

pub(super) fn write(operand: Operand) -> Binding {
    Binding::new(operand, Access::Write)
}

/// Bytes of the step's segment entries and headers that a kernel reads.
pub(super) fn table_bytes(c: &Context) -> u64 {
    32 * c.step.segments.len() as u64
}

fn longest(c: &Context) -> u32 {
    c.step.segments.iter().copied().max().unwrap_or(0)
}

/// Arguments, grid (x for `extra` strips more than the row's) and bytes of the convolution.
fn conv(c: &Context, taps: &DeviceWeight, layer: usize, extra: u32) -> (ConvArgs, [u32; 3], u64) {
    let channels = taps.matrix.rows;
    let strips = channels.div_ceil(c.shape.key_dim);
    let segments = c.step.segments.len() as u32;
    let block = conv_block(c.step.rows(), strips, c.profile);
    let args = ConvArgs {
        taps: taps.matrix.codes,
        channels,
        strips,
        simds: SIMDS,
        block,
        layer: layer as u32,
        state_words: c.tables.state_words,
        conv_at: c.tables.conv_at,
    };
    let grid = [(strips + extra).div_ceil(SIMDS), longest(c).div_ceil(block), segments];
    let past = u64::from(2 * segments * (c.shape.conv_taps - 1));
    let bytes = (past + 2 * u64::from(c.step.rows())) * u64::from(channels) * 2;
    (args, grid, bytes + taps.bytes + table_bytes(c))
}

/// Causal convolution and silu; both bf16.
pub fn causal_conv(
    r: &mut Recorder,
    c: &Context,
    x: Operand,
    taps: &DeviceWeight,
    layer: usize,
    layers: usize,
    out: Operand,
) {
    let (args, grid, bytes) = conv(c, taps, layer, 0);
    let [segments, headers] = tables(c);
    let bindings =
        vec![read(x), constant(taps), segments, headers, c.tables.conv(layer, layers), write(out)];
    r.dispatch("causal_conv", grid, SIMDS * 32, bindings, &args, bytes);
}

/// L2 norm of the q and k heads of `[q | k | v]`; v is copied. `heads` key heads; both bf16.
pub fn qk_l2_norm(r: &mut Recorder, c: &Context, x: Operand, heads: usize, out: Operand) {
    let rows = c.step.rows();
    if rows == 0 {
        return;
    }
    let channels = (x.bytes / 2 / u64::from(rows)) as u32;
    let strips = channels.div_ceil(c.shape.key_dim);
    let args = QkNormArgs { channels, strips, simds: SIMDS, key_heads: heads as u32 };
    let grid = [strips.div_ceil(SIMDS), rows, 1];
    let bytes = 4 * u64::from(rows) * u64::from(channels);
    r.dispatch("qk_l2_norm", grid, SIMDS * 32, vec![read(x), write(out)], &args, bytes);
}

/// Decay and learning rate from `a` and `b`; all f32.
#[allow(clippy::too_many_arguments)] // the operands of the operation
pub fn delta_gates(
    r: &mut Recorder,
    c: &Context,
    a: Operand,
    b: Operand,
    a_log: &DeviceWeight,
    dt_bias: &DeviceWeight,
    decay: Operand,
    beta: Operand,
) {
    let heads = a_log.matrix.cols;
    let count = c.step.rows() * heads;
    let args = GateArgs { a_log: a_log.matrix.codes, dt_bias: dt_bias.matrix.codes, heads, count };
    let bindings =
        vec![read(a), read(b), constant(a_log), constant(dt_bias), write(decay), write(beta)];
    let bytes = 16 * u64::from(count) + a_log.bytes + dt_bias.bytes;
    r.dispatch("delta_gates", [count.div_ceil(128), 1, 1], 128, bindings, &args, bytes);
}

/// What [`conv_prep`] reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct Prep<'a> {
    /// q, k and v before the convolution, bf16.
    pub qkv: Operand,
    /// The convolution's taps.
    pub taps: &'a DeviceWeight,
    /// The gates' inputs, f32.
    pub a: Operand,
    /// Likewise.
    pub b: Operand,
    /// `[1, heads]`.
    pub a_log: &'a DeviceWeight,
    /// `[1, heads]`.
    pub dt_bias: &'a DeviceWeight,
    /// Key heads.
    pub key_heads: usize,
    /// q, k and v as the recurrence takes them, bf16.
    pub out: Operand,
    /// f32.
    pub decay: Operand,
    /// f32.
    pub beta: Operand,
}

/// Convolution, silu, q/k normalization and gates in one dispatch.
pub fn conv_prep(r: &mut Recorder, c: &Context, p: &Prep, layer: usize, layers: usize) {
    let (conv, grid, conv_bytes) = conv(c, p.taps, layer, 1);
    let heads = p.a_log.matrix.cols;
    let args = PrepArgs {
        conv,
        key_heads: p.key_heads as u32,
        heads,
        a_log: p.a_log.matrix.codes,
        dt_bias: p.dt_bias.matrix.codes,
    };
    let [segments, headers] = tables(c);
    let bindings = vec![
        read(p.qkv),
        constant(p.taps),
        segments,
        headers,
        c.tables.conv(layer, layers),
        write(p.out),
        read(p.a),
        read(p.b),
        constant(p.a_log),
        constant(p.dt_bias),
        write(p.decay),
        write(p.beta),
    ];
    let gate_bytes = 16 * u64::from(c.step.rows() * heads) + p.a_log.bytes + p.dt_bias.bytes;
    r.dispatch("conv_prep", grid, SIMDS * 32, bindings, &args, conv_bytes + gate_bytes);
}

/// q, k, v and gates of a step: what the recurrence reads.
#[derive(Clone, Copy, Debug)]
pub struct ScanInputs {
    /// Normalized q and k, then v, bf16.
    pub qkv: Operand,
    /// f32.
    pub decay: Operand,
    /// f32.
    pub beta: Operand,
    /// Key heads.
    pub key_heads: usize,
}

impl ScanInputs {
    /// Elements of a row and value heads.
    pub(super) fn sizes(&self, shape: &Shape) -> (u32, u32) {
        let key_heads = self.key_heads as u32;
        let heads = key_heads * shape.value_heads_per_key;
        (2 * key_heads * shape.key_dim + heads * shape.value_dim, heads)
    }
}

/// Bytes of one layer's states, read and written, of a step's segments.
pub(super) fn state_bytes(c: &Context, heads: u32, segments: usize) -> u64 {
    let state = u64::from(heads) * u64::from(c.shape.value_dim * c.shape.key_dim) * 4;
    2 * segments as u64 * state
}

/// Multiply-adds of so many tokens of a head: each decays, reads, corrects and reads the state again.
fn token_work(shape: &Shape, tokens: u64) -> u64 {
    4 * tokens * u64::from(shape.value_dim * shape.key_dim)
}

/// The recurrence; `out` is bf16. Segments of [`delta_chunk::chunked_from`] rows or more go chunk by chunk, by matrix units, the
/// others token by token. The scan of the latter runs beside the preparation of the former.
#[allow(clippy::too_many_arguments)] // the operands of the operation
pub fn delta_scan(
    r: &mut Recorder,
    c: &Context,
    scratch: &mut Scratch,
    inputs: ScanInputs,
    layer: usize,
    layers: usize,
    out: Operand,
) {
    let least = delta_chunk::chunked_from(c.shape, c.profile, c.tuning);
    let parts = delta_chunk::delta_chunk_parts(r, c, scratch, inputs, least);
    token_scan(r, c, inputs, layer, layers, out, least);
    if let Some(parts) = parts {
        delta_chunk::delta_chunk(r, c, inputs, parts, layer, layers, out);
    }
}

/// The recurrence token by token, of segments of fewer than `below` rows. With `register_scan` the state stays in registers from a
/// segment's first token to its last, or the device's longest dispatch; without it goes through memory every 32 tokens, a dispatch each.
#[allow(clippy::too_many_arguments)] // the operands of the operation
fn token_scan(
    r: &mut Recorder,
    c: &Context,
    inputs: ScanInputs,
    layer: usize,
    layers: usize,
    out: Operand,
    below: u32,
) {
    let (channels, heads) = inputs.sizes(c.shape);
    let all = c.step.segments.len() as u32;
    let own: Vec<u32> = c.step.segments.iter().copied().filter(|n| *n < below).collect();
    let rows = scan_rows(heads, own.len() as u32, c.shape, c.profile);
    let (kernel, per) = match rows {
        1 => ("delta_scan_1", 1),
        2 => ("delta_scan_2", 2),
        4 => ("delta_scan_4", 4),
        _ => ("delta_scan_8", 8),
    };
    let simds = SIMDS.min(c.shape.value_dim / per);
    let longest = own.iter().copied().max().unwrap_or(0);
    let block = match c.tuning.register_scan {
        true => longest.clamp(1, c.profile.thresholds.scan_tokens),
        false => BLOCK_TOKENS,
    };
    for start in (0..longest).step_by(block as usize) {
        let args = ScanArgs {
            channels,
            key_heads: inputs.key_heads as u32,
            heads,
            layer: layer as u32,
            state_words: c.tables.state_words,
            start,
            count: block,
            simds,
            below,
        };
        let lengths = own.iter().map(|n| n.saturating_sub(start).min(block));
        let (tokens, live) = lengths.fold((0, 0), |(t, l), n| (t + n, l + usize::from(n > 0)));
        let row = 2 * channels + 8 * heads + 2 * heads * c.shape.value_dim;
        let bytes = u64::from(tokens) * u64::from(row) + state_bytes(c, heads, live);
        let [entries, headers] = tables(c);
        let bindings = vec![
            read(inputs.qkv),
            read(inputs.decay),
            read(inputs.beta),
            entries,
            headers,
            c.tables.recurrent(layer, layers),
            write(out),
        ];
        let grid = [c.shape.value_dim / (simds * per), heads, all];
        r.dispatch(kernel, grid, simds * 32, bindings, &args, bytes + table_bytes(c));
        r.worth(token_work(c.shape, u64::from(tokens) * u64::from(heads)));
    }
}

/// `rms_norm(y) · w · silu(z)` per value head; all bf16.
pub fn gated_rms_norm(
    r: &mut Recorder,
    c: &Context,
    y: Operand,
    z: Operand,
    weight: &DeviceWeight,
    eps: f32,
    out: Operand,
) {
    let units = (out.bytes / 2 / u64::from(c.shape.value_dim)) as u32;
    let args = GatedNormArgs { weight: weight.matrix.codes, units, simds: SIMDS, eps };
    let bindings = vec![read(y), read(z), constant(weight), write(out)];
    let bytes = 6 * u64::from(units) * u64::from(c.shape.value_dim) + weight.bytes;
    r.dispatch("gated_rms_norm", [units.div_ceil(SIMDS), 1, 1], SIMDS * 32, bindings, &args, bytes);
}

/// Recurrence and gated norm of a decode step in one dispatch, a threadgroup a head; where [`scan_norm_applies`]. `z` and `out` are bf16.
#[allow(clippy::too_many_arguments)] // the operands of two operations
pub fn scan_norm(
    r: &mut Recorder,
    c: &Context,
    inputs: ScanInputs,
    z: Operand,
    weight: &DeviceWeight,
    eps: f32,
    layer: usize,
    layers: usize,
    out: Operand,
) {
    let (channels, heads) = inputs.sizes(c.shape);
    let segments = c.step.segments.len();
    let (kernel, rows) = match scan_norm_rows(c.shape, c.profile, heads * segments as u32) {
        Some(4) => ("scan_norm_4", 4),
        _ => ("scan_norm_8", 8),
    };
    let args = ScanNormArgs {
        channels,
        key_heads: inputs.key_heads as u32,
        heads,
        layer: layer as u32,
        state_words: c.tables.state_words,
        weight: weight.matrix.codes,
        eps,
    };
    let [entries, headers] = tables(c);
    let bindings = vec![
        read(inputs.qkv),
        read(inputs.decay),
        read(inputs.beta),
        read(z),
        constant(weight),
        entries,
        headers,
        c.tables.recurrent(layer, layers),
        write(out),
    ];
    let row = 2 * channels + 8 * heads + 4 * heads * c.shape.value_dim;
    let bytes = segments as u64 * u64::from(row) + state_bytes(c, heads, segments) + weight.bytes;
    let threads = c.shape.value_dim / rows * 32;
    let grid = [heads, segments as u32, 1];
    r.dispatch(kernel, grid, threads, bindings, &args, bytes + table_bytes(c));
    r.worth(token_work(c.shape, segments as u64 * u64::from(heads)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(name: &str) -> Profile {
        Profile::named(name).unwrap()
    }

    #[test]
    fn sizes_the_kernels_take() {
        let real = Shape::default();
        assert!(supported(&real).is_ok());
        assert!(supported(&Shape { key_dim: 32, value_dim: 64, ..real }).is_ok());
        assert!(supported(&Shape { key_dim: 48, ..real }).unwrap_err().contains("48 × 128"));
        assert!(supported(&Shape { value_dim: 80, ..real }).is_err());
        assert!(supported(&Shape { key_dim: 96, value_dim: 96, ..real }).is_ok());
        assert!(supported(&Shape { key_dim: 96, value_dim: 128, ..real }).is_err());
        assert!(supported(&Shape { conv_taps: 1, ..real }).is_err());
    }

    #[test]
    fn rows_of_a_scan_simdgroup() {
        let real = Shape::default();
        // 32 heads × 128 rows: 1,024 simdgroups of four rows are 7.8 a core of an H200, 512 of eight too few.
        assert_eq!(scan_rows(32, 1, &real, &on("h200")), 2);
        assert_eq!(scan_rows(32, 2, &real, &on("h200")), 4);
        // 40 cores: 512 simdgroups of eight are 12.8 a core.
        assert_eq!(scan_rows(32, 1, &real, &on("m5-max")), 8);
        let tiny = Shape { value_dim: 64, key_dim: 32, ..real };
        assert_eq!(scan_rows(4, 1, &tiny, &on("h200")), 1);
        assert_eq!(scan_rows(13, 1, &tiny, &on("h200")), 1);
        assert_eq!(scan_rows(4, 1, &tiny, &on("softgpu")), 2);
        assert_eq!(scan_rows(2, 1, &tiny, &on("softgpu")), 1);
    }

    #[test]
    fn rows_of_a_convolution_block() {
        // 8,192 channels are 64 strips; 2,112 simdgroups are 16 a core.
        assert_eq!(conv_block(1, 64, &on("h200")), 8);
        assert_eq!(conv_block(512, 64, &on("h200")), 8);
        assert_eq!(conv_block(528, 64, &on("h200")), 16);
        assert_eq!(conv_block(2048, 64, &on("h200")), 32);
        assert_eq!(conv_block(4096, 64, &on("h200")), 64);
    }

    #[test]
    fn a_head_of_the_fused_decode_kernel_is_one_threadgroup() {
        let rows =
            |value_dim| scan_norm_rows(&Shape { value_dim, ..Shape::default() }, &on("h200"), 32);
        assert_eq!([32, 128, 160, 256, 288].map(rows), [Some(4), Some(4), Some(8), Some(8), None]);
        // Heads of 1, 4, 5 and 8 slots; an Apple core has room for one threadgroup of either.
        let of = |name: &str| {
            [32, 128, 160, 256].map(|heads| scan_norm_rows(&Shape::default(), &on(name), heads))
        };
        assert_eq!(of("h200"), [Some(4), Some(4), Some(8), Some(8)]);
        assert_eq!(of("m4-max"), [Some(4); 4]);
    }
}
