//! Each rule, broken once, is found under its name; the same commands without the mistake break none.
#![cfg(all(metal_soft, not(target_os = "macos")))]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use block2::RcBlock;
use lily_softmetal::{Caps, Counts, Rule, Soft, metal_text};
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSString;
use objc2_metal::*;

type Device = Retained<ProtocolObject<dyn MTLDevice>>;
type Buffer = Retained<ProtocolObject<dyn MTLBuffer>>;
type Pipeline = Retained<ProtocolObject<dyn MTLComputePipelineState>>;
type Encoder = Retained<ProtocolObject<dyn MTLComputeCommandEncoder>>;
type CommandBuffer = Retained<ProtocolObject<dyn MTLCommandBuffer>>;

const OPTIONS: MTLResourceOptions = MTLResourceOptions(
    MTLResourceOptions::StorageModeShared.0 | MTLResourceOptions::HazardTrackingModeUntracked.0,
);

/// `add` is right if it runs alone; the others break a rule.
const KERNELS: &str = "
struct AddArgs { uint by; uint count; };
KERNEL(add, 64, OUT(0, uint, y), ARGS(1, AddArgs, p))
{
  const uint i = k_group.x * 64 + k_thread.x;
  if (i < p.count) y[i] = y[i] * 3u + p.by;
}
KERNEL(split, 64, OUT(0, uint, y), ARGS(1, AddArgs, p))
{
  if (k_thread.x == 0) { tg_barrier(); }
  y[k_thread.x] = p.by;
}
KERNEL(beside, 64, OUT(0, uint, y), IN(1, uint, x), ARGS(2, AddArgs, p))
{
  y[k_thread.x] = *(x + k_thread.x + p.by - p.count);
}
KERNEL(much, 64, OUT(0, uint, y), ARGS(1, AddArgs, p))
{
  SHARED(uint, a, 8000);
  SHARED(uint, b, 8000);
  a[k_thread.x] = p.by;
  b[k_thread.x] = p.by;
  tg_barrier();
  y[k_thread.x] = a[0] + b[0];
}
";

fn options(version: Option<MTLLanguageVersion>, exact: bool) -> Retained<MTLCompileOptions> {
    let options = MTLCompileOptions::new();
    if let Some(version) = version {
        options.setLanguageVersion(version);
    }
    if exact {
        options.setMathMode(MTLMathMode::Safe);
        options.setMathFloatingPointFunctions(MTLMathFloatingPointFunctions::Precise);
    }
    options
}

/// A device with a queue, a resident buffer of 64 words, and the kernels.
struct Bench {
    queue: Retained<ProtocolObject<dyn MTLCommandQueue>>,
    set: Retained<ProtocolObject<dyn MTLResidencySet>>,
    buffer: Buffer,
    library: Retained<ProtocolObject<dyn MTLLibrary>>,
    device: Device,
    soft: Arc<Soft>,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.set.removeAllAllocations();
        self.set.commit();
    }
}

impl Bench {
    fn new(caps: Caps) -> Self {
        let soft = Arc::new(Soft::new(caps));
        let device = soft.device();
        let queue = device.newCommandQueueWithMaxCommandBufferCount(8).expect("a queue");
        let set = device
            .newResidencySetWithDescriptor_error(&MTLResidencySetDescriptor::new())
            .expect("a set");
        let source = NSString::from_str(&metal_text(KERNELS));
        let options = options(Some(MTLLanguageVersion::Version3_1), true);
        let library = device
            .newLibraryWithSource_options_error(&source, Some(&options))
            .unwrap_or_else(|e| panic!("{e}"));
        let buffer = device.newBufferWithLength_options(256, OPTIONS).expect("a buffer");
        set.addAllocation(ProtocolObject::from_ref(&*buffer));
        set.commit();
        set.requestResidency();
        queue.addResidencySet(&set);
        Self { queue, set, buffer, library, device, soft }
    }

    fn pipeline(&self, name: &str) -> Pipeline {
        let function = self.library.newFunctionWithName(&NSString::from_str(name)).expect(name);
        self.device.newComputePipelineStateWithFunction_error(&function).expect("a pipeline")
    }

    /// Encodes with `f`, commits, and waits: the error's text, if it fails.
    fn run(&self, f: impl FnOnce(&CommandBuffer)) -> Option<String> {
        autoreleasepool(|_| {
            let buffer = self.queue.commandBufferWithUnretainedReferences().expect("a buffer");
            f(&buffer);
            self.finish(buffer)
        })
    }

    fn finish(&self, buffer: CommandBuffer) -> Option<String> {
        let (send, receive) = channel();
        let done = RcBlock::new(move |b: NonNull<ProtocolObject<dyn MTLCommandBuffer>>| {
            // SAFETY: handlers are given a command buffer.
            let b = unsafe { b.as_ref() };
            let failed = b.status() == MTLCommandBufferStatus::Error;
            let error = failed.then(|| b.error().expect("an error").localizedDescription());
            send.send(error.map(|e| e.to_string())).expect("somebody waits");
        });
        // SAFETY: a block of this type, which is copied.
        unsafe { buffer.addCompletedHandler(RcBlock::as_ptr(&done)) };
        buffer.commit();
        receive.recv_timeout(Duration::from_secs(60)).expect("it ends")
    }

    /// One encoder with `add` and everything it needs; `f` adds to it.
    fn encode(&self, f: impl FnOnce(&Encoder)) -> Option<String> {
        let pipeline = self.pipeline("add");
        let error = self.run(|buffer| {
            let encoder = concurrent(buffer);
            encoder.setComputePipelineState(&pipeline);
            self.bind(&encoder);
            f(&encoder);
            encoder.endEncoding();
        });
        drop(pipeline);
        error
    }

    fn bind(&self, encoder: &Encoder) {
        bind(encoder, Some(&self.buffer), 0, 0);
        bytes(encoder, &[1u32, 64], 1);
    }

    /// Releases a buffer as a set wants it.
    fn forget(&self, buffer: Buffer) {
        self.set.removeAllocation(ProtocolObject::from_ref(&*buffer));
        self.set.commit();
    }

    fn words(&self) -> Vec<u32> {
        // SAFETY: 64 words, which no command touches any more.
        unsafe { std::slice::from_raw_parts(self.buffer.contents().as_ptr().cast::<u32>(), 64) }
            .to_vec()
    }

    /// The rule was broken, and the command buffer failed of it.
    #[track_caller]
    fn broke(&self, error: Option<String>, rule: Rule) {
        self.soft.expect(rule);
        let error = error.expect("a command buffer that breaks a rule fails");
        assert!(error.contains(&format!("{rule:?}")), "{error}");
    }
}

fn concurrent(buffer: &CommandBuffer) -> Encoder {
    buffer.computeCommandEncoderWithDispatchType(MTLDispatchType::Concurrent).expect("an encoder")
}

fn bytes(encoder: &Encoder, words: &[u32], index: usize) {
    // SAFETY: so many bytes are there.
    unsafe {
        let at = NonNull::from(&words[0]).cast();
        encoder.setBytes_length_atIndex(at, size_of_val(words), index);
    }
}

// Mistakes among these are made on purpose: the software device finds them before anything is touched.
fn bind(encoder: &Encoder, buffer: Option<&Buffer>, offset: usize, index: usize) {
    // SAFETY: see above.
    unsafe { encoder.setBuffer_offset_atIndex(buffer.map(|b| &**b), offset, index) };
}

fn move_to(encoder: &Encoder, offset: usize, index: usize) {
    // SAFETY: see above.
    unsafe { encoder.setBufferOffset_atIndex(offset, index) };
}

fn memory(encoder: &Encoder, bytes: usize) {
    // SAFETY: see above.
    unsafe { encoder.setThreadgroupMemoryLength_atIndex(bytes, 0) };
}

type Mistake<'a, T> = &'a dyn Fn(&T);

fn size(width: usize) -> MTLSize {
    MTLSize { width, height: 1, depth: 1 }
}

fn launch(encoder: &Encoder) {
    encoder.dispatchThreadgroups_threadsPerThreadgroup(size(1), size(64));
}

#[test]
fn commands_run_and_nothing_stays() {
    let soft = {
        let b = Bench::new(Caps::default());
        let error = b.encode(|e| {
            launch(e);
            e.memoryBarrierWithScope(MTLBarrierScope::Buffers);
            launch(e);
        });
        assert_eq!(error, None);
        assert_eq!(b.words(), [4; 64]);
        let fence = b.device.newFence().expect("a fence");
        let other = b.device.newBufferWithLength_options(256, OPTIONS).expect("a buffer");
        b.set.addAllocation(ProtocolObject::from_ref(&*other));
        b.set.commit();
        let error = b.run(|buffer| {
            let blit = buffer.blitCommandEncoder().expect("an encoder");
            // SAFETY: the ranges lie inside the buffers.
            unsafe {
                blit.copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size(
                    &b.buffer, 0, &other, 128, 64,
                );
            }
            blit.updateFence(&fence);
            blit.endEncoding();
        });
        assert_eq!(error, None);
        // SAFETY: 64 words, at rest.
        let words = unsafe {
            std::slice::from_raw_parts(other.contents().as_ptr().cast::<u32>(), 64).to_vec()
        };
        assert_eq!((words[31], words[32], words[47], words[48]), (0, 4, 4, 0));
        b.forget(other);
        b.soft.clone()
    };
    soft.wait_idle();
    let Counts { buffers, bytes, command_buffers, others, .. } = soft.counts();
    assert_eq!((buffers, bytes, command_buffers, others), (0, 0, 0, 0));
}

#[test]
fn encoder_arguments() {
    let b = Bench::new(Caps::default());
    let limits: [(Rule, Mistake<Encoder>); 12] = [
        (Rule::BufferIndex, &|e| bind(e, Some(&b.buffer), 0, 31)),
        (Rule::BufferOffset, &|e| bind(e, Some(&b.buffer), 256, 0)),
        (Rule::BufferOffset, &|e| bind(e, Some(&b.buffer), 8, 0)),
        (Rule::BufferOffset, &|e| move_to(e, 512, 0)),
        (Rule::Binding, &|e| move_to(e, 0, 7)),
        (Rule::BytesLength, &|e| bytes(e, &[0; 1025], 1)),
        (Rule::ThreadgroupMemory, &|e| memory(e, 24)),
        (Rule::ThreadgroupMemory, &|e| memory(e, 32784)),
        (Rule::ThreadgroupSize, &|e| {
            e.dispatchThreadgroups_threadsPerThreadgroup(size(1), size(96));
        }),
        (Rule::GridSize, &|e| e.dispatchThreadgroups_threadsPerThreadgroup(size(0), size(64))),
        (Rule::Binding, &|e| {
            bytes(e, &[1], 1);
            launch(e);
        }),
        (Rule::Binding, &|e| {
            bind(e, None, 0, 0);
            launch(e);
        }),
    ];
    for (rule, mistake) in limits {
        b.broke(b.encode(mistake), rule);
    }
    let scope = b.encode(|e| e.memoryBarrierWithScope(MTLBarrierScope::Textures));
    b.broke(scope, Rule::BarrierScope);
    let none = b.run(|buffer| {
        let encoder = concurrent(buffer);
        launch(&encoder);
        encoder.endEncoding();
    });
    b.broke(none, Rule::NoPipeline);
    assert_eq!(b.encode(|e| bytes(e, &[0; 1024], 1)), None);
    assert_eq!(b.words(), [0; 64], "nothing of it ran");
}

#[test]
fn encoders_and_commits_in_order() {
    let b = Bench::new(Caps::default());
    let fence = b.device.newFence().expect("a fence");
    let pipeline = b.pipeline("add");
    let mistakes: [(Rule, Mistake<CommandBuffer>); 4] = [
        (Rule::EncoderOrder, &|buffer| {
            let encoder = concurrent(buffer);
            encoder.endEncoding();
            encoder.setComputePipelineState(&pipeline);
        }),
        (Rule::EncoderOrder, &|buffer| {
            let (one, two) = (concurrent(buffer), concurrent(buffer));
            one.endEncoding();
            two.endEncoding();
        }),
        (Rule::FenceOrder, &|buffer| {
            let encoder = concurrent(buffer);
            encoder.updateFence(&fence);
            encoder.waitForFence(&fence);
            encoder.endEncoding();
        }),
        (Rule::BlitRange, &|buffer| {
            let blit = buffer.blitCommandEncoder().expect("an encoder");
            // SAFETY: a mistake on purpose, which is found before anything is copied.
            unsafe {
                blit.copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size(
                    &b.buffer, 0, &b.buffer, 32, 64,
                );
            }
            blit.endEncoding();
        }),
    ];
    for (rule, mistake) in mistakes {
        b.broke(b.run(mistake), rule);
    }
    autoreleasepool(|_| {
        let buffer = b.queue.commandBufferWithUnretainedReferences().expect("a buffer");
        let encoder = concurrent(&buffer);
        b.broke(b.finish(buffer), Rule::CommitOrder);
        encoder.endEncoding();
    });
    autoreleasepool(|_| {
        let buffer = b.queue.commandBufferWithUnretainedReferences().expect("a buffer");
        assert_eq!(b.finish(buffer.clone()), None);
        buffer.commit();
        b.soft.expect(Rule::CommitOrder);
    });
    autoreleasepool(|_| {
        let buffer = b.queue.commandBufferWithUnretainedReferences().expect("a buffer");
        concurrent(&buffer);
    });
    b.soft.expect(Rule::EncoderOrder);
}

#[test]
fn buffers_and_residency() {
    let b = Bench::new(Caps { max_buffer: 1 << 20, memory: 1 << 20, ..Caps::default() });
    assert!(b.device.newBufferWithLength_options(0, OPTIONS).is_none());
    b.soft.expect(Rule::BufferLength);
    assert!(b.device.newBufferWithLength_options((1 << 20) + 1, OPTIONS).is_none());
    b.soft.expect(Rule::BufferLength);
    assert!(b.device.newBufferWithLength_options(1 << 20, OPTIONS).is_none(), "no memory left");

    let layout = std::alloc::Layout::from_size_align(4 * 16384, 16384).expect("a layout");
    // SAFETY: not empty.
    let pages = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).expect("memory");
    for (offset, length, fits) in [(0, 32768, true), (4096, 16384, false), (0, 4096, false)] {
        // SAFETY: inside the memory above, which outlives the buffer.
        let buffer = unsafe {
            let at = pages.add(offset).cast();
            b.device.newBufferWithBytesNoCopy_length_options_deallocator(at, length, OPTIONS, None)
        };
        assert_eq!(buffer.is_some(), fits);
        if !fits {
            b.soft.expect(Rule::PageAlignment);
        }
    }
    // SAFETY: the memory above; no buffer is left.
    unsafe { std::alloc::dealloc(pages.as_ptr(), layout) };

    let stranger = b.device.newBufferWithLength_options(256, OPTIONS).expect("a buffer");
    let use_it = || {
        b.encode(|e| {
            bind(e, Some(&stranger), 0, 0);
            launch(e);
        })
    };
    b.broke(use_it(), Rule::Residency);
    b.set.addAllocation(ProtocolObject::from_ref(&*stranger));
    b.broke(use_it(), Rule::Residency);
    b.set.commit();
    assert_eq!(use_it(), None);
    b.set.removeAllocation(ProtocolObject::from_ref(&*stranger));
    b.set.commit();
    b.broke(use_it(), Rule::Residency);
    for _ in 0..31 {
        b.queue.addResidencySet(&b.set);
    }
    b.queue.addResidencySet(&b.set);
    b.soft.expect(Rule::ResidencySets);

    let virtual_one = Soft::new(Caps::paravirtual());
    let descriptor = MTLResidencySetDescriptor::new();
    assert!(virtual_one.device().newResidencySetWithDescriptor_error(&descriptor).is_err());
    virtual_one.expect(Rule::ResidencySets);
}

/// Without retained references: what a command buffer uses is released before it ran, and while it waits.
#[test]
fn released_too_early() {
    let b = Bench::new(Caps::default());
    let pipeline = b.pipeline("add");
    let new = || {
        let buffer = b.device.newBufferWithLength_options(256, OPTIONS).expect("a buffer");
        b.set.addAllocation(ProtocolObject::from_ref(&*buffer));
        b.set.commit();
        buffer
    };
    let encoded = |target: &Buffer, pipeline: &Pipeline| {
        let buffer = b.queue.commandBufferWithUnretainedReferences().expect("a buffer");
        let encoder = concurrent(&buffer);
        encoder.setComputePipelineState(pipeline);
        b.bind(&encoder);
        // SAFETY: valid index and offset.
        unsafe { encoder.setBuffer_offset_atIndex(Some(target), 0, 0) };
        launch(&encoder);
        encoder.endEncoding();
        buffer
    };
    autoreleasepool(|_| {
        // Nothing uses it, but the set still keeps its memory.
        drop(new());
        b.soft.expect(Rule::StillResident);
        let target = new();
        b.set.removeAllocation(ProtocolObject::from_ref(&*target));
        drop(target);
        b.soft.expect(Rule::StillResident);
        b.forget(new());
        assert!(b.soft.violations().is_empty());
        // Gone before the commit, which the set does not know of.
        let target = new();
        let buffer = encoded(&target, &pipeline);
        drop(target);
        b.soft.expect(Rule::StillResident);
        b.broke(b.finish(buffer), Rule::Released);
        let buffer = encoded(&b.buffer, &b.pipeline("add"));
        b.broke(b.finish(buffer), Rule::Released);
        // Committed, but held until the next one is: still not over.
        let target = new();
        let buffer = encoded(&target, &pipeline);
        let number = b.soft.committed();
        b.soft.hold(number..number + 1);
        buffer.commit();
        b.forget(target);
        let next = b.queue.commandBufferWithUnretainedReferences().expect("a buffer");
        assert_eq!(b.finish(next), None);
        b.soft.expect(Rule::Released);
        assert_eq!(buffer.status(), MTLCommandBufferStatus::Error);
    });
}

#[test]
fn libraries() {
    let soft = Soft::new(Caps::default());
    let device = soft.device();
    let compile = |source: &str, options: &MTLCompileOptions| {
        let source = NSString::from_str(source);
        let made = device.newLibraryWithSource_options_error(&source, Some(options));
        made.map(|_| ()).map_err(|e| e.localizedDescription().to_string())
    };
    let text = metal_text(KERNELS);
    let v3 = Some(MTLLanguageVersion::Version3_1);
    assert!(compile(&text, &options(None, true)).is_err());
    soft.expect(Rule::LanguageVersion);
    assert!(compile(&text, &options(v3, false)).is_err());
    soft.expect(Rule::FastMath);
    let tensors = format!("#define K_TENSOR 1\n{text}");
    assert!(compile(&tensors, &options(v3, true)).is_err());
    soft.expect(Rule::LanguageVersion);
    let swapped = text.replace("ARGS(2, AddArgs, p)", "ARGS(3, AddArgs, p)");
    assert!(compile(&swapped, &options(v3, true)).is_err());
    soft.expect(Rule::KernelIndices);
    // Likewise where they stand in a define of their own.
    let list = "OUT(0, uint, y), IN(1, uint, x), ARGS(2, AddArgs, p)";
    let apart = |list: &str| {
        let define = format!("#define BESIDE_OPERANDS {list}\nKERNEL(beside, 64, BESIDE_OPERANDS)");
        text.replace(
            "KERNEL(beside, 64, OUT(0, uint, y), IN(1, uint, x), ARGS(2, AddArgs, p))",
            &define,
        )
    };
    assert_ne!(apart(list), text);
    compile(&apart(list), &options(v3, true)).expect("it compiles");
    assert!(compile(&apart(&list.replace("ARGS(2", "ARGS(3")), &options(v3, true)).is_err());
    soft.expect(Rule::KernelIndices);
    // A mistake in the text is the compiler's log, no violation.
    let log = compile(&text.replace("y[i] * 3u", "z[i]"), &options(v3, true)).expect_err("no z");
    assert!(log.contains('z'), "{log}");
    compile(&text, &options(v3, true)).expect("it compiles");
    compile(&tensors, &options(Some(MTLLanguageVersion::Version4_0), true)).expect("it compiles");
    let old = Soft::new(Caps::without_tensors());
    let options = options(Some(MTLLanguageVersion::Version4_0), true);
    let source = NSString::from_str(&tensors);
    assert!(old.device().newLibraryWithSource_options_error(&source, Some(&options)).is_err());
}

/// What kernels do wrong.
#[test]
fn kernels() {
    let b = Bench::new(Caps::default());
    for name in ["split", "much"] {
        let pipeline = b.pipeline(name);
        let error = b.encode(|e| {
            e.setComputePipelineState(&pipeline);
            launch(e);
        });
        b.broke(error, Rule::Kernel);
    }
}

/// Dispatches that nothing orders run in any order; with accesses noted they are found whatever the order was.
#[test]
fn unordered_dispatches() {
    let by = |e: &Encoder, n: u32| {
        bytes(e, &[n, 64], 1);
        launch(e);
    };
    let results: std::collections::HashSet<Vec<u32>> = (1..9)
        .map(|seed| {
            let b = Bench::new(Caps { seed, ..Caps::default() });
            let both = b.encode(|e| {
                by(e, 1);
                by(e, 5);
            });
            assert_eq!(both, None);
            b.words()
        })
        .collect();
    assert_eq!(results.len(), 2, "both orders");

    let b = Bench::new(Caps { tracked: true, ..Caps::default() });
    let race = b.encode(|e| {
        by(e, 1);
        by(e, 5);
    });
    b.broke(race, Rule::Unordered);
    // Command buffers are not ordered either, but by a fence.
    let fence = b.device.newFence().expect("a fence");
    let fenced = |wait: bool, update: bool| {
        b.encode(|e| {
            if wait {
                e.waitForFence(&fence);
            }
            by(e, 1);
            e.memoryBarrierWithScope(MTLBarrierScope::Buffers);
            by(e, 5);
            if update {
                e.updateFence(&fence);
            }
        })
    };
    let b2 = fenced(false, true);
    b.broke(b2, Rule::Unordered);
    assert_eq!(fenced(true, true), None, "the fence was updated by the encoder before");
    assert_eq!(fenced(true, false), None);
    b.broke(fenced(true, false), Rule::Unordered);
}

#[test]
fn accesses_beside_the_bindings() {
    let b = Bench::new(Caps { tracked: true, ..Caps::default() });
    let other = b.device.newBufferWithLength_options(256, OPTIONS).expect("a buffer");
    b.set.addAllocation(ProtocolObject::from_ref(&*other));
    b.set.commit();
    let pipeline = b.pipeline("beside");
    let fence = b.device.newFence().expect("a fence");
    let run = |after: u32, before: u32, offset: usize| {
        b.encode(|e| {
            e.waitForFence(&fence);
            e.setComputePipelineState(&pipeline);
            bind(e, Some(&other), offset, 1);
            bytes(e, &[after, before], 2);
            launch(e);
            e.updateFence(&fence);
        })
    };
    b.broke(run(1, 0, 0), Rule::OutOfBounds);
    b.broke(run(0, 1, 16), Rule::OutOfBounds);
    assert_eq!(run(0, 0, 0), None);
    b.forget(other);
}
