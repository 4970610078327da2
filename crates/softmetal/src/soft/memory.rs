//! Memory of buffers.

use std::alloc::Layout;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::rules::Rule;
use super::state::State;

/// Bytes of a page.
pub(crate) const PAGE: usize = 16384;

/// Bytes behind each buffer that nothing may write.
const GUARD: usize = 256;
const GUARD_BYTE: u8 = 0xA5;

/// The memory of a buffer; alive until the last command that knows of it is done.
pub(crate) struct Region {
    pub id: u64,
    pub base: *mut u8,
    pub bytes: usize,
    /// Bytes that were allocated; 0 for memory of others.
    allocated: usize,
    released: AtomicBool,
    /// Residency sets that keep it, as they were committed last.
    keepers: AtomicUsize,
    state: Arc<State>,
}

// SAFETY: a range of memory; who may touch it when is Metal's contract with the host code, which is what is tested here.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

static NEXT: AtomicU64 = AtomicU64::new(1);

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes, PAGE).ok()
}

impl Region {
    /// New memory, zeroed; `None` if the device has no more.
    pub fn new(state: &Arc<State>, bytes: usize) -> Option<Arc<Self>> {
        let allocated = bytes.checked_add(GUARD)?;
        let layout = layout(allocated)?;
        if !state.take(bytes) {
            return None;
        }
        // SAFETY: the layout is not empty.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        if base.is_null() {
            state.give(bytes);
            return None;
        }
        // SAFETY: the last GUARD bytes of the memory above.
        unsafe { base.add(bytes).write_bytes(GUARD_BYTE, GUARD) };
        Some(Self::keep(state, base, bytes, allocated))
    }

    /// Memory of others.
    pub fn around(state: &Arc<State>, base: *mut u8, bytes: usize) -> Option<Arc<Self>> {
        state.take(bytes).then(|| Self::keep(state, base, bytes, 0))
    }

    fn keep(state: &Arc<State>, base: *mut u8, bytes: usize, allocated: usize) -> Arc<Self> {
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let released = AtomicBool::new(false);
        let (keepers, state_of) = (AtomicUsize::new(0), state.clone());
        let region = Self { id, base, bytes, allocated, released, keepers, state: state_of };
        let region = Arc::new(region);
        state.regions(|regions| regions.push(Arc::downgrade(&region)));
        region
    }

    /// The buffer's last reference is gone.
    pub fn release(&self) {
        if !self.released.swap(true, Ordering::AcqRel) {
            if self.keepers.load(Ordering::Acquire) > 0 {
                let what = format!("buffer {} of {} bytes was released", self.id, self.bytes);
                self.state.violated(Rule::StillResident, what);
            }
            self.state.give(self.bytes);
        }
    }

    /// A residency set that keeps it was committed, or another one without it.
    pub fn is_kept(&self, kept: bool) {
        match kept {
            true => self.keepers.fetch_add(1, Ordering::AcqRel),
            false => self.keepers.fetch_sub(1, Ordering::AcqRel),
        };
    }

    pub fn is_released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }

    /// Whether the bytes behind the buffer are as they were.
    pub fn is_intact(&self) -> bool {
        if self.allocated == 0 {
            return true;
        }
        // SAFETY: the guard is part of the allocation.
        let guard = unsafe { std::slice::from_raw_parts(self.base.add(self.bytes), GUARD) };
        guard.iter().all(|b| *b == GUARD_BYTE)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let (true, Some(layout)) = (self.allocated > 0, layout(self.allocated)) {
            // SAFETY: allocated with this layout; nobody knows of it any more.
            unsafe { std::alloc::dealloc(self.base, layout) };
        }
    }
}
