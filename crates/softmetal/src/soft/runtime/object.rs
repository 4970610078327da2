//! Objects: a class, a count, and what the class adds. Autorelease pools.

use std::alloc::Layout;
use std::cell::RefCell;
use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering, fence};

use super::class::{Class, Code, selector};

/// What each object begins with.
#[repr(C)]
pub(crate) struct Header {
    isa: AtomicPtr<Class>,
    count: AtomicUsize,
}

impl Header {
    pub fn class(&self) -> *const Class {
        self.isa.load(Ordering::Relaxed)
    }
}

/// # Safety
/// `object` is an object or a class.
unsafe fn class_of(object: *const Header) -> &'static Class {
    // SAFETY: the caller's; classes are never freed.
    unsafe { &*(*object).class() }
}

fn layout(class: &Class) -> Layout {
    Layout::from_size_align(class.instance_bytes(), 16).expect("an instance has a size")
}

/// A new instance, zeroed, that the caller owns.
pub(crate) unsafe extern "C" fn alloc(class: *mut Class, _: *const c_char) -> *mut c_void {
    // SAFETY: a class by contract.
    let layout = layout(unsafe { &*class });
    // SAFETY: an instance is never without bytes.
    let object = unsafe { std::alloc::alloc_zeroed(layout) }.cast::<Header>();
    if object.is_null() {
        std::alloc::handle_alloc_error(layout);
    }
    let header = Header { isa: AtomicPtr::new(class), count: AtomicUsize::new(1) };
    // SAFETY: new memory of that size at least.
    unsafe { object.write(header) };
    object.cast()
}

pub(super) extern "C" fn init(object: *mut c_void, _: *const c_char) -> *mut c_void {
    object
}

pub(crate) unsafe extern "C" fn dealloc(object: *mut c_void, _: *const c_char) {
    // SAFETY: an object by contract, allocated above with its class's layout, which does not change.
    unsafe { std::alloc::dealloc(object.cast(), layout(class_of(object.cast()))) }
}

thread_local! {
    /// Objects that are released when a pool ends; pools are lengths of this list.
    static POOL: RefCell<(Vec<*mut Header>, u32)> = const { RefCell::new((Vec::new(), 0)) };
}

static UNPOOLED: AtomicUsize = AtomicUsize::new(0);

/// Objects that were autoreleased without a pool, and so are never freed.
pub(crate) fn unpooled() -> usize {
    UNPOOLED.load(Ordering::Relaxed)
}

/// Runs `f` in a pool of its own.
pub(crate) fn with_pool<R>(f: impl FnOnce() -> R) -> R {
    let pool = objc_autoreleasePoolPush();
    let result = f();
    // SAFETY: the pool that was pushed above.
    unsafe { objc_autoreleasePoolPop(pool) };
    result
}

#[unsafe(no_mangle)]
unsafe extern "C" fn objc_msg_lookup(object: *mut Header, name: *const c_char) -> Code {
    extern "C" fn nothing() -> usize {
        0
    }
    if object.is_null() {
        // SAFETY: a message to nil answers zero, whatever it is called with.
        return unsafe { std::mem::transmute::<extern "C" fn() -> usize, Code>(nothing) };
    }
    // SAFETY: an object and a selector by contract.
    unsafe { class_of(object).code(name) }
}

#[repr(C)]
struct Super {
    receiver: *mut Header,
    class: *const Class,
}

#[unsafe(no_mangle)]
unsafe extern "C" fn objc_msg_lookup_super(to: *const Super, name: *const c_char) -> Code {
    // SAFETY: a class and a selector by contract.
    unsafe { (*(*to).class).code(name) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn objc_retain(object: *mut Header) -> *mut Header {
    // SAFETY: null or an object by contract.
    if !object.is_null() && !unsafe { class_of(object) }.is_meta() {
        // SAFETY: as above.
        unsafe { (*object).count.fetch_add(1, Ordering::Relaxed) };
    }
    object
}

#[unsafe(no_mangle)]
unsafe extern "C" fn objc_release(object: *mut Header) {
    // SAFETY: null or an object by contract.
    if object.is_null() || unsafe { class_of(object) }.is_meta() {
        return;
    }
    // SAFETY: as above; the caller gives its reference back.
    let before = unsafe { (*object).count.fetch_sub(1, Ordering::Release) };
    if before > 1 {
        return;
    }
    assert!(before == 1, "softmetal: an object was released more often than retained");
    fence(Ordering::Acquire);
    let name = selector(c"dealloc");
    // SAFETY: every class has dealloc, of that type; nobody holds the object any more.
    unsafe {
        let code = class_of(object).code(name);
        let dealloc =
            std::mem::transmute::<Code, unsafe extern "C" fn(*mut Header, *const c_char)>(code);
        dealloc(object, name);
    }
}

#[unsafe(no_mangle)]
extern "C" fn objc_autorelease(object: *mut Header) -> *mut Header {
    if !object.is_null() {
        POOL.with_borrow_mut(|(objects, pools)| {
            if *pools == 0 {
                UNPOOLED.fetch_add(1, Ordering::Relaxed);
            }
            objects.push(object);
        });
    }
    object
}

#[unsafe(no_mangle)]
extern "C" fn objc_autoreleaseReturnValue(object: *mut Header) -> *mut Header {
    objc_autorelease(object)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn objc_retainAutoreleasedReturnValue(object: *mut Header) -> *mut Header {
    // SAFETY: null or an object by contract.
    unsafe { objc_retain(object) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn objc_retainAutorelease(object: *mut Header) -> *mut Header {
    // SAFETY: null or an object by contract.
    objc_autorelease(unsafe { objc_retain(object) })
}

#[unsafe(no_mangle)]
extern "C" fn objc_autoreleasePoolPush() -> *mut c_void {
    POOL.with_borrow_mut(|(objects, pools)| {
        *pools += 1;
        objects.len()
    }) as *mut c_void
}

#[unsafe(no_mangle)]
unsafe extern "C" fn objc_autoreleasePoolPop(pool: *mut c_void) {
    let next = || POOL.with_borrow_mut(|(o, _)| o.len().gt(&(pool as usize)).then(|| o.pop()));
    while let Some(Some(object)) = next() {
        // SAFETY: the pool owns a reference to each of its objects.
        unsafe { objc_release(object) };
    }
    POOL.with_borrow_mut(|(_, pools)| *pools -= 1);
}
