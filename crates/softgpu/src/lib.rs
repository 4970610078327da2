//! A GPU driver for tests: compiles the kernel text with the host's C++ compiler and runs each kernel
//! thread as a fiber. Not shipped.
//!
//! What it is strict about: threadgroup memory starts as NaN; a barrier or simd operation that not every
//! thread reaches is an error that names both lines; dispatches of one stage, threadgroups and simdgroups run
//! in random order; buffer ranges and argument sizes are checked against the kernel.
#![deny(missing_docs)]

mod compile;
mod driver;
mod fault;
mod sanitize;
mod trace;

pub use compile::{
    Access, Cell, CompileError, Compiler, Counts, Library, Place, Signature, TENSORS, TrackedRange,
};
pub use driver::{Options, SoftDriver, Stats};
pub use fault::Fault;
pub use sanitize::Sanitizer;
pub use trace::{Class, Launch, Touched, Trace, Traced};
