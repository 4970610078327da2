//! What a device is.
//!
//! A [`Device`] prepares a [`Plan`] once into a [`Program`]; a program steps it. A [`Step`] takes
//! *segments*, any number of them, each the next tokens of one slot: prefill of a chunk, decode of one
//! token, decode of eight slots at once and teacher-forced scoring are all the same call. Whether a step
//! is a command buffer, a graph or a loop over a thread pool is the device's private business.
//!
//! This crate knows operations only: no model, no checkpoint format beyond bytes, no text.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod arena;
mod check;
pub mod faulty;
pub mod pages;
mod program;
mod step;
mod times;
mod weights;

pub use arena::ScratchLayout;
pub use check::{MAX_IN_FLIGHT, StepSlots, check_params, check_room, check_step};
pub use faulty::{Call, Fault, FaultyDevice, FaultyProgram, Schedule};
pub use pages::PagePool;
pub use program::{
    Counters, Device, KvPart, Limits, MemoryLimit, MemoryNeed, PrepareError, Program, Snapshot,
};
pub use step::{
    Input, Output, Refusal, Score, Segment, SegmentOut, SlotId, Step, StepError, StepOut, Ticket,
};
pub use times::{CacheRead, Inside, Measure, OperationTime, OperationTimes, Twins};
pub use weights::Weight;

pub use lily_ops::Plan;
