//! `lily bench ablate`: what each optimisation is worth.

use clap::Args;
use lily_bench::ablate::{self, Switch};
use lily_bench::{Engine, Trouble};
use lily_cpu::Isa;
use lily_engine::Cancel;
use lily_gpu::Tuning;
use serde_json::json;

use super::load::{Loaded, load};
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
/// tells how far the pairs disagree; an effect within it is none. GPUs have a switch for each optimisation of their
/// kernels. The CPU's are `threads` (one without it), `vectors` (portable code without it), `quantized_activations`
/// (f32 without it, as --precise) and `chunks` (16 prompt tokens at once without it).
#[derive(Args)]
pub struct AblateArgs {
    #[command(flatten)]
    pub model: ModelArgs,

    /// A switch to leave out; may be given several times. Default: each of the device's in turn.
    #[arg(long, value_name = "NAME")]
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

/// Changes how the CPU computes.
type CpuSwitch = (&'static str, fn(&mut ComputeArgs));

/// What the CPU can leave out.
const CPU_SWITCHES: [CpuSwitch; 4] = [
    ("threads", |c| c.threads = Some(1)),
    ("vectors", |c| c.isa = Isa::available().last().copied()),
    ("quantized_activations", |c| c.precise = true),
    ("chunks", |c| c.chunk = Some(16)),
];

/// The names of a device's switches.
fn names(compute: &ComputeArgs) -> Vec<&'static str> {
    match compute.on_host() {
        true => CPU_SWITCHES.iter().map(|(name, _)| *name).collect(),
        false => Tuning::SWITCHES.iter().map(|(name, _)| *name).collect(),
    }
}

/// How to compute without something.
fn without(compute: &ComputeArgs, name: &str) -> Result<(ComputeArgs, Tuning), Failure> {
    let mut changed = compute.clone();
    let cpu = CPU_SWITCHES.iter().find(|(n, _)| *n == name).filter(|_| compute.on_host());
    if let Some((_, change)) = cpu {
        change(&mut changed);
        return Ok((changed, Tuning::default()));
    }
    match Tuning::without(name).filter(|_| !compute.on_host()) {
        Some(tuning) => Ok((changed, tuning)),
        None => Err(Failure::usage(
            format!("this device has no switch {name}"),
            format!("there are {}", names(compute).join(", ")),
        )),
    }
}

/// Runs the command.
pub fn ablate(args: &AblateArgs) -> anyhow::Result<()> {
    let wanted: Vec<&str> = match args.switch.is_empty() {
        true => names(&args.compute),
        false => args.switch.iter().map(String::as_str).collect(),
    };
    let changes: Vec<(&str, (ComputeArgs, Tuning))> = wanted
        .into_iter()
        .map(|name| Ok((name, without(&args.compute, name)?)))
        .collect::<Result<_, Failure>>()?;
    let cancel = cancel_on_interrupt()?;
    let mut base = open(args, "all on", &args.compute, Tuning::default(), &cancel)?;
    let opened = Opened::new(&args.model, &args.compute)?;
    let protocol = args.points.protocol(opened.model.config.max_position_embeddings)?;
    let cancel = &cancel;
    let switches = changes.into_iter().map(|(name, (compute, tuning))| {
        let opens = move || -> Result<Box<dyn Engine>, Trouble> {
            let loaded = open(args, name, &compute, tuning, cancel);
            let failed = |error: anyhow::Error| Trouble::Failed(format!("{error:#}"));
            Ok(Box::new(loaded.map_err(failed)?.engine))
        };
        Switch { name: name.to_owned(), without: Box::new(opens) }
    });
    let mut told = Told { rounds: protocol.rounds, wanted: !args.json };
    let results = ablate::ablate(&mut base.engine, switches.collect(), &protocol, &mut told);
    let (source, device) = (opened.checkpoint.source(), &base.device);
    let mut out = Stdout::new();
    if args.json {
        let switches = ablate::json(&results);
        out.json(&json!({ "model": source, "device": device, "switches": switches }))?;
    } else {
        let title = format!("{source} on {device}: time without it over time with it");
        print(&mut out, &[ablate::table(&title, &results)])?;
        out.flush()?;
    }
    args.record.append("ablate", device, &ablate::figures(&results))?;
    match cancel.is_cancelled() {
        true => Err(Interrupted.into()),
        false => Ok(()),
    }
}

/// The model on the device, computed in one way.
fn open(
    args: &AblateArgs,
    name: &str,
    compute: &ComputeArgs,
    tuning: Tuning,
    cancel: &Cancel,
) -> anyhow::Result<Loaded> {
    let opened = Opened::new(&args.model, compute)?;
    let protocol = args.points.protocol(opened.model.config.max_position_embeddings)?;
    let device = || Ok(compute.device_with(tuning)?);
    load(&opened, 0.0, device, name, (&protocol, compute.chunk()), cancel)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::DeviceName;

    #[test]
    fn each_switch_changes_one_thing() {
        let cpu = ComputeArgs {
            device: DeviceName::Cpu,
            threads: None,
            isa: None,
            precise: false,
            chunk: None,
        };
        for name in names(&cpu) {
            let (changed, tuning) = without(&cpu, name).unwrap();
            let differ = [
                changed.threads != cpu.threads,
                changed.isa != cpu.isa,
                changed.precise != cpu.precise,
                changed.chunk() != cpu.chunk(),
            ];
            assert_eq!(differ.iter().filter(|d| **d).count(), 1, "{name}");
            assert_eq!(tuning, Tuning::default());
        }
        let refused = without(&cpu, "fuse_norm").err().unwrap().to_string();
        assert!(refused.contains("fuse_norm"), "{refused}");
        let gpu = ComputeArgs { device: DeviceName::Cuda(0), ..cpu };
        assert_eq!(names(&gpu).len(), Tuning::SWITCHES.len());
        assert_eq!(without(&gpu, "fuse_norm").unwrap().1, Tuning::without("fuse_norm").unwrap());
        assert!(without(&gpu, "vectors").is_err());
    }
}
