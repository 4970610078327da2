//! The arena that holds the values between operations.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::marker::PhantomData;
use std::ptr::NonNull;

use lily_device::ScratchLayout;
use lily_device::arena::ALIGNMENT;
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
    pub fn new(layout: ScratchLayout) -> Self {
        let bytes = (layout.bytes() as usize).max(ALIGNMENT as usize);
        let size = Layout::from_size_align(bytes, ALIGNMENT as usize).expect("a valid layout");
        // SAFETY: the size is not zero.
        let base = unsafe { alloc_zeroed(size) };
        let Some(base) = NonNull::new(base) else { handle_alloc_error(size) };
        Self { base, size, layout, _owned: PhantomData }
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

impl Drop for Values {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.size) }
    }
}
