//! Preparation of attention: rope angles, norm and rope of q and k, and writing k and v to the pages.

use super::{AttentionSegment, AttentionShape, MAX_HEAD_DIM, PAGE_TOKENS, check_segments};
use crate::kernels::common::{SharedMut, StoredElem, inverse_rms};
use crate::pool::Pool;
use crate::simd::{Isa, Simd};
use crate::simd_entry;

/// Rope angles: `pos * theta^(-2i / rot)`, in f64.
#[derive(Clone, Debug)]
pub struct RopeTable {
    inv_freq: Vec<f64>,
}

impl RopeTable {
    /// Frequencies for `rot` rotated dimensions.
    pub fn new(theta: f64, rot: usize) -> Self {
        let freq = |i: usize| theta.powf(-2.0 * i as f64 / rot as f64);
        RopeTable { inv_freq: (0..rot / 2).map(freq).collect() }
    }

    /// Writes cosines and sines of one position, `rot / 2` each.
    pub fn fill(&self, position: usize, cos: &mut [f32], sin: &mut [f32]) {
        for ((&f, cos), sin) in self.inv_freq.iter().zip(cos).zip(sin) {
            let (s, c) = (position as f64 * f).sin_cos();
            (*cos, *sin) = (c as f32, s as f32);
        }
    }

    /// Resizes `cos` and `sin` to `[rows][rot / 2]` and fills the rows of the segments: once a step, for
    /// all layers.
    pub fn fill_rows(
        &self,
        rows: usize,
        segments: &[AttentionSegment<'_>],
        cos: &mut Vec<f32>,
        sin: &mut Vec<f32>,
    ) {
        let half = self.inv_freq.len();
        cos.resize(rows * half, 0.0);
        sin.resize(rows * half, 0.0);
        for s in segments {
            for t in 0..s.rows {
                let at = (s.first_row + t) * half;
                self.fill(s.start + t, &mut cos[at..at + half], &mut sin[at..at + half]);
            }
        }
    }
}

/// Inputs of [`attention_prep`].
#[derive(Clone, Copy, Debug)]
pub struct PrepInput<'a> {
    /// `[rows][heads][q head_dim | gate head_dim]`.
    pub q_gate: &'a [f32],
    /// `[rows][kv_heads * head_dim]`.
    pub k: &'a [f32],
    /// `[rows][kv_heads * head_dim]`.
    pub v: &'a [f32],
    /// Norm weight of a query head.
    pub q_norm: &'a [f32],
    /// Norm weight of a key head.
    pub k_norm: &'a [f32],
    /// Added to the mean square.
    pub eps: f32,
    /// Rope cosines `[rows][rot / 2]`.
    pub cos: &'a [f32],
    /// Rope sines `[rows][rot / 2]`.
    pub sin: &'a [f32],
}

/// Pages of one layer to write to.
#[derive(Debug)]
pub struct KvPagesMut<'a, T> {
    /// `[page][kv head][token][head_dim]`.
    pub k: &'a mut [T],
    /// `[page][kv head][token][head_dim]`.
    pub v: &'a mut [T],
}

/// Normalizes and rotates q and k; writes q to `q_out` (`[rows][heads * head_dim]`), k and v to the pages.
pub fn attention_prep<T: StoredElem>(
    isa: Isa,
    pool: &Pool,
    shape: &AttentionShape,
    segments: &[AttentionSegment<'_>],
    input: &PrepInput<'_>,
    pages: KvPagesMut<'_, T>,
    q_out: &mut [f32],
) {
    shape.supported().expect("shape checked at prepare time");
    let AttentionShape { heads, kv_heads, head_dim, rot } = *shape;
    let rows = q_out.len() / (heads * head_dim);
    assert_eq!(input.q_gate.len(), 2 * rows * heads * head_dim);
    assert!([input.k.len(), input.v.len()].iter().all(|&n| n == rows * kv_heads * head_dim));
    assert!([input.cos.len(), input.sin.len()].iter().all(|&n| n == rows * (rot / 2)));
    assert!(input.q_norm.len() == head_dim && input.k_norm.len() == head_dim);
    check_segments(segments, rows, pages.k.len().min(pages.v.len()) / shape.page_len());
    check_written_pages(segments);
    let q_out = SharedMut::new(q_out);
    let (k_pages, v_pages) = (SharedMut::new(pages.k), SharedMut::new(pages.v));
    let positions: Vec<_> = segments
        .iter()
        .flat_map(|s| (0..s.rows).map(move |t| (s, s.first_row + t, s.start + t)))
        .collect();
    pool.run(positions.len(), &|task, _| {
        let (segment, row, position) = positions[task];
        let page = segment.pages[position / PAGE_TOKENS] as usize;
        let at = page * shape.page_len() + position % PAGE_TOKENS * head_dim;
        let row = PrepRow {
            shape,
            input,
            row,
            // SAFETY: each task has its own row, and its own token of a page (`check_written_pages`).
            q: unsafe { q_out.slice(row * heads * head_dim, heads * head_dim) }.as_mut_ptr(),
            // SAFETY: as above; the page lies inside the buffer (`check_segments`).
            k: unsafe { k_pages.ptr(at) }.cast(),
            // SAFETY: as above.
            v: unsafe { v_pages.ptr(at) }.cast(),
            bf16: T::BF16,
        };
        // SAFETY: the pointers are valid for the row's heads.
        unsafe { prep_row(isa, &row) }
    });
}

/// One row of the preparation. `k` and `v` point at the row's token in the page of kv head 0; their
/// elements are bf16 or f32, as `bf16` says.
struct PrepRow<'a> {
    shape: &'a AttentionShape,
    input: &'a PrepInput<'a>,
    row: usize,
    q: *mut f32,
    k: *mut u8,
    v: *mut u8,
    bf16: bool,
}

simd_entry! {
    unsafe fn prep_row(row: &PrepRow<'_>) = prep_row_kernel;
}

#[inline(always)]
unsafe fn prep_row_kernel<S: Simd>(row: &PrepRow<'_>) {
    // SAFETY: passed on from the caller.
    unsafe { if row.bf16 { prep_heads::<S, u16>(row) } else { prep_heads::<S, f32>(row) } }
}

#[inline(always)]
unsafe fn prep_heads<S: Simd, T: StoredElem>(p: &PrepRow<'_>) {
    let AttentionShape { heads, kv_heads, head_dim, rot } = *p.shape;
    let half = rot / 2;
    let cos = &p.input.cos[p.row * half..][..half];
    let sin = &p.input.sin[p.row * half..][..half];
    let mut head = [0.0; MAX_HEAD_DIM];
    let head = &mut head[..head_dim];
    for h in 0..heads {
        let x = &p.input.q_gate[(p.row * heads + h) * 2 * head_dim..][..head_dim];
        // SAFETY: the output row has `heads` heads.
        unsafe {
            norm_rope::<S>(x, p.input.q_norm, p.input.eps, (cos, sin), head);
            p.q.add(h * head_dim).copy_from_nonoverlapping(head.as_ptr(), head_dim);
        }
    }
    for h in 0..kv_heads {
        let at = (p.row * kv_heads + h) * head_dim;
        let (k, v) = (&p.input.k[at..][..head_dim], &p.input.v[at..][..head_dim]);
        let token = h * PAGE_TOKENS * head_dim;
        // SAFETY: the caller vouches for the token's place in each head of the page.
        unsafe {
            norm_rope::<S>(k, p.input.k_norm, p.input.eps, (cos, sin), head);
            let (k_out, v_out) = (p.k.cast::<T>().add(token), p.v.cast::<T>().add(token));
            for c in (0..head_dim).step_by(16) {
                T::store::<S>(k_out.add(c), S::load(head.as_ptr().add(c)));
                T::store::<S>(v_out.add(c), S::load(v.as_ptr().add(c)));
            }
        }
    }
}

/// RMS norm of a head, then rope over the pairs `(i, i + rot / 2)`.
#[inline(always)]
unsafe fn norm_rope<S: Simd>(
    x: &[f32],
    w: &[f32],
    eps: f32,
    rope: (&[f32], &[f32]),
    out: &mut [f32],
) {
    let half = rope.0.len();
    // SAFETY: `x`, `w` and `out` hold a head, a multiple of 16; the rotated pairs lie inside it.
    unsafe {
        let r = S::splat(inverse_rms::<S>(x.as_ptr(), x.len(), eps));
        for c in (0..x.len()).step_by(16) {
            let y = S::mul(S::mul(S::load(x.as_ptr().add(c)), r), S::load(w.as_ptr().add(c)));
            S::store(out.as_mut_ptr().add(c), y);
        }
        for i in (0..half).step_by(16) {
            let n = (half - i).min(16);
            let (low, high) = (out.as_mut_ptr().add(i), out.as_mut_ptr().add(half + i));
            let (x1, x2) = (S::load_partial(low, n), S::load_partial(high, n));
            let cos = S::load_partial(rope.0.as_ptr().add(i), n);
            let sin = S::load_partial(rope.1.as_ptr().add(i), n);
            S::store_partial(low, S::fma(x1, cos, S::neg(S::mul(x2, sin))), n);
            S::store_partial(high, S::fma(x1, sin, S::mul(x2, cos)), n);
        }
    }
}

/// Panics if two places of the step's tokens coincide.
fn check_written_pages(segments: &[AttentionSegment<'_>]) {
    let written = segments.iter().filter(|s| s.rows > 0).flat_map(|s| {
        s.pages[s.start / PAGE_TOKENS..(s.start + s.rows).div_ceil(PAGE_TOKENS)].iter()
    });
    let mut written: Vec<u32> = written.copied().collect();
    written.sort_unstable();
    assert!(written.windows(2).all(|w| w[0] != w[1]), "two segments write to one page");
}
