//! Runs plans and single operations one scalar at a time.

use crate::case::Seeded;
use crate::plan::{Plan, StateLayout, ValueId, WeightId, WeightSpec};
use crate::quant::WeightRef;
use crate::tensor::{ElementType, HostTensor};

/// A run of rows of a step: the next tokens of one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReferenceSegment {
    /// Slot, an index into the states.
    pub slot: usize,
    /// First row.
    pub first: usize,
    /// Rows.
    pub rows: usize,
}

/// The state of one slot in a canonical form that every device can export: f32, without pages.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct SlotState {
    /// Tokens seen.
    pub position: usize,
    /// `[recurrent layer][head][dv][dk]`.
    pub recurrent: Vec<f32>,
    /// `[recurrent layer][taps - 1][channels]`, oldest row first.
    pub conv: Vec<f32>,
    /// `[kv layer][token][kv head][head_dim]`, `position` tokens a layer.
    pub k: Vec<f32>,
    /// As `k`.
    pub v: Vec<f32>,
}

impl SlotState {
    /// The state before the first token.
    pub fn empty(layout: &StateLayout) -> Self {
        Self {
            position: 0,
            recurrent: vec![0.0; layout.recurrent_layers * layout.recurrent_len()],
            conv: vec![0.0; layout.recurrent_layers * layout.conv_len()],
            k: Vec::new(),
            v: Vec::new(),
        }
    }

    /// A random state at `position`, as a test case's start.
    pub fn random(layout: &StateLayout, position: usize, rng: &mut Seeded) -> Self {
        let mut fill = |n: usize, element: ElementType| -> Vec<f32> {
            (0..n).map(|_| element.round(rng.unit())).collect()
        };
        let kv = layout.kv_layers * position * layout.kv_heads * layout.head_dim;
        Self {
            position,
            recurrent: fill(layout.recurrent_layers * layout.recurrent_len(), ElementType::F32),
            conv: fill(layout.recurrent_layers * layout.conv_len(), layout.cache_element),
            k: fill(kv, layout.cache_element),
            v: fill(kv, layout.cache_element),
        }
    }
}

/// The inputs and results of a reference run.
pub struct Reference<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// Segments of the step.
    pub segments: &'a [ReferenceSegment],
    /// Token of each row.
    pub tokens: &'a [u32],
    /// Rows whose logits are asked for.
    pub output_rows: &'a [usize],
    /// State of each slot. `position` is that of the segment's first row; the caller advances it.
    pub slots: &'a mut [SlotState],
    weights: &'a [WeightRef<'a>],
    values: Vec<Option<HostTensor>>,
    new_kv: Vec<(usize, [Vec<f32>; 2])>,
}

impl<'a> Reference<'a> {
    /// A run over the given step; inputs of a single operation are [`set`](Self::set) before it.
    pub fn new(
        plan: &'a Plan,
        weights: &'a [WeightRef<'a>],
        segments: &'a [ReferenceSegment],
        tokens: &'a [u32],
        output_rows: &'a [usize],
        slots: &'a mut [SlotState],
    ) -> Self {
        let values = vec![None; plan.values.len()];
        Self { plan, segments, tokens, output_rows, slots, weights, values, new_kv: Vec::new() }
    }

    /// Runs the whole plan and advances the slots; returns the logits of the output rows.
    pub fn forward(mut self) -> Vec<f32> {
        let plan = self.plan;
        for node in plan.nodes() {
            node.op.reference(&mut self);
        }
        for s in self.segments {
            self.slots[s.slot].position += s.rows;
        }
        self.f32(plan.logits).to_vec()
    }

    /// Rows of the step.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Elements a row of `id`.
    pub fn width(&self, id: ValueId) -> usize {
        self.plan.value(id).width
    }

    /// Sets a value.
    pub fn set(&mut self, id: ValueId, tensor: HostTensor) {
        self.values[id.0 as usize] = Some(tensor);
    }

    /// A value written before.
    ///
    /// # Panics
    /// If it was not.
    pub fn get(&self, id: ValueId) -> &HostTensor {
        self.values[id.0 as usize].as_ref().expect("value is read before it is written")
    }

    /// The activations of a value.
    pub fn f32(&self, id: ValueId) -> &[f32] {
        self.get(id).f32()
    }

    /// Row `row` of a value.
    pub fn row(&self, id: ValueId, row: usize) -> &[f32] {
        let w = self.width(id);
        &self.f32(id)[row * w..][..w]
    }

    /// A weight and its bytes.
    pub fn weight(&self, id: WeightId) -> (&'a WeightSpec, WeightRef<'a>) {
        let plan = self.plan;
        (plan.weight(id), self.weights[id.0 as usize])
    }

    /// A weight of one row, as f32: norms, biases, decay rates.
    pub fn vector(&self, id: WeightId) -> Vec<f32> {
        let (spec, w) = self.weight(id);
        w.row(spec, 0, 0)
    }

    /// Appends the K and V rows of a segment (each `[rows][kv head][head_dim]`) to layer `layer` of its slot.
    ///
    /// The canonical cache holds layers one after another, so new rows wait until every layer has them.
    pub fn append_kv(&mut self, layer: usize, slot: usize, rows: [Vec<f32>; 2]) {
        let layers = self.plan.state.kv_layers;
        self.new_kv.push((slot, rows));
        let mine = self.new_kv.iter().filter(|(s, _)| *s == slot).count();
        assert_eq!(mine, layer + 1, "layers write K and V in order");
        if mine < layers {
            return;
        }
        let (done, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.new_kv).into_iter().partition(|(s, _)| *s == slot);
        self.new_kv = rest;
        let state = &mut self.slots[slot];
        let old = state.k.len() / layers;
        for (part, cache) in [&mut state.k, &mut state.v].into_iter().enumerate() {
            let before = std::mem::take(cache);
            for (l, (_, rows)) in done.iter().enumerate() {
                cache.extend_from_slice(&before[l * old..][..old]);
                cache.extend_from_slice(&rows[part]);
            }
        }
    }

    /// K and V of layer `layer` of a slot including rows appended in this step: `[token][kv head][head_dim]`.
    pub fn kv(&self, layer: usize, slot: usize) -> [Vec<f32>; 2] {
        let layers = self.plan.state.kv_layers;
        let state = &self.slots[slot];
        let n = state.k.len() / layers;
        let mut kv = [state.k[layer * n..][..n].to_vec(), state.v[layer * n..][..n].to_vec()];
        if let Some((_, rows)) = self.new_kv.iter().filter(|(s, _)| *s == slot).nth(layer) {
            kv[0].extend_from_slice(&rows[0]);
            kv[1].extend_from_slice(&rows[1]);
        }
        kv
    }
}
