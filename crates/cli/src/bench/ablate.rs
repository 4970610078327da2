//! `lily bench ablate`: what each optimisation is worth.

use clap::Args;
use lily_bench::ablate::{self, Ablated, Switch};
use lily_bench::cache::CacheReads;
use lily_bench::{Engine, LilyEngine, Point, Protocol, Trouble};
use lily_cpu::Isa;
use lily_engine::Cancel;
use serde_json::json;

use super::load::{Loaded, load};
use super::options::{PointArgs, Told, print};
use super::record::RecordArgs;
use crate::failure::{Failure, Interrupted};
use crate::interrupt::cancel_on_interrupt;
use crate::model::Opened;
use crate::options::{ComputeArgs, DeviceName, ModelArgs, Switches, no_switch};
use crate::output::Stdout;

/// Leave out one optimisation at a time and measure what that costs.
///
/// Each switch is measured in pairs: all optimisations on and this one off, in alternating rounds on the same
/// shape. The effect is the time without it over the time with it, minus one: positive where it pays. The spread
/// tells how far the pairs disagree; an effect within it is none. Where CUDA's matrix units leave a switch nothing
/// to do, both of a pair go without them: `chunked_scan` for `register_scan`, `matrix_attention` for `pack_heads`
/// and `coalesced_kv`, beside which K and V are also read alone, in the two ways that it chooses from. GPUs have a switch for each optimisation of their kernels, on CUDA also `graphs` and
/// `early_starts` (kernels that begin while the one before them runs). The CPU's are `threads` (one without it),
/// `vectors` (portable code without it), `quantized_activations` (f32 without it, as --precise) and `chunks` (16
/// prompt tokens at once without it).
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

/// Switches of CUDA's kernels that have something to do only without another one, and which.
const BESIDE: [(&str, &str); 3] = [
    ("register_scan", "chunked_scan"),
    ("coalesced_kv", "matrix_attention"),
    ("pack_heads", "matrix_attention"),
];

/// What both of a switch's pair do without.
fn beside(compute: &ComputeArgs, name: &str) -> Option<&'static str> {
    let on_cuda = matches!(compute.device, DeviceName::Cuda(_));
    BESIDE.iter().find(|(n, _)| *n == name && on_cuda).map(|(_, other)| *other)
}

/// The switches, by what both of a pair do without, each once and in the order in which they first occur.
fn grouped<'a>(
    compute: &ComputeArgs,
    wanted: &[&'a str],
) -> Vec<(Option<&'static str>, Vec<&'a str>)> {
    let mut groups: Vec<(Option<&'static str>, Vec<&'a str>)> = Vec::new();
    for name in wanted {
        let beside = beside(compute, name);
        match groups.iter_mut().find(|(other, _)| *other == beside) {
            Some((_, names)) => names.push(name),
            None => groups.push((beside, vec![name])),
        }
    }
    groups
}

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

/// The switch beside which K and V are read alone.
const READS: &str = "coalesced_kv";

/// What was measured, on what; and what kept the rest from being measured.
#[derive(Default)]
struct Results {
    all: Vec<Ablated>,
    device: String,
    failed: Option<anyhow::Error>,
}

/// Measures one group of switches after another. What comes of a group is its pairs and the device's name; a group that cannot be
/// measured ends the run, and what was measured before it stays.
fn groups<T>(
    groups: Vec<T>,
    mut measure: impl FnMut(T) -> anyhow::Result<Option<(Vec<Ablated>, String)>>,
) -> Results {
    let mut results = Results::default();
    for group in groups {
        match measure(group) {
            Ok(Some((pairs, device))) => {
                results.all.extend(pairs);
                results.device = device;
            }
            Ok(None) => break,
            Err(e) => {
                results.failed = Some(e);
                break;
            }
        }
    }
    results
}

/// Runs the command.
pub fn ablate(args: &AblateArgs) -> anyhow::Result<()> {
    let wanted: Vec<&str> = match args.switch.is_empty() {
        true => names(&args.compute),
        false => args.switch.iter().map(String::as_str).collect(),
    };
    wanted.iter().try_for_each(|name| without(&args.compute, name).map(drop))?;
    let cancel = cancel_on_interrupt()?;
    let opened = Opened::new(&args.model, &args.compute)?;
    let protocol = args.points.protocol(opened.model.config.max_position_embeddings)?;
    let mut told = Told { rounds: protocol.rounds, wanted: !args.json };
    let results =
        groups(grouped(&args.compute, &wanted), |(beside, names)| match cancel.is_cancelled() {
            true => Ok(None),
            false => group(args, &protocol, (beside, names), &mut told, &cancel).map(Some),
        });
    let Results { all, device, failed } = results;
    if all.is_empty()
        && let Some(e) = failed
    {
        return Err(e);
    }
    // What was measured is told first.
    let (source, device) = (opened.checkpoint.source(), &device);
    let mut out = Stdout::new();
    if args.json {
        let switches = ablate::json(&all);
        out.json(&json!({ "model": source, "device": device, "switches": switches }))?;
    } else {
        let title = format!("{source} on {device}: time without it over time with it");
        let mut tables = vec![ablate::table(&title, &all)];
        let reads: Vec<CacheReads> = all.iter().flat_map(|a| a.cache.clone()).collect();
        if !reads.is_empty() {
            tables.push(CacheReads::table(&reads));
        }
        print(&mut out, &tables)?;
        out.flush()?;
    }
    args.record.append("ablate", device, &ablate::figures(&all))?;
    match (cancel.is_cancelled(), failed) {
        (true, _) => Err(Interrupted.into()),
        (false, Some(e)) => Err(e),
        (false, None) => Ok(()),
    }
}

/// The pairs of switches of which both do without the same, and the device's name.
fn group<'a>(
    args: &'a AblateArgs,
    protocol: &Protocol,
    (beside, names): (Option<&'static str>, Vec<&'a str>),
    told: &mut Told,
    cancel: &'a Cancel,
) -> anyhow::Result<(Vec<Ablated>, String)> {
    let (title, compute) = match beside {
        Some(other) => (format!("without {other}"), without(&args.compute, other)?),
        None => ("all on".to_owned(), args.compute.clone()),
    };
    let mut base = open(args, &title, &compute, cancel)?;
    let beside: Vec<String> = compute.without.clone();
    let switches = names.into_iter().map(|name| switch(args, &compute, name, &beside, cancel));
    let switches = switches.collect::<Result<_, Failure>>()?;
    let mut pairs = ablate::ablate(&mut base.engine, switches, protocol, told);
    if !args.compute.on_host() {
        read_alone(&mut base.engine, &mut pairs, cancel);
    }
    Ok((pairs, base.device))
}

/// Reads K and V alone at each length of the pair that is about how they are read.
fn read_alone(engine: &mut LilyEngine, pairs: &mut [Ablated], cancel: &Cancel) {
    for Ablated { measured, cache, .. } in
        pairs.iter_mut().filter(|a| a.measured.engines[1] == READS)
    {
        for point in &measured.points {
            if let (Point::Decode { context, .. }, false) = (point.point, cancel.is_cancelled()) {
                cache.push(engine.cache_reads(context));
            }
        }
    }
}

/// One switch, left out of what its base does.
fn switch<'a>(
    args: &'a AblateArgs,
    base: &ComputeArgs,
    name: &'a str,
    beside: &[String],
    cancel: &'a Cancel,
) -> Result<Switch<'a>, Failure> {
    let compute = without(base, name)?;
    let opens = move || -> Result<Box<dyn Engine>, Trouble> {
        let loaded = open(args, name, &compute, cancel);
        let failed = |error: anyhow::Error| Trouble::Failed(format!("{error:#}"));
        Ok(Box::new(loaded.map_err(failed)?.engine))
    };
    Ok(Switch { name: name.to_owned(), beside: beside.to_vec(), without: Box::new(opens) })
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
    use lily_bench::Measured;

    use super::*;

    #[test]
    fn both_of_a_pair_go_without_what_leaves_a_switch_nothing_to_do() {
        let wanted = ["pack_heads", "fuse_norm", "register_scan", "coalesced_kv", "concurrent"];
        let cuda = ComputeArgs::on(DeviceName::Cuda(0));
        let groups = grouped(&cuda, &wanted);
        assert_eq!(groups.len(), 3);
        assert_eq!(groups[0], (Some("matrix_attention"), vec!["pack_heads", "coalesced_kv"]));
        assert_eq!(groups[1], (None, vec!["fuse_norm", "concurrent"]));
        assert_eq!(groups[2], (Some("chunked_scan"), vec!["register_scan"]));
        // Metal has none of those matrix units.
        assert_eq!(
            grouped(&ComputeArgs::on(DeviceName::Metal), &wanted),
            [(None, wanted.to_vec())]
        );
        let names = Switches::names(DeviceName::Cuda(0));
        assert!(BESIDE.iter().all(|(a, b)| names.contains(a) && names.contains(b)));
    }

    #[test]
    fn what_was_measured_stays_where_a_later_base_fails() {
        let pair = |name: &str| Ablated {
            beside: Vec::new(),
            measured: Measured {
                engines: vec!["all on".into(), name.into()],
                facts: Vec::new(),
                points: Vec::new(),
            },
            cache: Vec::new(),
        };
        let run = |fails: &str| {
            let (mut begun, fails) = (Vec::new(), fails.to_owned());
            let results = groups(vec!["a", "b", "c"], |name| {
                begun.push(name);
                match name == fails {
                    true => Err(anyhow::anyhow!("{name}: no memory on the device")),
                    false => Ok(Some((vec![pair(name)], "gpu".to_owned()))),
                }
            });
            (results, begun)
        };
        let names =
            |r: &Results| r.all.iter().map(|a| a.measured.engines[1].clone()).collect::<String>();
        let (results, begun) = run("b");
        assert_eq!((names(&results), results.device.as_str()), ("a".into(), "gpu"));
        assert_eq!(begun, ["a", "b"], "nothing else begins");
        let why = format!("{:#}", results.failed.unwrap());
        assert_eq!(why, "b: no memory on the device");
        assert_eq!(why.lines().count(), 1);
        let (results, _) = run("a");
        assert!(results.all.is_empty() && results.failed.is_some());
        let (results, _) = run("");
        assert_eq!((names(&results), results.failed.is_none()), ("abc".into(), true));
        // An interruption is no failure.
        let mut left = 1;
        let results = groups(vec!["a", "b"], |name| {
            left -= 1;
            Ok((left >= 0).then(|| (vec![pair(name)], "gpu".to_owned())))
        });
        assert_eq!((names(&results), results.failed.is_none()), ("a".into(), true));
    }

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
