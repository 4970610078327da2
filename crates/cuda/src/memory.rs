//! Device buffers, their host mirrors, and the way of large copies.

use std::ffi::c_void;

use cudarc::driver::result::{self, DriverError as CudaError};
use cudarc::driver::sys;

/// A buffer; a shared one has pinned host memory beside it.
pub(crate) struct Memory {
    /// Its device address.
    pub device: sys::CUdeviceptr,
    /// Its host mirror, or null.
    pub host: *mut u8,
    /// Bytes.
    pub bytes: u64,
}

impl Memory {
    /// A zeroed buffer on the current context's device.
    pub fn new(bytes: u64, shared: bool) -> Result<Self, CudaError> {
        let len = bytes.max(16) as usize;
        // SAFETY: plain allocations in the current context; both are given back in `free`.
        unsafe {
            let device = result::malloc_sync(len)?;
            let mut memory = Self { device, host: std::ptr::null_mut(), bytes };
            if shared {
                match result::malloc_host(len, 0) {
                    Ok(host) => {
                        memory.host = host.cast();
                        memory.host.write_bytes(0, len);
                    }
                    Err(e) => {
                        let _ = result::free_sync(device);
                        return Err(e);
                    }
                }
            }
            // Other streams do not wait for this one: the host does.
            let zeroed =
                result::memset_d8_sync(device, 0, len).and_then(|()| result::ctx::synchronize());
            match zeroed {
                Ok(()) => Ok(memory),
                Err(e) => {
                    memory.free();
                    Err(e)
                }
            }
        }
    }

    /// Gives it back.
    ///
    /// # Safety
    /// Nothing on the device uses it any more, and its context is current.
    pub unsafe fn free(self) {
        // SAFETY: allocated in `new`, given back once, as `self` is consumed.
        unsafe {
            let _ = result::free_sync(self.device);
            if !self.host.is_null() {
                let _ = result::free_host(self.host.cast::<c_void>());
            }
        }
    }
}

/// Bytes of one piece of a large copy.
const PIECE: usize = 16 << 20;

/// Two pinned pieces: one is filled while the other is copied.
pub(crate) struct Staging {
    pieces: [(*mut u8, sys::CUevent); 2],
    next: usize,
}

impl Staging {
    /// Two pieces, free.
    pub fn new() -> Result<Self, CudaError> {
        let piece = || -> Result<_, CudaError> {
            // SAFETY: given back in `free`.
            let host = unsafe { result::malloc_host(PIECE, 0)? };
            let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?;
            Ok((host.cast(), event))
        };
        Ok(Self { pieces: [piece()?, piece()?], next: 0 })
    }

    /// Copies bytes to the device in the order of the stream; returns when the last piece is on its way.
    pub fn upload(
        &mut self,
        stream: sys::CUstream,
        to: sys::CUdeviceptr,
        bytes: &[u8],
    ) -> Result<(), CudaError> {
        let mut at = to;
        for chunk in bytes.chunks(PIECE) {
            let (host, event) = self.pieces[self.next];
            self.next ^= 1;
            // SAFETY: the event tells that the piece's last copy has ended; the piece is as large as a chunk;
            // the caller has checked the device range.
            unsafe {
                result::event::synchronize(event)?;
                std::ptr::copy_nonoverlapping(chunk.as_ptr(), host, chunk.len());
                let staged = std::slice::from_raw_parts(host, chunk.len());
                result::memcpy_htod_async(at, staged, stream)?;
                result::event::record(event, stream)?;
            }
            at += chunk.len() as u64;
        }
        Ok(())
    }

    /// Gives the pieces back.
    ///
    /// # Safety
    /// No copy is under way, and the context is current.
    pub unsafe fn free(&mut self) {
        for (host, event) in self.pieces {
            // SAFETY: allocated in `new`; the caller calls this once.
            unsafe {
                let _ = result::free_host(host.cast());
                let _ = result::event::destroy(event);
            }
        }
    }
}
