//! Measuring Lily. For now: seeded synthetic checkpoints of real shapes, see [`synth`].
//!
//! This crate knows checkpoints and plans: no device, no text, no HTTP.

#![deny(missing_docs)]
// The config is one large `json!`.
#![recursion_limit = "256"]
#![forbid(unsafe_code)]

pub mod synth;
