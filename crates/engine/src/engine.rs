use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use lily_device::{
    Device, Limits, Output, Plan, Program, Refusal, SegmentOut, SlotId, Step, StepError, Weight,
};
use lily_ops::sample::SampleParams;

use crate::budget::{Budget, budget};
use crate::error::EngineError;
use crate::memory::Machine;
use crate::session::{Lease, Returned, Session, Work};

/// What an engine is prepared for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Tokens of one session, prompt and answer.
    pub context: usize,
    /// Sessions open at once.
    pub slots: usize,
    /// Most prompt tokens of one step: bounds scratch memory, and how long a cancellation takes.
    pub chunk: usize,
}

impl EngineOptions {
    /// The device limits that follow.
    pub fn limits(&self) -> Limits {
        // A decode step of all slots has one row for each of them.
        let rows = self.chunk.min(self.context).max(self.slots);
        Limits::new(self.slots, self.context, rows)
    }

    fn check(&self) -> Result<(), EngineError> {
        let options = [("context", self.context), ("slots", self.slots), ("chunk", self.chunk)];
        match options.into_iter().find(|(_, value)| *value == 0) {
            Some((option, value)) => Err(EngineError::Options { option, value }),
            None => Ok(()),
        }
    }
}

/// A model on a device.
pub struct Engine {
    pub(crate) program: Box<dyn Program>,
    plan: Arc<Plan>,
    options: EngineOptions,
    budget: Budget,
    free: Vec<SlotId>,
    returned: Returned,
    /// Slots without usable state, and why.
    poisoned: BTreeMap<SlotId, String>,
    lost: Option<String>,
}

/// Unique in the process: a snapshot takes its epoch to another engine.
pub(crate) fn next_epoch() -> u64 {
    static EPOCH: AtomicU64 = AtomicU64::new(0);
    EPOCH.fetch_add(1, Ordering::Relaxed)
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("model", &self.plan.name)
            .field("options", &self.options)
            .field("free", &self.free)
            .field("poisoned", &self.poisoned)
            .field("lost", &self.lost)
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// Prepares `plan` on `device`. `weights` are the plan's, in its order. What does not fit into the memory
    /// of this machine is refused before anything is allocated.
    pub fn new(
        device: &dyn Device,
        plan: Arc<Plan>,
        weights: Vec<Weight>,
        options: EngineOptions,
    ) -> Result<Self, EngineError> {
        Self::on_machine(device, plan, weights, options, &Machine::detect())
    }

    /// As [`new`](Self::new) with the machine's memory given; [`Machine::UNKNOWN`] refuses nothing.
    pub fn on_machine(
        device: &dyn Device,
        plan: Arc<Plan>,
        weights: Vec<Weight>,
        options: EngineOptions,
        machine: &Machine,
    ) -> Result<Self, EngineError> {
        options.check()?;
        let limits = options.limits();
        let budget = budget(device, &plan, &limits);
        budget.check(machine).map_err(|refusal| EngineError::OutOfMemory {
            model: plan.name.clone(),
            device: device.name(),
            refusal,
        })?;
        Ok(Self {
            program: device.prepare(Arc::clone(&plan), weights, limits)?,
            plan,
            options,
            budget,
            free: (0..options.slots as u32).rev().map(SlotId).collect(),
            returned: Returned::default(),
            poisoned: BTreeMap::new(),
            lost: None,
        })
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What it was prepared for.
    pub fn options(&self) -> EngineOptions {
        self.options
    }

    /// Memory as computed before it was taken.
    pub fn budget(&self) -> Budget {
        self.budget
    }

    /// The program, for its counters and figures.
    pub fn program(&self) -> &dyn Program {
        self.program.as_ref()
    }

    /// Opens an empty session in a free slot.
    pub fn open_session(&mut self) -> Result<Session, EngineError> {
        self.alive()?;
        self.reclaim()?;
        let slot = self.free.pop().ok_or(EngineError::NoFreeSlot { slots: self.options.slots })?;
        // From here on the slot comes back whatever happens.
        let lease = Lease { slot, returned: Arc::clone(&self.returned) };
        let mut session = Session::new(lease, next_epoch());
        if self.poisoned.contains_key(&slot) {
            self.reset(&mut session)?;
        }
        Ok(session)
    }

    /// Ends a session and frees its pages.
    pub fn close(&mut self, session: Session) -> Result<(), EngineError> {
        drop(session);
        self.reclaim()
    }

    /// Runs segments of different sessions together and records in each session what the device has seen.
    /// Results come in the order of `work`.
    ///
    /// # Errors
    /// Refusals change nothing: the same work can be built and run again. After
    /// [`StepFailed`](EngineError::StepFailed) those sessions are poisoned whose state is lost. Where only
    /// some segments failed, their results are [`SegmentOut::Failed`] and the others' are good.
    pub fn step(&mut self, work: Vec<Work<'_>>) -> Result<Vec<SegmentOut>, EngineError> {
        self.reclaim()?;
        for w in &work {
            self.usable(w.session)?;
            if w.session.tokens.len() + w.rows > self.options.context {
                return Err(EngineError::ContextFull { context: self.options.context });
            }
        }
        if work.is_empty() {
            return Ok(Vec::new());
        }
        let step = Step { segments: work.iter().map(|w| w.segment.clone()).collect() };
        let start = Instant::now();
        let out = self.program.run(step);
        let seconds = start.elapsed().as_secs_f64();
        let sessions = || work.iter().map(|w| (w.session.slot(), w.session.tokens.len())).collect();
        let out = match out {
            Ok(out) => out.segments,
            Err(error) => return Err(self.failure(error, sessions())),
        };
        if let Some(error) = self.all_failed(&work, &out) {
            return Err(self.failure(error, sessions()));
        }
        if let Some(reason) = unexpected(&work, &out, self.plan.vocab) {
            // The device is not where the session believes it to be: as bad as a failure.
            let slots = work.iter().map(|w| w.session.slot()).collect();
            return Err(self.failure(StepError::Failed { slots, reason }, sessions()));
        }
        for (w, out) in work.into_iter().zip(&out) {
            let slot = w.session.slot();
            if let SegmentOut::Failed(reason) = out {
                self.poisoned.insert(slot, reason.clone());
                continue;
            }
            let position = w.session.tokens.len() + w.rows;
            debug_assert_eq!(self.program.position(slot), Ok(position), "slot {}", slot.0);
            let sampled = match out {
                SegmentOut::Sampled(token) => Some(*token),
                _ => None,
            };
            w.done(sampled, seconds);
        }
        Ok(out)
    }

    /// Chooses a token from the logits that a step with [`Output::Hold`] left on the device.
    pub fn sample_held(
        &mut self,
        session: &mut Session,
        params: &SampleParams,
    ) -> Result<u32, EngineError> {
        self.usable(session)?;
        params.check().map_err(EngineError::Parameters)?;
        let token = self.program.sample(session.slot(), params);
        let token = self.note(session, token)?;
        session.last_sampled = Some(token);
        Ok(token)
    }

    /// The device answers and the session is one of this engine.
    pub(crate) fn owned(&self, session: &Session) -> Result<(), EngineError> {
        self.alive()?;
        match Arc::ptr_eq(&session.lease.returned, &self.returned) {
            true => Ok(()),
            false => Err(EngineError::ForeignSession),
        }
    }

    /// As [`owned`](Self::owned), and its slot holds a usable state.
    pub(crate) fn usable(&self, session: &Session) -> Result<(), EngineError> {
        self.owned(session)?;
        match self.poisoned.get(&session.slot()) {
            Some(reason) => {
                Err(EngineError::Poisoned { slot: session.slot().0, reason: reason.clone() })
            }
            None => Ok(()),
        }
    }

    pub(crate) fn is_poisoned(&self, session: &Session) -> bool {
        self.poisoned.contains_key(&session.slot())
    }

    /// Empties the session's slot, whatever state it was in.
    pub(crate) fn reset(&mut self, session: &mut Session) -> Result<(), EngineError> {
        let result = self.program.reset(session.slot());
        self.note(session, result)?;
        self.healed(session);
        session.tokens.clear();
        Ok(())
    }

    /// Records that a session's slot holds a usable state again. What made it fail may be in its checkpoints.
    pub(crate) fn healed(&mut self, session: &mut Session) {
        if self.poisoned.remove(&session.slot()).is_some() {
            session.checkpoints.clear();
        }
    }

    /// Records what an error of a call on one session means.
    pub(crate) fn note<T>(
        &mut self,
        session: &Session,
        result: Result<T, StepError>,
    ) -> Result<T, EngineError> {
        let sessions = vec![(session.slot(), session.tokens.len())];
        result.map_err(|error| self.failure(error, sessions))
    }

    /// Records what an error means for the slots it was about, given with the tokens they had seen.
    fn failure(&mut self, error: StepError, sessions: Vec<(SlotId, usize)>) -> EngineError {
        match error {
            StepError::Refused(Refusal::OutOfPages { need, free }) => {
                EngineError::OutOfPages { need, free }
            }
            StepError::Refused(refusal) => EngineError::Refused(refusal.to_string()),
            StepError::Failed { slots, reason } => {
                // A slot that is not named is intact, but whether its part ran only its position tells.
                let moved = sessions
                    .iter()
                    .filter(|(slot, seen)| self.program.position(*slot) != Ok(*seen))
                    .map(|(slot, _)| *slot);
                for slot in slots.iter().copied().chain(moved.collect::<Vec<_>>()) {
                    self.poisoned.insert(slot, reason.clone());
                }
                let about = sessions.iter().find(|(slot, _)| slots.contains(slot));
                let (slot, position) = *about.unwrap_or(&sessions[0]);
                EngineError::StepFailed { slot: slot.0, position, reason }
            }
            StepError::Lost(reason) => {
                self.lost = Some(reason.clone());
                EngineError::DeviceLost(reason)
            }
        }
    }

    /// The error of a step none of whose segments has a result.
    fn all_failed(&self, work: &[Work<'_>], out: &[SegmentOut]) -> Option<StepError> {
        let reasons = out.iter().map(|out| match out {
            SegmentOut::Failed(reason) => Some(reason),
            _ => None,
        });
        let reasons: Option<Vec<&String>> = reasons.collect();
        let reason = reasons?.first()?.to_string();
        let slots = work.iter().map(|w| w.session.slot()).collect();
        Some(StepError::Failed { slots, reason })
    }

    fn alive(&self) -> Result<(), EngineError> {
        match &self.lost {
            Some(reason) => Err(EngineError::DeviceLost(reason.clone())),
            None => Ok(()),
        }
    }

    /// Takes the slots of ended sessions back. One that cannot be emptied now is emptied when it is opened.
    fn reclaim(&mut self) -> Result<(), EngineError> {
        let ended =
            std::mem::take(&mut *self.returned.lock().unwrap_or_else(PoisonError::into_inner));
        for slot in ended {
            match self.program.reset(slot) {
                Ok(()) => {
                    self.poisoned.remove(&slot);
                }
                Err(StepError::Lost(reason)) => self.lost = Some(reason),
                Err(error) => {
                    self.poisoned.insert(slot, error.to_string());
                }
            }
            self.free.push(slot);
        }
        self.free.sort_unstable_by(|a, b| b.cmp(a));
        self.alive()
    }
}

/// What is wrong with results, if anything: each must be of the kind and length that was asked for.
fn unexpected(work: &[Work<'_>], out: &[SegmentOut], vocab: usize) -> Option<String> {
    if work.len() != out.len() {
        return Some(format!("{} results came for {} segments", out.len(), work.len()));
    }
    let wrong = work.iter().zip(out).find(|(w, out)| match (&w.segment.output, out) {
        (_, SegmentOut::Failed(_)) => false,
        (Output::None | Output::Hold, SegmentOut::None) => false,
        (Output::Sample(_), SegmentOut::Sampled(token)) => *token as usize >= vocab,
        (Output::Scores(_), SegmentOut::Scores(scores)) => scores.len() != w.rows,
        (Output::Logits, SegmentOut::Logits(logits)) => logits.len() != w.rows * vocab,
        _ => true,
    });
    wrong.map(|(w, _)| {
        format!("the result of slot {} is not what was asked for", w.session.slot().0)
    })
}
