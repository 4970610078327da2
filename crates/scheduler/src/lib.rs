//! Who runs when.
//!
//! [`api`] is the boundary between those who ask for text (a server) and those who make tokens (the thread
//! that owns a device, or a script in its place): typed requests in, typed events out. Nothing here knows
//! text or HTTP, and nothing needs an async runtime.

#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod api;
mod channel;

pub use api::{
    Event, Failure, Finish, Generator, Health, Limits, Logprob, MemoryUse, Request, Status,
    SubmitError, ThinkingBudget, Token,
};
pub use channel::{EventSender, EventStream, TimedOut, events};
