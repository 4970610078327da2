//! Steps: what is computed next, and what becomes of the results.

use std::time::Instant;

use lily_engine::{EngineError, Output, SegmentOut};
use lily_ops::plan::PAGE_TOKENS;

use super::{Fate, Lost, Worker, fate};
use crate::shared::Counters;

/// What a running job does in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    /// Its number: places change when others leave.
    seq: u64,
    /// Most prompt tokens; 0 decodes.
    rows: usize,
}

/// Refused calls in a row after which those that are refused alone fail.
const REFUSALS: usize = 2;

impl Worker {
    /// Computes one step of what runs.
    pub(super) fn step(&mut self) -> Result<(), Lost> {
        let parts = loop {
            let parts = self.plan();
            if self.pages_suffice(&parts) || !self.preempt()? {
                break parts;
            }
        };
        if self.refusals < REFUSALS {
            return self.run_parts(&parts, false);
        }
        // One of them is what the device refuses: each on its own.
        for part in parts {
            self.run_parts(&[part], true)?;
        }
        self.refusals = 0;
        Ok(())
    }

    /// All that decode, and prompts by turns.
    fn plan(&mut self) -> Vec<Part> {
        let Some(engine) = &self.engine else { return Vec::new() };
        let ready = self.running.iter().filter(|r| r.session.is_some());
        let (prompts, decoding): (Vec<_>, Vec<_>) = ready.partition(|r| r.left() > 0);
        let mut parts: Vec<Part> =
            decoding.iter().map(|r| Part { seq: r.job.seq, rows: 0 }).collect();
        let most = engine.options().limits().rows.min(engine.options().chunk);
        let both = !prompts.is_empty() && !parts.is_empty();
        if both && !self.options.mixed {
            if self.prompts_last {
                self.prompts_last = false;
                return parts;
            }
            parts.clear();
        }
        self.prompts_last = !prompts.is_empty();
        let mut room = match both {
            true => self.pace.rows(self.options.delay, self.options.min_chunk.max(1), most),
            false => most,
        };
        room = room.min(engine.options().limits().rows.saturating_sub(parts.len()));
        // Those after the last one that had its turn, then those before it.
        let mut turns: Vec<_> = prompts.iter().map(|r| (r.job.seq, r.until_mark())).collect();
        turns.sort_unstable_by_key(|(seq, _)| (*seq <= self.last_prompt, *seq));
        for (seq, until) in turns {
            if room == 0 {
                break;
            }
            let rows = until.min(room);
            room -= rows;
            self.last_prompt = seq;
            parts.push(Part { seq, rows });
        }
        parts
    }

    fn at(&self, seq: u64) -> Option<usize> {
        self.running.iter().position(|r| r.job.seq == seq)
    }

    fn pages_suffice(&self, parts: &[Part]) -> bool {
        let Some(engine) = &self.engine else { return true };
        let need = |part: &Part| {
            let seen = self.at(part.seq).map_or(0, |at| self.running[at].seen());
            (seen + part.rows.max(1)).div_ceil(PAGE_TOKENS) - seen.div_ceil(PAGE_TOKENS)
        };
        parts.iter().map(need).sum::<usize>() <= engine.free_pages()
    }

    /// Runs a step. What is refused fails if it is `strict`, else it may be tried again.
    fn run_parts(&mut self, parts: &[Part], strict: bool) -> Result<(), Lost> {
        let Some(engine) = &mut self.engine else { return Ok(()) };
        let mut work = Vec::new();
        let mut order = Vec::new();
        let mut rows = 0;
        for running in &mut self.running {
            let Some(part) = parts.iter().find(|p| p.seq == running.job.seq) else { continue };
            let Some(session) = &mut running.session else { continue };
            let output = Output::Sample(running.job.params.clone());
            let next = match part.rows {
                0 => session.decode_segment(output),
                most => session.prefill_segment(most, &output),
            };
            if let Some(next) = next {
                rows += if part.rows > 0 { next.rows() } else { 0 };
                order.push(part.seq);
                work.push(next);
            }
        }
        if work.is_empty() {
            return Ok(());
        }
        let start = Instant::now();
        let result = engine.step(work);
        self.shared.beat(false);
        match result {
            Ok(out) => {
                self.pace.learn(rows, start.elapsed().as_secs_f64());
                self.refusals = 0;
                self.losses = 0;
                Counters::add(&self.shared.counters.steps, 1);
                Counters::add(&self.shared.counters.computed, rows);
                for (seq, out) in order.into_iter().zip(out) {
                    self.take(seq, out)?;
                }
                Ok(())
            }
            Err(error) => self.step_failed(error, &order, strict),
        }
    }

    /// What one job's part of a step has come to.
    fn take(&mut self, seq: u64, out: SegmentOut) -> Result<(), Lost> {
        let Some(at) = self.at(seq) else { return Ok(()) };
        match out {
            SegmentOut::Failed(reason) => self.fail(at, reason),
            SegmentOut::Sampled(sampled) => {
                let context = self.shared.limits.context;
                match self.running[at].job.accept(sampled, context) {
                    (Some(finish), _) => self.finish(at, finish),
                    (None, true) => self.feed(at).map(drop),
                    (None, false) => Ok(()),
                }
            }
            _ => {
                let seen = self.running[at].seen();
                match self.running[at].marks.contains(&seen) {
                    true => self.keep_prefix(at),
                    false => Ok(()),
                }
            }
        }
    }

    /// A step without results: those fail whose state is lost, the others go on.
    fn step_failed(&mut self, error: EngineError, order: &[u64], strict: bool) -> Result<(), Lost> {
        match fate(error) {
            Fate::Lost(lost) => Err(lost),
            Fate::Pages => match self.preempt()? {
                true => Ok(()),
                false => self.fail_alone(order, "it has too few KV pages for this request"),
            },
            Fate::Refused(reason) => {
                Counters::add(&self.shared.counters.faults, 1);
                self.refusals += 1;
                match strict {
                    true => self.fail_alone(order, &reason),
                    false => Ok(()),
                }
            }
            Fate::Failed(reason) => {
                let poisoned: Vec<u64> = order
                    .iter()
                    .copied()
                    .filter(|seq| {
                        let session =
                            self.at(*seq).and_then(|at| self.running[at].session.as_ref());
                        match (&self.engine, session) {
                            (Some(engine), Some(session)) => engine.is_poisoned(session),
                            _ => false,
                        }
                    })
                    .collect();
                // An error that names nobody must not come back for ever.
                let failing = if poisoned.is_empty() { order.to_vec() } else { poisoned };
                for seq in failing {
                    self.fail_alone(&[seq], &reason)?;
                }
                Ok(())
            }
        }
    }

    fn fail_alone(&mut self, order: &[u64], reason: &str) -> Result<(), Lost> {
        for seq in order {
            if let Some(at) = self.at(*seq) {
                self.fail(at, reason.to_owned())?;
            }
        }
        Ok(())
    }
}
