//! Devices and programs that fail on purpose, so that engines and schedulers can be tested with every kind of
//! failure.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use lily_ops::sample::{SampleParams, Sampled};
use lily_ops::{Case, CaseOutputs, Plan, SlotState};

use crate::program::{
    Counters, Device, KvPart, Limits, MemoryLimit, MemoryNeed, PrepareError, Program, Snapshot,
};
use crate::step::{Refusal, SlotId, Step, StepError, StepOut, Ticket};
use crate::times::{Measure, OperationTimes};
use crate::weights::Weight;

/// A failure to inject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The call is refused; nothing changes. (A refused [`Wait`](Call::Wait) has used up its ticket.)
    Refuse,
    /// The call does its work and is reported as failed; its slots are poisoned until reset or restored. A
    /// failed [`Submit`](Call::Submit) is reported by the wait for its ticket.
    Fail,
    /// The device is lost: this call and everything after it fails.
    Lose,
}

/// The kinds of calls that faults can be injected in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Call {
    /// [`Program::submit`].
    Submit,
    /// [`Program::wait`].
    Wait,
    /// [`Program::sample`].
    Sample,
    /// [`Program::snapshot`].
    Snapshot,
    /// [`Program::restore`].
    Restore,
    /// [`Program::reset`].
    Reset,
    /// [`Program::undo_last`].
    Undo,
}

/// Which calls of a program fail: the kind, which of its kind (counted from 0), and how.
pub type Schedule = Vec<(Call, u64, Fault)>;

/// Wraps a program and injects faults at chosen calls.
pub struct FaultyProgram {
    inner: Box<dyn Program>,
    faults: BTreeMap<(Call, u64), Fault>,
    calls: BTreeMap<Call, u64>,
    poisoned: Vec<SlotId>,
    /// Ticket, slots, and whether the step is to be reported as failed.
    in_flight: Vec<(Ticket, Vec<SlotId>, bool)>,
    lost: bool,
}

impl FaultyProgram {
    /// Injects each fault at the step with its number, counted from 0.
    pub fn new(inner: Box<dyn Program>, faults: impl IntoIterator<Item = (u64, Fault)>) -> Self {
        let submits = faults.into_iter().map(|(n, fault)| (Call::Submit, n, fault));
        Self::with_schedule(inner, submits.collect())
    }

    /// Injects each fault of the schedule.
    pub fn with_schedule(inner: Box<dyn Program>, schedule: Schedule) -> Self {
        Self {
            inner,
            faults: schedule.into_iter().map(|(call, n, fault)| ((call, n), fault)).collect(),
            calls: BTreeMap::new(),
            poisoned: Vec::new(),
            in_flight: Vec::new(),
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

    /// Counts a call and looks up its fault.
    fn count(&mut self, call: Call) -> Option<Fault> {
        let n = self.calls.entry(call).or_default();
        *n += 1;
        self.faults.get(&(call, *n - 1)).copied()
    }

    /// Refuses or loses; whether the call is to fail after its work.
    fn inject(&mut self, fault: Option<Fault>) -> Result<bool, StepError> {
        self.alive()?;
        match fault {
            None => Ok(false),
            Some(Fault::Fail) => Ok(true),
            Some(Fault::Refuse) => Err(Refusal::Invalid("injected".into()).into()),
            Some(Fault::Lose) => {
                self.lost = true;
                self.alive().map(|()| true)
            }
        }
    }

    fn failed<T>(&mut self, slots: Vec<SlotId>) -> Result<T, StepError> {
        self.poisoned.extend(&slots);
        Err(StepError::Failed { slots, reason: "injected".into() })
    }

    /// A call that concerns one slot.
    fn call<T>(
        &mut self,
        call: Call,
        slot: SlotId,
        work: impl FnOnce(&mut dyn Program) -> Result<T, StepError>,
    ) -> Result<T, StepError> {
        let fault = self.count(call);
        let fails = self.inject(fault)?;
        let done = work(&mut *self.inner)?;
        match fails {
            true => self.failed(vec![slot]),
            false => Ok(done),
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

    fn alone(&self, step: &Step) -> bool {
        self.inner.alone(step)
    }

    fn submit(&mut self, step: Step) -> Result<Ticket, StepError> {
        let fault = self.count(Call::Submit);
        let slots: Vec<SlotId> = step.segments.iter().map(|s| s.slot).collect();
        for slot in &slots {
            self.usable(*slot)?;
        }
        let fails = self.inject(fault)?;
        let ticket = self.inner.submit(step)?;
        if fails {
            self.poisoned.extend(&slots);
        }
        self.in_flight.push((Ticket(ticket.0), slots, fails));
        Ok(ticket)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<StepOut, StepError> {
        self.alive()?;
        let at = self.in_flight.iter().position(|(t, ..)| *t == ticket);
        let (slots, step_fails) = match at.map(|at| self.in_flight.remove(at)) {
            Some((_, slots, fails)) => (slots, fails),
            None => (Vec::new(), false),
        };
        let out = self.inner.wait(ticket);
        let fault = self.count(Call::Wait);
        let wait_fails = self.inject(fault)?;
        let out = out?;
        match step_fails || wait_fails {
            true => self.failed(slots),
            false => Ok(out),
        }
    }

    fn sample(&mut self, slot: SlotId, params: &SampleParams) -> Result<Sampled, StepError> {
        self.usable(slot)?;
        self.call(Call::Sample, slot, |program| program.sample(slot, params))
    }

    fn measure(&mut self, what: Measure) -> Result<(), StepError> {
        self.inner.measure(what)
    }

    fn operation_times(&self) -> OperationTimes {
        self.inner.operation_times()
    }

    fn undo_last(&mut self, slot: SlotId) -> Result<(), StepError> {
        self.usable(slot)?;
        self.call(Call::Undo, slot, |program| program.undo_last(slot))
    }

    fn reset(&mut self, slot: SlotId) -> Result<(), StepError> {
        self.call(Call::Reset, slot, |program| program.reset(slot))?;
        self.poisoned.retain(|s| *s != slot);
        Ok(())
    }

    fn begin_answer(&mut self, slot: SlotId, answered: &[u32]) -> Result<(), StepError> {
        self.usable(slot)?;
        self.inner.begin_answer(slot, answered)
    }

    fn position(&self, slot: SlotId) -> Result<usize, StepError> {
        self.usable(slot)?;
        self.inner.position(slot)
    }

    fn snapshot_behind(&mut self, slot: SlotId, from: usize) -> Result<Snapshot, StepError> {
        self.usable(slot)?;
        self.call(Call::Snapshot, slot, |program| program.snapshot_behind(slot, from))
    }

    fn restore_parts(
        &mut self,
        slot: SlotId,
        snapshot: &Snapshot,
        kv: &[KvPart<'_>],
    ) -> Result<(), StepError> {
        self.call(Call::Restore, slot, |program| program.restore_parts(slot, snapshot, kv))?;
        self.poisoned.retain(|s| *s != slot);
        Ok(())
    }

    fn marks(&self) -> bool {
        self.inner.marks()
    }

    fn mark(&mut self, slot: SlotId, rows: &[usize]) -> Result<(), StepError> {
        self.usable(slot)?;
        self.inner.mark(slot, rows)
    }

    fn take_marked(&mut self, slot: SlotId, from: usize) -> Result<Vec<Snapshot>, StepError> {
        self.usable(slot)?;
        self.call(Call::Snapshot, slot, |program| program.take_marked(slot, from))
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

/// Wraps a device: preparing fails a number of times, and what is prepared then is a [`FaultyProgram`].
pub struct FaultyDevice {
    inner: Box<dyn Device>,
    /// Failures of `prepare` to come, and the schedules of the programs to come.
    plans: Mutex<(u64, std::vec::IntoIter<Schedule>)>,
}

impl FaultyDevice {
    /// The program prepared first gets the first schedule, and so on; those after the last have no faults:
    /// a device that was lost can be opened again.
    pub fn new(inner: Box<dyn Device>, schedules: Vec<Schedule>) -> Self {
        Self { inner, plans: Mutex::new((0, schedules.into_iter())) }
    }

    /// The next `times` calls of [`prepare`](Device::prepare) fail, for want of memory.
    pub fn fail_prepare(self, times: u64) -> Self {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner).0 = times;
        self
    }
}

impl Device for FaultyDevice {
    fn name(&self) -> String {
        format!("faulty {}", self.inner.name())
    }

    fn overlaps(&self) -> bool {
        self.inner.overlaps()
    }

    fn few_rows(&self) -> Option<usize> {
        self.inner.few_rows()
    }

    fn memory(&self, plan: &Plan, limits: &Limits) -> MemoryNeed {
        self.inner.memory(plan, limits)
    }

    fn memory_limit(&self) -> MemoryLimit {
        self.inner.memory_limit()
    }

    fn prepare(
        &self,
        plan: Arc<Plan>,
        weights: Vec<Weight>,
        limits: Limits,
    ) -> Result<Box<dyn Program>, PrepareError> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if plans.0 > 0 {
            plans.0 -= 1;
            return Err(PrepareError::OutOfMemory("injected".into()));
        }
        let program = self.inner.prepare(plan, weights, limits)?;
        let schedule = plans.1.next().unwrap_or_default();
        Ok(Box::new(FaultyProgram::with_schedule(program, schedule)))
    }

    fn evaluate(&self, case: &Case) -> Result<CaseOutputs, PrepareError> {
        self.inner.evaluate(case)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::{Input, Output, SegmentOut};
    use lily_ops::ValueId;
    use lily_ops::case::NO_STATE;

    /// Does nothing and succeeds.
    struct Idle(Arc<Plan>);

    impl Program for Idle {
        fn plan(&self) -> &Plan {
            &self.0
        }
        fn limits(&self) -> Limits {
            Limits::new(2, 256, 8)
        }
        fn alone(&self, _: &Step) -> bool {
            false
        }
        fn submit(&mut self, _: Step) -> Result<Ticket, StepError> {
            Ok(Ticket(7))
        }
        fn wait(&mut self, _: Ticket) -> Result<StepOut, StepError> {
            Ok(StepOut { segments: vec![SegmentOut::None] })
        }
        fn sample(&mut self, _: SlotId, _: &SampleParams) -> Result<Sampled, StepError> {
            Ok(Sampled::from(5))
        }
        fn undo_last(&mut self, _: SlotId) -> Result<(), StepError> {
            Ok(())
        }
        fn reset(&mut self, _: SlotId) -> Result<(), StepError> {
            Ok(())
        }
        fn begin_answer(&mut self, _: SlotId, _: &[u32]) -> Result<(), StepError> {
            Ok(())
        }
        fn position(&self, _: SlotId) -> Result<usize, StepError> {
            Ok(0)
        }
        fn snapshot_behind(&mut self, _: SlotId, _: usize) -> Result<Snapshot, StepError> {
            Ok(Snapshot {
                position: 0,
                last_sampled: None,
                generated: 0,
                counts: Default::default(),
                recurrent: vec![],
                conv: vec![],
                kv: vec![],
            })
        }
        fn restore_parts(
            &mut self,
            _: SlotId,
            _: &Snapshot,
            _: &[KvPart<'_>],
        ) -> Result<(), StepError> {
            Ok(())
        }
        fn export(&mut self, _: SlotId) -> Result<SlotState, StepError> {
            Ok(SlotState::default())
        }
        fn free_pages(&self) -> usize {
            2
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

    impl Device for Idle {
        fn name(&self) -> String {
            "idle".into()
        }
        fn memory(&self, _: &Plan, _: &Limits) -> MemoryNeed {
            MemoryNeed::default()
        }
        fn prepare(
            &self,
            plan: Arc<Plan>,
            _: Vec<Weight>,
            _: Limits,
        ) -> Result<Box<dyn Program>, PrepareError> {
            Ok(Box::new(Idle(plan)))
        }
        fn evaluate(&self, case: &Case) -> Result<CaseOutputs, PrepareError> {
            Ok(CaseOutputs { values: vec![], slots: case.slots.clone() })
        }
    }

    fn plan() -> Arc<Plan> {
        Arc::new(Plan {
            name: "nothing".into(),
            vocab: 1,
            layers: vec![],
            values: vec![],
            weights: vec![],
            state: NO_STATE,
            body: vec![],
            head: vec![],
            hidden: ValueId(0),
            logits: ValueId(0),
        })
    }

    fn device(schedules: Vec<Schedule>) -> FaultyDevice {
        FaultyDevice::new(Box::new(Idle(plan())), schedules)
    }

    fn prepare(device: &FaultyDevice) -> Result<Box<dyn Program>, PrepareError> {
        device.prepare(plan(), vec![], Limits::new(2, 256, 8))
    }

    const SLOT: SlotId = SlotId(1);

    /// Makes a call; whether it was refused, failed, or lost the device.
    fn make(program: &mut dyn Program, call: Call) -> Result<(), Fault> {
        let step = || Step::one(SLOT, Input::Tokens(vec![1]), Output::None);
        let snapshot = Idle(plan()).snapshot(SLOT).expect("idle");
        let result = match call {
            Call::Submit | Call::Wait => program.run(step()).map(|_| ()),
            Call::Sample => program.sample(SLOT, &SampleParams::GREEDY).map(|_| ()),
            Call::Snapshot => program.snapshot(SLOT).map(|_| ()),
            Call::Restore => program.restore(SLOT, &snapshot),
            Call::Reset => program.reset(SLOT),
            Call::Undo => program.undo_last(SLOT),
        };
        result.map_err(|e| match e {
            StepError::Refused(_) => Fault::Refuse,
            StepError::Failed { slots, .. } => {
                assert_eq!(slots, [SLOT]);
                Fault::Fail
            }
            StepError::Lost(_) => Fault::Lose,
        })
    }

    #[test]
    fn every_call_fails_in_every_way() {
        use Call::*;
        for call in [Submit, Wait, Sample, Snapshot, Restore, Reset, Undo] {
            let schedule =
                vec![(call, 1, Fault::Refuse), (call, 2, Fault::Fail), (call, 4, Fault::Lose)];
            let mut program = prepare(&device(vec![schedule])).expect("prepared");
            assert_eq!(make(&mut *program, call), Ok(()), "{call:?}");
            assert_eq!(make(&mut *program, call), Err(Fault::Refuse), "{call:?}");
            assert_eq!(program.position(SLOT), Ok(0), "a refusal poisons nothing");
            assert_eq!(make(&mut *program, call), Err(Fault::Fail), "{call:?}");
            assert!(program.position(SLOT).is_err(), "{call:?}: poisoned");
            assert_eq!(program.position(SlotId(0)), Ok(0), "the other slot is not");
            let cure = if call == Reset { Restore } else { Reset };
            assert_eq!(make(&mut *program, cure), Ok(()));
            assert_eq!(program.position(SLOT), Ok(0), "{call:?}: cured");
            assert_eq!(make(&mut *program, call), Ok(()), "{call:?}");
            assert_eq!(make(&mut *program, call), Err(Fault::Lose), "{call:?}");
            for any in [Submit, Sample, Snapshot, Restore, Reset, Undo] {
                assert_eq!(make(&mut *program, any), Err(Fault::Lose));
            }
        }
    }

    #[test]
    fn preparing_fails_and_schedules_follow_the_programs() {
        let lose = vec![(Call::Sample, 0, Fault::Lose)];
        let device = device(vec![vec![], lose]).fail_prepare(2);
        for _ in 0..2 {
            assert!(matches!(prepare(&device), Err(PrepareError::OutOfMemory(_))));
        }
        for lost in [false, true, false] {
            let mut program = prepare(&device).expect("prepared");
            assert_eq!(make(&mut *program, Call::Sample).is_err(), lost);
        }
    }
}
