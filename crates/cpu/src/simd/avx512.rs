//! AVX-512 with VNNI: one zmm register a vector.

use std::arch::x86_64::*;

use super::{Simd, simd_methods};

/// AVX-512 F, BW, VL, DQ and VNNI.
#[derive(Clone, Copy, Debug)]
pub struct Avx512;

/// Sums, or folds otherwise, lanes i and i+8, then +4, +2, +1.
macro_rules! tree {
    ($v:expr, $op256:ident, $op128:ident) => {{
        let v = $v;
        let v = $op256(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
        let v = $op128(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = $op128(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32($op128(v, _mm_shuffle_ps::<1>(v, v)))
    }};
}

#[inline(always)]
fn first(n: usize) -> __mmask16 {
    ((1u32 << n) - 1) as __mmask16
}

impl Simd for Avx512 {
    type F32 = __m512;
    type I32 = __m512i;
    type Mask = __mmask16;

    const WIDE: bool = true;
    const ROW_TILE: usize = 12;

    simd_methods! {
        fn splat(x: f32) -> __m512 { _mm512_set1_ps(x) }
        fn load(src: *const f32) -> __m512 { _mm512_loadu_ps(src) }
        fn store(dst: *mut f32, v: __m512) { _mm512_storeu_ps(dst, v) }
        fn load_partial(src: *const f32, n: usize) -> __m512 { _mm512_maskz_loadu_ps(first(n), src) }
        fn store_partial(dst: *mut f32, v: __m512, n: usize) { _mm512_mask_storeu_ps(dst, first(n), v) }
        fn add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        fn sub(a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
        fn mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn div(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        fn neg(a: __m512) -> __m512 { _mm512_xor_ps(a, _mm512_set1_ps(-0.0)) }
        fn abs(a: __m512) -> __m512 { _mm512_abs_ps(a) }
        fn min(a: __m512, b: __m512) -> __m512 { _mm512_min_ps(a, b) }
        fn max(a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
        fn sqrt(a: __m512) -> __m512 { _mm512_sqrt_ps(a) }
        fn round_ties_even(a: __m512) -> __m512 {
            _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a)
        }
        fn lt(a: __m512, b: __m512) -> __mmask16 { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b) }
        fn le(a: __m512, b: __m512) -> __mmask16 { _mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b) }
        fn eq(a: __m512, b: __m512) -> __mmask16 { _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b) }
        fn select(mask: __mmask16, a: __m512, b: __m512) -> __m512 { _mm512_mask_blend_ps(mask, b, a) }
        fn mask_bits(mask: __mmask16) -> u32 { u32::from(mask) }
        fn reduce_add(v: __m512) -> f32 { tree!(v, _mm256_add_ps, _mm_add_ps) }
        fn reduce_max(v: __m512) -> f32 { tree!(v, _mm256_max_ps, _mm_max_ps) }
        fn reduce16(v: [__m512; 16]) -> __m512 {
            // Each level folds two vectors into one; the pairs are those that leave lane j = v[j].
            // Macros, because a closure is compiled without the target features.
            macro_rules! fold {
                ($shuffle:ident, $low:literal, $high:literal, $a:expr, $b:expr) => {{
                    let (a, b) = ($a, $b);
                    _mm512_add_ps($shuffle::<$low>(a, b), $shuffle::<$high>(a, b))
                }};
            }
            macro_rules! column {
                ($j:literal) => {{
                    let a = fold!(_mm512_shuffle_f32x4, 0x44, 0xee, v[$j], v[$j + 4]);
                    let b = fold!(_mm512_shuffle_f32x4, 0x44, 0xee, v[$j + 8], v[$j + 12]);
                    fold!(_mm512_shuffle_f32x4, 0x88, 0xdd, a, b)
                }};
            }
            let left = fold!(_mm512_shuffle_ps, 0x44, 0xee, column!(0), column!(1));
            let right = fold!(_mm512_shuffle_ps, 0x44, 0xee, column!(2), column!(3));
            fold!(_mm512_shuffle_ps, 0x88, 0xdd, left, right)
        }
        fn splat_i32(x: i32) -> __m512i { _mm512_set1_epi32(x) }
        fn add_i32(a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
        fn sub_i32(a: __m512i, b: __m512i) -> __m512i { _mm512_sub_epi32(a, b) }
        fn and_i32(a: __m512i, b: __m512i) -> __m512i { _mm512_and_si512(a, b) }
        fn or_i32(a: __m512i, b: __m512i) -> __m512i { _mm512_or_si512(a, b) }
        fn shl_i32(a: __m512i, n: u32) -> __m512i { _mm512_sllv_epi32(a, _mm512_set1_epi32(n as i32)) }
        fn shr_i32(a: __m512i, n: u32) -> __m512i { _mm512_srav_epi32(a, _mm512_set1_epi32(n as i32)) }
        fn shr_u32(a: __m512i, n: u32) -> __m512i { _mm512_srlv_epi32(a, _mm512_set1_epi32(n as i32)) }
        fn reduce_add_i32(v: __m512i) -> i32 { _mm512_reduce_add_epi32(v) }
        fn to_i32(a: __m512) -> __m512i { _mm512_cvtps_epi32(a) }
        fn from_i32(a: __m512i) -> __m512 { _mm512_cvtepi32_ps(a) }
        fn cast_i32(a: __m512) -> __m512i { _mm512_castps_si512(a) }
        fn cast_f32(a: __m512i) -> __m512 { _mm512_castsi512_ps(a) }
        fn load_i32(src: *const u8) -> __m512i { _mm512_loadu_si512(src.cast()) }
        fn load_i32_partial(src: *const u8, bytes: usize) -> __m512i {
            let mask = u64::MAX.checked_shr(64 - bytes as u32).unwrap_or(0);
            _mm512_maskz_loadu_epi8(mask, src.cast())
        }
        fn store_i32(dst: *mut u8, v: __m512i) { _mm512_storeu_si512(dst.cast(), v) }
        fn load_u8(src: *const u8) -> __m512i { _mm512_cvtepu8_epi32(_mm_loadu_si128(src.cast())) }
        fn load_u4(src: *const u8) -> __m512i {
            // Byte b in a 64-bit lane: b | b << 28 has b in the low word and b >> 4 in the high one.
            let bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64(src.cast()));
            let both = _mm512_or_si512(bytes, _mm512_slli_epi64::<28>(bytes));
            _mm512_and_si512(both, _mm512_set1_epi32(15))
        }
        fn load_u16(src: *const u8) -> __m512i { _mm512_cvtepu16_epi32(_mm256_loadu_si256(src.cast())) }
        fn store_i8(dst: *mut i8, v: __m512i) { _mm_storeu_si128(dst.cast(), _mm512_cvtepi32_epi8(v)) }
        fn store_u16(dst: *mut u16, v: __m512i) {
            _mm256_storeu_si256(dst.cast(), _mm512_cvtepi32_epi16(v));
        }
        fn transpose16(rows: [__m512i; 16]) -> [__m512i; 16] { transpose(rows) }
        fn prefetch(src: *const u8) { _mm_prefetch::<_MM_HINT_T1>(src.cast()) }
    }

    // Iterators over the sums keep LLVM from holding them in registers: a quarter slower with 4 rows.
    #[allow(clippy::needless_range_loop)]
    #[inline(always)]
    unsafe fn group_dots<const P: usize, const R: usize>(
        panel: *const u8,
        x: &[*const i8; R],
    ) -> [__m512i; R] {
        // SAFETY: the caller guarantees the instruction set, 512 panel bytes and 64 codes a plane.
        unsafe {
            let nibble = _mm512_set1_epi8(15);
            // Two sums a plane: with few, one chain would wait for the latency of vpdpbusd.
            let mut low_sums = [[_mm512_setzero_si512(); P]; R];
            let mut high_sums = [[_mm512_setzero_si512(); P]; R];
            for word in 0..8 {
                let packed = _mm512_loadu_si512(panel.add(64 * word).cast());
                let low = _mm512_and_si512(packed, nibble);
                let high = _mm512_and_si512(_mm512_srli_epi16::<4>(packed), nibble);
                for r in 0..R {
                    for p in 0..P {
                        let codes = x[r].cast::<i32>().add(16 * p + word).read_unaligned();
                        let sum = &mut low_sums[r][p];
                        *sum = _mm512_dpbusd_epi32(*sum, low, _mm512_set1_epi32(codes));
                    }
                }
                for r in 0..R {
                    for p in 0..P {
                        let codes = x[r].cast::<i32>().add(16 * p + 8 + word).read_unaligned();
                        let sums = if P * R < 5 { &mut high_sums } else { &mut low_sums };
                        let sum = &mut sums[r][p];
                        *sum = _mm512_dpbusd_epi32(*sum, high, _mm512_set1_epi32(codes));
                    }
                }
            }
            let mut dots = [_mm512_setzero_si512(); R];
            for r in 0..R {
                for p in 0..P {
                    let sum = _mm512_add_epi32(low_sums[r][p], high_sums[r][p]);
                    dots[r] = _mm512_add_epi32(_mm512_slli_epi32::<7>(dots[r]), sum);
                }
            }
            dots
        }
    }
}

/// 16 × 16 transposition of 32-bit words: within 128-bit blocks, then of the blocks.
#[inline(always)]
unsafe fn transpose(r: [__m512i; 16]) -> [__m512i; 16] {
    // SAFETY: register shuffles; the caller has the instruction set.
    unsafe {
        // blocks[4q + c], block b: word 4b + c of rows 4q..4q+4.
        let mut blocks = [_mm512_setzero_si512(); 16];
        for q in 0..4 {
            let rows = &r[4 * q..4 * q + 4];
            let a = _mm512_unpacklo_epi32(rows[0], rows[1]);
            let b = _mm512_unpackhi_epi32(rows[0], rows[1]);
            let c = _mm512_unpacklo_epi32(rows[2], rows[3]);
            let d = _mm512_unpackhi_epi32(rows[2], rows[3]);
            blocks[4 * q] = _mm512_unpacklo_epi64(a, c);
            blocks[4 * q + 1] = _mm512_unpackhi_epi64(a, c);
            blocks[4 * q + 2] = _mm512_unpacklo_epi64(b, d);
            blocks[4 * q + 3] = _mm512_unpackhi_epi64(b, d);
        }
        let mut columns = [_mm512_setzero_si512(); 16];
        for c in 0..4 {
            let even_low = _mm512_shuffle_i32x4::<0x88>(blocks[c], blocks[4 + c]);
            let odd_low = _mm512_shuffle_i32x4::<0xdd>(blocks[c], blocks[4 + c]);
            let even_high = _mm512_shuffle_i32x4::<0x88>(blocks[8 + c], blocks[12 + c]);
            let odd_high = _mm512_shuffle_i32x4::<0xdd>(blocks[8 + c], blocks[12 + c]);
            columns[c] = _mm512_shuffle_i32x4::<0x88>(even_low, even_high);
            columns[4 + c] = _mm512_shuffle_i32x4::<0x88>(odd_low, odd_high);
            columns[8 + c] = _mm512_shuffle_i32x4::<0xdd>(even_low, even_high);
            columns[12 + c] = _mm512_shuffle_i32x4::<0xdd>(odd_low, odd_high);
        }
        columns
    }
}
