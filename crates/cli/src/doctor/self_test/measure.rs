//! Measurements of the self-test: `lily bench` on a checkpoint of the real model's shape, a run for each figure, so that one that
//! fails or takes too long takes no other with it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use lily_bench::LENGTHS;
use lily_bench::synth::{Shape, Synth};
use lily_engine::Machine;
use lily_model::Precision;
use serde_json::{Value, json};

use super::ablation::Piece;
use super::jobs::{Deadline, Pieces, run, run_json};
use super::{Outcome, Part, Progress, ablation, driver};
use crate::bench::ablate;
use crate::doctor::DoctorArgs;
use crate::model::open_checkpoint;
use crate::options::{ComputeArgs, DeviceName};
use crate::output::bytes;

/// Tokens that a decode measurement adds to its context.
const DECODE_TOKENS: usize = 64;

/// Bytes of one synthetic layer, and of embedding and output matrix.
const LAYER_BYTES: u64 = 470_000_000;
const ENDS_BYTES: u64 = 570_000_000;

/// What is measured, and on what.
pub struct Measure {
    device: DeviceName,
    folder: PathBuf,
    lengths: Vec<usize>,
    rounds: String,
    seconds: usize,
}

/// Layers of a synthetic checkpoint that takes at most half of some memory: whole blocks of four, one of them with attention.
fn layers(memory: u64) -> u16 {
    let fit = (memory / 2).saturating_sub(ENDS_BYTES) / LAYER_BYTES;
    (fit.min(Shape::REAL_LAYERS as u64) / 4 * 4) as u16
}

/// `512,4096`.
pub fn list(lengths: &[usize]) -> String {
    lengths.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// What pieces came to, as a part.
fn part(pieces: Pieces, what: &str, about: impl Fn(&Value) -> Option<String>) -> Part {
    let Pieces { done, failures, cut } = pieces;
    let outcome = match (failures.is_empty(), cut.is_empty()) {
        (false, _) => Outcome::Failed,
        (true, false) => Outcome::Unfinished,
        (true, true) => Outcome::of(!done.is_empty()),
    };
    let mut lines: Vec<String> = done.iter().filter_map(about).collect();
    lines.extend(failures.iter().chain(&cut).cloned());
    let figures = json!({ what: done, "failures": failures, "not_measured": cut });
    Part { outcome, lines, figures }
}

/// A line of each point that was measured.
fn points(measured: &Value) -> String {
    let point = |p: &Value| {
        let speed = |e: &Value| {
            let name = e["engine"].as_str().unwrap_or("?").to_owned();
            match (e["tokens_per_second"].as_f64(), e["trouble"].as_str()) {
                (Some(speed), _) => format!("{name} {speed:.1} tokens/s"),
                (None, why) => format!("{name}: {}", why.unwrap_or("not measured")),
            }
        };
        let engines: Vec<String> = p["engines"].as_array()?.iter().map(speed).collect();
        Some(format!("{} {}: {}", p["phase"].as_str()?, p["length"], engines.join(", ")))
    };
    let all = measured["points"].as_array().map_or(&[][..], Vec::as_slice);
    all.iter().filter_map(point).collect::<Vec<_>>().join("; ")
}

/// The ratio of each point that was measured with and without a switch.
fn ratios(switch: &Value) -> Option<String> {
    let ratio = |p: &Value| {
        let ratio = p["engines"][1]["ratio"].as_f64()?;
        Some(format!("{} {} {:+.1} %", p["phase"].as_str()?, p["length"], 100.0 * (ratio - 1.0)))
    };
    let points = switch["measured"]["points"].as_array()?;
    let all: Vec<String> = points.iter().filter_map(ratio).collect();
    let published = switch["published"].as_f64();
    let published = published.map_or_else(String::new, |effect| {
        format!(" (the original on Apple silicon: {effect:+.1} %)")
    });
    Some(format!("without {}: {}{published}", switch["switch"].as_str()?, all.join(", ")))
}

impl Measure {
    pub fn new(args: &DoctorArgs, folder: &Path) -> Self {
        Self {
            device: args.device,
            folder: folder.to_owned(),
            lengths: args.lengths.clone(),
            rounds: args.rounds.to_string(),
            seconds: args.part_seconds,
        }
    }

    /// Where the checkpoint is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The time that a part has from now on.
    pub fn deadline(&self) -> Deadline {
        Deadline::after(self.seconds)
    }

    /// The longest prompt that is measured.
    pub fn longest(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(LENGTHS[LENGTHS.len() - 1])
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

    /// Runs `lily bench` and returns what it printed; `None`: time was out.
    fn bench(&self, args: &[&str], left: Duration) -> anyhow::Result<Option<Value>> {
        let program = std::env::current_exe().context("this program's own file")?;
        let mut command = Command::new(program);
        command.arg("bench").args(args).arg("--model").arg(&self.folder);
        command.args(["--device", &self.device.to_string(), "--rounds", &self.rounds, "--json"]);
        run_json(&mut command, left)
    }

    pub fn missing(&self) -> Option<Part> {
        let there = self.folder.join("config.json").exists();
        (!there).then(|| Part::left_out("there is no checkpoint to measure with"))
    }

    /// What each optimisation is worth: a run for each and each length.
    pub fn ablation(&self, progress: &mut Progress) -> anyhow::Result<Part> {
        if let Some(part) = self.missing() {
            return Ok(part);
        }
        let names = ablate::names(&ComputeArgs::on(self.device));
        let mma = driver(self.device)?.is_some_and(|d| d.profile().mma);
        let mut pieces = ablation::pieces(self.device, names, &self.lengths, mma);
        let most = self.most()?;
        pieces.retain_mut(|piece| piece.fits(most.saturating_sub(DECODE_TOKENS)));
        let switches = pieces.into_iter().map(|piece| (piece.name(), piece)).collect();
        let one = |piece: &Piece, left| {
            let lengths = [("--prefill", &piece.prefill), ("--decode", &piece.decode)]
                .map(|(option, lengths)| (option, list(lengths)));
            let mut args = vec!["ablate", "--switch", piece.switch];
            for (option, lengths) in lengths.iter().filter(|(_, l)| !l.is_empty()) {
                args.extend([*option, lengths.as_str()]);
            }
            args.extend(piece.without.iter().flat_map(|other| ["--without", *other]));
            let found = self.bench(&args, left)?;
            Ok(found.map(|mut f| {
                let mut found = f["switches"][0].take();
                found["published"] = json!(piece.published);
                found
            }))
        };
        let pieces = Pieces::run(self.deadline(), switches, one, |so_far| {
            progress.found(json!({ "switches": so_far.done, "failures": so_far.failures }))
        })?;
        Ok(part(pieces, "switches", ratios))
    }

    /// Tokens that the model was made for.
    fn most(&self) -> anyhow::Result<usize> {
        let model = lily_model::load(&open_checkpoint(Some(&self.folder))?, Precision::Standard)?;
        Ok(model.config.max_position_embeddings)
    }

    /// Lengths that the model was made for.
    fn frontier(&self) -> anyhow::Result<Vec<usize>> {
        let asked = if self.lengths.is_empty() { &LENGTHS[..] } else { &self.lengths };
        let most = self.most()?;
        Ok(asked.iter().copied().filter(|n| n + DECODE_TOKENS < most).collect())
    }

    /// Both frontiers, beside mlx-lm's where python3 has it: a run for each length, short ones first.
    pub fn frontiers(&self, progress: &mut Progress) -> anyhow::Result<Part> {
        if let Some(part) = self.missing() {
            return Ok(part);
        }
        let deadline = self.deadline();
        let mut import = Command::new("python3");
        let found = run(import.args(["-c", "import mlx_lm"]), deadline.left());
        let peer = found.is_ok_and(|o| o.is_some_and(|o| o.status.success()));
        let tokens = DECODE_TOKENS.to_string();
        let one = |length: &String, left| {
            let mut args = vec!["run"];
            if peer {
                args = vec!["compare", "--peer", "mlx-lm=python3"];
            }
            let n = length.as_str();
            args.extend(["--prefill", n, "--decode", n, "--decode-tokens", tokens.as_str()]);
            args.push("--no-floors");
            self.bench(&args, left)
        };
        let lengths = self.frontier()?.into_iter();
        let lengths = lengths.map(|n| (format!("{n} tokens"), n.to_string())).collect();
        let pieces = Pieces::run(deadline, lengths, one, |so_far| {
            progress.found(json!({ "lengths": so_far.done, "failures": so_far.failures }))
        })?;
        let mut part = part(pieces, "lengths", |run| Some(points(&run["measured"])));
        let beside = if peer { "beside mlx-lm" } else { "alone: python3 has no mlx_lm" };
        part.lines.insert(0, beside.into());
        Ok(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_effect_stands_beside_the_published_one() {
        let point =
            json!({ "phase": "decode", "length": 32_768, "engines": [{}, { "ratio": 1.198 }] });
        let mut switch = json!({ "switch": "pack_heads", "measured": { "points": [point] } });
        assert_eq!(ratios(&switch).unwrap(), "without pack_heads: decode 32768 +19.8 %");
        switch["published"] = json!(23.8);
        let want =
            "without pack_heads: decode 32768 +19.8 % (the original on Apple silicon: +23.8 %)";
        assert_eq!(ratios(&switch).unwrap(), want);
    }

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
