//! I8G64 and I16G64: activations as codes with one scale for 64 columns.

use std::sync::atomic::{AtomicPtr, Ordering};

use crate::pool::Pool;
use crate::simd::{Isa, LANES, Simd};
use crate::simd_entry;

/// Columns that share a scale, of activations and of weights.
pub const GROUP: usize = 64;

/// Rows that one task quantizes.
const ROWS_PER_TASK: usize = 8;

/// How large codes are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CodeKind {
    /// Codes in -127…127: one int8 plane.
    #[default]
    I8,
    /// Codes in -16256…16256: two int8 planes, the code being 128 · high + low with low in -64…63.
    I16,
}

impl CodeKind {
    /// Number of int8 planes.
    pub const fn planes(self) -> usize {
        match self {
            Self::I8 => 1,
            Self::I16 => 2,
        }
    }

    /// The code that the largest magnitude of a group becomes.
    const fn largest(self) -> f32 {
        match self {
            Self::I8 => 127.0,
            Self::I16 => 127.0 * 128.0,
        }
    }
}

/// A plane of the codes of one group: the 32 even columns, then the 32 odd ones.
///
/// A byte of packed 4-bit weights holds an even column in its low nibble and the odd one after it
/// in its high nibble, so masked and shifted weight words meet consecutive codes.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct PlaneCodes([i8; GROUP]);

/// Quantized rows; the buffer is meant to be used again and again.
#[derive(Clone, Debug, Default)]
pub struct QuantRows {
    rows: usize,
    groups: usize,
    kind: CodeKind,
    /// `[row][group][plane]`.
    codes: Vec<PlaneCodes>,
    scales: Vec<f32>,
    sums: Vec<f32>,
}

impl QuantRows {
    /// An empty buffer.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes room for `codes` bytes of codes and `groups` groups.
    pub fn reserve(&mut self, codes: usize, groups: usize) {
        self.codes.reserve_exact(codes.div_ceil(GROUP));
        self.scales.reserve_exact(groups);
        self.sums.reserve_exact(groups);
    }

    /// Bytes that the buffer has taken.
    pub fn allocated(&self) -> usize {
        self.codes.capacity() * GROUP + (self.scales.capacity() + self.sums.capacity()) * 4
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns, a multiple of [`GROUP`].
    pub fn cols(&self) -> usize {
        self.groups * GROUP
    }

    /// How large the codes are.
    pub fn kind(&self) -> CodeKind {
        self.kind
    }

    /// The code of one element.
    pub fn code(&self, row: usize, col: usize) -> i16 {
        let (planes, within) = (self.kind.planes(), col % GROUP);
        let at = within / 2 + (within % 2) * (GROUP / 2);
        self.codes[(row * self.groups + col / GROUP) * planes..][..planes]
            .iter()
            .fold(0, |code, plane| 128 * code + i16::from(plane.0[at]))
    }

    /// The scales of the groups of a row.
    pub fn scales(&self, row: usize) -> &[f32] {
        &self.scales[row * self.groups..][..self.groups]
    }

    /// For each group of a row, its scale times the sum of its codes.
    pub fn sums(&self, row: usize) -> &[f32] {
        &self.sums[row * self.groups..][..self.groups]
    }

    /// The codes of a row: `[group][plane][64]`.
    pub(super) fn codes(&self, row: usize) -> *const i8 {
        let len = self.groups * self.kind.planes();
        self.codes[row * len..][..len].as_ptr().cast()
    }

    /// Replaces the contents by `rows` rows of `cols` columns of `x`, `stride` elements apart.
    ///
    /// Per group: with an element that is not finite the scale is NaN; a group of zeros has scale 0;
    /// otherwise the largest magnitude becomes the largest code of the kind.
    ///
    /// # Panics
    /// `cols` is not a multiple of [`GROUP`], or `x` is too short.
    pub fn quantize(
        &mut self,
        pool: &Pool,
        isa: Isa,
        kind: CodeKind,
        x: &[f32],
        stride: usize,
        [rows, cols]: [usize; 2],
    ) {
        assert!(cols.is_multiple_of(GROUP), "{cols} columns are not whole groups of {GROUP}");
        assert!(rows == 0 || (rows - 1) * stride + cols <= x.len(), "activations are too short");
        self.rows = rows;
        self.groups = cols / GROUP;
        self.kind = kind;
        let (groups, planes) = (self.groups, kind.planes());
        let total = rows * groups;
        if self.codes.len() < total * planes {
            self.codes.resize(total * planes, PlaneCodes([0; GROUP]));
        }
        if self.scales.len() < total {
            self.scales.resize(total, 0.0);
            self.sums.resize(total, 0.0);
        }
        let codes = AtomicPtr::new(self.codes.as_mut_ptr());
        let scales = AtomicPtr::new(self.scales.as_mut_ptr());
        let sums = AtomicPtr::new(self.sums.as_mut_ptr());
        pool.run(rows.div_ceil(ROWS_PER_TASK), &|task, _| {
            for row in task * ROWS_PER_TASK..rows.min((task + 1) * ROWS_PER_TASK) {
                let (x, at) = (&x[row * stride..][..cols], row * groups);
                // SAFETY: the buffers have `rows * groups` elements, or that many for each plane, and
                // a row belongs to one task.
                let (codes, scales, sums) = unsafe {
                    (
                        std::slice::from_raw_parts_mut(
                            codes.load(Ordering::Relaxed).add(at * planes),
                            groups * planes,
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
                quantize_row(isa, kind, x, codes, scales, sums);
            }
        });
    }
}

simd_entry! {
    /// Quantizes one row; all slices cover its groups.
    fn quantize_row(kind: CodeKind, x: &[f32], codes: &mut [PlaneCodes], scales: &mut [f32], sums: &mut [f32]) = quantize_row_kernel;
}

#[inline(always)]
unsafe fn quantize_row_kernel<S: Simd>(
    kind: CodeKind,
    x: &[f32],
    codes: &mut [PlaneCodes],
    scales: &mut [f32],
    sums: &mut [f32],
) {
    let outputs = codes.chunks_exact_mut(kind.planes()).zip(scales).zip(sums);
    for (x, ((codes, scale), sum)) in x.chunks_exact(GROUP).zip(outputs) {
        // SAFETY: the chunk has 64 elements; the caller has the instruction set.
        (*scale, *sum) = unsafe { quantize_group::<S>(kind, x.as_ptr(), codes) };
    }
}

/// Returns the scale and the scaled sum of the codes.
#[inline(always)]
unsafe fn quantize_group<S: Simd>(
    kind: CodeKind,
    x: *const f32,
    planes: &mut [PlaneCodes],
) -> (f32, f32) {
    let most = kind.largest();
    // SAFETY: `x` has 64 elements, every store is inside a 64-byte array, and the caller has the
    // instruction set.
    unsafe {
        let x = [
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
        let inverse = most / largest;
        if finite & 0xffff != 0xffff || inverse.is_infinite() {
            planes.fill(PlaneCodes([0; GROUP]));
            let scale =
                if inverse.is_infinite() && finite & 0xffff == 0xffff { 0.0 } else { f32::NAN };
            return (scale, scale);
        }
        let mut total = S::splat_i32(0);
        let mut rest = x.map(|x| {
            let scaled = S::round_ties_even(S::mul(x, S::splat(inverse)));
            let clamped = S::min(S::max(scaled, S::splat(-most)), S::splat(most));
            let code = S::to_i32(clamped);
            total = S::add_i32(total, code);
            code
        });
        if let [high, low] = planes {
            let nearest = rest.map(|c| S::shr_i32(S::add_i32(c, S::splat_i32(64)), 7));
            store_plane::<S>(&nearest, high);
            for (code, high) in rest.iter_mut().zip(nearest) {
                *code = S::sub_i32(*code, S::shl_i32(high, 7));
            }
            store_plane::<S>(&rest, low);
        } else {
            store_plane::<S>(&rest, &mut planes[0]);
        }
        let scale = largest / most;
        (scale, scale * S::reduce_add_i32(total) as f32)
    }
}

/// Stores codes in the order of a plane.
#[inline(always)]
unsafe fn store_plane<S: Simd>(codes: &[S::I32; 4], plane: &mut PlaneCodes) {
    let mut ordered = [0i8; GROUP];
    // SAFETY: every access is inside a 64-byte array, and the caller has the instruction set.
    unsafe {
        for (i, &code) in codes.iter().enumerate() {
            S::store_i8(ordered.as_mut_ptr().add(LANES * i), code);
        }
        // A 16-bit word is an even column and the odd one after it.
        for half in 0..2 {
            let pairs = S::load_u16(ordered.as_ptr().cast::<u8>().add(32 * half));
            let even = S::shr_i32(S::shl_i32(pairs, 24), 24);
            let odd = S::shr_i32(S::shl_i32(pairs, 16), 24);
            S::store_i8(plane.0.as_mut_ptr().add(LANES * half), even);
            S::store_i8(plane.0.as_mut_ptr().add(GROUP / 2 + LANES * half), odd);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lily_ops::quant::{quantize_i8, quantize_i16};

    fn check(x: &[f32], stride: usize, rows: usize, cols: usize) {
        for isa in Isa::available() {
            for threads in [1, 3] {
                let pool = Pool::new(threads);
                let mut quant = QuantRows::new();
                // The buffer is used again for other kinds and shapes.
                quant.quantize(&pool, isa, CodeKind::I16, x, stride, [rows.min(2), 64]);
                for kind in [CodeKind::I8, CodeKind::I16] {
                    quant.quantize(&pool, isa, kind, x, stride, [rows, cols]);
                    assert_eq!((quant.rows(), quant.cols(), quant.kind()), (rows, cols, kind));
                    for row in 0..rows {
                        for group in 0..cols / GROUP {
                            let at = row * stride + group * GROUP;
                            check_group(&quant, row, group, &x[at..at + GROUP], isa);
                        }
                    }
                }
            }
        }
    }

    fn check_group(quant: &QuantRows, row: usize, group: usize, x: &[f32], isa: Isa) {
        let want = match quant.kind() {
            CodeKind::I8 => quantize_i8(x),
            CodeKind::I16 => quantize_i16(x),
        };
        let got = [quant.scales(row)[group], quant.sums(row)[group]];
        let same = |(got, want): (f32, f32)| {
            got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan()
        };
        let equal = got.into_iter().zip([want.scale, want.sum]).all(same);
        assert!(equal, "{isa} {:?} row {row} group {group}: {got:?}", quant.kind());
        for (k, want) in want.codes.into_iter().enumerate() {
            let got = quant.code(row, group * GROUP + k);
            assert_eq!(got, want, "{isa} {:?} row {row} group {group}", quant.kind());
        }
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
        check(&x, stride, rows, cols);
    }

    #[test]
    fn edges_of_the_quantizers() {
        let ties = |n: f32| move |i: usize| if i == 0 { n } else { (i as f32 - 32.0) * n / 63.5 };
        let mut rows: Vec<[f32; GROUP]> = vec![
            [1.7; GROUP],
            [-1.7; GROUP],
            std::array::from_fn(|i| if i % 2 == 0 { 0.3 } else { -0.3 }),
            // Every half between two codes around zero, and around the limits of the low plane.
            std::array::from_fn(|i| if i == 0 { 127.0 } else { i as f32 - 32.5 }),
            std::array::from_fn(|i| if i == 0 { 16256.0 } else { i as f32 - 32.5 }),
            std::array::from_fn(|i| if i == 0 { 16256.0 } else { i as f32 + 31.5 }),
            std::array::from_fn(|i| if i == 0 { -16256.0 } else { -31.5 - i as f32 }),
            std::array::from_fn(|i| if i == 0 { -16256.0 } else { 16224.5 - i as f32 }),
            std::array::from_fn(ties(3.0)),
            std::array::from_fn(ties(1e-3)),
            [-0.0; GROUP],
            [f32::MAX; GROUP],
            [f32::MIN; GROUP],
            [f32::MIN_POSITIVE; GROUP],
            // Both sides of where 127 / x and 16256 / x overflow.
            [3.7e-37; GROUP],
            [3.8e-37; GROUP],
            [4.7e-35; GROUP],
            [4.8e-35; GROUP],
            [f32::from_bits(1); GROUP],
        ];
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 17, 63] {
                let mut row = [0.5; GROUP];
                row[at] = bad;
                rows.push(row);
                row = [0.0; GROUP];
                row[at] = bad;
                rows.push(row);
            }
        }
        check(rows.as_flattened(), GROUP, rows.len(), GROUP);
    }
}
