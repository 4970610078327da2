//! Strings, errors and the plain descriptors, on the classes that the bindings link to by symbol.

use std::ffi::{CString, c_char, c_int, c_void};

use objc2::rc::Retained;
use objc2_foundation::{NSError, NSString};
use objc2_metal::{
    MTLCompileOptions, MTLLanguageVersion, MTLMathFloatingPointFunctions, MTLMathMode,
};

use super::runtime::{self, Base, Class, Entry, Header, define};

/// An object of a class, with the rest of its bytes as `T`.
#[repr(C)]
struct Object<T> {
    header: Header,
    data: T,
}

/// A new object that the caller owns.
fn new<T>(class: &'static Class, data: T) -> *mut c_void {
    assert!(size_of::<Object<T>>() <= class.instance_bytes());
    // SAFETY: a class.
    let object = unsafe { runtime::alloc(std::ptr::from_ref(class).cast_mut(), std::ptr::null()) };
    // SAFETY: a new instance, of that size at least.
    unsafe { (&raw mut (*object.cast::<Object<T>>()).data).write(data) };
    object
}

/// # Safety
/// The object is one of a class whose data is `T`, and alive.
unsafe fn data<'a, T>(object: *const c_void) -> &'a T {
    // SAFETY: the caller's.
    unsafe { &(*object.cast::<Object<T>>()).data }
}

/// # Safety
/// As for [`data`]; nothing else refers to the data.
unsafe fn data_mut<'a, T>(object: *mut c_void) -> &'a mut T {
    // SAFETY: the caller's.
    unsafe { &mut (*object.cast::<Object<T>>()).data }
}

/// Gives a new object to the caller by way of the pool.
fn autoreleased(object: *mut c_void) -> *mut c_void {
    unsafe extern "C" {
        fn objc_autorelease(object: *mut c_void) -> *mut c_void;
    }
    // SAFETY: an object that the caller owns.
    unsafe { objc_autorelease(object) }
}

struct Text(Option<CString>);

unsafe extern "C" fn string_init(
    object: *mut c_void,
    _: *const c_char,
    bytes: *const u8,
    length: usize,
    _encoding: c_int,
) -> *mut c_void {
    // SAFETY: a string without text, and so many bytes, by contract. A zero byte ends the text.
    unsafe {
        let bytes = std::slice::from_raw_parts(bytes, length);
        let text = bytes.split(|b| *b == 0).next().unwrap_or_default();
        data_mut::<Text>(object).0 = CString::new(text).ok();
    }
    object
}

unsafe extern "C" fn string_length(object: *mut c_void, _: *const c_char, _: c_int) -> usize {
    // SAFETY: a string by contract.
    unsafe { data::<Text>(object) }.0.as_ref().map_or(0, |t| t.as_bytes().len())
}

unsafe extern "C" fn string_utf8(object: *mut c_void, _: *const c_char) -> *const c_char {
    // SAFETY: as above.
    unsafe { data::<Text>(object) }.0.as_ref().map_or(c"".as_ptr(), |t| t.as_ptr())
}

unsafe extern "C" fn string_dealloc(object: *mut c_void, selector: *const c_char) {
    // SAFETY: as above; the last owner is gone.
    unsafe {
        data_mut::<Text>(object).0 = None;
        runtime::dealloc(object, selector);
    }
}

/// A string object that the caller owns.
fn new_string(text: &str) -> *mut c_void {
    new(Base::STRING, Text(CString::new(text.replace('\0', " ")).ok()))
}

/// A string.
pub(crate) fn string(text: &str) -> Retained<NSString> {
    // SAFETY: a new string, owned.
    unsafe { Retained::from_raw(new_string(text).cast()) }.expect("a new string")
}

#[derive(Default)]
struct Fault {
    domain: String,
    code: isize,
    text: String,
}

unsafe extern "C" fn error_domain(object: *mut c_void, _: *const c_char) -> *mut c_void {
    // SAFETY: an error by contract.
    autoreleased(new_string(&unsafe { data::<Fault>(object) }.domain))
}

unsafe extern "C" fn error_code(object: *mut c_void, _: *const c_char) -> isize {
    // SAFETY: as above.
    unsafe { data::<Fault>(object) }.code
}

unsafe extern "C" fn error_text(object: *mut c_void, _: *const c_char) -> *mut c_void {
    // SAFETY: as above.
    autoreleased(new_string(&unsafe { data::<Fault>(object) }.text))
}

unsafe extern "C" fn error_dealloc(object: *mut c_void, selector: *const c_char) {
    // SAFETY: as above; the last owner is gone.
    unsafe {
        std::mem::take(data_mut::<Fault>(object));
        runtime::dealloc(object, selector);
    }
}

/// An error.
pub(crate) fn error(domain: &str, code: isize, text: &str) -> Retained<NSError> {
    let fault = Fault { domain: domain.into(), code, text: text.into() };
    // SAFETY: a new error, owned.
    unsafe { Retained::from_raw(new(Base::ERROR, fault).cast()) }.expect("a new error")
}

/// Stores an error where a method was asked to.
///
/// # Safety
/// `at` is null or takes an error.
pub(crate) unsafe fn store_error(at: *mut *mut NSError, error: Retained<NSError>) {
    if !at.is_null() {
        // SAFETY: the caller's.
        unsafe { *at = Retained::autorelease_ptr(error) };
    }
}

/// What a library is to be compiled with: Metal's defaults are the system's language version and fast math.
#[derive(Clone, Copy, Default)]
pub(crate) struct CompileOptions {
    /// 0 if it was not set.
    pub version: usize,
    /// Whether anything set the arithmetic to be exact.
    pub exact: bool,
}

unsafe extern "C" fn set_version(object: *mut c_void, _: *const c_char, v: MTLLanguageVersion) {
    // SAFETY: compile options by contract, as in the functions below.
    unsafe { data_mut::<CompileOptions>(object) }.version = v.0;
}

unsafe extern "C" fn set_math(object: *mut c_void, _: *const c_char, mode: MTLMathMode) {
    // SAFETY: as above.
    unsafe { data_mut::<CompileOptions>(object) }.exact = mode == MTLMathMode::Safe;
}

unsafe extern "C" fn set_functions(
    _: *mut c_void,
    _: *const c_char,
    _: MTLMathFloatingPointFunctions,
) {
}

unsafe extern "C" fn set_fast_math(object: *mut c_void, _: *const c_char, on: u8) {
    // SAFETY: as above.
    unsafe { data_mut::<CompileOptions>(object) }.exact = on == 0;
}

/// What options hold.
pub(crate) fn compile_options(options: Option<&MTLCompileOptions>) -> CompileOptions {
    // SAFETY: the class is the one below.
    options.map_or_else(CompileOptions::default, |o| unsafe {
        *data::<CompileOptions>(std::ptr::from_ref(o).cast())
    })
}

unsafe extern "C" fn set_capacity(_: *mut c_void, _: *const c_char, _: usize) {}

/// Adds the methods of these classes; called once, when the static classes are made.
pub(crate) fn define_classes() {
    let string: [Entry; 4] = [
        (c"initWithBytes:length:encoding:", string_init as *const c_void, c"@36@0:8r^v16Q24i32"),
        (c"lengthOfBytesUsingEncoding:", string_length as *const c_void, c"Q20@0:8i16"),
        (c"UTF8String", string_utf8 as *const c_void, c"r*16@0:8"),
        (c"dealloc", string_dealloc as *const c_void, c"v16@0:8"),
    ];
    let error: [Entry; 4] = [
        (c"domain", error_domain as *const c_void, c"@16@0:8"),
        (c"code", error_code as *const c_void, c"q16@0:8"),
        (c"localizedDescription", error_text as *const c_void, c"@16@0:8"),
        (c"dealloc", error_dealloc as *const c_void, c"v16@0:8"),
    ];
    let options: [Entry; 4] = [
        (c"setLanguageVersion:", set_version as *const c_void, c"v24@0:8Q16"),
        (c"setMathMode:", set_math as *const c_void, c"v24@0:8q16"),
        (c"setMathFloatingPointFunctions:", set_functions as *const c_void, c"v24@0:8q16"),
        (c"setFastMathEnabled:", set_fast_math as *const c_void, c"v20@0:8C16"),
    ];
    let capacity: [Entry; 1] =
        [(c"setInitialCapacity:", set_capacity as *const c_void, c"v24@0:8Q16")];
    // SAFETY: the functions above have these types.
    unsafe {
        define(Base::STRING, size_of::<Object<Text>>(), &string, &[]);
        define(Base::ERROR, size_of::<Object<Fault>>(), &error, &[]);
        define(Base::COMPILE_OPTIONS, size_of::<Object<CompileOptions>>(), &options, &[]);
        define(Base::RESIDENCY_DESCRIPTOR, size_of::<Object<usize>>(), &capacity, &[]);
    }
}
