//! Classes, methods, instance variables, selectors.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, Once, PoisonError, RwLock};

use super::object;

/// A method's code, of whatever type.
pub(crate) type Code = unsafe extern "C" fn();

/// A method: its interned selector, its code, its types.
pub(crate) struct Method {
    selector: usize,
    code: Code,
    types: CString,
}

pub(crate) struct Ivar {
    name: CString,
    offset: usize,
}

/// A class or metaclass. What a pointer to it is compared with is its address.
#[repr(C)]
pub(crate) struct Class {
    /// The metaclass; first, as in any object.
    isa: AtomicPtr<Class>,
    superclass: AtomicPtr<Class>,
    name: AtomicPtr<c_char>,
    meta: AtomicBool,
    /// Bytes of an instance.
    size: AtomicUsize,
    methods: RwLock<Vec<&'static Method>>,
    ivars: RwLock<Vec<&'static Ivar>>,
}

impl Class {
    const fn new() -> Self {
        Self {
            isa: AtomicPtr::new(null_mut()),
            superclass: AtomicPtr::new(null_mut()),
            name: AtomicPtr::new(null_mut()),
            meta: AtomicBool::new(false),
            size: AtomicUsize::new(size_of::<object::Header>()),
            methods: RwLock::new(Vec::new()),
            ivars: RwLock::new(Vec::new()),
        }
    }

    fn address(&self) -> *mut Self {
        std::ptr::from_ref(self).cast_mut()
    }

    pub fn is_meta(&self) -> bool {
        self.meta.load(Ordering::Relaxed)
    }

    pub fn instance_bytes(&self) -> usize {
        self.size.load(Ordering::Relaxed)
    }

    fn name(&self) -> String {
        let name = self.name.load(Ordering::Relaxed);
        if name.is_null() {
            return "a class without a name".into();
        }
        // SAFETY: names are interned strings that are never freed.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    fn superclass(&self) -> Option<&'static Self> {
        // SAFETY: null, or a class; classes are never freed.
        unsafe { self.superclass.load(Ordering::Relaxed).as_ref() }
    }

    fn metaclass(&self) -> Option<&'static Self> {
        // SAFETY: as above.
        unsafe { self.isa.load(Ordering::Relaxed).as_ref() }
    }

    fn find(&'static self, selector: usize) -> Option<&'static Method> {
        let mut class = Some(self);
        while let Some(c) = class {
            let methods = c.methods.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(method) = methods.iter().find(|m| m.selector == selector) {
                return Some(method);
            }
            class = c.superclass();
        }
        None
    }

    /// The code of a method.
    ///
    /// # Safety
    /// `selector` is one of this runtime.
    pub unsafe fn code(&'static self, selector: *const c_char) -> Code {
        if let Some(method) = self.find(selector as usize) {
            return method.code;
        }
        let kind = if self.is_meta() { '+' } else { '-' };
        // SAFETY: selectors are interned strings.
        let selector = unsafe { CStr::from_ptr(selector) }.to_string_lossy();
        eprintln!("softmetal: {kind}[{} {selector}] is not implemented", self.name());
        std::process::abort();
    }

    fn add(&self, selector: *const c_char, code: Code, types: &CStr) {
        let method = Method { selector: selector as usize, code, types: types.to_owned() };
        let mut methods = self.methods.write().unwrap_or_else(PoisonError::into_inner);
        methods.push(Box::leak(Box::new(method)));
    }

    /// Gives a class its metaclass.
    fn complete(&self, superclass: Option<&'static Self>) {
        let meta = Box::leak(Box::new(Self::new()));
        meta.meta.store(true, Ordering::Relaxed);
        meta.name.store(self.name.load(Ordering::Relaxed), Ordering::Relaxed);
        let above = match superclass {
            Some(superclass) => superclass.isa.load(Ordering::Relaxed),
            None => self.address(),
        };
        meta.superclass.store(above, Ordering::Relaxed);
        meta.isa.store(meta.address(), Ordering::Relaxed);
        self.isa.store(meta.address(), Ordering::Release);
    }
}

/// Selectors and classes by name; addresses, as pointers are not `Send`.
struct Table {
    selectors: HashMap<CString, usize>,
    classes: HashMap<CString, usize>,
}

static TABLE: Mutex<Option<Table>> = Mutex::new(None);

fn table<R>(f: impl FnOnce(&mut Table) -> R) -> R {
    let mut table = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
    let empty = || Table { selectors: HashMap::new(), classes: HashMap::new() };
    f(table.get_or_insert_with(empty))
}

/// The selector of a name: one address for each.
pub(crate) fn selector(name: &CStr) -> *const c_char {
    let intern = |t: &mut Table| match t.selectors.get(name) {
        Some(at) => *at,
        None => {
            let at = name.to_owned().into_raw() as usize;
            t.selectors.insert(name.to_owned(), at);
            at
        }
    };
    table(intern) as *const c_char
}

macro_rules! static_classes {
    ($($symbol:ident = $name:literal,)*) => {
        $(#[allow(non_upper_case_globals)]
        // SAFETY: no other Objective-C runtime is linked.
        #[unsafe(no_mangle)]
        static $symbol: Class = Class::new();)*

        fn static_classes() -> Vec<(&'static Class, &'static CStr)> {
            vec![$((&$symbol, $name)),*]
        }
    };
}

// Classes that the bindings link to by symbol.
static_classes! {
    _OBJC_CLASS_NSObject = c"NSObject",
    _OBJC_CLASS_NSString = c"NSString",
    _OBJC_CLASS_NSError = c"NSError",
    _OBJC_CLASS_MTLCompileOptions = c"MTLCompileOptions",
    _OBJC_CLASS_MTLResidencySetDescriptor = c"MTLResidencySetDescriptor",
}

/// A class that the bindings link to by symbol.
pub(crate) enum Base {}

impl Base {
    pub const STRING: &'static Class = &_OBJC_CLASS_NSString;
    pub const ERROR: &'static Class = &_OBJC_CLASS_NSError;
    pub const COMPILE_OPTIONS: &'static Class = &_OBJC_CLASS_MTLCompileOptions;
    pub const RESIDENCY_DESCRIPTOR: &'static Class = &_OBJC_CLASS_MTLResidencySetDescriptor;
}

/// A method of a class that has no instance variables of the bindings' making: name, code, types.
pub(crate) type Entry = (&'static CStr, *const c_void, &'static CStr);

/// Adds methods of instances and of the class itself.
///
/// # Safety
/// Each code is an `extern "C"` function whose types are those that are given.
pub(crate) unsafe fn define(
    class: &'static Class,
    bytes: usize,
    instances: &[Entry],
    itself: &[Entry],
) {
    class.size.store(bytes, Ordering::Relaxed);
    let both = [(Some(class), instances), (class.metaclass(), itself)];
    for (class, entries) in both {
        for (name, code, types) in entries {
            // SAFETY: function pointers have one size; the caller vouches for the type it is called with.
            let code = unsafe { std::mem::transmute::<*const c_void, Code>(*code) };
            class.expect("base classes are complete").add(selector(name), code, types);
        }
    }
}

/// Makes the static classes, the first time.
pub(crate) fn base_classes() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let root = &_OBJC_CLASS_NSObject;
        for (class, name) in static_classes() {
            class.name.store(name.as_ptr().cast_mut(), Ordering::Relaxed);
        }
        root.complete(None);
        for (class, name) in static_classes() {
            if !std::ptr::eq(class, root) {
                class.superclass.store(root.address(), Ordering::Relaxed);
                class.complete(Some(root));
            }
            table(|t| t.classes.insert(name.to_owned(), class.address() as usize));
        }
        let instances: [Entry; 2] = [
            (c"init", object::init as *const c_void, c"@16@0:8"),
            (c"dealloc", object::dealloc as *const c_void, c"v16@0:8"),
        ];
        let itself: [Entry; 2] = [
            (c"alloc", object::alloc as *const c_void, c"@16@0:8"),
            (c"new", object::alloc as *const c_void, c"@16@0:8"),
        ];
        // SAFETY: the four functions have these types.
        unsafe { define(root, size_of::<object::Header>(), &instances, &itself) };
        crate::soft::foundation::define_classes();
    });
}

// Before `main`: the bindings use the static classes without asking for them.
#[used]
// SAFETY: a constructor without arguments, as this section holds.
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = {
    extern "C" fn construct() {
        base_classes();
    }
    construct
};

/// What the bindings call.
mod exported {
    use super::*;

    /// # Safety
    /// Null or a class.
    unsafe fn class<'a>(class: *const Class) -> Option<&'a Class> {
        // SAFETY: the caller's.
        unsafe { class.as_ref() }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn sel_registerName(name: *const c_char) -> *const c_char {
        // SAFETY: a terminated string by contract.
        selector(unsafe { CStr::from_ptr(name) })
    }

    #[unsafe(no_mangle)]
    extern "C" fn sel_getName(selector: *const c_char) -> *const c_char {
        selector
    }

    #[unsafe(no_mangle)]
    extern "C" fn sel_isEqual(a: *const c_char, b: *const c_char) -> bool {
        a == b
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn objc_getClass(name: *const c_char) -> *mut Class {
        // SAFETY: a terminated string by contract.
        let name = unsafe { CStr::from_ptr(name) };
        table(|t| t.classes.get(name).copied()).unwrap_or(0) as *mut Class
    }

    #[unsafe(no_mangle)]
    extern "C" fn objc_getProtocol(_: *const c_char) -> *mut c_void {
        null_mut()
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn object_getClass(object: *const object::Header) -> *const Class {
        // SAFETY: an object by contract.
        unsafe { (*object).class() }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn class_getName(c: *const Class) -> *const c_char {
        // SAFETY: a class by contract.
        unsafe { class(c) }.map_or(null(), |c| c.name.load(Ordering::Relaxed))
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn class_isMetaClass(c: *const Class) -> bool {
        // SAFETY: as above.
        unsafe { class(c) }.is_some_and(Class::is_meta)
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn class_getSuperclass(c: *const Class) -> *const Class {
        // SAFETY: as above.
        unsafe { class(c) }.map_or(null_mut(), |c| c.superclass.load(Ordering::Relaxed))
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn class_getInstanceSize(c: *const Class) -> usize {
        // SAFETY: as above.
        unsafe { class(c) }.map_or(0, Class::instance_bytes)
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn class_getInstanceMethod(
        c: *const Class,
        selector: *const c_char,
    ) -> *const Method {
        // SAFETY: as above; classes are never freed.
        let class: Option<&'static Class> = unsafe { c.as_ref() };
        class.and_then(|c| c.find(selector as usize)).map_or(null(), std::ptr::from_ref)
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn method_getName(method: *const Method) -> *const c_char {
        // SAFETY: a method by contract.
        unsafe { (*method).selector as *const c_char }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn method_getTypeEncoding(method: *const Method) -> *const c_char {
        // SAFETY: as above.
        unsafe { (*method).types.as_ptr() }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn objc_allocateClassPair(
        above: *const Class,
        name: *const c_char,
        _extra: usize,
    ) -> *mut Class {
        base_classes();
        // SAFETY: a class and a terminated string by contract; classes are never freed.
        let (above, name): (Option<&'static Class>, &CStr) =
            unsafe { (above.as_ref(), CStr::from_ptr(name)) };
        let Some(above) = above else { return null_mut() };
        let class = Box::leak(Box::new(Class::new()));
        class.superclass.store(above.address(), Ordering::Relaxed);
        class.size.store(above.instance_bytes(), Ordering::Relaxed);
        class.name.store(name.to_owned().into_raw(), Ordering::Relaxed);
        class.complete(Some(above));
        class.address()
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn objc_registerClassPair(c: *const Class) {
        // SAFETY: a class by contract, with an interned name.
        let Some(c) = (unsafe { class(c) }) else { return };
        // SAFETY: as above.
        let name = unsafe { CStr::from_ptr(c.name.load(Ordering::Relaxed)) }.to_owned();
        table(|t| t.classes.insert(name, c.address() as usize));
    }

    #[unsafe(no_mangle)]
    extern "C" fn objc_disposeClassPair(_: *mut Class) {}

    #[unsafe(no_mangle)]
    unsafe extern "C" fn class_addMethod(
        c: *const Class,
        selector: *const c_char,
        code: Code,
        types: *const c_char,
    ) -> bool {
        // SAFETY: a class and a terminated string by contract.
        let (c, types) = unsafe { (class(c), CStr::from_ptr(types)) };
        c.is_some_and(|c| {
            c.add(selector, code, types);
            true
        })
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn class_addIvar(
        c: *const Class,
        name: *const c_char,
        bytes: usize,
        log_align: u8,
        _types: *const c_char,
    ) -> bool {
        // SAFETY: a class and a terminated string by contract.
        let (c, name) = unsafe { (class(c), CStr::from_ptr(name)) };
        let Some(c) = c else { return false };
        let offset = c.instance_bytes().next_multiple_of(1 << log_align);
        c.size.store(offset + bytes, Ordering::Relaxed);
        let ivar = Box::leak(Box::new(Ivar { name: name.to_owned(), offset }));
        c.ivars.write().unwrap_or_else(PoisonError::into_inner).push(ivar);
        true
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn class_getInstanceVariable(
        c: *const Class,
        name: *const c_char,
    ) -> *const Ivar {
        // SAFETY: a class and a terminated string by contract.
        let (c, name) = unsafe { (class(c), CStr::from_ptr(name)) };
        let Some(c) = c else { return null() };
        let ivars = c.ivars.read().unwrap_or_else(PoisonError::into_inner);
        ivars.iter().find(|i| i.name.as_c_str() == name).map_or(null(), |i| std::ptr::from_ref(*i))
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ivar_getOffset(ivar: *const Ivar) -> isize {
        // SAFETY: an instance variable by contract.
        unsafe { (*ivar).offset as isize }
    }

    #[unsafe(no_mangle)]
    extern "C" fn class_addProtocol(_: *mut Class, _: *mut c_void) -> bool {
        true
    }
}
