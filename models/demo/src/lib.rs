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

/// Opens the embedded checkpoint.
///
/// # Errors
///
/// Those of [`Checkpoint::from_static`]: the embedded files are damaged.
pub fn open() -> Result<Checkpoint, CheckpointError> {
    Checkpoint::from_static(NAME, FILES)
}
