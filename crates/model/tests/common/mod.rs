//! A checkpoint in memory that a test changes and writes to a folder.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::path::{Path, PathBuf};

use lily_checkpoint::write::{HeaderStyle, SafetensorsWriter, TensorSpec};
use lily_checkpoint::{Checkpoint, Dtype};
use lily_model::{Model, ModelConfig, ModelError, Precision, plan_of_config};
use lily_ops::Plan;
use serde_json::Value;

/// One tensor.
#[derive(Clone)]
pub struct Entry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// Config and tensors of a checkpoint.
#[derive(Clone)]
pub struct Draft {
    pub config: Value,
    pub tensors: Vec<Entry>,
}

/// Fields of the text part that hold a dimension.
pub const DIMENSIONS: [&str; 16] = [
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "max_position_embeddings",
];

/// Numbers and plan of a config alone.
pub fn plan(config: &Value) -> Result<(ModelConfig, Plan), ModelError> {
    plan_of_config("test", config, Precision::Standard)
}

/// Folder of a reference checkpoint.
pub fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/fixtures").join(name).join("mlx")
}

/// Config of a reference checkpoint.
pub fn config(name: &str) -> Value {
    let text = std::fs::read_to_string(folder(name).join("config.json")).expect("the fixture");
    serde_json::from_str(&text).expect("the fixture's config is JSON")
}

impl Draft {
    /// A reference checkpoint: `tiny-a` (8-bit routers) or `tiny-c` (4-bit routers, vision tensors).
    pub fn of(name: &str) -> Self {
        let checkpoint = Checkpoint::open(&folder(name)).expect("the fixture opens");
        let tensors = checkpoint.tensors().map(|t| Entry {
            name: t.name.clone(),
            dtype: t.dtype,
            shape: t.shape.clone(),
            bytes: t.data.map().to_vec(),
        });
        Self { config: checkpoint.config().clone(), tensors: tensors.collect() }
    }

    /// The tensor of this name.
    pub fn tensor(&mut self, name: &str) -> &mut Entry {
        let found = self.tensors.iter_mut().find(|t| t.name == name);
        found.unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// Removes a tensor and returns it.
    pub fn drop_tensor(&mut self, name: &str) -> Entry {
        let at = self.tensors.iter().position(|t| t.name == name);
        self.tensors.remove(at.unwrap_or_else(|| panic!("no tensor {name}")))
    }

    /// Adds a tensor of zeros.
    pub fn add(&mut self, name: &str, dtype: Dtype, shape: &[usize]) {
        let bytes = vec![0; dtype.tensor_bytes(shape).expect("a small tensor") as usize];
        self.tensors.push(Entry { name: name.into(), dtype, shape: shape.into(), bytes });
    }

    /// Renames every tensor.
    pub fn rename(&mut self, name: impl Fn(&str) -> String) {
        for tensor in &mut self.tensors {
            tensor.name = name(&tensor.name);
        }
    }

    /// The object of the text part.
    pub fn text(&mut self) -> &mut Value {
        &mut self.config["text_config"]
    }

    /// Writes config and tensors into `dir`.
    pub fn write(&self, dir: &Path) {
        std::fs::write(dir.join("config.json"), self.config.to_string()).expect("writing a config");
        let specs: Vec<TensorSpec> = self
            .tensors
            .iter()
            .map(|t| TensorSpec::new(t.name.clone(), t.dtype, t.shape.clone()))
            .collect();
        let path = dir.join(lily_checkpoint::SINGLE_FILE);
        let mut out =
            SafetensorsWriter::create(&path, &specs, HeaderStyle::Mlx).expect("creating a file");
        for t in &self.tensors {
            out.write(&t.name, &t.bytes).expect("writing a tensor");
        }
        out.finish().expect("all tensors are written");
    }

    /// Writes the checkpoint to a temporary folder and loads it.
    pub fn load(&self) -> Result<Model, ModelError> {
        let dir = tempfile::tempdir().expect("a temporary folder");
        self.write(dir.path());
        let checkpoint = Checkpoint::open(dir.path()).expect("the container is well formed");
        lily_model::load(&checkpoint, Precision::Standard)
    }

    /// Loads it, expecting an error of the kind `kind` whose message holds all of `words`.
    pub fn fails(&self, kind: &str, words: &[&str]) {
        expect_error(self.load().map(|_| ()), kind, words);
    }
}

/// Checks the kind of an error, by the name of its variant, and the words of its message.
pub fn expect_error(result: Result<(), ModelError>, kind: &str, words: &[&str]) {
    let error = result.expect_err(&format!("{kind} {words:?} is expected"));
    let (debug, message) = (format!("{error:?}"), error.to_string());
    let variant = debug.split([' ', '(']).next();
    assert_eq!(variant, Some(kind), "{message}");
    for word in words {
        assert!(message.contains(word), "{word} is not in: {message}");
    }
}

/// Applies `change` to every bf16 element.
pub fn map_bf16(bytes: &mut [u8], change: impl Fn(f32) -> f32) {
    for pair in bytes.chunks_exact_mut(2) {
        let x = half::bf16::from_le_bytes([pair[0], pair[1]]).to_f32();
        pair.copy_from_slice(&half::bf16::from_f32(change(x)).to_le_bytes());
    }
}

/// Whether this is a norm that the original stores zero-centred.
pub fn is_centred_norm(name: &str) -> bool {
    let ends = ["layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight"];
    ends.iter().any(|end| name.ends_with(end)) || name.ends_with("language_model.norm.weight")
}
