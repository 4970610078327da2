//! `config.json`: every value that changes results is read, none is assumed.

use lily_ops::LayerKind;
use serde_json::{Map, Value};

use crate::error::ModelError;

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

/// Largest value of any dimension: keeps every product of two of them inside 64 bits by far.
const MAX_DIMENSION: u64 = 1 << 24;

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
        let top = Fields { object: object(config, "config.json")?, path: "" };
        top.expect_model_type("qwen3_5_moe", "qwen3_5_moe_text")?;
        let text = match top.object.get("text_config") {
            Some(t) => Fields { object: object(t, "text_config")?, path: "text_config." },
            None => top,
        };
        text.expect_model_type("qwen3_5_moe_text", "qwen3_5_moe")?;
        text.refuse_unsupported()?;
        top.refuse_tied(&text)?;

        let layers = text.layer_kinds()?;
        let head_dim = text.dimension("head_dim")?;
        let config = Self {
            vocab_size: text.dimension("vocab_size")?,
            hidden_size: text.dimension("hidden_size")?,
            layers,
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
                |x| x > 0.0 && x < 0.1,
                "a small positive number is needed",
            )? as f32,
            rope_theta: text.rope_theta()?,
            rope_dims: text.rope_dims(head_dim)?,
            max_position_embeddings: text.dimension("max_position_embeddings")?,
        };
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), ModelError> {
        let rules = [
            (
                self.attention_heads.is_multiple_of(self.kv_heads),
                format!(
                    "{} attention heads cannot share {} KV heads evenly",
                    self.attention_heads, self.kv_heads
                ),
            ),
            (
                self.linear_value_heads.is_multiple_of(self.linear_key_heads),
                format!(
                    "{} linear value heads cannot share {} key heads evenly",
                    self.linear_value_heads, self.linear_key_heads
                ),
            ),
            (
                self.experts_per_token <= self.experts,
                format!("{} of {} experts a token", self.experts_per_token, self.experts),
            ),
            (
                (2..=16).contains(&self.conv_taps),
                format!("a convolution of {} taps", self.conv_taps),
            ),
        ];
        match rules.into_iter().find(|(holds, _)| !holds) {
            Some((_, problem)) => Err(ModelError::Contradiction(problem)),
            None => Ok(()),
        }
    }
}

pub(crate) fn object<'a>(
    value: &'a Value,
    field: &str,
) -> Result<&'a Map<String, Value>, ModelError> {
    value.as_object().ok_or_else(|| bad(field, value, "an object is needed"))
}

pub(crate) fn bad(field: &str, found: &Value, want: &str) -> ModelError {
    let mut text = found.to_string();
    if text.chars().count() > 60 {
        text = text.chars().take(60).chain("…".chars()).collect();
    }
    ModelError::BadField { field: field.into(), found: text, want: want.into() }
}

/// One object of the config, with its path for messages.
#[derive(Clone, Copy)]
struct Fields<'a> {
    object: &'a Map<String, Value>,
    path: &'static str,
}

impl<'a> Fields<'a> {
    fn name(&self, field: &str) -> String {
        format!("{}{field}", self.path)
    }

    /// The field unless it is absent or null.
    fn get(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|v| !v.is_null())
    }

    fn need(&self, field: &str) -> Result<&'a Value, ModelError> {
        self.get(field).ok_or_else(|| ModelError::MissingField { field: self.name(field) })
    }

    fn dimension(&self, field: &str) -> Result<usize, ModelError> {
        let value = self.need(field)?;
        match value.as_u64() {
            Some(n) if (1..=MAX_DIMENSION).contains(&n) => Ok(n as usize),
            _ => Err(bad(&self.name(field), value, "a whole number from 1 to 16777216 is needed")),
        }
    }

    fn number(
        &self,
        field: &str,
        accept: impl Fn(f64) -> bool,
        want: &str,
    ) -> Result<f64, ModelError> {
        let value = self.need(field)?;
        value
            .as_f64()
            .filter(|x| x.is_finite() && accept(*x))
            .ok_or_else(|| bad(&self.name(field), value, want))
    }

    fn expect_model_type(&self, a: &str, b: &str) -> Result<(), ModelError> {
        let value = self.need("model_type")?;
        match value.as_str() {
            Some(t) if t == a || t == b => Ok(()),
            _ => Err(ModelError::OtherModel { found: value.to_string() }),
        }
    }

    /// Values that select a variant this program does not compute. An absent field means the family's own
    /// choice, which the tensors' shapes confirm.
    fn refuse_unsupported(&self) -> Result<(), ModelError> {
        let only = |field: &str, accepted: &[Value]| match self.get(field) {
            Some(v) if !accepted.contains(v) => {
                Err(bad(&self.name(field), v, &format!("only {} is supported", accepted[0])))
            }
            _ => Ok(()),
        };
        self.need("hidden_act")?;
        only("hidden_act", &["silu".into(), "swish".into()])?;
        only("attn_output_gate", &[true.into()])?;
        only("attention_bias", &[false.into()])?;
        only("norm_topk_prob", &[true.into()])?;
        only("decoder_sparse_step", &[1.into()])?;
        only("mlp_only_layers", &[Value::Array(Vec::new())])?;
        only("mamba_ssm_dtype", &["float32".into()])?;
        only("output_gate_type", &["swish".into(), "silu".into()])?;
        only("use_sliding_window", &[false.into()])
    }

    /// The output matrix of this family is its own: tied embeddings would need another plan.
    fn refuse_tied(&self, text: &Self) -> Result<(), ModelError> {
        for fields in [self, text] {
            if let Some(v) = fields.get("tie_word_embeddings")
                && v != &Value::Bool(false)
            {
                return Err(bad(&fields.name("tie_word_embeddings"), v, "only false is supported"));
            }
        }
        Ok(())
    }

    /// Layer kinds from `layer_types`, `full_attention_interval`, or both if they agree.
    fn layer_kinds(&self) -> Result<Vec<LayerKind>, ModelError> {
        let n = self.dimension("num_hidden_layers")?;
        if n > 1024 {
            return Err(bad(
                &self.name("num_hidden_layers"),
                &n.into(),
                "at most 1024 are supported",
            ));
        }
        let listed = match self.get("layer_types") {
            None => None,
            Some(value) => Some(self.listed_kinds(value, n)?),
        };
        let by_interval = match self.get("full_attention_interval") {
            None => None,
            Some(_) => {
                let interval = self.dimension("full_attention_interval")?;
                let kind = |i: usize| match (i + 1).is_multiple_of(interval) {
                    true => LayerKind::Attention,
                    false => LayerKind::Recurrent,
                };
                Some((0..n).map(kind).collect::<Vec<_>>())
            }
        };
        match (listed, by_interval) {
            (Some(a), Some(b)) if a != b => Err(ModelError::Contradiction(format!(
                "{}layer_types and full_attention_interval name different layers",
                self.path
            ))),
            (Some(kinds), _) | (None, Some(kinds)) => Ok(kinds),
            (None, None) => Err(ModelError::MissingField { field: self.name("layer_types") }),
        }
    }

    fn listed_kinds(&self, value: &Value, n: usize) -> Result<Vec<LayerKind>, ModelError> {
        let field = self.name("layer_types");
        let list = value.as_array().ok_or_else(|| bad(&field, value, "a list is needed"))?;
        if list.len() != n {
            return Err(ModelError::Contradiction(format!(
                "{field} has {} entries for {n} layers",
                list.len()
            )));
        }
        list.iter()
            .map(|kind| match kind.as_str() {
                Some("linear_attention") => Ok(LayerKind::Recurrent),
                Some("full_attention") => Ok(LayerKind::Attention),
                _ => Err(bad(&field, kind, "linear_attention or full_attention is needed")),
            })
            .collect()
    }

    /// A rotary field from `rope_parameters`, from the top of the text part, or both if they agree.
    fn rope_number(&self, field: &str) -> Result<f64, ModelError> {
        let mut found: Option<f64> = None;
        for fields in [self.rope()?, Some(*self)].into_iter().flatten() {
            if fields.get(field).is_none() {
                continue;
            }
            let x = fields.number(field, |x| x > 0.0, "a positive number is needed")?;
            if found.is_some_and(|before| before != x) {
                return Err(ModelError::Contradiction(format!(
                    "{field} has two values, {} and {x}",
                    found.unwrap_or_default()
                )));
            }
            found = Some(x);
        }
        found.ok_or_else(|| ModelError::MissingField {
            field: self.name(&format!("rope_parameters.{field}")),
        })
    }

    fn rope(&self) -> Result<Option<Fields<'a>>, ModelError> {
        let Some(value) = self.get("rope_parameters").or(self.get("rope_scaling")) else {
            return Ok(None);
        };
        let rope = Fields {
            object: object(value, "rope_parameters")?,
            path: "text_config.rope_parameters.",
        };
        for field in ["rope_type", "type"] {
            if let Some(kind) = rope.get(field)
                && !["default", "mrope"].map(Value::from).contains(kind)
            {
                return Err(bad(
                    &rope.name(field),
                    kind,
                    "only the default rotary embedding is supported",
                ));
            }
        }
        Ok(Some(rope))
    }

    fn rope_theta(&self) -> Result<f64, ModelError> {
        self.rope_number("rope_theta")
    }

    fn rope_dims(&self, head_dim: usize) -> Result<usize, ModelError> {
        let factor = self.rope_number("partial_rotary_factor")?;
        let dims = head_dim as f64 * factor;
        if factor > 1.0 || dims.fract() != 0.0 || !(dims as usize).is_multiple_of(2) || dims < 2.0 {
            return Err(ModelError::Contradiction(format!(
                "{factor} of {head_dim} elements cannot be rotated in pairs"
            )));
        }
        // For text the three positions of mRoPE are equal, so its sections only have to cover the pairs.
        if let Some(section) = self.rope()?.and_then(|r| r.get("mrope_section")) {
            let sum: Option<u64> =
                section.as_array().and_then(|list| list.iter().map(Value::as_u64).sum());
            if sum != Some(dims as u64 / 2) {
                return Err(ModelError::Contradiction(format!(
                    "mrope_section {section} does not cover {} rotary pairs",
                    dims / 2.0
                )));
            }
        }
        Ok(dims as usize)
    }
}
