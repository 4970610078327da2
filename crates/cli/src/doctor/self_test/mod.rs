//! `lily doctor --self-test`: whether a device computes what it should, in one report.

mod ablation;
mod demo;
mod jobs;
mod measure;
mod operations;
mod rows;
mod thresholds;

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use serde_json::{Value, json};

use self::measure::Measure;
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
    /// Its time was over before all was done; what was done stands.
    Unfinished,
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
            Self::Unfinished => "unfinished",
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

/// What a part tells while it is at work.
struct Progress<'a> {
    report: &'a Report<'a>,
    part: &'static str,
    start: Instant,
}

impl Progress<'_> {
    /// What was found so far is written into the report: it survives what may come.
    fn found(&mut self, figures: Value) -> anyhow::Result<()> {
        let unfinished = json!({
            "part": self.part,
            "outcome": "at work",
            "seconds": self.start.elapsed().as_secs_f64(),
            "figures": figures,
        });
        self.report.write(Some(unfinished))
    }
}

/// The report, and what of it is done.
struct Report<'a> {
    path: Option<&'a Path>,
    device: String,
    name: String,
    machine: Value,
    parts: Vec<Value>,
}

impl Report<'_> {
    fn write(&self, at_work: Option<Value>) -> anyhow::Result<()> {
        let Some(path) = self.path else { return Ok(()) };
        let parts: Vec<&Value> = self.parts.iter().chain(&at_work).collect();
        let report = json!({
            "device": self.device,
            "name": self.name,
            "machine": self.machine,
            "date": lily_bench::results::today(),
            "parts": parts,
        });
        write(path, &report)
    }
}

/// A part by name, and what does it.
type Step<'a> = (&'static str, Box<dyn Fn(&mut Progress) -> anyhow::Result<Part> + 'a>);

/// The parts that were asked for.
fn steps<'a>(
    args: &'a DoctorArgs,
    compute: &'a ComputeArgs,
    measure: Option<&'a Measure>,
) -> Result<Vec<Step<'a>>, Failure> {
    let device = args.device;
    let mut steps: Vec<Step> = vec![
        ("kernels", Box::new(move |_: &mut Progress| operations::kernels(device))),
        ("operations", Box::new(move |_: &mut Progress| operations::cases(device))),
        ("demo model", Box::new(move |_: &mut Progress| demo::perplexity(compute))),
        ("overlapping steps", Box::new(move |_: &mut Progress| demo::overlap(compute))),
    ];
    if let Some(m) = measure {
        let measured: [Step; 5] = [
            ("checkpoint", Box::new(move |_: &mut Progress| m.checkpoint())),
            ("rows", Box::new(move |p: &mut Progress| rows::rows(compute, m, p))),
            ("thresholds", Box::new(move |p: &mut Progress| thresholds::sweep(device, m, p))),
            ("optimisations", Box::new(move |p: &mut Progress| m.ablation(p))),
            ("frontiers", Box::new(move |p: &mut Progress| m.frontiers(p))),
        ];
        steps.extend(measured);
    }
    let names: Vec<&str> = steps.iter().map(|(name, _)| *name).collect();
    if let Some(unknown) = args.part.iter().find(|p| !names.contains(&p.as_str())) {
        let hint = format!("there are {}; more with --measure", names.join(", "));
        return Err(Failure::usage(format!("the self-test has no part {unknown:?}"), hint));
    }
    if !args.part.is_empty() {
        steps.retain(|(name, _)| args.part.iter().any(|p| p == name));
    }
    Ok(steps)
}

/// Runs the parts one after another; one that fails does not keep the next from running.
pub fn run(args: &DoctorArgs, machine: Value) -> anyhow::Result<()> {
    let compute = ComputeArgs::on(args.device);
    let measure = args.measure.as_ref().map(|f| Measure::new(args, f));
    let steps = steps(args, &compute, measure.as_ref())?;
    // What cannot be opened cannot be tested.
    let name = compute.device()?.name();
    let mut out = Stdout::new();
    out.line(&format!("{name}: self-test"))?;
    let (path, device) = (args.report.as_deref(), args.device.to_string());
    let mut report = Report { path, device, name, machine, parts: Vec::new() };
    let mut failed = Vec::new();
    for (what, step) in steps {
        note(&format!("{what} …"));
        let start = Instant::now();
        let mut progress = Progress { report: &report, part: what, start };
        progress.found(Value::Null)?;
        let part = step(&mut progress).unwrap_or_else(|e| Part::failed(format!("{e:#}")));
        let seconds = start.elapsed().as_secs_f64();
        out.line(&format!("{what}: {} ({seconds:.1} s)", part.outcome.word()))?;
        for line in &part.lines {
            out.line(&format!("  {line}"))?;
        }
        out.flush()?;
        if part.outcome == Outcome::Failed {
            failed.push(what);
        }
        report.parts.push(json!({
            "part": what,
            "outcome": part.outcome.word().to_lowercase(),
            "seconds": seconds,
            "lines": part.lines,
            "figures": part.figures,
        }));
        report.write(None)?;
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(
            format!("the self-test of {} failed: {}", report.name, failed.join(", ")),
            "compute with --device cpu, and report what was printed",
        )
        .into()),
    }
}

/// Writes beside the file and puts it in its place: a report is never half of one.
fn write(path: &Path, report: &Value) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(report)? + "\n";
    let beside = path.with_extension("part");
    fs::write(&beside, text)
        .and_then(|()| fs::rename(&beside, path))
        .with_context(|| format!("{} cannot be written", path.display()))
}

/// A driver of the device; `None` for the CPU.
fn driver(device: DeviceName) -> anyhow::Result<Option<Box<dyn lily_gpu::Driver>>> {
    Ok(device.opener(&Switches::default()).map(|open| open().map_err(unopened)).transpose()?)
}
