//! Element-wise kernels, row gathering, the expert combination, and reductions over logits.

use super::common::{SharedMut, TASK_ELEMS, blocks, load_n, store_n};
use crate::pool::Pool;
use crate::simd::{Isa, Simd, math};
use crate::simd_entry;

/// `x += y`.
pub fn add(isa: Isa, pool: &Pool, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len());
    let blocks = blocks(x.len(), 1);
    let x = SharedMut::new(x);
    pool.run(blocks.count, &|task, _| {
        let range = blocks.range(task);
        // SAFETY: each task has its own elements.
        let x = unsafe { x.slice(range.start, range.len()) };
        add_block(isa, x, &y[range])
    });
}

simd_entry! {
    fn add_block(x: &mut [f32], y: &[f32]) = add_block_kernel;
}

#[inline(always)]
unsafe fn add_block_kernel<S: Simd>(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.chunks_mut(16).zip(y.chunks(16)) {
        // SAFETY: passed on from the caller.
        unsafe { store_n::<S>(x, S::add(load_n::<S>(x), load_n::<S>(y))) }
    }
}

/// `gate = silu(gate) * up`.
pub fn swiglu(isa: Isa, pool: &Pool, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len());
    let blocks = blocks(gate.len(), 4);
    let gate = SharedMut::new(gate);
    pool.run(blocks.count, &|task, _| {
        let range = blocks.range(task);
        // SAFETY: each task has its own elements.
        let gate = unsafe { gate.slice(range.start, range.len()) };
        swiglu_block(isa, gate, &up[range])
    });
}

simd_entry! {
    fn swiglu_block(gate: &mut [f32], up: &[f32]) = swiglu_block_kernel;
}

#[inline(always)]
unsafe fn swiglu_block_kernel<S: Simd>(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.chunks_mut(16).zip(up.chunks(16)) {
        // SAFETY: passed on from the caller.
        unsafe { store_n::<S>(gate, S::mul(math::silu::<S>(load_n::<S>(gate)), load_n::<S>(up))) }
    }
}

/// `o *= sigmoid(gate)` per head; the gate follows each head's q in `q_gate`
/// (`[rows][heads][q head_dim | gate head_dim]`, `o` is `[rows][heads][head_dim]`).
pub fn attn_gate(isa: Isa, pool: &Pool, head_dim: usize, q_gate: &[f32], o: &mut [f32]) {
    assert!(head_dim > 0 && o.len().is_multiple_of(head_dim) && q_gate.len() == 2 * o.len());
    let blocks = blocks(o.len() / head_dim, head_dim * 4);
    let o = SharedMut::new(o);
    pool.run(blocks.count, &|task, _| {
        for head in blocks.range(task) {
            let gate = &q_gate[(2 * head + 1) * head_dim..][..head_dim];
            // SAFETY: each task has its own heads.
            let o = unsafe { o.slice(head * head_dim, head_dim) };
            gate_head(isa, gate, o)
        }
    });
}

simd_entry! {
    fn gate_head(gate: &[f32], o: &mut [f32]) = gate_head_kernel;
}

#[inline(always)]
unsafe fn gate_head_kernel<S: Simd>(gate: &[f32], o: &mut [f32]) {
    for (o, gate) in o.chunks_mut(16).zip(gate.chunks(16)) {
        // SAFETY: passed on from the caller.
        unsafe { store_n::<S>(o, S::mul(load_n::<S>(o), math::sigmoid::<S>(load_n::<S>(gate)))) }
    }
}

/// Inputs of [`moe_combine`].
#[derive(Clone, Copy, Debug)]
pub struct MoeCombine<'a> {
    /// Experts per token.
    pub top_k: usize,
    /// Expert outputs `[rows * top_k][width]`; routed row `row * top_k + rank`.
    pub routed: &'a [f32],
    /// Routing weights `[rows * top_k]`.
    pub weights: &'a [f32],
    /// Shared expert output `[rows][width]`.
    pub shared: &'a [f32],
    /// Logit of the shared expert's gate, `[rows]`.
    pub shared_gate: &'a [f32],
}

/// Adds to each residual row the weighted expert outputs in rank order, then the gated shared expert.
pub fn moe_combine(isa: Isa, pool: &Pool, input: &MoeCombine<'_>, residual: &mut [f32]) {
    let rows = input.shared_gate.len();
    if rows == 0 {
        return;
    }
    let width = residual.len() / rows;
    assert!(residual.len() == rows * width && input.shared.len() == residual.len());
    assert!(input.weights.len() == rows * input.top_k);
    assert!(input.routed.len() == rows * input.top_k * width);
    let blocks = blocks(rows, width * (input.top_k + 2));
    let residual = SharedMut::new(residual);
    pool.run(blocks.count, &|task, _| {
        for row in blocks.range(task) {
            // SAFETY: each task has its own rows.
            let residual = unsafe { residual.slice(row * width, width) };
            combine_row(isa, input, row, residual)
        }
    });
}

simd_entry! {
    fn combine_row(input: &MoeCombine<'_>, row: usize, residual: &mut [f32]) = combine_row_kernel;
}

#[inline(always)]
unsafe fn combine_row_kernel<S: Simd>(input: &MoeCombine<'_>, row: usize, residual: &mut [f32]) {
    let (width, k) = (residual.len(), input.top_k);
    let weights = &input.weights[row * k..][..k];
    let routed = &input.routed[row * k * width..][..k * width];
    let shared = &input.shared[row * width..][..width];
    // SAFETY: passed on from the caller.
    unsafe {
        let gate = math::sigmoid::<S>(S::splat(input.shared_gate[row]));
        for c in (0..width).step_by(16) {
            let end = (c + 16).min(width);
            let mut acc = S::splat(0.0);
            for (rank, &w) in weights.iter().enumerate() {
                let y = load_n::<S>(&routed[rank * width + c..rank * width + end]);
                acc = S::fma(S::splat(w), y, acc);
            }
            acc = S::fma(gate, load_n::<S>(&shared[c..end]), acc);
            let sum = S::add(load_n::<S>(&residual[c..end]), acc);
            store_n::<S>(&mut residual[c..end], sum);
        }
    }
}

/// Copies rows `ids` of `x` (`width` wide) to `out`.
pub fn gather_rows(pool: &Pool, x: &[f32], width: usize, ids: &[u32], out: &mut [f32]) {
    assert_eq!(out.len(), ids.len() * width);
    let blocks = blocks(ids.len(), width);
    let out = SharedMut::new(out);
    pool.run(blocks.count, &|task, _| {
        for i in blocks.range(task) {
            // SAFETY: each task has its own rows.
            let out = unsafe { out.slice(i * width, width) };
            out.copy_from_slice(&x[ids[i] as usize * width..][..width]);
        }
    });
}

/// Whether no element is NaN or infinite.
pub fn all_finite(isa: Isa, x: &[f32]) -> bool {
    // Blocks bound the work after the first bad element.
    x.chunks(TASK_ELEMS).all(|x| finite_block(isa, x))
}

simd_entry! {
    fn finite_block(x: &[f32]) -> bool = finite_block_kernel;
}

#[inline(always)]
unsafe fn finite_block_kernel<S: Simd>(x: &[f32]) -> bool {
    // SAFETY: passed on from the caller.
    unsafe {
        // x * 0 is a zero exactly for finite x, and any NaN survives the sum.
        let mut sum = [S::splat(0.0); 4];
        let mut tiles = x.chunks_exact(64);
        for tile in &mut tiles {
            for (i, sum) in sum.iter_mut().enumerate() {
                *sum = S::fma(S::load(tile.as_ptr().add(i * 16)), S::splat(0.0), *sum);
            }
        }
        for tile in tiles.remainder().chunks(16) {
            sum[0] = S::fma(load_n::<S>(tile), S::splat(0.0), sum[0]);
        }
        let sum = S::add(S::add(sum[0], sum[1]), S::add(sum[2], sum[3]));
        S::reduce_add(sum) == 0.0
    }
}

/// Index of the first maximum. NaN never wins; `None` for an empty row or one of NaN only.
pub fn argmax(isa: Isa, x: &[f32]) -> Option<usize> {
    let mut best: Option<(usize, f32)> = None;
    for (i, block) in x.chunks(TASK_ELEMS).enumerate() {
        let max = max_block(isa, block);
        if best.is_none_or(|(_, b)| max > b) {
            // A block of NaN has the maximum -inf without holding it.
            if let Some(at) = block.iter().position(|&v| v == max) {
                best = Some((i * TASK_ELEMS + at, max));
            }
        }
    }
    best.map(|(at, _)| at)
}

simd_entry! {
    fn max_block(x: &[f32]) -> f32 = max_block_kernel;
}

/// Largest element, NaN ignored; -inf if there is none.
#[inline(always)]
unsafe fn max_block_kernel<S: Simd>(x: &[f32]) -> f32 {
    // SAFETY: passed on from the caller.
    unsafe {
        let mut max = [S::splat(f32::NEG_INFINITY); 4];
        let mut tiles = x.chunks_exact(64);
        for tile in &mut tiles {
            for (i, max) in max.iter_mut().enumerate() {
                *max = S::max(S::load(tile.as_ptr().add(i * 16)), *max);
            }
        }
        let max = S::max(S::max(max[0], max[1]), S::max(max[2], max[3]));
        let tail = tiles.remainder().iter().fold(f32::NEG_INFINITY, |m, &v| m.max(v));
        S::reduce_max(max).max(tail)
    }
}

/// `ln(sum(exp(x)))` of one row of logits. NaN if any logit is.
pub fn log_sum_exp(isa: Isa, x: &[f32]) -> f64 {
    log_sum_exp_row(isa, x)
}

simd_entry! {
    fn log_sum_exp_row(x: &[f32]) -> f64 = log_sum_exp_row_kernel;
}

#[inline(always)]
unsafe fn log_sum_exp_row_kernel<S: Simd>(x: &[f32]) -> f64 {
    // SAFETY: passed on from the caller.
    unsafe {
        let max = max_block_kernel::<S>(x);
        let shift = S::splat(max);
        let mut sum = S::splat(0.0);
        let mut tiles = x.chunks_exact(16);
        for tile in &mut tiles {
            sum = S::add(sum, math::exp::<S>(S::sub(S::load(tile.as_ptr()), shift)));
        }
        let tail = tiles.remainder();
        if !tail.is_empty() {
            let mut padded = [f32::NEG_INFINITY; 16];
            padded[..tail.len()].copy_from_slice(tail);
            sum = S::add(sum, math::exp::<S>(S::sub(S::load(padded.as_ptr()), shift)));
        }
        f64::from(max) + ln(f64::from(S::reduce_add(sum)))
    }
}

/// Natural logarithm of a positive normal number, the same on every platform.
fn ln(x: f64) -> f64 {
    if !(x > 0.0 && x.is_finite()) {
        return if x == 0.0 { f64::NEG_INFINITY } else { x };
    }
    // x = 2^e * m with m in [sqrt(1/2), sqrt(2)); ln m = 2 atanh((m - 1) / (m + 1)).
    let bits = x.to_bits();
    let mut e = (bits >> 52) as i32 - 1023;
    let mut m = f64::from_bits(bits & ((1 << 52) - 1) | 1023 << 52);
    if m > std::f64::consts::SQRT_2 {
        m *= 0.5;
        e += 1;
    }
    let s = (m - 1.0) / (m + 1.0);
    let mut series = 0.0;
    for n in (0..12).rev() {
        series = series * (s * s) + 1.0 / f64::from(2 * n + 1);
    }
    f64::from(e) * std::f64::consts::LN_2 + 2.0 * s * series
}
