//! Options that several commands share.

use std::ops::RangeInclusive;
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

    /// Instruction set: avx512vnni, avx2, neon or portable. Default: the fastest that this machine has.
    /// Results do not depend on it.
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
    /// Checkpoint folder (config.json and *.safetensors), or `demo` for the built-in model.
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
}

/// How each token of an answer is chosen.
#[derive(Args, Clone, Debug)]
pub struct SamplingArgs {
    /// Randomness, 0 to 100: 0 always takes the most likely token, 1 samples from the model's distribution.
    #[arg(long, value_name = "T", allow_negative_numbers = true, value_parser = temperature, help_heading = "Sampling")]
    pub temperature: Option<f32>,

    /// Choose among the most likely tokens whose probabilities reach P together, 0 to 1; 1 is off.
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = share, help_heading = "Sampling")]
    pub top_p: Option<f32>,

    /// Choose among the K most likely tokens; 0 is off.
    #[arg(long, value_name = "K", allow_negative_numbers = true, help_heading = "Sampling")]
    pub top_k: Option<u32>,

    /// Choose among tokens at least P times as likely as the most likely one, 0 to 1; 0 is off.
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = share, help_heading = "Sampling")]
    pub min_p: Option<f32>,

    /// Seed of the random choices: the same seed gives the same answer. Default: another one each time, named
    /// in the output of --json.
    #[arg(long, value_name = "N", help_heading = "Sampling")]
    pub seed: Option<u64>,

    /// Divide the logits of tokens already in the answer, 0.01 to 100; 1 is off.
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = repetition, help_heading = "Sampling")]
    pub repetition_penalty: Option<f32>,

    /// Subtract from the logits of tokens already in the answer, -100 to 100; 0 is off.
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = penalty, help_heading = "Sampling")]
    pub presence_penalty: Option<f32>,

    /// Subtract from the logits of tokens for each time they are in the answer, -100 to 100; 0 is off.
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = penalty, help_heading = "Sampling")]
    pub frequency_penalty: Option<f32>,
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

fn number(text: &str, range: RangeInclusive<f32>) -> Result<f32, String> {
    match text.parse() {
        Ok(x) if range.contains(&x) => Ok(x),
        _ => Err(format!("a number from {} to {} is needed", range.start(), range.end())),
    }
}

fn temperature(text: &str) -> Result<f32, String> {
    number(text, 0.0..=100.0)
}

fn share(text: &str) -> Result<f32, String> {
    number(text, 0.0..=1.0)
}

fn repetition(text: &str) -> Result<f32, String> {
    number(text, 0.01..=100.0)
}

fn penalty(text: &str) -> Result<f32, String> {
    number(text, -100.0..=100.0)
}
