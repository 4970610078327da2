//! Records the dispatches of a kind of step.

use std::collections::BTreeMap;
use std::sync::Arc;

use lily_device::Limits;
use lily_ops::{Op, Plan};

use super::head::Io;
use crate::chains;
use crate::driver::{Buffer, Driver, Placement};
use crate::encode::{self, Bound};
use crate::fuse::{Group, groups};
use crate::kernels::common::{Context, DeviceWeight, StepShape, Tables};
use crate::kernels::supported;
use crate::list::{CommandList, Operand, Recorder};
use crate::memory::Memory;
use crate::null::NullDriver;
use crate::profile::Profile;
use crate::scratch::Scratch;
use crate::text::Shape;
use crate::thresholds::Thresholds;
use crate::tuning::Tuning;
use crate::upload::SlabLayout;
use crate::values::elements;

/// What follows the layers of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Head {
    /// Nothing but the slots' positions; rows of logits may be computed by lists of their own.
    Finish,
    /// Logits of the output rows, and tokens chosen from them.
    Sample {
        /// Whether all of them are the largest logit's.
        greedy: bool,
    },
    /// No layers: logits of some of the output rows of the step before.
    Rows {
        /// First of them.
        first: u32,
    },
}

/// A kind of step: what a recorded list depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Kind {
    /// Sizes.
    pub shape: StepShape,
    /// Which of the step tables it reads.
    pub tables: usize,
    /// What follows the layers.
    pub head: Head,
}

/// A list whose scratch has no place yet.
#[derive(Debug)]
pub struct Recorded {
    /// The dispatches in stages.
    pub list: CommandList,
    /// Its scratch.
    pub scratch: Scratch,
}

/// Everything that recording needs: no device.
#[derive(Clone, Debug)]
pub struct Recording {
    plan: Arc<Plan>,
    weights: Vec<DeviceWeight>,
    shape: Shape,
    tuning: Tuning,
    profile: Profile,
    /// Groups of decode steps, and of prefill steps.
    groups: [Vec<Group>; 2],
    /// Index, bytes a row, bytes in all of each weight that an operation reads, and whether it is one of experts.
    weight_reads: Vec<(usize, u64, u64, bool)>,
}

impl Recording {
    /// For weights on a device.
    pub fn new(
        plan: Arc<Plan>,
        weights: Vec<DeviceWeight>,
        shape: Shape,
        tuning: Tuning,
        profile: Profile,
    ) -> Self {
        let groups = [true, false].map(|decode| groups(&plan, &tuning, decode));
        let reads = plan.nodes().flat_map(|node| node.op.weight_bytes_per_token(&plan));
        let weight_reads = reads
            .map(|(w, bytes)| {
                let spec = plan.weight(w);
                (w.0 as usize, bytes, spec.bytes(), spec.matrices > 1)
            })
            .collect();
        Self { plan, weights, shape, tuning, profile, groups, weight_reads }
    }

    /// For weights that are nowhere: to know what a device would do. Whatever a device takes comes through here first: an error says which
    /// sizes of the model no kernel is right for.
    pub fn virtual_of(plan: &Plan, tuning: &Tuning, profile: &Profile) -> Result<Self, String> {
        let shape = Shape::of(plan);
        supported(&shape, profile)?;
        let layout = SlabLayout::new(plan, profile.max_buffer)?;
        let buffers: Vec<Buffer> =
            (0..layout.slabs.len() as u32).map(|i| Buffer(1 << 30 | i)).collect();
        let weights = layout.weights(plan, &buffers);
        Ok(Self::new(Arc::new(plan.clone()), weights, shape, *tuning, profile.clone()))
    }

    /// The same with other thresholds.
    pub fn with_thresholds(&self, thresholds: Thresholds) -> Self {
        Self { profile: Profile { thresholds, ..self.profile.clone() }, ..self.clone() }
    }

    /// The device that it is recorded for.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Index, bytes a row, bytes in all of each weight that an operation reads, and whether it is one of experts.
    pub(super) fn weight_reads(&self) -> &[(usize, u64, u64, bool)] {
        &self.weight_reads
    }

    /// The buffers that weights lie in, each once, with their bytes.
    pub(super) fn slabs(&self) -> Vec<(Buffer, u64)> {
        let mut slabs: Vec<(Buffer, u64)> =
            self.weights.iter().map(|w| (w.slab.buffer, w.slab.bytes)).collect();
        slabs.sort_unstable();
        slabs.dedup();
        slabs
    }

    /// Sizes that are compiled into the kernels.
    pub(super) fn text_shape(&self) -> Shape {
        self.shape
    }

    /// The switches.
    pub fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// Bytes of the weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        SlabLayout::new(&self.plan, self.profile.max_buffer).map_or(u64::MAX, |l| l.bytes())
    }

    /// Records a kind of step on a device that is not there; also the bytes of its scratch.
    pub fn record_virtual(
        &self,
        limits: &Limits,
        kind: &Kind,
    ) -> Result<(CommandList, u64), String> {
        let mut driver = NullDriver::new(self.profile.clone());
        let (list, bytes, _) = self.record_on(&mut driver, limits, kind, false)?;
        Ok((list, bytes))
    }

    /// Records a kind of step with memory of its own on a driver, as measurements of kernels need it; also the
    /// bytes of its scratch, and the memory. `whole` fills the tables too.
    pub fn record_on(
        &self,
        driver: &mut dyn Driver,
        limits: &Limits,
        kind: &Kind,
        whole: bool,
    ) -> Result<(CommandList, u64, Memory), String> {
        let error = |e: crate::DriverError| e.to_string();
        let extra = Io::input_bytes(limits);
        let make = if whole { Memory::new } else { Memory::allocate };
        let memory = make(driver, &self.plan, limits, 1, extra).map_err(error)?;
        let io = Io::new(driver, &self.plan, limits, &memory.extra).map_err(error)?;
        let Recorded { mut list, scratch } = self.record(kind, &memory.tables[0], &io)?;
        let reuse = self.tuning.reuse_buffers;
        let bytes = scratch.place(&mut list.clone(), Buffer(u32::MAX >> 2), reuse);
        let arena = driver.allocate("scratch", bytes.max(16), Placement::Device).map_err(error)?;
        scratch.place(&mut list, arena, reuse);
        Ok((list, bytes, memory))
    }

    /// Bytes of scratch that any step within the limits needs.
    pub(super) fn arena_bytes(&self, limits: &Limits) -> Result<u64, String> {
        self.survey(limits).map(|(bytes, _)| bytes)
    }

    /// Bytes of scratch that any step within the limits needs, and the kernels of such steps with the threads of their largest
    /// threadgroups.
    pub(super) fn survey(
        &self,
        limits: &Limits,
    ) -> Result<(u64, BTreeMap<&'static str, u32>), String> {
        let context = crate::memory::context(limits).clamp(1, 1 << 31) as u32;
        let rows = (limits.rows as u32).max(1);
        let slots = (limits.slots as u32).clamp(1, rows);
        let mut shapes = vec![vec![rows]];
        // As many segments as there are slots, the first as long as that leaves.
        shapes.push(
            [rows - (slots - 1)]
                .into_iter()
                .chain(std::iter::repeat_n(1, slots as usize - 1))
                .collect(),
        );
        // Few rows of one segment take other kernels than many.
        shapes.extend(
            [2, StepShape::DECODE_ROWS, StepShape::DECODE_ROWS + 1].map(|n| vec![n.min(rows)]),
        );
        let decode = slots.min(StepShape::DECODE_ROWS);
        shapes.extend((1..=decode).map(|n| vec![1; n as usize]));
        let (mut most, mut kernels) = (0, BTreeMap::new());
        for segments in shapes {
            let outputs = (segments.len() as u32).min(limits.outputs as u32);
            for head in [Head::Sample { greedy: false }, Head::Rows { first: 0 }] {
                let outputs = match head {
                    Head::Rows { .. } => limits.outputs as u32,
                    _ => outputs,
                };
                let shape = StepShape { segments: segments.clone(), outputs, context };
                let kind = Kind { shape, tables: 0, head };
                let (list, bytes) = self.record_virtual(limits, &kind)?;
                most = most.max(bytes);
                for d in &list.dispatches {
                    let threads = kernels.entry(d.kernel).or_insert(0);
                    *threads = d.threads.max(*threads);
                }
            }
        }
        Ok((most.max(16), kernels))
    }

    /// What encoders of a step are given.
    pub(super) fn context<'a>(&'a self, step: StepShape, tables: &'a Tables) -> Context<'a> {
        let Self { profile, tuning, shape, .. } = self;
        Context { profile, tuning, shape, step, tables }
    }

    /// Records a kind of step.
    pub(super) fn record(&self, kind: &Kind, tables: &Tables, io: &Io) -> Result<Recorded, String> {
        let mut scratch = Scratch::default();
        let values = self.values(kind, io, &mut scratch);
        let mut tables = tables.clone();
        if let Head::Rows { first } = kind.head {
            tables.output_rows.offset += u64::from(first) * 4;
            tables.output_rows.bytes = u64::from(kind.shape.outputs) * 4;
        }
        let c = self.context(kind.shape.clone(), &tables);
        let mut r = Recorder::default();
        let plan = &*self.plan;
        let mut b = Bound {
            plan,
            values: &values,
            weights: &self.weights,
            scratch: &mut scratch,
            routes: None,
        };
        let body = plan.body.len();
        let list = &self.groups[usize::from(!kind.shape.is_decode())];
        let layers = matches!(kind.head, Head::Finish | Head::Sample { .. });
        let logits =
            matches!(kind.head, Head::Rows { .. } | Head::Sample { .. }) && kind.shape.outputs > 0;
        for group in list {
            let first = group.nodes()[0];
            if if first < body { layers } else { logits } {
                r.layer = plan.nodes().nth(first).and_then(|n| n.layer);
                self.group(&mut r, &c, &mut b, group, kind)?;
            }
        }
        r.layer = None;
        io.head(&mut r, &c, &mut b, kind);
        Ok(Recorded { list: r.finish(self.tuning.concurrent), scratch })
    }

    /// Operands of all values: the residual stream after the layers and the logits outlive the list.
    fn values(&self, kind: &Kind, io: &Io, scratch: &mut Scratch) -> Vec<Operand> {
        let plan = &self.plan;
        let (rows, outputs) = (kind.shape.rows() as usize, kind.shape.outputs as usize);
        let mut values: Vec<Operand> = plan
            .values
            .iter()
            .zip(elements(plan))
            .map(|(v, element)| {
                scratch.take(v.rows.count(rows, outputs) as u64 * v.width as u64, element)
            })
            .collect();
        for (id, kept) in [(plan.hidden, io.hidden), (plan.logits, io.logits)] {
            let value = &mut values[id.0 as usize];
            let bytes = value.bytes;
            *value = Operand { bytes, ..kept };
        }
        if Self::gathers_all(kind) {
            for node in &plan.head {
                if let Op::GatherRows(op) = &node.op {
                    values[op.out.0 as usize] = values[op.x.0 as usize];
                }
            }
        }
        values
    }

    /// Whether the output rows are all rows of a decode step, in order.
    fn gathers_all(kind: &Kind) -> bool {
        matches!(kind.head, Head::Sample { .. })
            && kind.shape.is_decode()
            && kind.shape.outputs == kind.shape.rows()
    }

    fn group(
        &self,
        r: &mut Recorder,
        c: &Context,
        b: &mut Bound,
        group: &Group,
        kind: &Kind,
    ) -> Result<(), String> {
        let ops: Vec<&Op> = self.plan.nodes().map(|n| &n.op).collect();
        if let Group::Op(i) = group {
            if matches!(ops[*i], Op::GatherRows(_)) && Self::gathers_all(kind) {
                return Ok(());
            }
            r.op = ops[*i].name();
            return encode::op(r, c, b, ops[*i]);
        }
        if chains::group(r, c, b, group, &ops)? {
            return Ok(());
        }
        // The fused kernels do not take this shape: one by one.
        for i in group.nodes() {
            r.op = ops[i].name();
            encode::op(r, c, b, ops[i])?;
        }
        Ok(())
    }
}
