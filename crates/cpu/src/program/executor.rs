//! Runs the operations of a plan, one kernel call each.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lily_device::{Limits, MemoryNeed, SlotId, Weight};
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
        Self { segments: segments.collect(), tokens: tokens.concat() }
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
    pub row_groups: Vec<RowGroup>,
    pub routed_tokens: Vec<u32>,
    pub angles: (Vec<f32>, Vec<f32>),
    /// The rotary embedding whose angles are filled in for this step.
    pub filled: Option<Rope>,
}

impl Work {
    /// What the buffers hold belongs to the step before.
    fn begin(&mut self) {
        for q in &mut self.quantized {
            q.value = None;
        }
        self.filled = None;
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
    limits: Limits,
    need: MemoryNeed,
    most_rows: StepRows,
}

impl Executor {
    pub fn new(
        pool: Arc<Pool>,
        isa: Isa,
        plan: Arc<Plan>,
        weights: Vec<Weight>,
        limits: Limits,
    ) -> Self {
        let threads = pool.threads();
        let attention = attention_shape(&plan)
            .map(|(shape, rope)| (shape, rope, AttentionScratch::new(&shape, threads)));
        let rope = attention
            .as_ref()
            .and_then(|(_, rope, _)| *rope)
            .map(|r| (r, RopeTable::new(r.theta, r.dims)));
        Self {
            isa,
            vectors: plan.weights.iter().zip(&weights).map(|(s, w)| vector(&plan, s, w)).collect(),
            values: Values::new(layout(&plan, &limits)),
            state: State::new(plan.state, &limits),
            work: Work::default(),
            attention: attention.map(|(shape, _, scratch)| (shape, scratch)),
            rope,
            weight_bytes: weights.iter().map(|_| AtomicU64::new(0)).collect(),
            need: memory_need(&plan, &limits, threads),
            most_rows: StepRows::default(),
            pool,
            plan,
            weights,
            limits,
        }
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

    /// Bytes of the arena and of the work space that steps have made use of so far.
    pub fn scratch_high_water(&self) -> u64 {
        let used =
            Limits { rows: self.most_rows.tokens, outputs: self.most_rows.outputs, ..self.limits };
        self.values.bytes() + WorkSpace::new(&self.plan, &used).bytes()
    }

    fn note_rows(&mut self, rows: StepRows) {
        self.most_rows.tokens = self.most_rows.tokens.max(rows.tokens);
        self.most_rows.outputs = self.most_rows.outputs.max(rows.outputs);
    }

    /// Runs the operations on all tokens of a step. The error names the layer whose result is not finite.
    pub fn body(&mut self, run: &Run) -> Result<(), String> {
        let rows = StepRows { tokens: run.tokens.len(), outputs: 0 };
        self.note_rows(rows);
        self.work.begin();
        let plan = Arc::clone(&self.plan);
        for node in &plan.body {
            dispatch::run(self, run, &node.op, rows, &[]);
            if node.ends_layer {
                self.expect_finite(node, rows)?;
            }
        }
        Ok(())
    }

    fn expect_finite(&self, node: &Node, rows: StepRows) -> Result<(), String> {
        for id in node.op.writes() {
            // SAFETY: the operation that wrote the value has returned.
            let x = unsafe { self.values.read::<f32>(&self.plan, id, rows) };
            if !elementwise::all_finite(self.isa, x) {
                let layer =
                    node.layer.map_or("outside the layers".into(), |l| format!("layer {l}"));
                return Err(format!(
                    "{layer}: {} gave a value that is not finite; `lily inspect --verify` checks the weights",
                    node.op.name()
                ));
            }
        }
        Ok(())
    }

    /// Runs the head for some rows of the step that [`body`](Self::body) ran; returns their logits.
    pub fn head(&mut self, run: &Run, output_rows: &[usize]) -> Result<&mut [f32], String> {
        let rows = StepRows { tokens: run.tokens.len(), outputs: output_rows.len() };
        self.note_rows(rows);
        self.work.begin();
        let plan = Arc::clone(&self.plan);
        for node in &plan.head {
            dispatch::run(self, run, &node.op, rows, output_rows);
        }
        // SAFETY: the head has run, and the borrow of `self` keeps everything else away.
        let logits = unsafe { self.values.write::<f32>(&self.plan, plan.logits, rows) };
        match elementwise::all_finite(self.isa, logits) {
            true => Ok(logits),
            false => Err(
                "output head: a logit is not finite; `lily inspect --verify` checks the weights"
                    .into(),
            ),
        }
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
