//! Blocks: closures in the layout of clang's runtime.

use std::ffi::{c_int, c_void};

#[repr(C)]
struct Description {
    reserved: usize,
    bytes: usize,
    copy: Option<unsafe extern "C" fn(*mut c_void, *const c_void)>,
    dispose: Option<unsafe extern "C" fn(*mut c_void)>,
}

#[repr(C)]
struct Block {
    isa: *const c_void,
    flags: c_int,
    reserved: c_int,
    invoke: *const c_void,
    description: *const Description,
}

const ON_HEAP: c_int = 1 << 24;
const HAS_HELPERS: c_int = 1 << 25;
const COUNT: c_int = 0xfffe;

// SAFETY: no other blocks runtime is linked; only the addresses are used.
#[allow(non_upper_case_globals)]
#[unsafe(no_mangle)]
static _NSConcreteStackBlock: [usize; 32] = [0; 32];
#[allow(non_upper_case_globals)]
#[unsafe(no_mangle)]
static _NSConcreteGlobalBlock: [usize; 32] = [0; 32];

unsafe extern "C" {
    fn malloc(bytes: usize) -> *mut c_void;
    fn free(memory: *mut c_void);
}

#[unsafe(no_mangle)]
unsafe extern "C" fn _Block_copy(block: *mut c_void) -> *mut c_void {
    let from = block.cast::<Block>();
    // SAFETY: null or a block by contract; its counts are touched by one thread at a time, as its owners hand it on.
    unsafe {
        if from.is_null() {
            return block;
        }
        if (*from).flags & ON_HEAP != 0 {
            (*from).flags += 2;
            return block;
        }
        if std::ptr::eq((*from).isa, (&raw const _NSConcreteGlobalBlock).cast()) {
            return block;
        }
        let bytes = (*(*from).description).bytes;
        let to = malloc(bytes).cast::<Block>();
        if to.is_null() {
            return to.cast();
        }
        std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast::<u8>(), bytes);
        (*to).flags = ((*from).flags & !0xffff) | ON_HEAP | 2;
        if (*from).flags & HAS_HELPERS != 0
            && let Some(copy) = (*(*from).description).copy
        {
            copy(to.cast(), block);
        }
        to.cast()
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn _Block_release(block: *mut c_void) {
    let from = block.cast::<Block>();
    // SAFETY: null or a block by contract, as above; the last owner frees it.
    unsafe {
        if from.is_null() || (*from).flags & ON_HEAP == 0 {
            return;
        }
        (*from).flags -= 2;
        if (*from).flags & COUNT != 0 {
            return;
        }
        if (*from).flags & HAS_HELPERS != 0
            && let Some(dispose) = (*(*from).description).dispose
        {
            dispose(block);
        }
        free(block);
    }
}

/// A copied block that takes one object and gives nothing.
pub(crate) struct Handler(*mut c_void);

// SAFETY: completion handlers may be called on any thread, by Metal's contract.
unsafe impl Send for Handler {}

impl Handler {
    /// # Safety
    /// `block` is a block of one object argument.
    pub unsafe fn copy(block: *mut c_void) -> Self {
        // SAFETY: the caller's.
        Self(unsafe { _Block_copy(block) })
    }

    /// Calls it.
    ///
    /// # Safety
    /// `object` is of the class that the block takes.
    pub unsafe fn call(&self, object: *mut c_void) {
        // SAFETY: the block's invoke function takes the block and the object.
        unsafe {
            let invoke = (*self.0.cast::<Block>()).invoke;
            let invoke = std::mem::transmute::<
                *const c_void,
                unsafe extern "C-unwind" fn(*mut c_void, *mut c_void),
            >(invoke);
            invoke(self.0, object);
        }
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        // SAFETY: the copy is this handler's.
        unsafe { _Block_release(self.0) }
    }
}
