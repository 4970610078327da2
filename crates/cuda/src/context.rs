//! What a driver holds of CUDA from its first call on, given back wherever opening it ends.

use cudarc::driver::result::{self, DriverError as CudaError};
use cudarc::driver::sys;

/// A hold on a device's primary context.
pub(crate) struct Primary {
    device: sys::CUdevice,
    context: sys::CUcontext,
}

impl Primary {
    /// Retains the context of a device that exists.
    pub fn retain(device: sys::CUdevice) -> Result<Self, CudaError> {
        // SAFETY: the device exists; the context is released when this is dropped.
        let context = unsafe { result::primary_ctx::retain(device) }?;
        Ok(Self { device, context })
    }

    /// Makes it current.
    pub fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: retained above, and released only when this is dropped.
        unsafe { result::ctx::set_current(self.context) }
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: retained once, released once; what was made in it is gone before. After a fault the call fails, which is all
        // the same.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// A stream until the driver has it.
pub(crate) struct Stream(Option<sys::CUstream>);

impl Stream {
    /// A stream of the current context.
    pub fn new() -> Result<Self, CudaError> {
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
        Ok(Self(Some(stream)))
    }

    /// Hands it on.
    pub fn keep(mut self) -> sys::CUstream {
        self.0.take().expect("taken once")
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Some(stream) = self.0.take() {
            // SAFETY: created above, nothing runs on it, and its context is still current.
            let _ = unsafe { result::stream::destroy(stream) };
        }
    }
}
