//! I8G64: activations as int8 codes with one scale for 64 columns.

use std::sync::atomic::{AtomicPtr, Ordering};

use crate::pool::Pool;
use crate::simd::{Isa, LANES, Simd};
use crate::simd_entry;

/// Columns that share a scale, of activations and of weights.
pub const GROUP: usize = 64;

/// Rows that one task quantizes.
const ROWS_PER_TASK: usize = 8;

/// The codes of one group: the 32 even columns, then the 32 odd ones.
///
/// A byte of packed 4-bit weights holds an even column in its low nibble and the odd one after it
/// in its high nibble, so masked and shifted weight words meet consecutive codes.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct GroupCodes([i8; GROUP]);

/// Quantized rows; the buffer is meant to be used again and again.
#[derive(Clone, Debug, Default)]
pub struct QuantRows {
    rows: usize,
    groups: usize,
    codes: Vec<GroupCodes>,
    scales: Vec<f32>,
    sums: Vec<f32>,
}

impl QuantRows {
    /// An empty buffer.
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns, a multiple of [`GROUP`].
    pub fn cols(&self) -> usize {
        self.groups * GROUP
    }

    /// The code of one element.
    pub fn code(&self, row: usize, col: usize) -> i8 {
        let within = col % GROUP;
        self.codes[row * self.groups + col / GROUP].0[within / 2 + (within % 2) * (GROUP / 2)]
    }

    /// The scales of the groups of a row.
    pub fn scales(&self, row: usize) -> &[f32] {
        &self.scales[row * self.groups..][..self.groups]
    }

    /// For each group of a row, its scale times the sum of its codes.
    pub fn sums(&self, row: usize) -> &[f32] {
        &self.sums[row * self.groups..][..self.groups]
    }

    /// The codes of a row, group by group.
    pub(super) fn codes(&self, row: usize) -> *const i8 {
        self.codes[row * self.groups..][..self.groups].as_ptr().cast()
    }

    /// Replaces the contents by `rows` rows of `cols` columns of `x`, `stride` elements apart.
    ///
    /// Per group: with an element that is not finite the scale is NaN; a group of zeros has scale 0;
    /// otherwise the largest magnitude becomes code ±127.
    ///
    /// # Panics
    /// `cols` is not a multiple of [`GROUP`], or `x` is too short.
    pub fn quantize(
        &mut self,
        pool: &Pool,
        isa: Isa,
        x: &[f32],
        stride: usize,
        rows: usize,
        cols: usize,
    ) {
        assert!(cols.is_multiple_of(GROUP), "{cols} columns are not whole groups of {GROUP}");
        assert!(rows == 0 || (rows - 1) * stride + cols <= x.len(), "activations are too short");
        self.rows = rows;
        self.groups = cols / GROUP;
        let total = rows * self.groups;
        if self.codes.len() < total {
            self.codes.resize(total, GroupCodes([0; GROUP]));
            self.scales.resize(total, 0.0);
            self.sums.resize(total, 0.0);
        }
        let groups = self.groups;
        let codes = AtomicPtr::new(self.codes.as_mut_ptr());
        let scales = AtomicPtr::new(self.scales.as_mut_ptr());
        let sums = AtomicPtr::new(self.sums.as_mut_ptr());
        pool.run(rows.div_ceil(ROWS_PER_TASK), &|task, _| {
            for row in task * ROWS_PER_TASK..rows.min((task + 1) * ROWS_PER_TASK) {
                let (x, at) = (&x[row * stride..][..cols], row * groups);
                // SAFETY: the buffers have `rows * groups` elements, and a row belongs to one task.
                let (codes, scales, sums) = unsafe {
                    (
                        std::slice::from_raw_parts_mut(
                            codes.load(Ordering::Relaxed).add(at),
                            groups,
                        ),
                        std::slice::from_raw_parts_mut(
                            scales.load(Ordering::Relaxed).add(at),
                            groups,
                        ),
                        std::slice::from_raw_parts_mut(
                            sums.load(Ordering::Relaxed).add(at),
                            groups,
                        ),
                    )
                };
                quantize_row(isa, x, codes, scales, sums);
            }
        });
    }
}

simd_entry! {
    /// Quantizes one row; all slices cover its groups.
    fn quantize_row(x: &[f32], codes: &mut [GroupCodes], scales: &mut [f32], sums: &mut [f32]) = quantize_row_kernel;
}

#[inline(always)]
unsafe fn quantize_row_kernel<S: Simd>(
    x: &[f32],
    codes: &mut [GroupCodes],
    scales: &mut [f32],
    sums: &mut [f32],
) {
    let outputs = codes.iter_mut().zip(scales).zip(sums);
    for (x, ((codes, scale), sum)) in x.chunks_exact(GROUP).zip(outputs) {
        // SAFETY: the chunk has 64 elements; the caller has the instruction set.
        (*scale, *sum) = unsafe { quantize_group::<S>(x.as_ptr(), &mut codes.0) };
    }
}

/// Returns the scale and the scaled sum of the codes.
#[inline(always)]
unsafe fn quantize_group<S: Simd>(x: *const f32, codes: &mut [i8; GROUP]) -> (f32, f32) {
    // SAFETY: `x` has 64 elements, every store is inside a 64-byte array, and the caller has the
    // instruction set.
    unsafe {
        let mut x = [
            S::load(x),
            S::load(x.add(LANES)),
            S::load(x.add(2 * LANES)),
            S::load(x.add(3 * LANES)),
        ];
        let mut largest = S::splat(0.0);
        let mut finite = u32::MAX;
        for &x in &x {
            let magnitude = S::abs(x);
            finite &= S::mask_bits(S::lt(magnitude, S::splat(f32::INFINITY)));
            largest = S::max(magnitude, largest);
        }
        let largest = S::reduce_max(largest);
        let inverse = 127.0 / largest;
        if finite & 0xffff != 0xffff || inverse.is_infinite() {
            *codes = [0; GROUP];
            let scale =
                if inverse.is_infinite() && finite & 0xffff == 0xffff { 0.0 } else { f32::NAN };
            return (scale, scale);
        }
        let mut ordered = [0i8; GROUP];
        let mut total = S::splat_i32(0);
        for (i, x) in x.iter_mut().enumerate() {
            let scaled = S::round_ties_even(S::mul(*x, S::splat(inverse)));
            let clamped = S::min(S::max(scaled, S::splat(-127.0)), S::splat(127.0));
            let code = S::to_i32(clamped);
            total = S::add_i32(total, code);
            S::store_i8(ordered.as_mut_ptr().add(LANES * i), code);
        }
        // A 16-bit word is an even column and the odd one after it.
        for half in 0..2 {
            let pairs = S::load_u16(ordered.as_ptr().cast::<u8>().add(32 * half));
            let even = S::shr_i32(S::shl_i32(pairs, 24), 24);
            let odd = S::shr_i32(S::shl_i32(pairs, 16), 24);
            S::store_i8(codes.as_mut_ptr().add(LANES * half), even);
            S::store_i8(codes.as_mut_ptr().add(GROUP / 2 + LANES * half), odd);
        }
        let scale = largest / 127.0;
        (scale, scale * S::reduce_add_i32(total) as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(x: &[f32]) -> (f32, f32, Vec<i8>) {
        if x.iter().any(|x| !x.is_finite()) {
            return (f32::NAN, f32::NAN, vec![0; GROUP]);
        }
        let largest = x.iter().fold(0f32, |a, x| a.max(x.abs()));
        let inverse = 127.0 / largest;
        if inverse.is_infinite() {
            return (0.0, 0.0, vec![0; GROUP]);
        }
        let codes: Vec<i8> =
            x.iter().map(|x| (x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8).collect();
        let scale = largest / 127.0;
        let total: i32 = codes.iter().map(|&c| i32::from(c)).sum();
        (scale, scale * total as f32, codes)
    }

    #[test]
    fn rows_are_quantized_as_defined() {
        let (rows, cols, stride) = (37, 192, 200);
        let mut seed = 5u64;
        let mut x: Vec<f32> = (0..rows * stride)
            .map(|_| {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                ((seed >> 40) as f32 / 8388608.0 - 1.0) * 3.0
            })
            .collect();
        x[stride + 7] = f32::NAN;
        x[2 * stride + 70] = f32::NEG_INFINITY;
        x[3 * stride..3 * stride + 64].fill(0.0);
        x[4 * stride..4 * stride + 64].fill(1e-42);
        x[5 * stride..5 * stride + 64].fill(1e-37);
        x[6 * stride + 3] = 3e38;
        for isa in Isa::available() {
            for threads in [1, 3] {
                let pool = Pool::new(threads);
                let mut quant = QuantRows::new();
                quant.quantize(&pool, isa, &x[..2 * stride], stride, 2, 64);
                quant.quantize(&pool, isa, &x, stride, rows, cols);
                assert_eq!((quant.rows(), quant.cols()), (rows, cols));
                for row in 0..rows {
                    for group in 0..cols / GROUP {
                        let at = row * stride + group * GROUP;
                        let (scale, sum, codes) = reference(&x[at..at + GROUP]);
                        assert_eq!(
                            quant.scales(row)[group].to_bits(),
                            scale.to_bits(),
                            "{isa} row {row}"
                        );
                        assert_eq!(
                            quant.sums(row)[group].to_bits(),
                            sum.to_bits(),
                            "{isa} row {row}"
                        );
                        let got: Vec<i8> =
                            (0..GROUP).map(|k| quant.code(row, group * GROUP + k)).collect();
                        assert_eq!(got, codes, "{isa} row {row}");
                    }
                }
            }
        }
    }
}
