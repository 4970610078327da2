//! The thread: takes requests in, lets them run, ends them, and survives the device.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use lily_engine::{Engine, EngineError, Flight, Session, snapshot_bytes};

use crate::api::{Failure, Finish, Health, MemoryUse};
use crate::cache::PrefixCache;
use crate::job::{Job, Running};
use crate::pace::Pace;
use crate::scheduler::{Factory, SchedulerOptions};
use crate::shared::{Counters, Shared};

mod admission;
mod composition;
mod steps;

/// Doublings of the backoff.
const DOUBLINGS: u32 = 5;
/// How often cancelled requests are looked for while there is no device.
const POLL: Duration = Duration::from_millis(20);

/// The device is gone, and why.
#[derive(Debug)]
pub(crate) struct Lost(String);

/// What an error of the engine means.
enum Fate {
    /// The device is gone.
    Lost(Lost),
    /// Pages have run out; nothing changed.
    Pages,
    /// A call was refused; nothing changed.
    Refused(String),
    /// What the call was about has failed.
    Failed(String),
}

fn fate(error: EngineError) -> Fate {
    match error {
        EngineError::DeviceLost(reason) => Fate::Lost(Lost(reason)),
        EngineError::OutOfPages { .. } => Fate::Pages,
        EngineError::StepFailed { .. } | EngineError::Poisoned { .. } => {
            Fate::Failed(error.to_string())
        }
        other => Fate::Refused(other.to_string()),
    }
}

/// A step in flight.
struct Airborne {
    flight: Flight,
    /// The numbers of its jobs, in order.
    order: Vec<u64>,
    /// Prompt tokens.
    rows: usize,
    started: Instant,
}

pub(crate) struct Worker {
    shared: Arc<Shared>,
    factory: Factory,
    options: SchedulerOptions,
    engine: Option<Engine>,
    /// In the order of their numbers.
    waiting: VecDeque<Job>,
    /// In the order in which they left the queue.
    running: Vec<Running>,
    /// Steps in flight, in order.
    flights: VecDeque<Airborne>,
    /// Sessions of jobs that have ended, by number, until their steps have landed.
    parked: Vec<(u64, Session)>,
    cache: PrefixCache,
    pace: Pace,
    last_landing: Instant,
    /// The number of the job whose prompt was computed last.
    last_prompt: u64,
    /// Steps of single tokens since the last one that computed prompts, where steps do either.
    singles: usize,
    /// The numbers of the jobs that run; those whose single tokens were computed last come last.
    turns: Vec<u64>,
    /// Calls that the device refused in a row.
    refusals: usize,
    /// Losses since the last step that succeeded, and when the device may be opened again.
    losses: u32,
    next_try: Instant,
}

impl Worker {
    pub fn new(
        shared: Arc<Shared>,
        factory: Factory,
        engine: Engine,
        options: SchedulerOptions,
    ) -> Self {
        let cache = PrefixCache::new(options.cache_bytes.min(engine.options().snapshot_bytes));
        let mut worker = Self {
            shared,
            factory,
            options,
            engine: Some(engine),
            waiting: VecDeque::new(),
            running: Vec::new(),
            flights: VecDeque::new(),
            parked: Vec::new(),
            cache,
            pace: Pace::default(),
            last_landing: Instant::now(),
            last_prompt: 0,
            singles: usize::MAX,
            turns: Vec::new(),
            refusals: 0,
            losses: 0,
            next_try: Instant::now(),
        };
        worker.publish();
        worker
    }

    pub fn run(mut self) {
        loop {
            match catch_unwind(AssertUnwindSafe(|| self.turn())) {
                Ok(Ok(true)) => {}
                Ok(Ok(false)) => return,
                Ok(Err(Lost(reason))) => self.lose(&reason),
                Err(panic) => self.lose(&format!("its thread panicked: {}", message(&*panic))),
            }
        }
    }

    /// One round. `false` when all is over.
    fn turn(&mut self) -> Result<bool, Lost> {
        self.take_in();
        self.drop_cancelled()?;
        if self.over() {
            return Ok(false);
        }
        if self.engine.is_none() {
            self.open_again();
            return Ok(true);
        }
        self.admit()?;
        self.publish();
        self.step()?;
        self.publish();
        Ok(true)
    }

    /// Takes new requests; waits for them if there is nothing else to do.
    fn take_in(&mut self) {
        let shared = Arc::clone(&self.shared);
        let mut inbox = shared.inbox();
        let idle = |this: &Self| {
            let none = this.running.is_empty() && this.waiting.is_empty();
            none && this.flights.is_empty() && this.engine.is_some()
        };
        while idle(self) && inbox.incoming.is_empty() && inbox.shutdown.is_none() {
            shared.beat(true);
            inbox = shared.wait(inbox, None);
        }
        shared.beat(false);
        self.waiting.extend(inbox.incoming.drain(..));
    }

    /// Drops the requests that nobody listens to any more.
    fn drop_cancelled(&mut self) -> Result<(), Lost> {
        self.waiting.retain(|job| !job.events.is_cancelled());
        let mut at = 0;
        while at < self.running.len() {
            if self.running[at].job.events.is_cancelled() {
                drop(self.leave(at)?);
            } else {
                at += 1;
            }
        }
        Ok(())
    }

    /// Ends what is left when the time after a shutdown is over. Whether nothing is left.
    fn over(&mut self) -> bool {
        let Some(deadline) = self.shared.inbox().shutdown else { return false };
        if Instant::now() >= deadline {
            self.fail_all(&Failure::ShuttingDown);
        }
        let over = self.running.is_empty() && self.waiting.is_empty();
        if over {
            self.shared.beat(true);
            self.publish();
        }
        over
    }

    fn fail_all(&mut self, failure: &Failure) {
        let running = std::mem::take(&mut self.running);
        let jobs = running.into_iter().map(|r| r.job).chain(std::mem::take(&mut self.waiting));
        jobs.for_each(|job| job.fail(failure.clone()));
    }

    /// Takes a job out of those that run and gives its slot back.
    fn leave(&mut self, at: usize) -> Result<Job, Lost> {
        let Running { job, session, .. } = self.running.remove(at);
        self.shared.running.store(self.running.len(), Ordering::Release);
        match self.close(job.seq, session) {
            Ok(()) => Ok(job),
            Err(lost) => {
                job.fail(Failure::Device(lost.0.clone()));
                Err(lost)
            }
        }
    }

    /// Gives a session's slot back, now or when its steps in flight have landed.
    fn close(&mut self, seq: u64, session: Option<Session>) -> Result<(), Lost> {
        let (Some(engine), Some(session)) = (&mut self.engine, session) else { return Ok(()) };
        if self.flights.iter().any(|f| f.order.contains(&seq)) {
            self.parked.push((seq, session));
            return Ok(());
        }
        match engine.close(session).map_err(fate) {
            Err(Fate::Lost(lost)) => Err(lost),
            _ => Ok(()),
        }
    }

    fn finish(&mut self, at: usize, finish: Finish) -> Result<(), Lost> {
        let Running { job, session, .. } = self.running.remove(at);
        if let Some(started) = job.started {
            let mut inbox = self.shared.inbox();
            inbox.service = 0.8 * inbox.service + 0.2 * started.elapsed().as_secs_f64();
        }
        let closed = self.close(job.seq, session);
        // The answer is whole, whatever becomes of the device now.
        self.shared.running.store(self.running.len(), Ordering::Release);
        job.finish(finish);
        closed
    }

    fn fail(&mut self, at: usize, reason: String) -> Result<(), Lost> {
        Counters::add(&self.shared.counters.faults, 1);
        let job = self.leave(at)?;
        job.fail(Failure::Device(reason));
        Ok(())
    }

    /// The device is gone. What ran on it fails, what waits goes on waiting.
    fn lose(&mut self, reason: &str) {
        Counters::add(&self.shared.counters.faults, 1);
        self.shared.inbox().health = Health::Unwell(format!("the device is lost: {reason}"));
        for running in std::mem::take(&mut self.running) {
            running.job.fail(Failure::Device(reason.to_owned()));
        }
        self.flights.clear();
        self.parked.clear();
        self.cache.clear();
        for job in &mut self.waiting {
            job.kept = None;
        }
        // A program that is broken may fail while it is dropped, too.
        let engine = self.engine.take();
        drop(catch_unwind(AssertUnwindSafe(|| drop(engine))));
        let wait = self.options.backoff * 2u32.pow(self.losses.min(DOUBLINGS));
        self.losses = self.losses.saturating_add(1);
        self.next_try = Instant::now() + wait;
        self.publish();
    }

    /// Opens the device again when it is time. If it cannot be opened, what waits fails.
    fn open_again(&mut self) {
        let left = self.next_try.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            drop(self.shared.wait(self.shared.inbox(), Some(left.min(POLL))));
            return;
        }
        match catch_unwind(AssertUnwindSafe(|| (self.factory)())) {
            Ok(Ok(engine)) => {
                self.engine = Some(engine);
                self.pace = Pace::default();
                self.refusals = 0;
                self.shared.inbox().health = Health::Well;
            }
            Ok(Err(error)) => self.not_opened(error.to_string()),
            Err(panic) => self.not_opened(message(&*panic)),
        }
    }

    fn not_opened(&mut self, reason: String) {
        self.lose(&format!("it cannot be opened again: {reason}"));
        self.fail_all(&Failure::Device(reason));
    }

    /// Lets others see the figures.
    fn publish(&mut self) {
        self.shared.running.store(self.running.len(), Ordering::Release);
        let budget = self.engine.as_ref().map(Engine::budget).unwrap_or_default();
        let uses = [
            ("weights", budget.mapped().saturating_add(budget.copies)),
            ("weights_read_once", budget.droppable()),
            ("kv", budget.kv),
            ("state", budget.state),
            ("scratch", budget.scratch),
            ("prefix_cache", self.cache.bytes()),
        ];
        let memory = uses.map(|(purpose, bytes)| MemoryUse { purpose, bytes });
        let mut inbox = self.shared.inbox();
        inbox.memory = memory.to_vec();
        inbox.prefixes = self.cache.len();
    }

    /// Keeps the state of a running job's prefix, if there is room.
    fn keep_prefix(&mut self, at: usize) -> Result<(), Lost> {
        let Some(engine) = &mut self.engine else { return Ok(()) };
        let Some(session) = &self.running[at].session else { return Ok(()) };
        let bytes = snapshot_bytes(engine.plan(), session.tokens().len())
            + size_of_val(session.pending()) as u64;
        if self.cache.has(session.tokens()) {
            return Ok(());
        }
        if !self.cache.takes(bytes) {
            Counters::add(&self.shared.counters.skipped, 1);
            return Ok(());
        }
        // What goes may be what this one would have shared: its need is looked up each time.
        while !self.cache.has_room(engine.snapshot_need(session)) && self.cache.evict() {}
        loop {
            match engine.snapshot(session) {
                Ok(snapshot) => {
                    self.cache.insert(snapshot);
                    return Ok(());
                }
                Err(EngineError::SnapshotMemory { .. }) if self.cache.evict() => {}
                Err(error) => {
                    Counters::add(&self.shared.counters.skipped, 1);
                    return match fate(error) {
                        Fate::Lost(lost) => Err(lost),
                        // A prefix less is no harm; a session that failed is seen in its next step.
                        _ => Ok(()),
                    };
                }
            }
        }
    }
}

/// What a panic says.
fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "without a message".into())
}
