//! Gated DeltaNet: causal convolution, q/k normalization, gates, the delta-rule scan and the gated norm.
//!
//! The recurrence is always the sequential scan over tokens. Each row of the state (one of the `dv`
//! outputs of a head) is independent of every other, so its bits depend neither on the grouping of rows
//! in registers nor on chunking, threads or batch mates.

use std::mem::MaybeUninit;

use super::common::{SharedMut, StoredElem, blocks, inverse_rms, load_n, store_n};
use crate::pool::Pool;
use crate::simd::math::{self, dot16};
use crate::simd::{Isa, Simd};
use crate::simd_entry;

/// Most convolution taps supported.
pub const MAX_TAPS: usize = 8;

/// Added to the squared length of a q or k head before its inverse square root.
const L2_EPS: f32 = 1e-6;

/// Channels of the convolution that one task handles.
const CONV_BLOCK: usize = 512;

/// Tokens whose q, k and v rows a scan task packs at a time: 16 KiB of q and k at `dk` = 128 stay in L1
/// while every group of state rows passes over them.
const SCAN_TOKENS: usize = 16;

/// Largest `dk` and `dv` of the scan.
pub const MAX_HEAD_DIM: usize = 256;

/// Dimensions of a Gated DeltaNet layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GdnShape {
    /// Query/key heads.
    pub key_heads: usize,
    /// Value heads; value head `h` uses key head `h / (value_heads / key_heads)`.
    pub value_heads: usize,
    /// Width of a query/key head.
    pub dk: usize,
    /// Width of a value head.
    pub dv: usize,
    /// Taps of the causal convolution.
    pub taps: usize,
}

impl GdnShape {
    /// Channels of the convolution: `[q | k | v]`.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.dk + self.value_heads * self.dv
    }

    /// Width of the layer's output before its out projection.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.dv
    }

    /// f32 elements of the recurrent state of one slot.
    pub fn state_len(&self) -> usize {
        self.value_heads * self.dv * self.dk
    }

    /// Elements of the convolution state of one slot.
    pub fn conv_state_len(&self) -> usize {
        (self.taps - 1) * self.channels()
    }

    /// Whether the kernels of this module take the shape; the error says why not.
    pub fn supported(&self) -> Result<(), String> {
        let GdnShape { key_heads, value_heads, dk, dv, taps } = *self;
        if key_heads == 0 || value_heads == 0 || !value_heads.is_multiple_of(key_heads) {
            return Err(format!(
                "{value_heads} value heads are not a multiple of {key_heads} key heads"
            ));
        }
        for (name, width) in [("key", dk), ("value", dv)] {
            if width == 0 || !width.is_multiple_of(16) || width > MAX_HEAD_DIM {
                return Err(format!(
                    "{name} head dimension {width}: need a multiple of 16 of at most {MAX_HEAD_DIM}"
                ));
            }
        }
        if !(2..=MAX_TAPS).contains(&taps) {
            return Err(format!("{taps} convolution taps: need 2 to {MAX_TAPS}"));
        }
        Ok(())
    }
}

/// A run of rows of one slot with the slot's own state.
#[derive(Debug)]
pub struct StateSegment<'a, T> {
    /// First row of the segment in the step's activations.
    pub first_row: usize,
    /// Rows (tokens) of the segment, in order.
    pub rows: usize,
    /// The slot's state of this layer, read and updated in place.
    pub state: &'a mut [T],
}

/// Reorders a `[channels][taps]` convolution weight to the `[taps][channels]` that [`causal_conv`] reads.
pub fn conv_weight_by_tap(weight: &[f32], taps: usize) -> Vec<f32> {
    let channels = weight.len() / taps;
    (0..taps * channels).map(|i| weight[(i % channels) * taps + i / channels]).collect()
}

/// Depthwise causal convolution with silu: reads `input`, writes `out`, both `[rows][channels]`.
///
/// `weight` is `[taps][channels]`, the last tap multiplying the current token. Inputs are first rounded
/// to the state's element type, so that a chunk boundary changes nothing. Each segment's state holds the
/// last `taps - 1` input rows, oldest first.
pub fn causal_conv<T: StoredElem>(
    isa: Isa,
    pool: &Pool,
    shape: &GdnShape,
    segments: &mut [StateSegment<'_, T>],
    input: &[f32],
    weight: &[f32],
    out: &mut [f32],
) {
    let (channels, taps) = (shape.channels(), shape.taps);
    shape.supported().expect("shape checked at prepare time");
    assert_eq!(weight.len(), taps * channels);
    assert_eq!(input.len(), out.len());
    check_segments(segments, out.len() / channels, (taps - 1) * channels);
    let per_segment = channels.div_ceil(CONV_BLOCK);
    let out = SharedMut::new(out);
    let jobs: Vec<_> =
        segments.iter_mut().map(|s| (s.first_row, s.rows, SharedMut::new(&mut *s.state))).collect();
    pool.run(jobs.len() * per_segment, &|task, _| {
        let (first_row, rows, state) = &jobs[task / per_segment];
        let c0 = task % per_segment * CONV_BLOCK;
        let block = ConvBlock {
            bf16: T::BF16,
            channels,
            taps,
            width: CONV_BLOCK.min(channels - c0),
            rows: *rows,
            input: input[first_row * channels..][c0..].as_ptr(),
            weight: weight[c0..].as_ptr(),
            // SAFETY: `check_segments` bounds the rows; tasks differ in segment or channel block.
            out: unsafe { out.ptr(first_row * channels + c0) },
            // SAFETY: as above; the state holds `(taps - 1) * channels` elements.
            state: unsafe { state.ptr(c0) }.cast(),
        };
        // SAFETY: the pointers of `block` are valid for its rows and channels, by the checks above.
        unsafe { conv_block(isa, &block) }
    });
}

/// One channel block of one segment of the convolution. Rows are `channels` apart.
struct ConvBlock {
    bf16: bool,
    channels: usize,
    taps: usize,
    width: usize,
    rows: usize,
    input: *const f32,
    weight: *const f32,
    out: *mut f32,
    /// Elements are bf16 or f32, as `bf16` says.
    state: *mut u8,
}

simd_entry! {
    unsafe fn conv_block(b: &ConvBlock) = conv_block_kernel;
}

#[inline(always)]
unsafe fn conv_block_kernel<S: Simd>(b: &ConvBlock) {
    // SAFETY: passed on from the caller.
    unsafe { if b.bf16 { conv_rows::<S, u16>(b) } else { conv_rows::<S, f32>(b) } }
}

#[inline(always)]
unsafe fn conv_rows<S: Simd, T: StoredElem>(b: &ConvBlock) {
    let state = b.state.cast::<T>();
    // The last `taps` rounded rows; row `t` of the segment lives in slot `(t + taps - 1) % taps`.
    let mut ring = MaybeUninit::<[f32; CONV_BLOCK * MAX_TAPS]>::uninit();
    let ring = ring.as_mut_ptr().cast::<f32>();
    let history = b.taps - 1;
    // SAFETY: the caller vouches for the pointers of `b`; widths are multiples of 16 of at most
    // `CONV_BLOCK`, slots are below `taps <= MAX_TAPS`, and every slot is written before it is read.
    unsafe {
        for j in 0..history {
            for c in (0..b.width).step_by(16) {
                S::store(ring.add(j * CONV_BLOCK + c), T::load::<S>(state.add(j * b.channels + c)));
            }
        }
        for t in 0..b.rows {
            let mut slots = [0; MAX_TAPS];
            for (j, slot) in slots.iter_mut().enumerate().take(b.taps) {
                *slot = (t + j) % b.taps * CONV_BLOCK;
            }
            let (input, out) = (b.input.add(t * b.channels), b.out.add(t * b.channels));
            for c in (0..b.width).step_by(16) {
                let current = T::round::<S>(S::load(input.add(c)));
                S::store(ring.add(slots[history] + c), current);
                let mut sum = S::mul(S::load(b.weight.add(c)), S::load(ring.add(slots[0] + c)));
                for (j, slot) in slots.iter().enumerate().take(history).skip(1) {
                    let w = S::load(b.weight.add(j * b.channels + c));
                    sum = S::fma(w, S::load(ring.add(slot + c)), sum);
                }
                sum = S::fma(S::load(b.weight.add(history * b.channels + c)), current, sum);
                S::store(out.add(c), math::silu::<S>(sum));
            }
        }
        for j in 0..history {
            let slot = (b.rows + j) % b.taps * CONV_BLOCK;
            for c in (0..b.width).step_by(16) {
                T::store::<S>(state.add(j * b.channels + c), S::load(ring.add(slot + c)));
            }
        }
    }
}

/// L2-normalizes the q and k heads of the convolution's output in place; q is also scaled by `dk^-0.5`.
pub fn qk_l2_norm(isa: Isa, pool: &Pool, shape: &GdnShape, qkv: &mut [f32]) {
    let channels = shape.channels();
    let rows = qkv.len() / channels;
    assert_eq!(qkv.len(), rows * channels);
    shape.supported().expect("shape checked at prepare time");
    let qkv = SharedMut::new(qkv);
    let blocks = blocks(rows, 2 * shape.key_heads * shape.dk);
    pool.run(blocks.count, &|task, _| {
        for row in blocks.range(task) {
            // SAFETY: each task has its own rows.
            let heads = unsafe { qkv.slice(row * channels, 2 * shape.key_heads * shape.dk) };
            l2_row(isa, heads, shape)
        }
    });
}

simd_entry! {
    fn l2_row(heads: &mut [f32], shape: &GdnShape) = l2_row_kernel;
}

#[inline(always)]
unsafe fn l2_row_kernel<S: Simd>(heads: &mut [f32], shape: &GdnShape) {
    let scale = (1.0 / (shape.dk as f64).sqrt()) as f32;
    for (i, head) in heads.chunks_exact_mut(shape.dk).enumerate() {
        // SAFETY: `dk` is a multiple of 16.
        unsafe {
            let square = dot16::<S>(head.as_ptr(), head.as_ptr(), shape.dk);
            let r = S::splat(1.0 / (square + L2_EPS).sqrt());
            for c in (0..shape.dk).step_by(16) {
                let p = head.as_mut_ptr().add(c);
                let unit = S::mul(S::load(p), r);
                S::store(p, if i < shape.key_heads { S::mul(unit, S::splat(scale)) } else { unit });
            }
        }
    }
}

/// Inputs of [`gates`]: projections `[rows][value_heads]` and per-head parameters.
#[derive(Clone, Copy, Debug)]
pub struct GateInput<'a> {
    /// Output of the `a` projection.
    pub a: &'a [f32],
    /// Output of the `b` projection.
    pub b: &'a [f32],
    /// Logarithm of the decay rate of each head.
    pub a_log: &'a [f32],
    /// Bias added to `a`.
    pub dt_bias: &'a [f32],
}

/// Per-head gates `[rows][value_heads]`: decay `exp(-exp(A_log) * softplus(a + dt_bias))` and write
/// strength `sigmoid(b)`.
pub fn gates(isa: Isa, input: &GateInput<'_>, decay: &mut [f32], beta: &mut [f32]) {
    let heads = input.a_log.len();
    assert!(heads > 0 && input.dt_bias.len() == heads && decay.len().is_multiple_of(heads));
    assert!([input.a.len(), input.b.len(), beta.len()].iter().all(|&n| n == decay.len()));
    gates_rows(isa, input, decay, beta)
}

simd_entry! {
    fn gates_rows(input: &GateInput<'_>, decay: &mut [f32], beta: &mut [f32]) = gates_rows_kernel;
}

#[inline(always)]
unsafe fn gates_rows_kernel<S: Simd>(input: &GateInput<'_>, decay: &mut [f32], beta: &mut [f32]) {
    let heads = input.a_log.len();
    for row in (0..decay.len()).step_by(heads) {
        for h in (0..heads).step_by(16) {
            let (at, n) = (row + h, (heads - h).min(16));
            let (a, b) = (&input.a[at..at + n], &input.b[at..at + n]);
            let (a_log, dt_bias) = (&input.a_log[h..h + n], &input.dt_bias[h..h + n]);
            // SAFETY: only the instruction set is at stake.
            unsafe {
                let rate = math::exp::<S>(load_n::<S>(a_log));
                let step = math::softplus::<S>(S::add(load_n::<S>(a), load_n::<S>(dt_bias)));
                let g = math::exp::<S>(S::mul(S::neg(rate), step));
                store_n::<S>(&mut decay[at..at + n], g);
                store_n::<S>(&mut beta[at..at + n], math::sigmoid::<S>(load_n::<S>(b)));
            }
        }
    }
}

/// Inputs of [`scan`].
#[derive(Clone, Copy, Debug)]
pub struct ScanInput<'a> {
    /// `[rows][channels]`: `[q | k | v]` with q and k normalized.
    pub qkv: &'a [f32],
    /// `[rows][value_heads]`: decay of the state.
    pub decay: &'a [f32],
    /// `[rows][value_heads]`: write strength.
    pub beta: &'a [f32],
}

/// The gated delta rule over each segment's tokens in order. State `[value head][dv][dk]`, output
/// `[rows][value_heads * dv]`.
pub fn scan(
    isa: Isa,
    pool: &Pool,
    shape: &GdnShape,
    segments: &mut [StateSegment<'_, f32>],
    input: &ScanInput<'_>,
    y: &mut [f32],
) {
    shape.supported().expect("shape checked at prepare time");
    let GdnShape { value_heads, dv, dk, .. } = *shape;
    let rows = y.len() / shape.value_width();
    assert_eq!(input.qkv.len(), rows * shape.channels());
    assert!(input.decay.len() == rows * value_heads && input.beta.len() == rows * value_heads);
    check_segments(segments, rows, shape.state_len());

    // A task is a block of one head's state rows; heads are split only to feed every thread.
    let heads = segments.len() * value_heads;
    let parts = (4 * pool.threads()).div_ceil(heads.max(1)).clamp(1, dv.div_ceil(16));
    let block = dv.div_ceil(parts).next_multiple_of(ROWS);
    let parts = dv.div_ceil(block);

    let y = SharedMut::new(y);
    let jobs: Vec<_> =
        segments.iter_mut().map(|s| (s.first_row, s.rows, SharedMut::new(&mut *s.state))).collect();
    pool.run(heads * parts, &|task, _| {
        let (first_row, tokens, state) = &jobs[task / (value_heads * parts)];
        let head = task / parts % value_heads;
        let first = task % parts * block;
        let rows = block.min(dv - first);
        let block = ScanBlock {
            shape,
            input,
            head,
            first,
            rows,
            first_row: *first_row,
            tokens: *tokens,
            // SAFETY: `check_segments` bounds rows and state; tasks differ in segment, head or state rows.
            state: unsafe { state.ptr((head * dv + first) * dk) },
            y: &y,
        };
        // SAFETY: as above.
        unsafe { scan_block(isa, &block) }
    });
}

/// State rows that one pass keeps in registers: three rows of `dk` = 128 are 24 of AVX-512's 32.
const ROWS: usize = 3;

/// One task of the scan: state rows `first..first + rows` of one head over one segment.
struct ScanBlock<'a> {
    shape: &'a GdnShape,
    input: &'a ScanInput<'a>,
    head: usize,
    first: usize,
    rows: usize,
    first_row: usize,
    tokens: usize,
    state: *mut f32,
    y: &'a SharedMut<'a, f32>,
}

/// A chunk of tokens packed for the scan: in the activations the rows of one head lie a power of two
/// apart and would fight for a few cache sets.
#[repr(C, align(64))]
struct ScanTokens {
    /// `[token][k | q]`, `2 * dk` a token.
    kq: [f32; SCAN_TOKENS * 2 * MAX_HEAD_DIM],
    /// `[token][state row of the block]`.
    v: [[f32; MAX_HEAD_DIM]; SCAN_TOKENS],
    y: [[f32; MAX_HEAD_DIM]; SCAN_TOKENS],
    decay: [f32; SCAN_TOKENS],
    beta: [f32; SCAN_TOKENS],
}

simd_entry! {
    unsafe fn scan_block(b: &ScanBlock<'_>) = scan_block_kernel;
}

#[inline(always)]
unsafe fn scan_block_kernel<S: Simd>(b: &ScanBlock<'_>) {
    let GdnShape { key_heads, value_heads, dk, dv, .. } = *b.shape;
    let channels = b.shape.channels();
    let key_head = b.head / (value_heads / key_heads);
    let mut packed = MaybeUninit::<ScanTokens>::uninit();
    let packed = packed.as_mut_ptr();
    for t0 in (0..b.tokens).step_by(SCAN_TOKENS) {
        let tokens = SCAN_TOKENS.min(b.tokens - t0);
        for t in 0..tokens {
            let row = b.first_row + t0 + t;
            let qkv = &b.input.qkv[row * channels..][..channels];
            let q = &qkv[key_head * dk..][..dk];
            let k = &qkv[(key_heads + key_head) * dk..][..dk];
            let v = &qkv[2 * key_heads * dk + b.head * dv + b.first..][..b.rows];
            // SAFETY: `t < SCAN_TOKENS`; `dk`, `rows` are at most `MAX_HEAD_DIM`; the arrays of `packed`
            // are only touched through raw places, so nothing uninitialized is read.
            unsafe {
                let kq = (&raw mut (*packed).kq).cast::<f32>().add(t * 2 * dk);
                kq.copy_from_nonoverlapping(k.as_ptr(), dk);
                kq.add(dk).copy_from_nonoverlapping(q.as_ptr(), dk);
                let to = (&raw mut (*packed).v[t]).cast::<f32>();
                to.copy_from_nonoverlapping(v.as_ptr(), b.rows);
                (*packed).decay[t] = b.input.decay[row * value_heads + b.head];
                (*packed).beta[t] = b.input.beta[row * value_heads + b.head];
            }
        }
        // SAFETY: the first `tokens` tokens are packed, and the caller vouches for the state.
        unsafe {
            match dk / 16 {
                2 => scan_rows::<S, 2>(packed, b.state, b.rows, tokens),
                4 => scan_rows::<S, 4>(packed, b.state, b.rows, tokens),
                8 => scan_rows::<S, 8>(packed, b.state, b.rows, tokens),
                _ => scan_rows_any::<S>(packed, b.state, b.rows, tokens, dk),
            }
            for t in 0..tokens {
                let row = b.first_row + t0 + t;
                let at = row * value_heads * dv + b.head * dv + b.first;
                let y = (&raw const (*packed).y[t]).cast::<f32>();
                b.y.ptr(at).copy_from_nonoverlapping(y, b.rows);
            }
        }
    }
}

/// Passes a chunk of tokens over `rows` state rows of `16 * C` elements, up to [`ROWS`] at a time.
#[inline(always)]
unsafe fn scan_rows<S: Simd, const C: usize>(
    packed: *mut ScanTokens,
    state: *mut f32,
    rows: usize,
    tokens: usize,
) {
    let mut r = 0;
    // SAFETY: passed on from the caller; `r + R <= rows` in each call.
    unsafe {
        while r + ROWS <= rows {
            scan_group::<S, ROWS, C>(packed, state.add(r * 16 * C), r, tokens);
            r += ROWS;
        }
        match rows - r {
            1 => scan_group::<S, 1, C>(packed, state.add(r * 16 * C), r, tokens),
            2 => scan_group::<S, 2, C>(packed, state.add(r * 16 * C), r, tokens),
            _ => {}
        }
    }
}

/// `R` state rows stay in registers while the tokens pass.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn scan_group<S: Simd, const R: usize, const C: usize>(
    packed: *mut ScanTokens,
    state: *mut f32,
    first: usize,
    tokens: usize,
) {
    // SAFETY: the caller vouches for `R` rows of state and for `tokens` packed tokens.
    unsafe {
        let mut s = [[S::splat(0.0); C]; R];
        for (r, row) in s.iter_mut().enumerate() {
            for (c, lanes) in row.iter_mut().enumerate() {
                *lanes = S::load(state.add((r * C + c) * 16));
            }
        }
        // Raw pointers: a bounds check between the rows would keep their chains from interleaving.
        let kq = (&raw const (*packed).kq).cast::<f32>();
        let v = (&raw const (*packed).v).cast::<f32>().add(first);
        let y = (&raw mut (*packed).y).cast::<f32>().add(first);
        let (decay, beta) =
            ((&raw const (*packed).decay).cast::<f32>(), (&raw const (*packed).beta).cast::<f32>());
        for t in 0..tokens {
            let k = kq.add(t * 32 * C);
            let q = k.add(16 * C);
            let g = S::splat(*decay.add(t));
            let beta = *beta.add(t);
            let mut sum = [S::splat(0.0); R];
            for c in 0..C {
                let k = S::load(k.add(16 * c));
                for r in 0..R {
                    s[r][c] = S::mul(s[r][c], g);
                    sum[r] = S::fma(s[r][c], k, sum[r]);
                }
            }
            let mut delta = [S::splat(0.0); R];
            for r in 0..R {
                let v = *v.add(t * MAX_HEAD_DIM + r);
                delta[r] = S::splat((v - S::reduce_add(sum[r])) * beta);
                sum[r] = S::splat(0.0);
            }
            for c in 0..C {
                let (k, q) = (S::load(k.add(16 * c)), S::load(q.add(16 * c)));
                for r in 0..R {
                    s[r][c] = S::fma(delta[r], k, s[r][c]);
                    sum[r] = S::fma(s[r][c], q, sum[r]);
                }
            }
            for r in 0..R {
                *y.add(t * MAX_HEAD_DIM + r) = S::reduce_add(sum[r]);
            }
        }
        for (r, row) in s.iter().enumerate() {
            for (c, &lanes) in row.iter().enumerate() {
                S::store(state.add((r * C + c) * 16), lanes);
            }
        }
    }
}

/// The same for a `dk` without its own instance: the state stays in memory.
#[inline(always)]
unsafe fn scan_rows_any<S: Simd>(
    packed: *mut ScanTokens,
    state: *mut f32,
    rows: usize,
    tokens: usize,
    dk: usize,
) {
    // SAFETY: the caller vouches for `rows` rows of state and for `tokens` packed tokens.
    unsafe {
        for r in 0..rows {
            let state = state.add(r * dk);
            for t in 0..tokens {
                let k = (&raw const (*packed).kq).cast::<f32>().add(t * 2 * dk);
                let q = k.add(dk);
                let decay = S::splat((*packed).decay[t]);
                let mut sum = S::splat(0.0);
                for c in (0..dk).step_by(16) {
                    let s = S::mul(S::load(state.add(c)), decay);
                    S::store(state.add(c), s);
                    sum = S::fma(s, S::load(k.add(c)), sum);
                }
                let delta = S::splat(((*packed).v[t][r] - S::reduce_add(sum)) * (*packed).beta[t]);
                sum = S::splat(0.0);
                for c in (0..dk).step_by(16) {
                    let s = S::fma(delta, S::load(k.add(c)), S::load(state.add(c)));
                    S::store(state.add(c), s);
                    sum = S::fma(s, S::load(q.add(c)), sum);
                }
                (*packed).y[t][r] = S::reduce_add(sum);
            }
        }
    }
}

/// Inputs of [`gated_rms_norm`].
#[derive(Clone, Copy, Debug)]
pub struct GatedNorm<'a> {
    /// Norm weight of one value head, `[dv]`.
    pub weight: &'a [f32],
    /// Gate `[rows][value_heads * dv]`.
    pub z: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
}

/// Per value head, in place: `rms(y) * weight * silu(z)`.
pub fn gated_rms_norm(isa: Isa, pool: &Pool, norm: &GatedNorm<'_>, y: &mut [f32]) {
    let dv = norm.weight.len();
    assert!(
        dv > 0 && dv.is_multiple_of(16) && y.len().is_multiple_of(dv) && norm.z.len() == y.len()
    );
    let blocks = blocks(y.len() / dv, dv * 4);
    let y = SharedMut::new(y);
    pool.run(blocks.count, &|task, _| {
        let heads = blocks.range(task);
        // SAFETY: each task has its own heads.
        let y = unsafe { y.slice(heads.start * dv, heads.len() * dv) };
        let z = &norm.z[heads.start * dv..][..y.len()];
        gated_heads(isa, norm, y, z)
    });
}

simd_entry! {
    fn gated_heads(norm: &GatedNorm<'_>, y: &mut [f32], z: &[f32]) = gated_heads_kernel;
}

#[inline(always)]
unsafe fn gated_heads_kernel<S: Simd>(norm: &GatedNorm<'_>, y: &mut [f32], z: &[f32]) {
    let dv = norm.weight.len();
    for (y, z) in y.chunks_exact_mut(dv).zip(z.chunks_exact(dv)) {
        // SAFETY: the three rows hold `dv` elements, a multiple of 16.
        unsafe {
            let r = S::splat(inverse_rms::<S>(y.as_ptr(), dv, norm.eps));
            for c in (0..dv).step_by(16) {
                let n = S::mul(
                    S::mul(S::load(y.as_ptr().add(c)), r),
                    S::load(norm.weight.as_ptr().add(c)),
                );
                let gate = math::silu::<S>(S::load(z.as_ptr().add(c)));
                S::store(y.as_mut_ptr().add(c), S::mul(n, gate));
            }
        }
    }
}

/// Panics unless the segments are ascending, disjoint, inside `rows`, and hold `state_len` elements each.
fn check_segments<T>(segments: &[StateSegment<'_, T>], rows: usize, state_len: usize) {
    let mut next = 0;
    for s in segments {
        assert!(
            s.first_row >= next && s.rows <= rows && s.first_row <= rows - s.rows,
            "segment rows"
        );
        assert_eq!(s.state.len(), state_len, "state of a segment");
        next = s.first_row + s.rows;
    }
}
