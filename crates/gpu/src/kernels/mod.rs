//! Encoders: for each family of kernels the argument structs, the policy and the function that records its
//! dispatches.

use crate::profile::Profile;
use crate::text::Shape;

/// Whether the kernels are right for these sizes on a device; if not, why, and what to do.
pub fn supported(shape: &Shape, profile: &Profile) -> Result<(), String> {
    attention::supported(shape, profile)?;
    delta::supported(shape)
}

/// The kernel text of all argument structs.
pub fn argument_structs() -> String {
    [
        common::declarations(),
        attention::declarations(),
        delta::declarations(),
        delta_chunk::declarations(),
        elementwise::declarations(),
        gemm::declarations(),
        gemv::declarations(),
        moe::declarations(),
        route::declarations(),
        sample::declarations(),
    ]
    .concat()
}

pub mod attention;
pub mod common;
pub mod delta;
pub mod delta_chunk;
pub mod elementwise;
pub mod gemm;
pub mod gemv;
pub mod moe;
pub mod read;
pub mod route;
pub mod sample;
