//! Synthetic checkpoints: the tensors of a real shape with seeded random values, in MLX layout.
//!
//! What is written is derived from the plan of the config that is written with it, so a tensor is there
//! exactly if the model reads it. Every byte is a pure function of (seed, tensor name, place): layer 3 of
//! a 4-layer checkpoint equals layer 3 of a 40-layer one, and no buffer is larger than one chunk.
//!
//! Values are chosen so that activations stay finite and logits sane through any number of layers: weights
//! near N(0, 1/√inputs), norms near one, decay rates as trained models have them. The text that such a model
//! writes is noise; its time and memory are those of the real one.

mod error;
mod fill;
mod gguf;
mod shape;
mod skew;
mod tensors;
mod write;

pub use error::SynthError;
pub use gguf::{WrittenGguf, write_gguf};
pub use shape::Shape;
pub use skew::{MAX_SHARE, expert_shares};
pub use write::{SHARD_BYTES, Synth, Written};
