//! `config.json`: every value that changes results is read, none is assumed.

use lily_ops::LayerKind;
use serde_json::Value;

use crate::error::ModelError;
use crate::fields::{Fields, shortened};
use crate::rope::RopeConfig;

/// The numbers of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Rows of the vocabulary, padding included.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Kind of each layer.
    pub layers: Vec<LayerKind>,
    /// Query heads.
    pub attention_heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a query, key or value head.
    pub head_dim: usize,
    /// Key heads of the recurrent layers.
    pub linear_key_heads: usize,
    /// Value heads of the recurrent layers.
    pub linear_value_heads: usize,
    /// Elements of a key head of the recurrent layers.
    pub linear_key_dim: usize,
    /// Elements of a value head of the recurrent layers.
    pub linear_value_dim: usize,
    /// Taps of the causal convolution.
    pub conv_taps: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts a token selects.
    pub experts_per_token: usize,
    /// Width of an expert.
    pub expert_width: usize,
    /// Width of the shared expert.
    pub shared_expert_width: usize,
    /// Added to the mean of squares in every norm.
    pub rms_norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Rotated elements of a head.
    pub rope_dims: usize,
    /// Longest context the model was made for.
    pub max_position_embeddings: usize,
}

/// Most elements of any row between two operations.
const MAX_WIDTH: u128 = 1 << 20;
/// Most experts that a token selects.
const MAX_SELECTED: u128 = 1024;
/// Most elements of all rows that one token has in a value of its experts.
const MAX_ROUTED: u128 = 1 << 24;
/// Most elements of any weight, and of the recurrent state of a layer. With these bounds no count of bytes
/// comes near 64 bits.
const MAX_ELEMENTS: u128 = 1 << 40;
/// Most layers.
const MAX_LAYERS: usize = 1024;

impl ModelConfig {
    /// Channels of the causal convolution: q, k and v of the recurrent layers.
    pub fn conv_channels(&self) -> usize {
        2 * self.linear_key_heads * self.linear_key_dim + self.value_width()
    }

    /// Elements of all value heads of the recurrent layers.
    pub fn value_width(&self) -> usize {
        self.linear_value_heads * self.linear_value_dim
    }

    /// Layers of a kind.
    pub fn count(&self, kind: LayerKind) -> usize {
        self.layers.iter().filter(|k| **k == kind).count()
    }

    /// Reads `config.json`, whose text part may lie in `text_config` or at the top.
    pub fn read(config: &Value) -> Result<Self, ModelError> {
        let top = Fields::top(config)?;
        expect_model_type(&top, ["qwen3_5_moe", "qwen3_5_moe_text"])?;
        let text = top.inner("text_config")?.unwrap_or(top.clone());
        expect_model_type(&text, ["qwen3_5_moe_text", "qwen3_5_moe"])?;
        refuse_unsupported(&text)?;
        // The output matrix of this family is its own: tied embeddings would need another plan.
        top.only("tie_word_embeddings", &[false.into()])?;
        text.only("tie_word_embeddings", &[false.into()])?;

        let head_dim = text.dimension("head_dim")?;
        let rope = RopeConfig::read(&text, head_dim)?;
        let config = Self {
            vocab_size: text.dimension("vocab_size")?,
            hidden_size: text.dimension("hidden_size")?,
            layers: layer_kinds(&text)?,
            attention_heads: text.dimension("num_attention_heads")?,
            kv_heads: text.dimension("num_key_value_heads")?,
            head_dim,
            linear_key_heads: text.dimension("linear_num_key_heads")?,
            linear_value_heads: text.dimension("linear_num_value_heads")?,
            linear_key_dim: text.dimension("linear_key_head_dim")?,
            linear_value_dim: text.dimension("linear_value_head_dim")?,
            conv_taps: text.dimension("linear_conv_kernel_dim")?,
            experts: text.dimension("num_experts")?,
            experts_per_token: text.dimension("num_experts_per_tok")?,
            expert_width: text.dimension("moe_intermediate_size")?,
            shared_expert_width: text.dimension("shared_expert_intermediate_size")?,
            rms_norm_eps: text.number(
                "rms_norm_eps",
                |x| x as f32 > 0.0 && x < 0.1,
                "a small positive number is needed",
            )? as f32,
            rope_theta: rope.theta,
            rope_dims: rope.dims,
            max_position_embeddings: text.dimension("max_position_embeddings")?,
        };
        if !(2..=16).contains(&config.conv_taps) {
            let taps = config.conv_taps.into();
            return Err(text.bad("linear_conv_kernel_dim", &taps, "2 to 16 are supported"));
        }
        config.check_heads()?;
        config.check_sizes()?;
        Ok(config)
    }

    fn check_heads(&self) -> Result<(), ModelError> {
        let shares = [
            ("num_attention_heads", self.attention_heads, "num_key_value_heads", self.kv_heads),
            (
                "linear_num_value_heads",
                self.linear_value_heads,
                "linear_num_key_heads",
                self.linear_key_heads,
            ),
        ];
        for (many, n, few, m) in shares {
            if !n.is_multiple_of(m) {
                let problem = format!("{many} {n} is no multiple of {few} {m}");
                return Err(ModelError::Contradiction(problem));
            }
        }
        if self.experts_per_token > self.experts {
            return Err(ModelError::Contradiction(format!(
                "num_experts_per_tok {} is more than num_experts {}",
                self.experts_per_token, self.experts
            )));
        }
        Ok(())
    }

    /// Bounds every product of fields that becomes a number of elements.
    fn check_sizes(&self) -> Result<(), ModelError> {
        // Each factor is at most 2^24, so that four of them stay far inside 128 bits.
        let of = |factors: &[usize]| factors.iter().map(|&n| n as u128).product::<u128>();
        let state = of(&[self.linear_value_heads, self.linear_value_dim, self.linear_key_dim]);
        let channels = 2 * of(&[self.linear_key_heads, self.linear_key_dim])
            + of(&[self.linear_value_heads, self.linear_value_dim]);
        let experts = of(&[self.experts, self.expert_width, self.hidden_size]);
        let sizes = [
            ("hidden_size", of(&[self.hidden_size]), MAX_WIDTH),
            ("num_experts", of(&[self.experts]), MAX_WIDTH),
            ("num_experts_per_tok", of(&[self.experts_per_token]), MAX_SELECTED),
            ("moe_intermediate_size", of(&[self.expert_width]), MAX_WIDTH),
            ("shared_expert_intermediate_size", of(&[self.shared_expert_width]), MAX_WIDTH),
            (
                "num_experts_per_tok × moe_intermediate_size",
                of(&[self.experts_per_token, self.expert_width]),
                MAX_ROUTED,
            ),
            (
                "num_experts_per_tok × hidden_size",
                of(&[self.experts_per_token, self.hidden_size]),
                MAX_ROUTED,
            ),
            (
                "2 × num_attention_heads × head_dim",
                of(&[2, self.attention_heads, self.head_dim]),
                MAX_WIDTH,
            ),
            ("num_key_value_heads × head_dim", of(&[self.kv_heads, self.head_dim]), MAX_WIDTH),
            (
                "2 × linear_num_key_heads × linear_key_head_dim + linear_num_value_heads × \
                 linear_value_head_dim",
                channels,
                MAX_WIDTH,
            ),
            ("vocab_size × hidden_size", of(&[self.vocab_size, self.hidden_size]), MAX_ELEMENTS),
            ("num_experts × moe_intermediate_size × hidden_size", experts, MAX_ELEMENTS),
            (
                "linear_num_value_heads × linear_value_head_dim × linear_key_head_dim",
                state,
                MAX_ELEMENTS,
            ),
        ];
        match sizes.into_iter().find(|(_, found, most)| found > most) {
            Some((field, found, most)) => Err(ModelError::BadField {
                field: field.into(),
                found: found.to_string(),
                want: format!("at most {most} is supported"),
            }),
            None => Ok(()),
        }
    }
}

fn expect_model_type(fields: &Fields, accepted: [&str; 2]) -> Result<(), ModelError> {
    let value = fields.need("model_type")?;
    match value.as_str() {
        Some(t) if accepted.contains(&t) => Ok(()),
        _ => Err(ModelError::OtherModel {
            field: fields.name("model_type"),
            found: shortened(value),
        }),
    }
}

/// Values that select a variant this program does not compute. An absent field means the family's own
/// choice. The tensors' names and shapes confirm that for the gate, the biases and the experts of every layer.
/// They cannot confirm `norm_topk_prob`, `mamba_ssm_dtype`, `output_gate_type` and `use_sliding_window`: there
/// the goldens of configs without them do, which are mlx-lm's own figures.
fn refuse_unsupported(text: &Fields) -> Result<(), ModelError> {
    text.need("hidden_act")?;
    text.only("hidden_act", &["silu".into(), "swish".into()])?;
    text.only("attn_output_gate", &[true.into()])?;
    text.only("attention_bias", &[false.into()])?;
    text.only("norm_topk_prob", &[true.into()])?;
    text.only("decoder_sparse_step", &[1.into()])?;
    text.only("mlp_only_layers", &[Value::Array(Vec::new())])?;
    text.only("mamba_ssm_dtype", &["float32".into()])?;
    text.only("output_gate_type", &["swish".into(), "silu".into()])?;
    text.only("use_sliding_window", &[false.into()])
}

/// Layer kinds from `layer_types`, `full_attention_interval`, or both if they agree.
fn layer_kinds(text: &Fields) -> Result<Vec<LayerKind>, ModelError> {
    let n = text.dimension("num_hidden_layers")?;
    if n > MAX_LAYERS {
        return Err(text.bad("num_hidden_layers", &n.into(), "at most 1024 are supported"));
    }
    let listed = text.get("layer_types").map(|list| listed_kinds(text, list, n)).transpose()?;
    let by_interval = match text.get("full_attention_interval") {
        None => None,
        Some(_) => {
            let interval = text.dimension("full_attention_interval")?;
            let kind = |i: usize| match (i + 1).is_multiple_of(interval) {
                true => LayerKind::Attention,
                false => LayerKind::Recurrent,
            };
            Some((0..n).map(kind).collect::<Vec<_>>())
        }
    };
    match (listed, by_interval) {
        (Some(a), Some(b)) if a != b => Err(ModelError::Contradiction(format!(
            "{} and full_attention_interval name different layers",
            text.name("layer_types")
        ))),
        (Some(kinds), _) | (None, Some(kinds)) => Ok(kinds),
        (None, None) => Err(ModelError::MissingField { field: text.name("layer_types") }),
    }
}

fn listed_kinds(text: &Fields, value: &Value, n: usize) -> Result<Vec<LayerKind>, ModelError> {
    let field = "layer_types";
    let list = value.as_array().ok_or_else(|| text.bad(field, value, "a list is needed"))?;
    if list.len() != n {
        return Err(ModelError::Contradiction(format!(
            "{} has {} entries, num_hidden_layers is {n}",
            text.name(field),
            list.len()
        )));
    }
    let kind = |(i, kind): (usize, &Value)| match kind.as_str() {
        Some("linear_attention") => Ok(LayerKind::Recurrent),
        Some("full_attention") => Ok(LayerKind::Attention),
        _ => Err(text.bad(
            &format!("{field}[{i}]"),
            kind,
            "linear_attention or full_attention is needed",
        )),
    };
    list.iter().enumerate().map(kind).collect()
}
