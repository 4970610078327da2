//! A program that fails on purpose, so that engines and schedulers can be tested with every kind of failure.

use std::collections::BTreeMap;

use lily_ops::sample::SampleParams;
use lily_ops::{Plan, SlotState};

use crate::program::{Counters, Limits, MemoryNeed, Program, Snapshot};
use crate::step::{Refusal, SlotId, Step, StepError, StepOut, Ticket};

/// A failure to inject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The step is refused; nothing changes.
    Refuse,
    /// The step runs and is reported as failed; its slots are poisoned until reset or restored.
    Fail,
    /// The device is lost: this step and everything after it fails.
    Lose,
}

/// Wraps a program and injects faults at chosen steps.
pub struct FaultyProgram {
    inner: Box<dyn Program>,
    faults: BTreeMap<u64, Fault>,
    submitted: u64,
    poisoned: Vec<SlotId>,
    failed: Vec<(Ticket, Vec<SlotId>)>,
    lost: bool,
}

impl FaultyProgram {
    /// Injects each fault at the step with its number, counted from 0.
    pub fn new(inner: Box<dyn Program>, faults: impl IntoIterator<Item = (u64, Fault)>) -> Self {
        Self {
            inner,
            faults: faults.into_iter().collect(),
            submitted: 0,
            poisoned: Vec::new(),
            failed: Vec::new(),
            lost: false,
        }
    }

    fn alive(&self) -> Result<(), StepError> {
        match self.lost {
            true => Err(StepError::Lost("injected".into())),
            false => Ok(()),
        }
    }

    fn usable(&self, slot: SlotId) -> Result<(), StepError> {
        self.alive()?;
        match self.poisoned.contains(&slot) {
            true => Err(Refusal::Invalid(format!("slot {} is poisoned", slot.0)).into()),
            false => Ok(()),
        }
    }
}

impl Program for FaultyProgram {
    fn plan(&self) -> &Plan {
        self.inner.plan()
    }

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn submit(&mut self, step: Step) -> Result<Ticket, StepError> {
        let fault = self.faults.get(&self.submitted).copied();
        self.submitted += 1;
        for s in &step.segments {
            self.usable(s.slot)?;
        }
        match fault {
            Some(Fault::Refuse) => Err(Refusal::Invalid("injected".into()).into()),
            Some(Fault::Lose) => {
                self.lost = true;
                self.alive().map(|()| Ticket(0))
            }
            Some(Fault::Fail) => {
                let slots: Vec<SlotId> = step.segments.iter().map(|s| s.slot).collect();
                let ticket = self.inner.submit(step)?;
                self.failed.push((Ticket(ticket.0), slots.clone()));
                self.poisoned.extend(slots);
                Ok(ticket)
            }
            None => self.inner.submit(step),
        }
    }

    fn wait(&mut self, ticket: Ticket) -> Result<StepOut, StepError> {
        self.alive()?;
        let failed = self.failed.iter().position(|(t, _)| *t == ticket);
        let out = self.inner.wait(ticket)?;
        match failed {
            Some(i) => {
                let (_, slots) = self.failed.remove(i);
                Err(StepError::Failed { slots, reason: "injected".into() })
            }
            None => Ok(out),
        }
    }

    fn sample(&mut self, slot: SlotId, params: &SampleParams) -> Result<u32, StepError> {
        self.usable(slot)?;
        self.inner.sample(slot, params)
    }

    fn reset(&mut self, slot: SlotId) -> Result<(), StepError> {
        self.alive()?;
        self.poisoned.retain(|s| *s != slot);
        self.inner.reset(slot)
    }

    fn begin_answer(&mut self, slot: SlotId) -> Result<(), StepError> {
        self.usable(slot)?;
        self.inner.begin_answer(slot)
    }

    fn position(&self, slot: SlotId) -> Result<usize, StepError> {
        self.usable(slot)?;
        self.inner.position(slot)
    }

    fn snapshot(&mut self, slot: SlotId) -> Result<Snapshot, StepError> {
        self.usable(slot)?;
        self.inner.snapshot(slot)
    }

    fn restore(&mut self, slot: SlotId, snapshot: &Snapshot) -> Result<(), StepError> {
        self.alive()?;
        self.inner.restore(slot, snapshot)?;
        self.poisoned.retain(|s| *s != slot);
        Ok(())
    }

    fn export(&mut self, slot: SlotId) -> Result<SlotState, StepError> {
        self.usable(slot)?;
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
