//! A plan prepared for the CPU: memory laid out once, then one kernel call an operation.

mod dispatch;
mod executor;
mod memory;
mod shapes;
mod slots;
mod state;
mod values;

use std::collections::VecDeque;
use std::time::Instant;

use lily_device::{
    Counters, Input, KvPart, Limits, Measure, MemoryNeed, OperationTime, OperationTimes, Output,
    Program, Refusal, Score, Segment, SegmentOut, SlotId, Snapshot, Step, StepError, StepOut,
    StepSlots, Ticket, check_params, check_room, check_step,
};
use lily_ops::sample::{SampleParams, Sampled, sample};
use lily_ops::{Case, CaseOutputs, Plan, SlotState};

pub(crate) use executor::Executor;
use executor::{Row, Run, not_finite};
pub(crate) use memory::memory_need;
pub(crate) use shapes::unsupported;
use slots::{Slot, Slots};

use crate::kernels::elementwise;
use crate::simd::Isa;

/// A step that has run and was not waited for.
struct Done {
    ticket: u64,
    slots: Vec<SlotId>,
    result: Result<StepOut, StepError>,
}

/// Runs steps as they are submitted; waiting only hands over the result.
pub(crate) struct CpuProgram {
    executor: Executor,
    slots: Slots,
    done: VecDeque<Done>,
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
        let (vocab, limits) = (self.executor.plan().vocab, self.executor.limits());
        check_step(step, vocab, &limits, self.done.len(), &self.slots)?;
        let tokens = |s: &Segment| match &s.input {
            Input::Tokens(list) => Ok(list.clone()),
            Input::LastSampled => {
                Ok(self.slots.get(s.slot)?.last_sampled.into_iter().collect::<Vec<u32>>())
            }
        };
        step.segments.iter().map(tokens).collect()
    }

    fn check_params(&self, params: &SampleParams) -> Result<(), StepError> {
        Ok(check_params(params, self.executor.plan().vocab)?)
    }

    /// Runs a step; its time is noted while times are measured.
    fn timed<T>(&mut self, step: impl FnOnce(&mut Self) -> T) -> T {
        if self.executor.times.is_none() {
            return step(self);
        }
        let start = Instant::now();
        let result = step(self);
        if let Some(times) = &mut self.executor.times {
            times.steps += 1;
            times.seconds += start.elapsed().as_secs_f64();
        }
        result
    }

    fn execute(&mut self, step: &Step, tokens: Vec<Vec<u32>>) -> Result<StepOut, StepError> {
        self.steps += 1;
        let counts = tokens.iter().map(Vec::len);
        let ids: Vec<SlotId> = step.segments.iter().map(|s| s.slot).collect();
        for (slot, rows) in ids.iter().zip(counts) {
            self.slots.grow(*slot, rows);
            let live = self.slots.live_mut(*slot);
            live.undo = None;
            self.executor.state_mut().begin_marks(*slot, rows);
            if rows == 1 && self.executor.limits().undo {
                live.remember();
                self.executor.state_mut().keep(*slot);
            }
        }
        let mut run = Run::new(&self.slots, &ids, &tokens);
        let segments = self.forward(step, &mut run);
        let failed: Vec<SlotId> = ids
            .iter()
            .zip(&segments)
            .filter(|(_, out)| matches!(out, SegmentOut::Failed(_)))
            .map(|(slot, _)| *slot)
            .collect();
        for (slot, list) in ids.iter().zip(&tokens) {
            let live = self.slots.live_mut(*slot);
            match failed.contains(slot) {
                true => {
                    live.poisoned = true;
                    self.executor.state_mut().unmark(*slot);
                }
                false => {
                    self.executor.state_mut().end_marks(*slot, live.position);
                    live.position += list.len();
                }
            }
        }
        match segments.first() {
            Some(SegmentOut::Failed(reason)) if failed.len() == ids.len() => {
                Err(StepError::Failed { slots: ids, reason: reason.clone() })
            }
            _ => Ok(StepOut { segments }),
        }
    }

    /// Results of all segments. Rows of one segment never change another's, so one that fails takes no
    /// other with it.
    fn forward(&mut self, step: &Step, run: &mut Run) -> Vec<SegmentOut> {
        self.executor.body(run);
        let vocab = self.executor.plan().vocab;
        let isa = self.executor.isa();
        for segment in &step.segments {
            // What an earlier step sampled or held belongs to that step.
            let live = self.slots.live_mut(segment.slot);
            live.last_sampled = None;
            live.holds = false;
        }
        let mut out: Vec<SegmentOut> =
            step.segments.iter().map(|s| empty_result(&s.output)).collect();
        let mut wanted: Vec<Row> = Vec::new();
        for (segment, rows) in step.segments.iter().zip(run.segments()) {
            let index = rows.index;
            if run.failure(index).is_none() {
                let rows = segment.output.rows(rows.rows);
                wanted.extend(rows.map(|row| Row { segment: index, row }));
            }
        }
        for tile in wanted.chunks(self.executor.limits().outputs) {
            let rows: Vec<usize> = tile.iter().map(|r| run.step_row(*r)).collect();
            let measured = self.executor.times.is_some();
            let logits = self.executor.head(run, &rows);
            let start = measured.then(Instant::now);
            for (at, logits) in tile.iter().zip(logits.chunks_mut(vocab)) {
                let segment = &step.segments[at.segment];
                let result = match elementwise::all_finite(isa, logits) {
                    true => {
                        let out = &mut out[at.segment];
                        take(
                            self.slots.live_mut(segment.slot),
                            isa,
                            &segment.output,
                            at.row,
                            logits,
                            out,
                        )
                    }
                    false => Err(not_finite("the output head", "linear")),
                };
                if let Err(reason) = result {
                    run.fail(at.segment, reason);
                }
            }
            if let (Some(start), Some(times)) = (start, &mut self.executor.times) {
                let seconds = start.elapsed().as_secs_f64();
                let (operation, kernel) = ("sample and score", "sample and score");
                let calls = tile.len() as u64;
                times.add(OperationTime {
                    operation,
                    kernel,
                    calls,
                    seconds,
                    ..Default::default()
                });
            }
        }
        for (index, out) in out.iter_mut().enumerate() {
            if let Some(reason) = run.failure(index) {
                *out = SegmentOut::Failed(reason.to_string());
            }
        }
        out
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

/// A segment's result before any row of logits.
fn empty_result(output: &Output) -> SegmentOut {
    match output {
        Output::Scores(_) => SegmentOut::Scores(Vec::new()),
        Output::Logits => SegmentOut::Logits(Vec::new()),
        Output::None | Output::Hold | Output::Sample(_) => SegmentOut::None,
    }
}

/// Does with one row of logits what its segment asks for.
fn take(
    slot: &mut Slot,
    isa: Isa,
    output: &Output,
    row: usize,
    logits: &mut [f32],
    out: &mut SegmentOut,
) -> Result<(), String> {
    match (output, out) {
        (Output::Scores(targets), SegmentOut::Scores(list)) => {
            list.push(score(isa, logits, targets[row]));
        }
        (Output::Logits, SegmentOut::Logits(all)) => all.extend_from_slice(logits),
        (Output::Hold, _) => {
            slot.held.clear();
            slot.held.extend_from_slice(logits);
            slot.holds = true;
        }
        (Output::Sample(params), out) => {
            *out = SegmentOut::Sampled(choose(slot, params, logits)?);
        }
        _ => {}
    }
    Ok(())
}

fn choose(slot: &mut Slot, params: &SampleParams, logits: &mut [f32]) -> Result<Sampled, String> {
    let sampled = sample(logits, params, &slot.counts, slot.generated)
        .ok_or("no token may be chosen: the penalties leave none")?;
    slot.sampled(sampled.id);
    Ok(sampled)
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

    /// Every step has run when it is submitted.
    fn alone(&self, _: &Step) -> bool {
        false
    }

    fn submit(&mut self, step: Step) -> Result<Ticket, StepError> {
        let tokens = self.check(&step)?;
        let result = self.timed(|program| program.execute(&step, tokens));
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let slots = step.segments.iter().map(|s| s.slot).collect();
        self.done.push_back(Done { ticket, slots, result });
        Ok(Ticket(ticket))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<StepOut, StepError> {
        let at = self.done.iter().position(|done| done.ticket == ticket.0);
        match at.and_then(|at| self.done.remove(at)) {
            Some(done) => done.result,
            None => {
                Err(Refusal::Invalid(format!("ticket {} was never given out", ticket.0)).into())
            }
        }
    }

    fn sample(&mut self, slot: SlotId, params: &SampleParams) -> Result<Sampled, StepError> {
        self.slots.get(slot)?;
        self.check_params(params)?;
        let live = self.slots.live_mut(slot);
        if !live.holds {
            return Err(Refusal::Invalid(format!("slot {} holds no logits", slot.0)).into());
        }
        live.holds = false;
        let mut held = std::mem::take(&mut live.held);
        let chosen = choose(live, params, &mut held);
        live.held = held;
        chosen.map_err(|e| Refusal::Invalid(e).into())
    }

    fn undo_last(&mut self, slot: SlotId) -> Result<(), StepError> {
        if self.done.iter().any(|done| done.slots.contains(&slot)) {
            let what = format!("a step of slot {} is in flight; wait for it first", slot.0);
            return Err(Refusal::Invalid(what).into());
        }
        self.slots.undo(slot)?;
        self.executor.state_mut().take_back(slot);
        Ok(())
    }

    fn reset(&mut self, slot: SlotId) -> Result<(), StepError> {
        self.slots.reset(slot)?;
        let state = self.executor.state_mut();
        state.clear(slot);
        state.unmark(slot);
        Ok(())
    }

    fn begin_answer(&mut self, slot: SlotId, answered: &[u32]) -> Result<(), StepError> {
        self.slots.get(slot)?;
        self.slots.live_mut(slot).begin_answer(answered);
        Ok(())
    }

    fn position(&self, slot: SlotId) -> Result<usize, StepError> {
        Ok(self.slots.get(slot)?.position)
    }

    fn snapshot_behind(&mut self, slot: SlotId, from: usize) -> Result<Snapshot, StepError> {
        let live = self.slots.get(slot)?;
        let tokens = from.min(live.position)..live.position;
        let (recurrent, conv, kv) = self.executor.state().save(slot, &live.pages, tokens);
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

    fn restore_parts(
        &mut self,
        slot: SlotId,
        snapshot: &Snapshot,
        kv: &[KvPart<'_>],
    ) -> Result<(), StepError> {
        self.executor.state().check_snapshot(snapshot, kv).map_err(Refusal::Invalid)?;
        check_room(&self.executor.limits(), slot, snapshot.position)?;
        self.slots.reserve_for_restore(slot, snapshot.position)?;
        let live = self.slots.live_mut(slot);
        live.position = snapshot.position;
        live.last_sampled = snapshot.last_sampled;
        live.generated = snapshot.generated;
        live.counts = snapshot.counts.clone();
        let state = self.executor.state_mut();
        state.load(slot, snapshot);
        state.unmark(slot);
        kv.iter().for_each(|part| state.load_kv(&live.pages, part));
        Ok(())
    }

    fn marks(&self) -> bool {
        true
    }

    fn mark(&mut self, slot: SlotId, rows: &[usize]) -> Result<(), StepError> {
        self.slots.get(slot)?;
        if rows.first() == Some(&0) || !rows.is_sorted_by(|a, b| a < b) {
            let what = format!("states behind {rows:?} tokens of a step: they must ascend from 1");
            return Err(Refusal::Invalid(what).into());
        }
        self.executor.state_mut().mark(slot, rows);
        Ok(())
    }

    fn take_marked(&mut self, slot: SlotId, from: usize) -> Result<Vec<Snapshot>, StepError> {
        let pages = self.slots.get(slot)?.pages.clone();
        let state = self.executor.state_mut();
        let mut from = from;
        let taken = state.take_marked(slot).into_iter().map(|marked| {
            let position = marked.position.unwrap_or_default();
            let kv = state.save_kv(&pages, from.min(position)..position);
            from = position;
            Snapshot {
                position,
                last_sampled: None,
                generated: 0,
                counts: Default::default(),
                recurrent: marked.recurrent,
                conv: marked.conv,
                kv,
            }
        });
        Ok(taken.collect())
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
        self.executor.scratch_high_water() + self.slots.held_bytes()
    }

    fn measure(&mut self, what: Measure) -> Result<(), StepError> {
        self.executor.times = match what {
            Measure::Nothing => None,
            Measure::Operations => Some(Box::default()),
            Measure::Twins | Measure::Cache => {
                let what = "the CPU measures kernels and reads outside of steps";
                return Err(Refusal::Invalid(what.into()).into());
            }
        };
        Ok(())
    }

    fn operation_times(&self) -> OperationTimes {
        self.executor.times.as_deref().cloned().unwrap_or_default()
    }

    fn counters(&self) -> Counters {
        Counters { steps: self.steps, weight_bytes: self.executor.weight_bytes() }
    }
}
