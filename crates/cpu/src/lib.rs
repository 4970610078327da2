//! The CPU device: SIMD kernels, the thread pool and the program that runs them.
//!
//! Bits do not depend on the instruction set, the number of threads, the rows of a step or the chunking
//! of a prompt: `docs/numerics.md` says how.

#![deny(missing_docs)]

mod device;
pub mod kernels;
pub mod pool;
mod program;
pub mod simd;

pub use device::{CpuDevice, CpuOptions};
pub use simd::{Isa, IsaKind};
