//! Every instruction set against the plain one, and the elementary functions against f64.

use super::math::{exp, log1p, sigmoid, silu, softplus};
use super::*;
use crate::simd_entry;

/// xorshift64*, for reproducible data.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    /// Any float: also infinities, NaNs, subnormals; half of them of ordinary size.
    fn float(&mut self) -> f32 {
        const SPECIAL: [f32; 8] =
            [0.0, -0.0, 1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-40, 2.5];
        match self.bits() % 8 {
            0 => SPECIAL[(self.bits() % 8) as usize],
            1..=3 => f32::from_bits(self.bits()),
            _ => (self.bits() as f32 / 2f32.powi(31) - 1.0) * 40.0,
        }
    }
}

/// NaNs are equal whatever their payload.
fn canonical(x: f32) -> u32 {
    if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }
}

#[inline(always)]
unsafe fn operations_kernel<S: Simd>(a: &[f32; 256], b: &[f32; 256]) -> Vec<u32> {
    let mut out = Vec::new();
    let mut lanes = [0f32; 16];
    let mut words = [0i32; 16];
    macro_rules! float {
        ($v:expr) => {{
            S::store(lanes.as_mut_ptr(), $v);
            out.extend(lanes.map(canonical));
        }};
    }
    macro_rules! int {
        ($v:expr) => {{
            S::store_i32(words.as_mut_ptr().cast(), $v);
            out.extend(words.map(|w| w as u32));
        }};
    }
    // SAFETY: `simd_entry!` selects the instruction set, and every access is inside the arrays.
    unsafe {
        let x = S::load(a.as_ptr());
        let y = S::load(b.as_ptr());
        let z = S::load(b.as_ptr().add(16));
        for n in 0..=16 {
            float!(S::load_partial(a.as_ptr(), n));
            S::store_partial(lanes.as_mut_ptr(), y, n);
            out.extend(lanes.map(canonical));
            int!(S::load_i32_partial(a.as_ptr().cast(), 4 * n - n / 3));
            S::store_bf16_partial(words.as_mut_ptr().cast(), x, n);
            out.extend(words.map(|w| w as u32));
        }
        float!(S::splat(a[3]));
        float!(S::add(x, y));
        float!(S::sub(x, y));
        float!(S::mul(x, y));
        float!(S::div(x, y));
        float!(S::fma(x, y, z));
        float!(S::neg(x));
        float!(S::abs(x));
        float!(S::min(x, y));
        float!(S::max(x, y));
        float!(S::sqrt(x));
        float!(S::round_ties_even(x));
        float!(S::round_bf16(x));
        for mask in [S::lt(x, y), S::le(x, y), S::eq(x, x)] {
            out.push(S::mask_bits(mask));
            float!(S::select(mask, x, y));
        }
        out.push(canonical(S::reduce_add(x)));
        out.push(canonical(S::reduce_max(x)));
        let mut vs = [x; 16];
        for (j, v) in vs.iter_mut().enumerate() {
            *v = S::load(a.as_ptr().add(16 * j));
        }
        float!(S::reduce16(vs));
        out.extend(vs.map(|v| canonical(S::reduce_add(v))));
        let (i, j) = (S::cast_i32(x), S::cast_i32(y));
        int!(S::splat_i32(-7));
        int!(S::add_i32(i, j));
        int!(S::sub_i32(i, j));
        int!(S::and_i32(i, j));
        int!(S::or_i32(i, j));
        int!(S::shl_i32(i, 5));
        int!(S::shr_i32(i, 23));
        int!(S::shr_u32(i, 23));
        int!(S::to_i32(x));
        int!(S::to_i32(S::splat(2147483648.0)));
        float!(S::from_i32(i));
        float!(S::cast_f32(i));
        out.push(S::reduce_add_i32(i) as u32);
        let bytes = a.as_ptr().cast::<u8>().add(3);
        int!(S::load_i32(bytes));
        int!(S::load_u8(bytes));
        int!(S::load_u4(bytes));
        int!(S::load_u16(bytes));
        float!(S::load_bf16(bytes.cast()));
        float!(S::load_bf16_partial(bytes.cast(), 5));
        S::store_u16(words.as_mut_ptr().cast(), i);
        S::store_i8(words.as_mut_ptr().cast::<i8>().add(33), S::shr_i32(i, 24));
        out.extend(words.map(|w| w as u32));
        let mut rows = [i; 16];
        for (j, row) in rows.iter_mut().enumerate() {
            *row = S::load_i32(b.as_ptr().add(16 * j).cast());
        }
        for column in S::transpose16(rows) {
            int!(column);
        }
        S::prefetch(bytes);
        float!(exp::<S>(x));
        float!(log1p::<S>(S::abs(x)));
        float!(sigmoid::<S>(x));
        float!(silu::<S>(x));
        float!(softplus::<S>(x));
        out.push(canonical(math::dot16::<S>(a.as_ptr().add(1), b.as_ptr(), 253)));
    }
    out
}

simd_entry! {
    fn operations(a: &[f32; 256], b: &[f32; 256]) -> Vec<u32> = operations_kernel;
}

#[test]
fn every_instruction_set_agrees_with_the_plain_one() {
    let plain: Isa = "portable".parse().unwrap();
    let mut random = Random(7);
    for _ in 0..300 {
        let a: [f32; 256] = std::array::from_fn(|_| random.float());
        let b: [f32; 256] = std::array::from_fn(|_| random.float());
        let expected = operations(plain, &a, &b);
        for isa in Isa::available() {
            assert_eq!(operations(isa, &a, &b), expected, "{isa}");
        }
    }
}

#[test]
fn group_dots_are_exact() {
    /// Two planes of 64 codes for each of twelve rows.
    type Codes = [[[i8; 64]; 2]; 12];
    #[inline(always)]
    unsafe fn kernel<S: Simd>(panel: &[u8; 512], x: &Codes) -> Vec<[i32; 16]> {
        // SAFETY: the caller has the instruction set.
        unsafe { [planes::<S, 1>(panel, x), planes::<S, 2>(panel, x)].concat() }
    }
    #[inline(always)]
    unsafe fn planes<S: Simd, const P: usize>(panel: &[u8; 512], x: &Codes) -> Vec<[i32; 16]> {
        let mut out = Vec::new();
        macro_rules! rows {
            ($($rows:literal)*) => {$(
                let pointers: [*const i8; $rows] = std::array::from_fn(|r| x[r].as_ptr().cast());
                // SAFETY: the panel and the rows have the sizes that `group_dots` asks for.
                for dots in unsafe { S::group_dots::<P, $rows>(panel.as_ptr(), &pointers) } {
                    let mut lanes = [0; 16];
                    // SAFETY: sixteen words.
                    unsafe { S::store_i32(lanes.as_mut_ptr().cast(), dots) };
                    out.push(lanes);
                }
            )*};
        }
        rows!(1 2 3 4 5 6 7 8 9 10 11 12);
        out
    }
    simd_entry! {
        fn all_dots(panel: &[u8; 512], x: &Codes) -> Vec<[i32; 16]> = kernel;
    }
    let mut random = Random(3);
    for round in 0..20 {
        let mut panel = [0xffu8; 512];
        let mut x: Codes = [[[-127; 64], [-128; 64]]; 12];
        if round > 0 {
            panel.fill_with(|| random.bits() as u8);
            x.as_flattened_mut().as_flattened_mut().fill_with(|| (random.bits() % 255) as i8);
        }
        let dot = |lane: usize, x: &[i8; 64]| -> i32 {
            let code = |k: usize| i32::from(panel[64 * (k / 4) + 4 * lane + k % 4]);
            let products =
                |k| (code(k) & 15) * i32::from(x[k]) + (code(k) >> 4) * i32::from(x[32 + k]);
            (0..32).map(products).sum()
        };
        let joined = |planes: usize, r: usize, lane: usize| {
            x[r][..planes].iter().fold(0, |sum, plane| 128 * sum + dot(lane, plane))
        };
        let expected: Vec<[i32; 16]> = [1, 2]
            .into_iter()
            .flat_map(|planes| (1..=12).map(move |rows| (planes, rows)))
            .flat_map(|(planes, rows)| (0..rows).map(move |r| (planes, r)))
            .map(|(planes, r)| std::array::from_fn(|lane| joined(planes, r, lane)))
            .collect();
        for isa in Isa::available() {
            assert_eq!(all_dots(isa, &panel, &x), expected, "{isa}");
        }
    }
}

/// Largest error in units of the last place of the exact result.
fn worst_ulp(
    inputs: impl Iterator<Item = f32>,
    f: unsafe fn(<Portable as Simd>::F32) -> <Portable as Simd>::F32,
    exact: impl Fn(f64) -> f64,
) -> f64 {
    inputs.fold(0.0, |worst, x| {
        let expected = exact(f64::from(x));
        let mut lanes = [0.0; 16];
        // SAFETY: the plain implementation runs everywhere; sixteen lanes.
        unsafe { Portable::store(lanes.as_mut_ptr(), f(Portable::splat(x))) };
        let ulp = (2f64).powi((expected.abs().log2().floor() as i32).max(-126) - 23);
        let error = (f64::from(lanes[0]) - expected).abs() / ulp;
        assert!(error < 1e6, "{x} gives {} and not {expected}", lanes[0]);
        worst.max(error)
    })
}

#[test]
fn elementary_functions_are_accurate() {
    let wide = || (-200_000..200_000).map(|i| i as f32 * 4.3e-4);
    let positive = || (0..400_000).map(|i| 10f32.powf(i as f32 * 1e-4 - 30.0));
    let errors = [
        ("exp", worst_ulp(wide(), exp::<Portable>, f64::exp), 2.0),
        ("log1p", worst_ulp(positive(), log1p::<Portable>, f64::ln_1p), 4.0),
        (
            "softplus",
            worst_ulp(wide(), softplus::<Portable>, |x| x.max(0.0) + (-x.abs()).exp().ln_1p()),
            4.0,
        ),
        ("sigmoid", worst_ulp(wide(), sigmoid::<Portable>, |x| 1.0 / (1.0 + (-x).exp())), 4.0),
    ];
    for (name, error, limit) in errors {
        println!("{name}: {error:.2} ulp");
        assert!(error <= limit, "{name}: {error} ulp");
    }
}

#[test]
fn elementary_functions_at_the_edges() {
    let at = |f: unsafe fn(<Portable as Simd>::F32) -> <Portable as Simd>::F32, x: f32| {
        let mut lanes = [0.0; 16];
        // SAFETY: the plain implementation runs everywhere; sixteen lanes.
        unsafe { Portable::store(lanes.as_mut_ptr(), f(Portable::splat(x))) };
        lanes[0]
    };
    let infinity = f32::INFINITY;
    for f in [
        exp::<Portable>,
        log1p::<Portable>,
        sigmoid::<Portable>,
        silu::<Portable>,
        softplus::<Portable>,
    ] {
        assert!(at(f, f32::NAN).is_nan());
    }
    assert_eq!(at(exp::<Portable>, 0.0), 1.0);
    assert_eq!(at(exp::<Portable>, infinity), infinity);
    assert_eq!(at(exp::<Portable>, 89.0), infinity);
    assert_eq!(at(exp::<Portable>, -infinity), 0.0);
    assert_eq!(at(exp::<Portable>, -105.0), 0.0);
    assert_eq!(at(log1p::<Portable>, 0.0), 0.0);
    assert_eq!(at(log1p::<Portable>, infinity), infinity);
    assert_eq!(at(sigmoid::<Portable>, infinity), 1.0);
    assert_eq!(at(sigmoid::<Portable>, -infinity), 0.0);
    assert_eq!(at(softplus::<Portable>, infinity), infinity);
    assert_eq!(at(softplus::<Portable>, -infinity), 0.0);
}

#[test]
fn bf16_rounds_to_nearest_even() {
    let mut random = Random(11);
    for _ in 0..2000 {
        let x: [f32; 16] = std::array::from_fn(|_| random.float());
        let mut bits = [0u16; 16];
        // SAFETY: the plain implementation runs everywhere; sixteen lanes.
        unsafe { Portable::store_bf16(bits.as_mut_ptr(), Portable::load(x.as_ptr())) };
        for (x, bits) in x.into_iter().zip(bits) {
            let expected = half::bf16::from_f32(x);
            assert!(
                bits == expected.to_bits() || x.is_nan() && half::bf16::from_bits(bits).is_nan(),
                "{x}"
            );
        }
    }
}

#[test]
fn names_are_parsed() {
    for isa in Isa::available() {
        assert_eq!(isa.to_string().parse(), Ok(isa));
    }
    assert!("mmx".parse::<Isa>().is_err());
    assert_eq!(Isa::detect(), Isa::available()[0]);
}
