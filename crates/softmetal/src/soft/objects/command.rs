//! Command buffers.

use std::collections::HashSet;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use block2::Block;
use objc2::rc::Retained;
use objc2::runtime::{NSObject, ProtocolObject};
use objc2::{DefinedClass, Message, define_class};
use objc2_foundation::NSError;
use objc2_metal::{MTLCommandBuffer, MTLCommandBufferStatus, MTLDispatchType};

use super::encoder::{
    Argument, Command, Encoded, SoftBlitEncoder, SoftComputeEncoder, new_blit, new_compute,
};
use super::queue::Shared;
use crate::soft::execute;
use crate::soft::foundation::error;
use crate::soft::rules::Rule;
use crate::soft::runtime::{Handler, with_pool};
use crate::soft::state::{Alive, Kind, State};

/// Why a command buffer failed: a code of `MTLCommandBufferError`, and the system's text.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub code: isize,
    pub text: String,
}

/// A command buffer so far.
#[derive(Default)]
pub(crate) struct Inner {
    pub status: usize,
    /// Whether an encoder is open.
    pub open: bool,
    pub encoded: Vec<Encoded>,
    handlers: Vec<Handler>,
    pub failure: Option<Failure>,
    pub times: [f64; 2],
    /// The first rule that was broken while it was encoded: it does not run.
    pub invalid: Option<String>,
}

pub(crate) fn lock(inner: &Mutex<Inner>) -> MutexGuard<'_, Inner> {
    inner.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) struct Committed {
    pub queue: Arc<Shared>,
    pub inner: Arc<Mutex<Inner>>,
    /// Whether it keeps what it uses alive.
    pub retains: bool,
    _alive: Alive,
}

impl Committed {
    pub fn new(queue: &Arc<Shared>, retains: bool) -> Self {
        let alive = Alive::new(&queue.state, Kind::CommandBuffer);
        Self { queue: queue.clone(), inner: Arc::default(), retains, _alive: alive }
    }

    fn state(&self) -> &Arc<State> {
        &self.queue.state
    }

    fn broken(&self, rule: Rule, what: &str) {
        let text = self.state().violated(rule, what);
        lock(&self.inner).invalid.get_or_insert(text);
    }

    /// Whether an encoder may be begun; then it is.
    fn begin(&self) {
        let (open, committed) = {
            let mut inner = lock(&self.inner);
            (std::mem::replace(&mut inner.open, true), inner.status > 0)
        };
        if open {
            self.broken(Rule::EncoderOrder, "an encoder was begun before the last one had ended");
        }
        if committed {
            self.broken(Rule::CommitOrder, "an encoder was begun after the commit");
        }
    }

    fn over(&self) {
        self.queue.open.fetch_sub(1, Ordering::AcqRel);
    }

    /// Checks that all buffers that it uses are resident.
    fn check_residency(&self, residents: Option<&HashSet<u64>>) {
        if !self.state().caps.residency_sets {
            return;
        }
        let Some(residents) = residents else {
            self.broken(Rule::Residency, "the queue has no residency set");
            return;
        };
        let missing = {
            let inner = lock(&self.inner);
            let used = inner.encoded.iter().flat_map(|e| &e.commands);
            used.flat_map(Command::regions).find(|r| !residents.contains(&r.id)).cloned()
        };
        if let Some(region) = missing {
            let what = format!(
                "buffer {} of {} bytes is in no set that was committed before",
                region.id, region.bytes
            );
            self.broken(Rule::Residency, &what);
        }
    }
}

impl Drop for Committed {
    fn drop(&mut self) {
        if lock(&self.inner).status == 0 {
            self.over();
        }
    }
}

type CompletedBlock = Block<dyn Fn(NonNull<ProtocolObject<dyn MTLCommandBuffer>>)>;

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses.
    #[unsafe(super(NSObject))]
    #[name = "SoftCommandBuffer"]
    #[ivars = Committed]
    pub(crate) struct SoftCommandBuffer;

    impl SoftCommandBuffer {
        #[unsafe(method_id(computeCommandEncoder))]
        fn serial(&self) -> Retained<SoftComputeEncoder> {
            self.ivars().begin();
            new_compute(self.ivars().state(), &self.ivars().inner, false)
        }

        #[unsafe(method_id(computeCommandEncoderWithDispatchType:))]
        fn compute(&self, kind: MTLDispatchType) -> Retained<SoftComputeEncoder> {
            self.ivars().begin();
            let concurrent = kind == MTLDispatchType::Concurrent;
            new_compute(self.ivars().state(), &self.ivars().inner, concurrent)
        }

        #[unsafe(method_id(blitCommandEncoder))]
        fn blit(&self) -> Retained<SoftBlitEncoder> {
            self.ivars().begin();
            new_blit(self.ivars().state(), &self.ivars().inner)
        }

        #[unsafe(method(addCompletedHandler:))]
        fn add_handler(&self, block: *mut CompletedBlock) {
            if lock(&self.ivars().inner).status > 0 {
                let what = "a completion handler was added after the commit";
                self.ivars().broken(Rule::CommitOrder, what);
            }
            // SAFETY: a block of one object argument by contract.
            let handler = unsafe { Handler::copy(block.cast()) };
            lock(&self.ivars().inner).handlers.push(handler);
        }

        #[unsafe(method(commit))]
        fn commit(&self) {
            commit(self);
        }

        #[unsafe(method(waitUntilCompleted))]
        fn wait(&self) {
            let ivars = self.ivars();
            if lock(&ivars.inner).status == 0 {
                ivars.broken(Rule::CommitOrder, "waiting for what was not committed");
                return;
            }
            ivars.state().wait_for(|| lock(&ivars.inner).status >= MTLCommandBufferStatus::Completed.0);
        }

        #[unsafe(method(status))]
        fn status(&self) -> MTLCommandBufferStatus {
            MTLCommandBufferStatus(lock(&self.ivars().inner).status)
        }

        #[unsafe(method_id(error))]
        fn error(&self) -> Option<Retained<NSError>> {
            let failure = lock(&self.ivars().inner).failure.clone();
            failure.map(|f| error("MTLCommandBufferErrorDomain", f.code, &f.text))
        }

        #[unsafe(method(GPUStartTime))]
        fn start_time(&self) -> f64 {
            lock(&self.ivars().inner).times[0]
        }

        #[unsafe(method(GPUEndTime))]
        fn end_time(&self) -> f64 {
            lock(&self.ivars().inner).times[1]
        }
    }
);

/// A committed command buffer, which the queue keeps until it is over.
pub(crate) struct CommandBuffer {
    object: Retained<SoftCommandBuffer>,
    /// Its number among those of the device.
    pub number: u64,
}

// SAFETY: Metal's command buffers may be used from any thread; what changes lies behind a lock.
unsafe impl Send for CommandBuffer {}

impl CommandBuffer {
    pub fn of(&self) -> &Committed {
        self.object.ivars()
    }

    /// Ends it, and calls the handlers on their thread.
    pub fn end(self, times: [f64; 2], result: Result<(), Failure>) {
        let state = self.of().state().clone();
        let handlers = {
            let mut inner = lock(&self.of().inner);
            inner.times = times;
            inner.status = match &result {
                Ok(()) => MTLCommandBufferStatus::Completed.0,
                Err(_) => MTLCommandBufferStatus::Error.0,
            };
            inner.failure = result.err();
            inner.encoded.clear();
            std::mem::take(&mut inner.handlers)
        };
        state.notify();
        let later = state.clone();
        state.callbacks.run(move || {
            let buffer = self;
            later.delay();
            with_pool(|| {
                let object: *const SoftCommandBuffer = &*buffer.object;
                for handler in handlers {
                    // SAFETY: completion handlers take a command buffer.
                    unsafe { handler.call(object.cast_mut().cast::<c_void>()) };
                }
                buffer.of().over();
                drop(buffer);
            });
            later.complete();
        });
    }
}

fn commit(buffer: &SoftCommandBuffer) {
    let ivars = buffer.ivars();
    let (before, open) = {
        let mut inner = lock(&ivars.inner);
        let before = inner.status;
        inner.status = inner.status.max(MTLCommandBufferStatus::Committed.0);
        (before, inner.open)
    };
    if before > 0 {
        ivars.broken(Rule::CommitOrder, "committed twice");
        return;
    }
    if open {
        ivars.broken(Rule::CommitOrder, "committed before its encoder had ended");
    }
    ivars.check_residency(ivars.queue.residents().as_ref());
    let state = ivars.state().clone();
    let buffer = CommandBuffer { object: buffer.retain(), number: state.commit() };
    let device = state.clone();
    device.device.run(move || execute::run(&state, buffer));
}

impl Command {
    /// The buffers that it uses.
    pub fn regions(&self) -> impl Iterator<Item = &Arc<crate::soft::memory::Region>> {
        let (arguments, copy): (&[Option<Argument>], _) = match self {
            Self::Dispatch(dispatch) => (&dispatch.arguments, None),
            Self::Copy(copy) => (&[], Some([&copy.from.0, &copy.to.0])),
            Self::Barrier => (&[], None),
        };
        let bound = arguments.iter().flatten().filter_map(|a| match a {
            Argument::Buffer(region, _) => Some(region),
            Argument::Bytes(..) => None,
        });
        bound.chain(copy.into_iter().flatten())
    }
}
