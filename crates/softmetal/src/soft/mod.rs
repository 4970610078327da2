//! The device: see the crate.

mod caps;
mod execute;
mod foundation;
mod memory;
mod objects;
mod rules;
mod runtime;
mod state;
mod text;
mod worker;

pub use caps::{Caps, Fault};
pub use rules::{Rule, Violation};
pub use state::{Counts, Soft};
pub use text::{host_text, metal_text};
