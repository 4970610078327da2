//! What thresholds are worth: kernels alone, in steps of a model, on both sides of each.
//!
//! A step is recorded with each value of a threshold. Where two of the lists differ, the operations that differ are timed, all
//! their launches one after another, behind one run of the whole step, so that they read what they read in real steps. Lists
//! that come out the same are timed once.

use std::collections::BTreeSet;
use std::sync::Arc;

use lily_device::Limits;
use lily_ops::Plan;
use lily_ops::plan::PAGE_TOKENS;
use lily_ops::quant::WeightRef;

use super::head::Io;
use super::measure::time;
use super::record::{Head, Kind, Recorded, Recording};
use crate::driver::{Buffer, Driver, DriverError, Placement};
use crate::kernels::common::{SegmentEntry, SlotHeader, StepShape};
use crate::list::{CommandList, Dispatch};
use crate::memory::Memory;
use crate::text::{Shape, Text};
use crate::thresholds::{Point, Threshold, Thresholds};
use crate::tuning::Tuning;
use crate::upload::SlabLayout;

/// What a step may be at most while thresholds are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Rows of a prompt's step.
    pub rows: u32,
    /// Tokens of a slot.
    pub context: u32,
    /// Layers of a prompt's step that are run: their values share no memory.
    pub layers: u32,
}

/// Seconds at one point with one value; equal lists have equal seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    /// The value.
    pub value: u32,
    /// The step.
    pub point: Point,
    /// Seconds of the operations that differ.
    pub seconds: f64,
}

/// A threshold, measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Its name.
    pub name: &'static str,
    /// Its value now.
    pub current: u32,
    /// Every value at every point at which it changes anything, by point.
    pub cells: Vec<Cell>,
    /// Operations that it changes.
    pub operations: BTreeSet<&'static str>,
}

impl Measured {
    /// The values, ascending.
    pub fn values(&self) -> Vec<u32> {
        let values: BTreeSet<u32> = self.cells.iter().map(|c| c.value).collect();
        values.into_iter().collect()
    }

    /// Seconds with a value over the fewest with any, mean of the points.
    pub fn cost(&self, value: u32) -> Option<f64> {
        let ratios: Vec<f64> = self
            .cells
            .iter()
            .filter(|c| c.value == value)
            .map(|c| {
                let at = self.cells.iter().filter(|o| o.point == c.point).map(|o| o.seconds);
                c.seconds / at.fold(f64::INFINITY, f64::min)
            })
            .collect();
        (!ratios.is_empty()).then(|| ratios.iter().sum::<f64>() / ratios.len() as f64)
    }

    /// The value of least cost; of equal ones the current one, else the smallest.
    pub fn best(&self) -> Option<u32> {
        let costs: Vec<(f64, u32)> =
            self.values().into_iter().filter_map(|v| Some((self.cost(v)?, v))).collect();
        let least = costs.iter().map(|(cost, _)| *cost).min_by(f64::total_cmp)?;
        let mut best = costs.iter().filter(|(cost, _)| *cost == least).map(|(_, v)| *v);
        match self.cost(self.current) == Some(least) {
            true => Some(self.current),
            false => best.next(),
        }
    }

    /// What part of the time the best value saves.
    pub fn gain(&self) -> f64 {
        let of = |value| self.cost(value);
        match (self.best().and_then(of), of(self.current)) {
            (Some(best), Some(now)) => 1.0 - best / now,
            _ => 0.0,
        }
    }
}

/// Measures thresholds of a model on a driver.
pub struct Sweep {
    driver: Box<dyn Driver>,
    recording: Recording,
    memory: Memory,
    io: Io,
    text: Arc<Text>,
    sizes: Sizes,
}

/// Slots of a step at most.
const SLOTS: u32 = StepShape::DECODE_ROWS;

/// Pages of `slots` slots of `context` tokens.
fn pages(slots: u32, context: u32) -> usize {
    slots as usize * (context as usize).div_ceil(PAGE_TOKENS)
}

/// Dispatches of one operation, as far as a policy makes them.
type Launch<'a> = (&'static str, [u32; 3], u32, &'a [u8]);

fn launches<'a>(list: &'a CommandList, op: &str) -> Vec<Launch<'a>> {
    let of = list.dispatches.iter().filter(|d| d.op == op);
    of.map(|d| (d.kernel, d.groups, d.threads, &d.args[..])).collect()
}

/// Operations whose launches are not the same in all lists.
fn differing(lists: &[Recorded]) -> BTreeSet<&'static str> {
    let all: BTreeSet<&'static str> =
        lists.iter().flat_map(|l| &l.list.dispatches).map(|d| d.op).collect();
    let same =
        |op: &str| lists.iter().all(|l| launches(&l.list, op) == launches(&lists[0].list, op));
    all.into_iter().filter(|op| !same(op)).collect()
}

/// The token of a row, somewhere in the vocabulary.
fn token(row: usize, vocab: usize) -> u32 {
    (row.wrapping_mul(7919).wrapping_add(3) % vocab.max(1)) as u32
}

impl Sweep {
    /// Uploads a model's weights and makes room for steps of these sizes.
    pub fn new(
        mut driver: Box<dyn Driver>,
        plan: Arc<Plan>,
        weights: &[WeightRef],
        sizes: Sizes,
    ) -> Result<Self, String> {
        let error = |e: DriverError| e.to_string();
        let profile = driver.profile().clone();
        let layout = SlabLayout::new(&plan, profile.max_buffer)?;
        let weights = layout.upload(&mut *driver, &plan, weights).map_err(error)?;
        let limits = Limits {
            slots: SLOTS as usize,
            context: sizes.context as usize,
            rows: sizes.rows.max(SLOTS) as usize,
            outputs: SLOTS as usize,
            // One slot of that context, or all of an eighth.
            pages: pages(SLOTS, sizes.context.div_ceil(SLOTS)).max(pages(1, sizes.context)),
            undo: false,
        };
        let extra = Io::input_bytes(&limits);
        let memory = Memory::new(&mut *driver, &plan, &limits, 1, extra).map_err(error)?;
        let io = Io::new(&mut *driver, &plan, &limits, &memory.extra).map_err(error)?;
        let shape = Shape::of(&plan);
        let text = Arc::new(Text::new(profile.platform, &shape));
        let recording = Recording::new(plan, weights, shape, Tuning::default(), profile);
        Ok(Self { driver, recording, memory, io, text, sizes })
    }

    /// Thresholds in force.
    pub fn thresholds(&self) -> Thresholds {
        self.recording.profile().thresholds
    }

    /// The device.
    pub fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// Whether there is room for a step of that kind.
    pub fn holds(&self, point: Point) -> bool {
        let max_pages = self.memory.tables[0].max_pages as usize;
        match point {
            Point::Decode { slots, context } => {
                (1..=SLOTS).contains(&slots) && context > 0 && pages(slots, context) <= max_pages
            }
            Point::Prompt { rows, context } => {
                (1..=self.sizes.rows).contains(&rows)
                    && rows <= context
                    && pages(1, context) <= max_pages
            }
        }
    }

    /// Measures a threshold with what it knows to be worth it, as far as there is room.
    pub fn threshold(&mut self, threshold: &Threshold) -> Result<Measured, String> {
        let values = (threshold.values)(self.recording.profile());
        self.measure(threshold, values, threshold.points)
    }

    /// Measures a threshold at some points, with some values and the current one.
    pub fn measure(
        &mut self,
        threshold: &Threshold,
        values: &[u32],
        points: &[Point],
    ) -> Result<Measured, String> {
        let mut now = self.thresholds();
        let current = *(threshold.field)(&mut now);
        let mut all: BTreeSet<u32> = values.iter().copied().collect();
        let mut measured = Measured {
            name: threshold.name,
            current,
            cells: Vec::new(),
            operations: BTreeSet::new(),
        };
        if all.is_empty() {
            return Ok(measured);
        }
        all.insert(current);
        let all: Vec<u32> = all.into_iter().collect();
        for &point in points.iter().filter(|p| self.holds(**p)).collect::<Vec<_>>() {
            let changed = |value: u32| {
                let mut changed = now;
                *(threshold.field)(&mut changed) = value;
                changed
            };
            let lists: Vec<Recorded> = all
                .iter()
                .map(|v| self.record(changed(*v), point))
                .collect::<Result<_, String>>()?;
            let operations = differing(&lists);
            if operations.is_empty() {
                continue;
            }
            let times = self.time_each(&lists, &operations, point).map_err(|e| e.to_string())?;
            let cells = all.iter().zip(times);
            measured.cells.extend(cells.map(|(&value, seconds)| Cell { value, point, seconds }));
            measured.operations.extend(operations);
        }
        Ok(measured)
    }

    /// The dispatches of a step: its layers and logits, without what moves a slot on.
    fn record(&self, thresholds: Thresholds, point: Point) -> Result<Recorded, String> {
        let (segments, context) = match point {
            Point::Decode { slots, context } => (vec![1; slots as usize], context),
            Point::Prompt { rows, context } => (vec![rows], context),
        };
        let outputs = segments.len() as u32;
        let shape = StepShape { segments, outputs, context };
        let kind = Kind { shape, tables: 0, head: Head::Sample { greedy: true } };
        let recording = self.recording.with_thresholds(thresholds);
        let mut recorded = recording.record(&kind, &self.memory.tables[0], &self.io)?;
        let layers = match point {
            Point::Decode { .. } => u32::MAX,
            Point::Prompt { .. } => self.sizes.layers,
        };
        let kept = |d: &Dispatch| d.op != "sample" && d.layer.is_none_or(|l| l < layers);
        recorded.list.dispatches.retain(kept);
        recorded.list.stages = (0..recorded.list.dispatches.len()).collect();
        Ok(recorded)
    }

    /// Seconds of the operations in each list; of equal ones the same.
    fn time_each(
        &mut self,
        lists: &[Recorded],
        operations: &BTreeSet<&'static str>,
        point: Point,
    ) -> Result<Vec<f64>, DriverError> {
        self.write_step(point)?;
        let launches: Vec<Vec<Vec<Launch>>> = lists
            .iter()
            .map(|l| operations.iter().map(|op| launches(&l.list, op)).collect())
            .collect();
        let mut times: Vec<f64> = Vec::new();
        for (i, recorded) in lists.iter().enumerate() {
            let seconds = match launches[..i].iter().position(|other| *other == launches[i]) {
                Some(same) => times[same],
                None => self.time_one(recorded, operations)?,
            };
            times.push(seconds);
        }
        Ok(times)
    }

    fn time_one(
        &mut self,
        recorded: &Recorded,
        operations: &BTreeSet<&'static str>,
    ) -> Result<f64, DriverError> {
        let mut list = recorded.list.clone();
        let kernels: Vec<&'static str> = list.dispatches.iter().map(|d| d.kernel).collect();
        list.pipelines = self.driver.pipelines(&self.text, &kernels)?;
        list.inputs = vec![self.memory.inputs(0)];
        let bytes = recorded.scratch.place(&mut list.clone(), Buffer(u32::MAX >> 2), false);
        let arena = self.driver.allocate("measuring", bytes.max(16), Placement::Device)?;
        recorded.scratch.place(&mut list, arena, false);
        let ran = (|| {
            let driver = &mut *self.driver;
            let submission = driver.submit(&Arc::new(list.clone()))?;
            driver.wait(submission)?;
            time(driver, Arc::new(alone(&list, operations)), |_| Ok(()))
        })();
        self.driver.release(arena);
        ran
    }

    /// Tables and headers of a step.
    fn write_step(&mut self, point: Point) -> Result<(), DriverError> {
        let (rows, slots, context) = match point {
            Point::Decode { slots, context } => (slots, slots, context),
            Point::Prompt { rows, context } => (rows, 1, context),
        };
        let each = rows / slots;
        let Self { driver, memory, recording, .. } = self;
        let vocab = recording.plan().vocab;
        let tables = &memory.tables[0];
        let mut segments = Vec::new();
        for slot in 0..slots {
            let position = context - each;
            let header = SlotHeader { position, last_token: 0, generated: 0, parity: 0 };
            memory.write_header(&mut **driver, slot as usize, header)?;
            let own = pages(1, context) as u32;
            let list: Vec<u32> = (0..own).map(|page| slot * own + page).collect();
            memory.write_pages(&mut **driver, slot as usize, 0, &list)?;
            segments.push(SegmentEntry {
                slot,
                first: slot * each,
                rows: each,
                first_output: slot,
            });
        }
        let row_segments: Vec<u32> = (0..rows).map(|row| row / each).collect();
        let tokens: Vec<u32> = (0..rows as usize).map(|row| token(row, vocab)).collect();
        let output_rows: Vec<u32> = (1..=slots).map(|slot| slot * each - 1).collect();
        for (operand, words) in [
            (tables.segments, bytemuck::cast_slice(&segments)),
            (tables.row_segments, &row_segments[..]),
            (tables.tokens, &tokens[..]),
            (tables.output_rows, &output_rows[..]),
        ] {
            driver.write(operand.buffer, operand.offset, bytemuck::cast_slice::<u32, u8>(words))?;
        }
        Ok(())
    }
}

/// The dispatches of some operations, one after another.
fn alone(list: &CommandList, operations: &BTreeSet<&'static str>) -> CommandList {
    let of = list.dispatches.iter().zip(&list.pipelines);
    let (dispatches, pipelines): (Vec<_>, Vec<_>) =
        of.filter(|(d, _)| operations.contains(d.op)).map(|(d, p)| (d.clone(), *p)).unzip();
    CommandList {
        stages: (0..dispatches.len()).collect(),
        dispatches,
        pipelines,
        inputs: list.inputs.clone(),
        ..CommandList::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(current: u32, cells: &[(u32, u32, f64)]) -> Measured {
        let cell = |&(value, rows, seconds): &(u32, u32, f64)| Cell {
            value,
            point: Point::Prompt { rows, context: 64 },
            seconds,
        };
        Measured {
            name: "x",
            current,
            cells: cells.iter().map(cell).collect(),
            operations: BTreeSet::new(),
        }
    }

    #[test]
    fn the_best_value_is_that_of_least_cost_over_all_points() {
        // 1 is best at two rows, 8 at eight, by more.
        let m = measured(1, &[(1, 2, 1.0), (8, 2, 1.1), (1, 8, 3.0), (8, 8, 1.5)]);
        assert_eq!((m.cost(1), m.cost(8)), (Some(1.5), Some(1.05)));
        assert_eq!(m.best(), Some(8));
        assert!((m.gain() - 0.3).abs() < 1e-9);
        // A tie keeps what is.
        let m = measured(8, &[(4, 2, 1.0), (8, 2, 1.0), (16, 2, 2.0)]);
        assert_eq!((m.best(), m.gain()), (Some(8), 0.0));
        // Nothing was measured.
        let m = measured(8, &[]);
        assert_eq!((m.best(), m.gain(), m.values()), (None, 0.0, vec![]));
    }
}
