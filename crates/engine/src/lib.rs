//! A model on a device: sessions, generation, scoring, snapshots.
//!
//! An [`Engine`] owns a prepared [`Program`](lily_device::Program). A [`Session`] is one timeline of
//! tokens in one of its slots. The caller always gives the whole token prefix and the engine decides what
//! it can reuse: [`Engine::sync`], then [`Engine::generate`].
//!
//! A scheduler that drives many sessions at once uses the parts below those calls: [`Engine::stage`],
//! [`Session::prefill_segment`], [`Session::decode_segment`], [`Generation`] and [`Engine::step`], or
//! [`Engine::submit`] and [`Engine::wait`], which keep two steps in flight.
//!
//! The recurrent state cannot be rolled back, only restored from a copy. Two rules follow. The state of a
//! session never runs past the last prompt token before its answer begins, so the same prompt can be
//! answered again. And a prompt that departs from what a session has seen starts from a
//! [checkpoint](Engine::checkpoint), or anew.
//!
//! This crate knows tokens and plans: no text, no checkpoint format, no model family, no HTTP.
#![deny(missing_docs)]
#![deny(unsafe_code)]

mod budget;
mod cancel;
mod engine;
mod error;
mod flight;
mod generate;
pub mod memory;
pub mod policy;
mod prompt;
mod session;
mod snapshot;

pub use budget::{Budget, MemoryRefusal, budget};
pub use cancel::Cancel;
pub use engine::{Engine, EngineOptions};
pub use error::EngineError;
pub use flight::Flight;
pub use generate::{FinishReason, GenerateParams, Generated, Generation};
pub use lily_device::{Output, Score, SegmentOut};
pub use lily_ops::sample::{LogitBias, Logprobs, MAX_LOGPROBS, SampleParams, Sampled};
pub use memory::Machine;
pub use prompt::Reuse;
pub use session::{Session, Timings, Work};
pub use snapshot::{MAX_CHECKPOINT_BYTES, MAX_CHECKPOINTS, SessionSnapshot, snapshot_bytes};
