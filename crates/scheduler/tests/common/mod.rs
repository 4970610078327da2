//! The fake program of the engine's tests, with a gate in front of its steps.
#![allow(dead_code)]

#[path = "../../../engine/tests/common/mod.rs"]
pub mod fake;

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

pub use fake::{FakeDevice, oracle, prompt};
use lily_device::{
    Counters, Device, FaultyDevice, KvPart, Limits, MemoryLimit, MemoryNeed, PrepareError, Program,
    Schedule, SlotId, Snapshot, Step, StepError, StepOut, Ticket, Weight,
};
use lily_engine::{Engine, EngineOptions, Machine, SampleParams, Sampled};
use lily_ops::{Case, CaseOutputs, Plan, SlotState};
use lily_scheduler::*;

pub const PATIENCE: Duration = Duration::from_secs(60);

/// Holds every step until it is let through.
#[derive(Default)]
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    /// Steps that have come to the gate.
    arrived: usize,
    /// Steps that may pass.
    allowed: usize,
    open: bool,
    /// The step with this number panics.
    panic_at: Option<usize>,
}

impl Gate {
    /// Lets one more step pass and waits until the next one has come to the gate.
    pub fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.allowed += 1;
        let next = state.allowed + 1;
        self.changed.notify_all();
        while state.arrived < next {
            let (held, wait) = self.changed.wait_timeout(state, PATIENCE).unwrap();
            assert!(!wait.timed_out(), "no step comes after {}", held.arrived);
            state = held;
        }
    }

    /// Waits until the first step has come.
    pub fn first(&self) {
        let mut state = self.state.lock().unwrap();
        while state.arrived == 0 {
            let (held, wait) = self.changed.wait_timeout(state, PATIENCE).unwrap();
            assert!(!wait.timed_out(), "no step comes");
            state = held;
        }
    }

    /// Lets all steps pass from now on.
    pub fn open(&self) {
        self.state.lock().unwrap().open = true;
        self.changed.notify_all();
    }

    /// The step with this number, counted from 0, panics.
    pub fn panic_at(&self, step: usize) {
        self.state.lock().unwrap().panic_at = Some(step);
    }

    fn enter(&self) {
        let mut state = self.state.lock().unwrap();
        let me = state.arrived;
        state.arrived += 1;
        self.changed.notify_all();
        while !state.open && state.allowed <= me {
            state = self.changed.wait(state).unwrap();
        }
        if state.panic_at == Some(me) {
            drop(state);
            panic!("as planned");
        }
    }
}

struct GatedDevice {
    inner: Box<dyn Device>,
    gate: Arc<Gate>,
}

struct GatedProgram {
    inner: Box<dyn Program>,
    gate: Arc<Gate>,
}

impl Device for GatedDevice {
    fn name(&self) -> String {
        self.inner.name()
    }
    fn overlaps(&self) -> bool {
        self.inner.overlaps()
    }
    fn few_rows(&self) -> Option<usize> {
        self.inner.few_rows()
    }
    fn memory(&self, plan: &Plan, limits: &Limits) -> MemoryNeed {
        self.inner.memory(plan, limits)
    }
    fn memory_limit(&self) -> MemoryLimit {
        self.inner.memory_limit()
    }
    fn prepare(
        &self,
        plan: Arc<Plan>,
        weights: Vec<Weight>,
        limits: Limits,
    ) -> Result<Box<dyn Program>, PrepareError> {
        let inner = self.inner.prepare(plan, weights, limits)?;
        Ok(Box::new(GatedProgram { inner, gate: Arc::clone(&self.gate) }))
    }
    fn evaluate(&self, case: &Case) -> Result<CaseOutputs, PrepareError> {
        self.inner.evaluate(case)
    }
}

impl Program for GatedProgram {
    fn plan(&self) -> &Plan {
        self.inner.plan()
    }
    fn limits(&self) -> Limits {
        self.inner.limits()
    }
    fn alone(&self, step: &Step) -> bool {
        self.inner.alone(step)
    }
    fn submit(&mut self, step: Step) -> Result<Ticket, StepError> {
        self.gate.enter();
        self.inner.submit(step)
    }
    fn wait(&mut self, ticket: Ticket) -> Result<StepOut, StepError> {
        self.inner.wait(ticket)
    }
    fn sample(&mut self, slot: SlotId, params: &SampleParams) -> Result<Sampled, StepError> {
        self.inner.sample(slot, params)
    }
    fn undo_last(&mut self, slot: SlotId) -> Result<(), StepError> {
        self.inner.undo_last(slot)
    }
    fn reset(&mut self, slot: SlotId) -> Result<(), StepError> {
        self.inner.reset(slot)
    }
    fn begin_answer(&mut self, slot: SlotId, answered: &[u32]) -> Result<(), StepError> {
        self.inner.begin_answer(slot, answered)
    }
    fn position(&self, slot: SlotId) -> Result<usize, StepError> {
        self.inner.position(slot)
    }
    fn snapshot_behind(&mut self, slot: SlotId, from: usize) -> Result<Snapshot, StepError> {
        self.inner.snapshot_behind(slot, from)
    }
    fn restore_parts(
        &mut self,
        slot: SlotId,
        snapshot: &Snapshot,
        kv: &[KvPart<'_>],
    ) -> Result<(), StepError> {
        self.inner.restore_parts(slot, snapshot, kv)
    }
    fn marks(&self) -> bool {
        self.inner.marks()
    }
    fn mark(&mut self, slot: SlotId, rows: &[usize]) -> Result<(), StepError> {
        self.inner.mark(slot, rows)
    }
    fn take_marked(&mut self, slot: SlotId, from: usize) -> Result<Vec<Snapshot>, StepError> {
        self.inner.take_marked(slot, from)
    }
    fn export(&mut self, slot: SlotId) -> Result<SlotState, StepError> {
        self.inner.export(slot)
    }
    fn free_pages(&self) -> usize {
        self.inner.free_pages()
    }
    fn memory(&self) -> MemoryNeed {
        self.inner.memory()
    }
    fn scratch_high_water(&self) -> u64 {
        self.inner.scratch_high_water()
    }
    fn counters(&self) -> Counters {
        self.inner.counters()
    }
}

/// A scheduler of the fake program, and what it saw.
pub struct Rig {
    pub scheduler: Scheduler,
    pub gate: Arc<Gate>,
    pub log: Arc<Mutex<fake::Log>>,
}

/// How a rig is made.
pub struct Setup {
    pub engine: EngineOptions,
    pub options: SchedulerOptions,
    /// Faults of the programs to come, one schedule each.
    pub faults: Vec<Schedule>,
    /// Times that preparing fails after the first program.
    pub fail_prepare: u64,
    /// Steps wait at the gate.
    pub gated: bool,
    /// Two steps are kept in flight.
    pub overlaps: bool,
    /// States inside steps are kept; else steps end where one is.
    pub marks: bool,
    /// Steps of so many rows at most run in another form.
    pub few_rows: Option<usize>,
}

pub const SLOTS: usize = 3;

/// Mixed steps, two in flight, rows of a step of another form.
pub const WAYS: [(bool, bool, Option<usize>); 6] = [
    (true, false, None),
    (false, false, None),
    (true, true, None),
    (false, true, None),
    (true, false, Some(2)),
    (false, true, Some(2)),
];

impl Default for Setup {
    fn default() -> Self {
        let engine = EngineOptions::new(1024, SLOTS, 16);
        Self {
            engine: EngineOptions { snapshot_bytes: 1 << 20, ..engine },
            options: SchedulerOptions {
                backoff: Duration::from_millis(1),
                ..SchedulerOptions::default()
            },
            faults: Vec::new(),
            fail_prepare: 0,
            gated: false,
            overlaps: false,
            marks: false,
            few_rows: None,
        }
    }
}

impl Setup {
    pub fn start(self) -> Rig {
        let (overlaps, marks, few_rows) = (self.overlaps, self.marks, self.few_rows);
        let fake = FakeDevice { overlaps, marks, few_rows, ..FakeDevice::default() };
        let log = Arc::clone(&fake.log);
        let gate = Arc::new(Gate::default());
        if !self.gated {
            gate.open();
        }
        let mut device = Some(FaultyDevice::new(Box::new(fake), self.faults));
        let gated = Arc::clone(&gate);
        let (mut first, mut failures, options) = (true, self.fail_prepare, self.engine);
        let mut gated_device = None;
        let factory: Factory = Box::new(move || {
            let device = gated_device.get_or_insert_with(|| GatedDevice {
                inner: Box::new(device.take().expect("made once")),
                gate: Arc::clone(&gated),
            });
            if !std::mem::take(&mut first) && failures > 0 {
                failures -= 1;
                return Err(PrepareError::OutOfMemory("injected".into()).into());
            }
            Engine::on_machine(device, fake::plan(), Vec::new(), options, &Machine::UNKNOWN)
        });
        let scheduler = Scheduler::new(factory, self.options).unwrap();
        Rig { scheduler, gate, log }
    }
}

pub fn request(prompt: Vec<u32>, max_tokens: usize) -> Request {
    Request {
        prompt: prompt.into(),
        sample: SampleParams::GREEDY,
        max_tokens,
        stop_ids: Vec::new(),
        logit_bias: Vec::new(),
        logprobs: None,
        boundaries: Vec::new(),
        thinking: None,
        query: "".into(),
    }
}

/// A prompt of `n` tokens that begins as no other does.
pub fn distinct(kind: usize, n: usize) -> Vec<u32> {
    let mut tokens = prompt(n);
    tokens[0] = 1000 + kind as u32;
    tokens
}

/// What a request came to.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    pub cached: Option<usize>,
    pub ids: Vec<u32>,
    pub end: Result<Finish, Failure>,
}

pub fn outcome(mut stream: EventStream) -> Outcome {
    let mut got = Outcome { cached: None, ids: Vec::new(), end: Ok(Finish::Stop) };
    let mut ended = false;
    while let Some(event) = stream.next_timeout(PATIENCE).expect("an event comes") {
        assert!(!ended, "{event:?} after the end");
        match event {
            Event::Started { cached, .. } => {
                assert_eq!(got.cached.replace(cached), None, "started once");
                assert!(got.ids.is_empty());
            }
            Event::Token(token) => {
                assert!(got.cached.is_some(), "a token before the start");
                got.ids.push(token.id);
            }
            Event::Finished(finish) => (got.end, ended) = (Ok(finish), true),
            Event::Failed(failure) => (got.end, ended) = (Err(failure), true),
        }
    }
    assert!(ended, "the stream ended without an end: {got:?}");
    got
}

impl Rig {
    pub fn submit(&self, request: Request) -> EventStream {
        self.scheduler.submit(request).expect("taken")
    }

    pub fn run(&self, request: Request) -> Outcome {
        outcome(self.submit(request))
    }

    /// Waits until a condition holds.
    pub fn until(&self, what: &str, holds: impl Fn(&Status) -> bool) {
        let end = std::time::Instant::now() + PATIENCE;
        while !holds(&self.scheduler.status()) {
            assert!(std::time::Instant::now() < end, "{what}: {:?}", self.scheduler.status());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Nothing runs, and as many as there are slots run at once and are answered rightly: none was lost.
    pub fn check_whole(&self) {
        self.until("well", |s| s.health == Health::Well);
        self.until("nothing runs", |s| s.running + s.waiting == 0);
        let prompts: Vec<Vec<u32>> = (0..SLOTS).map(|i| distinct(900 + i, 40)).collect();
        let streams: Vec<EventStream> =
            prompts.iter().map(|p| self.submit(request(p.clone(), 6))).collect();
        for (stream, p) in streams.into_iter().zip(&prompts) {
            let got = outcome(stream);
            assert_eq!((got.ids, got.end), (oracle::answer(p, 0, 6), Ok(Finish::Length)));
        }
        self.until("nothing runs", |s| s.running + s.waiting == 0);
    }
}
