//! Sixteen-lane SIMD over the instruction sets that Lily runs on.
//!
//! Every operation of [`Simd`] is exact IEEE (or exact integer) arithmetic with one defined result,
//! so a kernel written once over `S: Simd` yields the same bits on every implementation. Kernels are
//! `#[inline(always)] unsafe fn kernel<S: Simd>(..)`; [`simd_entry!`](crate::simd_entry) wraps one in
//! a function that is compiled once for each instruction set and selects by [`Isa`].

use std::fmt;
use std::str::FromStr;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
#[cfg(target_arch = "aarch64")]
pub use neon::Neon;
pub use portable::Portable;

#[cfg(test)]
mod tests;

/// Number of lanes of every vector type.
pub const LANES: usize = 16;

/// The instruction sets that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IsaKind {
    /// AVX-512 F, BW, VL, DQ and VNNI.
    Avx512Vnni,
    /// AVX2 and FMA.
    Avx2,
    /// Plain Rust, on every machine.
    Portable,
    /// AArch64 Advanced SIMD with the dot-product instructions (every Apple M, Armv8.2 and later).
    NeonDotprod,
    /// AArch64 Advanced SIMD.
    Neon,
}

impl IsaKind {
    const ALL: [Self; 5] =
        [Self::Avx512Vnni, Self::Avx2, Self::NeonDotprod, Self::Neon, Self::Portable];

    fn name(self) -> &'static str {
        match self {
            Self::Avx512Vnni => "avx512vnni",
            Self::Avx2 => "avx2",
            Self::Portable => "portable",
            Self::NeonDotprod => "neon-dotprod",
            Self::Neon => "neon",
        }
    }

    fn is_available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "aarch64")]
            Self::NeonDotprod => std::arch::is_aarch64_feature_detected!("dotprod"),
            Self::Neon => cfg!(target_arch = "aarch64"),
            Self::Portable => true,
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }
}

/// An instruction set that this machine is known to have: a value is proof of that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(IsaKind);

impl Isa {
    /// The best instruction set of this machine.
    pub fn detect() -> Self {
        Self::available()[0]
    }

    /// All instruction sets of this machine, best first.
    pub fn available() -> Vec<Self> {
        let all = IsaKind::ALL.into_iter();
        all.filter(|kind| kind.is_available()).map(Self).collect()
    }

    /// Which instruction set this is.
    pub fn kind(self) -> IsaKind {
        self.0
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name())
    }
}

impl FromStr for Isa {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let kind = IsaKind::ALL.into_iter().find(|kind| kind.name() == name);
        let kind = kind.ok_or_else(|| format!("unknown instruction set {name:?}"))?;
        if kind.is_available() {
            Ok(Self(kind))
        } else {
            Err(format!("this machine does not have {name}"))
        }
    }
}

/// Sixteen f32 lanes, sixteen i32 lanes and a mask over them.
///
/// Every method is `unsafe` for one common reason: the machine must have the instruction set of the
/// implementor (only [`simd_entry!`](crate::simd_entry) and tests name one). Methods with pointers
/// also need memory that is valid for the access; no alignment is ever needed.
#[allow(clippy::missing_safety_doc)]
pub trait Simd: Copy + Send + Sync + 'static {
    /// Sixteen f32.
    type F32: Copy;
    /// Sixteen i32.
    type I32: Copy;
    /// Sixteen booleans.
    type Mask: Copy;

    /// Whether sixteen `F32` accumulators fit in registers.
    const WIDE: bool;
    /// Activation rows that [`group_dots`](Self::group_dots) handles best at once, at most 12.
    const ROW_TILE: usize;

    /// All lanes `x`.
    unsafe fn splat(x: f32) -> Self::F32;
    /// Sixteen f32 from memory.
    unsafe fn load(src: *const f32) -> Self::F32;
    /// Sixteen f32 to memory.
    unsafe fn store(dst: *mut f32, v: Self::F32);
    /// The first `n <= 16` lanes from memory, the others 0.
    unsafe fn load_partial(src: *const f32, n: usize) -> Self::F32;
    /// The first `n <= 16` lanes to memory.
    unsafe fn store_partial(dst: *mut f32, v: Self::F32, n: usize);

    /// `a + b`.
    unsafe fn add(a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a - b`.
    unsafe fn sub(a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b`.
    unsafe fn mul(a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a / b`, correctly rounded.
    unsafe fn div(a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b + c` with one rounding.
    unsafe fn fma(a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// Sign bit flipped.
    unsafe fn neg(a: Self::F32) -> Self::F32;
    /// Sign bit cleared.
    unsafe fn abs(a: Self::F32) -> Self::F32;
    /// `if a < b { a } else { b }`: with a NaN, the result is `b`.
    unsafe fn min(a: Self::F32, b: Self::F32) -> Self::F32;
    /// `if a > b { a } else { b }`: with a NaN, the result is `b`.
    unsafe fn max(a: Self::F32, b: Self::F32) -> Self::F32;
    /// Square root, correctly rounded.
    unsafe fn sqrt(a: Self::F32) -> Self::F32;
    /// Nearest integer, ties to even.
    unsafe fn round_ties_even(a: Self::F32) -> Self::F32;

    /// `a < b`, false with a NaN.
    unsafe fn lt(a: Self::F32, b: Self::F32) -> Self::Mask;
    /// `a <= b`, false with a NaN.
    unsafe fn le(a: Self::F32, b: Self::F32) -> Self::Mask;
    /// `a == b`, false with a NaN.
    unsafe fn eq(a: Self::F32, b: Self::F32) -> Self::Mask;
    /// `if mask { a } else { b }`, bit for bit.
    unsafe fn select(mask: Self::Mask, a: Self::F32, b: Self::F32) -> Self::F32;
    /// Bit `i` is lane `i`.
    unsafe fn mask_bits(mask: Self::Mask) -> u32;

    /// Sum by the fixed tree: lane i + lane i+8, then +4, +2, +1.
    unsafe fn reduce_add(v: Self::F32) -> f32;
    /// [`max`](Self::max) by the same tree.
    unsafe fn reduce_max(v: Self::F32) -> f32;
    /// Lane `j` is `reduce_add(vs[j])`, with identical bits.
    unsafe fn reduce16(vs: [Self::F32; 16]) -> Self::F32;

    /// All lanes `x`.
    unsafe fn splat_i32(x: i32) -> Self::I32;
    /// `a + b`, wrapping.
    unsafe fn add_i32(a: Self::I32, b: Self::I32) -> Self::I32;
    /// `a - b`, wrapping.
    unsafe fn sub_i32(a: Self::I32, b: Self::I32) -> Self::I32;
    /// `a & b`.
    unsafe fn and_i32(a: Self::I32, b: Self::I32) -> Self::I32;
    /// `a | b`.
    unsafe fn or_i32(a: Self::I32, b: Self::I32) -> Self::I32;
    /// Left shift by `n < 32`.
    unsafe fn shl_i32(a: Self::I32, n: u32) -> Self::I32;
    /// Arithmetic right shift by `n < 32`.
    unsafe fn shr_i32(a: Self::I32, n: u32) -> Self::I32;
    /// Logical right shift by `n < 32`.
    unsafe fn shr_u32(a: Self::I32, n: u32) -> Self::I32;
    /// Wrapping sum of all lanes.
    unsafe fn reduce_add_i32(v: Self::I32) -> i32;
    /// Nearest integer, ties to even; `i32::MIN` for a NaN or a value out of range.
    unsafe fn to_i32(a: Self::F32) -> Self::I32;
    /// Conversion with rounding to nearest even.
    unsafe fn from_i32(a: Self::I32) -> Self::F32;
    /// The bits of the floats.
    unsafe fn cast_i32(a: Self::F32) -> Self::I32;
    /// The floats with these bits.
    unsafe fn cast_f32(a: Self::I32) -> Self::F32;

    /// Sixteen little-endian 32-bit words.
    unsafe fn load_i32(src: *const u8) -> Self::I32;
    /// The first `bytes <= 64` bytes, the others 0.
    unsafe fn load_i32_partial(src: *const u8, bytes: usize) -> Self::I32;
    /// Sixteen 32-bit words.
    unsafe fn store_i32(dst: *mut u8, v: Self::I32);
    /// Sixteen bytes, zero-extended.
    unsafe fn load_u8(src: *const u8) -> Self::I32;
    /// Eight bytes as sixteen unsigned nibbles, the low nibble of a byte first.
    unsafe fn load_u4(src: *const u8) -> Self::I32;
    /// Sixteen little-endian 16-bit words, zero-extended.
    unsafe fn load_u16(src: *const u8) -> Self::I32;
    /// The low byte of each lane; every lane must fit an i8.
    unsafe fn store_i8(dst: *mut i8, v: Self::I32);
    /// The low 16 bits of each lane.
    unsafe fn store_u16(dst: *mut u16, v: Self::I32);

    /// Lane `i` of result `j` is lane `j` of `rows[i]`.
    unsafe fn transpose16(rows: [Self::I32; 16]) -> [Self::I32; 16];

    /// Exact dot products of one 64-column group: 16 outputs by `R` activation rows.
    ///
    /// `panel` is `[8 words][16 outputs][4 bytes]` of packed nibbles (512 bytes); `x[r]` points at
    /// `P` planes of 64 codes, each the 32 that belong to low nibbles, then the 32 that belong to
    /// high nibbles. A code of a plane counts 128 times one of the next plane.
    unsafe fn group_dots<const P: usize, const R: usize>(
        panel: *const u8,
        x: &[*const i8; R],
    ) -> [Self::I32; R];

    /// Hint to bring the cache line at `src` into the second-level cache; any address is allowed.
    unsafe fn prefetch(src: *const u8);

    /// Sixteen bf16, widened.
    #[inline(always)]
    unsafe fn load_bf16(src: *const u16) -> Self::F32 {
        // SAFETY: same contract as the method itself.
        unsafe { Self::cast_f32(Self::shl_i32(Self::load_u16(src.cast()), 16)) }
    }

    /// The first `n <= 16` bf16, widened, the other lanes 0.
    #[inline(always)]
    unsafe fn load_bf16_partial(src: *const u16, n: usize) -> Self::F32 {
        let mut lanes = [0u16; LANES];
        // SAFETY: the caller vouches for `n <= 16` readable elements.
        unsafe {
            std::ptr::copy_nonoverlapping(src.cast::<u8>(), lanes.as_mut_ptr().cast(), 2 * n);
            Self::load_bf16(lanes.as_ptr())
        }
    }

    /// Rounds to bf16 (nearest even, a NaN stays a NaN); the bits are in the low half of each lane.
    #[inline(always)]
    unsafe fn to_bf16(v: Self::F32) -> Self::I32 {
        // SAFETY: register arithmetic; the caller has the instruction set.
        unsafe {
            let bits = Self::cast_i32(v);
            let high = Self::shr_u32(bits, 16);
            let odd = Self::and_i32(high, Self::splat_i32(1));
            let bias = Self::add_i32(odd, Self::splat_i32(0x7fff));
            let rounded = Self::shr_u32(Self::add_i32(bits, bias), 16);
            let quiet = Self::or_i32(high, Self::splat_i32(0x40));
            let number = Self::eq(v, v);
            let chosen = Self::select(number, Self::cast_f32(rounded), Self::cast_f32(quiet));
            Self::cast_i32(chosen)
        }
    }

    /// Rounds to bf16 and widens again.
    #[inline(always)]
    unsafe fn round_bf16(v: Self::F32) -> Self::F32 {
        // SAFETY: register arithmetic; the caller has the instruction set.
        unsafe { Self::cast_f32(Self::shl_i32(Self::to_bf16(v), 16)) }
    }

    /// Sixteen bf16 to memory, rounded to nearest even.
    #[inline(always)]
    unsafe fn store_bf16(dst: *mut u16, v: Self::F32) {
        // SAFETY: same contract as the method itself.
        unsafe { Self::store_u16(dst, Self::to_bf16(v)) }
    }

    /// The first `n <= 16` lanes as bf16 to memory.
    #[inline(always)]
    unsafe fn store_bf16_partial(dst: *mut u16, v: Self::F32, n: usize) {
        let mut lanes = [0u16; LANES];
        // SAFETY: the caller vouches for `n <= 16` writable elements.
        unsafe {
            Self::store_bf16(lanes.as_mut_ptr(), v);
            std::ptr::copy_nonoverlapping(lanes.as_ptr().cast::<u8>(), dst.cast(), 2 * n);
        }
    }
}

/// Defines a function that runs a generic kernel with the instruction set that is asked for.
///
/// ```ignore
/// simd_entry! {
///     /// Doubles every element.
///     pub fn double(x: &mut [f32]) = double_kernel;
/// }
/// // defines: pub fn double(isa: Isa, x: &mut [f32])
/// ```
///
/// `double_kernel` is `#[inline(always)] unsafe fn double_kernel<S: Simd>(x: &mut [f32])`. With
/// `fn`, the kernel's only safety condition must be the instruction set; with `unsafe fn`, its
/// other conditions become those of the generated function.
#[macro_export]
macro_rules! simd_entry {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $kernel:ident;) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name(isa: $crate::simd::Isa, $($arg: $ty),*) $(-> $ret)? {
            $crate::simd_entry!(@variants ($($arg: $ty),*) ($($ret)?) $kernel);
            // SAFETY: an `Isa` proves that this machine has the instruction set, and the kernel has
            // no other safety condition.
            unsafe { $crate::simd_entry!(@select isa, $($arg),*) }
        }
    };
    ($(#[$meta:meta])* $vis:vis unsafe fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $kernel:ident;) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis unsafe fn $name(isa: $crate::simd::Isa, $($arg: $ty),*) $(-> $ret)? {
            $crate::simd_entry!(@variants ($($arg: $ty),*) ($($ret)?) $kernel);
            // SAFETY: an `Isa` proves that this machine has the instruction set; the caller vouches
            // for the other conditions of the kernel.
            unsafe { $crate::simd_entry!(@select isa, $($arg),*) }
        }
    };
    (@variants ($($arg:ident: $ty:ty),*) ($($ret:ty)?) $kernel:ident) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma")]
        #[allow(clippy::too_many_arguments)]
        unsafe fn avx512($($arg: $ty),*) $(-> $ret)? {
            // SAFETY: the features are enabled here; the rest is passed on to the caller.
            unsafe { $kernel::<$crate::simd::Avx512>($($arg),*) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        #[allow(clippy::too_many_arguments)]
        unsafe fn avx2($($arg: $ty),*) $(-> $ret)? {
            // SAFETY: the features are enabled here; the rest is passed on to the caller.
            unsafe { $kernel::<$crate::simd::Avx2>($($arg),*) }
        }
        #[cfg(target_arch = "aarch64")]
        #[target_feature(enable = "neon,dotprod")]
        #[allow(clippy::too_many_arguments)]
        unsafe fn neon_dotprod($($arg: $ty),*) $(-> $ret)? {
            // SAFETY: the features are enabled here; the rest is passed on to the caller.
            unsafe { $kernel::<$crate::simd::Neon<true>>($($arg),*) }
        }
        #[cfg(target_arch = "aarch64")]
        #[target_feature(enable = "neon")]
        #[allow(clippy::too_many_arguments)]
        unsafe fn neon($($arg: $ty),*) $(-> $ret)? {
            // SAFETY: the feature is enabled here; the rest is passed on to the caller.
            unsafe { $kernel::<$crate::simd::Neon<false>>($($arg),*) }
        }
        #[allow(clippy::too_many_arguments)]
        unsafe fn portable($($arg: $ty),*) $(-> $ret)? {
            // SAFETY: plain Rust; the rest is passed on to the caller.
            unsafe { $kernel::<$crate::simd::Portable>($($arg),*) }
        }
    };
    (@select $isa:ident, $($arg:ident),*) => {
        match $isa.kind() {
            #[cfg(target_arch = "x86_64")]
            $crate::simd::IsaKind::Avx512Vnni => avx512($($arg),*),
            #[cfg(target_arch = "x86_64")]
            $crate::simd::IsaKind::Avx2 => avx2($($arg),*),
            #[cfg(target_arch = "aarch64")]
            $crate::simd::IsaKind::NeonDotprod => neon_dotprod($($arg),*),
            #[cfg(target_arch = "aarch64")]
            $crate::simd::IsaKind::Neon => neon($($arg),*),
            _ => portable($($arg),*),
        }
    };
}

/// Wraps the body of each method of a [`Simd`] implementation in one unsafe block.
macro_rules! simd_methods {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? { $($body:tt)* })*) => {
        $(
            #[inline(always)]
            #[allow(unused_unsafe)]
            unsafe fn $name($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: the caller guarantees the instruction set, and valid memory behind pointers.
                unsafe { $($body)* }
            }
        )*
    };
}
pub(crate) use simd_methods;
