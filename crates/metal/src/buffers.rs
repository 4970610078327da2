//! Buffers, what keeps them resident, and the way of small writes to memory that the device is using.

use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_metal::{
    MTLBuffer, MTLDevice, MTLResidencySet, MTLResidencySetDescriptor, MTLResourceOptions,
};

use lily_gpu::{Buffer, Placement};

/// A buffer that host and device share. Nothing tracks hazards: the driver's barriers and fence do.
pub(crate) struct Memory {
    pub buffer: Retained<ProtocolObject<dyn MTLBuffer>>,
    pub bytes: u64,
    pub placement: Placement,
}

/// Apple's GPUs map memory in pages of 16 KiB.
const PAGE: u64 = 16 << 10;

impl Memory {
    /// Zeroed memory, whole pages of it where it is more than one; `None` if there is none.
    pub fn new(
        device: &ProtocolObject<dyn MTLDevice>,
        bytes: u64,
        placement: Placement,
    ) -> Option<Self> {
        let whole =
            if bytes > PAGE { bytes.checked_next_multiple_of(PAGE)? } else { bytes.max(16) };
        let options =
            MTLResourceOptions::StorageModeShared | MTLResourceOptions::HazardTrackingModeUntracked;
        // Metal clears a buffer that it makes without bytes.
        let buffer = device.newBufferWithLength_options(usize::try_from(whole).ok()?, options)?;
        Some(Self { buffer, bytes, placement })
    }

    fn at(&self, offset: u64, len: usize) -> *mut u8 {
        let end = offset.checked_add(len as u64);
        assert!(end.is_some_and(|end| end <= self.bytes), "the caller has checked the range");
        // SAFETY: the range lies inside the buffer's memory, which Metal keeps mapped as long as the buffer lives.
        unsafe { self.buffer.contents().as_ptr().cast::<u8>().add(offset as usize) }
    }

    /// Copies bytes in.
    ///
    /// # Safety
    /// The device does not touch the range meanwhile.
    pub unsafe fn fill(&self, offset: u64, bytes: &[u8]) {
        let to = self.at(offset, bytes.len());
        // SAFETY: the range lies inside the buffer; the caller keeps the device away; `bytes` is memory of this program's.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Copies bytes out.
    ///
    /// # Safety
    /// The device does not write the range meanwhile.
    pub unsafe fn fetch(&self, offset: u64, bytes: &mut [u8]) {
        let from = self.at(offset, bytes.len());
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
    }
}

/// The set that keeps all buffers resident while the driver lives.
pub(crate) struct Residency {
    pub set: Retained<ProtocolObject<dyn MTLResidencySet>>,
    changed: bool,
}

impl Residency {
    /// An empty set; `None` where the system makes none: memory is then made resident command buffer by command
    /// buffer.
    pub fn new(device: &ProtocolObject<dyn MTLDevice>) -> Option<Self> {
        let descriptor = MTLResidencySetDescriptor::new();
        // SAFETY: any number is a capacity to begin with.
        unsafe { descriptor.setInitialCapacity(64) };
        let set = device.newResidencySetWithDescriptor_error(&descriptor).ok()?;
        Some(Self { set, changed: false })
    }

    /// Adds a buffer.
    pub fn add(&mut self, memory: &Memory) {
        self.set.addAllocation(ProtocolObject::from_ref(&*memory.buffer));
        self.changed = true;
    }

    /// Takes a buffer out, at once: until the set is committed without it, its memory stays with the GPU.
    pub fn remove(&mut self, memory: &Memory) {
        self.set.removeAllocation(ProtocolObject::from_ref(&*memory.buffer));
        self.set.commit();
    }

    /// Makes the changes count. A command buffer's residency is fixed when it is committed: called before.
    pub fn settle(&mut self) {
        if std::mem::take(&mut self.changed) {
            self.set.commit();
            self.set.requestResidency();
        }
    }
}

impl Drop for Residency {
    fn drop(&mut self) {
        // Command buffers that have ended, but are not gone yet, keep the queue, and with it the set: not the memory, too.
        autoreleasepool(|_| {
            self.set.removeAllAllocations();
            self.set.commit();
            self.set.endResidency();
        });
    }
}

/// A write that waits for its turn among command buffers: its bytes lie in the staging buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pending {
    pub from: u64,
    pub to: Buffer,
    pub at: u64,
    pub bytes: u64,
}

/// Bytes of the staging buffer.
const STAGING: u64 = 4 << 20;

/// A buffer that small writes pass through: the host fills it at once, the device copies in its turn.
pub(crate) struct Staging {
    pub memory: Memory,
    used: u64,
    pub pending: Vec<Pending>,
}

impl Staging {
    pub fn new(device: &ProtocolObject<dyn MTLDevice>) -> Option<Self> {
        let memory = Memory::new(device, STAGING, Placement::Shared)?;
        Some(Self { memory, used: 0, pending: Vec::new() })
    }

    /// Bytes of it.
    pub fn bytes(&self) -> u64 {
        STAGING
    }

    /// Takes a write, unless it is too large or of a kind that the device does not copy.
    pub fn take(&mut self, to: Buffer, at: u64, bytes: &[u8]) -> bool {
        let len = bytes.len() as u64;
        // The device copies whole words.
        if !at.is_multiple_of(4) || !len.is_multiple_of(4) || len > STAGING - self.used {
            return false;
        }
        // SAFETY: this part was not handed out since the device was last idle.
        unsafe { self.memory.fill(self.used, bytes) };
        self.pending.push(Pending { from: self.used, to, at, bytes: len });
        self.used += len;
        true
    }

    /// All of it is free again: the device is idle and nothing is pending.
    pub fn reset(&mut self) {
        debug_assert!(self.pending.is_empty());
        self.used = 0;
    }
}
