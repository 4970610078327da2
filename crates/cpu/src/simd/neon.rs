//! AArch64 Advanced SIMD: four q registers a vector.
//!
//! Written for wide cores (Apple's do four 128-bit operations a cycle): products of codes go to
//! accumulators that do not wait for each other, and no loop leaves the registers.

use std::arch::aarch64::*;
use std::arch::asm;

use super::{Simd, simd_methods};

/// AArch64 Advanced SIMD, with the dot-product instructions of Armv8.2 if `DOTPROD`.
#[derive(Clone, Copy, Debug)]
pub struct Neon<const DOTPROD: bool>;

type F = [float32x4_t; 4];
type I = [int32x4_t; 4];
type M = [uint32x4_t; 4];

/// The operation on each quarter.
macro_rules! each {
    ($op:ident, $a:expr) => {
        [$op($a[0]), $op($a[1]), $op($a[2]), $op($a[3])]
    };
    ($op:ident, $a:expr, $b:expr) => {
        [$op($a[0], $b[0]), $op($a[1], $b[1]), $op($a[2], $b[2]), $op($a[3], $b[3])]
    };
    ($op:ident, $a:expr, $b:expr, $c:expr) => {
        [
            $op($a[0], $b[0], $c[0]),
            $op($a[1], $b[1], $c[1]),
            $op($a[2], $b[2], $c[2]),
            $op($a[3], $b[3], $c[3]),
        ]
    };
}

/// Sixteen bytes, zero-extended.
#[inline(always)]
unsafe fn widen(bytes: uint8x16_t) -> I {
    // SAFETY: register arithmetic; the caller has the instruction set.
    unsafe {
        let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
        widen_u16([low, high])
    }
}

/// Sixteen 16-bit words, zero-extended.
#[inline(always)]
unsafe fn widen_u16(words: [uint16x8_t; 2]) -> I {
    // SAFETY: register arithmetic; the caller has the instruction set.
    unsafe {
        let [low, high] = words;
        let words = [
            vmovl_u16(vget_low_u16(low)),
            vmovl_high_u16(low),
            vmovl_u16(vget_low_u16(high)),
            vmovl_high_u16(high),
        ];
        each!(vreinterpretq_s32_u32, words)
    }
}

/// The low 16 bits of each lane.
#[inline(always)]
unsafe fn narrow(v: I) -> [int16x8_t; 2] {
    // SAFETY: register arithmetic; the caller has the instruction set.
    unsafe { [vmovn_high_s32(vmovn_s32(v[0]), v[1]), vmovn_high_s32(vmovn_s32(v[2]), v[3])] }
}

/// The low halves of two registers if `!HIGH`, else the high ones.
#[inline(always)]
unsafe fn halves<const HIGH: bool>(a: int32x4_t, b: int32x4_t) -> int32x4_t {
    // SAFETY: register shuffles; the caller has the instruction set.
    unsafe {
        let (a, b) = (vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b));
        vreinterpretq_s32_s64(if HIGH { vtrn2q_s64(a, b) } else { vtrn1q_s64(a, b) })
    }
}

/// 4 × 4 transposition of 32-bit words.
#[inline(always)]
unsafe fn transpose4(r: [int32x4_t; 4]) -> [int32x4_t; 4] {
    // SAFETY: register shuffles; the caller has the instruction set.
    unsafe {
        let (a, b) = (vtrn1q_s32(r[0], r[1]), vtrn2q_s32(r[0], r[1]));
        let (c, d) = (vtrn1q_s32(r[2], r[3]), vtrn2q_s32(r[2], r[3]));
        [halves::<false>(a, c), halves::<false>(b, d), halves::<true>(a, c), halves::<true>(b, d)]
    }
}

impl<const DOTPROD: bool> Simd for Neon<DOTPROD> {
    type F32 = F;
    type I32 = I;
    type Mask = M;

    const WIDE: bool = false;
    const ROW_TILE: usize = 4;

    simd_methods! {
        fn splat(x: f32) -> F { [vdupq_n_f32(x); 4] }
        fn load(src: *const f32) -> F {
            [vld1q_f32(src), vld1q_f32(src.add(4)), vld1q_f32(src.add(8)), vld1q_f32(src.add(12))]
        }
        fn store(dst: *mut f32, v: F) {
            vst1q_f32(dst, v[0]);
            vst1q_f32(dst.add(4), v[1]);
            vst1q_f32(dst.add(8), v[2]);
            vst1q_f32(dst.add(12), v[3]);
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
        fn add(a: F, b: F) -> F { each!(vaddq_f32, a, b) }
        fn sub(a: F, b: F) -> F { each!(vsubq_f32, a, b) }
        fn mul(a: F, b: F) -> F { each!(vmulq_f32, a, b) }
        fn div(a: F, b: F) -> F { each!(vdivq_f32, a, b) }
        // vfmaq_f32(c, a, b) is c + a * b.
        fn fma(a: F, b: F, c: F) -> F { each!(vfmaq_f32, c, a, b) }
        fn neg(a: F) -> F { each!(vnegq_f32, a) }
        fn abs(a: F) -> F { each!(vabsq_f32, a) }
        // Compare and select: vminq_f32 and vmaxq_f32 would return the NaN.
        fn min(a: F, b: F) -> F { Self::select(Self::lt(a, b), a, b) }
        fn max(a: F, b: F) -> F { Self::select(Self::lt(b, a), a, b) }
        fn sqrt(a: F) -> F { each!(vsqrtq_f32, a) }
        fn round_ties_even(a: F) -> F { each!(vrndnq_f32, a) }
        fn lt(a: F, b: F) -> M { each!(vcltq_f32, a, b) }
        fn le(a: F, b: F) -> M { each!(vcleq_f32, a, b) }
        fn eq(a: F, b: F) -> M { each!(vceqq_f32, a, b) }
        fn select(mask: M, a: F, b: F) -> F { each!(vbslq_f32, mask, a, b) }
        fn mask_bits(mask: M) -> u32 {
            let lanes = [1u32, 2, 4, 8];
            let weights = vld1q_u32(lanes.as_ptr());
            let nibbles = each!(vandq_u32, mask, [weights; 4]);
            let low = vorrq_u32(nibbles[0], vshlq_n_u32::<4>(nibbles[1]));
            let high = vorrq_u32(nibbles[2], vshlq_n_u32::<4>(nibbles[3]));
            vaddvq_u32(vorrq_u32(low, vshlq_n_u32::<8>(high)))
        }
        fn reduce_add(v: F) -> f32 {
            let v = vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3]));
            let v = vadd_f32(vget_low_f32(v), vget_high_f32(v));
            vget_lane_f32::<0>(v) + vget_lane_f32::<1>(v)
        }
        fn reduce_max(v: F) -> f32 {
            // The same lanes in the same operand order, at full width so that `max` can be used.
            let v = Self::max(v, [v[2], v[3], v[2], v[3]]);
            let v = Self::max(v, [v[1]; 4]);
            let v = Self::max(v, [vextq_f32::<2>(v[0], v[0]); 4]);
            let v = Self::max(v, [vextq_f32::<1>(v[0], v[0]); 4]);
            vgetq_lane_f32::<0>(v[0])
        }
        fn reduce16(vs: [F; 16]) -> F {
            let mut sums = [vdupq_n_s32(0); 16];
            for j in 0..16 {
                let v = vs[j];
                let v = vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3]));
                sums[j] = vreinterpretq_s32_f32(v);
            }
            // Two vectors in one, their lanes i and i + 2 added.
            macro_rules! pair {
                ($j:expr) => {{
                    let low = halves::<false>(sums[$j], sums[$j + 1]);
                    let high = halves::<true>(sums[$j], sums[$j + 1]);
                    vaddq_f32(vreinterpretq_f32_s32(low), vreinterpretq_f32_s32(high))
                }};
            }
            macro_rules! four {
                ($j:expr) => {
                    vpaddq_f32(pair!($j), pair!($j + 2))
                };
            }
            [four!(0), four!(4), four!(8), four!(12)]
        }
        fn splat_i32(x: i32) -> I { [vdupq_n_s32(x); 4] }
        fn add_i32(a: I, b: I) -> I { each!(vaddq_s32, a, b) }
        fn sub_i32(a: I, b: I) -> I { each!(vsubq_s32, a, b) }
        fn and_i32(a: I, b: I) -> I { each!(vandq_s32, a, b) }
        fn or_i32(a: I, b: I) -> I { each!(vorrq_s32, a, b) }
        fn shl_i32(a: I, n: u32) -> I { each!(vshlq_s32, a, Self::splat_i32(n as i32)) }
        // A negative count shifts right: with the sign for s32, with zeros for u32.
        fn shr_i32(a: I, n: u32) -> I { each!(vshlq_s32, a, Self::splat_i32(-(n as i32))) }
        fn shr_u32(a: I, n: u32) -> I {
            let bits = each!(vreinterpretq_u32_s32, a);
            let bits = each!(vshlq_u32, bits, Self::splat_i32(-(n as i32)));
            each!(vreinterpretq_s32_u32, bits)
        }
        fn reduce_add_i32(v: I) -> i32 {
            vaddvq_s32(vaddq_s32(vaddq_s32(v[0], v[1]), vaddq_s32(v[2], v[3])))
        }
        fn to_i32(a: F) -> I {
            // vcvtnq saturates and turns a NaN into 0.
            let limit = Self::splat(2_147_483_648.0);
            let above = Self::le(Self::neg(limit), a);
            let below = Self::lt(a, limit);
            let valid = each!(vandq_u32, above, below);
            let nearest = each!(vcvtnq_s32_f32, a);
            each!(vbslq_s32, valid, nearest, Self::splat_i32(i32::MIN))
        }
        fn from_i32(a: I) -> F { each!(vcvtq_f32_s32, a) }
        fn cast_i32(a: F) -> I { each!(vreinterpretq_s32_f32, a) }
        fn cast_f32(a: I) -> F { each!(vreinterpretq_f32_s32, a) }
        fn load_i32(src: *const u8) -> I {
            let bytes = [vld1q_u8(src), vld1q_u8(src.add(16)), vld1q_u8(src.add(32)), vld1q_u8(src.add(48))];
            each!(vreinterpretq_s32_u8, bytes)
        }
        fn load_i32_partial(src: *const u8, bytes: usize) -> I {
            let mut lanes = [0u8; 64];
            std::ptr::copy_nonoverlapping(src, lanes.as_mut_ptr(), bytes);
            Self::load_i32(lanes.as_ptr())
        }
        fn store_i32(dst: *mut u8, v: I) {
            for (q, v) in v.into_iter().enumerate() {
                vst1q_u8(dst.add(16 * q), vreinterpretq_u8_s32(v));
            }
        }
        fn load_u8(src: *const u8) -> I { widen(vld1q_u8(src)) }
        fn load_u4(src: *const u8) -> I {
            let bytes = vld1_u8(src);
            let low = vand_u8(bytes, vdup_n_u8(15));
            let high = vshr_n_u8::<4>(bytes);
            widen(vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high)))
        }
        fn load_u16(src: *const u8) -> I {
            let bytes = [vld1q_u8(src), vld1q_u8(src.add(16))];
            widen_u16(bytes.map(|b| vreinterpretq_u16_u8(b)))
        }
        fn store_i8(dst: *mut i8, v: I) {
            let [low, high] = narrow(v);
            vst1q_s8(dst, vmovn_high_s16(vmovn_s16(low), high));
        }
        fn store_u16(dst: *mut u16, v: I) {
            let [low, high] = narrow(v);
            vst1q_u8(dst.cast(), vreinterpretq_u8_s16(low));
            vst1q_u8(dst.cast::<u8>().add(16), vreinterpretq_u8_s16(high));
        }
        fn transpose16(rows: [I; 16]) -> [I; 16] {
            let mut columns = [Self::splat_i32(0); 16];
            for i in 0..4 {
                let rows = [rows[4 * i], rows[4 * i + 1], rows[4 * i + 2], rows[4 * i + 3]];
                for q in 0..4 {
                    let block = transpose4([rows[0][q], rows[1][q], rows[2][q], rows[3][q]]);
                    for j in 0..4 {
                        columns[4 * q + j][i] = block[j];
                    }
                }
            }
            columns
        }
        // The intrinsic is unstable.
        fn prefetch(src: *const u8) {
            asm!("prfm pldl2keep, [{}]", in(reg) src, options(readonly, nostack, preserves_flags));
        }
    }

    #[inline(always)]
    unsafe fn group_dots<const P: usize, const R: usize>(
        panel: *const u8,
        x: &[*const i8; R],
    ) -> [I; R] {
        // SAFETY: same contract.
        unsafe {
            let mut dots = [Self::splat_i32(0); R];
            if DOTPROD && P * R <= 4 {
                // The accumulators of all planes fit: each nibble is unpacked once.
                for sums in dotprod::<P, R>(panel, x, 0) {
                    add_plane(&mut dots, sums);
                }
            } else {
                for plane in 0..P {
                    let sums = if DOTPROD {
                        let [sums] = dotprod::<1, R>(panel, x, plane);
                        sums
                    } else {
                        widening::<R>(panel, x, plane)
                    };
                    add_plane(&mut dots, sums);
                }
            }
            dots
        }
    }
}

/// `128 * dots + sums`.
#[inline(always)]
unsafe fn add_plane<const R: usize>(dots: &mut [I; R], sums: [I; R]) {
    for r in 0..R {
        for q in 0..4 {
            // SAFETY: register arithmetic; the caller has the instruction set.
            dots[r][q] = unsafe { vaddq_s32(vshlq_n_s32::<7>(dots[r][q]), sums[r][q]) };
        }
    }
}

/// Adds to each lane of `sum` the product of its four weights and of word `WORD` of the codes.
///
/// In assembly because the intrinsic is unstable.
#[inline(always)]
unsafe fn sdot<const WORD: usize>(
    sum: int32x4_t,
    weights: uint8x16_t,
    codes: int8x16_t,
) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: register arithmetic; the caller has the dot-product instructions. Weights are nibbles:
    // as signed bytes they are the same numbers.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {weights:v}.16b, {codes:v}.4b[{word}]",
            sum = inout(vreg) sum,
            weights = in(vreg) weights,
            codes = in(vreg) codes,
            word = const WORD,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// Dot products of `P` planes from plane `first` on, by `sdot`.
///
/// # Safety
/// The machine has the dot-product instructions; the rest as for [`Simd::group_dots`].
#[inline(always)]
unsafe fn dotprod<const P: usize, const R: usize>(
    panel: *const u8,
    x: &[*const i8; R],
    first: usize,
) -> [[I; R]; P] {
    // SAFETY: 512 panel bytes and 64 codes a plane, by the caller's promise.
    unsafe {
        let zero = vdupq_n_s32(0);
        // Four accumulators a plane and row; eight where four would wait for the latency of sdot.
        let mut low_sums = [[[zero; 4]; R]; P];
        let mut high_sums = [[[zero; 4]; R]; P];
        let mut low_codes = [[vdupq_n_s8(0); R]; P];
        let mut high_codes = low_codes;
        macro_rules! multiply {
            ($packed:expr, $word:literal) => {
                for q in 0..4 {
                    let packed = vld1q_u8($packed.add(64 * $word + 16 * q));
                    let low = vandq_u8(packed, vdupq_n_u8(15));
                    for p in 0..P {
                        for r in 0..R {
                            let sum = &mut low_sums[p][r][q];
                            *sum = sdot::<$word>(*sum, low, low_codes[p][r]);
                        }
                    }
                    let high = vshrq_n_u8::<4>(packed);
                    let sums = if P * R <= 2 { &mut high_sums } else { &mut low_sums };
                    for p in 0..P {
                        for r in 0..R {
                            let sum = &mut sums[p][r][q];
                            *sum = sdot::<$word>(*sum, high, high_codes[p][r]);
                        }
                    }
                }
            };
        }
        for half in 0..2 {
            for p in 0..P {
                for r in 0..R {
                    let codes = x[r].add(64 * (first + p) + 16 * half);
                    low_codes[p][r] = vld1q_s8(codes);
                    high_codes[p][r] = vld1q_s8(codes.add(32));
                }
            }
            let packed = panel.add(256 * half);
            multiply!(packed, 0);
            multiply!(packed, 1);
            multiply!(packed, 2);
            multiply!(packed, 3);
        }
        for p in 0..P {
            for r in 0..R {
                low_sums[p][r] = each!(vaddq_s32, low_sums[p][r], high_sums[p][r]);
            }
        }
        low_sums
    }
}

/// Dot products of one plane by products of 16 bits: an accumulator's lane takes 16 products of at
/// most 15 * 128 each, which fit.
///
/// # Safety
/// As for [`Simd::group_dots`].
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn widening<const R: usize>(panel: *const u8, x: &[*const i8; R], plane: usize) -> [I; R] {
    // SAFETY: 512 panel bytes and 64 codes a plane, by the caller's promise.
    unsafe {
        let mut dots = [[vdupq_n_s32(0); 4]; R];
        for q in 0..4 {
            // Outputs 4q and 4q + 1, and the two after them: four lanes each.
            let mut first = [vdupq_n_s16(0); R];
            let mut second = [vdupq_n_s16(0); R];
            for word in 0..8 {
                let packed = vld1q_u8(panel.add(64 * word + 16 * q));
                let low = vreinterpretq_s8_u8(vandq_u8(packed, vdupq_n_u8(15)));
                let high = vreinterpretq_s8_u8(vshrq_n_u8::<4>(packed));
                for r in 0..R {
                    let codes = x[r].add(64 * plane + 4 * word).cast::<i32>();
                    let low_codes = vreinterpretq_s8_s32(vdupq_n_s32(codes.read_unaligned()));
                    let high_codes =
                        vreinterpretq_s8_s32(vdupq_n_s32(codes.add(8).read_unaligned()));
                    first[r] = vmlal_s8(first[r], vget_low_s8(low), vget_low_s8(low_codes));
                    first[r] = vmlal_s8(first[r], vget_low_s8(high), vget_low_s8(high_codes));
                    second[r] = vmlal_high_s8(second[r], low, low_codes);
                    second[r] = vmlal_high_s8(second[r], high, high_codes);
                }
            }
            for r in 0..R {
                dots[r][q] = vpaddq_s32(vpaddlq_s16(first[r]), vpaddlq_s16(second[r]));
            }
        }
        dots
    }
}
