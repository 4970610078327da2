//! Runs the operations of a plan, one kernel call each.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use lily_device::{
    Limits, MemoryNeed, OperationTime, OperationTimes, PrepareError, SlotId, Weight,
};
use lily_ops::ops::Rope;
use lily_ops::{Case, ElementType, HostTensor, Node, Plan, ValueId};

use super::dispatch;
use super::memory::{WorkSpace, layout, memory_need};
use super::shapes::{attention_shape, vector};
use super::slots::Slots;
use super::state::State;
use super::values::{StepRows, Values};
use crate::kernels::attention::{AttentionScratch, AttentionSegment, AttentionShape, RopeTable};
use crate::kernels::elementwise;
use crate::kernels::linear::RowGroup;
use crate::kernels::quantize::{CodeKind, QuantRows};
use crate::kernels::router::ExpertGroups;
use crate::pool::Pool;
use crate::simd::Isa;

/// A row of a segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// Which segment of the step.
    pub segment: usize,
    /// Row in the segment.
    pub row: usize,
}

/// A segment of a step as kernels need it.
#[derive(Clone, Debug)]
pub(crate) struct RunSegment {
    /// Place in the step.
    pub index: usize,
    pub slot: SlotId,
    pub first: usize,
    pub rows: usize,
    start: usize,
    pages: Vec<u32>,
}

/// A step as kernels need it.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    tokens: Vec<u32>,
    segments: Vec<RunSegment>,
    /// Why each segment failed, if it did.
    failures: Vec<Option<String>>,
}

impl Run {
    pub(super) fn new(slots: &Slots, ids: &[SlotId], tokens: &[Vec<u32>]) -> Self {
        let mut first = 0;
        let segments = ids.iter().zip(tokens).enumerate().map(|(index, (&slot, list))| {
            let live = slots.get(slot).expect("the step was checked");
            first += list.len();
            RunSegment {
                index,
                slot,
                first: first - list.len(),
                rows: list.len(),
                start: live.position,
                pages: live.pages.clone(),
            }
        });
        let segments: Vec<RunSegment> = segments.collect();
        Self { failures: vec![None; segments.len()], segments, tokens: tokens.concat() }
    }

    /// Why a segment failed.
    pub fn failure(&self, segment: usize) -> Option<&str> {
        self.failures[segment].as_deref()
    }

    /// Notes that a segment failed; the first reason stays.
    pub fn fail(&mut self, segment: usize, reason: String) {
        self.failures[segment].get_or_insert(reason);
    }

    pub fn segments(&self) -> &[RunSegment] {
        &self.segments
    }

    /// Row of the step that a row of a segment is.
    pub fn step_row(&self, at: Row) -> usize {
        self.segments[at.segment].first + at.row
    }

    pub(super) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub(super) fn attention(&self) -> Vec<AttentionSegment<'_>> {
        let segment = |s| {
            let RunSegment { first, rows, start, pages, .. }: &RunSegment = s;
            AttentionSegment { first_row: *first, rows: *rows, start: *start, pages }
        };
        self.segments.iter().map(segment).collect()
    }
}

/// Quantized rows of a value, kept while consecutive operations read it.
#[derive(Default)]
pub(super) struct Quantized {
    pub value: Option<(ValueId, CodeKind)>,
    pub rows: QuantRows,
}

/// Buffers beside the values, reused from step to step.
#[derive(Default)]
pub(super) struct Work {
    pub quantized: [Quantized; 2],
    pub next_quantized: usize,
    pub up: Vec<f32>,
    pub groups: ExpertGroups,
    /// The expert ids that `groups` is made of.
    pub grouped: Option<ValueId>,
    pub row_groups: Vec<RowGroup>,
    pub routed_tokens: Vec<u32>,
    pub angles: (Vec<f32>, Vec<f32>),
    /// The rotary embedding whose angles are filled in for this step.
    pub filled: Option<Rope>,
}

impl Work {
    /// Buffers with all the room that steps can need, so that none grows past it.
    fn new(space: &WorkSpace) -> Self {
        let mut work = Self::default();
        for q in &mut work.quantized {
            q.rows.reserve(space.codes, space.groups);
        }
        work.up.reserve_exact(space.up);
        work.groups.reserve(space.routed, space.experts);
        work.routed_tokens.reserve_exact(space.routed);
        work.row_groups.reserve_exact(space.experts);
        work.angles.0.reserve_exact(space.angles);
        work.angles.1.reserve_exact(space.angles);
        work
    }

    /// Bytes that the buffers have taken.
    fn allocated(&self) -> usize {
        let quantized: usize = self.quantized.iter().map(|q| q.rows.allocated()).sum();
        let floats = self.up.capacity() + self.angles.0.capacity() + self.angles.1.capacity();
        let routed = self.groups.allocated()
            + self.routed_tokens.capacity() * size_of::<u32>()
            + self.row_groups.capacity() * size_of::<RowGroup>();
        quantized + floats * size_of::<f32>() + routed
    }

    /// What the buffers hold belongs to the step before.
    fn begin(&mut self) {
        for q in &mut self.quantized {
            q.value = None;
        }
        self.filled = None;
        self.grouped = None;
    }
}

/// A prepared plan with its memory.
pub(crate) struct Executor {
    pub(super) pool: Arc<Pool>,
    pub(super) isa: Isa,
    pub(super) plan: Arc<Plan>,
    pub(super) weights: Vec<Weight>,
    /// Vectors as f32, empty for matrices; the convolution's taps are reordered to `[taps][channels]`.
    pub(super) vectors: Vec<Vec<f32>>,
    pub(super) values: Values,
    pub(super) state: State,
    pub(super) work: Work,
    pub(super) attention: Option<(AttentionShape, AttentionScratch)>,
    pub(super) rope: Option<(Rope, RopeTable)>,
    pub(super) weight_bytes: Vec<AtomicU64>,
    /// Seconds by operation, while they are measured.
    pub(super) times: Option<Box<OperationTimes>>,
    limits: Limits,
    need: MemoryNeed,
}

impl Executor {
    pub fn new(
        pool: Arc<Pool>,
        isa: Isa,
        plan: Arc<Plan>,
        weights: Vec<Weight>,
        limits: Limits,
    ) -> Result<Self, PrepareError> {
        let threads = pool.threads();
        let attention = attention_shape(&plan)
            .map(|(shape, rope)| (shape, rope, AttentionScratch::new(&shape, threads)));
        let rope = attention
            .as_ref()
            .and_then(|(_, rope, _)| *rope)
            .map(|r| (r, RopeTable::new(r.theta, r.dims)));
        Ok(Self {
            isa,
            vectors: plan.weights.iter().zip(&weights).map(|(s, w)| vector(&plan, s, w)).collect(),
            values: Values::new(layout(&plan, &limits))?,
            state: State::new(plan.state, &limits)?,
            work: Work::new(&WorkSpace::new(&plan, &limits)),
            attention: attention.map(|(shape, _, scratch)| (shape, scratch)),
            rope,
            weight_bytes: weights.iter().map(|_| AtomicU64::new(0)).collect(),
            times: None,
            need: memory_need(&plan, &limits, threads),
            pool,
            plan,
            weights,
            limits,
        })
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    pub fn isa(&self) -> Isa {
        self.isa
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    pub fn memory(&self) -> MemoryNeed {
        self.need
    }

    pub fn state(&self) -> &State {
        &self.state
    }

    pub fn state_mut(&mut self) -> &mut State {
        &mut self.state
    }

    pub fn weight_bytes(&self) -> Vec<u64> {
        self.weight_bytes.iter().map(|b| b.load(Ordering::Relaxed)).collect()
    }

    /// Bytes that the arena and the work space have taken so far: what is allocated, not what is planned.
    /// The panels that each thread keeps are not counted; the kernels check their bound themselves.
    pub fn scratch_high_water(&self) -> u64 {
        let attention = self.attention.as_ref().map_or(0, |(_, scratch)| scratch.allocated());
        self.values.bytes() + (self.work.allocated() + attention) as u64
    }

    /// Runs the operations on all tokens of a step. A segment one of whose rows is not finite after a layer
    /// is marked as failed, with the layer's name.
    pub fn body(&mut self, run: &mut Run) {
        let rows = StepRows { tokens: run.tokens.len(), outputs: 0 };
        self.work.begin();
        let plan = Arc::clone(&self.plan);
        for node in &plan.body {
            self.operation(run, node, rows, &[]);
            if node.ends_layer {
                self.timed("finite check", |e| e.note_not_finite(run, node, rows));
            }
        }
    }

    fn operation(&mut self, run: &Run, node: &Node, rows: StepRows, output_rows: &[usize]) {
        if self.times.is_none() {
            return dispatch::run(self, run, &node.op, rows, output_rows);
        }
        let weights = node.op.weights();
        let read = |e: &Self| -> u64 {
            weights.iter().map(|w| e.weight_bytes[w.0 as usize].load(Ordering::Relaxed)).sum()
        };
        let before = read(self);
        self.timed(node.op.name(), |e| dispatch::run(e, run, &node.op, rows, output_rows));
        let bytes = read(self) - before;
        if let Some(times) = &mut self.times {
            let name = node.op.name();
            times.add(OperationTime { operation: name, kernel: name, bytes, ..Default::default() });
        }
    }

    /// Runs a part of a step; its time is noted while times are measured.
    pub fn timed<T>(&mut self, name: &'static str, part: impl FnOnce(&mut Self) -> T) -> T {
        if self.times.is_none() {
            return part(self);
        }
        let start = Instant::now();
        let result = part(self);
        let seconds = start.elapsed().as_secs_f64();
        if let Some(times) = &mut self.times {
            let calls = 1;
            times.add(OperationTime {
                operation: name,
                kernel: name,
                calls,
                seconds,
                ..Default::default()
            });
        }
        result
    }

    fn note_not_finite(&self, run: &mut Run, node: &Node, rows: StepRows) {
        for id in node.op.writes() {
            // SAFETY: the operation that wrote the value has returned.
            let x = unsafe { self.values.read::<f32>(&self.plan, id, rows) };
            if elementwise::all_finite(self.isa, x) {
                continue;
            }
            let place = node.layer.map_or("outside the layers".into(), |l| format!("layer {l}"));
            let width = self.plan.value(id).width;
            for i in 0..run.segments.len() {
                let RunSegment { first, rows, .. } = run.segments[i];
                if !elementwise::all_finite(self.isa, &x[first * width..][..rows * width]) {
                    run.fail(i, not_finite(&place, node.op.name()));
                }
            }
        }
    }

    /// Runs the head for some rows of the step that [`body`](Self::body) ran; returns their logits.
    pub fn head(&mut self, run: &Run, output_rows: &[usize]) -> &mut [f32] {
        let rows = StepRows { tokens: run.tokens.len(), outputs: output_rows.len() };
        self.work.begin();
        let plan = Arc::clone(&self.plan);
        for node in &plan.head {
            self.operation(run, node, rows, output_rows);
        }
        // SAFETY: the head has run, and the borrow of `self` keeps everything else away.
        unsafe { self.values.write::<f32>(&self.plan, plan.logits, rows) }
    }

    /// Runs the one operation of a case and returns what it wrote.
    pub fn single(&mut self, run: &Run, case: &Case) -> Vec<(ValueId, HostTensor)> {
        let rows = StepRows { tokens: run.tokens.len(), outputs: case.output_rows.len() };
        let plan = Arc::clone(&self.plan);
        for (id, tensor) in &case.inputs {
            // SAFETY: nothing else refers to the values between steps.
            unsafe {
                match tensor {
                    HostTensor::F32(x) => self.values.write(&plan, *id, rows).copy_from_slice(x),
                    HostTensor::U32(x) => self.values.write(&plan, *id, rows).copy_from_slice(x),
                }
            }
        }
        dispatch::run(self, run, case.op(), rows, &case.output_rows);
        let read = |id: ValueId| {
            // SAFETY: the operation has written the value and returned.
            unsafe {
                match plan.value(id).element {
                    ElementType::U32 => HostTensor::U32(self.values.read(&plan, id, rows).to_vec()),
                    _ => HostTensor::F32(self.values.read(&plan, id, rows).to_vec()),
                }
            }
        };
        case.op().writes().into_iter().map(|id| (id, read(id))).collect()
    }
}

/// Why a value that is not finite ends a segment.
pub(super) fn not_finite(place: &str, operation: &str) -> String {
    format!(
        "{place}: {operation} gave a value that is not finite; `lily inspect --verify` checks the weights"
    )
}
