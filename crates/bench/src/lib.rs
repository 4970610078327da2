//! Measuring Lily: frontiers of prefill and decode, comparisons with other engines in alternating rounds, floors,
//! scores against references, and [synthetic checkpoints](synth) of real shapes.
//!
//! The protocol knows an [`Engine`] and nothing of what stands behind it: Lily, another program, or a fake whose
//! speed a test has chosen. `bench/README.md` says how to repeat each figure.
//!
//! This crate knows checkpoints, plans and the engine: no text, no HTTP.

#![deny(missing_docs)]
// The config is one large `json!`.
#![recursion_limit = "256"]
#![forbid(unsafe_code)]

pub mod ablate;
pub mod cache;
mod clock;
mod engine;
pub mod floors;
mod lily;
pub mod machine;
pub mod peers;
mod plot;
mod protocol;
pub mod report;
pub mod results;
pub mod roofline;
pub mod score;
pub mod snapshots;
mod stats;
pub mod synth;

pub use clock::{Clock, ManualClock, SystemClock, timed};
pub use engine::{Engine, Missing, Phase, Point, Trouble};
pub use lily::{LilyEngine, prompt_ids};
pub use plot::{Curve, Plot};
pub use protocol::{Cell, LENGTHS, Measured, MeasuredPoint, Protocol, Watch, run};
pub use stats::{Summary, mean, median};
