use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use lily_gpu::{
    Buffer, CommandList, Dispatch, Driver, DriverError, Pipeline, Placement, Platform, Profile,
    Submission, Text, Timing,
};
use objc2::rc::autoreleasepool;

use crate::buffers::{Memory, Pending, Residency, Staging};
use crate::commands::{MOST_ARGUMENTS, MOST_BINDINGS, MOST_BUFFERS, Part, Queue};
use crate::completion::{Completions, Failure, Outcome, Verdict};
use crate::device::{Device, Options, TensorUse, facts};
use crate::estimate::{Cost, Estimator, Piece, command_buffers};
use crate::family::{Offers, macs_per_second, may_use_tensors, profile};
use crate::pipelines::{Compiled, key_of};
use crate::residency::Room;

/// Pipelines of a part, and the seconds that each is expected to take.
type Shares = Vec<(u32, f64)>;

/// A command buffer under way.
struct Segment {
    number: u64,
    shares: Shares,
    kernels: Vec<&'static str>,
    outcome: Option<Outcome>,
}

/// A submission that was not waited for yet.
struct Flight {
    number: u64,
    segments: Vec<Segment>,
    /// Writes that its first command buffer makes.
    writes: Vec<Pending>,
}

impl Flight {
    fn is_over(&self) -> bool {
        self.segments.iter().all(|s| s.outcome.is_some())
    }
}

/// Submissions that failed together: one, and all that were in flight behind it.
struct Broken {
    first: u64,
    last: u64,
    kernel: String,
    reason: String,
}

/// An Apple GPU.
pub struct MetalDriver {
    device: Device,
    options: Options,
    profile: Profile,
    room: Room,
    may_use_tensors: bool,
    // Given back in this order: the queue first, memory after it.
    queue: Queue,
    residency: Option<Residency>,
    compiled: Compiled,
    buffers: HashMap<Buffer, Memory>,
    next_buffer: u32,
    staging: Staging,
    completions: Arc<Completions>,
    /// Command buffers committed so far.
    committed: u64,
    estimator: Estimator,
    flights: VecDeque<Flight>,
    submissions: u64,
    /// When the last command buffer known to have ended did so.
    last_end: f64,
    broken: Vec<Broken>,
    /// Whether the queue has failed and must be made anew.
    failed_queue: bool,
    /// Staged writes of failed submissions.
    lost_writes: Vec<Pending>,
    notes: Vec<String>,
    lost: Option<String>,
    /// Whether it is lost because it does not answer.
    silent: bool,
}

// SAFETY: Metal's devices, queues, buffers and pipelines may be used from any thread; encoders, which may not, live within one
// call. Residency sets are used by one thread at a time: through `&mut self`.
unsafe impl Send for MetalDriver {}

impl MetalDriver {
    /// The system's device in a line, or why it is of no use.
    #[cfg(target_os = "macos")]
    pub fn describe(system: &crate::system::System) -> Result<String, String> {
        let offers = Offers::of(system.os)?;
        let facts = autoreleasepool(|_| facts(&*crate::device::system_device()?))?;
        let room = Room::of(&facts, system);
        let tensors = may_use_tensors(&facts, &offers);
        let p = profile(&facts, system, &room, tensors);
        Ok(format!(
            "{}, {} GPU cores, macOS {}.{}, {:.1} GiB for the GPU{}",
            facts.name,
            p.cores,
            system.os.0,
            system.os.1,
            room.bytes() as f64 / (1u64 << 30) as f64,
            if tensors { ", tensor operations if they pass their test" } else { "" }
        ))
    }

    /// Opens the system's device.
    #[cfg(target_os = "macos")]
    pub fn open(options: Options) -> Result<Self, DriverError> {
        Self::open_on(crate::device::system_device().map_err(DriverError::Lost)?, options)
    }

    /// Opens a device.
    pub fn open_on(device: Device, options: Options) -> Result<Self, DriverError> {
        autoreleasepool(|_| Self::opened(device, options))
    }

    fn opened(device: Device, options: Options) -> Result<Self, DriverError> {
        let facts = facts(&device).map_err(DriverError::Lost)?;
        let offers = Offers::of(options.system.os).map_err(DriverError::Lost)?;
        let room = Room::of(&facts, &options.system);
        let tensors = options.tensors == TensorUse::Auto && may_use_tensors(&facts, &offers);
        let profile = profile(&facts, &options.system, &room, tensors);
        let sets = offers.residency_sets && !facts.is_paravirtual();
        let residency = sets.then(|| Residency::new(&device)).flatten();
        let none = |what: &str| DriverError::Lost(format!("{} made no {what}", facts.name));
        let queue = Queue::new(&device, residency.as_ref()).ok_or_else(|| none("command queue"))?;
        let staging = Staging::new(&device).ok_or_else(|| none("staging buffer"))?;
        let memory = profile.threadgroup_memory;
        let mut driver = Self {
            compiled: Compiled::new(device.clone(), facts.name.clone(), memory, offers),
            estimator: Estimator::new(profile.bandwidth, macs_per_second(&profile)),
            device,
            options,
            profile,
            room,
            may_use_tensors: tensors,
            queue,
            residency,
            buffers: HashMap::new(),
            next_buffer: 0,
            staging,
            completions: Arc::new(Completions::default()),
            committed: 0,
            flights: VecDeque::new(),
            submissions: 0,
            last_end: 0.0,
            broken: Vec::new(),
            failed_queue: false,
            lost_writes: Vec::new(),
            notes: Vec::new(),
            lost: None,
            silent: false,
        };
        if let Some(residency) = &mut driver.residency {
            residency.add(&driver.staging.memory);
        }
        Ok(driver)
    }

    fn alive(&self) -> Result<(), DriverError> {
        match &self.lost {
            Some(why) => Err(DriverError::Lost(why.clone())),
            None => Ok(()),
        }
    }

    fn lose(&mut self, why: String) -> DriverError {
        self.lost = Some(why.clone());
        DriverError::Lost(why)
    }

    fn memory(&self, buffer: Buffer, offset: u64, len: u64) -> Result<&Memory, DriverError> {
        buffer.range(self.buffers.get(&buffer), |m| m.bytes, offset, len)
    }

    /// What Metal would not check, or would stop the program for.
    fn check(&self, dispatch: &Dispatch, pipeline: Pipeline) -> Result<(), DriverError> {
        let invalid = |why: String| DriverError::Invalid(format!("{}: {why}", dispatch.kernel));
        let kernel = self
            .compiled
            .kernels
            .get(pipeline.0 as usize)
            .filter(|k| k.name == dispatch.kernel)
            .ok_or_else(|| invalid("not this kernel's pipeline".into()))?;
        if dispatch.threads > kernel.threads {
            return Err(invalid(format!(
                "{} threads a threadgroup; on {} it can have {}",
                dispatch.threads, self.profile.name, kernel.threads
            )));
        }
        if dispatch.threads == 0 || dispatch.groups.contains(&0) {
            let Dispatch { threads, groups, .. } = dispatch;
            return Err(invalid(format!("a grid of {groups:?} threadgroups of {threads} threads")));
        }
        if dispatch.bindings.len() >= MOST_BINDINGS || dispatch.args.len() > MOST_ARGUMENTS {
            return Err(invalid(format!(
                "{} buffers and {} bytes of arguments; Metal takes {} and {MOST_ARGUMENTS}",
                dispatch.bindings.len(),
                dispatch.args.len(),
                MOST_BINDINGS - 1
            )));
        }
        for b in &dispatch.bindings {
            self.memory(b.buffer, b.offset, b.bytes)?;
            if !b.offset.is_multiple_of(16) {
                return Err(invalid(format!("offset {} is no multiple of 16", b.offset)));
            }
        }
        Ok(())
    }

    /// Takes note of what has ended, and tells whether nothing is under way.
    fn is_idle(&mut self) -> bool {
        // Counted first: of what counts here the outcome is noted.
        let ended = self.completions.ended();
        self.harvest();
        ended == self.committed
    }

    /// Takes note of command buffers that have ended.
    fn harvest(&mut self) {
        let mut news = self.completions.take();
        news.sort_by_key(|(number, _)| *number);
        for (number, outcome) in news {
            let find = |f: &mut Flight| f.segments.iter().position(|s| s.number == number);
            let Some((flight, at)) =
                self.flights.iter_mut().find_map(|f| find(f).map(|at| (f, at)))
            else {
                continue;
            };
            let (in_flight, segment) = (flight.number, &mut flight.segments[at]);
            let failure = outcome.failure.clone();
            if failure.is_none() {
                // The GPU may begin a buffer before the one before it has ended, and then waits at the fence.
                self.estimator
                    .learn(&segment.shares, outcome.end - outcome.start.max(self.last_end));
            }
            self.last_end = self.last_end.max(outcome.end);
            let kernels = segment.kernels.join(", ");
            segment.outcome = Some(outcome);
            if let Some(failure) = failure {
                self.fault(in_flight, kernels, &failure);
            }
        }
    }

    /// A command buffer of submission `number` failed: what is in flight behind it works on what it should have written.
    fn fault(&mut self, number: u64, kernel: String, failure: &Failure) {
        // Ignored behind one that failed is a consequence; on a queue where none has, it is final.
        let is_gone = match failure.verdict() {
            Verdict::Recoverable => false,
            Verdict::Ignored => !self.failed_queue,
            Verdict::Gone => true,
        };
        if is_gone {
            self.lose(format!("{}: {}", self.profile.name, failure.reason()));
        }
        self.failed_queue = true;
        let (last, reason) = (self.submissions, failure.reason());
        match self.broken.last_mut().filter(|b| number <= b.last) {
            // Failed with one that failed before it, or behind it.
            Some(b) if number >= b.first => {}
            Some(b) => (b.first, b.kernel, b.reason) = (number, kernel, reason),
            None => self.broken.push(Broken { first: number, last, kernel, reason }),
        }
    }

    /// Waits until nothing is under way.
    fn quiesce(&mut self) -> Result<(), DriverError> {
        loop {
            let seen = self.completions.ended();
            let idle = self.is_idle();
            self.alive()?;
            if idle {
                self.settle_writes();
                return Ok(());
            }
            self.be_patient(seen)?;
        }
    }

    fn be_patient(&mut self, seen: u64) -> Result<(), DriverError> {
        match self.completions.wait_beyond(seen, self.options.patience) {
            true => Ok(()),
            false => {
                self.silent = true;
                let seconds = self.options.patience.as_secs_f64();
                Err(self.lose(format!("{} has not answered for {seconds} s", self.profile.name)))
            }
        }
    }

    /// Makes the writes that a failed submission or no submission has made; nothing is under way.
    fn settle_writes(&mut self) {
        let mut writes = std::mem::take(&mut self.lost_writes);
        for flight in self.flights.iter().filter(|f| self.has_failed(f.number).is_some()) {
            writes.extend(&flight.writes);
        }
        self.flights.iter_mut().for_each(|f| f.writes.clear());
        writes.append(&mut self.staging.pending);
        for write in writes {
            let Some(to) = self.buffers.get(&write.to) else { continue };
            let mut bytes = vec![0; write.bytes as usize];
            // SAFETY: nothing is under way.
            unsafe {
                self.staging.memory.fetch(write.from, &mut bytes);
                to.fill(write.at, &bytes);
            }
        }
        self.staging.reset();
    }

    /// A new queue in place of a failed one.
    fn mend(&mut self) -> Result<(), DriverError> {
        if !self.failed_queue {
            return Ok(());
        }
        if !self.is_idle() {
            let (kernel, reason) = self
                .broken
                .last()
                .map_or_else(Default::default, |b| (b.kernel.clone(), b.reason.clone()));
            let reason = format!("{reason}; wait for what is in flight before the next list");
            return Err(DriverError::Kernel { kernel, reason });
        }
        self.settle_writes();
        match autoreleasepool(|_| Queue::new(&self.device, self.residency.as_ref())) {
            Some(queue) => self.queue = queue,
            None => {
                let why = format!("{} made no command queue after a failure", self.profile.name);
                return Err(self.lose(why));
            }
        }
        self.failed_queue = false;
        Ok(())
    }

    /// Waits until a command buffer more may be under way. Metal would wait, too, but without an end on a device that is silent.
    fn await_room(&mut self) -> Result<(), DriverError> {
        loop {
            let seen = self.completions.ended();
            if self.committed - seen < MOST_BUFFERS as u64 {
                return Ok(());
            }
            self.be_patient(seen)?;
        }
    }

    /// Cuts a list into parts by time: their dispatches or pieces of them, and what each pipeline in them should take.
    fn parts(&self, list: &CommandList) -> Vec<(Vec<Piece>, Shares)> {
        let costs = list.dispatches.iter().zip(&list.pipelines).map(|(d, p)| {
            let cost = Cost { pipeline: p.0, traffic: d.traffic, work: d.work };
            (self.estimator.seconds(&cost), d.most_parts())
        });
        let costs: Vec<(f64, u32)> = costs.collect();
        let parts = command_buffers(&costs, list.stages(), self.options.part_seconds);
        parts
            .into_iter()
            .map(|pieces| {
                let mut shares = Shares::new();
                for piece in &pieces {
                    let pipeline = list.pipelines[piece.dispatch].0;
                    match shares.iter_mut().find(|(p, _)| *p == pipeline) {
                        Some((_, sum)) => *sum += piece.seconds,
                        None => shares.push((pipeline, piece.seconds)),
                    }
                }
                (pieces, shares)
            })
            .collect()
    }

    fn commit(&mut self, list: &CommandList) -> Result<(), DriverError> {
        let number = self.submissions;
        let mut flight = Flight { number, segments: Vec::new(), writes: Vec::new() };
        let mut error = None;
        for (pieces, shares) in self.parts(list) {
            if let Err(e) = self.await_room() {
                self.flights.push_back(flight);
                return Err(e);
            }
            let writes = std::mem::take(&mut self.staging.pending);
            let part = Part {
                number: self.committed + 1,
                list,
                pieces: &pieces,
                kernels: &self.compiled.kernels,
                buffers: &self.buffers,
                staging: &self.staging,
                writes: &writes,
            };
            let committed = self.queue.commit(&part, &self.completions);
            flight.writes.extend(writes);
            if let Err(why) = committed {
                error = Some(why);
                break;
            }
            self.committed += 1;
            let mut kernels = Vec::new();
            for (pipeline, _) in &shares {
                let name = self.compiled.kernels[*pipeline as usize].name;
                if !kernels.contains(&name) {
                    kernels.push(name);
                }
            }
            let number = self.committed;
            flight.segments.push(Segment { number, shares, kernels, outcome: None });
        }
        self.flights.push_back(flight);
        match error {
            None => Ok(()),
            Some(why) => {
                let failure = Failure { code: 0, text: why.into() };
                self.fault(number, "none of it".into(), &failure);
                Err(DriverError::Kernel { kernel: "none of it".into(), reason: why.into() })
            }
        }
    }

    /// With what a submission failed, if it did.
    fn has_failed(&self, number: u64) -> Option<&Broken> {
        self.broken.iter().find(|b| (b.first..=b.last).contains(&number))
    }

    /// What became of a submission that is over.
    fn verdict(&self, number: u64) -> Result<(), DriverError> {
        let Some(b) = self.has_failed(number) else { return Ok(()) };
        let reason = match number == b.first {
            true => b.reason.clone(),
            false => format!("a list before this one failed: {}", b.reason),
        };
        Err(DriverError::Kernel { kernel: b.kernel.clone(), reason })
    }

    /// Settles whether a text's kernels use tensor operations: compiled apart, tested, and left out with a word if
    /// either fails.
    fn settle_tensors(&mut self, key: u64, text: &Arc<Text>) {
        if text.platform != Platform::MetalTensor || !self.may_use_tensors {
            self.note("matrix tiles by simdgroup matrices: this device and system have no tensor operations, or they are off".into());
            return;
        }
        let tested = match self.compiled.add_tensors(key, text) {
            Ok(()) => self.test_tensors(key),
            Err(e) => Err(e.to_string()),
        };
        match tested {
            Ok(worst) => self.note(format!(
                "matrix tiles by tensor operations: products of {:?} by {} kernels differ by {worst:.1e} of their size from simdgroup matrices",
                self.options.tensor_test,
                crate::tensors::PRODUCTS.len()
            )),
            Err(why) => {
                self.compiled.drop_tensors(key);
                let why = why.lines().next().unwrap_or_default();
                let note =
                    format!("{}: computing without tensor operations: {why}", self.profile.name);
                (self.options.notify)(&note);
                self.note(note);
            }
        }
    }

    fn note(&mut self, line: String) {
        if !self.notes.contains(&line) {
            self.notes.push(line);
        }
    }

    /// Compares tensor operations with simdgroup matrices.
    fn test_tensors(&mut self, key: u64) -> Result<f64, String> {
        let size = self.options.tensor_test;
        let mut results = Vec::new();
        for tensors in [false, true] {
            let mut pipelines = Vec::new();
            for product in &crate::tensors::PRODUCTS {
                let pipeline = self.compiled.pipeline_of(key, product.kernel, tensors);
                pipelines.push(pipeline.map_err(|e| e.to_string())?);
            }
            results.push(crate::tensors::run(self, size, pipelines).map_err(|e| e.to_string())?);
        }
        crate::tensors::compare(&results[1], &results[0], size)
    }

    /// Whether a text's matrix tiles use tensor operations; `None` before it was compiled.
    pub fn uses_tensors(&self, text: &Text) -> Option<bool> {
        self.compiled.uses_tensors(key_of(text))
    }
}

impl Driver for MetalDriver {
    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn allocate(
        &mut self,
        what: &str,
        bytes: u64,
        placement: Placement,
    ) -> Result<Buffer, DriverError> {
        self.alive()?;
        let refused = |why: String| DriverError::OutOfMemory { what: what.into(), bytes, why };
        let sum = self.allocated().saturating_add(bytes).saturating_add(self.staging.bytes());
        if let Some(why) = self.room.refusal(sum) {
            return Err(refused(why));
        }
        if bytes > self.profile.max_buffer {
            return Err(refused(format!(
                "a buffer of {} has at most {} bytes",
                self.profile.name, self.profile.max_buffer
            )));
        }
        let memory = autoreleasepool(|_| {
            let memory = Memory::new(&self.device, bytes, placement)?;
            if let Some(residency) = &mut self.residency {
                residency.add(&memory);
            }
            Some(memory)
        });
        let memory = memory.ok_or_else(|| refused(format!("{} has no more", self.profile.name)))?;
        let buffer = Buffer(self.next_buffer);
        self.next_buffer += 1;
        self.buffers.insert(buffer, memory);
        Ok(buffer)
    }

    fn release(&mut self, buffer: Buffer) {
        // Commands do not retain what they use.
        if self.quiesce().is_err() {
            return;
        }
        let Some(memory) = self.buffers.remove(&buffer) else { return };
        autoreleasepool(|_| {
            if let Some(residency) = &mut self.residency {
                residency.remove(&memory);
            }
            drop(memory);
        });
    }

    fn write(&mut self, buffer: Buffer, offset: u64, bytes: &[u8]) -> Result<(), DriverError> {
        self.alive()?;
        let shared =
            self.memory(buffer, offset, bytes.len() as u64)?.placement == Placement::Shared;
        if !shared {
            if self.is_idle() {
                self.settle_writes();
            } else if self.staging.take(buffer, offset, bytes) {
                return Ok(());
            } else {
                self.quiesce()?;
            }
        }
        // SAFETY: nothing is under way, or the memory is shared and the caller keeps it apart from lists in flight.
        unsafe { self.memory(buffer, offset, bytes.len() as u64)?.fill(offset, bytes) };
        Ok(())
    }

    fn read(&mut self, buffer: Buffer, offset: u64, bytes: &mut [u8]) -> Result<(), DriverError> {
        self.alive()?;
        if self.memory(buffer, offset, bytes.len() as u64)?.placement == Placement::Device {
            self.quiesce()?;
        }
        // SAFETY: as in `write`.
        unsafe { self.memory(buffer, offset, bytes.len() as u64)?.fetch(offset, bytes) };
        Ok(())
    }

    fn pipelines(
        &mut self,
        text: &Arc<Text>,
        kernels: &[&'static str],
    ) -> Result<Vec<Pipeline>, DriverError> {
        self.alive()?;
        let key = key_of(text);
        autoreleasepool(|_| {
            if !self.compiled.has(key) {
                self.compiled.add(key, text)?;
                self.settle_tensors(key, text);
            }
            kernels.iter().map(|name| self.compiled.pipeline(key, name)).collect()
        })
    }

    fn most_threads(&self, pipeline: Pipeline) -> u32 {
        self.compiled.kernels.get(pipeline.0 as usize).map_or(0, |k| k.threads)
    }

    fn submit(&mut self, list: &Arc<CommandList>) -> Result<Submission, DriverError> {
        self.harvest();
        self.alive()?;
        self.mend()?;
        if list.pipelines.len() != list.dispatches.len() {
            return Err(DriverError::Invalid("a dispatch has no pipeline".into()));
        }
        for (dispatch, pipeline) in list.dispatches.iter().zip(&list.pipelines) {
            self.check(dispatch, *pipeline)?;
        }
        if let Some(residency) = &mut self.residency {
            autoreleasepool(|_| residency.settle());
        }
        self.submissions += 1;
        self.commit(list)?;
        Ok(Submission(self.submissions))
    }

    fn wait(&mut self, submission: Submission) -> Result<Timing, DriverError> {
        let number = submission.0;
        if number == 0 || number > self.submissions {
            return Err(DriverError::Invalid(format!("submission {number} was never made")));
        }
        loop {
            let seen = self.completions.ended();
            self.harvest();
            self.alive()?;
            if self.flights.iter().filter(|f| f.number <= number).all(Flight::is_over) {
                break;
            }
            self.be_patient(seen)?;
        }
        let mut timing = Timing::default();
        while self.flights.front().is_some_and(|f| f.number <= number) {
            let Some(flight) = self.flights.pop_front() else { break };
            if self.has_failed(flight.number).is_some() {
                self.lost_writes.extend(&flight.writes);
            }
            let outcomes = || flight.segments.iter().filter_map(|s| s.outcome.as_ref());
            let start = outcomes().map(|o| o.start).fold(f64::INFINITY, f64::min);
            let end = outcomes().map(|o| o.end).fold(0.0, f64::max);
            timing.seconds = if end > start { end - start } else { 0.0 };
        }
        self.verdict(number)?;
        Ok(timing)
    }

    fn allocated(&self) -> u64 {
        self.buffers.values().map(|m| m.bytes).sum()
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    fn more_room(&self, bytes: u64) -> Option<String> {
        self.room.refusal(bytes)
    }
}

impl Drop for MetalDriver {
    fn drop(&mut self) {
        // One that does not answer was waited for; one that is gone still ends its command buffers.
        let patience = if self.silent { Duration::ZERO } else { self.options.patience };
        let over = loop {
            let seen = self.completions.ended();
            if seen == self.committed {
                break true;
            }
            if !self.completions.wait_beyond(seen, patience) {
                break false;
            }
        };
        if !over {
            // Commands do not retain what they use, and the device may still be at them.
            self.queue.abandon();
            std::mem::forget(self.residency.take());
            std::mem::forget(std::mem::take(&mut self.compiled.kernels));
            std::mem::forget(std::mem::take(&mut self.buffers));
            std::mem::forget(self.staging.memory.buffer.clone());
        }
    }
}
