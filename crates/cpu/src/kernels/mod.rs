//! Kernels of the CPU device. Bits do not depend on the instruction set, the number of threads,
//! the number of rows or the chunking of a prompt.

pub mod attention;
mod common;
pub mod elementwise;
pub mod embed;
pub mod gdn;
pub mod linear;
pub mod norm;
pub mod quantize;
pub mod router;

pub use common::StoredElem;
