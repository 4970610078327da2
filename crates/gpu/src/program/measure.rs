//! Seconds by kernel, in steps that run for real.
//!
//! After a step has run, its dispatches run again on memory of their own, in which no value takes another's place:
//! first as a whole, then all dispatches of each kernel of an operation by themselves. The layers' weights differ, so
//! that none of them comes out of a cache. Then the step runs again as a whole, in turns with the step without one kernel: what that
//! saves is what the kernel takes inside. What a left-out kernel would have written is there from the runs with it, since no other value lies
//! there, so that those behind it read what they always read; and none is left out that writes indices. Kernels are functions of what they read, so a step's state and results
//! stay what they were; what moves on with a step is put back before each run.

use std::sync::Arc;
use std::time::Instant;

use lily_device::{Inside, Measure, OperationTime, OperationTimes, Twins};
use lily_ops::ElementType;

use super::record::{Kind, Recorded};
use super::{GpuProgram, head};
use crate::driver::{Buffer, Driver, DriverError, Pipeline, Placement};
use crate::kernels::read::{PACKET, Part, read};
use crate::list::{CommandList, Dispatch, Operand, Recorder};
use crate::memory::Memory;
use crate::text::{Shape, Text};

/// Runs before the measured ones: the first is kernel by kernel, with the second a driver may make a graph.
const WARM_UP: usize = 2;
/// Measured runs; their median counts.
const ROUNDS: usize = 5;
/// Kernels that are left out one by one: the costliest.
const COSTLIEST: usize = 10;
/// Measured pairs of a step and the step without a kernel; their median counts.
const PAIRS: usize = 5;
/// Bytes of the long read that tells the device's rate.
const LONG_READ: u64 = 8 << 30;
/// Bytes that leave nothing else in a device's caches.
const FLUSH: u64 = 512 << 20;
/// Threads and threadgroups a core of a read without a kernel's grid.
const READ_GRID: (u32, u32) = (256, 8);

/// What is measured, and what it takes.
pub(super) struct Meter {
    what: Measure,
    pub times: OperationTimes,
    pub reader: Option<Reader>,
}

/// Words that a step moves on.
pub(super) struct Moved {
    headers: Vec<u8>,
    counts: Vec<u8>,
}

/// All dispatches of one kernel for one operation.
#[derive(Default)]
struct Group {
    dispatches: Vec<Dispatch>,
    pipelines: Vec<Pipeline>,
}

impl GpuProgram {
    pub(super) fn set_measure(&mut self, what: Measure) -> Result<(), DriverError> {
        if let Some(reader) = self.meter.take().and_then(|meter| meter.reader) {
            self.driver.release(reader.out.buffer);
        }
        let reader = match what {
            Measure::Nothing => return Ok(()),
            Measure::Operations => None,
            Measure::Twins | Measure::Cache => {
                let slabs = self.recording.slabs();
                Some(Reader::new(&mut *self.driver, &self.recording.text_shape(), slabs)?)
            }
        };
        let mut meter = Meter { what, times: OperationTimes::default(), reader };
        if let (Measure::Twins, Some(reader)) = (what, &mut meter.reader) {
            meter.times.read_rate = Some(reader.rate(&mut *self.driver)?);
            meter.times.matrix_rate = self.driver.profile().macs;
        }
        self.meter = Some(meter);
        Ok(())
    }

    pub(super) fn measured(&self) -> OperationTimes {
        self.meter.as_ref().map(|m| m.times.clone()).unwrap_or_default()
    }

    /// What the next step moves on, as it is before, if steps are measured.
    pub(super) fn moved(&mut self) -> Result<Option<Moved>, DriverError> {
        match self.meter {
            Some(_) => Moved::read(&mut *self.driver, &self.memory, &self.io).map(Some),
            None => Ok(None),
        }
    }

    /// Measures the step that was submitted last, of this kind, its longest slot now of `context` tokens. A reason why it could not is kept
    /// with the times.
    pub(super) fn measure_step(&mut self, kind: &Kind, context: usize, before: &Moved) {
        let Some(mut meter) = self.meter.take() else { return };
        let reads_device = Moved::read(&mut *self.driver, &self.memory, &self.io);
        let result = reads_device.map_err(|e| e.to_string()).and_then(|after| {
            let measured = match meter.what {
                Measure::Cache => self.read_caches(kind, context, before, &mut meter),
                _ => self.run_alone(kind, context, before, &mut meter),
            };
            let restored = after.write(&mut *self.driver, &self.memory, &self.io);
            measured.and(restored.map_err(|e| e.to_string()))
        });
        if let Err(why) = result {
            meter.times.trouble.get_or_insert(why);
        }
        self.meter = Some(meter);
    }

    fn run_alone(
        &mut self,
        kind: &Kind,
        context: usize,
        before: &Moved,
        meter: &mut Meter,
    ) -> Result<(), String> {
        let tables = &self.memory.tables[kind.tables];
        let Recorded { mut list, scratch } = self.recording.record(kind, tables, &self.io)?;
        // Lists are recorded for contexts of powers of two: what they move and multiply is that of the step's own.
        let mut exact = kind.clone();
        exact.shape.context = exact.shape.context.min(context as u32);
        count_as(&mut list, &self.recording.record(&exact, tables, &self.io)?.list);
        if !list.breaks.is_empty() {
            return Err("steps whose routing is the host's are not measured".into());
        }
        // It turns keys where they lie: once more would turn them further.
        if list.dispatches.iter().any(|d| d.kernel == "attention_rotate_k") {
            return Err("steps without fuse_qk_prep are not measured".into());
        }
        let bytes = scratch.place(&mut list.clone(), Buffer(u32::MAX >> 2), false);
        let kernels: Vec<&'static str> = list.dispatches.iter().map(|d| d.kernel).collect();
        list.pipelines = self.driver.pipelines(&self.text, &kernels).map_err(|e| e.to_string())?;
        list.inputs = vec![self.memory.inputs(kind.tables)];
        let arena = self
            .driver
            .allocate("measuring without shared scratch", bytes.max(16), Placement::Device)
            .map_err(|e| format!("{e}; a smaller --chunk needs less"))?;
        scratch.place(&mut list, arena, false);
        let measured = self.time_all(list, before, meter).map_err(|e| e.to_string());
        self.driver.release(arena);
        measured
    }

    fn time_all(
        &mut self,
        list: CommandList,
        before: &Moved,
        meter: &mut Meter,
    ) -> Result<(), DriverError> {
        let Self { driver, memory, io, .. } = self;
        let put_back = |driver: &mut dyn Driver| before.write(driver, memory, io);
        let time = |driver: &mut dyn Driver, list| time(driver, list, put_back);
        let list = Arc::new(list);
        let whole = time(&mut **driver, Arc::clone(&list))?;
        let mut measured = Vec::new();
        for group in groups(&list) {
            let first = group.dispatches[0].clone();
            let calls = group.dispatches.len() as u64;
            let bytes = group.dispatches.iter().map(|d| d.traffic).sum();
            let macs = group.dispatches.iter().map(|d| d.work).sum();
            let twins = match &mut meter.reader {
                Some(reader) => {
                    let (straight, shaped) = reader.twins(&group.dispatches);
                    Some(Twins {
                        read_only: time(&mut **driver, Arc::new(straight))?,
                        no_arithmetic: time(&mut **driver, Arc::new(shaped))?,
                    })
                }
                None => None,
            };
            let seconds = time(&mut **driver, Arc::new(group.list(&list)))?;
            let (operation, kernel) = (first.op, first.kernel);
            let inside = Inside::NotMeasured;
            measured.push(OperationTime {
                operation,
                kernel,
                calls,
                seconds,
                bytes,
                macs,
                twins,
                inside,
            });
        }
        if meter.reader.is_some() {
            let mut costliest: Vec<&mut OperationTime> = measured.iter_mut().collect();
            costliest.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
            for time in costliest.into_iter().take(COSTLIEST) {
                time.inside = inside(&mut **driver, &list, time, put_back)?;
            }
        }
        measured.into_iter().for_each(|time| meter.times.add(time));
        meter.times.steps += 1;
        meter.times.seconds += whole;
        Ok(())
    }
}

/// What a kernel takes inside a step.
fn inside(
    driver: &mut dyn Driver,
    list: &Arc<CommandList>,
    time: &OperationTime,
    before: impl FnMut(&mut dyn Driver) -> Result<(), DriverError>,
) -> Result<Inside, DriverError> {
    let own = |d: &Dispatch| (d.op, d.kernel) == (time.operation, time.kernel);
    if list.dispatches.iter().any(|d| own(d) && d.writes_indices()) {
        return Ok(Inside::Needed);
    }
    let less = Arc::new(list.without(own));
    saved(driver, [list, &less], before).map(Inside::Seconds)
}

/// How many seconds the second of two lists takes less than the first, which is warm: median of pairs, in one order and then in the other.
fn saved(
    driver: &mut dyn Driver,
    lists: [&Arc<CommandList>; 2],
    mut before: impl FnMut(&mut dyn Driver) -> Result<(), DriverError>,
) -> Result<f64, DriverError> {
    for _ in 0..WARM_UP {
        before(driver)?;
        run(driver, lists[1])?;
    }
    let mut pairs = Vec::new();
    for pair in 0..PAIRS {
        let (mut seconds, mut told) = ([0.0; 2], true);
        for which in if pair % 2 == 0 { [0, 1] } else { [1, 0] } {
            before(driver)?;
            (seconds[which], told) = run(driver, lists[which])?;
        }
        let saved = seconds[0] - seconds[1];
        if !told {
            return Ok(saved);
        }
        pairs.push(saved);
    }
    Ok(middle(pairs))
}

fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Seconds of one run, and whether the device told them; else they are the host's.
fn run(driver: &mut dyn Driver, list: &Arc<CommandList>) -> Result<(f64, bool), DriverError> {
    let start = Instant::now();
    let submission = driver.submit(list)?;
    let told = driver.wait(submission)?.seconds;
    Ok(match told > 0.0 {
        true => (told, true),
        false => (start.elapsed().as_secs_f64(), false),
    })
}

/// Gives dispatches the counts of those of another list of the same step: of the same kernel for the same operation of the layer, else of another
/// kernel that does it there; nothing where the other list has none, as that of a form for longer contexts.
pub(super) fn count_as(list: &mut CommandList, other: &CommandList) {
    let mut left: Vec<Option<&Dispatch>> = other.dispatches.iter().map(Some).collect();
    let mut counted = vec![false; list.dispatches.len()];
    for kernels in [true, false] {
        for (d, counted) in list.dispatches.iter_mut().zip(&mut counted).filter(|(_, c)| !**c) {
            let same = |o: &Dispatch| {
                (o.op, o.layer) == (d.op, d.layer) && (!kernels || o.kernel == d.kernel)
            };
            let found = left.iter_mut().find(|o| o.is_some_and(same)).and_then(Option::take);
            *counted = found.is_some();
            (d.traffic, d.work) = found.map_or((0, 0), |o| (o.traffic, o.work));
        }
    }
}

/// The dispatches of a list by operation and kernel, in the order in which these first occur.
fn groups(list: &CommandList) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for (dispatch, pipeline) in list.dispatches.iter().zip(&list.pipelines) {
        let same = |g: &&mut Group| {
            (g.dispatches[0].op, g.dispatches[0].kernel) == (dispatch.op, dispatch.kernel)
        };
        let group = match groups.iter_mut().position(|mut g| same(&mut g)) {
            Some(at) => &mut groups[at],
            None => {
                groups.push(Group::default());
                let last = groups.len() - 1;
                &mut groups[last]
            }
        };
        group.dispatches.push(dispatch.clone());
        group.pipelines.push(*pipeline);
    }
    groups
}

impl Group {
    /// A list of them, one after another.
    fn list(self, whole: &CommandList) -> CommandList {
        CommandList {
            stages: (0..self.dispatches.len()).collect(),
            dispatches: self.dispatches,
            pipelines: self.pipelines,
            inputs: whole.inputs.clone(),
            ..CommandList::default()
        }
    }
}

/// Median seconds of a list. A device that does not tell its times is asked once, by the host's clock.
pub(super) fn time(
    driver: &mut dyn Driver,
    list: Arc<CommandList>,
    mut before: impl FnMut(&mut dyn Driver) -> Result<(), DriverError>,
) -> Result<f64, DriverError> {
    let mut times = Vec::new();
    for _ in 0..WARM_UP + ROUNDS {
        before(driver)?;
        let (seconds, told) = run(driver, &list)?;
        if !told {
            return Ok(seconds);
        }
        times.push(seconds);
    }
    Ok(middle(times.split_off(WARM_UP)))
}

impl Moved {
    fn read(driver: &mut dyn Driver, memory: &Memory, io: &head::Io) -> Result<Self, DriverError> {
        let mut part = |operand: Operand| {
            let mut bytes = vec![0; operand.bytes as usize];
            driver.read(operand.buffer, operand.offset, &mut bytes).map(|()| bytes)
        };
        Ok(Self { headers: part(memory.tables[0].headers)?, counts: part(io.counts)? })
    }

    pub fn write(
        &self,
        driver: &mut dyn Driver,
        memory: &Memory,
        io: &head::Io,
    ) -> Result<(), DriverError> {
        let headers = memory.tables[0].headers;
        driver.write(headers.buffer, headers.offset, &self.headers)?;
        driver.write(io.counts.buffer, io.counts.offset, &self.counts)
    }
}

/// Reads the weights' slabs, on and on, so that nothing it reads was read lately.
pub(super) struct Reader {
    pipeline: Pipeline,
    slabs: Vec<(Buffer, u64)>,
    /// Slab and packet that are next.
    next: (usize, u64),
    out: Operand,
    cores: u32,
}

impl Reader {
    fn new(
        driver: &mut dyn Driver,
        shape: &Shape,
        slabs: Vec<(Buffer, u64)>,
    ) -> Result<Self, DriverError> {
        let (platform, cores) = (driver.profile().platform, driver.profile().cores);
        let text = Arc::new(Text::measuring(platform, shape));
        let pipeline = driver.pipelines(&text, &["read_bytes"])?[0];
        let bytes = 16;
        let buffer = driver.allocate("sums of a read", bytes, Placement::Device)?;
        let out = Operand { buffer, offset: 0, bytes, element: ElementType::U32 };
        Ok(Self { pipeline, slabs, next: (0, 0), out, cores })
    }

    /// The next so many bytes. Where a slab is shorter, it is read several times.
    fn part(&mut self, bytes: u64) -> Part {
        let packets = bytes.div_ceil(PACKET).max(1);
        let (mut slab, mut first) = self.next;
        if first + packets > self.slabs[slab].1 / PACKET {
            (slab, first) = ((slab + 1) % self.slabs.len(), 0);
        }
        let (buffer, bytes) = self.slabs[slab];
        let most = (bytes / PACKET).clamp(1, 1 << 31);
        let passes = packets.div_ceil(most);
        let packets = packets / passes;
        self.next = (slab, first + packets);
        let (first, packets, passes) = (first as u32, packets as u32, passes as u32);
        Part { buffer, bytes, first, packets, passes }
    }

    fn list(&self, recorder: Recorder) -> CommandList {
        let mut list = recorder.finish(false);
        list.pipelines = vec![self.pipeline; list.dispatches.len()];
        list
    }

    fn grid(&self) -> ([u32; 3], u32) {
        let (threads, groups) = READ_GRID;
        ([self.cores.max(1) * groups, 1, 1], threads)
    }

    /// As many reads of as many bytes: with a grid for reading, and each with its kernel's grid.
    fn twins(&mut self, dispatches: &[Dispatch]) -> (CommandList, CommandList) {
        let (mut straight, mut shaped) = (Recorder::default(), Recorder::default());
        for dispatch in dispatches {
            let part = self.part(dispatch.traffic);
            read(&mut straight, &part, self.grid(), self.out, false);
            let part = self.part(dispatch.traffic);
            read(&mut shaped, &part, (dispatch.groups, dispatch.threads), self.out, false);
        }
        (self.list(straight), self.list(shaped))
    }

    /// Reads each slab, up to so many bytes in all; also how many these are.
    fn sweep(&self, most: u64) -> (CommandList, u64) {
        let (mut recorder, mut left) = (Recorder::default(), most);
        for (buffer, size) in self.slabs.clone() {
            let packets = (size.min(left) / PACKET).min(1 << 31);
            if packets == 0 {
                continue;
            }
            left -= packets * PACKET;
            let packets = packets as u32;
            let part = Part { buffer, bytes: size, first: 0, packets, passes: 1 };
            read(&mut recorder, &part, self.grid(), self.out, false);
        }
        (self.list(recorder), most - left)
    }

    /// A read after which no cache holds anything else.
    pub fn flush(&self) -> Arc<CommandList> {
        Arc::new(self.sweep(FLUSH).0)
    }

    /// Bytes a second of a long read.
    fn rate(&mut self, driver: &mut dyn Driver) -> Result<f64, DriverError> {
        let (list, bytes) = self.sweep(LONG_READ);
        Ok(bytes as f64 / time(driver, Arc::new(list), |_| Ok(()))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(dispatches: &[(&'static str, u32, u64)]) -> CommandList {
        let dispatch = |(kernel, layer, count): &(&'static str, u32, u64)| Dispatch {
            kernel,
            op: "attention",
            layer: Some(*layer),
            groups: [1; 3],
            threads: 32,
            bindings: Vec::new(),
            args: Vec::new(),
            traffic: *count,
            work: 2 * count,
            cut: None,
        };
        CommandList {
            dispatches: dispatches.iter().map(dispatch).collect(),
            ..CommandList::default()
        }
    }

    #[test]
    fn counts_are_those_of_the_same_kernel_or_of_what_does_its_work() {
        let counted = |list: &CommandList| -> Vec<_> {
            list.dispatches.iter().map(|d| (d.traffic, d.work)).collect()
        };
        // The form for longer contexts has nothing to do; each layer has its own.
        let mut both =
            list(&[("split", 0, 100), ("units", 0, 50), ("split", 1, 100), ("units", 1, 50)]);
        count_as(&mut both, &list(&[("split", 0, 40), ("split", 1, 30)]));
        assert_eq!(counted(&both), [(40, 80), (0, 0), (30, 60), (0, 0)]);
        // Another kernel does it at this length.
        let mut fixed = list(&[("fixed", 0, 100), ("combine", 0, 9)]);
        count_as(&mut fixed, &list(&[("split", 0, 40), ("combine", 0, 4)]));
        assert_eq!(counted(&fixed), [(40, 80), (4, 8)]);
    }
}
