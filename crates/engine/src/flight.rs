//! Steps: submitted, in flight, landed, taken back.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use lily_device::{
    Input, MAX_IN_FLIGHT, Output, Refusal, SegmentOut, SlotId, Step, StepError, StepOut, Ticket,
};

use crate::engine::Engine;
use crate::error::EngineError;
use crate::session::{Flown, Session, Work};

/// Steps whose flights were dropped before they were waited for.
pub(crate) type Abandoned = Arc<Mutex<Vec<u64>>>;

/// What a segment has to return.
#[derive(Clone, Copy, Debug)]
enum Expect {
    Nothing,
    Token,
    Scores(usize),
    Logits(usize),
}

/// A submitted step. One that is dropped instead of [waited for](Engine::wait) leaves its sessions without
/// usable state.
#[derive(Debug)]
#[must_use = "a submitted step must be waited for"]
pub struct Flight {
    ticket: u64,
    landed: bool,
    parts: Vec<(SlotId, Expect)>,
    abandoned: Abandoned,
}

impl Drop for Flight {
    fn drop(&mut self) {
        if !self.landed {
            self.abandoned.lock().unwrap_or_else(PoisonError::into_inner).push(self.ticket);
        }
    }
}

impl Engine {
    /// Runs segments of different sessions together and records in each session what the device has seen.
    /// Results come in the order of `work`. No step may be in flight.
    ///
    /// # Errors
    /// Refusals change nothing: the same work can be built and run again. After
    /// [`StepFailed`](EngineError::StepFailed) those sessions are poisoned whose state is lost. Where only
    /// some segments failed, their results are [`SegmentOut::Failed`] and the others' are good.
    pub fn step(&mut self, mut work: Vec<Work<'_>>) -> Result<Vec<SegmentOut>, EngineError> {
        self.reclaim()?;
        if let Some(flown) = self.flights.front() {
            let slot = flown.slots.first().map_or(0, |slot| slot.0);
            return Err(EngineError::InFlight { slot });
        }
        if work.is_empty() {
            return Ok(Vec::new());
        }
        let flight = self.launch(&mut work)?;
        let mut sessions: Vec<&mut Session> = work.into_iter().map(|w| w.session).collect();
        self.wait(flight, &mut sessions)
    }

    /// Hands a step of at least one segment to the device. Where the device
    /// [overlaps](lily_device::Device::overlaps) this returns before the step has run; at most two may be in
    /// flight. The sessions record it when it is [waited for](Self::wait).
    ///
    /// A step in which the host takes part (log-probabilities, held logits) cannot run beside others: the device
    /// finishes those in flight first, see [`waits`](Self::waits). Their results are kept until they are waited for.
    ///
    /// # Errors
    /// As for [`step`](Self::step). Steps in flight before are not touched by an error here.
    pub fn submit(&mut self, mut work: Vec<Work<'_>>) -> Result<Flight, EngineError> {
        self.reclaim()?;
        self.launch(&mut work)
    }

    /// Whether [`submit`](Self::submit) of this work would have to wait for the steps in flight. Nothing is gained by
    /// it then: who waits for them first has their tokens sooner, and no surplus step where one of them ends an answer.
    pub fn waits(&self, work: &[Work<'_>]) -> bool {
        !self.flights.is_empty() && self.program.alone(&step_of(work))
    }

    fn launch(&mut self, work: &mut [Work<'_>]) -> Result<Flight, EngineError> {
        if self.flights.len() >= MAX_IN_FLIGHT {
            let what = format!("{MAX_IN_FLIGHT} steps are in flight; wait for one first");
            return Err(EngineError::Refused(what));
        }
        let mut logit_rows = 0;
        for w in work.iter() {
            self.not_poisoned(w.session)?;
            if w.session.coming() + w.rows > self.options().context {
                return Err(EngineError::ContextFull { context: self.options().context });
            }
            logit_rows += if w.segment.output == Output::Logits { w.rows } else { 0 };
        }
        let most = self.options().logit_rows;
        if logit_rows > most {
            return Err(EngineError::LogitRows { rows: logit_rows, most });
        }
        let parts = work.iter().map(|w| (w.session.slot(), expect(w))).collect();
        let step = step_of(work);
        if !self.flights.is_empty() && self.program.alone(&step) {
            (0..self.flights.len()).for_each(|index| self.land(index));
        }
        let started = Instant::now();
        let ticket = match self.program.submit(step) {
            Ok(ticket) => ticket.0,
            Err(error) => {
                let seen = work.iter().map(|w| (w.session.slot(), w.session.coming())).collect();
                return Err(self.failure(error, seen));
            }
        };
        for w in work.iter_mut() {
            let samples = matches!(w.segment.output, Output::Sample(_));
            let decode = w.segment.input == Input::LastSampled;
            w.session.flown.push_back(Flown { rows: w.rows, decode, samples });
        }
        let slots = work.iter().map(|w| w.session.slot()).collect();
        self.flights.push_back(InFlight { ticket, slots, started, landed: None });
        let abandoned = Arc::clone(&self.abandoned);
        Ok(Flight { ticket, landed: false, parts, abandoned })
    }

    /// Waits for the device to end a step in flight and keeps what came of it.
    fn land(&mut self, index: usize) {
        let flight = &mut self.flights[index];
        if flight.landed.is_none() {
            let out = self.program.wait(Ticket(flight.ticket));
            let now = Instant::now();
            let since = self.last_landing.map_or(flight.started, |last| last.max(flight.started));
            self.last_landing = Some(now);
            flight.landed = Some((out, now.duration_since(since).as_secs_f64()));
        }
    }

    /// Waits for a step and records it in its sessions, given in the order of its work. Steps are waited for
    /// in the order in which they were submitted.
    ///
    /// # Errors
    /// As for [`step`](Self::step). The result of a session that an earlier step in flight poisoned is
    /// [`SegmentOut::Failed`].
    pub fn wait(
        &mut self,
        mut flight: Flight,
        sessions: &mut [&mut Session],
    ) -> Result<Vec<SegmentOut>, EngineError> {
        self.alive()?;
        let slots = sessions.iter().map(|s| s.slot());
        if !slots.eq(flight.parts.iter().map(|(slot, _)| *slot)) {
            return Err(EngineError::Refused("these are not the sessions of the step".into()));
        }
        for session in sessions.iter() {
            self.owned(session)?;
        }
        if self.flights.front().map(|f| f.ticket) != Some(flight.ticket) {
            return Err(EngineError::Refused("an earlier step is in flight".into()));
        }
        flight.landed = true;
        let flown: Vec<Flown> = sessions.iter_mut().filter_map(|s| s.flown.pop_front()).collect();
        self.land(0);
        let landed = self.flights.pop_front().and_then(|f| f.landed);
        let lost = || (Err(Refusal::Invalid("the step is not in flight".into()).into()), 0.0);
        let (out, seconds) = landed.unwrap_or_else(lost);
        let out = self.judge(&flight, sessions, out)?;
        Ok(self.record(sessions, flown, out, seconds))
    }

    /// The results, or the error that the step amounts to.
    fn judge(
        &mut self,
        flight: &Flight,
        sessions: &[&mut Session],
        out: Result<StepOut, StepError>,
    ) -> Result<Vec<SegmentOut>, EngineError> {
        let slots = || flight.parts.iter().map(|(slot, _)| *slot).collect::<Vec<_>>();
        let failed = |reason: String| StepError::Failed { slots: slots(), reason };
        let error = match out {
            Ok(out) => match all_failed(&out.segments).or_else(|| {
                // The device is not where the sessions believe it to be: as bad as a failure.
                unexpected(&flight.parts, &out.segments, self.plan().vocab)
            }) {
                None => return Ok(out.segments),
                Some(reason) => failed(reason),
            },
            // It was accepted, so it may have run.
            Err(StepError::Refused(refusal)) => failed(refusal.to_string()),
            Err(error) => error,
        };
        if matches!(error, StepError::Failed { .. }) {
            // What was submitted behind it built on it.
            let behind: Vec<SlotId> = self.flights.iter().flat_map(|f| f.slots.clone()).collect();
            for slot in slots().into_iter().filter(|slot| behind.contains(slot)) {
                self.poison(slot, error.to_string());
            }
        }
        let seen = sessions.iter().map(|s| (s.slot(), s.coming())).collect();
        Err(self.failure(error, seen))
    }

    fn record(
        &mut self,
        sessions: &mut [&mut Session],
        flown: Vec<Flown>,
        mut out: Vec<SegmentOut>,
        seconds: f64,
    ) -> Vec<SegmentOut> {
        for ((session, flown), out) in sessions.iter_mut().zip(flown).zip(&mut out) {
            let slot = session.slot();
            if let Some(reason) = self.poison_of(slot) {
                *out = SegmentOut::Failed(reason.to_owned());
            } else if let SegmentOut::Failed(reason) = out {
                self.poison(slot, reason.clone());
            } else {
                let sampled = match out {
                    SegmentOut::Sampled(sampled) => Some(sampled.id),
                    _ => None,
                };
                session.land(flown, sampled, seconds);
                // With a step in flight behind it, the device may be anywhere.
                debug_assert!(
                    self.settled(session).is_err()
                        || self.program.position(slot) == Ok(session.tokens.len()),
                    "slot {}",
                    slot.0
                );
            }
        }
        out
    }

    /// Takes back the last step of a session, a decode step, as if it had never run: the surplus step of two
    /// in flight, when the first one's token ends the answer. Needs
    /// [`EngineOptions::undo`](crate::EngineOptions::undo).
    pub fn undo(&mut self, session: &mut Session) -> Result<(), EngineError> {
        self.usable(session)?;
        if !session.decoded_last {
            return Err(EngineError::NothingToUndo { slot: session.slot().0 });
        }
        let undone = self.program.undo_last(session.slot());
        self.note(session, undone)?;
        session.take_back();
        // Another token may follow in the place of the one that was taken back.
        self.forget_copied_beyond(session);
        Ok(())
    }

    /// Waits for the steps that nobody waits for any more. Their sessions do not know what became of them.
    pub(crate) fn land_abandoned(&mut self) {
        let tickets =
            std::mem::take(&mut *self.abandoned.lock().unwrap_or_else(PoisonError::into_inner));
        for ticket in tickets {
            let Some(at) = self.flights.iter().position(|f| f.ticket == ticket) else { continue };
            self.land(at);
            let Some(flight) = self.flights.remove(at) else { continue };
            if let Some((Err(StepError::Lost(reason)), _)) = flight.landed {
                self.lose(reason);
            }
            for slot in flight.slots {
                self.poison(slot, "a step of it was submitted and never waited for".into());
            }
        }
    }
}

/// A step that the device has.
#[derive(Debug)]
pub(crate) struct InFlight {
    pub ticket: u64,
    pub slots: Vec<SlotId>,
    pub started: Instant,
    /// What came of it and how long it took, if the device has ended it already.
    pub landed: Option<(Result<StepOut, StepError>, f64)>,
}

fn step_of(work: &[Work<'_>]) -> Step {
    Step { segments: work.iter().map(|w| w.segment.clone()).collect() }
}

fn expect(work: &Work<'_>) -> Expect {
    match work.segment.output {
        Output::None | Output::Hold => Expect::Nothing,
        Output::Sample(_) => Expect::Token,
        Output::Scores(_) => Expect::Scores(work.rows),
        Output::Logits => Expect::Logits(work.rows),
    }
}

/// Why a step failed none of whose segments has a result.
fn all_failed(out: &[SegmentOut]) -> Option<String> {
    let reasons = out.iter().map(|out| match out {
        SegmentOut::Failed(reason) => Some(reason),
        _ => None,
    });
    let reasons: Option<Vec<&String>> = reasons.collect();
    Some(reasons?.first()?.to_string())
}

/// What is wrong with results, if anything: each must be of the kind and length that was asked for.
fn unexpected(parts: &[(SlotId, Expect)], out: &[SegmentOut], vocab: usize) -> Option<String> {
    if parts.len() != out.len() {
        return Some(format!("{} results came for {} segments", out.len(), parts.len()));
    }
    let wrong = parts.iter().zip(out).find(|((_, expect), out)| match (expect, out) {
        (_, SegmentOut::Failed(_)) => false,
        (Expect::Nothing, SegmentOut::None) => false,
        (Expect::Token, SegmentOut::Sampled(sampled)) => sampled.id as usize >= vocab,
        (Expect::Scores(rows), SegmentOut::Scores(scores)) => scores.len() != *rows,
        (Expect::Logits(rows), SegmentOut::Logits(logits)) => logits.len() != rows * vocab,
        _ => true,
    });
    wrong.map(|((slot, _), _)| format!("the result of slot {} is not what was asked for", slot.0))
}

impl From<Refusal> for EngineError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::OutOfPages { need, free } => Self::OutOfPages { need, free },
            other => Self::Refused(other.to_string()),
        }
    }
}
