//! Plans in the terms of the kernels: shapes, views of weights, and what no kernel takes.

use lily_device::Weight;
use lily_ops::ops::Rope;
use lily_ops::{Activation, ElementType, Op, Plan, WeightFormat as Format, WeightId, WeightSpec};

use crate::kernels::attention::AttentionShape;
use crate::kernels::embed::EmbedTable;
use crate::kernels::gdn::{GdnShape, conv_weight_by_tap};
use crate::kernels::linear::{MatrixStrides, WeightFormat, WeightView};
use crate::kernels::quantize::CodeKind;

/// Shape of the plan's attention layers, and their rotary embedding if a preparation is there.
pub(super) fn attention_shape(plan: &Plan) -> Option<(AttentionShape, Option<Rope>)> {
    let s = &plan.state;
    let shape = |heads: usize, rot: usize| AttentionShape {
        heads,
        kv_heads: s.kv_heads,
        head_dim: s.head_dim,
        rot,
    };
    let mut found = None;
    for node in plan.nodes() {
        match &node.op {
            Op::AttentionPrep(op) => {
                return Some((shape(op.heads, op.rope.dims), Some(op.rope)));
            }
            Op::Attention(op) => found = Some((shape(op.heads, 0), None)),
            _ => {}
        }
    }
    found
}

/// Shape of the plan's recurrent layers; the key heads follow from the channels.
pub(super) fn delta_shape(plan: &Plan) -> GdnShape {
    let s = &plan.state;
    let qk = s.conv_channels.saturating_sub(s.heads * s.dv);
    GdnShape {
        key_heads: qk / (2 * s.dk),
        value_heads: s.heads,
        dk: s.dk,
        dv: s.dv,
        taps: s.conv_taps,
    }
}

/// Shape of q and k of a normalization, whose channels need not be those of the convolution.
pub(super) fn norm_shape(plan: &Plan, key_heads: usize, dk: usize) -> GdnShape {
    GdnShape { key_heads, dk, ..delta_shape(plan) }
}

/// The codes that an input is quantized to, if it is.
pub(super) fn code_kind(activation: Activation) -> Option<CodeKind> {
    match activation {
        Activation::I8G64 => Some(CodeKind::I8),
        Activation::I16G64 => Some(CodeKind::I16),
        Activation::F32 => None,
    }
}

/// A weight as the linear kernels take it.
pub(super) fn view<'a>(spec: &WeightSpec, weight: &'a Weight) -> WeightView<'a> {
    let bytes = weight.as_ref();
    WeightView {
        format: match spec.format {
            Format::Affine { bits: 4 } => WeightFormat::Q4,
            Format::Affine { .. } => WeightFormat::Q8,
            Format::Dense(ElementType::Bf16) => WeightFormat::Bf16,
            Format::Dense(_) => WeightFormat::F32,
        },
        codes: bytes.codes,
        scales: bytes.scales,
        biases: bytes.biases,
        rows: spec.rows,
        cols: spec.cols,
        matrices: spec.matrices,
        strides: MatrixStrides {
            codes: bytes.strides[0],
            scales: bytes.strides[1],
            biases: bytes.strides[2],
        },
    }
}

/// An embedding table as its kernel takes it.
pub(super) fn table<'a>(spec: &WeightSpec, weight: &'a Weight) -> EmbedTable<'a> {
    let w = weight.as_ref();
    match spec.format {
        Format::Affine { bits } => EmbedTable::Affine {
            bits: bits.into(),
            codes: w.codes,
            scales: w.scales,
            biases: w.biases,
        },
        Format::Dense(ElementType::Bf16) => EmbedTable::Bf16(w.codes),
        Format::Dense(_) => EmbedTable::F32(w.codes),
    }
}

fn users<'a>(plan: &'a Plan, spec: &'a WeightSpec) -> impl Iterator<Item = &'a Op> {
    let is_it = |id: &WeightId| std::ptr::eq(plan.weight(*id), spec);
    plan.nodes().map(|n| &n.op).filter(move |op| op.weights().iter().any(is_it))
}

/// Whether a weight is used element by element: norms, decay rates, the convolution's taps.
pub(super) fn is_vector(plan: &Plan, spec: &WeightSpec) -> bool {
    let matrix =
        |op: &Op| matches!(op, Op::Embed(_) | Op::Linear(_) | Op::ExpertsIn(_) | Op::ExpertsOut(_));
    users(plan, spec).any(|op| !matrix(op))
}

/// A vector's elements as f32 in the order its kernel reads; nothing for a matrix.
pub(super) fn vector(plan: &Plan, spec: &WeightSpec, weight: &Weight) -> Vec<f32> {
    if !is_vector(plan, spec) {
        return Vec::new();
    }
    let bytes = weight.as_ref();
    let all: Vec<f32> = (0..spec.rows).flat_map(|r| bytes.row(spec, 0, r)).collect();
    match users(plan, spec).any(|op| matches!(op, Op::CausalConv(_))) {
        true => conv_weight_by_tap(&all, spec.cols),
        false => all,
    }
}

/// Operations that no kernel takes, each with its types and shapes.
pub(crate) fn unsupported(plan: &Plan) -> Vec<String> {
    let mut list = Vec::new();
    if !uniform(plan) {
        list.push("layers whose heads or rotary embeddings differ".into());
    }
    for node in plan.nodes() {
        if let Err(reason) = supported(plan, &node.op) {
            let line = format!("{} ({reason})", node.op.name());
            if !list.contains(&line) {
                list.push(line);
            }
        }
    }
    list
}

/// Whether all layers of a kind have the same heads and rotary embedding: a program keeps one of each.
fn uniform(plan: &Plan) -> bool {
    fn same<T: PartialEq>(mut values: impl Iterator<Item = T>) -> bool {
        let first = values.next();
        values.all(|v| Some(v) == first)
    }
    let ops = || plan.nodes().map(|n| &n.op);
    let ropes = ops().filter_map(|op| match op {
        Op::AttentionPrep(op) => Some(op.rope),
        _ => None,
    });
    let heads = ops().filter_map(|op| match op {
        Op::AttentionPrep(op) => Some(op.heads),
        Op::Attention(op) => Some(op.heads),
        _ => None,
    });
    let key_heads = ops().filter_map(|op| match op {
        Op::DeltaScan(op) => Some(op.key_heads),
        Op::QkL2Norm(op) => Some(op.heads),
        _ => None,
    });
    same(ropes) && same(heads) && same(key_heads)
}

fn supported(plan: &Plan, op: &Op) -> Result<(), String> {
    let matrix = |id: WeightId, activation: Activation| {
        let spec = plan.weight(id);
        let grouped = matches!(spec.format, Format::Affine { .. });
        let whole = !grouped || spec.cols.is_multiple_of(lily_ops::plan::GROUP);
        let fits = code_kind(activation).is_none() || spec.format == Format::Affine { bits: 4 };
        match whole && fits {
            true => Ok(()),
            false => Err(format!("{:?} × {activation:?}, {} columns", spec.format, spec.cols)),
        }
    };
    match op {
        Op::Embed(op) => matrix(op.table, Activation::F32),
        Op::Linear(op) => matrix(op.weight, op.activation),
        Op::ExpertsIn(op) => {
            matrix(op.gate, op.activation)?;
            matrix(op.up, op.activation)
        }
        Op::ExpertsOut(op) => matrix(op.down, op.activation),
        Op::CausalConv(_) | Op::DeltaScan(_) => delta_shape(plan).supported(),
        Op::QkL2Norm(op) => norm_shape(plan, op.heads, op.dk).supported(),
        Op::GatedRmsNorm(_) if !plan.state.dv.is_multiple_of(16) => {
            Err(format!("heads of {} elements, no multiple of 16", plan.state.dv))
        }
        Op::AttentionPrep(_) | Op::Attention(_) | Op::AttentionGate(_) => {
            attention_shape(plan).map_or(Ok(()), |(shape, _)| shape.supported())
        }
        _ => Ok(()),
    }
}
