//! A plan prepared for a GPU: lists recorded once for each kind of step, then submitted.

mod cache;
mod head;
mod measure;
mod record;
mod slots;
mod step;
pub mod sweep;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use lily_device::{
    Counters, KvPart, Limits, MAX_IN_FLIGHT, Measure, MemoryNeed, OperationTimes, PrepareError,
    Program, Refusal, SlotId, Snapshot, Step, StepError, StepOut, StepSlots, Ticket, Weight,
    check_room,
};
use lily_ops::sample::{SampleParams, Sampled};
use lily_ops::{Plan, SlotState};

use crate::driver::{Buffer, Driver, DriverError, Placement};
use crate::kernels::common::SlotHeader;
use crate::memory::Memory;
use crate::parts::Parts;
use crate::profile::Profile;
use crate::text::{Shape, Text};
use crate::tuning::Tuning;
use crate::upload::SlabLayout;

pub use record::{Head, Kind, Recorded, Recording};
use slots::{LastSampled, Slots};
use step::Flight;
pub(crate) use step::bucket;

/// A prepared plan on a GPU.
pub struct GpuProgram {
    driver: Box<dyn Driver>,
    recording: Recording,
    limits: Limits,
    text: Arc<Text>,
    memory: Memory,
    need: MemoryNeed,
    io: head::Io,
    arena: Buffer,
    arena_bytes: u64,
    scratch_high: u64,
    slots: Slots,
    lists: HashMap<Kind, Arc<Parts>>,
    flights: VecDeque<Flight>,
    next_ticket: u64,
    counters: Counters,
    meter: Option<measure::Meter>,
    lost: Option<String>,
}

/// Tokens of a step at most: rows are a grid's second dimension.
const MAX_ROWS: usize = 65_535;

/// Recorded lists that are kept; the kinds of steps of a session are few, of a server some dozen.
const KEPT_LISTS: usize = 256;

/// Bytes that a program takes, from the plan alone.
pub(crate) fn memory_need(
    plan: &Plan,
    limits: &Limits,
    tuning: &Tuning,
    profile: &Profile,
) -> Result<MemoryNeed, String> {
    let recording = Recording::virtual_of(plan, tuning, profile)?;
    let bytes = Memory::need(plan, limits, MAX_IN_FLIGHT, head::Io::input_bytes(limits));
    let scratch = recording.arena_bytes(limits)?;
    Ok(MemoryNeed {
        kv: bytes.kv,
        state: bytes.state,
        scratch: scratch.saturating_add(bytes.tables).saturating_add(head::Io::bytes(plan, limits)),
        weights: recording.weight_bytes(),
    })
}

/// Compiles kernels, and checks that each runs in threadgroups of so many threads: a kernel of many registers may not.
fn verify(
    driver: &mut dyn Driver,
    text: &Arc<Text>,
    kernels: &BTreeMap<&'static str, u32>,
) -> Result<(), DriverError> {
    let names: Vec<&'static str> = kernels.keys().copied().collect();
    let pipelines = driver.pipelines(text, &names)?;
    for ((name, threads), pipeline) in kernels.iter().zip(pipelines) {
        let most = driver.most_threads(pipeline);
        if *threads > most {
            return Err(DriverError::Compile {
                device: driver.profile().name.clone(),
                log: format!("{name}: {threads} threads a threadgroup are needed, {most} can run"),
            });
        }
    }
    Ok(())
}

impl GpuProgram {
    /// Uploads the weights and allocates everything else.
    pub(crate) fn new(
        mut driver: Box<dyn Driver>,
        tuning: Tuning,
        plan: Arc<Plan>,
        weights: &[Weight],
        limits: Limits,
    ) -> Result<Self, PrepareError> {
        let profile = driver.profile().clone();
        let Limits { slots, context, rows, outputs, pages, .. } = limits;
        if [slots, context, rows, outputs, pages].contains(&0) || limits.rows > MAX_ROWS {
            return Err(PrepareError::Invalid(format!(
                "{limits:?}: each must be at least 1, and a step has at most {MAX_ROWS} tokens"
            )));
        }
        let refused = |e: DriverError| match e {
            DriverError::OutOfMemory { .. } => PrepareError::OutOfMemory(e.to_string()),
            e => PrepareError::Invalid(e.to_string()),
        };
        let need = memory_need(&plan, &limits, &tuning, &profile).map_err(|operations| {
            PrepareError::Unsupported { device: profile.name.clone(), operations }
        })?;
        if need.total() > profile.memory {
            let advice = driver
                .more_room(need.total())
                .unwrap_or("ask for a shorter context or fewer sessions".into());
            return Err(PrepareError::OutOfMemory(format!(
                "the model needs {} bytes on {}, which has {}; {advice}",
                need.total(),
                profile.name,
                profile.memory
            )));
        }
        let layout = SlabLayout::new(&plan, profile.max_buffer).map_err(PrepareError::Invalid)?;
        let refs: Vec<_> = weights.iter().map(Weight::as_ref).collect();
        let weights = layout.upload(&mut *driver, &plan, &refs).map_err(refused)?;
        let input_bytes = head::Io::input_bytes(&limits);
        let memory = Memory::new(&mut *driver, &plan, &limits, MAX_IN_FLIGHT, input_bytes)
            .map_err(refused)?;
        let io = head::Io::new(&mut *driver, &plan, &limits, &memory.extra).map_err(refused)?;
        let shape = Shape::of(&plan);
        let text = Arc::new(Text::new(profile.platform, &shape));
        let recording = Recording::new(plan, weights, shape, tuning, profile);
        let (arena_bytes, mut kernels) =
            recording.survey(&limits).map_err(PrepareError::Invalid)?;
        // What a device cannot compile or run is known before anything runs.
        kernels.entry("finish_step").or_insert(32);
        verify(&mut *driver, &text, &kernels).map_err(refused)?;
        let arena = driver.allocate("scratch", arena_bytes, Placement::Device).map_err(refused)?;
        let slots = Slots::new(limits.slots, limits.pages);
        let weight_count = recording.plan().weights.len();
        Ok(Self {
            driver,
            recording,
            limits,
            text,
            memory,
            need,
            io,
            arena,
            arena_bytes,
            scratch_high: 0,
            slots,
            lists: HashMap::new(),
            flights: VecDeque::new(),
            next_ticket: 0,
            counters: Counters { steps: 0, weight_bytes: vec![0; weight_count] },
            meter: None,
            lost: None,
        })
    }

    /// The list of a kind of step, recorded the first time.
    fn list(&mut self, kind: Kind) -> Result<Arc<Parts>, StepError> {
        if let Some(list) = self.lists.get(&kind) {
            return Ok(list.clone());
        }
        let tables = &self.memory.tables[kind.tables];
        let Recorded { mut list, scratch } = self
            .recording
            .record(&kind, tables, &self.io)
            .map_err(|e| StepError::from(Refusal::Invalid(e)))?;
        let reuse = self.recording.tuning().reuse_buffers;
        let bytes = scratch.place(&mut list.clone(), self.arena, reuse);
        if bytes > self.arena_bytes {
            self.grow_arena(bytes)?;
        }
        scratch.place(&mut list, self.arena, reuse);
        self.scratch_high = self.scratch_high.max(bytes);
        list.inputs = vec![self.memory.inputs(kind.tables)];
        list.outputs = vec![self.io.outputs(kind.tables)];
        let kernels: Vec<&'static str> = list.dispatches.iter().map(|d| d.kernel).collect();
        list.pipelines = self
            .driver
            .pipelines(&self.text, &kernels)
            .map_err(|e| StepError::from(Refusal::Invalid(e.to_string())))?;
        let list = Arc::new(Parts::new(list));
        if self.lists.len() >= KEPT_LISTS {
            self.lists.clear();
        }
        self.lists.insert(kind, list.clone());
        Ok(list)
    }

    /// A larger arena. It was planned from the largest steps, but how values fill it is no monotonous function of their sizes.
    /// Nothing lives there between lists, and lists in flight keep the old one.
    fn grow_arena(&mut self, bytes: u64) -> Result<(), StepError> {
        let arena = self
            .driver
            .allocate("scratch", bytes, Placement::Device)
            .map_err(|e| StepError::from(Refusal::Invalid(e.to_string())))?;
        self.driver.release(std::mem::replace(&mut self.arena, arena));
        self.arena_bytes = bytes;
        self.lists.clear();
        Ok(())
    }

    /// A driver's error in a step of `slots`: they are poisoned; a lost device stays lost.
    fn failed(&mut self, slots: &[SlotId], e: DriverError) -> StepError {
        for slot in slots {
            self.slots.live_mut(*slot).poisoned = true;
        }
        match e {
            DriverError::Lost(why) => {
                self.lost = Some(why.clone());
                StepError::Lost(why)
            }
            e => StepError::Failed { slots: slots.to_vec(), reason: e.to_string() },
        }
    }

    /// Whether the device still answers.
    fn alive(&self) -> Result<(), StepError> {
        match &self.lost {
            Some(why) => Err(StepError::Lost(why.clone())),
            None => Ok(()),
        }
    }

    /// A driver's error outside a step.
    fn broken(&mut self, e: DriverError) -> StepError {
        match e {
            DriverError::Lost(why) => {
                self.lost = Some(why.clone());
                StepError::Lost(why)
            }
            e => Refusal::Invalid(e.to_string()).into(),
        }
    }

    /// Writes what the device must know of a slot that changed on the host.
    fn push_header(&mut self, slot: SlotId) -> Result<(), StepError> {
        let live = self.slots.live_mut(slot);
        let header = SlotHeader {
            position: live.position as u32,
            last_token: match live.last {
                LastSampled::Known(id) => id,
                _ => 0,
            },
            generated: live.generated as u32,
            parity: live.parity,
        };
        self.memory
            .write_header(&mut *self.driver, slot.0 as usize, header)
            .map_err(|e| self.broken(e))
    }

    /// Refuses while steps are in flight that `slot`, or with `None` any slot, takes part in.
    fn idle(&self, slot: Option<SlotId>, what: &str) -> Result<(), StepError> {
        let uses = |f: &Flight| slot.is_none_or(|slot| f.slots.contains(&slot));
        match self.flights.iter().any(uses) {
            false => Ok(()),
            true => {
                Err(Refusal::Invalid(format!("wait for the steps in flight before {what}")).into())
            }
        }
    }

    fn take_snapshot(&mut self, slot: SlotId, from: usize) -> Result<Snapshot, StepError> {
        let live = self.slots.get(slot)?.clone();
        let index = slot.0 as usize;
        let driver = &mut *self.driver;
        let read = self.memory.read_state(driver, index, live.parity).and_then(|state| {
            let tokens = from.min(live.position)..live.position;
            Ok((state, self.memory.read_kv(driver, &live.pages, tokens)?))
        });
        let ((recurrent, conv), kv) = read.map_err(|e| self.broken(e))?;
        let last_sampled = match live.last {
            LastSampled::Known(id) => Some(id),
            _ => None,
        };
        Ok(Snapshot {
            position: live.position,
            last_sampled,
            generated: live.generated,
            counts: live.counts,
            recurrent,
            conv,
            kv,
        })
    }

    fn put_snapshot(
        &mut self,
        slot: SlotId,
        snapshot: &Snapshot,
        kv: &[KvPart<'_>],
    ) -> Result<(), StepError> {
        self.memory.check_snapshot(snapshot, kv).map_err(Refusal::Invalid)?;
        check_room(&self.limits, slot, snapshot.position)?;
        self.slots.reserve(slot, snapshot.position)?;
        let live = self.slots.live_mut(slot);
        live.position = snapshot.position;
        live.last = snapshot.last_sampled.map_or(LastSampled::None, LastSampled::Known);
        live.generated = snapshot.generated;
        live.counts = snapshot.counts.clone();
        let (pages, index) = (live.pages.clone(), slot.0 as usize);
        let driver = &mut *self.driver;
        let written = self
            .memory
            .write_pages(driver, index, 0, &pages)
            .and_then(|()| {
                self.memory.write_state(driver, index, 0, &snapshot.recurrent, &snapshot.conv)
            })
            .and_then(|()| kv.iter().try_for_each(|kv| self.memory.write_kv(driver, &pages, kv)));
        written.map_err(|e| self.broken(e))?;
        self.push_counts(slot)?;
        self.push_header(slot)
    }

    /// Takes back a slot's last step: the other of its two states is the one before it.
    fn take_back(&mut self, slot: SlotId) -> Result<(), StepError> {
        let refuse = |why: &str| Err(Refusal::Invalid(format!("slot {}: {why}", slot.0)).into());
        if !self.limits.undo {
            return refuse("the program was prepared without undo");
        }
        if self.flights.iter().any(|f| f.slots.contains(&slot)) {
            return refuse("wait for its step before taking it back");
        }
        self.slots.get(slot)?;
        let live = self.slots.live_mut(slot);
        let Some(undo) = live.undo.take() else {
            return refuse("its last step was none of a single token, or is taken back already");
        };
        live.position -= 1;
        live.parity ^= 1;
        live.held = None;
        live.generated = undo.generated;
        live.last = undo.last;
        if let Some(id) = undo.sampled {
            let left = live.counts.get(&id).map_or(0, |n| n - 1);
            match left {
                0 => live.counts.remove(&id),
                n => live.counts.insert(id, n),
            };
            let at = (slot.0 as u64 * self.recording.plan().vocab as u64 + u64::from(id)) * 4;
            let buffer = self.io.counts.buffer;
            self.driver.write(buffer, at, &left.to_le_bytes()).map_err(|e| self.broken(e))?;
        }
        self.slots.trim(slot);
        self.push_header(slot)
    }

    /// Makes the device's counts those of the host.
    fn push_counts(&mut self, slot: SlotId) -> Result<(), StepError> {
        let live = self.slots.live_mut(slot);
        if !live.counted && live.counts.is_empty() {
            return Ok(());
        }
        live.counted = !live.counts.is_empty();
        let vocab = self.recording.plan().vocab;
        let mut counts = vec![0u32; vocab];
        for (id, n) in &live.counts {
            if let Some(count) = counts.get_mut(*id as usize) {
                *count = *n;
            }
        }
        let at = (slot.0 as usize * vocab * 4) as u64;
        let buffer = self.io.counts.buffer;
        self.driver.write(buffer, at, bytemuck::cast_slice(&counts)).map_err(|e| self.broken(e))
    }
}

impl Program for GpuProgram {
    fn plan(&self) -> &Plan {
        self.recording.plan()
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn alone(&self, step: &Step) -> bool {
        self.runs_alone(step)
    }

    fn submit(&mut self, step: Step) -> Result<Ticket, StepError> {
        self.alive()?;
        self.submit_step(step)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<StepOut, StepError> {
        self.wait_step(ticket)
    }

    fn sample(&mut self, slot: SlotId, params: &SampleParams) -> Result<Sampled, StepError> {
        self.alive()?;
        self.idle(Some(slot), "sampling held logits")?;
        self.sample_held(slot, params)
    }

    fn undo_last(&mut self, slot: SlotId) -> Result<(), StepError> {
        self.alive()?;
        self.take_back(slot)
    }

    fn reset(&mut self, slot: SlotId) -> Result<(), StepError> {
        self.alive()?;
        self.idle(Some(slot), "resetting a slot")?;
        self.slots.reset(slot)?;
        let index = slot.0 as usize;
        self.memory.clear(&mut *self.driver, index, 0).map_err(|e| self.broken(e))?;
        self.push_counts(slot)?;
        self.push_header(slot)
    }

    fn begin_answer(&mut self, slot: SlotId, answered: &[u32]) -> Result<(), StepError> {
        self.alive()?;
        self.idle(Some(slot), "beginning an answer")?;
        self.slots.get(slot)?;
        let live = self.slots.live_mut(slot);
        live.generated = answered.len() as u64;
        live.counts.clear();
        for id in answered {
            *live.counts.entry(*id).or_default() += 1;
        }
        live.undo = None;
        self.push_counts(slot)?;
        self.push_header(slot)
    }

    fn measure(&mut self, what: Measure) -> Result<(), StepError> {
        self.alive()?;
        self.idle(None, "measuring")?;
        self.set_measure(what).map_err(|e| self.broken(e))
    }

    fn operation_times(&self) -> OperationTimes {
        self.measured()
    }

    fn position(&self, slot: SlotId) -> Result<usize, StepError> {
        Ok(self.slots.get(slot)?.position)
    }

    fn snapshot_behind(&mut self, slot: SlotId, from: usize) -> Result<Snapshot, StepError> {
        self.alive()?;
        self.idle(Some(slot), "taking a snapshot")?;
        self.take_snapshot(slot, from)
    }

    fn restore_parts(
        &mut self,
        slot: SlotId,
        snapshot: &Snapshot,
        kv: &[KvPart<'_>],
    ) -> Result<(), StepError> {
        self.alive()?;
        self.idle(Some(slot), "restoring a slot")?;
        self.put_snapshot(slot, snapshot, kv)
    }

    fn export(&mut self, slot: SlotId) -> Result<SlotState, StepError> {
        self.alive()?;
        self.idle(Some(slot), "exporting a slot")?;
        let live = self.slots.get(slot)?.clone();
        self.memory
            .export(&mut *self.driver, slot.0 as usize, live.parity, &live.pages, live.position)
            .map_err(|e| self.broken(e))
    }

    fn free_pages(&self) -> usize {
        self.slots.free_pages()
    }

    fn memory(&self) -> MemoryNeed {
        self.need
    }

    fn scratch_high_water(&self) -> u64 {
        self.scratch_high
    }

    fn counters(&self) -> Counters {
        self.counters.clone()
    }
}
