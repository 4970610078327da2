//! Fused chains to dispatches.

use lily_ops::{Op, ops};

use crate::encode::Bound;
use crate::fuse::Group;
use crate::kernels::attention::{self, Attend};
use crate::kernels::common::Context;
use crate::kernels::gemv::{self, GemvInput, GemvOutput};
use crate::kernels::{delta, elementwise, gemm, moe};
use crate::list::Recorder;

/// An operation of a group, of the kind that [`groups`](crate::fuse::groups) put there.
macro_rules! operation {
    ($ops:expr, $index:expr, $kind:ident) => {
        match $ops[$index] {
            Op::$kind(op) => op,
            other => return Err(format!("{} in a chain of {}", other.name(), stringify!($kind))),
        }
    };
}

/// Records a chain with its fused kernels; `false` if they do not take its shape, and nothing was recorded.
pub fn group(
    r: &mut Recorder,
    c: &Context,
    b: &mut Bound,
    group: &Group,
    ops: &[&Op],
) -> Result<bool, String> {
    r.op = group.chain().unwrap_or(r.op);
    match group {
        Group::Op(_) => Ok(false),
        Group::Projections { norm, linears, gated, keeps_norm } => {
            let norm = operation!(ops, *norm, RmsNorm);
            projections(r, c, b, norm, linears, *gated, *keeps_norm, ops)
        }
        Group::ConvPrep { conv, norm, gates } => {
            let conv = operation!(ops, *conv, CausalConv);
            let norm = operation!(ops, *norm, QkL2Norm);
            let gates = operation!(ops, *gates, DeltaGates);
            conv_prep(r, c, b, conv, norm, gates)
        }
        Group::ScanNorm { scan, norm } => {
            let scan = operation!(ops, *scan, DeltaScan);
            let norm = operation!(ops, *norm, GatedRmsNorm);
            scan_norm(r, c, b, scan, norm)
        }
        Group::GatedAttention { attention, gate } => {
            let attention = operation!(ops, *attention, Attention);
            let gate = operation!(ops, *gate, AttentionGate);
            let attend = Attend {
                q: b.value(attention.q),
                heads: attention.heads as u32,
                layer: attention.layer,
                out: b.value(gate.out),
            };
            let bytes = attention::attention_scratch_bytes(c, attend.heads);
            let scratch = b.scratch.take(bytes.div_ceil(4), lily_ops::ElementType::F32);
            attention::attention_decode(r, c, &attend, scratch, Some(b.value(gate.qg)));
            Ok(true)
        }
        Group::ProjectAdd { linear, add } => {
            let linear = operation!(ops, *linear, Linear);
            let add = operation!(ops, *add, Add);
            project_add(r, c, b, linear, add)
        }
        Group::ExpertsOut { experts, shared, combine } => {
            let experts = operation!(ops, *experts, ExpertsOut);
            let shared = operation!(ops, *shared, Linear);
            let combine = operation!(ops, *combine, MoeCombine);
            experts_out(r, c, b, experts, shared, combine)
        }
    }
}

#[allow(clippy::too_many_arguments)] // the parts of the group
fn projections(
    r: &mut Recorder,
    c: &Context,
    b: &mut Bound,
    norm: &ops::RmsNorm,
    linears: &[usize],
    gated: Option<[usize; 3]>,
    keeps_norm: bool,
    ops: &[&Op],
) -> Result<bool, String> {
    use gemv::Epilogue;
    let rows = b.rows(c, norm.x);
    if rows > gemv::most_rows(c) {
        return Ok(false);
    }
    let b = &*b;
    let mut outputs = Vec::new();
    let mut output = |index: usize| -> Result<(), String> {
        let op = operation!(ops, index, Linear);
        let (weight, out) = (b.weight(op.weight), b.value(op.out));
        elementwise::supports(weight)?;
        outputs.push(GemvOutput { weight, out, epilogue: Epilogue::Store });
        Ok(())
    };
    linears.iter().try_for_each(|i| output(*i))?;
    let mut pair = None;
    if let Some([gate, up, act]) = gated {
        let (gate_op, up_op) = (operation!(ops, gate, Linear), operation!(ops, up, Linear));
        let act_op = operation!(ops, act, SwiGlu);
        let (gate_weight, up_weight) = (b.weight(gate_op.weight), b.weight(up_op.weight));
        elementwise::supports(gate_weight)?;
        match gemv::can_pair(gate_weight, up_weight) {
            true => outputs.push(GemvOutput {
                weight: gate_weight,
                out: b.value(act_op.out),
                epilogue: Epilogue::Gated(up_weight),
            }),
            false => {
                output(gate)?;
                output(up)?;
                pair = Some(act_op);
            }
        }
    }
    let (x, normed) = (b.value(norm.x), b.value(norm.out));
    let weight = b.weight(norm.weight);
    let simdgroups = outputs.iter().map(|o| gemv::simdgroups(c.profile, o.weight)).sum();
    let fused = gemv::fuses_norm(c.profile, rows, simdgroups, b.width(norm.x));
    if !fused {
        elementwise::rms_norm(r, c, x, weight, norm.eps, normed, rows);
    }
    let input = match fused {
        true => {
            let keep = keeps_norm.then_some(normed);
            GemvInput { x, norm: Some((weight, norm.eps)), keep, rows }
        }
        false => GemvInput { x: normed, norm: None, keep: None, rows },
    };
    gemv::gemv(r, c, input, &outputs);
    if let Some(act) = pair {
        elementwise::swiglu(r, c, b.value(act.gate), b.value(act.up), b.value(act.out));
    }
    Ok(true)
}

fn conv_prep(
    r: &mut Recorder,
    c: &Context,
    b: &mut Bound,
    conv: &ops::CausalConv,
    norm: &ops::QkL2Norm,
    gates: &ops::DeltaGates,
) -> Result<bool, String> {
    let prep = delta::Prep {
        qkv: b.value(conv.x),
        taps: b.weight(conv.weight),
        a: b.value(gates.a),
        b: b.value(gates.b),
        a_log: b.weight(gates.a_log),
        dt_bias: b.weight(gates.dt_bias),
        key_heads: norm.heads,
        out: b.value(norm.out),
        decay: b.value(gates.decay),
        beta: b.value(gates.beta),
    };
    delta::conv_prep(r, c, &prep, conv.layer, b.plan.state.recurrent_layers);
    Ok(true)
}

fn scan_norm(
    r: &mut Recorder,
    c: &Context,
    b: &mut Bound,
    scan: &ops::DeltaScan,
    norm: &ops::GatedRmsNorm,
) -> Result<bool, String> {
    if !delta::scan_norm_applies(c) {
        return Ok(false);
    }
    let inputs = delta::ScanInputs {
        qkv: b.value(scan.qkv),
        decay: b.value(scan.decay),
        beta: b.value(scan.beta),
        key_heads: scan.key_heads,
    };
    let layers = b.plan.state.recurrent_layers;
    let (z, weight, out) = (b.value(norm.z), b.weight(norm.weight), b.value(norm.out));
    delta::scan_norm(r, c, inputs, z, weight, norm.eps, scan.layer, layers, out);
    Ok(true)
}

fn project_add(
    r: &mut Recorder,
    c: &Context,
    b: &mut Bound,
    linear: &ops::Linear,
    add: &ops::Add,
) -> Result<bool, String> {
    let rows = b.rows(c, linear.x);
    let weight = &b.weights[linear.weight.0 as usize];
    let (x, residual, out) = (b.value(linear.x), b.value(add.a), b.value(add.out));
    if rows <= gemv::most_rows(c) {
        elementwise::supports(weight)?;
        let epilogue = gemv::Epilogue::AddTo(residual);
        let input = GemvInput { x, norm: None, keep: None, rows };
        gemv::gemv(r, c, input, &[GemvOutput { weight, out, epilogue }]);
    } else {
        gemm::supports(b.width(linear.x))?;
        let epilogue = gemm::Epilogue::AddTo(residual);
        gemm::dense(r, c, b.scratch, &gemm::Product { x, rows, weight, out, epilogue });
    }
    Ok(true)
}

fn experts_out(
    r: &mut Recorder,
    c: &Context,
    b: &mut Bound,
    experts: &ops::ExpertsOut,
    shared: &ops::Linear,
    combine: &ops::MoeCombine,
) -> Result<bool, String> {
    let (rows, k) = (b.rows(c, combine.residual), b.width(experts.ids));
    if !moe::fits_sum(b.weight(experts.down), b.weight(shared.weight), rows, k) {
        return Ok(false);
    }
    let sum = moe::ExpertsSum {
        x: b.value(experts.x),
        ids: b.value(experts.ids),
        weights: b.value(combine.weights),
        rows,
        k,
        down: b.weight(experts.down),
        shared_x: b.value(shared.x),
        shared_down: b.weight(shared.weight),
        shared_gate: b.value(combine.shared_gate),
        residual: b.value(combine.residual),
        out: b.value(combine.out),
    };
    moe::decode_experts_out(r, c, &sum);
    Ok(true)
}
