//! AArch64 Advanced SIMD: four q registers a vector.

use std::arch::aarch64::*;

use super::{Simd, group_dots_plain, simd_methods};

/// AArch64 Advanced SIMD.
#[derive(Clone, Copy, Debug)]
pub struct Neon;

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

impl Simd for Neon {
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
            let mut lanes = [0u32; 16];
            for q in 0..4 {
                vst1q_u32(lanes.as_mut_ptr().add(4 * q), mask[q]);
            }
            lanes.iter().enumerate().fold(0, |bits, (i, &lane)| bits | ((lane & 1) << i))
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
            let mut sums = [0.0f32; 16];
            for j in 0..16 {
                sums[j] = Self::reduce_add(vs[j]);
            }
            Self::load(sums.as_ptr())
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
            let bytes = each!(vreinterpretq_u8_s32, v);
            for q in 0..4 {
                vst1q_u8(dst.add(16 * q), bytes[q]);
            }
        }
        fn load_u8(src: *const u8) -> I {
            let bytes = vld1q_u8(src);
            let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes)));
            let words = [
                vmovl_u16(vget_low_u16(low)),
                vmovl_u16(vget_high_u16(low)),
                vmovl_u16(vget_low_u16(high)),
                vmovl_u16(vget_high_u16(high)),
            ];
            each!(vreinterpretq_s32_u32, words)
        }
        fn load_u4(src: *const u8) -> I {
            let bytes = vld1_u8(src);
            let low = vand_u8(bytes, vdup_n_u8(15));
            let high = vshr_n_u8::<4>(bytes);
            let nibbles = vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high));
            let mut codes = [0u8; 16];
            vst1q_u8(codes.as_mut_ptr(), nibbles);
            Self::load_u8(codes.as_ptr())
        }
        fn load_u16(src: *const u8) -> I {
            let low = vreinterpretq_u16_u8(vld1q_u8(src));
            let high = vreinterpretq_u16_u8(vld1q_u8(src.add(16)));
            let words = [
                vmovl_u16(vget_low_u16(low)),
                vmovl_u16(vget_high_u16(low)),
                vmovl_u16(vget_low_u16(high)),
                vmovl_u16(vget_high_u16(high)),
            ];
            each!(vreinterpretq_s32_u32, words)
        }
        fn store_i8(dst: *mut i8, v: I) {
            let low = vcombine_s16(vmovn_s32(v[0]), vmovn_s32(v[1]));
            let high = vcombine_s16(vmovn_s32(v[2]), vmovn_s32(v[3]));
            vst1q_s8(dst, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
        }
        fn store_u16(dst: *mut u16, v: I) {
            let low = vcombine_s16(vmovn_s32(v[0]), vmovn_s32(v[1]));
            let high = vcombine_s16(vmovn_s32(v[2]), vmovn_s32(v[3]));
            vst1q_u8(dst.cast(), vreinterpretq_u8_s16(low));
            vst1q_u8(dst.cast::<u8>().add(16), vreinterpretq_u8_s16(high));
        }
        fn transpose16(rows: [I; 16]) -> [I; 16] {
            let mut words = [[0i32; 16]; 16];
            for i in 0..16 {
                Self::store_i32(words[i].as_mut_ptr().cast(), rows[i]);
            }
            let mut columns = [Self::splat_i32(0); 16];
            for j in 0..16 {
                let mut column = [0i32; 16];
                for i in 0..16 {
                    column[i] = words[i][j];
                }
                columns[j] = Self::load_i32(column.as_ptr().cast());
            }
            columns
        }
        fn prefetch(_src: *const u8) {}
    }

    #[inline(always)]
    unsafe fn group_dots<const P: usize, const R: usize>(
        panel: *const u8,
        x: &[*const i8; R],
    ) -> [I; R] {
        // SAFETY: same contract.
        let dots = unsafe { group_dots_plain::<P, R>(panel, x) };
        // SAFETY: each array has sixteen words.
        dots.map(|lanes| unsafe { Self::load_i32(lanes.as_ptr().cast()) })
    }
}
