//! What the scheduler's thread and those who ask it share.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::api::{Health, Limits, MemoryUse, Status};
use crate::job::Job;

/// Numbers that only grow.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub computed: AtomicU64,
    pub cached: AtomicU64,
    pub steps: AtomicU64,
    pub preemptions: AtomicU64,
    pub skipped: AtomicU64,
    pub faults: AtomicU64,
}

impl Counters {
    pub fn add(counter: &AtomicU64, by: usize) {
        counter.fetch_add(by as u64, Ordering::Relaxed);
    }
}

/// Guarded by one lock, which is never held while the device works.
#[derive(Debug)]
pub(crate) struct Inbox {
    pub incoming: VecDeque<Job>,
    pub next_seq: u64,
    /// When those that are left fail.
    pub shutdown: Option<Instant>,
    pub health: Health,
    pub memory: Vec<MemoryUse>,
    /// States of prefixes that are kept.
    pub prefixes: usize,
    /// Seconds from leaving the queue to the end, lately.
    pub service: f64,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub limits: Limits,
    pub vocab: usize,
    inbox: Mutex<Inbox>,
    changed: Condvar,
    /// Requests taken and not ended.
    pub places: AtomicUsize,
    /// Those among them that have left the queue.
    pub running: AtomicUsize,
    pub counters: Counters,
    begun: Instant,
    /// Microseconds from the beginning to the last sign of life.
    beat: AtomicU64,
    idle: AtomicBool,
}

/// Counts a request among those that run and wait until it is left or dropped.
#[derive(Debug)]
pub(crate) struct Place {
    shared: Arc<Shared>,
    left: AtomicBool,
}

impl Place {
    /// Takes one of the places, if one is free.
    pub fn take(shared: &Arc<Shared>) -> Option<Arc<Self>> {
        let most = shared.limits.parallel.saturating_add(shared.limits.queue);
        let free = |taken: usize| (taken < most).then_some(taken + 1);
        shared.places.fetch_update(Ordering::AcqRel, Ordering::Acquire, free).ok()?;
        Some(Arc::new(Self { shared: Arc::clone(shared), left: AtomicBool::new(false) }))
    }

    pub fn leave(&self) {
        if !self.left.swap(true, Ordering::AcqRel) {
            self.shared.places.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Shared {
    pub fn new(limits: Limits, vocab: usize) -> Self {
        Self {
            limits,
            vocab,
            inbox: Mutex::new(Inbox {
                incoming: VecDeque::new(),
                next_seq: 0,
                shutdown: None,
                health: Health::Well,
                memory: Vec::new(),
                prefixes: 0,
                service: 1.0,
            }),
            changed: Condvar::new(),
            places: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            counters: Counters::default(),
            begun: Instant::now(),
            beat: AtomicU64::new(0),
            idle: AtomicBool::new(true),
        }
    }

    pub fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the thread.
    pub fn notify(&self) {
        self.changed.notify_all();
    }

    /// Waits for a change, at most for `time`; without it, until there is one.
    pub fn wait<'a>(
        &self,
        inbox: MutexGuard<'a, Inbox>,
        time: Option<Duration>,
    ) -> MutexGuard<'a, Inbox> {
        match time {
            None => self.changed.wait(inbox).unwrap_or_else(PoisonError::into_inner),
            Some(time) => {
                let waited = self.changed.wait_timeout(inbox, time);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }

    /// A sign of life.
    pub fn beat(&self, idle: bool) {
        let now = self.begun.elapsed().as_micros() as u64;
        self.beat.store(now, Ordering::Relaxed);
        self.idle.store(idle, Ordering::Release);
    }

    /// An idle thread is given something to do: from now on it has to show life.
    pub fn touch(&self) {
        if self.idle.load(Ordering::Acquire) {
            self.beat(false);
        }
    }

    fn heartbeat(&self) -> Duration {
        if self.idle.load(Ordering::Acquire) {
            return Duration::ZERO;
        }
        let last = Duration::from_micros(self.beat.load(Ordering::Relaxed));
        self.begun.elapsed().saturating_sub(last)
    }

    pub fn status(&self) -> Status {
        let running = self.running.load(Ordering::Acquire);
        let places = self.places.load(Ordering::Acquire);
        let inbox = self.inbox();
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Status {
            health: inbox.health.clone(),
            heartbeat: self.heartbeat(),
            running: running.min(places),
            waiting: places.saturating_sub(running),
            limits: self.limits,
            memory: inbox.memory.clone(),
            prompt_tokens_computed: count(&self.counters.computed),
            prompt_tokens_cached: count(&self.counters.cached),
            steps: count(&self.counters.steps),
            preemptions: count(&self.counters.preemptions),
            prefixes: inbox.prefixes,
            prefixes_skipped: count(&self.counters.skipped),
            faults: count(&self.counters.faults),
        }
    }
}
