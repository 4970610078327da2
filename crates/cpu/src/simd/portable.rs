//! Plain Rust implementation, the definition that the others agree with.

use super::{Simd, simd_methods};

/// Plain Rust on arrays.
#[derive(Clone, Copy, Debug)]
pub struct Portable;

/// Sixteen f32.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub struct F32x16(pub(super) [f32; 16]);

/// Sixteen i32.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub struct I32x16(pub(super) [i32; 16]);

#[inline(always)]
fn map(a: F32x16, f: impl Fn(f32) -> f32) -> F32x16 {
    F32x16(std::array::from_fn(|i| f(a.0[i])))
}

#[inline(always)]
fn zip(a: F32x16, b: F32x16, f: impl Fn(f32, f32) -> f32) -> F32x16 {
    F32x16(std::array::from_fn(|i| f(a.0[i], b.0[i])))
}

#[inline(always)]
fn test(a: F32x16, b: F32x16, f: impl Fn(f32, f32) -> bool) -> [bool; 16] {
    std::array::from_fn(|i| f(a.0[i], b.0[i]))
}

#[inline(always)]
fn map_i32(a: I32x16, f: impl Fn(i32) -> i32) -> I32x16 {
    I32x16(std::array::from_fn(|i| f(a.0[i])))
}

#[inline(always)]
fn zip_i32(a: I32x16, b: I32x16, f: impl Fn(i32, i32) -> i32) -> I32x16 {
    I32x16(std::array::from_fn(|i| f(a.0[i], b.0[i])))
}

/// Folds lanes i and i+8, then +4, +2, +1.
#[inline(always)]
fn tree(mut lanes: [f32; 16], f: impl Fn(f32, f32) -> f32) -> f32 {
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] = f(lanes[i], lanes[i + width]);
        }
    }
    lanes[0]
}

#[inline(always)]
fn nearest_i32(x: f32) -> i32 {
    let limit = 2_147_483_648.0;
    if (-limit..limit).contains(&x) { x.round_ties_even() as i32 } else { i32::MIN }
}

impl Simd for Portable {
    type F32 = F32x16;
    type I32 = I32x16;
    type Mask = [bool; 16];

    const WIDE: bool = false;
    const ROW_TILE: usize = 4;

    simd_methods! {
        fn splat(x: f32) -> F32x16 { F32x16([x; 16]) }
        fn load(src: *const f32) -> F32x16 { F32x16(src.cast::<[f32; 16]>().read_unaligned()) }
        fn store(dst: *mut f32, v: F32x16) { dst.cast::<[f32; 16]>().write_unaligned(v.0) }
        fn load_partial(src: *const f32, n: usize) -> F32x16 {
            let mut lanes = [0.0f32; 16];
            std::ptr::copy_nonoverlapping(src.cast::<u8>(), lanes.as_mut_ptr().cast(), 4 * n);
            F32x16(lanes)
        }
        fn store_partial(dst: *mut f32, v: F32x16, n: usize) {
            std::ptr::copy_nonoverlapping(v.0.as_ptr().cast::<u8>(), dst.cast(), 4 * n);
        }
        fn add(a: F32x16, b: F32x16) -> F32x16 { zip(a, b, |a, b| a + b) }
        fn sub(a: F32x16, b: F32x16) -> F32x16 { zip(a, b, |a, b| a - b) }
        fn mul(a: F32x16, b: F32x16) -> F32x16 { zip(a, b, |a, b| a * b) }
        fn div(a: F32x16, b: F32x16) -> F32x16 { zip(a, b, |a, b| a / b) }
        fn fma(a: F32x16, b: F32x16, c: F32x16) -> F32x16 {
            F32x16(std::array::from_fn(|i| a.0[i].mul_add(b.0[i], c.0[i])))
        }
        fn neg(a: F32x16) -> F32x16 { map(a, |a| -a) }
        fn abs(a: F32x16) -> F32x16 { map(a, f32::abs) }
        fn min(a: F32x16, b: F32x16) -> F32x16 { zip(a, b, |a, b| if a < b { a } else { b }) }
        fn max(a: F32x16, b: F32x16) -> F32x16 { zip(a, b, |a, b| if a > b { a } else { b }) }
        fn sqrt(a: F32x16) -> F32x16 { map(a, f32::sqrt) }
        fn round_ties_even(a: F32x16) -> F32x16 { map(a, f32::round_ties_even) }
        fn lt(a: F32x16, b: F32x16) -> [bool; 16] { test(a, b, |a, b| a < b) }
        fn le(a: F32x16, b: F32x16) -> [bool; 16] { test(a, b, |a, b| a <= b) }
        fn eq(a: F32x16, b: F32x16) -> [bool; 16] { test(a, b, |a, b| a == b) }
        fn select(mask: [bool; 16], a: F32x16, b: F32x16) -> F32x16 {
            F32x16(std::array::from_fn(|i| if mask[i] { a.0[i] } else { b.0[i] }))
        }
        fn mask_bits(mask: [bool; 16]) -> u32 {
            mask.iter().enumerate().fold(0, |bits, (i, &set)| bits | (u32::from(set) << i))
        }
        fn reduce_add(v: F32x16) -> f32 { tree(v.0, |a, b| a + b) }
        fn reduce_max(v: F32x16) -> f32 { tree(v.0, |a, b| if a > b { a } else { b }) }
        fn reduce16(vs: [F32x16; 16]) -> F32x16 {
            F32x16(std::array::from_fn(|j| tree(vs[j].0, |a, b| a + b)))
        }
        fn splat_i32(x: i32) -> I32x16 { I32x16([x; 16]) }
        fn add_i32(a: I32x16, b: I32x16) -> I32x16 { zip_i32(a, b, i32::wrapping_add) }
        fn sub_i32(a: I32x16, b: I32x16) -> I32x16 { zip_i32(a, b, i32::wrapping_sub) }
        fn and_i32(a: I32x16, b: I32x16) -> I32x16 { zip_i32(a, b, |a, b| a & b) }
        fn or_i32(a: I32x16, b: I32x16) -> I32x16 { zip_i32(a, b, |a, b| a | b) }
        fn shl_i32(a: I32x16, n: u32) -> I32x16 { map_i32(a, |a| a << n) }
        fn shr_i32(a: I32x16, n: u32) -> I32x16 { map_i32(a, |a| a >> n) }
        fn shr_u32(a: I32x16, n: u32) -> I32x16 { map_i32(a, |a| ((a as u32) >> n) as i32) }
        fn reduce_add_i32(v: I32x16) -> i32 { v.0.iter().fold(0, |a, &b| a.wrapping_add(b)) }
        fn to_i32(a: F32x16) -> I32x16 { I32x16(a.0.map(nearest_i32)) }
        fn from_i32(a: I32x16) -> F32x16 { F32x16(a.0.map(|a| a as f32)) }
        fn cast_i32(a: F32x16) -> I32x16 { I32x16(a.0.map(|a| a.to_bits() as i32)) }
        fn cast_f32(a: I32x16) -> F32x16 { F32x16(a.0.map(|a| f32::from_bits(a as u32))) }
        fn load_i32(src: *const u8) -> I32x16 { I32x16(src.cast::<[i32; 16]>().read_unaligned()) }
        fn load_i32_partial(src: *const u8, bytes: usize) -> I32x16 {
            let mut lanes = [0i32; 16];
            std::ptr::copy_nonoverlapping(src, lanes.as_mut_ptr().cast(), bytes);
            I32x16(lanes)
        }
        fn store_i32(dst: *mut u8, v: I32x16) { dst.cast::<[i32; 16]>().write_unaligned(v.0) }
        fn load_u8(src: *const u8) -> I32x16 { I32x16((*src.cast::<[u8; 16]>()).map(i32::from)) }
        fn load_u4(src: *const u8) -> I32x16 {
            let bytes = &*src.cast::<[u8; 8]>();
            I32x16(std::array::from_fn(|i| i32::from((bytes[i / 2] >> (4 * (i % 2))) & 15)))
        }
        fn load_u16(src: *const u8) -> I32x16 {
            I32x16(src.cast::<[u16; 16]>().read_unaligned().map(i32::from))
        }
        fn store_i8(dst: *mut i8, v: I32x16) {
            dst.cast::<[i8; 16]>().write(v.0.map(|v| v as i8));
        }
        fn store_u16(dst: *mut u16, v: I32x16) {
            dst.cast::<[u16; 16]>().write_unaligned(v.0.map(|v| v as u16));
        }
        fn transpose16(rows: [I32x16; 16]) -> [I32x16; 16] {
            std::array::from_fn(|j| I32x16(std::array::from_fn(|i| rows[i].0[j])))
        }
        fn prefetch(_src: *const u8) {}
    }

    #[inline(always)]
    unsafe fn group_dots<const P: usize, const R: usize>(
        panel: *const u8,
        x: &[*const i8; R],
    ) -> [I32x16; R] {
        // SAFETY: same contract.
        unsafe { group_dots_plain::<P, R>(panel, x) }.map(I32x16)
    }
}

/// [`Simd::group_dots`] for one output lane at a time; LLVM turns the inner loops into vectors.
#[inline(always)]
unsafe fn group_dots_plain<const P: usize, const R: usize>(
    panel: *const u8,
    x: &[*const i8; R],
) -> [[i32; 16]; R] {
    let mut dots = [[0i32; 16]; R];
    for step in 0..8 * P {
        let (plane, word) = (step / 8, step % 8);
        if plane > 0 && word == 0 {
            dots.as_flattened_mut().iter_mut().for_each(|dot| *dot <<= 7);
        }
        // SAFETY: the panel has 8 words of 64 bytes.
        let packed = unsafe { &*panel.add(64 * word).cast::<[u8; 64]>() };
        for (dots, &x) in dots.iter_mut().zip(x) {
            // SAFETY: every row has 64 codes a plane.
            let (low, high) = unsafe {
                let x = x.add(64 * plane + 4 * word);
                (&*x.cast::<[i8; 4]>(), &*x.add(32).cast::<[i8; 4]>())
            };
            for (lane, dot) in dots.iter_mut().enumerate() {
                for byte in 0..4 {
                    let code = packed[4 * lane + byte];
                    *dot += i32::from(code & 15) * i32::from(low[byte]);
                    *dot += i32::from(code >> 4) * i32::from(high[byte]);
                }
            }
        }
    }
    dots
}
