//! `lily doctor --self-test`: whether a device computes what it should, in one report.

mod demo;
mod measure;
mod operations;
mod sweep;

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use serde_json::{Value, json};

use super::DoctorArgs;
use crate::failure::Failure;
use crate::options::{ComputeArgs, DeviceName, Switches, unopened};
use crate::output::{Stdout, note};

/// How a part ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed,
    /// It does not apply here, or something that it needs is missing.
    LeftOut,
}

impl Outcome {
    fn of(passed: bool) -> Self {
        if passed { Self::Passed } else { Self::Failed }
    }

    fn word(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "FAILED",
            Self::LeftOut => "left out",
        }
    }
}

/// A part of the test, done.
struct Part {
    outcome: Outcome,
    /// What was found, for people.
    lines: Vec<String>,
    /// The same in figures.
    figures: Value,
}

impl Part {
    fn left_out(why: impl Into<String>) -> Self {
        Self { outcome: Outcome::LeftOut, lines: vec![why.into()], figures: Value::Null }
    }

    fn failed(why: impl Into<String>) -> Self {
        Self { outcome: Outcome::Failed, lines: vec![why.into()], figures: Value::Null }
    }
}

/// A part by name, and what does it.
type Step<'a> = (&'static str, Box<dyn Fn() -> anyhow::Result<Part> + 'a>);

/// Runs the parts one after another; one that fails does not keep the next from running.
pub fn run(args: &DoctorArgs, machine: Value) -> anyhow::Result<()> {
    let compute = ComputeArgs::on(args.device);
    // What cannot be opened cannot be tested.
    let name = compute.device()?.name();
    let measure = args.measure.as_ref().map(|f| measure::Measure::new(args.device, f));
    let mut steps: Vec<Step> = vec![
        ("kernels", Box::new(|| operations::kernels(args.device))),
        ("operations", Box::new(|| operations::cases(args.device))),
        ("demo model", Box::new(|| demo::perplexity(&compute))),
        ("overlapping steps", Box::new(|| demo::overlap(&compute))),
    ];
    if let Some(measure) = &measure {
        let compute = &compute;
        steps.push(("checkpoint", Box::new(|| measure.checkpoint())));
        steps.push(("rows", Box::new(|| sweep::rows(compute, measure.folder()))));
        steps.push(("optimisations", Box::new(|| measure.ablation())));
        steps.push(("frontiers", Box::new(|| measure.frontiers())));
    }
    let mut out = Stdout::new();
    out.line(&format!("{name}: self-test"))?;
    let (mut parts, mut failed) = (Vec::new(), Vec::new());
    for (what, step) in steps {
        note(&format!("{what} …"));
        let start = Instant::now();
        let part = step().unwrap_or_else(|e| Part::failed(format!("{e:#}")));
        let seconds = start.elapsed().as_secs_f64();
        out.line(&format!("{what}: {} ({seconds:.1} s)", part.outcome.word()))?;
        for line in &part.lines {
            out.line(&format!("  {line}"))?;
        }
        out.flush()?;
        if part.outcome == Outcome::Failed {
            failed.push(what);
        }
        parts.push(json!({
            "part": what,
            "outcome": part.outcome.word().to_lowercase(),
            "seconds": seconds,
            "lines": part.lines,
            "figures": part.figures,
        }));
        // Written after each part: what was found survives what may come.
        if let Some(path) = &args.report {
            let report = json!({
                "device": args.device.to_string(),
                "name": name,
                "machine": machine,
                "date": lily_bench::results::today(),
                "parts": parts,
            });
            write(path, &report)?;
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(
            format!("the self-test of {name} failed: {}", failed.join(", ")),
            "compute with --device cpu, and report what was printed",
        )
        .into()),
    }
}

fn write(path: &Path, report: &Value) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(report)? + "\n";
    fs::write(path, text).with_context(|| format!("{} cannot be written", path.display()))
}

/// A driver of the device; `None` for the CPU.
fn driver(device: DeviceName) -> anyhow::Result<Option<Box<dyn lily_gpu::Driver>>> {
    Ok(device.opener(&Switches::default()).map(|open| open().map_err(unopened)).transpose()?)
}
