//! A Metal device in software, for tests of the Metal host code where there is no Metal.
//!
//! The host code sends its messages through objc2 as on a Mac. What answers is here: a small Objective-C runtime, classes for
//! the part of Metal that an inference engine uses, and kernels that run thread by thread on the host, compiled from the
//! very text that the host code hands over. Rules that Apple documents are checked, each under a name (`Rule`); what can go
//! wrong on a real device can be made to (`Fault`).
//!
//! Only there with `--cfg metal_soft` and away from macOS (see `.ci/metal`); empty otherwise. Not shipped.
#![deny(missing_docs)]

#[cfg(all(metal_soft, not(target_os = "macos")))]
mod soft;

#[cfg(all(metal_soft, not(target_os = "macos")))]
pub use soft::*;
