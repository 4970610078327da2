//! What the objects of a device share, and the handle that tests have on it.

use std::ops::Range;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use lily_softgpu::Compiler;
use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_metal::MTLDevice;

use super::caps::{Caps, Fault};
use super::execute::Order;
use super::memory::Region;
use super::objects;
use super::rules::{Rule, Violation};
use super::runtime;
use super::worker::Worker;

/// What is alive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Buffers.
    pub buffers: i64,
    /// Their bytes.
    pub bytes: i64,
    /// Command buffers.
    pub command_buffers: i64,
    /// All other objects but devices: queues, encoders, libraries, functions, pipelines, fences, residency sets.
    pub others: i64,
    /// Objects that were autoreleased without a pool, by any device of the process.
    pub unpooled: usize,
}

/// Commits, and what waits for them.
#[derive(Default)]
struct Gate {
    committed: u64,
    completed: u64,
    hold: Range<u64>,
    /// Longest random delay before a completion handler runs.
    delay: Duration,
}

/// Longest wait for a held command buffer's successor.
const HOLD: Duration = Duration::from_secs(120);

pub(crate) struct State {
    pub caps: Caps,
    pub compiler: Compiler,
    violations: Mutex<Vec<Violation>>,
    faults: Mutex<Vec<Fault>>,
    regions: Mutex<Vec<Weak<Region>>>,
    gate: Mutex<Gate>,
    moved: Condvar,
    random: AtomicU64,
    bytes: AtomicI64,
    buffers: AtomicI64,
    command_buffers: AtomicI64,
    others: AtomicI64,
    /// Launches of kernels without and with tensor operations.
    pub launches: [AtomicU64; 2],
    /// Runs command buffers.
    pub device: Worker,
    /// Calls completion handlers.
    pub callbacks: Worker,
    /// What has run so far, as far as order matters.
    pub order: Mutex<Order>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    pub fn new(caps: Caps) -> Arc<Self> {
        Arc::new(Self {
            random: AtomicU64::new(u64::from(caps.seed) << 1 | 1),
            caps,
            compiler: Compiler::default(),
            violations: Mutex::default(),
            faults: Mutex::default(),
            regions: Mutex::default(),
            gate: Mutex::default(),
            moved: Condvar::new(),
            bytes: AtomicI64::new(0),
            buffers: AtomicI64::new(0),
            command_buffers: AtomicI64::new(0),
            others: AtomicI64::new(0),
            launches: Default::default(),
            device: Worker::new(),
            callbacks: Worker::new(),
            order: Mutex::default(),
        })
    }

    pub fn violated(&self, rule: Rule, what: impl Into<String>) -> String {
        let violation = Violation { rule, what: what.into() };
        let text = violation.to_string();
        eprintln!("softmetal: {text}");
        lock(&self.violations).push(violation);
        text
    }

    pub fn has_fault(&self, fault: Fault) -> bool {
        lock(&self.faults).contains(&fault)
    }

    /// A number below `n`, never the same series twice in a row.
    pub fn random(&self, n: u32) -> u32 {
        let next = |x: u64| {
            let x = x ^ (x >> 12);
            let x = x ^ (x << 25);
            Some(x ^ (x >> 27))
        };
        let x = self.random.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        let x = x.unwrap_or(1).wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33;
        x as u32 % n.max(1)
    }

    /// Takes memory for a buffer, if it is there.
    pub fn take(&self, bytes: usize) -> bool {
        let before = self.bytes.fetch_add(bytes as i64, Ordering::AcqRel);
        if before as u64 + bytes as u64 > self.caps.memory {
            self.bytes.fetch_sub(bytes as i64, Ordering::AcqRel);
            return false;
        }
        self.buffers.fetch_add(1, Ordering::AcqRel);
        true
    }

    /// Bytes of all buffers.
    pub fn taken(&self) -> usize {
        self.bytes.load(Ordering::Acquire).max(0) as usize
    }

    pub fn give(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes as i64, Ordering::AcqRel);
        self.buffers.fetch_sub(1, Ordering::AcqRel);
    }

    /// The memory of all buffers that are known.
    pub fn regions<R>(&self, f: impl FnOnce(&mut Vec<Weak<Region>>) -> R) -> R {
        let mut regions = lock(&self.regions);
        regions.retain(|r| r.strong_count() > 0);
        f(&mut regions)
    }

    /// A command buffer is committed; its number.
    pub fn commit(&self) -> u64 {
        let mut gate = lock(&self.gate);
        gate.committed += 1;
        self.moved.notify_all();
        gate.committed - 1
    }

    /// Command buffers committed so far.
    pub fn commits(&self) -> u64 {
        lock(&self.gate).committed
    }

    /// A command buffer is over.
    pub fn complete(&self) {
        lock(&self.gate).completed += 1;
        self.moved.notify_all();
    }

    /// Waits while a command buffer is held; whether it was let go.
    pub fn pass(&self, number: u64) -> bool {
        let gate = lock(&self.gate);
        let held = |g: &mut Gate| g.hold.contains(&number) && g.committed < number + 2;
        let waited = self.moved.wait_timeout_while(gate, HOLD, held);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Waits until a queue has a command buffer free; whether it has.
    pub fn wait_for(&self, free: impl Fn() -> bool) -> bool {
        let gate = lock(&self.gate);
        let waited = self.moved.wait_timeout_while(gate, HOLD, |_| !free());
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Lets those look again that wait.
    pub fn notify(&self) {
        self.moved.notify_all();
    }

    /// A random delay before a completion handler.
    pub fn delay(&self) {
        let most = lock(&self.gate).delay.as_micros() as u32;
        if most > 0 {
            std::thread::sleep(Duration::from_micros(u64::from(self.random(most))));
        }
    }
}

/// Which count an object is in.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    CommandBuffer,
    Other,
}

/// A live object of a device.
pub(crate) struct Alive {
    pub state: Arc<State>,
    kind: Kind,
}

impl Alive {
    pub fn new(state: &Arc<State>, kind: Kind) -> Self {
        let alive = Self { state: state.clone(), kind };
        alive.count().fetch_add(1, Ordering::AcqRel);
        alive
    }

    fn count(&self) -> &AtomicI64 {
        match self.kind {
            Kind::CommandBuffer => &self.state.command_buffers,
            Kind::Other => &self.state.others,
        }
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.count().fetch_sub(1, Ordering::AcqRel);
    }
}

/// A device with what a test can see of it and do to it. Dropped with violations that nobody took, it panics.
pub struct Soft {
    state: Arc<State>,
}

impl Soft {
    /// A device.
    pub fn new(caps: Caps) -> Self {
        runtime::base_classes();
        Self { state: State::new(caps) }
    }

    /// The device as the host code sees it.
    pub fn device(&self) -> Retained<ProtocolObject<dyn MTLDevice>> {
        objects::device(&self.state)
    }

    /// What it is.
    pub fn caps(&self) -> &Caps {
        &self.state.caps
    }

    /// Makes something go wrong.
    pub fn inject(&self, fault: Fault) {
        lock(&self.state.faults).push(fault);
    }

    /// Makes all go well again.
    pub fn heal(&self) {
        lock(&self.state.faults).clear();
    }

    /// Command buffers committed so far.
    pub fn committed(&self) -> u64 {
        self.state.commits()
    }

    /// Command buffers that have ended and whose handlers have run.
    pub fn completed(&self) -> u64 {
        lock(&self.state.gate).completed
    }

    /// Kernels launched so far: of texts without and with tensor operations.
    pub fn launches(&self) -> [u64; 2] {
        [0, 1].map(|i| self.state.launches[i].load(Ordering::Relaxed))
    }

    /// Waits until every committed command buffer has ended and its handlers have run.
    pub fn wait_idle(&self) {
        let gate = lock(&self.state.gate);
        let busy = |g: &mut Gate| g.completed < g.committed;
        let _ = self.state.moved.wait_timeout_while(gate, HOLD, busy);
    }

    /// Each command buffer of this range does not run before the next one is committed.
    pub fn hold(&self, numbers: Range<u64>) {
        lock(&self.state.gate).hold = numbers;
        self.state.notify();
    }

    /// Completion handlers run up to this much later.
    pub fn delay(&self, most: Duration) {
        lock(&self.state.gate).delay = most;
    }

    /// What is alive.
    pub fn counts(&self) -> Counts {
        let of = |n: &AtomicI64| n.load(Ordering::Acquire);
        Counts {
            buffers: of(&self.state.buffers),
            bytes: of(&self.state.bytes),
            command_buffers: of(&self.state.command_buffers),
            others: of(&self.state.others),
            unpooled: runtime::unpooled(),
        }
    }

    /// The rules that were broken since the last call.
    pub fn violations(&self) -> Vec<Violation> {
        std::mem::take(&mut *lock(&self.state.violations))
    }

    /// Checks that this rule was broken and no other.
    #[track_caller]
    pub fn expect(&self, rule: Rule) {
        let found = self.violations();
        assert!(
            !found.is_empty() && found.iter().all(|v| v.rule == rule),
            "broken rules: {found:?}, expected {rule:?}"
        );
    }
}

impl Drop for Soft {
    fn drop(&mut self) {
        let found = self.violations();
        if !found.is_empty() && !std::thread::panicking() {
            panic!("{}", found.iter().map(Violation::to_string).collect::<Vec<_>>().join("\n"));
        }
    }
}
