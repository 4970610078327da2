//! A program whose state is a hash of the tokens a slot has seen: a wrong, missing, repeated or reordered
//! token changes everything after it. It breaks on every call that breaks a rule of the interface.
#![allow(dead_code)]

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use lily_device::{
    Call, Counters, Device, Fault, FaultyProgram, Input, KvPart, Limits, MemoryLimit, MemoryNeed,
    Output, PrepareError, Program, Refusal, Schedule, Score, Segment, SegmentOut, SlotId, Snapshot,
    Step, StepError, StepOut, Ticket, Weight,
};
use lily_engine::{
    Cancel, Engine, EngineError, EngineOptions, GenerateParams, Generated, Logprobs, Machine,
    SampleParams, Sampled, Session,
};
use lily_ops::plan::PAGE_TOKENS;
use lily_ops::{Case, CaseOutputs, Plan, SlotState, ValueId, case::NO_STATE};

pub const VOCAB: usize = 50_021;

/// splitmix64's output function.
fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

fn see(state: u64, token: u32) -> u64 {
    mix(state.rotate_left(7) ^ u64::from(token))
}

/// Tells one cache from another.
fn sum(kv: &[u8]) -> u64 {
    kv.iter().fold(1, |sum, byte| see(sum, u32::from(*byte)))
}

fn choose(state: u64, seed: u64, index: u64) -> u32 {
    (mix(state ^ mix(seed) ^ mix(index ^ 0xABCD)) % VOCAB as u64) as u32
}

fn score(state: u64, target: u32) -> Score {
    let value = |x: u64| -((mix(x) % 10_000) as f32) / 100.0;
    Score {
        logprob: value(state ^ u64::from(target)),
        top1: choose(state, 0, 0),
        top1_logprob: value(state),
    }
}

/// What the program must answer, computed without it.
pub mod oracle {
    use super::*;

    pub fn answer(prompt: &[u32], seed: u64, count: usize) -> Vec<u32> {
        answer_from(prompt, seed, 0, count)
    }

    /// The tokens after `tokens`, the last `first` of which belong to the answer.
    pub fn answer_from(tokens: &[u32], seed: u64, first: usize, count: usize) -> Vec<u32> {
        let mut state = tokens.iter().fold(0, |s, &t| see(s, t));
        let mut ids = Vec::new();
        for index in first..first + count {
            let token = choose(state, seed, index as u64);
            ids.push(token);
            state = see(state, token);
        }
        ids
    }

    pub fn scores(tokens: &[u32]) -> Vec<Score> {
        let mut state = 0;
        let pairs = tokens.windows(2);
        pairs
            .map(|w| {
                state = see(state, w[0]);
                score(state, w[1])
            })
            .collect()
    }
}

#[derive(Clone, Debug, Default)]
struct Slot {
    state: u64,
    position: usize,
    /// A byte for each token seen, in the place of K and V.
    kv: Vec<u8>,
    pages: usize,
    generated: u64,
    /// The token that the previous step sampled.
    last: Option<u32>,
    held: bool,
    /// The state before the last step, if it was one of a single token.
    before: Option<Box<Slot>>,
    /// Tokens of the next step behind which the state is kept.
    marks: Vec<usize>,
    /// States that the last step kept, with their positions.
    marked: Vec<(usize, u64)>,
}

/// What a fake program saw, in order.
#[derive(Default)]
pub struct Log {
    /// Rows of each segment of each step.
    pub steps: Vec<Vec<usize>>,
    /// Steps in flight when each was submitted.
    pub in_flight: Vec<usize>,
    pub resets: usize,
    pub restores: usize,
    pub undos: usize,
    /// Raised when that many steps have run.
    pub cancel_at: Option<(usize, Cancel)>,
    /// The next results are cut to nothing.
    pub garble: bool,
    /// The next step fails for the first of its slots only.
    pub fail_first: bool,
    /// The first segment of the next step fails, the others do not.
    pub fail_segment: bool,
    /// The next step does nothing, which waiting for it tells as a failure of its first slot.
    pub fail_late: bool,
    /// Steps with this token are refused.
    pub refuse: Option<u32>,
}

pub struct FakeProgram {
    plan: Arc<Plan>,
    limits: Limits,
    slots: Vec<Slot>,
    done: Vec<(u64, Result<StepOut, StepError>)>,
    tickets: u64,
    /// Steps in which the host takes part run alone, as on a GPU.
    overlaps: bool,
    /// States inside steps are kept.
    marks: bool,
    log: Arc<Mutex<Log>>,
}

/// What the fake program tells of log-probabilities.
fn told(state: u64, token: u32, params: &SampleParams) -> Sampled {
    let logprobs = params.logprobs.map(|n| Logprobs {
        logprob: score(state, token).logprob,
        top: (0..u32::from(n)).map(|id| (id, score(state, id).logprob)).collect(),
    });
    Sampled { id: token, logprobs }
}

impl FakeProgram {
    fn slot(&self, slot: SlotId) -> Result<&Slot, StepError> {
        let slots = self.slots.len();
        Ok(self.slots.get(slot.0 as usize).ok_or(Refusal::NoSuchSlot { slot, slots })?)
    }

    fn slot_mut(&mut self, slot: SlotId) -> Result<&mut Slot, StepError> {
        self.slot(slot)?;
        Ok(&mut self.slots[slot.0 as usize])
    }

    fn used_pages(&self) -> usize {
        self.slots.iter().map(|s| s.pages).sum()
    }

    fn take_pages(&self, position: usize, have: usize) -> Result<usize, Refusal> {
        let need = position.div_ceil(PAGE_TOKENS).saturating_sub(have);
        let free = self.limits.pages - self.used_pages();
        if need > free { Err(Refusal::OutOfPages { need, free }) } else { Ok(need) }
    }
}

fn rule(holds: bool, what: &str) -> Result<(), Refusal> {
    if holds { Ok(()) } else { Err(Refusal::Invalid(what.into())) }
}

impl Program for FakeProgram {
    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn alone(&self, step: &Step) -> bool {
        let read_back = |s: &Segment| match &s.output {
            Output::None => false,
            Output::Sample(params) => params.logprobs.is_some(),
            Output::Hold | Output::Scores(_) | Output::Logits => true,
        };
        self.overlaps && step.segments.iter().any(read_back)
    }

    fn submit(&mut self, step: Step) -> Result<Ticket, StepError> {
        rule(self.done.len() < 2, "more than two steps in flight")?;
        rule(self.done.is_empty() || !self.alone(&step), "a step beside one that runs alone")?;
        self.log.lock().unwrap().in_flight.push(self.done.len());
        rule(!step.segments.is_empty(), "a step without segments")?;
        let (mut rows, mut need) = (Vec::new(), 0);
        let mut inputs = Vec::new();
        let mut seen = BTreeSet::new();
        for s in &step.segments {
            let slot = self.slot(s.slot)?;
            rule(seen.insert(s.slot), "a slot twice in a step")?;
            let tokens = match &s.input {
                Input::Tokens(tokens) => tokens.clone(),
                Input::LastSampled => {
                    vec![slot.last.ok_or(Refusal::Invalid("nothing was sampled".into()))?]
                }
            };
            rule(!tokens.is_empty(), "an empty segment")?;
            let refused = self.log.lock().unwrap().refuse;
            rule(refused.is_none_or(|id| !tokens.contains(&id)), "a token that is refused")?;
            rule(tokens.iter().all(|&t| (t as usize) < VOCAB), "a token outside the vocabulary")?;
            if let Output::Scores(targets) = &s.output {
                rule(targets.len() == tokens.len(), "as many targets as tokens")?;
            }
            need += self.take_pages(slot.position + tokens.len(), slot.pages)?;
            rows.push(tokens.len());
            inputs.push(tokens);
        }
        rule(rows.iter().sum::<usize>() <= self.limits.rows, "more rows than the limit")?;
        let free = self.limits.pages - self.used_pages();
        if need > free {
            return Err(Refusal::OutOfPages { need, free }.into());
        }

        let mut log = self.log.lock().unwrap();
        log.steps.push(rows);
        if let Some((at, cancel)) = &log.cancel_at
            && log.steps.len() == *at
        {
            cancel.cancel();
        }
        if std::mem::take(&mut log.fail_first) {
            let slots = vec![step.segments[0].slot];
            self.slots[slots[0].0 as usize].state ^= 0xBAD;
            return Err(StepError::Failed { slots, reason: "not finite in layer 3".into() });
        }
        if std::mem::take(&mut log.fail_late) {
            let slots = vec![step.segments[0].slot];
            self.tickets += 1;
            let error = StepError::Failed { slots, reason: "not finite in layer 4".into() };
            self.done.push((self.tickets, Err(error)));
            return Ok(Ticket(self.tickets));
        }
        let garble = std::mem::take(&mut log.garble);
        let fail_segment = std::mem::take(&mut log.fail_segment);
        drop(log);

        let mut out = Vec::new();
        for (s, tokens) in step.segments.iter().zip(&inputs) {
            let undo = self.limits.undo && tokens.len() == 1;
            let slot = &mut self.slots[s.slot.0 as usize];
            slot.before = None;
            slot.before = undo.then(|| Box::new(slot.clone()));
            let mut states = Vec::new();
            for &t in tokens {
                slot.state = see(slot.state, t);
                slot.kv.push(slot.state as u8);
                states.push(slot.state);
            }
            let inside = std::mem::take(&mut slot.marks).into_iter().filter(|n| *n < tokens.len());
            slot.marked = inside.map(|n| (slot.position + n, states[n - 1])).collect();
            slot.position += tokens.len();
            slot.pages = slot.pages.max(slot.position.div_ceil(PAGE_TOKENS));
            slot.last = None;
            slot.held = s.output == Output::Hold;
            out.push(match &s.output {
                Output::None | Output::Hold => SegmentOut::None,
                Output::Sample(params) => {
                    let token = choose(slot.state, params.seed, slot.generated);
                    slot.generated += 1;
                    slot.last = Some(token);
                    SegmentOut::Sampled(told(slot.state, token, params))
                }
                Output::Scores(targets) => SegmentOut::Scores(
                    states.iter().zip(targets).map(|(&s, &t)| score(s, t)).collect(),
                ),
                Output::Logits => SegmentOut::Logits(vec![0.0; tokens.len() * VOCAB]),
            });
        }
        if garble {
            out.fill(SegmentOut::None);
        }
        if fail_segment {
            self.slots[step.segments[0].slot.0 as usize].state ^= 0xBAD;
            out[0] = SegmentOut::Failed("not finite in layer 5".into());
        }
        self.tickets += 1;
        self.done.push((self.tickets, Ok(StepOut { segments: out })));
        Ok(Ticket(self.tickets))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<StepOut, StepError> {
        let at = self.done.iter().position(|(t, _)| *t == ticket.0);
        let at = at.ok_or(Refusal::Invalid("no such ticket".into()))?;
        self.done.remove(at).1
    }

    fn undo_last(&mut self, slot: SlotId) -> Result<(), StepError> {
        rule(self.done.is_empty(), "a step is in flight")?;
        let slot = self.slot_mut(slot)?;
        *slot = *slot.before.take().ok_or(Refusal::Invalid("nothing to take back".into()))?;
        self.log.lock().unwrap().undos += 1;
        Ok(())
    }

    fn sample(&mut self, slot: SlotId, params: &SampleParams) -> Result<Sampled, StepError> {
        let slot = self.slot_mut(slot)?;
        rule(slot.held, "no logits are held")?;
        let token = choose(slot.state, params.seed, slot.generated);
        slot.generated += 1;
        slot.held = false;
        slot.last = Some(token);
        Ok(told(slot.state, token, params))
    }

    fn reset(&mut self, slot: SlotId) -> Result<(), StepError> {
        *self.slot_mut(slot)? = Slot::default();
        self.log.lock().unwrap().resets += 1;
        Ok(())
    }

    fn begin_answer(&mut self, slot: SlotId, answered: &[u32]) -> Result<(), StepError> {
        let slot = self.slot_mut(slot)?;
        slot.generated = answered.len() as u64;
        slot.before = None;
        Ok(())
    }

    fn position(&self, slot: SlotId) -> Result<usize, StepError> {
        Ok(self.slot(slot)?.position)
    }

    fn snapshot_behind(&mut self, slot: SlotId, from: usize) -> Result<Snapshot, StepError> {
        let slot = self.slot(slot)?;
        let state = [slot.state, sum(&slot.kv)].map(u64::to_le_bytes).concat();
        Ok(Snapshot {
            position: slot.position,
            last_sampled: slot.last,
            generated: slot.generated,
            counts: Default::default(),
            recurrent: state,
            conv: Vec::new(),
            kv: slot.kv[from..].to_vec(),
        })
    }

    fn restore_parts(
        &mut self,
        slot: SlotId,
        snapshot: &Snapshot,
        kv: &[KvPart<'_>],
    ) -> Result<(), StepError> {
        let have = self.slot(slot)?.pages;
        let pages = have + self.take_pages(snapshot.position, have)?;
        KvPart::check(kv, snapshot.position, 1).map_err(Refusal::Invalid)?;
        let (state, check) = snapshot.recurrent.split_at(8);
        let kv = kv.iter().flat_map(|part| part.bytes).copied().collect::<Vec<u8>>();
        rule(check == sum(&kv).to_le_bytes(), "the cache is not that of the state")?;
        *self.slot_mut(slot)? = Slot {
            state: u64::from_le_bytes(state.try_into().unwrap()),
            position: snapshot.position,
            kv,
            pages,
            generated: snapshot.generated,
            last: snapshot.last_sampled,
            held: false,
            before: None,
            marks: Vec::new(),
            marked: Vec::new(),
        };
        self.log.lock().unwrap().restores += 1;
        Ok(())
    }

    fn marks(&self) -> bool {
        self.marks
    }

    fn mark(&mut self, slot: SlotId, rows: &[usize]) -> Result<(), StepError> {
        rule(self.marks || rows.is_empty(), "no states inside steps")?;
        rule(rows.first() != Some(&0) && rows.is_sorted_by(|a, b| a < b), "marks out of order")?;
        self.slot_mut(slot)?.marks = rows.to_vec();
        Ok(())
    }

    fn take_marked(&mut self, slot: SlotId, from: usize) -> Result<Vec<Snapshot>, StepError> {
        let slot = self.slot_mut(slot)?;
        let mut from = from;
        let taken = std::mem::take(&mut slot.marked).into_iter().map(|(position, state)| {
            let kv = slot.kv[from..position].to_vec();
            from = position;
            Snapshot {
                position,
                last_sampled: None,
                generated: 0,
                counts: Default::default(),
                recurrent: [state, sum(&slot.kv[..position])].map(u64::to_le_bytes).concat(),
                conv: Vec::new(),
                kv,
            }
        });
        Ok(taken.collect())
    }

    fn export(&mut self, _: SlotId) -> Result<SlotState, StepError> {
        Ok(SlotState::default())
    }

    fn free_pages(&self) -> usize {
        self.limits.pages - self.used_pages()
    }

    fn memory(&self) -> MemoryNeed {
        MemoryNeed::default()
    }

    fn scratch_high_water(&self) -> u64 {
        0
    }

    fn counters(&self) -> Counters {
        Counters::default()
    }
}

/// Prepares fake programs.
#[derive(Default)]
pub struct FakeDevice {
    pub faults: Vec<(u64, Fault)>,
    /// Faults of other calls.
    pub schedule: Schedule,
    /// Two steps in flight pay.
    pub overlaps: bool,
    /// States inside steps are kept.
    pub marks: bool,
    /// Steps of so many rows at most run in another form.
    pub few_rows: Option<usize>,
    /// Fewer pages than all slots need.
    pub pages: Option<usize>,
    pub need: MemoryNeed,
    /// What it may take; `None`: the host's memory.
    pub limit: Option<MemoryLimit>,
    pub log: Arc<Mutex<Log>>,
}

impl Device for FakeDevice {
    fn name(&self) -> String {
        "fake".into()
    }

    fn overlaps(&self) -> bool {
        self.overlaps
    }

    fn few_rows(&self) -> Option<usize> {
        self.few_rows
    }

    fn memory(&self, _: &Plan, _: &Limits) -> MemoryNeed {
        self.need
    }

    fn memory_limit(&self) -> MemoryLimit {
        self.limit.unwrap_or(MemoryLimit::Host)
    }

    fn prepare(
        &self,
        plan: Arc<Plan>,
        _: Vec<Weight>,
        mut limits: Limits,
    ) -> Result<Box<dyn Program>, PrepareError> {
        limits.pages = self.pages.unwrap_or(limits.pages);
        let slots = vec![Slot::default(); limits.slots];
        let log = Arc::clone(&self.log);
        let (done, tickets, overlaps, marks) = (Vec::new(), 0, self.overlaps, self.marks);
        let program = FakeProgram { plan, limits, slots, done, tickets, overlaps, marks, log };
        let program = Box::new(program);
        let submits = self.faults.iter().map(|(n, fault)| (Call::Submit, *n, *fault));
        let schedule = submits.chain(self.schedule.iter().copied()).collect();
        Ok(Box::new(FaultyProgram::with_schedule(program, schedule)))
    }

    fn evaluate(&self, case: &Case) -> Result<CaseOutputs, PrepareError> {
        Err(PrepareError::Invalid(case.name.clone()))
    }
}

pub fn plan() -> Arc<Plan> {
    Arc::new(Plan {
        name: "fake model".into(),
        vocab: VOCAB,
        layers: Vec::new(),
        values: Vec::new(),
        weights: Vec::new(),
        state: NO_STATE,
        body: Vec::new(),
        head: Vec::new(),
        hidden: ValueId(0),
        logits: ValueId(0),
    })
}

pub const OPTIONS: EngineOptions =
    EngineOptions { snapshot_bytes: 1 << 30, ..EngineOptions::new(1024, 2, 16) };

impl FakeDevice {
    pub fn engine(&self, options: EngineOptions) -> Engine {
        Engine::on_machine(self, plan(), Vec::new(), options, &Machine::UNKNOWN).unwrap()
    }

    /// Rows of each step since the last call, for steps of one segment.
    pub fn steps(&self) -> Vec<usize> {
        let steps = std::mem::take(&mut self.log.lock().unwrap().steps);
        steps.into_iter().map(|s| s.iter().sum()).collect()
    }

    /// A flag that is raised while the `at`-th step from now runs.
    pub fn cancel_at(&self, at: usize) -> Cancel {
        let cancel = Cancel::new();
        let mut log = self.log.lock().unwrap();
        log.steps.clear();
        log.cancel_at = Some((at, cancel.clone()));
        cancel
    }
}

pub fn failing(faults: &[(u64, Fault)]) -> FakeDevice {
    FakeDevice { faults: faults.to_vec(), ..FakeDevice::default() }
}

/// A prompt of `n` tokens.
pub fn prompt(n: usize) -> Vec<u32> {
    (0..n as u64).map(|i| (mix(i) % VOCAB as u64) as u32).collect()
}

pub fn params(max_tokens: usize) -> GenerateParams {
    GenerateParams { sample: SampleParams::GREEDY, max_tokens, stop_ids: Vec::new() }
}

/// Syncs `tokens` and answers with `count` tokens.
pub fn answer(
    engine: &mut Engine,
    session: &mut Session,
    tokens: &[u32],
    count: usize,
) -> Result<Generated, EngineError> {
    answer_with(engine, session, tokens, &params(count))
}

/// Syncs `tokens` and answers.
pub fn answer_with(
    engine: &mut Engine,
    session: &mut Session,
    tokens: &[u32],
    params: &GenerateParams,
) -> Result<Generated, EngineError> {
    let cancel = Cancel::new();
    engine.sync(session, tokens, &cancel, |_, _| {})?;
    engine.generate(session, params, &cancel, |_| std::ops::ControlFlow::Continue(()))
}
