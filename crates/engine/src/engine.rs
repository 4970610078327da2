use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Instant;

use lily_device::{Device, Limits, Measure, Plan, Program, SlotId, StepError, Weight};
use lily_ops::plan::PAGE_TOKENS;
use lily_ops::sample::{SampleParams, Sampled};

use crate::budget::{Budget, budget};
use crate::error::EngineError;
use crate::flight::{Abandoned, InFlight};
use crate::memory::Machine;
use crate::session::{Lease, Returned, Session};
use crate::snapshot::{HostMemory, Span};

/// What an engine is prepared for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Tokens of one session, prompt and answer.
    pub context: usize,
    /// Sessions open at once.
    pub slots: usize,
    /// Most prompt tokens of one step: bounds scratch memory, and how long a cancellation takes.
    pub chunk: usize,
    /// KV pages of 256 tokens that all sessions share; `None` sets aside what all of them can fill. With
    /// fewer, steps are refused as [`OutOfPages`](EngineError::OutOfPages) when they run out.
    pub pages: Option<usize>,
    /// Bytes of host memory that snapshots and checkpoints may take, of all sessions together.
    pub snapshot_bytes: u64,
    /// Most rows of one step that may ask for [`Output::Logits`](lily_device::Output::Logits).
    pub logit_rows: usize,
    /// Whether decode steps can be [taken back](Engine::undo), which two in flight need. It takes a second
    /// copy of the recurrent state, and on some devices the time to make it.
    pub undo: bool,
}

impl EngineOptions {
    /// Pages for all, no snapshots, no logits, no undo.
    pub const fn new(context: usize, slots: usize, chunk: usize) -> Self {
        Self { context, slots, chunk, pages: None, snapshot_bytes: 0, logit_rows: 0, undo: false }
    }

    /// The device limits that follow.
    pub fn limits(&self) -> Limits {
        // A decode step of all slots has one row for each of them.
        let rows = self.chunk.min(self.context).max(self.slots);
        let limits = Limits::new(self.slots, self.context, rows);
        Limits { pages: self.pages.unwrap_or(limits.pages), undo: self.undo, ..limits }
    }

    fn check(&self) -> Result<(), EngineError> {
        let options = [("context", self.context), ("slots", self.slots), ("chunk", self.chunk)];
        if let Some((option, value)) = options.into_iter().find(|(_, value)| *value == 0) {
            return Err(EngineError::Options { option, value });
        }
        // With fewer a session could fill them all and still not go on.
        let need = self.context.div_ceil(PAGE_TOKENS);
        match self.pages.filter(|pages| *pages < need) {
            Some(pages) => Err(EngineError::TooFewPages { pages, need, context: self.context }),
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
    overlaps: bool,
    few_rows: Option<usize>,
    free: Vec<SlotId>,
    returned: Returned,
    /// Steps that the device has, in order.
    pub(crate) flights: VecDeque<InFlight>,
    pub(crate) abandoned: Abandoned,
    /// When a step was last waited for.
    pub(crate) last_landing: Option<Instant>,
    pub(crate) host_memory: Arc<HostMemory>,
    /// For each slot the part of its K and V that was last copied from it or into it.
    pub(crate) copied: Vec<Weak<Span>>,
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
    /// of this machine or of the device is refused before anything is allocated.
    pub fn new(
        device: &dyn Device,
        plan: Arc<Plan>,
        weights: Vec<Weight>,
        options: EngineOptions,
    ) -> Result<Self, EngineError> {
        Self::on_machine(device, plan, weights, options, &Machine::detect())
    }

    /// As [`new`](Self::new) with the machine's memory given; for [`Machine::UNKNOWN`]
    /// only the device itself refuses.
    pub fn on_machine(
        device: &dyn Device,
        plan: Arc<Plan>,
        weights: Vec<Weight>,
        options: EngineOptions,
        machine: &Machine,
    ) -> Result<Self, EngineError> {
        options.check()?;
        let limits = options.limits();
        let budget = budget(device, &plan, &options);
        budget.check(machine, device.memory_limit()).map_err(|refusal| {
            EngineError::OutOfMemory {
                model: plan.name.clone(),
                device: device.name(),
                refusal: Box::new(refusal),
            }
        })?;
        Ok(Self {
            program: device.prepare(Arc::clone(&plan), weights, limits)?,
            plan,
            options,
            budget,
            overlaps: device.overlaps(),
            few_rows: device.few_rows(),
            free: (0..options.slots as u32).rev().map(SlotId).collect(),
            returned: Returned::default(),
            flights: VecDeque::new(),
            abandoned: Abandoned::default(),
            last_landing: None,
            host_memory: Arc::new(HostMemory::new(options.snapshot_bytes)),
            copied: (0..options.slots).map(|_| Weak::new()).collect(),
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

    /// From now on measures this of every step; [`Program::operation_times`] has it. Results stay the same.
    pub fn measure(&mut self, what: Measure) -> Result<(), EngineError> {
        self.alive()?;
        self.program.measure(what).map_err(|error| self.failure(error, vec![(SlotId(0), 0)]))
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

    /// Chooses a token from the logits that a step with [`Output::Hold`](lily_device::Output::Hold) left on the
    /// device.
    pub fn sample_held(
        &mut self,
        session: &mut Session,
        params: &SampleParams,
    ) -> Result<Sampled, EngineError> {
        self.usable(session)?;
        params.check(self.plan.vocab).map_err(EngineError::Parameters)?;
        let sampled = self.program.sample(session.slot(), params);
        let sampled = self.note(session, sampled)?;
        session.last_sampled = Some(sampled.id);
        Ok(sampled)
    }

    /// Whether two steps in flight save time on this device.
    pub fn overlaps(&self) -> bool {
        self.overlaps
    }

    /// The rule that steps have to keep so that a session's results are its own: [`Device::few_rows`].
    pub fn few_rows(&self) -> Option<usize> {
        self.few_rows
    }

    /// Steps that [`generate`](Self::generate) keeps in flight: two where they save time and one can be taken
    /// back.
    pub fn depth(&self) -> usize {
        1 + usize::from(self.overlaps && self.options.undo)
    }

    /// KV pages not in use.
    pub fn free_pages(&self) -> usize {
        self.program.free_pages()
    }

    /// The device answers and the session is one of this engine.
    pub(crate) fn owned(&self, session: &Session) -> Result<(), EngineError> {
        self.alive()?;
        match Arc::ptr_eq(&session.lease.returned, &self.returned) {
            true => Ok(()),
            false => Err(EngineError::ForeignSession),
        }
    }

    /// As [`not_poisoned`](Self::not_poisoned), and none of its steps is in flight.
    pub(crate) fn usable(&mut self, session: &Session) -> Result<(), EngineError> {
        self.land_abandoned();
        self.not_poisoned(session)?;
        self.settled(session)
    }

    /// No step of the session is in flight.
    pub(crate) fn settled(&self, session: &Session) -> Result<(), EngineError> {
        let slot = session.slot();
        match self.flights.iter().any(|f| f.slots.contains(&slot)) {
            true => Err(EngineError::InFlight { slot: slot.0 }),
            false => Ok(()),
        }
    }

    /// As [`owned`](Self::owned), and its slot holds a usable state.
    pub(crate) fn not_poisoned(&self, session: &Session) -> Result<(), EngineError> {
        self.owned(session)?;
        match self.poisoned.get(&session.slot()) {
            Some(reason) => {
                Err(EngineError::Poisoned { slot: session.slot().0, reason: reason.clone() })
            }
            None => Ok(()),
        }
    }

    /// Whether a step failed in the session, so that it holds no usable state until it is staged again.
    pub fn is_poisoned(&self, session: &Session) -> bool {
        self.poisoned.contains_key(&session.slot())
    }

    pub(crate) fn poison(&mut self, slot: SlotId, reason: String) {
        self.poisoned.insert(slot, reason);
    }

    pub(crate) fn poison_of(&self, slot: SlotId) -> Option<&str> {
        self.poisoned.get(&slot).map(String::as_str)
    }

    pub(crate) fn lose(&mut self, reason: String) {
        self.lost = Some(reason);
        self.flights.clear();
    }

    /// Empties the session's slot, whatever state it was in.
    pub(crate) fn reset(&mut self, session: &mut Session) -> Result<(), EngineError> {
        self.set_copied(session.slot(), Weak::new());
        let result = self.program.reset(session.slot());
        self.note(session, result)?;
        self.healed(session);
        session.tokens.clear();
        session.decoded_last = false;
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
        let sessions = vec![(session.slot(), session.coming())];
        result.map_err(|error| self.failure(error, sessions))
    }

    /// Records what an error means for the slots it was about, given with the tokens they had seen.
    pub(crate) fn failure(
        &mut self,
        error: StepError,
        sessions: Vec<(SlotId, usize)>,
    ) -> EngineError {
        match error {
            StepError::Refused(refusal) => refusal.into(),
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
                self.lose(reason.clone());
                EngineError::DeviceLost(reason)
            }
        }
    }

    pub(crate) fn alive(&self) -> Result<(), EngineError> {
        match &self.lost {
            Some(reason) => Err(EngineError::DeviceLost(reason.clone())),
            None => Ok(()),
        }
    }

    /// Takes the slots of ended sessions back. One that cannot be emptied now is emptied when it is opened;
    /// one with a step in flight waits for it.
    pub(crate) fn reclaim(&mut self) -> Result<(), EngineError> {
        self.land_abandoned();
        let flying: Vec<SlotId> = self.flights.iter().flat_map(|f| f.slots.clone()).collect();
        let mut returned = self.returned.lock().unwrap_or_else(PoisonError::into_inner);
        let (wait, ended): (Vec<SlotId>, _) =
            returned.drain(..).partition(|slot| flying.contains(slot));
        *returned = wait;
        drop(returned);
        for slot in ended {
            self.set_copied(slot, Weak::new());
            match self.program.reset(slot) {
                Ok(()) => {
                    self.poisoned.remove(&slot);
                }
                Err(StepError::Lost(reason)) => self.lose(reason),
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
