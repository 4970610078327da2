//! HTTP and wire types: an OpenAI-compatible server over any [`Generator`](lily_scheduler::Generator).
//!
//! ```text
//! bytes ──guard──► JSON ──► messages ──template──► tokens ──► Generator
//!                                                               │ events
//! bytes ◄── JSON or SSE ◄── deltas ◄── parser, stops ◄── text ◄─┘
//! ```
//!
//! This is the only crate that knows HTTP. It never sees a tensor, and whoever makes the tokens (a scheduler, or
//! the script of [`replay`]) never sees HTTP. A client that goes away drops its response, that drops the event
//! streams, and that cancels the request.

#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod answer;
mod app;
mod body;
mod chat;
mod completions;
mod error;
mod fields;
mod guard;
mod listen;
mod metrics;
mod model;
mod options;
pub mod replay;
mod run;
mod sampling;
mod socket;
mod stream;

pub use app::ROUTES;
pub use listen::serve;
pub use model::ServedModel;
pub use options::Options;
