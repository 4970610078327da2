//! The handle: requests in, figures out.

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lily_engine::{Engine, EngineError, LogitBias};
use lily_ops::sample::{MAX_LOGPROBS, SampleParams};

use crate::api::{Generator, Health, Limits, Request, Status, SubmitError};
use crate::channel::{EventStream, events};
use crate::job::Job;
use crate::shared::{Place, Shared};
use crate::worker::Worker;

/// Prepares an engine: the first one, and another one each time that the device was lost. All have the same
/// plan and options.
pub type Factory = Box<dyn FnMut() -> Result<Engine, EngineError> + Send>;

/// How to schedule.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerOptions {
    /// Requests that may wait while as many run as the engine has slots.
    pub queue: usize,
    /// What a step may take while requests are decoding: prompts are computed in chunks that fit, so that no
    /// token comes later than by one such chunk. At most
    /// [`EngineOptions::chunk`](lily_engine::EngineOptions) tokens; [`min_chunk`](Self::min_chunk) tokens are
    /// computed even where they take longer. Copies of states, when a prefix is kept or taken up or a request
    /// gives way, come on top: the time to copy their bytes.
    pub delay: Duration,
    /// Prompt tokens that a step computes at least.
    pub min_chunk: usize,
    /// Bytes of [`EngineOptions::snapshot_bytes`](lily_engine::EngineOptions) for prefixes of prompts. What is
    /// beyond serves requests that gave way to others.
    pub cache_bytes: u64,
    /// Least distance in tokens of the states that are kept inside a prompt, besides those at its
    /// [boundaries](Request::boundaries): at most so many tokens, or a quarter of a long prompt, are computed again
    /// when a later prompt departs anywhere. It doubles until a prompt has no more than eight. 0 keeps none. Where
    /// a device cannot keep states inside a step, steps end there: a multiple of 32 suits devices with matrix units.
    pub stride: usize,
    /// Whether a step may decode some requests and compute others' prompts; else the two alternate, as they do on every device
    /// whose results would hang on it.
    pub mixed: bool,
    /// Wait before a lost device is opened again; doubled each time until a step succeeds, up to 32 times.
    pub backoff: Duration,
}

impl Default for SchedulerOptions {
    fn default() -> Self {
        Self {
            queue: 64,
            delay: Duration::from_millis(200),
            min_chunk: 16,
            cache_bytes: u64::MAX,
            stride: 1024,
            mixed: true,
            backoff: Duration::from_millis(500),
        }
    }
}

/// The thread that owns an engine. Dropping the handle ends what runs.
pub struct Scheduler {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scheduler").field("limits", &self.shared.limits).finish_non_exhaustive()
    }
}

impl Scheduler {
    /// Prepares the first engine and starts the thread.
    ///
    /// # Errors
    /// The engine cannot be prepared.
    ///
    /// # Panics
    /// The system has no thread to give.
    pub fn new(mut factory: Factory, options: SchedulerOptions) -> Result<Self, EngineError> {
        let engine = factory()?;
        let limits = Limits {
            context: engine.options().context,
            parallel: engine.options().slots,
            queue: options.queue,
        };
        let shared = Arc::new(Shared::new(limits, engine.plan().vocab));
        let worker = Worker::new(Arc::clone(&shared), factory, engine, options);
        let thread = std::thread::Builder::new()
            .name("lily-scheduler".into())
            .spawn(move || worker.run())
            .expect("the system has a thread to give");
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Waits for the thread to end after a [shutdown](Generator::shutdown), at most for `time`. Whether it
    /// has.
    pub fn join(mut self, time: Duration) -> bool {
        let end = Instant::now() + time;
        let Some(thread) = self.thread.take() else { return true };
        while !thread.is_finished() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(2));
        }
        thread.is_finished() && thread.join().is_ok()
    }

    fn params(&self, request: &Request) -> Result<SampleParams, String> {
        let mut params = request.sample.clone();
        if !request.logit_bias.is_empty() {
            let bias = LogitBias::new(request.logit_bias.iter().copied())?;
            params.logit_bias = Some(Arc::new(bias));
        }
        if let Some(n) = request.logprobs {
            let most = u32::from(MAX_LOGPROBS);
            let n = u8::try_from(n).ok().filter(|n| *n <= MAX_LOGPROBS);
            params.logprobs =
                Some(n.ok_or(format!("logprobs must lie between 0 and {most}; ask for fewer"))?);
        }
        params.check(self.shared.vocab)?;
        Ok(params)
    }

    /// What is wrong with a request, if anything; else its sampling parameters.
    fn check(&self, request: &Request) -> Result<SampleParams, SubmitError> {
        let invalid = |what: &str| Err(SubmitError::Invalid(what.into()));
        let (limit, prompt) = (self.shared.limits.context, request.prompt.len());
        if prompt == 0 {
            return invalid("the prompt is empty; give at least one token");
        }
        if request.max_tokens == 0 {
            return invalid("max_tokens is 0; it must be at least 1");
        }
        if prompt >= limit {
            return Err(SubmitError::ContextLength { limit, prompt });
        }
        let close = request.thinking.iter().flat_map(|budget| &budget.close);
        let vocab = self.shared.vocab;
        if let Some(id) = request.prompt.iter().chain(close).find(|id| **id as usize >= vocab) {
            return invalid(&format!("token {id} is outside the vocabulary of {vocab} ids"));
        }
        self.params(request).map_err(SubmitError::Invalid)
    }
}

impl Generator for Scheduler {
    fn submit(&self, request: Request) -> Result<EventStream, SubmitError> {
        let params = self.check(&request)?;
        let mut inbox = self.shared.inbox();
        if inbox.shutdown.is_some() {
            return Err(SubmitError::ShuttingDown);
        }
        if let Health::Unwell(why) = &inbox.health {
            return Err(SubmitError::Unhealthy(why.clone()));
        }
        let Some(place) = Place::take(&self.shared) else {
            let ahead = (self.shared.limits.queue + 1) as f64 / self.shared.limits.parallel as f64;
            let seconds = (inbox.service * ahead).clamp(1.0, 60.0);
            return Err(SubmitError::Busy { retry_after: Duration::from_secs_f64(seconds) });
        };
        let (sender, stream) = events();
        let seq = inbox.next_seq;
        inbox.next_seq += 1;
        inbox.incoming.push_back(Job {
            seq,
            request,
            params,
            events: sender,
            ids: Vec::new(),
            started: None,
            kept: None,
            closed: false,
            place,
        });
        self.shared.touch();
        drop(inbox);
        self.shared.notify();
        Ok(stream)
    }

    fn status(&self) -> Status {
        self.shared.status()
    }

    fn shutdown(&self, grace: Duration) {
        let deadline = Instant::now() + grace;
        let mut inbox = self.shared.inbox();
        inbox.shutdown = Some(inbox.shutdown.map_or(deadline, |old| old.min(deadline)));
        drop(inbox);
        self.shared.notify();
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.shutdown(Duration::ZERO);
    }
}
