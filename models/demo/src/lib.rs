//! Lily's built-in model: the checkpoint in this folder, embedded in the program.
//!
//! The folder `models/demo` is itself a checkpoint folder (`lily --model models/demo`); this crate
//! carries the same files inside the binary. `README.md` beside `Cargo.toml` is the model card,
//! `NOTICE.md` names the data and licences.

#![deny(missing_docs)]
#![forbid(unsafe_code)]

use lily_checkpoint::{Checkpoint, CheckpointError};

/// Name of the model.
pub const NAME: &str = "lily-demo-4bit";

/// What the model is, in one line for people.
pub const ABOUT: &str =
    "a 33M-parameter model trained to demonstrate Lily; not a general assistant";

/// Attributions and licences of the training data, in Markdown: to be shown with the model.
pub const NOTICE: &str = include_str!("../NOTICE.md");

/// The files of the checkpoint, by name.
pub const FILES: &[(&str, &[u8])] = &[
    ("config.json", include_bytes!("../config.json")),
    ("generation_config.json", include_bytes!("../generation_config.json")),
    ("model.safetensors.index.json", include_bytes!("../model.safetensors.index.json")),
    ("model.safetensors", include_bytes!("../model.safetensors")),
    ("tokenizer.json", include_bytes!("../tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../tokenizer_config.json")),
    ("chat_template.jinja", include_bytes!("../chat_template.jinja")),
];

/// What mlx-lm says of the model, log-probabilities over three passages: `golden/perplexity.json`, for self-tests.
pub const PERPLEXITY: &str = include_str!("../golden/perplexity.json");

/// How far a device's rounding to bf16 may move the perplexity over [`PERPLEXITY`]: as far as mlx-lm's own run in bf16 with sums in
/// f32 does (its `bf16_f32acc`: 0.99955 times).
pub const PERPLEXITY_BOUND: f64 = 0.00045;

/// The same for kernels that sum in an order of their own, as matrix units do: bf16 values fall to the other side now and then, and on a model as small
/// as this one that moves the perplexity by 0.1 to 0.3 %, up or down (docs/numerics.md has figures).
pub const PERPLEXITY_BOUND_ANY_ORDER: f64 = 0.003;

/// Opens the embedded checkpoint.
///
/// # Errors
///
/// Those of [`Checkpoint::from_static`]: the embedded files are damaged.
pub fn open() -> Result<Checkpoint, CheckpointError> {
    Checkpoint::from_static(NAME, FILES)
}
