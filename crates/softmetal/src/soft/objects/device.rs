//! The device and its buffers.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use block2::Block;
use objc2::rc::Retained;
use objc2::runtime::{NSObject, ProtocolObject};
use objc2::{DefinedClass, define_class};
use objc2_foundation::{NSError, NSString};
use objc2_metal::{MTLCompileOptions, MTLDevice, MTLGPUFamily, MTLResourceOptions, MTLSize};

use super::library::{SoftFunction, SoftLibrary, SoftPipeline, compile, pipeline};
use super::queue::{Fence, Residents, SoftFence, SoftQueue, SoftSet, new_queue};
use super::{make, raw};
use crate::soft::foundation::{error, store_error, string};
use crate::soft::memory::{PAGE, Region};
use crate::soft::rules::Rule;
use crate::soft::state::State;

/// A buffer's memory; released with it.
pub(crate) struct Owned {
    pub region: Arc<Region>,
    deallocator: Option<Deallocator>,
}

/// What frees memory that was around before the buffer.
struct Deallocator(block2::RcBlock<dyn Fn(NonNull<c_void>, usize)>);

impl Drop for Owned {
    fn drop(&mut self) {
        self.region.release();
        if let (Some(free), Some(base)) = (&self.deallocator, NonNull::new(self.region.base)) {
            free.0.call((base.cast(), self.region.bytes));
        }
    }
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses.
    #[unsafe(super(NSObject))]
    #[name = "SoftBuffer"]
    #[ivars = Owned]
    pub(crate) struct SoftBuffer;

    impl SoftBuffer {
        #[unsafe(method(length))]
        fn length(&self) -> usize {
            self.ivars().region.bytes
        }

        #[unsafe(method(allocatedSize))]
        fn allocated_size(&self) -> usize {
            self.ivars().region.bytes.next_multiple_of(PAGE)
        }

        #[unsafe(method(contents))]
        fn contents(&self) -> *mut c_void {
            self.ivars().region.base.cast()
        }

        #[unsafe(method(gpuAddress))]
        fn gpu_address(&self) -> u64 {
            self.ivars().region.base as u64
        }
    }
);

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses.
    #[unsafe(super(NSObject))]
    #[name = "SoftDevice"]
    #[ivars = Arc<State>]
    pub(crate) struct SoftDevice;

    impl SoftDevice {
        #[unsafe(method_id(name))]
        fn name(&self) -> Retained<NSString> {
            string(&self.ivars().caps.name)
        }

        #[unsafe(method(supportsFamily:))]
        fn supports_family(&self, family: MTLGPUFamily) -> bool {
            let newest = isize::from(self.ivars().caps.family);
            match family.0 {
                apple @ 1001..=1099 => apple - 1000 <= newest,
                // Mac2, Common1 to 3, Metal3; Metal4 from M3 on, whatever tensor operations there are.
                2002 | 3001..=3003 => true,
                5001 => newest >= 7,
                5002 => newest >= 9,
                _ => false,
            }
        }

        #[unsafe(method(recommendedMaxWorkingSetSize))]
        fn working_set(&self) -> u64 {
            self.ivars().caps.working_set
        }

        #[unsafe(method(maxBufferLength))]
        fn max_buffer(&self) -> usize {
            self.ivars().caps.max_buffer as usize
        }

        #[unsafe(method(maxThreadgroupMemoryLength))]
        fn max_threadgroup_memory(&self) -> usize {
            32 << 10
        }

        #[unsafe(method(maxThreadsPerThreadgroup))]
        fn max_threads(&self) -> MTLSize {
            MTLSize { width: 1024, height: 1024, depth: 1024 }
        }

        #[unsafe(method(hasUnifiedMemory))]
        fn unified(&self) -> bool {
            true
        }

        #[unsafe(method(currentAllocatedSize))]
        fn current(&self) -> usize {
            self.ivars().taken()
        }

        #[unsafe(method(newCommandQueue))]
        fn queue(&self) -> *mut SoftQueue {
            new_queue(self.ivars(), 64)
        }

        #[unsafe(method(newCommandQueueWithMaxCommandBufferCount:))]
        fn queue_of(&self, most: usize) -> *mut SoftQueue {
            new_queue(self.ivars(), most)
        }

        #[unsafe(method(newFence))]
        fn fence(&self) -> *mut SoftFence {
            raw(Fence::new(self.ivars()))
        }

        #[unsafe(method(newBufferWithLength:options:))]
        fn buffer(&self, bytes: usize, _options: MTLResourceOptions) -> *mut SoftBuffer {
            let state = self.ivars();
            if !valid_length(state, bytes) {
                return std::ptr::null_mut();
            }
            let new = |region| raw(Owned { region, deallocator: None });
            Region::new(state, bytes).map_or(std::ptr::null_mut(), new)
        }

        #[unsafe(method(newBufferWithBytesNoCopy:length:options:deallocator:))]
        fn buffer_around(
            &self,
            base: *mut c_void,
            bytes: usize,
            _options: MTLResourceOptions,
            deallocator: *mut Block<dyn Fn(NonNull<c_void>, usize)>,
        ) -> *mut SoftBuffer {
            let state = self.ivars();
            if !(base as usize).is_multiple_of(PAGE) || !bytes.is_multiple_of(PAGE) {
                let what = format!("memory at {base:p} of {bytes} bytes; pages have {PAGE}");
                state.violated(Rule::PageAlignment, what);
                return std::ptr::null_mut();
            }
            if base.is_null() || !valid_length(state, bytes) {
                return std::ptr::null_mut();
            }
            // SAFETY: null or a block of this type by contract.
            let deallocator = unsafe { deallocator.as_ref() }.map(|b| Deallocator(b.copy()));
            let new = |region| raw(Owned { region, deallocator });
            Region::around(state, base.cast(), bytes).map_or(std::ptr::null_mut(), new)
        }

        #[unsafe(method(newLibraryWithSource:options:error:))]
        fn library(
            &self,
            source: &NSString,
            options: Option<&MTLCompileOptions>,
            error: *mut *mut NSError,
        ) -> *mut SoftLibrary {
            match compile(self.ivars(), &source.to_string(), options) {
                Ok(library) => raw(library),
                Err(log) => {
                    let log = crate::soft::foundation::error("MTLLibraryErrorDomain", 3, &log);
                    // SAFETY: a place for an error by contract.
                    unsafe { store_error(error, log) };
                    std::ptr::null_mut()
                }
            }
        }

        #[unsafe(method(newComputePipelineStateWithFunction:error:))]
        fn pipeline(&self, function: &SoftFunction, at: *mut *mut NSError) -> *mut SoftPipeline {
            match pipeline(self.ivars(), function) {
                Ok(kernel) => raw(kernel),
                Err(why) => {
                    // SAFETY: a place for an error by contract.
                    unsafe { store_error(at, error("AGXMetal", 3, &why)) };
                    std::ptr::null_mut()
                }
            }
        }

        #[unsafe(method(newResidencySetWithDescriptor:error:))]
        fn set(&self, _descriptor: &NSObject, at: *mut *mut NSError) -> *mut SoftSet {
            let state = self.ivars();
            if state.caps.residency_sets {
                return raw(Residents::new(state));
            }
            let what = format!("{} has no residency sets", state.caps.name);
            let text = state.violated(Rule::ResidencySets, what);
            // SAFETY: a place for an error by contract.
            unsafe { store_error(at, error("MTLResidencySetErrorDomain", 1, &text)) };
            std::ptr::null_mut()
        }
    }
);

fn valid_length(state: &State, bytes: usize) -> bool {
    let most = state.caps.max_buffer;
    let valid = bytes > 0 && bytes as u64 <= most;
    if !valid {
        state.violated(Rule::BufferLength, format!("a buffer of {bytes} bytes, at most {most}"));
    }
    valid
}

/// The device as the host code sees it.
pub(crate) fn device(state: &Arc<State>) -> Retained<ProtocolObject<dyn MTLDevice>> {
    let device: Retained<SoftDevice> = make(state.clone());
    // SAFETY: a protocol object is the object; what the host code may ask a device for beyond the methods above is an abort
    // that names it.
    unsafe { Retained::cast_unchecked(device) }
}
