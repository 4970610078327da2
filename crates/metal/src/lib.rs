//! The Metal device: a driver for Apple GPUs.
//!
//! Kernels are the text of `lily-gpu`, compiled by the system for the very device when they are first needed. Decisions that
//! need no device (families, system versions, memory, how long a command buffer may be) are plain functions, tested anywhere; the
//! host code itself is there on macOS, and elsewhere only if built with `--cfg metal_soft`, for a device in software that
//! `.ci/metal` brings. docs/metal.md says what is proven where.
#![deny(missing_docs)]

pub mod completion;
pub mod estimate;
pub mod family;
pub mod residency;
pub mod system;

#[cfg(any(target_os = "macos", metal_soft))]
mod buffers;
#[cfg(any(target_os = "macos", metal_soft))]
mod commands;
#[cfg(any(target_os = "macos", metal_soft))]
mod device;
#[cfg(any(target_os = "macos", metal_soft))]
mod driver;
#[cfg(any(target_os = "macos", metal_soft))]
mod pipelines;
#[cfg(any(target_os = "macos", metal_soft))]
mod tensors;

#[cfg(any(target_os = "macos", metal_soft))]
pub use device::{Device, Options, TensorUse};
#[cfg(any(target_os = "macos", metal_soft))]
pub use driver::MetalDriver;

/// Whether this build has the driver.
pub const fn is_supported() -> bool {
    cfg!(all(target_os = "macos", target_arch = "aarch64"))
}

/// The device that would be used and what for, or why there is none.
pub fn usable() -> Result<String, String> {
    #[cfg(target_os = "macos")]
    if is_supported() {
        return MetalDriver::describe(&system::System::read());
    }
    Err(match cfg!(target_os = "macos") {
        true => "it needs a Mac with Apple silicon".into(),
        false => "it needs macOS on Apple silicon".into(),
    })
}

/// Opens the system's device for `lily_gpu`.
pub fn open() -> Result<Box<dyn lily_gpu::Driver>, lily_gpu::DriverError> {
    #[cfg(target_os = "macos")]
    if is_supported() {
        return Ok(Box::new(MetalDriver::open(Options::default())?));
    }
    let why = usable().err().unwrap_or_default();
    Err(lily_gpu::DriverError::Lost(format!("there is no Metal device: {why}")))
}
