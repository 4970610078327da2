//! AVX2 with FMA: two ymm registers a vector.

use std::arch::x86_64::*;

use super::{Simd, simd_methods};

/// AVX2 and FMA.
#[derive(Clone, Copy, Debug)]
pub struct Avx2;

type F = [__m256; 2];
type I = [__m256i; 2];

/// Folds lanes i and i+8, then +4, +2, +1.
macro_rules! tree {
    ($v:expr, $op256:ident, $op128:ident) => {{
        let v = $op256($v[0], $v[1]);
        let v = $op128(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = $op128(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32($op128(v, _mm_shuffle_ps::<1>(v, v)))
    }};
}

/// The operation on both halves.
macro_rules! both {
    ($op:expr, $a:expr) => {
        [$op($a[0]), $op($a[1])]
    };
    ($op:expr, $a:expr, $b:expr) => {
        [$op($a[0], $b[0]), $op($a[1], $b[1])]
    };
}

/// `reduce_add` of eight vectors whose halves are added already; lane j is vector j.
#[inline(always)]
unsafe fn reduce8(v: [__m256; 8]) -> __m256 {
    // SAFETY: register arithmetic; the caller has the instruction set.
    unsafe {
        macro_rules! fold {
            ($shuffle:ident, $low:literal, $high:literal, $a:expr, $b:expr) => {{
                let (a, b) = ($a, $b);
                _mm256_add_ps($shuffle::<$low>(a, b), $shuffle::<$high>(a, b))
            }};
        }
        macro_rules! block {
            ($j:literal) => {
                fold!(_mm256_permute2f128_ps, 0x20, 0x31, v[$j], v[$j + 4])
            };
        }
        let left = fold!(_mm256_shuffle_ps, 0x44, 0xee, block!(0), block!(1));
        let right = fold!(_mm256_shuffle_ps, 0x44, 0xee, block!(2), block!(3));
        fold!(_mm256_shuffle_ps, 0x88, 0xdd, left, right)
    }
}

/// 8 × 8 transposition of 32-bit words.
#[inline(always)]
unsafe fn transpose8(r: [__m256i; 8]) -> [__m256i; 8] {
    // SAFETY: register shuffles; the caller has the instruction set.
    unsafe {
        let mut blocks = [_mm256_setzero_si256(); 8];
        for q in 0..2 {
            let rows = &r[4 * q..4 * q + 4];
            let a = _mm256_unpacklo_epi32(rows[0], rows[1]);
            let b = _mm256_unpackhi_epi32(rows[0], rows[1]);
            let c = _mm256_unpacklo_epi32(rows[2], rows[3]);
            let d = _mm256_unpackhi_epi32(rows[2], rows[3]);
            blocks[4 * q] = _mm256_unpacklo_epi64(a, c);
            blocks[4 * q + 1] = _mm256_unpackhi_epi64(a, c);
            blocks[4 * q + 2] = _mm256_unpacklo_epi64(b, d);
            blocks[4 * q + 3] = _mm256_unpackhi_epi64(b, d);
        }
        let mut columns = [_mm256_setzero_si256(); 8];
        for c in 0..4 {
            columns[c] = _mm256_permute2x128_si256::<0x20>(blocks[c], blocks[4 + c]);
            columns[4 + c] = _mm256_permute2x128_si256::<0x31>(blocks[c], blocks[4 + c]);
        }
        columns
    }
}

impl Simd for Avx2 {
    type F32 = F;
    type I32 = I;
    type Mask = F;

    const WIDE: bool = false;
    const ROW_TILE: usize = 6;

    simd_methods! {
        fn splat(x: f32) -> F { [_mm256_set1_ps(x); 2] }
        fn load(src: *const f32) -> F { [_mm256_loadu_ps(src), _mm256_loadu_ps(src.add(8))] }
        fn store(dst: *mut f32, v: F) {
            _mm256_storeu_ps(dst, v[0]);
            _mm256_storeu_ps(dst.add(8), v[1]);
        }
        fn load_partial(src: *const f32, n: usize) -> F {
            let mut lanes = [0.0f32; 16];
            std::ptr::copy_nonoverlapping(src.cast::<u8>(), lanes.as_mut_ptr().cast(), 4 * n);
            Self::load(lanes.as_ptr())
        }
        fn store_partial(dst: *mut f32, v: F, n: usize) {
            let mut lanes = [0.0f32; 16];
            Self::store(lanes.as_mut_ptr(), v);
            std::ptr::copy_nonoverlapping(lanes.as_ptr().cast::<u8>(), dst.cast(), 4 * n);
        }
        fn add(a: F, b: F) -> F { both!(_mm256_add_ps, a, b) }
        fn sub(a: F, b: F) -> F { both!(_mm256_sub_ps, a, b) }
        fn mul(a: F, b: F) -> F { both!(_mm256_mul_ps, a, b) }
        fn div(a: F, b: F) -> F { both!(_mm256_div_ps, a, b) }
        fn fma(a: F, b: F, c: F) -> F {
            [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])]
        }
        fn neg(a: F) -> F { both!(_mm256_xor_ps, a, [_mm256_set1_ps(-0.0); 2]) }
        fn abs(a: F) -> F { both!(_mm256_andnot_ps, [_mm256_set1_ps(-0.0); 2], a) }
        fn min(a: F, b: F) -> F { both!(_mm256_min_ps, a, b) }
        fn max(a: F, b: F) -> F { both!(_mm256_max_ps, a, b) }
        fn sqrt(a: F) -> F { both!(_mm256_sqrt_ps, a) }
        fn round_ties_even(a: F) -> F {
            both!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>, a)
        }
        fn lt(a: F, b: F) -> F { both!(_mm256_cmp_ps::<_CMP_LT_OQ>, a, b) }
        fn le(a: F, b: F) -> F { both!(_mm256_cmp_ps::<_CMP_LE_OQ>, a, b) }
        fn eq(a: F, b: F) -> F { both!(_mm256_cmp_ps::<_CMP_EQ_OQ>, a, b) }
        fn select(mask: F, a: F, b: F) -> F {
            [_mm256_blendv_ps(b[0], a[0], mask[0]), _mm256_blendv_ps(b[1], a[1], mask[1])]
        }
        fn mask_bits(mask: F) -> u32 {
            (_mm256_movemask_ps(mask[0]) | (_mm256_movemask_ps(mask[1]) << 8)) as u32
        }
        fn reduce_add(v: F) -> f32 { tree!(v, _mm256_add_ps, _mm_add_ps) }
        fn reduce_max(v: F) -> f32 { tree!(v, _mm256_max_ps, _mm_max_ps) }
        fn reduce16(vs: [F; 16]) -> F {
            let mut sums = [[_mm256_setzero_ps(); 8]; 2];
            for j in 0..16 {
                sums[j / 8][j % 8] = _mm256_add_ps(vs[j][0], vs[j][1]);
            }
            [reduce8(sums[0]), reduce8(sums[1])]
        }
        fn splat_i32(x: i32) -> I { [_mm256_set1_epi32(x); 2] }
        fn add_i32(a: I, b: I) -> I { both!(_mm256_add_epi32, a, b) }
        fn sub_i32(a: I, b: I) -> I { both!(_mm256_sub_epi32, a, b) }
        fn and_i32(a: I, b: I) -> I { both!(_mm256_and_si256, a, b) }
        fn or_i32(a: I, b: I) -> I { both!(_mm256_or_si256, a, b) }
        fn shl_i32(a: I, n: u32) -> I { both!(_mm256_sllv_epi32, a, Self::splat_i32(n as i32)) }
        fn shr_i32(a: I, n: u32) -> I { both!(_mm256_srav_epi32, a, Self::splat_i32(n as i32)) }
        fn shr_u32(a: I, n: u32) -> I { both!(_mm256_srlv_epi32, a, Self::splat_i32(n as i32)) }
        fn reduce_add_i32(v: I) -> i32 {
            let v = _mm256_add_epi32(v[0], v[1]);
            let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
            let v = _mm_add_epi32(v, _mm_shuffle_epi32::<0x4e>(v));
            _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32::<0xb1>(v)))
        }
        fn to_i32(a: F) -> I { both!(_mm256_cvtps_epi32, a) }
        fn from_i32(a: I) -> F { both!(_mm256_cvtepi32_ps, a) }
        fn cast_i32(a: F) -> I { both!(_mm256_castps_si256, a) }
        fn cast_f32(a: I) -> F { both!(_mm256_castsi256_ps, a) }
        fn load_i32(src: *const u8) -> I {
            [_mm256_loadu_si256(src.cast()), _mm256_loadu_si256(src.add(32).cast())]
        }
        fn load_i32_partial(src: *const u8, bytes: usize) -> I {
            let mut lanes = [0u8; 64];
            std::ptr::copy_nonoverlapping(src, lanes.as_mut_ptr(), bytes);
            Self::load_i32(lanes.as_ptr())
        }
        fn store_i32(dst: *mut u8, v: I) {
            _mm256_storeu_si256(dst.cast(), v[0]);
            _mm256_storeu_si256(dst.add(32).cast(), v[1]);
        }
        fn load_u8(src: *const u8) -> I {
            let bytes = _mm_loadu_si128(src.cast());
            [_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(bytes))]
        }
        fn load_u4(src: *const u8) -> I {
            // Byte b in a 64-bit lane: b | b << 28 has b in the low word and b >> 4 in the high one.
            let bytes = _mm_loadl_epi64(src.cast());
            let bytes = [_mm256_cvtepu8_epi64(bytes), _mm256_cvtepu8_epi64(_mm_srli_si128::<4>(bytes))];
            let shifted = both!(_mm256_slli_epi64::<28>, bytes);
            Self::and_i32(Self::or_i32(bytes, shifted), Self::splat_i32(15))
        }
        fn load_u16(src: *const u8) -> I {
            let low = _mm_loadu_si128(src.cast());
            let high = _mm_loadu_si128(src.add(16).cast());
            [_mm256_cvtepu16_epi32(low), _mm256_cvtepu16_epi32(high)]
        }
        fn store_i8(dst: *mut i8, v: I) {
            let words = _mm256_packs_epi32(v[0], v[1]);
            let words = _mm256_permute4x64_epi64::<0xd8>(words);
            let (low, high) = (_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(dst.cast(), _mm_packs_epi16(low, high));
        }
        fn store_u16(dst: *mut u16, v: I) {
            let v = Self::and_i32(v, Self::splat_i32(0xffff));
            let words = _mm256_permute4x64_epi64::<0xd8>(_mm256_packus_epi32(v[0], v[1]));
            _mm256_storeu_si256(dst.cast(), words);
        }
        fn transpose16(rows: [I; 16]) -> [I; 16] {
            let mut columns = [[_mm256_setzero_si256(); 2]; 16];
            for (row, half) in [(0, 0), (0, 8), (8, 0), (8, 8)] {
                let mut quadrant = [_mm256_setzero_si256(); 8];
                for i in 0..8 {
                    quadrant[i] = rows[row + i][half / 8];
                }
                let quadrant = transpose8(quadrant);
                for i in 0..8 {
                    columns[half + i][row / 8] = quadrant[i];
                }
            }
            columns
        }
        fn prefetch(src: *const u8) { _mm_prefetch::<_MM_HINT_T1>(src.cast()) }
    }

    #[inline(always)]
    unsafe fn group_dots<const P: usize, const R: usize>(
        panel: *const u8,
        x: &[*const i8; R],
    ) -> [I; R] {
        // SAFETY: the caller guarantees the instruction set, 512 panel bytes and 64 codes a plane.
        unsafe {
            let nibble = _mm256_set1_epi8(15);
            let ones = _mm256_set1_epi16(1);
            let mut sums = [Self::splat_i32(0); R];
            for part in 0..2 * P {
                let (plane, half) = (part / 2, part % 2);
                if plane > 0 && half == 0 {
                    sums = sums.map(|sum| both!(_mm256_slli_epi32::<7>, sum));
                }
                // Eight products of at most 2 * 15 * 127 each fit an i16.
                let mut words = [Self::splat_i32(0); R];
                for word in 4 * half..4 * half + 4 {
                    let packed = Self::load_i32(panel.add(64 * word));
                    let low = both!(_mm256_and_si256, packed, [nibble; 2]);
                    let high = both!(_mm256_srli_epi16::<4>, packed);
                    let high = both!(_mm256_and_si256, high, [nibble; 2]);
                    for r in 0..R {
                        let codes = x[r].cast::<i32>().add(16 * plane + word);
                        let x_low = [_mm256_set1_epi32(codes.read_unaligned()); 2];
                        let x_high = [_mm256_set1_epi32(codes.add(8).read_unaligned()); 2];
                        let products = both!(_mm256_maddubs_epi16, low, x_low);
                        words[r] = both!(_mm256_add_epi16, words[r], products);
                        let products = both!(_mm256_maddubs_epi16, high, x_high);
                        words[r] = both!(_mm256_add_epi16, words[r], products);
                    }
                }
                for r in 0..R {
                    let wide = both!(_mm256_madd_epi16, words[r], [ones; 2]);
                    sums[r] = Self::add_i32(sums[r], wide);
                }
            }
            sums
        }
    }
}
