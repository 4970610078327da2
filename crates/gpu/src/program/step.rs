//! Steps: checked, written into the step's tables, submitted; results taken when they are waited for.

use lily_device::{
    Input, MAX_IN_FLIGHT, Output, Refusal, Segment, SegmentOut, SlotId, Step, StepError, StepOut,
    Ticket, check_params, check_step,
};
use lily_ops::sample::{SampleParams, Sampled};

use super::head::{self, Asked};
use super::slots::{LastSampled, Undo};
use super::{GpuProgram, Kind};
use crate::driver::Submission;
use crate::kernels::common::{LAST_SAMPLED, SegmentEntry, StepShape};

/// A submitted step.
pub(super) struct Flight {
    pub ticket: u64,
    /// Which of the step tables it uses.
    pub tables: usize,
    pub submission: Submission,
    pub slots: Vec<SlotId>,
    /// What each segment asked for.
    pub asked: Vec<Asked>,
    /// Its results, if it was waited for already: when it was submitted, or before a later one.
    pub ready: Option<Result<StepOut, StepError>>,
}

/// Whether the segments' masks do not find room on the device together.
fn too_many_masks(step: &Step) -> bool {
    let mut masks = Vec::new();
    for segment in &step.segments {
        if let Output::Sample(SampleParams { mask: Some(mask), .. }) = &segment.output
            && !masks.iter().any(|m| std::sync::Arc::ptr_eq(*m, mask))
        {
            masks.push(mask);
        }
    }
    masks.len() > head::MASKS
}

/// The smallest context a list is recorded for.
const LEAST_CONTEXT: usize = 1024;

/// Lists are recorded for contexts of powers of two: the one for so many tokens.
pub(crate) fn bucket(tokens: usize) -> usize {
    tokens.clamp(LEAST_CONTEXT, 1 << 31).next_power_of_two()
}

/// The bucket within the limits.
pub(super) fn context_bucket(tokens: usize, limits: &lily_device::Limits) -> u32 {
    let most = crate::memory::context(limits).min(1 << 31);
    (bucket(tokens) as u64).min(most.max(1)) as u32
}

impl GpuProgram {
    pub(super) fn check_params(&self, params: &SampleParams) -> Result<(), StepError> {
        Ok(check_params(params, self.recording.plan().vocab)?)
    }

    /// Whether a step is read back when it is submitted: steps in flight use the same logits.
    pub(super) fn runs_alone(&self, step: &Step) -> bool {
        let rows = |s: &Segment| match &s.input {
            Input::Tokens(list) => list.len(),
            Input::LastSampled => 1,
        };
        let asked_rows: usize = step.segments.iter().map(|s| s.output.rows(rows(s)).len()).sum();
        step.segments.iter().any(|s| Asked::of(&s.output).is_read_back())
            || asked_rows > self.limits.outputs
            || too_many_masks(step)
            || !self.recording.tuning().token_handoff
    }

    pub(super) fn submit_step(&mut self, step: Step) -> Result<Ticket, StepError> {
        let vocab = self.recording.plan().vocab;
        check_step(&step, vocab, &self.limits, self.flights.len(), &self.slots)?;
        let tokens: Vec<Vec<u32>> = step
            .segments
            .iter()
            .map(|s| match &s.input {
                Input::Tokens(list) => list.clone(),
                Input::LastSampled => vec![LAST_SAMPLED],
            })
            .collect();
        let asked: Vec<Asked> = step.segments.iter().map(|s| Asked::of(&s.output)).collect();
        let slots: Vec<SlotId> = step.segments.iter().map(|s| s.slot).collect();
        let asked_rows: usize =
            step.segments.iter().zip(&tokens).map(|(s, t)| s.output.rows(t.len()).len()).sum();
        let alone = self.runs_alone(&step);
        // Steps in flight use the other tables; one that is read back at once must be the only one.
        if alone {
            self.idle(None, "a step whose logits are read back")?;
        }
        let free = (0..MAX_IN_FLIGHT).find(|t| self.flights.iter().all(|f| f.tables != *t));
        let tables = free.unwrap_or(0);
        let context = slots
            .iter()
            .zip(&tokens)
            .map(|(s, t)| self.slots.live_mut(*s).position + t.len())
            .max()
            .unwrap_or(0);
        let shape = StepShape {
            segments: tokens.iter().map(|t| t.len() as u32).collect(),
            outputs: asked_rows as u32,
            context: context_bucket(context, &self.limits),
        };
        let kind = Kind { shape: shape.clone(), tables, head: self.head_of(&step, alone) };
        // Recorded before anything changes: it may be refused.
        let list = self.list(kind.clone())?;
        let written = self.grow(&slots, &tokens).and_then(|()| {
            self.write_tables(tables, &step, &tokens, alone).map_err(|e| self.broken(e))
        });
        if let Err(e) = written {
            slots.iter().for_each(|slot| self.slots.trim(*slot));
            return Err(e);
        }
        self.counters.steps += 1;
        let moved = self.moved().map_err(|e| self.broken(e))?;
        let submission = list.submit(&mut *self.driver).map_err(|e| self.failed(&slots, e))?;
        self.count_weights(tokens.iter().map(Vec::len).sum());
        for ((slot, list), asked) in slots.iter().zip(&tokens).zip(&asked) {
            let live = self.slots.live_mut(*slot);
            let (generated, last) = (live.generated, live.last);
            live.undo = (list.len() == 1).then_some(Undo { generated, last, sampled: None });
            live.position += list.len();
            live.parity ^= 1;
            live.held = None;
            live.last = LastSampled::None;
            if *asked == Asked::Sample && !alone {
                live.last = LastSampled::OnDevice;
                live.generated += 1;
                live.counted = true;
            }
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let mut flight = Flight { ticket, tables, submission, slots, asked, ready: None };
        if alone {
            flight.ready = Some(Ok(self.read_back(&step, &flight, &shape)?));
        }
        self.flights.push_back(flight);
        if let Some(moved) = moved {
            self.measure_step(&kind, context, &moved);
        }
        Ok(Ticket(ticket))
    }

    /// Takes the pages that the step needs, and tells the device.
    fn grow(&mut self, slots: &[SlotId], tokens: &[Vec<u32>]) -> Result<(), StepError> {
        for (slot, list) in slots.iter().zip(tokens) {
            let before = self.slots.grow(*slot, list.len())?;
            let pages = self.slots.live_mut(*slot).pages[before..].to_vec();
            if !pages.is_empty() {
                self.memory
                    .write_pages(&mut *self.driver, slot.0 as usize, before, &pages)
                    .map_err(|e| self.broken(e))?;
            }
        }
        Ok(())
    }

    /// Writes segments, rows, tokens and what is asked for; returns the rows that have logits.
    fn write_tables(
        &mut self,
        which: usize,
        step: &Step,
        tokens: &[Vec<u32>],
        on_host: bool,
    ) -> Result<(), crate::driver::DriverError> {
        let (mut segments, mut rows, mut outputs) = (Vec::new(), Vec::new(), Vec::new());
        let mut first = 0;
        for (i, (segment, list)) in step.segments.iter().zip(tokens).enumerate() {
            segments.push(SegmentEntry {
                slot: segment.slot.0,
                first,
                rows: list.len() as u32,
                first_output: outputs.len() as u32,
            });
            rows.extend(std::iter::repeat_n(i as u32, list.len()));
            let asked = segment.output.rows(list.len());
            outputs.extend(asked.map(|r| first + r as u32));
            first += list.len() as u32;
        }
        let all: Vec<u32> = tokens.concat();
        let t = &self.memory.tables[which];
        let driver = &mut *self.driver;
        driver.write(t.segments.buffer, t.segments.offset, bytemuck::cast_slice(&segments))?;
        driver.write(t.row_segments.buffer, t.row_segments.offset, bytemuck::cast_slice(&rows))?;
        driver.write(t.tokens.buffer, t.tokens.offset, bytemuck::cast_slice(&all))?;
        driver.write(t.output_rows.buffer, t.output_rows.offset, bytemuck::cast_slice(&outputs))?;
        self.io.write(driver, which, step, on_host)
    }

    /// Waits for a step. Those submitted before it end before it: their results are kept.
    pub(super) fn wait_step(&mut self, ticket: Ticket) -> Result<StepOut, StepError> {
        let unknown = || Refusal::Invalid(format!("ticket {} was never given out", ticket.0));
        let at = self.flights.iter().position(|f| f.ticket == ticket.0).ok_or_else(unknown)?;
        for index in 0..=at {
            if self.flights[index].ready.is_none() {
                let result = self.land(index);
                self.flights[index].ready = Some(result);
            }
        }
        let flight = self.flights.remove(at).ok_or_else(unknown)?;
        flight.ready.unwrap_or_else(|| Err(unknown().into()))
    }

    /// Waits for a flight, all before which have landed, and takes its results.
    fn land(&mut self, index: usize) -> Result<StepOut, StepError> {
        self.alive()?;
        let flight = &self.flights[index];
        let (slots, asked) = (flight.slots.clone(), flight.asked.clone());
        let (submission, tables) = (flight.submission, flight.tables);
        self.driver.wait(submission).map_err(|e| self.failed(&slots, e))?;
        let results = match asked.contains(&Asked::Sample) {
            true => self
                .io
                .results(&mut *self.driver, tables, slots.len())
                .map_err(|e| self.failed(&slots, e))?,
            false => slots.iter().map(|_| head::Result::Nothing).collect(),
        };
        let mut segments = Vec::new();
        for ((slot, asked), result) in slots.iter().zip(&asked).zip(results) {
            let later = self.flights.iter().skip(index + 1).any(|f| f.slots.contains(slot));
            segments.push(self.take_result(*slot, *asked, result, later));
        }
        let failed = segments.iter().filter(|s| matches!(s, SegmentOut::Failed(_))).count();
        match segments.first() {
            Some(SegmentOut::Failed(reason)) if failed == segments.len() => {
                Err(StepError::Failed { slots, reason: reason.clone() })
            }
            _ => Ok(StepOut { segments }),
        }
    }

    fn take_result(
        &mut self,
        slot: SlotId,
        asked: Asked,
        result: head::Result,
        later: bool,
    ) -> SegmentOut {
        let live = self.slots.live_mut(slot);
        if live.poisoned {
            return SegmentOut::Failed("an earlier step failed in this slot".into());
        }
        match (asked, result) {
            (Asked::Sample, head::Result::Failed(why)) => {
                live.poisoned = true;
                SegmentOut::Failed(why)
            }
            (Asked::Sample, head::Result::Token(id)) => {
                *live.counts.entry(id).or_default() += 1;
                match (&mut live.undo, later) {
                    (Some(undo), true) if undo.last == LastSampled::OnDevice => {
                        undo.last = LastSampled::Known(id);
                    }
                    (Some(undo), false) => undo.sampled = Some(id),
                    _ => {}
                }
                if !later {
                    live.last = LastSampled::Known(id);
                }
                SegmentOut::Sampled(Sampled::from(id))
            }
            _ => SegmentOut::None,
        }
    }

    /// Adds what a step of `rows` tokens reads of each weight.
    fn count_weights(&mut self, rows: usize) {
        for &(w, row, all, stacked) in self.recording.weight_reads() {
            // Rows may share experts; a matrix that serves all rows is read once.
            let read = if stacked { all.min(row.saturating_mul(rows as u64)) } else { row };
            self.counters.weight_bytes[w] += read;
        }
    }
}
