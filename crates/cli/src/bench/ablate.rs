//! `lily bench ablate`: what each optimisation is worth.

use clap::Args;
use lily_bench::ablate::{self, Switch};
use lily_bench::{Engine, Trouble};
use lily_cpu::Isa;
use lily_engine::Cancel;
use serde_json::json;

use super::load::{Loaded, load};
use super::options::{PointArgs, Told, print};
use super::record::RecordArgs;
use crate::failure::{Failure, Interrupted};
use crate::interrupt::cancel_on_interrupt;
use crate::model::Opened;
use crate::options::{ComputeArgs, ModelArgs, Switches, no_switch};
use crate::output::Stdout;

/// Leave out one optimisation at a time and measure what that costs.
///
/// Each switch is measured in pairs: all optimisations on and this one off, in alternating rounds on the same
/// shape. The effect is the time without it over the time with it, minus one: positive where it pays. The spread
/// tells how far the pairs disagree; an effect within it is none. GPUs have a switch for each optimisation of their
/// kernels, on CUDA also `graphs` and `early_starts` (kernels that begin while the one before them runs). The CPU's are `threads` (one without it), `vectors` (portable code without it), `quantized_activations`
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
pub fn names(compute: &ComputeArgs) -> Vec<&'static str> {
    match compute.on_host() {
        true => CPU_SWITCHES.iter().map(|(name, _)| *name).collect(),
        false => Switches::names(compute.device),
    }
}

/// How to compute without something.
fn without(compute: &ComputeArgs, name: &str) -> Result<ComputeArgs, Failure> {
    let mut changed = compute.clone();
    let cpu = CPU_SWITCHES.iter().find(|(n, _)| *n == name).filter(|_| compute.on_host());
    let names = names(compute);
    match cpu {
        Some((_, change)) => change(&mut changed),
        None if names.contains(&name) => changed.without.push(name.to_owned()),
        None => return Err(no_switch(name, &names)),
    }
    Ok(changed)
}

/// Runs the command.
pub fn ablate(args: &AblateArgs) -> anyhow::Result<()> {
    let wanted: Vec<&str> = match args.switch.is_empty() {
        true => names(&args.compute),
        false => args.switch.iter().map(String::as_str).collect(),
    };
    let changes: Vec<(&str, ComputeArgs)> = wanted
        .into_iter()
        .map(|name| Ok((name, without(&args.compute, name)?)))
        .collect::<Result<_, Failure>>()?;
    let cancel = cancel_on_interrupt()?;
    let mut base = open(args, "all on", &args.compute, &cancel)?;
    let opened = Opened::new(&args.model, &args.compute)?;
    let protocol = args.points.protocol(opened.model.config.max_position_embeddings)?;
    let cancel = &cancel;
    let switches = changes.into_iter().map(|(name, compute)| {
        let opens = move || -> Result<Box<dyn Engine>, Trouble> {
            let loaded = open(args, name, &compute, cancel);
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
    cancel: &Cancel,
) -> anyhow::Result<Loaded> {
    let opened = Opened::new(&args.model, compute)?;
    let protocol = args.points.protocol(opened.model.config.max_position_embeddings)?;
    let device = || Ok(compute.device()?);
    load(&opened, 0.0, device, name, (&protocol, compute.chunk()), cancel)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::DeviceName;

    #[test]
    fn each_switch_changes_one_thing() {
        let cpu = ComputeArgs::on(DeviceName::Cpu);
        for name in names(&cpu) {
            let changed = without(&cpu, name).unwrap();
            let differ = [
                changed.threads != cpu.threads,
                changed.isa != cpu.isa,
                changed.precise != cpu.precise,
                changed.chunk() != cpu.chunk(),
            ];
            assert_eq!(differ.iter().filter(|d| **d).count(), 1, "{name}");
            assert!(changed.without.is_empty());
        }
        let refused = without(&cpu, "fuse_norm").err().unwrap().to_string();
        assert!(refused.contains("fuse_norm"), "{refused}");
        let (mut seen, base) = (Vec::new(), Switches::default());
        for device in [DeviceName::Cuda(0), DeviceName::Metal] {
            let gpu = ComputeArgs::on(device);
            for name in names(&gpu) {
                let changed = without(&gpu, name).unwrap();
                let switches = Switches::without(device, &changed.without).unwrap();
                assert!(switches != base && !seen.contains(&(device, switches)), "{name}");
                seen.push((device, switches));
            }
            assert!(without(&gpu, "vectors").is_err());
            let driver = without(&gpu, "graphs").map(|c| c.without);
            assert_eq!(driver.is_ok(), device != DeviceName::Metal);
        }
    }
}
