//! The tiles for CUDA on the host.

/// Goes in front of a kernel text.
pub const PRELUDE: &str = "#define ATTENTION_MMA 1\n";
