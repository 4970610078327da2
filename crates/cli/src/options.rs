//! Options that several commands share.

use std::path::PathBuf;

use clap::Args;
use lily_cpu::{CpuDevice, CpuOptions, Isa};
use lily_model::Precision;

/// Prompt tokens of one step, unless asked otherwise: large enough that each weight fetched serves many
/// tokens, small enough that Ctrl-C is seen soon.
const CHUNK: usize = 512;

/// How the model is computed.
#[derive(Args, Clone, Debug)]
pub struct ComputeArgs {
    /// Threads to compute with. Default: one a core that the program may use. Results do not depend on it.
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Computing")]
    pub threads: Option<usize>,

    /// Instruction set: avx512vnni, avx2, neon-dotprod, neon or portable. Default: the fastest that this
    /// machine has. Results do not depend on it.
    #[arg(long, value_name = "NAME", value_parser = isa, help_heading = "Computing")]
    pub isa: Option<Isa>,

    /// Compute with f32 activations and an f32 cache throughout. Slower and closer to the exact result; by
    /// default activations are rounded to 8 bits before 4-bit matrices and the cache holds bf16.
    #[arg(long, help_heading = "Computing")]
    pub precise: bool,

    /// Most prompt tokens computed at once. More is faster and takes more scratch memory.
    #[arg(long, value_name = "N", default_value_t = CHUNK, value_parser = count, help_heading = "Computing")]
    pub chunk: usize,
}

impl ComputeArgs {
    pub fn precision(&self) -> Precision {
        match self.precise {
            true => Precision::Precise,
            false => Precision::Standard,
        }
    }

    pub fn device(&self) -> CpuDevice {
        CpuDevice::new(CpuOptions { threads: self.threads, isa: self.isa })
    }
}

/// Which model.
#[derive(Args, Clone, Debug)]
pub struct ModelArgs {
    /// A checkpoint folder (config.json and *.safetensors), ORG/NAME or ORG/NAME@REVISION for a model that
    /// `lily pull` has downloaded, or `demo` for the built-in model, which is the default.
    #[arg(long, value_name = "MODEL")]
    pub model: Option<PathBuf>,
}

/// A whole number from 1.
pub fn count(text: &str) -> Result<usize, String> {
    // Bounded so that products of two such numbers stay far inside 64 bits.
    match text.parse::<usize>() {
        Ok(n) if (1..=1 << 24).contains(&n) => Ok(n),
        _ => Err("a whole number from 1 to 16777216 is needed".into()),
    }
}

fn isa(name: &str) -> Result<Isa, String> {
    let have: Vec<String> = Isa::available().iter().map(Isa::to_string).collect();
    name.parse().map_err(|e| format!("{e}; this machine has: {}", have.join(", ")))
}
