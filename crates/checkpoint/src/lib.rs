//! Safetensors checkpoints: shards, index and config files to a verified manifest and mapped bytes.
//!
//! [`Checkpoint::open`] reads headers only and checks all that can be checked without the tensor
//! bytes: a checkpoint that opens has every tensor inside its file, of the length that its type
//! and shape need, once, with no byte of a shard unaccounted for. [`Checkpoint::verify`] reads
//! everything.
//!
//! This crate knows no model and no device. It assumes that the files do not change while they
//! are open: a file truncated under the map ends the program (`SIGBUS`).

#![deny(missing_docs)]
#![deny(unsafe_code)]

mod checkpoint;
mod dtype;
mod error;
mod header;
mod index;
mod json;
mod problem;
mod shard;
mod shard_set;
mod source;
mod verify;
pub mod write;

pub use checkpoint::{Checkpoint, MAX_CONFIG_BYTES, MAX_TEXT_BYTES, Tensor};
pub use dtype::{Dtype, UnknownDtype};
pub use error::{CheckpointError, FileProblem, FolderProblem, ForeignWeights, JsonProblem};
pub use header::{Header, HeaderTensor, MAX_HEADER_BYTES, MAX_NAME_BYTES, parse_header};
pub use json::parse_json_object;
pub use problem::{HeaderProblem, IndexProblem, ShardsProblem, TensorProblem};
pub use shard::{Shard, TensorBytes, TensorRef};
pub use verify::{
    ChecksumStatus, ListedFile, ListedStatus, NonFinite, ShardChecksum, VerifyReport,
};

/// Name of the only shard of a checkpoint without numbered ones.
pub const SINGLE_FILE: &str = "model.safetensors";
/// Name of the index.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
