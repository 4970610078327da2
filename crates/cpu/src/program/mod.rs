//! A plan prepared for the CPU: memory laid out once, then one kernel call an operation.

mod dispatch;
mod executor;
mod memory;
mod shapes;
mod slots;
mod state;
mod values;

use std::collections::VecDeque;

use lily_device::{
    Counters, Input, Limits, MemoryNeed, Output, Program, Refusal, Score, Segment, SegmentOut,
    SlotId, Snapshot, Step, StepError, StepOut, Ticket,
};
use lily_ops::sample::{SampleParams, sample};
use lily_ops::{Case, CaseOutputs, Plan, SlotState};

pub(crate) use executor::Executor;
use executor::{Row, Run};
pub(crate) use memory::memory_need;
pub(crate) use shapes::unsupported;
use slots::Slots;

use crate::kernels::elementwise;
use crate::simd::Isa;

/// Steps that may be in flight: submitted and not yet waited for.
const IN_FLIGHT: usize = 2;

/// Runs steps as they are submitted; waiting only hands over the result.
pub(crate) struct CpuProgram {
    executor: Executor,
    slots: Slots,
    done: VecDeque<(u64, Result<StepOut, StepError>)>,
    next_ticket: u64,
    steps: u64,
}

impl CpuProgram {
    pub fn new(executor: Executor) -> Self {
        let limits = executor.limits();
        Self {
            executor,
            slots: Slots::new(&limits),
            done: VecDeque::new(),
            next_ticket: 0,
            steps: 0,
        }
    }

    /// Checks a step without changing anything; returns the tokens of each segment.
    fn check(&self, step: &Step) -> Result<Vec<Vec<u32>>, StepError> {
        let limits = self.executor.limits();
        let invalid = |what: String| StepError::from(Refusal::Invalid(what));
        if self.done.len() >= IN_FLIGHT {
            return Err(invalid(format!("{IN_FLIGHT} steps are in flight; wait for one first")));
        }
        if step.segments.is_empty() {
            return Err(invalid("the step has no segments".into()));
        }
        let vocab = self.executor.plan().vocab as u32;
        let mut tokens = Vec::new();
        let mut need = 0;
        for (i, segment) in step.segments.iter().enumerate() {
            let slot = self.slots.get(segment.slot)?;
            if step.segments[..i].iter().any(|s| s.slot == segment.slot) {
                return Err(invalid(format!("two segments name slot {}", segment.slot.0)));
            }
            let list = match &segment.input {
                Input::Tokens(list) => list.clone(),
                Input::LastSampled => vec![slot.last_sampled.ok_or_else(|| {
                    invalid(format!("nothing was sampled in slot {} yet", segment.slot.0))
                })?],
            };
            if list.is_empty() {
                return Err(invalid(format!(
                    "the segment of slot {} has no tokens",
                    segment.slot.0
                )));
            }
            if let Some((at, id)) = list.iter().enumerate().find(|(_, id)| **id >= vocab) {
                return Err(invalid(format!("token {at} is {id}; the vocabulary has {vocab} ids")));
            }
            match &segment.output {
                Output::Scores(targets)
                    if targets.len() != list.len() || targets.iter().any(|id| *id >= vocab) =>
                {
                    return Err(invalid(format!(
                        "{} targets for {} tokens, each below {vocab}, are needed",
                        targets.len(),
                        list.len()
                    )));
                }
                Output::Sample(params) => params.check().map_err(invalid)?,
                _ => {}
            }
            need += slot.pages_needed(list.len());
            tokens.push(list);
        }
        let rows: usize = tokens.iter().map(Vec::len).sum();
        if rows > limits.rows {
            return Err(invalid(format!(
                "{rows} tokens in one step; the program was prepared for {}",
                limits.rows
            )));
        }
        let free = self.slots.free_pages();
        match need <= free {
            true => Ok(tokens),
            false => Err(Refusal::OutOfPages { need, free }.into()),
        }
    }

    fn execute(&mut self, step: &Step, tokens: Vec<Vec<u32>>) -> Result<StepOut, StepError> {
        self.steps += 1;
        let counts = tokens.iter().map(Vec::len);
        let ids: Vec<SlotId> = step.segments.iter().map(|s| s.slot).collect();
        for (slot, rows) in ids.iter().zip(counts) {
            self.slots.grow(*slot, rows);
        }
        let run = Run::new(&self.slots, &ids, &tokens);
        match self.forward(step, &run) {
            Ok(segments) => {
                for (slot, list) in ids.iter().zip(&tokens) {
                    self.slots.live_mut(*slot).position += list.len();
                }
                Ok(StepOut { segments })
            }
            Err(reason) => {
                for slot in &ids {
                    self.slots.live_mut(*slot).poisoned = true;
                }
                Err(StepError::Failed { slots: ids, reason })
            }
        }
    }

    fn forward(&mut self, step: &Step, run: &Run) -> Result<Vec<SegmentOut>, String> {
        self.executor.body(run)?;
        let vocab = self.executor.plan().vocab;
        let mut out: Vec<SegmentOut> = step
            .segments
            .iter()
            .map(|s| match &s.output {
                Output::Scores(_) => SegmentOut::Scores(Vec::new()),
                Output::Logits => SegmentOut::Logits(Vec::new()),
                _ => SegmentOut::None,
            })
            .collect();
        let mut wanted: Vec<Row> = Vec::new();
        for (segment, rows) in step.segments.iter().zip(run.segments()) {
            let index = rows.index;
            wanted.extend(segment.output.rows(rows.rows).map(|row| Row { segment: index, row }));
        }
        let isa = self.executor.isa();
        for tile in wanted.chunks(self.executor.limits().outputs) {
            let rows: Vec<usize> = tile.iter().map(|r| run.step_row(*r)).collect();
            let logits = self.executor.head(run, &rows)?;
            for (at, logits) in tile.iter().zip(logits.chunks_mut(vocab)) {
                let segment = &step.segments[at.segment];
                let taken = take(&mut self.slots, isa, segment, at.row, logits)?;
                match (taken, &mut out[at.segment]) {
                    (Taken::Token(id), slot) => *slot = SegmentOut::Sampled(id),
                    (Taken::Score(score), SegmentOut::Scores(list)) => list.push(score),
                    (Taken::Logits, SegmentOut::Logits(list)) => list.extend_from_slice(logits),
                    _ => {}
                }
            }
        }
        Ok(out)
    }

    /// Runs the one operation of a case.
    pub fn evaluate(mut self, case: &Case) -> CaseOutputs {
        let ids: Vec<SlotId> = case.segments.iter().map(|s| SlotId(s.slot as u32)).collect();
        for (i, state) in case.slots.iter().enumerate() {
            self.import(SlotId(i as u32), state);
        }
        let tokens: Vec<Vec<u32>> =
            case.segments.iter().map(|s| case.tokens[s.first..s.first + s.rows].to_vec()).collect();
        for (slot, list) in ids.iter().zip(&tokens) {
            self.slots.grow(*slot, list.len());
        }
        let run = Run::new(&self.slots, &ids, &tokens);
        let values = self.executor.single(&run, case);
        let slots = case.slots.iter().enumerate().map(|(i, before)| {
            let slot = SlotId(i as u32);
            // An operation that writes K and V leaves as many tokens as the segment has rows.
            let rows = case.segments.iter().find(|s| s.slot == i).map_or(0, |s| s.rows);
            let layers = case.plan.state.kv_layers.max(1);
            let row = case.plan.state.kv_heads * case.plan.state.head_dim * layers;
            let cached = before.k.len() / row;
            let after = if case.op().name() == "attention_prep" { cached + rows } else { cached };
            SlotState { position: before.position, ..self.export_tokens(slot, after) }
        });
        let slots = slots.collect();
        CaseOutputs { values, slots }
    }

    fn import(&mut self, slot: SlotId, state: &SlotState) {
        let layout = self.executor.plan().state;
        let layers = layout.kv_layers.max(1);
        let tokens = state.k.len() / (layout.kv_heads * layout.head_dim * layers);
        self.slots.grow(slot, tokens);
        let live = self.slots.live_mut(slot);
        live.position = state.position;
        self.executor.state_mut().import(slot, &live.pages, state);
    }

    fn export_tokens(&self, slot: SlotId, tokens: usize) -> SlotState {
        let live = self.slots.get(slot).expect("the slot is usable");
        self.executor.state().export(slot, &live.pages, tokens)
    }
}

/// What was done with a row of logits.
enum Taken {
    Nothing,
    Token(u32),
    Score(Score),
    Logits,
}

/// Does with one row of logits what its segment asks for.
fn take(
    slots: &mut Slots,
    isa: Isa,
    segment: &Segment,
    row: usize,
    logits: &mut [f32],
) -> Result<Taken, String> {
    match &segment.output {
        Output::None => Ok(Taken::Nothing),
        Output::Logits => Ok(Taken::Logits),
        Output::Scores(targets) => Ok(Taken::Score(score(isa, logits, targets[row]))),
        Output::Hold => {
            slots.live_mut(segment.slot).held = Some(logits.to_vec());
            Ok(Taken::Nothing)
        }
        Output::Sample(params) => choose(slots, segment.slot, params, logits).map(Taken::Token),
    }
}

fn choose(
    slots: &mut Slots,
    slot: SlotId,
    params: &SampleParams,
    logits: &mut [f32],
) -> Result<u32, String> {
    let live = slots.live_mut(slot);
    let id = sample(logits, params, &live.counts, live.generated)
        .ok_or("no token may be chosen: the mask allows none, or a logit is NaN")?;
    live.last_sampled = Some(id);
    live.generated += 1;
    *live.counts.entry(id).or_default() += 1;
    Ok(id)
}

fn score(isa: Isa, logits: &[f32], target: u32) -> Score {
    let sum = elementwise::log_sum_exp(isa, logits);
    let top1 = elementwise::argmax(isa, logits).unwrap_or(0) as u32;
    let logprob = |id: u32| (f64::from(logits[id as usize]) - sum) as f32;
    Score { logprob: logprob(target), top1, top1_logprob: logprob(top1) }
}

impl Program for CpuProgram {
    fn plan(&self) -> &Plan {
        self.executor.plan()
    }

    fn limits(&self) -> Limits {
        self.executor.limits()
    }

    fn submit(&mut self, step: Step) -> Result<Ticket, StepError> {
        let tokens = self.check(&step)?;
        let result = self.execute(&step, tokens);
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.done.push_back((ticket, result));
        Ok(Ticket(ticket))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<StepOut, StepError> {
        let at = self.done.iter().position(|(t, _)| *t == ticket.0);
        match at.and_then(|at| self.done.remove(at)) {
            Some((_, result)) => result,
            None => {
                Err(Refusal::Invalid(format!("ticket {} was never given out", ticket.0)).into())
            }
        }
    }

    fn sample(&mut self, slot: SlotId, params: &SampleParams) -> Result<u32, StepError> {
        let invalid = |what: String| StepError::from(Refusal::Invalid(what));
        self.slots.get(slot)?;
        params.check().map_err(invalid)?;
        let mut logits = self
            .slots
            .live_mut(slot)
            .held
            .take()
            .ok_or_else(|| invalid(format!("slot {} holds no logits", slot.0)))?;
        let kept = logits.clone();
        let chosen = choose(&mut self.slots, slot, params, &mut logits);
        if chosen.is_err() {
            self.slots.live_mut(slot).held = Some(kept);
        }
        chosen.map_err(invalid)
    }

    fn reset(&mut self, slot: SlotId) -> Result<(), StepError> {
        self.slots.reset(slot)?;
        self.executor.state_mut().clear(slot);
        Ok(())
    }

    fn begin_answer(&mut self, slot: SlotId) -> Result<(), StepError> {
        self.slots.get(slot)?;
        let live = self.slots.live_mut(slot);
        live.generated = 0;
        live.counts.clear();
        Ok(())
    }

    fn position(&self, slot: SlotId) -> Result<usize, StepError> {
        Ok(self.slots.get(slot)?.position)
    }

    fn snapshot(&mut self, slot: SlotId) -> Result<Snapshot, StepError> {
        let live = self.slots.get(slot)?;
        let (recurrent, conv, kv) = self.executor.state().save(slot, &live.pages, live.position);
        Ok(Snapshot {
            position: live.position,
            last_sampled: live.last_sampled,
            generated: live.generated,
            counts: live.counts.clone(),
            recurrent,
            conv,
            kv,
        })
    }

    fn restore(&mut self, slot: SlotId, snapshot: &Snapshot) -> Result<(), StepError> {
        self.executor.state().check_snapshot(snapshot).map_err(Refusal::Invalid)?;
        self.slots.reserve_for_restore(slot, snapshot.position)?;
        let live = self.slots.live_mut(slot);
        live.position = snapshot.position;
        live.last_sampled = snapshot.last_sampled;
        live.generated = snapshot.generated;
        live.counts = snapshot.counts.clone();
        self.executor.state_mut().load(slot, &live.pages, snapshot);
        Ok(())
    }

    fn export(&mut self, slot: SlotId) -> Result<SlotState, StepError> {
        let position = self.slots.get(slot)?.position;
        Ok(SlotState { position, ..self.export_tokens(slot, position) })
    }

    fn free_pages(&self) -> usize {
        self.slots.free_pages()
    }

    fn memory(&self) -> MemoryNeed {
        self.executor.memory()
    }

    fn scratch_high_water(&self) -> u64 {
        self.executor.scratch_high_water()
    }

    fn counters(&self) -> Counters {
        Counters { steps: self.steps, weight_bytes: self.executor.weight_bytes() }
    }
}
