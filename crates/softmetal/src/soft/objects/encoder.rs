//! Encoders: commands are checked as they are encoded, and run when their command buffer does.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use objc2::rc::Retained;
use objc2::runtime::{NSObject, ProtocolObject};
use objc2::{DefinedClass, define_class};
use objc2_metal::{MTLBarrierScope, MTLResource, MTLSize};

use super::command::{Inner, lock};
use super::device::SoftBuffer;
use super::library::{KernelOf, SoftPipeline};
use super::make;
use super::queue::SoftFence;
use crate::soft::memory::Region;
use crate::soft::rules::Rule;
use crate::soft::state::{Alive, Kind, State};

/// Indices of a kernel's buffers.
const MOST_BUFFERS: usize = 31;
/// Most bytes of one `setBytes`.
const MOST_BYTES: usize = 4096;
/// Bytes of threadgroup memory.
const THREADGROUP_MEMORY: usize = 32 << 10;

/// What is at an index of a dispatch.
#[derive(Clone)]
pub(crate) enum Argument {
    /// A buffer from an offset on.
    Buffer(Arc<Region>, usize),
    /// Bytes, in units that align any type.
    Bytes(Arc<[u128]>, usize),
}

pub(crate) struct Launch {
    pub kernel: Arc<KernelOf>,
    pub arguments: Vec<Option<Argument>>,
    pub groups: [u32; 3],
    pub threads: u32,
}

pub(crate) struct Copy {
    pub from: (Arc<Region>, usize),
    pub to: (Arc<Region>, usize),
    pub bytes: usize,
}

/// A command of an encoder.
pub(crate) enum Command {
    Dispatch(Launch),
    Copy(Copy),
    Barrier,
}

/// What an encoder encoded.
#[derive(Default)]
pub(crate) struct Encoded {
    pub waits: Vec<u64>,
    pub updates: Vec<u64>,
    pub commands: Vec<Command>,
    /// Whether nothing but barriers orders its commands.
    pub concurrent: bool,
}

#[derive(Default)]
struct Recording {
    encoded: Encoded,
    pipeline: Option<Arc<KernelOf>>,
    arguments: Vec<Option<Argument>>,
    ended: bool,
}

pub(crate) struct Encoder {
    buffer: Arc<Mutex<Inner>>,
    recording: Mutex<Recording>,
    alive: Alive,
}

impl Encoder {
    fn new(state: &Arc<State>, buffer: &Arc<Mutex<Inner>>, concurrent: bool) -> Self {
        let encoded = Encoded { concurrent, ..Encoded::default() };
        Self {
            buffer: buffer.clone(),
            recording: Mutex::new(Recording { encoded, ..Recording::default() }),
            alive: Alive::new(state, Kind::Other),
        }
    }

    fn broken(&self, rule: Rule, what: impl Into<String>) {
        let text = self.alive.state.violated(rule, what);
        lock(&self.buffer).invalid.get_or_insert(text);
    }

    /// The recording, unless it has ended.
    fn recording(&self) -> Option<MutexGuard<'_, Recording>> {
        let recording = self.recording.lock().unwrap_or_else(PoisonError::into_inner);
        if recording.ended {
            drop(recording);
            self.broken(Rule::EncoderOrder, "something was encoded after endEncoding");
            return None;
        }
        Some(recording)
    }

    fn end(&self) {
        let Some(mut recording) = self.recording() else { return };
        recording.ended = true;
        let encoded = std::mem::take(&mut recording.encoded);
        let mut buffer = lock(&self.buffer);
        buffer.encoded.push(encoded);
        buffer.open = false;
    }

    fn wait_for(&self, fence: &SoftFence) {
        let Some(mut recording) = self.recording() else { return };
        let id = fence.ivars().id;
        if recording.encoded.updates.contains(&id) {
            self.broken(Rule::FenceOrder, "an encoder waits for a fence that it has updated");
        }
        recording.encoded.waits.push(id);
    }

    fn update(&self, fence: &SoftFence) {
        if let Some(mut recording) = self.recording() {
            recording.encoded.updates.push(fence.ivars().id);
        }
    }

    fn set(&self, index: usize, argument: Option<Argument>) {
        if index >= MOST_BUFFERS {
            self.broken(Rule::BufferIndex, format!("index {index}, the last one is 30"));
            return;
        }
        let Some(mut recording) = self.recording() else { return };
        if recording.arguments.len() <= index {
            recording.arguments.resize(index + 1, None);
        }
        recording.arguments[index] = argument;
    }

    fn set_buffer(&self, region: Arc<Region>, offset: usize, index: usize) {
        if offset >= region.bytes {
            let what = format!("offset {offset} of a buffer of {} bytes", region.bytes);
            self.broken(Rule::BufferOffset, what);
        } else if !offset.is_multiple_of(16) {
            let what = format!("offset {offset}; kernels load 16 bytes at once");
            self.broken(Rule::BufferOffset, what);
        } else {
            self.set(index, Some(Argument::Buffer(region, offset)));
        }
    }

    fn set_offset(&self, offset: usize, index: usize) {
        let Some(recording) = self.recording() else { return };
        let bound = recording.arguments.get(index).cloned().flatten();
        drop(recording);
        match bound {
            Some(Argument::Buffer(region, _)) => self.set_buffer(region, offset, index),
            _ => {
                self.broken(Rule::Binding, format!("an offset at index {index}, without a buffer"))
            }
        }
    }

    fn set_bytes(&self, bytes: *const c_void, length: usize, index: usize) {
        if length == 0 || length > MOST_BYTES || bytes.is_null() {
            self.broken(Rule::BytesLength, format!("{length} bytes, 1 to {MOST_BYTES} are taken"));
            return;
        }
        let mut units = vec![0u128; length.div_ceil(16)];
        // SAFETY: so many bytes are there by contract, and fit.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.cast::<u8>(), units.as_mut_ptr().cast(), length);
        }
        self.set(index, Some(Argument::Bytes(units.into(), length)));
    }

    fn dispatch(&self, groups: MTLSize, threads: MTLSize) {
        let Some(mut recording) = self.recording() else { return };
        let Some(kernel) = recording.pipeline.clone() else {
            self.broken(Rule::NoPipeline, "a dispatch without a pipeline");
            return;
        };
        let most = kernel.signature.max_threads as usize;
        let count = threads.width * threads.height * threads.depth;
        if count == 0 || count > most {
            let what = format!("{} with {count} threads, 1 to {most} are allowed", kernel.name());
            return self.broken(Rule::ThreadgroupSize, what);
        }
        let grid = [groups.width, groups.height, groups.depth];
        if grid.contains(&0) || grid.iter().any(|n| u32::try_from(*n).is_err()) {
            return self.broken(Rule::GridSize, format!("{} with {grid:?} groups", kernel.name()));
        }
        if let Some(why) = unbound(&kernel, &recording.arguments) {
            return self.broken(Rule::Binding, format!("{}: {why}", kernel.name()));
        }
        let arguments = recording.arguments[..kernel.signature.slots as usize].to_vec();
        let groups = grid.map(|n| n as u32);
        let launch = Launch { kernel, arguments, groups, threads: count as u32 };
        recording.encoded.commands.push(Command::Dispatch(launch));
        if !recording.encoded.concurrent {
            recording.encoded.commands.push(Command::Barrier);
        }
    }

    fn copy(&self, from: (&SoftBuffer, usize), to: (&SoftBuffer, usize), bytes: usize) {
        let Some(mut recording) = self.recording() else { return };
        let [from, to] = [from, to].map(|(b, offset)| (b.ivars().region.clone(), offset));
        let inside = |(region, offset): &(Arc<Region>, usize)| {
            offset.checked_add(bytes).is_some_and(|end| end <= region.bytes)
        };
        let whole = [bytes, from.1, to.1].iter().all(|n| n.is_multiple_of(4)) && bytes > 0;
        let apart = from.0.id != to.0.id || from.1.abs_diff(to.1) >= bytes;
        if !(inside(&from) && inside(&to) && whole && apart) {
            let what = format!(
                "{bytes} bytes from {} of {} to {} of {}",
                from.1, from.0.bytes, to.1, to.0.bytes
            );
            return self.broken(Rule::BlitRange, what);
        }
        recording.encoded.commands.push(Command::Copy(Copy { from, to, bytes }));
        recording.encoded.commands.push(Command::Barrier);
    }
}

/// What a dispatch lacks of its kernel's arguments.
fn unbound(kernel: &KernelOf, arguments: &[Option<Argument>]) -> Option<String> {
    let slots = kernel.signature.slots as usize;
    if slots > MOST_BUFFERS {
        return Some(format!("it has {slots} parameters"));
    }
    let missing = (0..slots).find(|i| arguments.get(*i).is_none_or(Option::is_none));
    if let Some(index) = missing {
        return Some(format!("nothing is at index {index}"));
    }
    let need = kernel.signature.args_bytes as usize;
    let there = match arguments[..slots].last().cloned().flatten() {
        Some(Argument::Bytes(_, length)) => length,
        Some(Argument::Buffer(region, offset)) => region.bytes - offset,
        None => 0,
    };
    (need > there).then(|| format!("{there} bytes of arguments, it reads {need}"))
}

impl Drop for Encoder {
    fn drop(&mut self) {
        let ended = self.recording.get_mut().unwrap_or_else(PoisonError::into_inner).ended;
        if !ended {
            self.broken(Rule::EncoderOrder, "an encoder was released without endEncoding");
        }
    }
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses.
    #[unsafe(super(NSObject))]
    #[name = "SoftComputeEncoder"]
    #[ivars = Encoder]
    pub(crate) struct SoftComputeEncoder;

    impl SoftComputeEncoder {
        #[unsafe(method(setComputePipelineState:))]
        fn set_pipeline(&self, pipeline: &SoftPipeline) {
            if let Some(mut recording) = self.ivars().recording() {
                recording.pipeline = Some(pipeline.ivars().kernel.clone());
            }
        }

        #[unsafe(method(setBuffer:offset:atIndex:))]
        fn set_buffer(&self, buffer: Option<&SoftBuffer>, offset: usize, index: usize) {
            match buffer {
                Some(b) => self.ivars().set_buffer(b.ivars().region.clone(), offset, index),
                None => self.ivars().set(index, None),
            }
        }

        #[unsafe(method(setBufferOffset:atIndex:))]
        fn set_offset(&self, offset: usize, index: usize) {
            self.ivars().set_offset(offset, index);
        }

        #[unsafe(method(setBytes:length:atIndex:))]
        fn set_bytes(&self, bytes: *const c_void, length: usize, index: usize) {
            self.ivars().set_bytes(bytes, length, index);
        }

        #[unsafe(method(setThreadgroupMemoryLength:atIndex:))]
        fn set_memory(&self, bytes: usize, index: usize) {
            let fits = bytes <= THREADGROUP_MEMORY && bytes.is_multiple_of(16);
            if !fits || index >= MOST_BUFFERS {
                let what = format!("{bytes} bytes of threadgroup memory at index {index}");
                self.ivars().broken(Rule::ThreadgroupMemory, what);
            }
        }

        #[unsafe(method(dispatchThreadgroups:threadsPerThreadgroup:))]
        fn dispatch(&self, groups: MTLSize, threads: MTLSize) {
            self.ivars().dispatch(groups, threads);
        }

        #[unsafe(method(memoryBarrierWithScope:))]
        fn barrier(&self, scope: MTLBarrierScope) {
            if !scope.contains(MTLBarrierScope::Buffers) {
                let what = format!("scope {:#x} leaves buffers out", scope.0);
                return self.ivars().broken(Rule::BarrierScope, what);
            }
            if let Some(mut recording) = self.ivars().recording() {
                recording.encoded.commands.push(Command::Barrier);
            }
        }

        #[unsafe(method(memoryBarrierWithResources:count:))]
        fn barrier_for(&self, _: *mut *mut ProtocolObject<dyn MTLResource>, _count: usize) {
            // Orders no more than it must on a real device; here all.
            if let Some(mut recording) = self.ivars().recording() {
                recording.encoded.commands.push(Command::Barrier);
            }
        }

        #[unsafe(method(waitForFence:))]
        fn wait_for(&self, fence: &SoftFence) {
            self.ivars().wait_for(fence);
        }

        #[unsafe(method(updateFence:))]
        fn update(&self, fence: &SoftFence) {
            self.ivars().update(fence);
        }

        #[unsafe(method(endEncoding))]
        fn end(&self) {
            self.ivars().end();
        }
    }
);

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses.
    #[unsafe(super(NSObject))]
    #[name = "SoftBlitEncoder"]
    #[ivars = Encoder]
    pub(crate) struct SoftBlitEncoder;

    impl SoftBlitEncoder {
        #[unsafe(method(copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:))]
        fn copy(
            &self,
            from: &SoftBuffer,
            from_offset: usize,
            to: &SoftBuffer,
            to_offset: usize,
            bytes: usize,
        ) {
            self.ivars().copy((from, from_offset), (to, to_offset), bytes);
        }

        #[unsafe(method(waitForFence:))]
        fn wait_for(&self, fence: &SoftFence) {
            self.ivars().wait_for(fence);
        }

        #[unsafe(method(updateFence:))]
        fn update(&self, fence: &SoftFence) {
            self.ivars().update(fence);
        }

        #[unsafe(method(endEncoding))]
        fn end(&self) {
            self.ivars().end();
        }
    }
);

pub(super) fn new_compute(
    state: &Arc<State>,
    buffer: &Arc<Mutex<Inner>>,
    concurrent: bool,
) -> Retained<SoftComputeEncoder> {
    make(Encoder::new(state, buffer, concurrent))
}

pub(super) fn new_blit(
    state: &Arc<State>,
    buffer: &Arc<Mutex<Inner>>,
) -> Retained<SoftBlitEncoder> {
    make(Encoder::new(state, buffer, false))
}
