//! `lily doctor`: what this machine offers, and what keeps Lily from using it.

mod self_test;
pub mod system;

use std::path::PathBuf;

use clap::Args;
use lily_cpu::{CpuDevice, CpuOptions, Isa};
use lily_device::Device;
use lily_engine::Machine;
use serde_json::{Value, json};

use crate::options::{DeviceName, count, device};
use crate::output::{Stdout, bytes};
use crate::resolve::cache;

/// Show what this machine offers: processor, memory, devices, cache.
///
/// Names the instruction set that is chosen, the limits of the container if there are any, and for each device
/// why it is or is not usable.
#[derive(Args)]
pub struct DoctorArgs {
    /// Print one JSON object.
    #[arg(long, conflicts_with = "self_test")]
    pub json: bool,

    /// Test a device: every kernel compiles, every operation agrees with the reference, the built-in model
    /// with mlx-lm's figures, tokens do not depend on how steps overlap. Takes minutes; fails if any part does.
    #[arg(long)]
    pub self_test: bool,

    /// The device to test.
    #[arg(long, value_name = "DEVICE", default_value = "cpu", value_parser = device, requires = "self_test")]
    pub device: DeviceName,

    /// Write all that the test found into FILE, as JSON.
    #[arg(long, value_name = "FILE", requires = "self_test")]
    pub report: Option<PathBuf>,

    /// Measure too: where policies should change, what each optimisation is worth, and both frontiers, beside mlx-lm's if
    /// python3 has it. Uses the checkpoint in DIR; an empty or new DIR gets a synthetic one of the real model's shape, as
    /// large as fits.
    #[arg(long, value_name = "DIR", requires = "self_test")]
    pub measure: Option<PathBuf>,

    /// Do these parts only, by name; may be given several times.
    #[arg(long, value_name = "PART", requires = "self_test")]
    pub part: Vec<String>,

    /// Measure at prompts and contexts of these lengths. Default: each optimisation of a GPU where it counts, from 512 tokens
    /// to 128K, the CPU's at 512 and 4096, frontiers at ten lengths from 256 to 128K.
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = count, requires = "measure")]
    pub lengths: Vec<usize>,

    /// Measurements at each length; the median counts.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = count, requires = "measure")]
    pub rounds: usize,

    /// Seconds that each part of the measurements may take. What it has found by then stays in the report.
    #[arg(long, value_name = "S", default_value_t = 3600, value_parser = count, requires = "measure")]
    pub part_seconds: usize,
}

/// A kind of device and whether models can be computed on it.
struct Found {
    kind: &'static str,
    usable: bool,
    /// The device, or why there is none.
    about: String,
}

/// All that is known of this machine. `None` is what the system does not tell.
struct Report {
    processor: Option<String>,
    features: Vec<&'static str>,
    sets: Vec<String>,
    /// Cores that this process may use.
    cores: usize,
    online: Option<usize>,
    physical: Option<u64>,
    machine: Machine,
    cached: Option<u64>,
    folder: Option<String>,
    models: usize,
    complete: usize,
    model_bytes: u64,
    free: Option<u64>,
    devices: Vec<Found>,
}

/// Runs the command.
pub fn doctor(args: &DoctorArgs) -> anyhow::Result<()> {
    let report = Report::gather();
    if args.self_test {
        return self_test::run(args, report.json());
    }
    let mut out = Stdout::new();
    match args.json {
        true => out.json(&report.json())?,
        false => out.text(&report.text())?,
    }
    Ok(out.flush()?)
}

impl Report {
    fn gather() -> Self {
        let cache = cache().ok();
        let models = cache.as_ref().and_then(|c| c.models().ok()).unwrap_or_default();
        Self {
            processor: system::processor(),
            features: system::features(),
            sets: Isa::available().iter().map(Isa::to_string).collect(),
            cores: std::thread::available_parallelism().map_or(1, |n| n.get()),
            online: system::online_cores(),
            physical: system::meminfo("MemTotal:"),
            machine: Machine::detect(),
            cached: system::meminfo("Cached:"),
            free: cache.as_ref().and_then(|c| c.free_space()),
            folder: cache.map(|c| c.root().display().to_string()),
            complete: models.iter().filter(|m| m.missing.is_empty()).count(),
            model_bytes: models.iter().map(|m| m.bytes).sum(),
            models: models.len(),
            devices: devices(),
        }
    }

    /// Whether a control group allows less memory than there is.
    fn is_limited(&self) -> bool {
        matches!((self.machine.total, self.physical), (Some(limit), Some(all)) if limit < all)
    }

    fn text(&self) -> String {
        let mut text = String::new();
        let mut part = |name: &str, lines: Vec<String>| {
            text.push_str(name);
            text.push('\n');
            lines.iter().for_each(|line| text.push_str(&format!("  {line}\n")));
        };
        part("processor", self.processor_lines());
        part("memory", self.memory_lines());
        part("cache", self.cache_lines());
        let device = |d: &Found| {
            let state = if d.usable { "usable" } else { "not usable" };
            format!("{:<6} {state}: {}", d.kind, d.about)
        };
        part("devices", self.devices.iter().map(device).collect());
        text
    }

    fn processor_lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.processor.iter().cloned().collect();
        let others = match self.sets.get(1..) {
            Some([]) | None => String::new(),
            Some(others) => format!("; also {}, with --isa", others.join(", ")),
        };
        let chosen = self.sets.first().map_or("none", String::as_str);
        lines.push(format!("instruction set {chosen}{others}"));
        lines.push(format!("features: {}", self.features.join(" ")));
        lines.push(match self.online.filter(|all| *all > self.cores) {
            Some(all) => format!(
                "{} of {all} cores: a quota or an affinity keeps the others from this process",
                self.cores
            ),
            None => format!("{} cores", self.cores),
        });
        lines
    }

    fn memory_lines(&self) -> Vec<String> {
        let known = |n: Option<u64>| n.map_or("unknown".to_owned(), bytes);
        let (total, available) = (self.machine.total, self.machine.available);
        let mut lines = vec![format!("{} in all, {} available", known(total), known(available))];
        lines.push(match self.is_limited() {
            true => {
                format!("a control group allows no more; the machine has {}", known(self.physical))
            }
            false => "no control group limits it".to_owned(),
        });
        if let Some(cached) = self.cached {
            lines.push(format!(
                "{} of it hold files, and are given back when needed",
                bytes(cached)
            ));
        }
        lines.push(match available {
            Some(n) => format!(
                "weights are mapped from their files: up to {} of them are read from the disk once and stay",
                bytes(n)
            ),
            None => "weights are mapped from their files: those that fit are read once and stay".into(),
        });
        lines
    }

    fn cache_lines(&self) -> Vec<String> {
        let Some(folder) = &self.folder else {
            return vec!["no folder: set HF_HUB_CACHE".into()];
        };
        let free = self.free.map_or(String::new(), |n| format!(", {} free", bytes(n)));
        let models = match self.models {
            0 => "no models".to_owned(),
            n => format!("{n} models of {}, {} complete", bytes(self.model_bytes), self.complete),
        };
        vec![folder.clone(), format!("{models}{free}")]
    }

    fn json(&self) -> Value {
        let device = |d: &Found| json!({ "kind": d.kind, "usable": d.usable, "about": d.about });
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "os": std::env::consts::OS,
            "arch": std::env::consts::ARCH,
            "processor": {
                "name": self.processor,
                "features": self.features,
                "instruction_sets": self.sets,
                "chosen": self.sets.first(),
                "cores": self.cores,
                "cores_online": self.online,
            },
            "memory": {
                "total": self.machine.total,
                "available": self.machine.available,
                "physical": self.physical,
                "limited": self.is_limited(),
                "page_cache": self.cached,
            },
            "cache": {
                "folder": self.folder,
                "models": self.models,
                "complete": self.complete,
                "bytes": self.model_bytes,
                "free": self.free,
            },
            "devices": self.devices.iter().map(device).collect::<Vec<_>>(),
        })
    }
}

/// Every kind of device, the usable ones and the others.
fn devices() -> Vec<Found> {
    let cpu = CpuDevice::new(CpuOptions::default()).name();
    let found = |kind, about: Result<String, String>| Found {
        kind,
        usable: about.is_ok(),
        about: about.unwrap_or_else(|why| why),
    };
    vec![
        found("cpu", Ok(cpu)),
        found("cuda", lily_cuda::usable()),
        found("metal", lily_metal::usable()),
    ]
}
