//! Encoders: for each family of kernels the argument structs, the policy and the function that records its
//! dispatches.

/// The kernel text of all argument structs.
pub fn argument_structs() -> String {
    [
        common::declarations(),
        gemv::declarations(),
        elementwise::declarations(),
        sample::declarations(),
    ]
    .concat()
}

pub mod common;
pub mod elementwise;
pub mod gemv;
pub mod sample;
