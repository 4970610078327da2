//! RMS normalization.

use super::common::{SharedMut, blocks, inverse_rms, load_n, store_n};
use crate::pool::Pool;
use crate::simd::{Isa, Simd};
use crate::simd_entry;

/// `out = x / rms(x) * weight` for each row of `x`; the width is that of `weight`.
pub fn rms_norm(isa: Isa, pool: &Pool, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    assert!(width > 0 && x.len().is_multiple_of(width) && x.len() == out.len());
    let blocks = blocks(x.len() / width, width);
    let out = SharedMut::new(out);
    pool.run(blocks.count, &|task, _| {
        for row in blocks.range(task) {
            let x = &x[row * width..][..width];
            // SAFETY: each task has its own rows.
            let out = unsafe { out.slice(row * width, width) };
            rms_row(isa, x, weight, eps, out)
        }
    });
}

simd_entry! {
    fn rms_row(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) = rms_row_kernel;
}

/// Normalizes one row.
///
/// # Safety
/// The CPU has the features of `S`.
#[inline(always)]
pub(crate) unsafe fn rms_row_kernel<S: Simd>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    // SAFETY: `x` is valid for its length.
    let r = unsafe { S::splat(inverse_rms::<S>(x.as_ptr(), x.len(), eps)) };
    let tiles = out.chunks_mut(16).zip(x.chunks(16).zip(weight.chunks(16)));
    for (out, (x, w)) in tiles {
        // SAFETY: only the CPU feature is at stake.
        unsafe {
            store_n::<S>(out, S::mul(S::mul(load_n::<S>(x), r), load_n::<S>(w)));
        }
    }
}
