//! The tensors of a plan: names and shapes in MLX layout, and what fills them.

use lily_checkpoint::Dtype;
use lily_checkpoint::write::TensorSpec;
use lily_ops::plan::GROUP;
use lily_ops::{Plan, WeightFormat, WeightSpec};

use super::fill::{Fill, Groups, Part, Stream};
use super::skew::row_gains;
use super::write::Synth;

/// A tensor to write.
pub(super) struct Tensor {
    pub spec: TensorSpec,
    pub fill: Fill,
    pub stream: Stream,
    pub bytes: u64,
}

/// All tensors of the plan, in its order.
pub(super) fn tensors(plan: &Plan, synth: &Synth) -> Vec<Tensor> {
    plan.weights.iter().flat_map(|weight| of_weight(weight, synth)).collect()
}

fn of_weight(weight: &WeightSpec, synth: &Synth) -> Vec<Tensor> {
    let stem = match weight.role.as_str() {
        "lm_head" => "language_model.lm_head".to_owned(),
        role => format!("language_model.model.{role}"),
    };
    let tensor = |name: String, dtype: Dtype, shape: Vec<usize>, fill: Fill, key: &str| {
        let bytes = dtype.tensor_bytes(&shape).expect("a plan's weights can be counted");
        let stream = Stream::new(synth.seed, key);
        Tensor { spec: TensorSpec::new(name, dtype, shape), fill, stream, bytes }
    };
    let WeightFormat::Affine { bits } = weight.format else {
        let (name, shape, fill) = dense(&stem, weight);
        let key = name.clone();
        return vec![tensor(name, Dtype::BF16, shape, fill, &key)];
    };
    let shape = |cols: usize| match weight.matrices {
        1 => vec![weight.rows, cols],
        n => vec![n, weight.rows, cols],
    };
    let row_groups = weight.cols / GROUP;
    let gains = match stem.ends_with(".mlp.gate") {
        true => {
            let ranks = Stream::new(synth.seed, &format!("{stem} ranks"));
            let k = synth.shape.experts_per_token;
            row_gains(weight.rows, k, synth.router_skew, ranks)
        }
        false => Vec::new(),
    };
    let groups =
        |part| Fill::Groups(Groups::new(part, bits, deviation(weight), &gains, row_groups as u64));
    // Scales and biases are two views of one stream: they belong together.
    let key = format!("{stem} groups");
    let words = shape(weight.cols * bits as usize / 32);
    let (codes, scales, biases) =
        (format!("{stem}.weight"), format!("{stem}.scales"), format!("{stem}.biases"));
    vec![
        tensor(codes.clone(), Dtype::U32, words, Fill::Codes, &codes),
        tensor(scales, Dtype::BF16, shape(row_groups), groups(Part::Scales), &key),
        tensor(biases, Dtype::BF16, shape(row_groups), groups(Part::Biases), &key),
    ]
}

/// Standard deviation of a matrix's weights: what keeps its outputs near the size of its inputs, and less
/// for those that write to the residual stream.
fn deviation(weight: &WeightSpec) -> f64 {
    let module = weight.role.rsplit('.').next().unwrap_or_default();
    let gain = match module {
        // Rows, not sums over inputs.
        "embed_tokens" => return 1.0,
        "lm_head" | "shared_expert_gate" => 2.0,
        "out_proj" => 0.5,
        "o_proj" | "down_proj" => 0.7,
        _ => 1.0,
    };
    gain / (weight.cols as f64).sqrt()
}

/// Name, shape and values of a vector that is never quantized.
fn dense(stem: &str, weight: &WeightSpec) -> (String, Vec<usize>, Fill) {
    let named = format!("{stem}.weight");
    let vector = vec![weight.rows * weight.cols];
    match weight.role.rsplit('.').next().unwrap_or_default() {
        "A_log" => (stem.to_owned(), vector, Fill::LogUniform { low: 0.05, high: 4.0 }),
        "dt_bias" => (stem.to_owned(), vector, Fill::Normal { mean: -2.0, deviation: 1.5 }),
        "conv1d" => {
            let taps = vec![weight.rows, weight.cols, 1];
            (named, taps, Fill::Normal { mean: 0.0, deviation: 0.6 })
        }
        _ => (named, vector, Fill::Normal { mean: 1.0, deviation: 0.2 }),
    }
}
