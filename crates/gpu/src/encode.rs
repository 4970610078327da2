//! One operation of a plan to dispatches: the unfused form of each.

use lily_ops::{ElementType, Op, Plan, ValueId, WeightId, ops};

use crate::kernels::attention::{Attend, Prep, attention, attention_prep, attention_scratch_bytes};
use crate::kernels::common::{Context, DeviceWeight};
use crate::kernels::gemm::RowBlocks;
use crate::kernels::gemv::{self, Epilogue, GemvInput, GemvOutput};
use crate::kernels::route::Routes;
use crate::kernels::{delta, elementwise, gemm, moe, route};
use crate::list::{HostRoute, Operand, Recorder};
use crate::scratch::Scratch;

/// What the operands of a plan are bound to while a list is recorded.
#[derive(Debug)]
pub struct Bound<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// Each value, in the element type of [`elements`](crate::values::elements).
    pub values: &'a [Operand],
    /// Each weight.
    pub weights: &'a [DeviceWeight],
    /// Work space for what is no value of the plan.
    pub scratch: &'a mut Scratch,
    /// Tables of the expert ids that were sorted last: the experts' in- and out-projections share them. Tables that the
    /// host makes are put here before.
    pub routes: Option<(ValueId, Routes)>,
}

impl Bound<'_> {
    /// A value.
    pub fn value(&self, id: ValueId) -> Operand {
        self.values[id.0 as usize]
    }

    /// A weight.
    pub fn weight(&self, id: WeightId) -> &DeviceWeight {
        &self.weights[id.0 as usize]
    }

    /// Elements a row of a value.
    pub fn width(&self, id: ValueId) -> u32 {
        self.plan.value(id).width as u32
    }

    /// The tables of `ids`, for more rows than are computed one by one; records their sort if nothing did so before.
    fn routes(
        &mut self,
        r: &mut Recorder,
        c: &Context,
        ids: ValueId,
        experts: u32,
    ) -> Option<Routes> {
        let rows = self.rows(c, ids);
        if rows <= moe::most_rows(c) {
            return None;
        }
        if let Some((_, routes)) = self.routes.filter(|(id, _)| *id == ids) {
            return Some(routes);
        }
        let entries = rows * self.width(ids);
        let routes = match c.tuning.gpu_routing {
            true => route::route(r, c, self.scratch, self.value(ids), entries, experts),
            false => {
                let cut = RowBlocks::of(c.profile, c.tuning);
                let routes = Routes::take(self.scratch, entries, experts, cut);
                let (order, blocks) = (routes.order, routes.blocks);
                let ids = self.value(ids);
                r.by_host(HostRoute { ids, order, blocks, entries, experts, cut });
                routes
            }
        };
        self.routes = Some((ids, routes));
        Some(routes)
    }

    /// Rows of a value in the step.
    pub fn rows(&self, c: &Context, id: ValueId) -> u32 {
        let rows = self.plan.value(id).rows;
        rows.count(c.step.rows() as usize, c.step.outputs as usize) as u32
    }
}

/// Records an operation, each with kernels of its own.
///
/// An error names what has no kernel.
pub fn op(r: &mut Recorder, c: &Context, b: &mut Bound, op: &Op) -> Result<(), String> {
    let layers = b.plan.state.recurrent_layers;
    match op {
        Op::CausalConv(op) => {
            let (x, out) = (b.value(op.x), b.value(op.out));
            delta::causal_conv(r, c, x, b.weight(op.weight), op.layer, layers, out);
        }
        Op::QkL2Norm(op) => delta::qk_l2_norm(r, c, b.value(op.x), op.heads, b.value(op.out)),
        Op::DeltaGates(op) => {
            let [a, beta_in, decay, beta] = [op.a, op.b, op.decay, op.beta].map(|v| b.value(v));
            let (a_log, dt_bias) = (b.weight(op.a_log), b.weight(op.dt_bias));
            delta::delta_gates(r, c, a, beta_in, a_log, dt_bias, decay, beta);
        }
        Op::DeltaScan(op) => {
            let [qkv, decay, beta, out] = [op.qkv, op.decay, op.beta, op.out].map(|v| b.value(v));
            let inputs = delta::ScanInputs { qkv, decay, beta, key_heads: op.key_heads };
            delta::delta_scan(r, c, b.scratch, inputs, op.layer, layers, out);
        }
        Op::GatedRmsNorm(op) => {
            let [y, z, out] = [op.y, op.z, op.out].map(|v| b.value(v));
            delta::gated_rms_norm(r, c, y, z, b.weight(op.weight), op.eps, out);
        }
        Op::Embed(op) => {
            let table = b.weight(op.table);
            elementwise::supports(table)?;
            elementwise::embed(r, c, table, b.value(op.out));
        }
        Op::RmsNorm(op) => {
            let (x, out, rows) = (b.value(op.x), b.value(op.out), b.rows(c, op.x));
            elementwise::rms_norm(r, c, x, b.weight(op.weight), op.eps, out, rows);
        }
        Op::Linear(op) if b.rows(c, op.x) <= gemv::most_rows(c) => {
            let (weight, rows) = (b.weight(op.weight), b.rows(c, op.x));
            elementwise::supports(weight)?;
            let input = GemvInput { x: b.value(op.x), norm: None, keep: None, rows };
            let out = GemvOutput { weight, out: b.value(op.out), epilogue: Epilogue::Store };
            gemv::gemv(r, c, input, &[out]);
        }
        Op::SwiGlu(op) => {
            elementwise::swiglu(r, c, b.value(op.gate), b.value(op.up), b.value(op.out));
        }
        Op::Add(op) => elementwise::add(r, c, b.value(op.a), b.value(op.b), b.value(op.out)),
        Op::AttentionGate(op) => {
            elementwise::attention_gate(r, c, b.value(op.x), b.value(op.qg), b.value(op.out));
        }
        Op::AttentionPrep(op) => prepare(r, c, b, op),
        Op::Attention(op) => {
            let bytes = attention_scratch_bytes(c, op.heads as u32);
            let scratch = b.scratch.take(bytes / 4, ElementType::F32);
            let (q, out) = (b.value(op.q), b.value(op.out));
            let attend = Attend { q, heads: op.heads as u32, layer: op.layer, out };
            attention(r, c, &attend, scratch);
        }
        Op::GatherRows(op) => {
            elementwise::gather_rows(r, c, b.value(op.x), b.value(op.out), b.width(op.x));
        }
        Op::Linear(op) => linear(r, c, b, op)?,
        Op::Router(op) => router(r, c, b, op)?,
        Op::ExpertsIn(op) => experts_in(r, c, b, op)?,
        Op::ExpertsOut(op) => experts_out(r, c, b, op)?,
        Op::MoeCombine(op) => combine(r, c, b, op),
    }
    Ok(())
}

fn prepare(r: &mut Recorder, c: &Context, b: &Bound, op: &ops::AttentionPrep) {
    let x = Prep {
        qg: b.value(op.qg),
        k: b.value(op.k),
        v: b.value(op.v),
        q_norm: b.weight(op.q_norm),
        k_norm: b.weight(op.k_norm),
        kv_heads: b.plan.state.kv_heads as u32,
        out: b.value(op.out),
    };
    attention_prep(r, c, op, &x);
}

fn linear(r: &mut Recorder, c: &Context, b: &mut Bound, op: &ops::Linear) -> Result<(), String> {
    gemm::supports(b.width(op.x))?;
    let weight = &b.weights[op.weight.0 as usize];
    let product = gemm::Product {
        x: b.value(op.x),
        rows: b.rows(c, op.x),
        weight,
        out: b.value(op.out),
        epilogue: gemm::Epilogue::Store,
    };
    gemm::dense(r, c, b.scratch, &product);
    Ok(())
}

fn router(r: &mut Recorder, c: &Context, b: &mut Bound, op: &ops::Router) -> Result<(), String> {
    let (experts, k) = (b.width(op.logits), op.k as u32);
    route::supports(experts, k)?;
    let selection = route::Selection {
        logits: b.value(op.logits),
        rows: b.rows(c, op.logits),
        experts,
        k,
        ids: b.value(op.ids),
        weights: b.value(op.weights),
    };
    route::router(r, c, &selection);
    Ok(())
}

fn experts_in(
    r: &mut Recorder,
    c: &Context,
    b: &mut Bound,
    op: &ops::ExpertsIn,
) -> Result<(), String> {
    let (gate, up) = (&b.weights[op.gate.0 as usize], &b.weights[op.up.0 as usize]);
    gemm::supports(gate.matrix.cols)?;
    route::supports(gate.matrices, b.width(op.ids))?;
    let routes = b.routes(r, c, op.ids, gate.matrices);
    let (rows, k) = (b.rows(c, op.ids), b.width(op.ids));
    let (x, ids, out) = (b.value(op.x), b.value(op.ids), b.value(op.out));
    let experts = moe::ExpertsIn { x, ids, rows, k, gate, up, out };
    moe::experts_in(r, c, b.scratch, routes.as_ref(), &experts);
    Ok(())
}

fn experts_out(
    r: &mut Recorder,
    c: &Context,
    b: &mut Bound,
    op: &ops::ExpertsOut,
) -> Result<(), String> {
    let down = &b.weights[op.down.0 as usize];
    gemm::supports(down.matrix.cols)?;
    route::supports(down.matrices, b.width(op.ids))?;
    let routes = b.routes(r, c, op.ids, down.matrices);
    let (rows, k) = (b.rows(c, op.ids), b.width(op.ids));
    let (x, ids, out) = (b.value(op.x), b.value(op.ids), b.value(op.out));
    let experts = moe::ExpertsOut { x, ids, rows, k, down, out };
    moe::experts_out(r, c, b.scratch, routes.as_ref(), &experts);
    Ok(())
}

fn combine(r: &mut Recorder, c: &Context, b: &mut Bound, op: &ops::MoeCombine) {
    let combine = moe::Combine {
        residual: b.value(op.residual),
        routed: b.value(op.routed),
        weights: b.value(op.weights),
        shared: b.value(op.shared),
        shared_gate: b.value(op.shared_gate),
        out: b.value(op.out),
        rows: b.rows(c, op.residual),
        k: b.width(op.weights),
        width: b.width(op.residual),
    };
    moe::combine(r, c, &combine);
}
