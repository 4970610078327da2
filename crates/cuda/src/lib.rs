//! The CUDA device: a driver for NVIDIA GPUs.
//!
//! Neither the CUDA driver nor NVRTC is needed to build; both are looked for when a device is opened, and what is
//! missing is an error that names it. Kernels are the text of `lily-gpu`, compiled by NVRTC for the very device and
//! kept as machine code on disk.
#![deny(missing_docs)]

mod context;
mod driver;
mod graph;
mod memory;
mod nvrtc;

pub use driver::{CudaDriver, Options};
pub use nvrtc::{Nvrtc, NvrtcError};

/// Why this machine has no usable CUDA device, or `None` if it has one.
pub fn unavailable() -> Option<String> {
    CudaDriver::device_name(0).err()
}

/// The first device and the compiler that its kernels would be compiled by, or what is missing.
pub fn usable() -> Result<String, String> {
    let name = CudaDriver::device_name(0)?;
    match Nvrtc::open() {
        Ok(nvrtc) => {
            let (major, minor) = nvrtc.version();
            Ok(format!("{name}, NVRTC {major}.{minor}"))
        }
        Err(NvrtcError::Missing(what) | NvrtcError::Refused(what)) => {
            Err(format!("{name} is there; {what}"))
        }
    }
}
