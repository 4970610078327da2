use serde_json::{Map, Value, json};

/// The dimensions of a model of the family, as its config names them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows of the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Layers.
    pub layers: usize,
    /// Every so many layers one has attention, the others are recurrent.
    pub full_attention_interval: usize,
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
    /// Rotary pairs by axis; their sum is a quarter of half a head.
    pub mrope_section: [usize; 3],
    /// Longest context.
    pub max_position_embeddings: usize,
    /// Tokens that end an answer; the last one also ends a document.
    pub stop_ids: Vec<u32>,
}

impl Shape {
    /// Qwen3.6-35B-A3B with the given number of layers; the real one has [40](Self::REAL_LAYERS).
    pub fn qwen3_6_35b_a3b(layers: usize) -> Self {
        Self {
            vocab_size: 248_320,
            hidden_size: 2048,
            layers,
            full_attention_interval: 4,
            attention_heads: 16,
            kv_heads: 2,
            head_dim: 256,
            linear_key_heads: 16,
            linear_value_heads: 32,
            linear_key_dim: 128,
            linear_value_dim: 128,
            conv_taps: 4,
            experts: 256,
            experts_per_token: 8,
            expert_width: 512,
            shared_expert_width: 512,
            mrope_section: [11, 11, 10],
            max_position_embeddings: 262_144,
            stop_ids: vec![248_046, 248_044],
        }
    }

    /// Layers of the real Qwen3.6-35B-A3B.
    pub const REAL_LAYERS: usize = 40;

    /// A shape of well under a megabyte, for tests.
    pub fn tiny() -> Self {
        Self {
            vocab_size: 512,
            hidden_size: 128,
            layers: 4,
            attention_heads: 4,
            kv_heads: 1,
            head_dim: 64,
            linear_key_heads: 2,
            linear_value_heads: 4,
            linear_key_dim: 32,
            linear_value_dim: 32,
            experts: 16,
            experts_per_token: 2,
            expert_width: 64,
            shared_expert_width: 64,
            mrope_section: [3, 3, 2],
            max_position_embeddings: 4096,
            stop_ids: vec![511, 510],
            ..Self::qwen3_6_35b_a3b(4)
        }
    }

    /// `config.json` as `mlx_lm.convert` writes it: 4 bits everywhere, 8 for routers and shared-expert gates.
    pub fn config(&self) -> Value {
        let kind = |i: usize| match (i + 1).is_multiple_of(self.full_attention_interval) {
            true => "full_attention",
            false => "linear_attention",
        };
        let layer_types: Vec<&str> = (0..self.layers).map(kind).collect();
        let document_end = self.stop_ids.last();
        let quantization = self.quantization();
        json!({
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "eos_token_id": self.stop_ids,
            "model_type": "qwen3_5_moe",
            "quantization": quantization,
            "quantization_config": quantization,
            "text_config": {
                "attention_bias": false,
                "attention_dropout": 0.0,
                "attn_output_gate": true,
                "bos_token_id": document_end,
                "dtype": "bfloat16",
                "eos_token_id": document_end,
                "full_attention_interval": self.full_attention_interval,
                "head_dim": self.head_dim,
                "hidden_act": "silu",
                "hidden_size": self.hidden_size,
                "layer_types": layer_types,
                "linear_conv_kernel_dim": self.conv_taps,
                "linear_key_head_dim": self.linear_key_dim,
                "linear_num_key_heads": self.linear_key_heads,
                "linear_num_value_heads": self.linear_value_heads,
                "linear_value_head_dim": self.linear_value_dim,
                "mamba_ssm_dtype": "float32",
                "max_position_embeddings": self.max_position_embeddings,
                "mlp_only_layers": [],
                "model_type": "qwen3_5_moe_text",
                "moe_intermediate_size": self.expert_width,
                "mtp_num_hidden_layers": 1,
                "mtp_use_dedicated_embeddings": false,
                "num_attention_heads": self.attention_heads,
                "num_experts": self.experts,
                "num_experts_per_tok": self.experts_per_token,
                "num_hidden_layers": self.layers,
                "num_key_value_heads": self.kv_heads,
                "partial_rotary_factor": 0.25,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {
                    "mrope_interleaved": true,
                    "mrope_section": self.mrope_section,
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 10_000_000,
                    "rope_type": "default",
                },
                "router_aux_loss_coef": 0.001,
                "shared_expert_intermediate_size": self.shared_expert_width,
                "tie_word_embeddings": false,
                "vocab_size": self.vocab_size,
            },
            "tie_word_embeddings": false,
        })
    }

    fn quantization(&self) -> Value {
        let mut object = Map::new();
        object.insert("group_size".into(), 64.into());
        object.insert("bits".into(), 4.into());
        object.insert("mode".into(), "affine".into());
        for layer in 0..self.layers {
            for module in ["gate", "shared_expert_gate"] {
                let stem = format!("language_model.model.layers.{layer}.mlp.{module}");
                object.insert(stem, json!({ "group_size": 64, "bits": 8 }));
            }
        }
        Value::Object(object)
    }

    /// `generation_config.json`, with the sampling defaults of Qwen3.6.
    pub fn generation_config(&self) -> Value {
        json!({
            "bos_token_id": self.stop_ids.last(),
            "do_sample": true,
            "eos_token_id": self.stop_ids,
            "pad_token_id": self.stop_ids.last(),
            "temperature": 1.0,
            "top_k": 20,
            "top_p": 0.95,
        })
    }
}
