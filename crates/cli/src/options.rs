//! Options that several commands share.

use std::path::PathBuf;

use clap::Args;
use lily_cpu::{CpuDevice, CpuOptions, Isa};
use lily_cuda::CudaDriver;
use lily_device::Device;
use lily_gpu::device::Open;
use lily_gpu::{DriverError, GpuDevice, Tuning};
use lily_model::Precision;

use crate::failure::Failure;

/// Prompt tokens of one step, unless asked otherwise: large enough that each weight fetched serves many
/// tokens, small enough that Ctrl-C is seen soon.
const CHUNK: usize = 512;

/// Likewise on a GPU: matrix units want many rows of each expert.
const GPU_CHUNK: usize = 4096;

/// How the model is computed.
#[derive(Args, Clone, Debug)]
pub struct ComputeArgs {
    /// Where to compute: cpu, metal for an Apple GPU, cuda for the first NVIDIA GPU, cuda:N for another. `lily
    /// doctor` says what is usable here.
    #[arg(long, value_name = "DEVICE", default_value = "cpu", value_parser = device, help_heading = "Computing")]
    pub device: DeviceName,

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

    /// Most prompt tokens computed at once. More is faster and takes more scratch memory. Default: 512, on a GPU 4096.
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Computing")]
    pub chunk: Option<usize>,

    /// Leave out an optimisation of a GPU, one of those that `lily bench ablate` measures; may be given several
    /// times. Slower: it tells what a fault or a difference comes from.
    #[arg(long, value_name = "SWITCH", help_heading = "Computing")]
    pub without: Vec<String>,
}

/// Optimisations of a GPU: those of its kernels, and those of CUDA's driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switches {
    pub tuning: Tuning,
    /// Steps that run again are CUDA graphs.
    pub graphs: bool,
    /// Kernels start while the one before them runs.
    pub early_starts: bool,
}

impl Default for Switches {
    fn default() -> Self {
        Self { tuning: Tuning::default(), graphs: true, early_starts: true }
    }
}

impl Switches {
    /// The names of a device's switches; the CPU has none.
    pub fn names(device: DeviceName) -> Vec<&'static str> {
        let kernels = Tuning::SWITCHES.iter().map(|(name, _)| *name);
        match device {
            DeviceName::Cpu => Vec::new(),
            DeviceName::Cuda(_) => kernels.chain(["graphs", "early_starts"]).collect(),
            DeviceName::Metal => kernels.collect(),
        }
    }

    /// All of a device's switches on but these.
    pub fn without(device: DeviceName, off: &[String]) -> Result<Self, Failure> {
        let names = Self::names(device);
        let mut switches = Self::default();
        for name in off {
            let kernel = Tuning::SWITCHES.iter().find(|(n, _)| n == name);
            match (names.contains(&name.as_str()), kernel) {
                (true, Some((_, field))) => *field(&mut switches.tuning) = false,
                (true, None) if name == "graphs" => switches.graphs = false,
                (true, None) => switches.early_starts = false,
                (false, _) => return Err(no_switch(name, &names)),
            }
        }
        Ok(switches)
    }
}

/// A switch that a device does not have.
pub fn no_switch(name: &str, names: &[&str]) -> Failure {
    let hint = match names {
        [] => "the CPU's kernels are one path; --isa and --threads change how they run".to_owned(),
        names => format!("there are {}", names.join(", ")),
    };
    Failure::usage(format!("this device has no switch {name}"), hint)
}

impl ComputeArgs {
    /// Most prompt tokens computed at once.
    pub fn chunk(&self) -> usize {
        self.chunk.unwrap_or(match self.device {
            DeviceName::Cpu => CHUNK,
            _ => GPU_CHUNK,
        })
    }

    /// The defaults on a device.
    pub fn on(device: DeviceName) -> Self {
        let without = Vec::new();
        Self { device, threads: None, isa: None, precise: false, chunk: None, without }
    }

    pub fn precision(&self) -> Precision {
        match self.precise {
            true => Precision::Precise,
            false => Precision::Standard,
        }
    }

    /// Opens the device.
    pub fn device(&self) -> Result<Box<dyn Device>, Failure> {
        let switches = Switches::without(self.device, &self.without)?;
        match self.device.opener(&switches) {
            Some(open) => gpu(switches.tuning, open),
            None => {
                let options = CpuOptions { threads: self.threads, isa: self.isa };
                Ok(Box::new(CpuDevice::new(options)))
            }
        }
    }

    /// Whether the model's memory is the host's.
    pub fn on_host(&self) -> bool {
        self.device == DeviceName::Cpu
    }
}

/// A kind of device, as named on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceName {
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU, by number.
    Cuda(i32),
    /// The Apple GPU.
    Metal,
}

impl DeviceName {
    /// What opens a GPU's driver; `None` for the CPU.
    pub fn opener(self, switches: &Switches) -> Option<Open> {
        match self {
            Self::Cpu => None,
            Self::Cuda(ordinal) => {
                let Switches { graphs, early_starts, .. } = *switches;
                let defaults = lily_cuda::Options::default();
                let options = lily_cuda::Options { ordinal, graphs, early_starts, ..defaults };
                Some(Box::new(move || Ok(Box::new(CudaDriver::open(options.clone())?))))
            }
            Self::Metal => Some(Box::new(lily_metal::open)),
        }
    }
}

impl std::fmt::Display for DeviceName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Metal => f.write_str("metal"),
        }
    }
}

/// A device by its name.
pub fn device(name: &str) -> Result<DeviceName, String> {
    let number = |text: &str| text.parse().ok().filter(|n| *n >= 0).map(DeviceName::Cuda);
    match name {
        "cpu" => Some(DeviceName::Cpu),
        "cuda" => Some(DeviceName::Cuda(0)),
        "metal" => Some(DeviceName::Metal),
        _ => name.strip_prefix("cuda:").and_then(number),
    }
    .ok_or_else(|| "there are cpu, metal, cuda and cuda:N".into())
}

/// A GPU whose drivers `open` opens.
fn gpu(tuning: Tuning, open: Open) -> Result<Box<dyn Device>, Failure> {
    let first = open().map_err(unopened)?;
    let profile = first.profile().clone();
    // The probe becomes the first program's driver: a context takes seconds to make.
    let kept = std::sync::Mutex::new(Some(first));
    let open = move || {
        let kept = kept.lock().ok().and_then(|mut kept| kept.take());
        kept.map_or_else(&open, Ok)
    };
    Ok(Box::new(GpuDevice::new(profile, tuning, Box::new(open))))
}

/// A device that does not open.
pub fn unopened(e: DriverError) -> Failure {
    Failure::new(e.to_string(), "see `lily doctor`, or compute with --device cpu")
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
