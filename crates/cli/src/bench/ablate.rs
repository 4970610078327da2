//! `lily bench ablate`: what each optimisation is worth.

use clap::Args;
use lily_bench::report::{Table, as_json};
use lily_bench::results::{Figure, significant};
use lily_bench::{Engine, Measured, Summary, run as run_protocol};
use lily_gpu::Tuning;
use serde_json::json;

use super::load::load;
use super::options::{PointArgs, Told, print};
use super::record::RecordArgs;
use crate::failure::{Failure, Interrupted};
use crate::interrupt::cancel_on_interrupt;
use crate::model::Opened;
use crate::options::{ComputeArgs, ModelArgs};
use crate::output::Stdout;

/// Leave out one optimisation at a time and measure what that costs.
///
/// Each switch is measured in pairs: all optimisations on and this one off, in alternating rounds on the same
/// shape. The effect is the time without it over the time with it, minus one: positive where it pays. The spread
/// tells how far the pairs disagree; an effect within it is none.
#[derive(Args)]
pub struct AblateArgs {
    #[command(flatten)]
    pub model: ModelArgs,

    /// A switch to leave out; may be given several times. Default: each of them in turn.
    #[arg(long, value_name = "NAME", value_parser = switch)]
    pub switch: Vec<String>,

    #[command(flatten)]
    pub points: PointArgs,

    /// Print one JSON object with every round.
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub record: RecordArgs,

    #[command(flatten)]
    pub compute: ComputeArgs,
}

fn switch(name: &str) -> Result<String, String> {
    match Tuning::without(name) {
        Some(_) => Ok(name.to_owned()),
        None => {
            let names: Vec<&str> = Tuning::SWITCHES.iter().map(|(name, _)| *name).collect();
            Err(format!("there are {}", names.join(", ")))
        }
    }
}

/// Runs the command.
pub fn ablate(args: &AblateArgs) -> anyhow::Result<()> {
    if args.compute.on_host() {
        return Err(Failure::usage(
            "the CPU has no switches: its kernels are one path",
            "name a GPU with --device",
        )
        .into());
    }
    let opened = Opened::new(&args.model, &args.compute)?;
    let protocol = args.points.protocol(opened.model.config.max_position_embeddings)?;
    let cancel = cancel_on_interrupt()?;
    let names: Vec<&str> = match args.switch.is_empty() {
        true => Tuning::SWITCHES.iter().map(|(name, _)| *name).collect(),
        false => args.switch.iter().map(String::as_str).collect(),
    };
    let shape = (&protocol, args.compute.chunk());
    let engine = |name: &str, tuning: Tuning| {
        let device = || Ok(args.compute.device_with(tuning)?);
        load(&opened, 0.0, device, name, shape, &cancel)
    };
    let mut base = engine("all on", Tuning::default())?;
    let mut results = Vec::new();
    for name in names {
        let Some(tuning) = Tuning::without(name) else { continue };
        let mut without = engine(name, tuning)?;
        let pair: &mut [&mut dyn Engine] = &mut [&mut base.engine, &mut without.engine];
        let mut told = Told { rounds: protocol.rounds, wanted: !args.json };
        results.push(run_protocol(pair, &protocol, &mut told));
        if cancel.is_cancelled() {
            break;
        }
    }
    show(args, &opened, &base.device, &results)?;
    args.record.append("ablate", &base.device, &figures(&results))?;
    match cancel.is_cancelled() {
        true => Err(Interrupted.into()),
        false => Ok(()),
    }
}

fn show(
    args: &AblateArgs,
    opened: &Opened,
    device: &str,
    results: &[Measured],
) -> anyhow::Result<()> {
    let mut out = Stdout::new();
    if args.json {
        let switches: Vec<_> = results
            .iter()
            .map(|m| json!({ "switch": m.engines[1], "measured": as_json(m, None) }))
            .collect();
        let value =
            json!({ "model": opened.checkpoint.source(), "device": device, "switches": switches });
        return Ok(out.json(&value)?);
    }
    let head = ["switch", "measured", "effect", "least", "most", "so it"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for measured in results {
        for point in &measured.points {
            let mut row = vec![measured.engines[1].clone(), point.point.to_string()];
            match point.ratio(1) {
                Some(ratio) => {
                    row.extend([ratio.median, ratio.min, ratio.max].map(percent));
                    row.push(verdict(ratio).to_owned());
                }
                None => {
                    let why = point.cells.iter().find_map(|c| c.trouble.as_ref());
                    row.push(why.map_or("not measured".into(), ToString::to_string));
                }
            }
            rows.push(row);
        }
    }
    let title =
        format!("{} on {device}: time without it over time with it", opened.checkpoint.source());
    print(&mut out, &[Table { title, rows, notes: Vec::new() }])?;
    Ok(out.flush()?)
}

fn percent(ratio: f64) -> String {
    format!("{:+.2} %", 100.0 * (ratio - 1.0))
}

/// Pairs that disagree about the sign decide nothing.
fn verdict(ratio: Summary) -> &'static str {
    match ratio {
        r if r.min > 1.0 => "pays",
        r if r.max < 1.0 => "costs",
        _ => "makes no difference",
    }
}

fn figures(results: &[Measured]) -> Vec<Figure> {
    let figure = |measured: &Measured, point: &lily_bench::MeasuredPoint| {
        let rounds = point.ratios(1).unwrap_or_default();
        let value = match point.ratio(1) {
            Some(ratio) => significant(ratio.median),
            None => "not measured".to_owned(),
        };
        let what = format!("without {}: {}", measured.engines[1], point.point);
        Figure { what, value, unit: "times the time".into(), rounds }
    };
    results.iter().flat_map(|m| m.points.iter().map(move |p| figure(m, p))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_effect_within_its_spread_is_none() {
        let of = |values: &[f64]| verdict(Summary::of(values).unwrap());
        assert_eq!(of(&[1.02, 1.01, 1.05]), "pays");
        assert_eq!(of(&[0.98, 0.99]), "costs");
        assert_eq!(of(&[0.99, 1.20, 1.30]), "makes no difference");
        assert_eq!(percent(1.0825), "+8.25 %");
    }

    #[test]
    fn switches_are_those_of_the_device() {
        assert!(switch("fuse_norm").is_ok());
        assert!(switch("fuse").unwrap_err().contains("fuse_norm"));
    }
}
