//! Command buffers: a part of a list each, in one concurrent encoder with barriers where stages meet.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;

use block2::RcBlock;
use lily_gpu::{Buffer, CommandList, Dispatch};
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_metal::{
    MTLBarrierScope, MTLBlitCommandEncoder, MTLCommandBuffer, MTLCommandBufferStatus,
    MTLCommandEncoder, MTLCommandQueue, MTLComputeCommandEncoder, MTLDevice, MTLDispatchType,
    MTLFence, MTLSize,
};

use crate::buffers::{Memory, Pending, Residency, Staging};
use crate::completion::{Completions, Failure, Outcome};
use crate::estimate::Piece;
use crate::pipelines::{Kernel, text_of};

/// Command buffers that may be under way: Metal lets a thread that asks for more wait, for as long as it takes.
pub(crate) const MOST_BUFFERS: usize = 256;

/// Most bytes that a command buffer takes as arguments of one dispatch.
pub(crate) const MOST_ARGUMENTS: usize = 4096;

/// Buffers that a kernel can be given.
pub(crate) const MOST_BINDINGS: usize = 31;

/// A queue, and the fence that keeps its encoders apart: nothing else does, as no hazard is tracked.
pub(crate) struct Queue {
    queue: Retained<ProtocolObject<dyn MTLCommandQueue>>,
    fence: Retained<ProtocolObject<dyn MTLFence>>,
    /// Whether an encoder has updated the fence.
    fenced: bool,
}

/// What the commands of a part need.
pub(crate) struct Part<'a> {
    pub number: u64,
    pub list: &'a CommandList,
    /// Its dispatches, or pieces of them.
    pub pieces: &'a [Piece],
    pub kernels: &'a [Kernel],
    pub buffers: &'a HashMap<Buffer, Memory>,
    pub staging: &'a Staging,
    /// Writes that come before it.
    pub writes: &'a [Pending],
}

impl Queue {
    /// A new queue that keeps a set resident; `None` if the device makes none.
    pub fn new(
        device: &ProtocolObject<dyn MTLDevice>,
        residency: Option<&Residency>,
    ) -> Option<Self> {
        let queue = device.newCommandQueueWithMaxCommandBufferCount(MOST_BUFFERS)?;
        let fence = device.newFence()?;
        if let Some(residency) = residency {
            queue.addResidencySet(&residency.set);
        }
        Some(Self { queue, fence, fenced: false })
    }

    /// Keeps queue and fence for ever: the device may still be at work with them.
    pub fn abandon(&self) {
        std::mem::forget((self.queue.clone(), self.fence.clone()));
    }

    /// Encodes and commits a part; `completions` is told when it has ended. Does not wait.
    pub fn commit(
        &mut self,
        part: &Part,
        completions: &Arc<Completions>,
    ) -> Result<(), &'static str> {
        autoreleasepool(|_| {
            // What the commands use outlives them: buffers are given back when the device is idle, pipelines with the driver.
            let buffer = self
                .queue
                .commandBufferWithUnretainedReferences()
                .ok_or("Metal made no command buffer")?;
            if !part.writes.is_empty() {
                self.copy(&buffer, part)?;
            }
            self.encode(&buffer, part)?;
            let (number, completions) = (part.number, completions.clone());
            let done =
                RcBlock::new(move |buffer: NonNull<ProtocolObject<dyn MTLCommandBuffer>>| {
                    // SAFETY: Metal hands its completion handlers the command buffer, alive.
                    completions.end(number, outcome(unsafe { buffer.as_ref() }));
                });
            // SAFETY: Metal copies the block; what it captures may be used on any thread.
            unsafe { buffer.addCompletedHandler(RcBlock::as_ptr(&done)) };
            buffer.commit();
            Ok(())
        })
    }

    /// Copies staged writes to where they belong.
    fn copy(
        &mut self,
        buffer: &ProtocolObject<dyn MTLCommandBuffer>,
        part: &Part,
    ) -> Result<(), &'static str> {
        let encoder = buffer.blitCommandEncoder().ok_or("Metal made no blit encoder")?;
        if self.fenced {
            encoder.waitForFence(&self.fence);
        }
        for write in part.writes {
            // A buffer that was given back since takes its writes with it.
            let Some(to) = part.buffers.get(&write.to) else { continue };
            // SAFETY: both ranges lie inside their buffers, which the driver has checked, and count whole words.
            unsafe {
                encoder.copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size(
                    &part.staging.memory.buffer,
                    write.from as usize,
                    &to.buffer,
                    write.at as usize,
                    write.bytes as usize,
                );
            }
        }
        encoder.updateFence(&self.fence);
        self.fenced = true;
        encoder.endEncoding();
        Ok(())
    }

    fn encode(
        &mut self,
        buffer: &ProtocolObject<dyn MTLCommandBuffer>,
        part: &Part,
    ) -> Result<(), &'static str> {
        let encoder = buffer
            .computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent)
            .ok_or("Metal made no compute encoder")?;
        if self.fenced {
            encoder.waitForFence(&self.fence);
        }
        let mut bound = Bound::default();
        let mut before = None;
        for piece in part.pieces {
            let i = piece.dispatch;
            // Pieces of one dispatch write apart.
            let begins = before.replace(i).is_some_and(|last| last != i);
            if begins && part.list.stages.binary_search(&i).is_ok() {
                encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
            }
            let whole = &part.list.dispatches[i];
            let kernel = &part.kernels[part.list.pipelines[i].0 as usize];
            match piece.groups.len() as u32 == whole.most_parts() {
                true => bound.launch(&encoder, whole, kernel, part.buffers),
                false => {
                    let cut = whole.part(piece.groups.clone());
                    bound.launch(&encoder, &cut, kernel, part.buffers);
                }
            }
        }
        encoder.updateFence(&self.fence);
        self.fenced = true;
        encoder.endEncoding();
        Ok(())
    }
}

/// What an encoder is set to, so that only changes are sent.
#[derive(Default)]
struct Bound {
    kernel: Option<*const Kernel>,
    buffers: [Option<(Buffer, u64)>; MOST_BINDINGS],
}

impl Bound {
    /// Encodes a dispatch that the driver has checked.
    fn launch(
        &mut self,
        encoder: &ProtocolObject<dyn MTLComputeCommandEncoder>,
        dispatch: &Dispatch,
        kernel: &Kernel,
        buffers: &HashMap<Buffer, Memory>,
    ) {
        if self.kernel.replace(kernel) != Some(std::ptr::from_ref(kernel)) {
            encoder.setComputePipelineState(&kernel.state);
        }
        for (index, binding) in dispatch.bindings.iter().enumerate() {
            let before = self.buffers[index].replace((binding.buffer, binding.offset));
            let offset = binding.offset as usize;
            match before {
                Some((buffer, at)) if buffer == binding.buffer => {
                    if at != binding.offset {
                        // SAFETY: the index holds this buffer; the offset lies inside it.
                        unsafe { encoder.setBufferOffset_atIndex(offset, index) };
                    }
                }
                _ => {
                    let memory = buffers.get(&binding.buffer).map(|m| &*m.buffer);
                    // SAFETY: the buffer lives until the device is idle; the offset lies inside it; kernels and encoders
                    // agree on indices and sizes, which the emulator checks for each dispatch of each test.
                    unsafe { encoder.setBuffer_offset_atIndex(memory, offset, index) };
                }
            }
        }
        let at = dispatch.bindings.len();
        self.buffers[at] = None;
        if let Some(bytes) = dispatch.args.first() {
            let bytes = NonNull::from(bytes).cast();
            // SAFETY: Metal copies the bytes during the call; they are at least one and no more than it takes.
            unsafe { encoder.setBytes_length_atIndex(bytes, dispatch.args.len(), at) };
        }
        let [width, height, depth] = dispatch.groups.map(|n| n as usize);
        encoder.dispatchThreadgroups_threadsPerThreadgroup(
            MTLSize { width, height, depth },
            MTLSize { width: dispatch.threads as usize, height: 1, depth: 1 },
        );
    }
}

/// How a command buffer ended.
fn outcome(buffer: &ProtocolObject<dyn MTLCommandBuffer>) -> Outcome {
    let failed = buffer.status() == MTLCommandBufferStatus::Error;
    let failure = failed.then(|| match buffer.error() {
        Some(e) => Failure { code: e.code() as i64, text: text_of(&e) },
        None => Failure { code: 0, text: "Metal gave no reason".into() },
    });
    Outcome { start: buffer.GPUStartTime(), end: buffer.GPUEndTime(), failure }
}
