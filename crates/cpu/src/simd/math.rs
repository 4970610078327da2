//! Elementary functions over [`Simd`], used instead of the C library so that every machine agrees.

use super::{LANES, Simd};

/// ln 2 in two parts; the high one has few enough bits that an exponent times it is exact.
const LN2_HIGH: f32 = 355.0 / 512.0;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// `c[0] + c[1] x + …`, by Horner's rule.
#[inline(always)]
unsafe fn polynomial<S: Simd, const N: usize>(x: S::F32, c: [f32; N]) -> S::F32 {
    // SAFETY: register arithmetic; the caller has the instruction set.
    unsafe {
        let mut sum = S::splat(c[N - 1]);
        for &c in c[..N - 1].iter().rev() {
            sum = S::fma(sum, x, S::splat(c));
        }
        sum
    }
}

/// `2^n` for `-126 <= n <= 127`.
#[inline(always)]
unsafe fn pow2<S: Simd>(n: S::I32) -> S::F32 {
    // SAFETY: register arithmetic; the caller has the instruction set.
    unsafe { S::cast_f32(S::shl_i32(S::add_i32(n, S::splat_i32(127)), 23)) }
}

/// `e^x` within 2 ulp; 0 and infinity out of range, NaN for a NaN.
///
/// # Safety
/// The machine has the instruction set of `S`.
#[inline(always)]
pub unsafe fn exp<S: Simd>(x: S::F32) -> S::F32 {
    // SAFETY: register arithmetic; the caller has the instruction set.
    unsafe {
        let clamped = S::min(S::max(x, S::splat(-104.0)), S::splat(89.0));
        let n = S::round_ties_even(S::mul(clamped, S::splat(std::f32::consts::LOG2_E)));
        let r = S::fma(n, S::splat(-LN2_HIGH), clamped);
        let r = S::fma(n, S::splat(-LN2_LOW), r);
        let tail = polynomial::<S, 6>(
            r,
            [0.5, 0.166_666_65, 4.166_579_6e-2, 8.333_452e-3, 1.398_2e-3, 1.987_569_2e-4],
        );
        let p = S::add(S::fma(S::mul(r, r), tail, r), S::splat(1.0));
        // Two factors: 2^n itself may be subnormal or out of range.
        let n = S::to_i32(n);
        let half = S::shr_i32(n, 1);
        let y = S::mul(S::mul(p, pow2::<S>(half)), pow2::<S>(S::sub_i32(n, half)));
        S::select(S::eq(x, x), y, x)
    }
}

/// `ln(1 + x)` within 4 ulp for `x >= 0`; NaN for a NaN.
///
/// # Safety
/// The machine has the instruction set of `S`.
#[inline(always)]
pub unsafe fn log1p<S: Simd>(x: S::F32) -> S::F32 {
    // SAFETY: register arithmetic; the caller has the instruction set.
    unsafe {
        let one = S::splat(1.0);
        let u = S::add(one, x);
        // What rounding took from 1 + x, for ln(u + lost) = ln(u) + lost / u; exact either way.
        let lost = S::select(S::lt(x, one), S::sub(x, S::sub(u, one)), S::sub(one, S::sub(u, x)));
        let correction = S::div(lost, u);

        // u = 2^k (1 + f) with 1 + f between sqrt(1/2) and sqrt(2).
        let sqrt_half = S::splat_i32(0x3f35_04f3);
        let offset = S::sub_i32(S::cast_i32(u), sqrt_half);
        let k = S::from_i32(S::shr_i32(offset, 23));
        let mantissa = S::add_i32(S::and_i32(offset, S::splat_i32(0x007f_ffff)), sqrt_half);
        let f = S::sub(S::cast_f32(mantissa), one);

        // ln(1 + f) = f - (h - s (h + R)), s = f / (2 + f), h = f²/2, R the atanh series.
        let s = S::div(f, S::add(S::splat(2.0), f));
        let z = S::mul(s, s);
        let series = polynomial::<S, 4>(z, [0.666_666_7, 0.4, 0.285_714_3, 0.222_222_2]);
        let h = S::mul(S::splat(0.5), S::mul(f, f));
        let small = S::fma(k, S::splat(LN2_LOW), correction);
        let inner = S::fma(s, S::fma(z, series, h), small);
        let y = S::fma(k, S::splat(LN2_HIGH), S::sub(f, S::sub(h, inner)));
        S::select(S::lt(x, S::splat(f32::INFINITY)), y, x)
    }
}

/// `1 / (1 + e^-x)`.
///
/// # Safety
/// The machine has the instruction set of `S`.
#[inline(always)]
pub unsafe fn sigmoid<S: Simd>(x: S::F32) -> S::F32 {
    // SAFETY: register arithmetic; the caller has the instruction set.
    unsafe {
        let one = S::splat(1.0);
        S::div(one, S::add(one, exp::<S>(S::neg(x))))
    }
}

/// `x * sigmoid(x)`.
///
/// # Safety
/// The machine has the instruction set of `S`.
#[inline(always)]
pub unsafe fn silu<S: Simd>(x: S::F32) -> S::F32 {
    // SAFETY: register arithmetic; the caller has the instruction set.
    unsafe { S::mul(x, sigmoid::<S>(x)) }
}

/// `max(x, 0) + log1p(e^-|x|)`; NaN for a NaN.
///
/// # Safety
/// The machine has the instruction set of `S`.
#[inline(always)]
pub unsafe fn softplus<S: Simd>(x: S::F32) -> S::F32 {
    // SAFETY: register arithmetic; the caller has the instruction set.
    unsafe {
        let tail = log1p::<S>(exp::<S>(S::neg(S::abs(x))));
        S::add(S::max(x, S::splat(0.0)), tail)
    }
}

/// The normative dot product: lane `k % 16` accumulates by fma in ascending `k`, then the fixed tree.
///
/// # Safety
/// The machine has the instruction set of `S`, and `a` and `b` have `n` readable elements.
#[inline(always)]
pub unsafe fn dot16<S: Simd>(a: *const f32, b: *const f32, n: usize) -> f32 {
    // SAFETY: every access stays below `n`.
    unsafe {
        let mut sum = S::splat(0.0);
        let full = n - n % LANES;
        for k in (0..full).step_by(LANES) {
            sum = S::fma(S::load(a.add(k)), S::load(b.add(k)), sum);
        }
        if full < n {
            let rest = n - full;
            let (a, b) = (a.add(full), b.add(full));
            sum = S::fma(S::load_partial(a, rest), S::load_partial(b, rest), sum);
        }
        S::reduce_add(sum)
    }
}
