//! The tiles for CUDA on the host.

/// Goes in front of a kernel text. Without the pad two blocks have room in 32 KiB.
pub const PRELUDE: &str = "#define ATTENTION_MMA 1\n#define FLASH_PAD 0u\n";
