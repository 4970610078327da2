//! `lily plan`: what a GPU would do for a step, from a config alone.

use std::path::PathBuf;

use clap::Args;
use lily_gpu::program::Recording;
use lily_gpu::report::{StepReport, decode, prefill};
use lily_gpu::{Platform, Profile, Thresholds, Tuning};
use lily_model::Precision;
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::options::count;
use crate::output::Stdout;

/// Show the steps that a GPU would record for a model: kernel launches, stages, bytes.
///
/// Neither the GPU nor the weights are needed: a folder with a config.json is enough. `bytes` are the distinct
/// bytes that each launch reads and writes, summed; `bytes_floor` are weights, state and K/V, each once. Launches
/// and scratch are those of the list that such a step runs, which is recorded for the next power of two of tokens;
/// bytes are of the context given.
#[derive(Args)]
pub struct PlanArgs {
    /// A checkpoint folder, ORG/NAME of a downloaded model, or `demo`. Default: the built-in model.
    #[arg(long, value_name = "MODEL")]
    pub model: Option<PathBuf>,

    /// The GPU: metal (M5 Max), cuda (H200), or one of m1-max, m2-max, m3-max, m4-max, m5, m5-max, h200.
    #[arg(long, value_name = "NAME", default_value = "metal")]
    pub device: String,

    /// Tokens in the cache after the step.
    #[arg(long, value_name = "N", default_value = "4096", value_parser = count)]
    pub context: usize,

    /// Tokens of a prefill chunk.
    #[arg(long, value_name = "N", default_value = "2048", value_parser = count)]
    pub chunk: usize,

    /// Leave an optimisation out; may be given several times.
    #[arg(long, value_name = "SWITCH", value_parser = switch)]
    pub without: Vec<String>,

    /// Another value of a threshold at which policies change, such as split_groups=4; may be given several times.
    #[arg(long, value_name = "NAME=N", value_parser = threshold)]
    pub threshold: Vec<(String, u32)>,

    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

fn switch(name: &str) -> Result<String, String> {
    match Tuning::without(name) {
        Some(_) => Ok(name.to_string()),
        None => {
            let names: Vec<&str> = Tuning::SWITCHES.iter().map(|(n, _)| *n).collect();
            Err(format!("there is no such switch; there are {}", names.join(", ")))
        }
    }
}

fn threshold(text: &str) -> Result<(String, u32), String> {
    let (name, value) = text.split_once('=').ok_or("NAME=N is needed")?;
    let value = value.parse().map_err(|_| format!("{value:?} is no whole number"))?;
    Thresholds::of(Platform::Metal, "").set(name, value)?;
    Ok((name.to_owned(), value))
}

/// Runs the command.
pub fn plan(args: &PlanArgs) -> anyhow::Result<()> {
    let named = Profile::named(&args.device).filter(|_| args.device != "softgpu");
    let mut profile = named.ok_or_else(|| {
        Failure::usage(
            format!("there is no GPU {:?} in the list", args.device),
            "there are metal, cuda, m1-max, m2-max, m3-max, m4-max, m5, m5-max and h200",
        )
    })?;
    let mut tuning = Tuning::default();
    for (name, field) in Tuning::SWITCHES {
        if args.without.iter().any(|w| w == name) {
            *field(&mut tuning) = false;
        }
    }
    for (name, value) in &args.threshold {
        let set = profile.thresholds.set(name, *value);
        set.map_err(|why| Failure::usage(why, "see crates/gpu/src/thresholds.rs"))?;
    }
    let (source, plan) = crate::inspect::plan_of(args.model.as_deref(), Precision::Standard)?;
    let wrong = |e: String| {
        Failure::new(format!("{} cannot run {source}: {e}", profile.name), "choose another device")
    };
    let recording = Recording::virtual_of(&plan, &tuning, &profile).map_err(wrong)?;
    let step = decode(&recording, args.context).map_err(wrong)?;
    let chunk = prefill(&recording, args.chunk.min(args.context), args.context).map_err(wrong)?;
    let mut out = Stdout::new();
    if args.json {
        let value = json!({
            "model": source,
            "device": profile.name,
            "context": args.context,
            "decode": object(&step),
            "prefill": object(&chunk),
        });
        return Ok(out.line(&value.to_string())?);
    }
    out.line(&format!("{source} on {}, {} tokens", profile.name, args.context))?;
    for (name, report) in [("decode", &step), ("prefill", &chunk)] {
        out.line(&format!(
            "{name}: {} dispatches in {} stages, {} bytes ({:.3} of the floor), {} bytes of scratch",
            report.dispatches,
            report.stages,
            report.bytes,
            report.bytes as f64 / report.bytes_floor as f64,
            report.scratch
        ))?;
        for (op, (launches, bytes)) in &report.operations {
            out.line(&format!("  {op:<34} {launches:>5} {bytes:>15}"))?;
        }
    }
    Ok(())
}

fn object(report: &StepReport) -> Value {
    json!({
        "dispatches": report.dispatches,
        "stages": report.stages,
        "bytes": report.bytes,
        "bytes_floor": report.bytes_floor,
        "scratch": report.scratch,
        "operations": report
            .operations
            .iter()
            .map(|(op, (launches, bytes))| (op.to_string(), json!({"dispatches": launches, "bytes": bytes})))
            .collect::<serde_json::Map<String, Value>>(),
    })
}
