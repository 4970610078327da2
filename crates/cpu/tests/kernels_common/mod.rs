//! What the kernel tests share.
#![allow(dead_code)]

use lily_cpu::pool::Pool;
use lily_cpu::simd::{Isa, Portable, Simd, math};

/// Reproducible values in [-1, 1).
pub fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..8).for_each(|_| {
        next();
    });
    (0..n).map(|_| next()).collect()
}

/// bf16 bits, rounded to nearest even.
pub fn bf16_bits(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// Rounded to bf16.
pub fn bf16(x: f32) -> f32 {
    f32::from_bits(u32::from(bf16_bits(x)) << 16)
}

/// Runs on every instruction set with 1 to 3 threads, and asserts that the results are equal.
pub fn everywhere<T: PartialBits>(run: impl Fn(Isa, &Pool) -> Vec<T>) -> Vec<T> {
    let mut first: Option<Vec<T>> = None;
    for threads in 1..=3 {
        let pool = Pool::new(threads);
        for isa in Isa::available() {
            let got = run(isa, &pool);
            if let Some(first) = &first {
                for (i, (a, b)) in first.iter().zip(&got).enumerate() {
                    assert!(a.same(b), "{isa}, {threads} threads, element {i}: {a:?} {b:?}");
                }
            }
            first.get_or_insert(got);
        }
    }
    first.unwrap()
}

/// Equality bit by bit.
pub trait PartialBits: std::fmt::Debug {
    fn same(&self, other: &Self) -> bool;
}

impl PartialBits for f32 {
    fn same(&self, other: &Self) -> bool {
        self.to_bits() == other.to_bits() || self.is_nan() && other.is_nan()
    }
}

macro_rules! integer_bits {
    ($($t:ty),*) => {$(
        impl PartialBits for $t {
            fn same(&self, other: &Self) -> bool {
                self == other
            }
        }
    )*};
}
integer_bits!(u16, u32, u64);

/// Asserts equality bit by bit.
pub fn assert_bits<T: PartialBits>(got: &[T], want: &[T]) {
    assert_eq!(got.len(), want.len());
    for (i, (a, b)) in got.iter().zip(want).enumerate() {
        assert!(a.same(b), "element {i}: {a:?}, wanted {b:?}");
    }
}

/// Asserts that the largest difference is within `tolerance` of the largest wanted magnitude (at least 1e-3).
pub fn assert_close(got: &[f32], want: impl Iterator<Item = f64>, tolerance: f64) {
    let want: Vec<f64> = want.collect();
    assert_eq!(got.len(), want.len());
    let scale = want.iter().fold(1e-3f64, |m, w| m.max(w.abs()));
    for (i, (&a, &b)) in got.iter().zip(&want).enumerate() {
        let error = (f64::from(a) - b).abs();
        assert!(error <= tolerance * scale, "element {i}: {a}, wanted {b}, error {error:e}");
    }
}

/// The kernels' exponential.
pub fn exp(x: f32) -> f32 {
    let mut lanes = [x; 16];
    // SAFETY: every machine runs `Portable`; 16 lanes are there.
    unsafe {
        let y = math::exp::<Portable>(Portable::load(lanes.as_ptr()));
        Portable::store(lanes.as_mut_ptr(), y);
    }
    lanes[0]
}

/// Sum of lanes in the normative order: i and i + 8, then + 4, + 2, + 1.
pub fn tree(mut lanes: [f32; 16]) -> f32 {
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    lanes[0]
}

/// Dot product in the normative order: lane `k % 16`, ascending `k`, then the tree.
pub fn dot16(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    for (k, (a, b)) in a.iter().zip(b).enumerate() {
        lanes[k % 16] = a.mul_add(*b, lanes[k % 16]);
    }
    tree(lanes)
}
