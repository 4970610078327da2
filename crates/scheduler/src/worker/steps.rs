//! Steps: what is computed next, and what becomes of the results.

use std::time::Instant;

use lily_engine::policy::chunk_rows;
use lily_engine::{Engine, EngineError, Output, SegmentOut, Session, snapshot_bytes};
use lily_ops::plan::PAGE_TOKENS;

use super::composition::Part;
use super::{Airborne, Fate, Lost, Worker, fate};
use crate::job::Ahead;
use crate::shared::Counters;

/// Refused calls in a row after which those that are refused alone fail.
const REFUSALS: usize = 2;

fn is_lost(error: &EngineError) -> bool {
    matches!(error, EngineError::DeviceLost(_))
}

impl Worker {
    /// Computes one step of what runs: hands steps to the device, two where that saves time, and waits for the
    /// first of them.
    pub(super) fn step(&mut self) -> Result<(), Lost> {
        if self.refusals >= REFUSALS {
            return self.each_alone();
        }
        let depth = 1 + usize::from(self.engine.as_ref().is_some_and(Engine::overlaps));
        while self.flights.len() < depth {
            let turn = (self.last_prompt, self.singles);
            let parts = self.plan();
            if parts.is_empty() {
                break;
            }
            let enough = self.pages_suffice(&parts);
            if !enough && self.flights.is_empty() && self.preempt()? {
                (self.last_prompt, self.singles) = turn;
                continue;
            }
            let flying = self.flights.len();
            // What is in flight may end and give pages back; it cannot be copied.
            let launched = match enough || flying == 0 {
                true => self.launch(&parts),
                false => Ok(()),
            };
            match launched {
                Ok(()) if self.flights.len() > flying => {}
                Err((error, order)) if flying == 0 || is_lost(&error) => {
                    // The same one's turn again, so that it is found out if it is always refused.
                    (self.last_prompt, self.singles) = turn;
                    return self.step_failed(error, &order, false);
                }
                // Again when what is in flight has landed: that may be why. It is the same one's turn then.
                _ => {
                    (self.last_prompt, self.singles) = turn;
                    break;
                }
            }
        }
        self.land(false)
    }

    /// One of those that run is what the device refuses: each on its own.
    fn each_alone(&mut self) -> Result<(), Lost> {
        while !self.flights.is_empty() {
            self.land(false)?;
        }
        for part in self.plan() {
            match self.launch(&[part]) {
                Ok(()) => self.land(true)?,
                Err((error, order)) => self.step_failed(error, &order, true)?,
            }
        }
        self.refusals = 0;
        Ok(())
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

    /// Hands a step to the device, unless it has to wait for those in flight. An error comes with the numbers of the
    /// jobs in it.
    fn launch(&mut self, parts: &[Part]) -> Result<(), (EngineError, Vec<u64>)> {
        let marked = self.mark(parts);
        let Some(engine) = &mut self.engine else { return Ok(()) };
        if let Err((error, seq)) = marked {
            return Err((error, vec![seq]));
        }
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
                order.push((part.seq, if part.rows > 0 { next.rows() } else { 0 }));
                work.push(next);
            }
        }
        // What nobody waits for any more is the engine's to end: only for its own flights a step waits here.
        if work.is_empty() || (!self.flights.is_empty() && engine.waits(&work)) {
            return Ok(());
        }
        let started = Instant::now();
        let result = engine.submit(work);
        self.shared.beat(false);
        let seqs = order.iter().map(|(seq, _)| *seq).collect();
        let flight = match result {
            Ok(flight) => flight,
            Err(error) => return Err((error, seqs)),
        };
        for (seq, rows) in order {
            if let Some(at) = self.at(seq) {
                self.had_its_turn(seq);
                let ahead = if rows > 0 { Ahead::Prompt(rows) } else { Ahead::Decode };
                self.running[at].ahead.push_back(ahead);
            }
        }
        self.flights.push_back(Airborne { flight, order: seqs, rows, started });
        Ok(())
    }

    /// Has the prompts of a step keep the states at their marks inside it, as far as there is memory.
    fn mark(&mut self, parts: &[Part]) -> Result<(), (EngineError, u64)> {
        let Some(engine) = &mut self.engine else { return Ok(()) };
        if !engine.marks() {
            return Ok(());
        }
        for part in parts.iter().filter(|part| part.rows > 0) {
            let found = self.running.iter_mut().find(|r| r.job.seq == part.seq);
            let Some(running) = found else { continue };
            let rows = chunk_rows(running.seen(), part.rows).min(running.left());
            let seen = running.seen();
            let prompt = &running.job.request.prompt;
            let mut inside: Vec<usize> = running
                .marks_inside(rows)
                .filter(|n| !self.cache.has(&prompt[..seen + n]))
                .collect();
            let Some(session) = &mut running.session else { continue };
            // Their states, and K and V of the longest, which the others share. What can never be kept takes nobody's place.
            let state = snapshot_bytes(engine.plan(), 0);
            let need = |inside: &[usize]| match inside.last() {
                Some(n) => {
                    snapshot_bytes(engine.plan(), seen + n) + state * (inside.len() as u64 - 1)
                }
                None => 0,
            };
            while !inside.is_empty() && !self.cache.takes(need(&inside)) {
                inside.remove(0);
                Counters::add(&self.shared.counters.skipped, 1);
            }
            while !self.cache.has_room(need(&inside)) && self.cache.evict() {}
            loop {
                match engine.mark(session, &inside) {
                    Ok(()) => break,
                    Err(EngineError::SnapshotMemory { .. }) if self.cache.evict() => {}
                    // The longest prefix is worth most.
                    Err(EngineError::SnapshotMemory { .. }) if !inside.is_empty() => {
                        inside.remove(0);
                        Counters::add(&self.shared.counters.skipped, 1);
                    }
                    Err(error) => return Err((error, part.seq)),
                }
            }
        }
        Ok(())
    }

    /// Keeps the states that a job's last step copied on its way.
    fn keep_marked(&mut self, at: usize) -> Result<(), Lost> {
        let (Some(engine), Some(session)) = (&mut self.engine, &mut self.running[at].session)
        else {
            return Ok(());
        };
        match engine.take_marked(session) {
            Ok(taken) => {
                taken.into_iter().for_each(|snapshot| self.cache.insert(snapshot));
                Ok(())
            }
            Err(error) => {
                Counters::add(&self.shared.counters.skipped, 1);
                match fate(error) {
                    Fate::Lost(lost) => Err(lost),
                    // As in `keep_prefix`.
                    _ => Ok(()),
                }
            }
        }
    }

    /// Waits for the first step in flight, if there is one, and takes its results.
    fn land(&mut self, strict: bool) -> Result<(), Lost> {
        let Some(Airborne { flight, order, rows, started }) = self.flights.pop_front() else {
            return Ok(());
        };
        let Some(engine) = &mut self.engine else { return Ok(()) };
        let running = self.running.iter_mut().filter_map(|r| {
            let seq = r.job.seq;
            order.contains(&seq).then(|| r.ahead.pop_front());
            Some((seq, r.session.as_mut()?))
        });
        let parked = self.parked.iter_mut().map(|(seq, session)| (*seq, session));
        let mut sessions: Vec<(usize, &mut Session)> = running
            .chain(parked)
            .filter_map(|(seq, session)| Some((order.iter().position(|s| *s == seq)?, session)))
            .collect();
        sessions.sort_unstable_by_key(|(place, _)| *place);
        let mut sessions: Vec<&mut Session> = sessions.into_iter().map(|(_, s)| s).collect();
        let result = engine.wait(flight, &mut sessions);
        self.shared.beat(false);
        let now = Instant::now();
        let seconds = now.duration_since(started.max(self.last_landing)).as_secs_f64();
        self.last_landing = now;
        self.close_parked()?;
        match result {
            Ok(out) => {
                if let Some(rows) = self.paced(rows, order.len()) {
                    self.pace.learn(rows, seconds);
                }
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

    /// Gives the slots of ended jobs back whose last step has landed.
    fn close_parked(&mut self) -> Result<(), Lost> {
        let parked = std::mem::take(&mut self.parked);
        for (seq, session) in parked {
            self.close(seq, Some(session))?;
        }
        Ok(())
    }

    /// What one job's part of a step has come to.
    fn take(&mut self, seq: u64, out: SegmentOut) -> Result<(), Lost> {
        let Some(at) = self.at(seq) else { return Ok(()) };
        if !matches!(out, SegmentOut::Failed(_)) {
            self.keep_marked(at)?;
        }
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
                let running = &self.running[at];
                match running.ahead.is_empty() && running.marks.contains(&running.seen()) {
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
            Fate::Refused(reason) => self.step_refused(order, &reason, strict),
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
                match poisoned.is_empty() {
                    // Whoever it was about has left; the others must not fail for it, nor try for ever.
                    true => self.step_refused(order, &reason, strict),
                    false => self.fail_alone(&poisoned, &reason),
                }
            }
        }
    }

    /// A step that changed nothing: it is tried again, or those in it fail if it is `strict`.
    fn step_refused(&mut self, order: &[u64], reason: &str, strict: bool) -> Result<(), Lost> {
        Counters::add(&self.shared.counters.faults, 1);
        self.refusals += 1;
        match strict {
            true => self.fail_alone(order, reason),
            false => Ok(()),
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
