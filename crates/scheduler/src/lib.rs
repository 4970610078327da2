//! Who runs when.
//!
//! [`api`] is the boundary between those who ask for text (a server) and those who make tokens (the thread
//! that owns a device, or a script in its place): typed requests in, typed events out. Nothing here knows
//! text or HTTP, and nothing needs an async runtime.
//!
//! [`Scheduler`] is that thread: it owns an engine, batches what runs, keeps prefixes for later prompts, and
//! survives what fails.

#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod api;
mod cache;
mod channel;
mod job;
mod pace;
mod scheduler;
mod shared;
mod worker;

pub use api::{
    Event, Failure, Finish, Generator, Health, Limits, Logprob, MemoryUse, Request, Status,
    SubmitError, ThinkingBudget, Token,
};
pub use channel::{EventSender, EventStream, TimedOut, events};
pub use scheduler::{Factory, Scheduler, SchedulerOptions};
