//! Measurements of the self-test: `lily bench` on a checkpoint of the real model's shape.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use lily_bench::synth::{Shape, Synth};
use lily_engine::Machine;
use serde_json::{Value, json};

use super::{Outcome, Part, driver};
use crate::options::DeviceName;
use crate::output::bytes;

/// Prompt and context lengths at which switches are measured: short, middling, and where attention counts.
const LENGTHS: &str = "512,4096";

/// Bytes of one synthetic layer, and of embedding and output matrix.
const LAYER_BYTES: u64 = 470_000_000;
const ENDS_BYTES: u64 = 570_000_000;

/// What is measured, and on what.
pub struct Measure {
    device: DeviceName,
    folder: PathBuf,
}

/// Layers of a synthetic checkpoint that takes at most half of some memory: whole blocks of four, one of them with attention.
fn layers(memory: u64) -> u16 {
    let fit = (memory / 2).saturating_sub(ENDS_BYTES) / LAYER_BYTES;
    (fit.min(Shape::REAL_LAYERS as u64) / 4 * 4) as u16
}

impl Measure {
    pub fn new(device: DeviceName, folder: &Path) -> Self {
        Self { device, folder: folder.to_owned() }
    }

    /// Where the checkpoint is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The checkpoint in the folder, or a new one of as many layers as fit.
    pub fn checkpoint(&self) -> anyhow::Result<Part> {
        if self.folder.join("config.json").exists() {
            let lines = vec![format!("{}: as it is", self.folder.display())];
            return Ok(Part { outcome: Outcome::Passed, lines, figures: Value::Null });
        }
        let device = driver(self.device)?.map(|d| d.profile().memory);
        let host = Machine::detect().available;
        let memory = [device, host].into_iter().flatten().min().unwrap_or(0);
        let layers = layers(memory);
        if layers == 0 {
            return Ok(Part::left_out(format!(
                "{} of memory are too little for four layers of the real shape",
                bytes(memory)
            )));
        }
        let written = Synth::new(Shape::qwen3_6_35b_a3b(layers.into()))
            .write(&self.folder, |_, _| ())
            .with_context(|| format!("writing to {}", self.folder.display()))?;
        let lines = vec![format!("{layers} layers, {}", bytes(written.bytes))];
        let figures = json!({ "layers": layers, "bytes": written.bytes });
        Ok(Part { outcome: Outcome::Passed, lines, figures })
    }

    /// Runs `lily bench` and returns what it printed, and that as JSON.
    fn bench(&self, args: &[&str]) -> anyhow::Result<Value> {
        let program = std::env::current_exe().context("this program's own file")?;
        let output = Command::new(program)
            .arg("bench")
            .args(args)
            .arg("--model")
            .arg(&self.folder)
            .args(["--device", &self.device.to_string(), "--json"])
            .output()
            .context("lily bench does not start")?;
        if !output.status.success() {
            bail!("lily bench: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    fn missing(&self) -> Option<Part> {
        let there = self.folder.join("config.json").exists();
        (!there).then(|| Part::left_out("there is no checkpoint to measure with"))
    }

    /// What each optimisation is worth.
    pub fn ablation(&self) -> anyhow::Result<Part> {
        if self.device == DeviceName::Cpu {
            return Ok(Part::left_out("the CPU has no switches: its kernels are one path"));
        }
        if let Some(part) = self.missing() {
            return Ok(part);
        }
        let figures =
            self.bench(&["ablate", "--prefill", LENGTHS, "--decode", LENGTHS, "--rounds", "3"])?;
        let switches = figures["switches"].as_array().map_or(0, Vec::len);
        let lines = vec![format!("{switches} switches at {LENGTHS} tokens: figures in the report")];
        Ok(Part { outcome: Outcome::of(switches > 0), lines, figures })
    }

    /// Both frontiers, beside mlx-lm's where python3 has it.
    pub fn frontiers(&self) -> anyhow::Result<Part> {
        if let Some(part) = self.missing() {
            return Ok(part);
        }
        let found = Command::new("python3").args(["-c", "import mlx_lm"]).output();
        let peer = found.is_ok_and(|o| o.status.success());
        let figures = match peer {
            true => self.bench(&["compare", "--peer", "mlx-lm=python3", "--rounds", "3"])?,
            false => self.bench(&["run", "--rounds", "3"])?,
        };
        let beside = if peer { "beside mlx-lm" } else { "alone: python3 has no mlx_lm" };
        let lines = vec![format!("{beside}: figures in the report")];
        Ok(Part { outcome: Outcome::Passed, lines, figures })
    }
}

#[cfg(test)]
mod tests {
    use super::layers;

    #[test]
    fn layers_fit_into_half_of_the_memory() {
        let gib = |n: u64| n << 30;
        let table = [
            (0, 0),
            (gib(4), 0),
            (gib(6), 4),
            (gib(16), 16),
            (gib(32), 32),
            (gib(64), 40),
            (u64::MAX, 40),
        ];
        for (memory, want) in table {
            assert_eq!(layers(memory), want, "{memory}");
        }
    }
}
