//! Lily as an engine, on a device whose every step takes a known time.

use std::sync::Arc;
use std::time::Duration;

use lily_bench::synth::{Shape, Synth};
use lily_bench::{
    Clock, Engine, LilyEngine, ManualClock, Point, Protocol, Trouble, prompt_ids, run,
};
use lily_checkpoint::Checkpoint;
use lily_cpu::{CpuDevice, CpuOptions};
use lily_device::{
    Counters, Device, Input, KvPart, Limits, MemoryNeed, Plan, PrepareError, Program, SlotId,
    Snapshot, Step, StepError, StepOut, Ticket, Weight,
};
use lily_engine::{
    Cancel, Engine as Inner, EngineOptions, Machine, SampleParams, Sampled, snapshot_bytes,
};
use lily_model::{Model, Precision, load};
use lily_ops::{Case, CaseOutputs, SlotState};

/// Milliseconds of a prompt token, of a decode step, of a copy of the state.
const PROMPT: u64 = 3;
const DECODE: u64 = 50;
const COPY: u64 = 100_000;

struct TimedDevice {
    inner: CpuDevice,
    clock: Arc<ManualClock>,
}

struct TimedProgram {
    inner: Box<dyn Program>,
    clock: Arc<ManualClock>,
}

impl TimedProgram {
    fn pass(&self, millis: u64) {
        self.clock.advance(Duration::from_millis(millis));
    }
}

impl Device for TimedDevice {
    fn name(&self) -> String {
        "timed".into()
    }
    fn memory(&self, plan: &Plan, limits: &Limits) -> MemoryNeed {
        self.inner.memory(plan, limits)
    }
    fn prepare(
        &self,
        plan: Arc<Plan>,
        weights: Vec<Weight>,
        limits: Limits,
    ) -> Result<Box<dyn Program>, PrepareError> {
        let inner = self.inner.prepare(plan, weights, limits)?;
        Ok(Box::new(TimedProgram { inner, clock: Arc::clone(&self.clock) }))
    }
    fn evaluate(&self, case: &Case) -> Result<CaseOutputs, PrepareError> {
        self.inner.evaluate(case)
    }
}

impl Program for TimedProgram {
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
        for segment in &step.segments {
            self.pass(match &segment.input {
                Input::Tokens(tokens) => PROMPT * tokens.len() as u64,
                Input::LastSampled => DECODE,
            });
        }
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
        self.pass(COPY);
        self.inner.snapshot_behind(slot, from)
    }
    fn restore_parts(
        &mut self,
        slot: SlotId,
        snapshot: &Snapshot,
        kv: &[KvPart<'_>],
    ) -> Result<(), StepError> {
        self.pass(COPY);
        self.inner.restore_parts(slot, snapshot, kv)
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

fn model(dir: &std::path::Path) -> Model {
    Synth::new(Shape::tiny()).write(dir, |_, _| ()).unwrap();
    load(&Checkpoint::open(dir).unwrap(), Precision::Standard).unwrap()
}

struct Rig {
    engine: LilyEngine,
    clock: Arc<ManualClock>,
    cancel: Cancel,
    _dir: tempfile::TempDir,
}

/// Chunks of 64 tokens, contexts of at most 512, with room for a copy of a context or not.
fn rig(copies: bool) -> Rig {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path());
    let clock = Arc::new(ManualClock::new());
    let options = CpuOptions { threads: Some(1), isa: None };
    let device = TimedDevice { inner: CpuDevice::new(options), clock: Arc::clone(&clock) };
    let mut options = EngineOptions::new(512, 1, 64);
    if copies {
        options.snapshot_bytes = snapshot_bytes(&model.plan, 512);
    }
    let inner =
        Inner::on_machine(&device, model.plan, model.weights, options, &Machine::UNKNOWN).unwrap();
    let cancel = Cancel::new();
    let engine = LilyEngine::new("lily", inner, clock.clone(), cancel.clone());
    Rig { engine, clock, cancel, _dir: dir }
}

fn seconds(millis: u64) -> f64 {
    Duration::from_millis(millis).as_secs_f64()
}

#[test]
fn a_prompt_costs_its_own_tokens_every_time() {
    let mut rig = rig(true);
    for tokens in [1, 64, 200, 200, 511] {
        // From nothing, whatever was there before: none of it is reused.
        assert_eq!(rig.engine.prefill(tokens), Ok(seconds(PROMPT * tokens as u64)), "{tokens}");
    }
}

#[test]
fn decoding_costs_its_own_steps_and_not_the_context() {
    for copies in [true, false] {
        let mut rig = rig(copies);
        for context in [1, 2, 200, 200, 64] {
            let took = rig.engine.decode(context, 9);
            assert_eq!(took, Ok(seconds(9 * DECODE)), "{context}, copies {copies}");
        }
    }
}

#[test]
fn a_context_is_filled_once_where_there_is_room_for_a_copy() {
    let total = |copies| {
        let mut rig = rig(copies);
        let start = rig.clock.now();
        for _ in 0..5 {
            rig.engine.decode(300, 4).unwrap();
        }
        (rig.clock.now() - start).as_millis() as u64
    };
    let decode = 5 * 4 * DECODE;
    // 299 tokens once, a copy made, and four times brought back; the last token each time.
    assert_eq!(total(true), 299 * PROMPT + 5 * COPY + 5 * PROMPT + decode);
    assert_eq!(total(false), 5 * 300 * PROMPT + decode);
}

#[test]
fn the_protocol_finds_the_speeds_of_the_device() {
    let mut rig = rig(true);
    let protocol = Protocol {
        prefill: vec![100, 256],
        decode: vec![100, 256],
        decode_tokens: 10,
        warm_up: 1,
        rounds: 3,
    };
    let measured = run(&mut [&mut rig.engine], &protocol, &mut ());
    for point in &measured.points {
        let speed = point.speed(0).unwrap();
        let want = match point.point {
            Point::Prefill { .. } => 1000.0 / PROMPT as f64,
            Point::Decode { .. } => 1000.0 / DECODE as f64,
        };
        assert!((speed.median / want - 1.0).abs() < 1e-9, "{}: {speed:?}", point.point);
        assert!(speed.spread() < 1e-9);
    }
}

#[test]
fn errors_and_interruptions_are_told_apart() {
    let mut rig = rig(true);
    let trouble = rig.engine.prefill(1000).unwrap_err();
    assert!(matches!(&trouble, Trouble::Failed(t) if t.contains("1000")), "{trouble}");
    let trouble = rig.engine.decode(510, 64).unwrap_err();
    assert!(matches!(&trouble, Trouble::Failed(_)), "{trouble}");
    assert!(rig.engine.prefill(10).is_ok());
    rig.cancel.cancel();
    assert_eq!(rig.engine.prefill(200), Err(Trouble::Interrupted));
    assert_eq!(rig.engine.decode(200, 4), Err(Trouble::Interrupted));
}

#[test]
fn prompts_are_seeded_and_within_the_vocabulary() {
    let ids = prompt_ids(1000, 512);
    assert_eq!(ids, prompt_ids(1000, 512));
    assert_eq!(ids[..10], prompt_ids(10, 512));
    assert!(ids.iter().all(|id| *id < 512));
    assert!(ids.iter().collect::<std::collections::HashSet<_>>().len() > 400);
    // As the program for mlx-lm makes them.
    assert_eq!(prompt_ids(4, 248_320), [196422, 223718, 204376, 171314]);
}
