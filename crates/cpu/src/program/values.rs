//! The arena that holds the values between operations.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::ptr::NonNull;

use bytemuck::Zeroable;
use lily_device::arena::ALIGNMENT;
use lily_device::{PrepareError, ScratchLayout};
use lily_ops::{Plan, ValueId};

/// Rows of a step: tokens, and rows of logits in the current tile.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StepRows {
    pub tokens: usize,
    pub outputs: usize,
}

/// The values of a plan in one block of memory, at the offsets of a [`ScratchLayout`].
pub(super) struct Values {
    base: NonNull<u8>,
    size: Layout,
    layout: ScratchLayout,
    /// What the memory is used as.
    _owned: PhantomData<Vec<f32>>,
}

// SAFETY: the block is owned by this value alone and holds plain numbers.
unsafe impl Send for Values {}

impl Values {
    pub fn new(layout: ScratchLayout) -> Result<Self, PrepareError> {
        let bytes = layout.bytes().max(ALIGNMENT);
        let size = usize::try_from(bytes).ok();
        let size = size.and_then(|n| Layout::from_size_align(n, ALIGNMENT as usize).ok());
        let size = size.ok_or_else(|| out_of_memory("scratch", bytes))?;
        // SAFETY: the size is not zero.
        let base = unsafe { alloc_zeroed(size) };
        let base = NonNull::new(base).ok_or_else(|| out_of_memory("scratch", bytes))?;
        Ok(Self { base, size, layout, _owned: PhantomData })
    }

    pub fn bytes(&self) -> u64 {
        self.size.size() as u64
    }

    /// Whether the result of an operation lies in the place of one of its operands.
    pub fn share_place(&self, a: ValueId, b: ValueId) -> bool {
        self.layout.offset(a) == self.layout.offset(b)
    }

    fn place<T>(&self, plan: &Plan, id: ValueId, rows: StepRows) -> (*mut T, usize) {
        let value = plan.value(id);
        assert_eq!(value.element.size(), size_of::<T>());
        let len = value.rows.count(rows.tokens, rows.outputs) * value.width;
        let at = self.layout.offset(id) as usize;
        assert!(at + len * size_of::<T>() <= self.size.size(), "value {} is out of bounds", id.0);
        // SAFETY: the value lies inside the block, as was just checked.
        (unsafe { self.base.as_ptr().add(at) }.cast(), len)
    }

    /// A value to read.
    ///
    /// # Safety
    /// The value was written in this step, and no reference from [`write`](Self::write) to a value that
    /// shares its place is alive.
    pub unsafe fn read<T>(&self, plan: &Plan, id: ValueId, rows: StepRows) -> &[T] {
        let (at, len) = self.place(plan, id, rows);
        // SAFETY: in bounds, initialized (zeroed at first), and not written meanwhile.
        unsafe { std::slice::from_raw_parts(at, len) }
    }

    /// A value to write.
    ///
    /// # Safety
    /// No other reference to this value, or to one that shares its place, is alive. The layout gives
    /// values that are alive together places of their own, so distinct operands of an operation are
    /// distinct memory but for the one that it overwrites.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn write<T>(&self, plan: &Plan, id: ValueId, rows: StepRows) -> &mut [T] {
        let (at, len) = self.place(plan, id, rows);
        // SAFETY: in bounds, initialized, and the caller has the only reference.
        unsafe { std::slice::from_raw_parts_mut(at, len) }
    }
}

/// `len` zeroed elements. Zeroed memory comes from the system untouched: it costs nothing until it is used.
pub(super) fn zeroed<T: Zeroable>(what: &str, len: usize) -> Result<Vec<T>, PrepareError> {
    let fail = || out_of_memory(what, len as u64 * size_of::<T>() as u64);
    let layout = Layout::array::<T>(len).map_err(|_| fail())?;
    if layout.size() == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: the size is not zero.
    let base = unsafe { alloc_zeroed(layout) }.cast::<T>();
    if base.is_null() {
        return Err(fail());
    }
    // SAFETY: allocated by the global allocator with the layout of `len` elements, and zero is a value of `T`.
    Ok(unsafe { Vec::from_raw_parts(base, len, len) })
}

fn out_of_memory(what: &str, bytes: u64) -> PrepareError {
    PrepareError::OutOfMemory(format!(
        "the system refuses {bytes} bytes for the {what}; shorten the context or the chunk, or raise the limit (ulimit)"
    ))
}

impl Drop for Values {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.size) }
    }
}
