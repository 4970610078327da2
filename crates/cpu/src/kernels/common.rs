//! What the kernels share: partial vectors, the fixed-order dot product, splitting rows into tasks,
//! handing disjoint parts of a buffer to tasks, and the stored element types.

use std::marker::PhantomData;
use std::ops::Range;

use crate::simd::Simd;
use crate::simd::math::dot16;

/// f32 elements that are worth a task of their own.
pub(crate) const TASK_ELEMS: usize = 8192;

/// Rows split into tasks of equal size.
#[derive(Clone, Copy)]
pub(crate) struct Blocks {
    rows: usize,
    per_task: usize,
    /// Tasks.
    pub count: usize,
}

impl Blocks {
    /// Rows of a task.
    pub fn range(&self, task: usize) -> Range<usize> {
        task * self.per_task..((task + 1) * self.per_task).min(self.rows)
    }
}

/// Splits `rows` rows of about `cost` elements of work each into tasks.
pub(crate) fn blocks(rows: usize, cost: usize) -> Blocks {
    let per_task = (TASK_ELEMS / cost.max(1)).max(1);
    Blocks { rows, per_task, count: rows.div_ceil(per_task) }
}

/// A mutable buffer whose disjoint parts are handed to concurrent tasks.
pub(crate) struct SharedMut<'a, T> {
    ptr: *mut T,
    len: usize,
    _buffer: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `unsafe` methods whose callers keep the parts disjoint.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}
// SAFETY: it stands for a `&mut [T]`.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    /// Takes the buffer for the lifetime of the value.
    pub fn new(buffer: &'a mut [T]) -> Self {
        SharedMut { ptr: buffer.as_mut_ptr(), len: buffer.len(), _buffer: PhantomData }
    }

    /// `len` elements from `at`.
    ///
    /// # Safety
    /// No other live reference or concurrent access overlaps the part.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice(&self, at: usize, len: usize) -> &mut [T] {
        assert!(len <= self.len && at <= self.len - len);
        // SAFETY: in bounds; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(at), len) }
    }

    /// Pointer to element `at`.
    ///
    /// # Safety
    /// Accesses through it stay in bounds and do not race with others.
    pub unsafe fn ptr(&self, at: usize) -> *mut T {
        assert!(at <= self.len);
        // SAFETY: in bounds or one past the end.
        unsafe { self.ptr.add(at) }
    }
}

/// Up to 16 elements, padded with zeros.
///
/// # Safety
/// The CPU has the features of `S`.
#[inline(always)]
pub(crate) unsafe fn load_n<S: Simd>(x: &[f32]) -> S::F32 {
    // SAFETY: the elements are those of `x`.
    unsafe {
        if x.len() >= 16 { S::load(x.as_ptr()) } else { S::load_partial(x.as_ptr(), x.len()) }
    }
}

/// Stores the first `out.len()` lanes, at most 16.
///
/// # Safety
/// The CPU has the features of `S`.
#[inline(always)]
pub(crate) unsafe fn store_n<S: Simd>(out: &mut [f32], v: S::F32) {
    // SAFETY: the elements are those of `out`.
    unsafe {
        if out.len() >= 16 {
            S::store(out.as_mut_ptr(), v);
        } else {
            S::store_partial(out.as_mut_ptr(), v, out.len());
        }
    }
}

/// `1 / sqrt(mean(x^2) + eps)` of one row.
///
/// # Safety
/// `x` is valid for `width` reads, and the CPU has the features of `S`.
#[inline(always)]
pub(crate) unsafe fn inverse_rms<S: Simd>(x: *const f32, width: usize, eps: f32) -> f32 {
    // SAFETY: passed on from the caller.
    let mean = unsafe { dot16::<S>(x, x, width) } / width as f32;
    1.0 / (mean + eps).sqrt()
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for u16 {}
}

/// Element type of KV pages and convolution states: f32, or u16 for bf16. Sealed, as kernels cast to the
/// type that `BF16` names.
pub trait StoredElem: sealed::Sealed + Copy + Default + Send + Sync + 'static {
    /// Whether the type is bf16; f32 otherwise.
    const BF16: bool;

    /// Loads 16 elements as f32.
    ///
    /// # Safety
    /// `p` is valid for 16 reads, and the CPU has the features of `S`.
    unsafe fn load<S: Simd>(p: *const Self) -> S::F32;

    /// Rounds and stores 16 elements.
    ///
    /// # Safety
    /// `p` is valid for 16 writes, and the CPU has the features of `S`.
    unsafe fn store<S: Simd>(p: *mut Self, v: S::F32);

    /// Rounds each lane to the element type.
    ///
    /// # Safety
    /// The CPU has the features of `S`.
    unsafe fn round<S: Simd>(v: S::F32) -> S::F32;
}

impl StoredElem for f32 {
    const BF16: bool = false;

    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const f32) -> S::F32 {
        // SAFETY: passed on from the caller.
        unsafe { S::load(p) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut f32, v: S::F32) {
        // SAFETY: passed on from the caller.
        unsafe { S::store(p, v) }
    }

    #[inline(always)]
    unsafe fn round<S: Simd>(v: S::F32) -> S::F32 {
        v
    }
}

/// bf16, as its bits.
impl StoredElem for u16 {
    const BF16: bool = true;

    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u16) -> S::F32 {
        // SAFETY: passed on from the caller.
        unsafe { S::load_bf16(p) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut u16, v: S::F32) {
        // SAFETY: passed on from the caller.
        unsafe { S::store_bf16(p, v) }
    }

    #[inline(always)]
    unsafe fn round<S: Simd>(v: S::F32) -> S::F32 {
        // SAFETY: passed on from the caller.
        unsafe { S::round_bf16(v) }
    }
}
