//! One kernel call an operation.

use std::sync::atomic::AtomicU64;

use lily_device::{SlotId, Weight};
use lily_ops::ops::{Attention, AttentionPrep, CausalConv, DeltaScan, ExpertsIn, ExpertsOut};
use lily_ops::{Activation, Op, Plan, ValueId, WeightId};

use super::executor::{Executor, Run, Work};
use super::memory::in_place;
use super::shapes::{code_kind, delta_shape, norm_shape, table, view};
use super::state::{State, Stored, with_cache};
use super::values::{StepRows, Values};
use crate::kernels::attention::{
    AttentionInput, AttentionScratch, AttentionShape, KvPagesMut, PrepInput, RopeTable, attention,
    attention_prep,
};
use crate::kernels::elementwise::{self, MoeCombine};
use crate::kernels::embed::embed;
use crate::kernels::gdn::{self, GateInput, GatedNorm, ScanInput, StateSegment};
use crate::kernels::linear::{Input, Output, RowGroup, Rows, linear};
use crate::kernels::norm::rms_norm;
use crate::kernels::quantize::{CodeKind, QuantRows};
use crate::kernels::router::route;
use crate::pool::Pool;
use crate::simd::Isa;

/// What every operation may use: the machine, the plan, its weights and the operands.
#[derive(Clone, Copy)]
struct Context<'a> {
    isa: Isa,
    pool: &'a Pool,
    plan: &'a Plan,
    weights: &'a [Weight],
    vectors: &'a [Vec<f32>],
    weight_bytes: &'a [AtomicU64],
    values: &'a Values,
    rows: StepRows,
}

impl<'a> Context<'a> {
    fn read(&self, id: ValueId) -> &'a [f32] {
        // SAFETY: the plan was checked: a value is written before it is read. An operation takes no
        // reading reference to the operand that it overwrites.
        unsafe { self.values.read(self.plan, id, self.rows) }
    }

    fn ids(&self, id: ValueId) -> &'a [u32] {
        // SAFETY: as for `read`.
        unsafe { self.values.read(self.plan, id, self.rows) }
    }

    #[allow(clippy::mut_from_ref)]
    fn write(&self, id: ValueId) -> &'a mut [f32] {
        // SAFETY: each operation takes each of its results once.
        unsafe { self.values.write(self.plan, id, self.rows) }
    }

    #[allow(clippy::mut_from_ref)]
    fn write_ids(&self, id: ValueId) -> &'a mut [u32] {
        // SAFETY: as for `write`.
        unsafe { self.values.write(self.plan, id, self.rows) }
    }

    /// The result of an operation whose kernel overwrites an operand, holding that operand.
    fn overwrite(&self, op: &Op, out: ValueId) -> &'a mut [f32] {
        let operand = in_place(op).expect("the operation overwrites an operand");
        if !self.values.share_place(operand, out) {
            self.write(out).copy_from_slice(self.read(operand));
        }
        self.write(out)
    }

    fn width(&self, id: ValueId) -> usize {
        self.plan.value(id).width
    }
}

/// Runs `op` on the rows of a step.
pub(super) fn run(e: &mut Executor, run: &Run, op: &Op, rows: StepRows, output_rows: &[usize]) {
    let c = Context {
        isa: e.isa,
        pool: &e.pool,
        plan: &e.plan,
        weights: &e.weights,
        vectors: &e.vectors,
        weight_bytes: &e.weight_bytes,
        values: &e.values,
        rows,
    };
    let (isa, pool) = (c.isa, c.pool);
    match op {
        Op::Embed(op) => {
            let spec = c.plan.weight(op.table);
            let rows = table(spec, &c.weights[op.table.0 as usize]);
            embed(isa, pool, &rows, spec.cols, run.tokens(), c.write(op.out));
        }
        Op::RmsNorm(op) => {
            rms_norm(isa, pool, c.read(op.x), c.vector(op.weight), op.eps, c.write(op.out));
        }
        Op::Linear(op) => {
            let rows = Rows::Dense(c.count(op.x));
            c.multiply(&mut e.work, (op.x, op.activation), op.weight, rows, c.write(op.out));
        }
        Op::CausalConv(op) => causal_conv(&c, &mut e.state, run, op),
        Op::QkL2Norm(norm) => {
            let shape = norm_shape(c.plan, norm.heads, norm.dk);
            gdn::qk_l2_norm(isa, pool, &shape, c.overwrite(op, norm.out));
        }
        Op::DeltaGates(op) => {
            let input = GateInput {
                a: c.read(op.a),
                b: c.read(op.b),
                a_log: c.vector(op.a_log),
                dt_bias: c.vector(op.dt_bias),
            };
            gdn::gates(isa, &input, c.write(op.decay), c.write(op.beta));
        }
        Op::DeltaScan(op) => delta_scan(&c, &mut e.state, run, op),
        Op::GatedRmsNorm(norm) => {
            let weight = c.vector(norm.weight);
            let input = GatedNorm { weight, z: c.read(norm.z), eps: norm.eps };
            gdn::gated_rms_norm(isa, pool, &input, c.overwrite(op, norm.out));
        }
        Op::AttentionPrep(op) => {
            let shape = e.attention.as_ref().expect("the plan has attention").0;
            let rope = &e.rope.as_ref().expect("the plan has a rotary embedding").1;
            prepare_attention(&c, &shape, rope, &mut e.work, &mut e.state, run, op);
        }
        Op::Attention(op) => {
            let (shape, scratch) = e.attention.as_mut().expect("the plan has attention");
            attend(&c, shape, scratch, &e.state, run, op);
        }
        Op::AttentionGate(gate) => {
            let (head_dim, gates) = (c.plan.state.head_dim, c.read(gate.qg));
            elementwise::attn_gate(isa, pool, head_dim, gates, c.overwrite(op, gate.out));
        }
        Op::Router(op) => {
            let (experts, logits) = (c.width(op.logits), c.read(op.logits));
            let (ids, weights) = (c.write_ids(op.ids), c.write(op.weights));
            route(isa, pool, experts, op.k, logits, ids, weights);
        }
        Op::ExpertsIn(op) => experts_in(&c, &mut e.work, op),
        Op::ExpertsOut(op) => experts_out(&c, &mut e.work, op),
        Op::SwiGlu(glu) => {
            elementwise::swiglu(isa, pool, c.overwrite(op, glu.out), c.read(glu.up));
        }
        Op::MoeCombine(moe) => {
            let input = MoeCombine {
                top_k: c.width(moe.weights),
                routed: c.read(moe.routed),
                weights: c.read(moe.weights),
                shared: c.read(moe.shared),
                shared_gate: c.read(moe.shared_gate),
            };
            elementwise::moe_combine(isa, pool, &input, c.overwrite(op, moe.out));
        }
        Op::Add(add) => elementwise::add(isa, pool, c.overwrite(op, add.out), c.read(add.b)),
        Op::GatherRows(op) => {
            let ids: Vec<u32> = output_rows.iter().map(|&r| r as u32).collect();
            elementwise::gather_rows(pool, c.read(op.x), c.width(op.x), &ids, c.write(op.out));
        }
    }
}

impl Context<'_> {
    fn vector(&self, id: WeightId) -> &[f32] {
        &self.vectors[id.0 as usize]
    }

    fn count(&self, id: ValueId) -> usize {
        self.plan.value(id).rows.count(self.rows.tokens, self.rows.outputs)
    }

    /// Multiplies a value with a weight, quantizing the value first where the operation says so.
    fn multiply(
        &self,
        work: &mut Work,
        (x, activation): (ValueId, Activation),
        weight: WeightId,
        rows: Rows<'_>,
        y: &mut [f32],
    ) {
        let i = weight.0 as usize;
        let spec = self.plan.weight(weight);
        let input = match code_kind(activation) {
            Some(kind) => Input::Quantized(self.quantized(work, x, kind)),
            None => Input::F32 { x: self.read(x), stride: spec.cols },
        };
        let weights = view(spec, &self.weights[i]);
        let output = Output { y, stride: spec.rows, column: 0 };
        linear(self.pool, self.isa, input, &weights, rows, output, &self.weight_bytes[i]);
    }

    /// The value as codes; kept, since several operations in a row read the same value.
    fn quantized<'w>(&self, work: &'w mut Work, x: ValueId, kind: CodeKind) -> &'w QuantRows {
        let found = work.quantized.iter().position(|q| q.value == Some((x, kind)));
        let at = found.unwrap_or_else(|| {
            let at = work.next_quantized;
            work.next_quantized = (at + 1) % work.quantized.len();
            let (rows, cols) = (self.count(x), self.width(x));
            let q = &mut work.quantized[at];
            q.value = Some((x, kind));
            q.rows.quantize(self.pool, self.isa, kind, self.read(x), cols, [rows, cols]);
            at
        });
        &work.quantized[at].rows
    }
}

/// Rows of a step that a slot's state passes over at once.
#[derive(Clone, Debug)]
struct Piece {
    slot: SlotId,
    first: usize,
    rows: usize,
    /// Rows of its segment up to its end, if the state is kept there.
    kept: Option<usize>,
}

/// The rows of a step's segments in rounds: a segment whose state is kept on the way has one piece a round, the others
/// are in the first.
fn rounds(state: &State, run: &Run) -> Vec<Vec<Piece>> {
    let mut rounds: Vec<Vec<Piece>> = Vec::new();
    for s in run.segments() {
        let mut from = 0;
        for (round, to) in state.stops(s.slot, s.rows).into_iter().enumerate() {
            let kept = (to < s.rows).then_some(to);
            let piece = Piece { slot: s.slot, first: s.first + from, rows: to - from, kept };
            match rounds.get_mut(round) {
                Some(list) => list.push(piece),
                None => rounds.push(vec![piece]),
            }
            from = to;
        }
    }
    rounds
}

/// The part of each slot's state that a layer uses, for the slots of a round, in order of their rows.
fn segments<'a, T>(
    all: &'a mut [T],
    slot_len: usize,
    layer: usize,
    layer_len: usize,
    pieces: &[Piece],
) -> Vec<StateSegment<'a, T>> {
    let mut found: Vec<StateSegment<'a, T>> = all
        .chunks_mut(slot_len)
        .enumerate()
        .filter_map(|(slot, state)| {
            let s = pieces.iter().find(|s| s.slot.0 as usize == slot)?;
            let state = &mut state[layer * layer_len..][..layer_len];
            Some(StateSegment { first_row: s.first, rows: s.rows, state })
        })
        .collect();
    found.sort_by_key(|s| s.first_row);
    found
}

fn causal_conv(c: &Context, state: &mut State, run: &Run, op: &CausalConv) {
    let (_, slot_len) = state.slot_lens();
    let layer_len = state.layout.conv_len();
    let (shape, weight) = (delta_shape(c.plan), c.vector(op.weight));
    let (x, out) = (c.read(op.x), c.write(op.out));
    for pieces in rounds(state, run) {
        with_cache!(&mut state.stored, cache => {
            let mut list = segments(&mut cache.conv, slot_len, op.layer, layer_len, &pieces);
            gdn::causal_conv(c.isa, c.pool, &shape, &mut list, x, weight, out);
        });
        for piece in pieces {
            if let Some(rows) = piece.kept {
                state.keep_conv(piece.slot, rows, op.layer);
            }
        }
    }
}

fn delta_scan(c: &Context, state: &mut State, run: &Run, op: &DeltaScan) {
    let (slot_len, _) = state.slot_lens();
    let layer_len = state.layout.recurrent_len();
    let input = ScanInput { qkv: c.read(op.qkv), decay: c.read(op.decay), beta: c.read(op.beta) };
    let (shape, out) = (delta_shape(c.plan), c.write(op.out));
    for pieces in rounds(state, run) {
        let mut list = segments(&mut state.recurrent, slot_len, op.layer, layer_len, &pieces);
        gdn::scan(c.isa, c.pool, &shape, &mut list, &input, out);
        for piece in pieces {
            if let Some(rows) = piece.kept {
                state.keep_recurrent(piece.slot, rows, op.layer);
            }
        }
    }
}

fn prepare_attention(
    c: &Context,
    shape: &AttentionShape,
    rope: &RopeTable,
    work: &mut Work,
    state: &mut State,
    run: &Run,
    op: &AttentionPrep,
) {
    let list = run.attention();
    let (cos, sin) = &mut work.angles;
    if work.filled != Some(op.rope) {
        rope.fill_rows(c.rows.tokens, &list, cos, sin);
        work.filled = Some(op.rope);
    }
    let input = PrepInput {
        q_gate: c.read(op.qg),
        k: c.read(op.k),
        v: c.read(op.v),
        q_norm: c.vector(op.q_norm),
        k_norm: c.vector(op.k_norm),
        eps: op.eps,
        cos,
        sin,
    };
    with_cache!(&mut state.stored, cache => {
        let pages = KvPagesMut { k: &mut cache.k[op.layer], v: &mut cache.v[op.layer] };
        attention_prep(c.isa, c.pool, shape, &list, &input, pages, c.write(op.out));
    });
}

fn attend(
    c: &Context,
    shape: &AttentionShape,
    scratch: &mut AttentionScratch,
    state: &State,
    run: &Run,
    op: &Attention,
) {
    with_cache!(&state.stored, cache => {
        let input = AttentionInput {
            q: c.read(op.q),
            k_pages: &cache.k[op.layer],
            v_pages: &cache.v[op.layer],
        };
        let list = run.attention();
        attention(c.isa, c.pool, shape, &list, &input, scratch, c.write(op.out));
    });
}

/// Groups the routed rows by expert: row groups, and the token that each grouped row comes from.
fn group(c: &Context, work: &mut Work, ids: ValueId, experts: usize) {
    if work.grouped == Some(ids) {
        return;
    }
    work.grouped = Some(ids);
    let k = c.width(ids) as u32;
    work.groups.build(c.ids(ids), experts);
    let offsets = work.groups.offsets();
    work.row_groups.clear();
    work.row_groups.extend(
        (0..experts)
            .filter(|&e| offsets[e] < offsets[e + 1])
            .map(|e| RowGroup { matrix: e, rows: offsets[e] as usize..offsets[e + 1] as usize }),
    );
    work.routed_tokens.clear();
    work.routed_tokens.extend(work.groups.routed().iter().map(|r| r / k));
}

fn experts_in(c: &Context, work: &mut Work, op: &ExpertsIn) {
    group(c, work, op.ids, c.plan.weight(op.gate).matrices);
    let out = c.write(op.out);
    let mut up = std::mem::take(&mut work.up);
    if up.len() < out.len() {
        up.resize(out.len(), 0.0);
    }
    let groups = std::mem::take(&mut work.row_groups);
    let tokens = std::mem::take(&mut work.routed_tokens);
    let routed = std::mem::take(&mut work.groups);
    let rows = Rows::Routed { groups: &groups, x_rows: &tokens, y_rows: routed.routed() };
    c.multiply(work, (op.x, op.activation), op.gate, rows, out);
    c.multiply(work, (op.x, op.activation), op.up, rows, &mut up[..out.len()]);
    elementwise::swiglu(c.isa, c.pool, out, &up[..out.len()]);
    (work.up, work.row_groups, work.routed_tokens, work.groups) = (up, groups, tokens, routed);
}

fn experts_out(c: &Context, work: &mut Work, op: &ExpertsOut) {
    group(c, work, op.ids, c.plan.weight(op.down).matrices);
    let groups = std::mem::take(&mut work.row_groups);
    let routed = std::mem::take(&mut work.groups);
    let list = routed.routed();
    let rows = Rows::Routed { groups: &groups, x_rows: list, y_rows: list };
    c.multiply(work, (op.x, op.activation), op.down, rows, c.write(op.out));
    (work.row_groups, work.groups) = (groups, routed);
}
