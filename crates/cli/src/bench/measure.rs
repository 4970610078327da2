//! `lily bench run` and `lily bench compare`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use lily_bench::floors::Limits;
use lily_bench::machine::cpu_limits;
use lily_bench::peers::{LlamaBench, LlamaOptions, MlxLm, PeerSpec, sha256};
use lily_bench::report::{Floors, Table, as_json, tables};
use lily_bench::results::{Figure, figures};
use lily_bench::roofline::by_operation as by_operation_of;
use lily_bench::snapshots::SnapshotTimes;
use lily_bench::{
    Engine, LilyEngine, Measured, Missing, Point, SystemClock, Trouble, run as run_protocol, timed,
};
use lily_cpu::Isa;
use lily_device::{Measure, OperationTimes};
use lily_engine::{Cancel, Machine};
use lily_gpu::Profile;
use serde_json::{Value, json};

use super::load::{Loaded, Memory, load};
use super::options::{OutArgs, PointArgs, Told, draw, print};
use crate::failure::Interrupted;
use crate::interrupt::cancel_on_interrupt;
use crate::model::Opened;
use crate::options::{ComputeArgs, ModelArgs};
use crate::output::Stdout;
use crate::resolve::{Source, resolve};

/// Measure prefill and decode over lengths of 256 to 128K tokens.
///
/// Prompts are whole prompts from an empty state; contexts are filled before decoding is timed, so the two never
/// mix. Also shown: start-up, memory, and each figure as a fraction of what the machine's memory and matrix units,
/// measured in the same run, would allow.
#[derive(Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub points: PointArgs,
    #[command(flatten)]
    pub out: OutArgs,
    #[command(flatten)]
    pub compute: ComputeArgs,
}

/// Measure Lily beside other engines, in alternating rounds.
///
/// In each round every engine measures the same shape once, in one order and then in the reverse; each round gives
/// one ratio. A peer that is missing or fails becomes a row that says so. llama.cpp is measured by its own
/// llama-bench, with flash attention and without, the file mapped and (where memory allows) read, whichever is
/// fastest; mlx-lm in one warm process that reads the
/// same folder as Lily, whose SHA-256 both print.
#[derive(Args)]
pub struct CompareArgs {
    #[command(flatten)]
    pub run: RunArgs,

    /// An engine to compare with: llama.cpp=DIR (its build) or mlx-lm=PYTHON (an interpreter that has it). May be
    /// given several times.
    #[arg(long, value_name = "NAME=PATH", required = true, help_heading = "Peers")]
    pub peer: Vec<PeerSpec>,

    /// The file of the same shape for llama.cpp; `lily bench synth --gguf` writes one.
    #[arg(long, value_name = "FILE", default_value = "model.gguf", help_heading = "Peers")]
    pub gguf: PathBuf,

    /// More arguments for llama-bench, such as "-ngl 99 -b 2048 -ub 2048". With "-fa 1" or "-fa 0" flash attention is
    /// not varied, which halves the time.
    #[arg(
        long,
        value_name = "ARGS",
        default_value = "",
        allow_hyphen_values = true,
        help_heading = "Peers"
    )]
    pub llama_args: String,

    /// Seconds that a peer may take for one answer.
    #[arg(long, value_name = "S", default_value_t = 3600, value_parser = clap::value_parser!(u64).range(1..), help_heading = "Peers")]
    pub peer_timeout: u64,
}

/// Runs `lily bench run`.
pub fn run(args: &RunArgs) -> anyhow::Result<()> {
    measure("run", args, None)
}

/// Runs `lily bench compare`.
pub fn compare(args: &CompareArgs) -> anyhow::Result<()> {
    measure("compare", &args.run, Some(args))
}

fn measure(command: &str, args: &RunArgs, peers: Option<&CompareArgs>) -> anyhow::Result<()> {
    let (opened, open) = timed(&SystemClock::new(), || Opened::new(&args.model, &args.compute));
    let opened = opened?;
    let protocol = args.points.protocol(opened.model.config.max_position_embeddings)?;
    let cancel = cancel_on_interrupt()?;
    let device = || Ok(args.compute.device()?);
    let shape = (&protocol, args.compute.chunk());
    let Loaded { mut engine, device, startup } =
        load(&opened, open, device, "lily", shape, &cancel)?;
    let mut others = match peers {
        Some(compare) => {
            let (peers, checksums) = open_peers(compare, &opened, &cancel);
            engine.add_facts(checksums);
            peers
        }
        None => Vec::new(),
    };
    let mut told = Told { rounds: protocol.rounds, wanted: !args.out.json };
    let measured = {
        let mut engines: Vec<&mut dyn Engine> = vec![&mut engine];
        engines.extend(others.iter_mut().map(|e| &mut **e as &mut dyn Engine));
        run_protocol(&mut engines, &protocol, &mut told)
    };

    let operations = match args.out.by_op && !measured.interrupted() {
        true => by_operation(&mut engine, &measured),
        false => Vec::new(),
    };
    let snapshots = match args.out.snapshots && !measured.interrupted() {
        true => snapshots(&mut engine, &measured, protocol.rounds),
        false => Vec::new(),
    };
    // Before the machine's limits are measured, which takes memory of its own.
    let memory = Memory::of(&engine);
    let wanted = !args.out.no_floors && !measured.interrupted();
    let floors = wanted
        .then(|| Floors::new(&opened.model.plan, limits(&args.compute, &mut engine), &measured));
    let mut out = Stdout::new();
    if args.out.json {
        out.json(&json!({
            "model": opened.checkpoint.source(),
            "device": device,
            "machine": super::record::machine(&device),
            "startup": startup.json(),
            "memory": memory.json(),
            "measured": as_json(&measured, floors.as_ref()),
            "operations": operations.iter().map(|o| &o.1).collect::<Vec<_>>(),
            "snapshots": snapshots.iter().map(SnapshotTimes::json).collect::<Vec<_>>(),
        }))?;
    } else {
        out.line(&format!("{} on {device}", opened.checkpoint.source()))?;
        out.line(&startup.text())?;
        out.text(&memory.text())?;
        print(&mut out, &tables(&measured, floors.as_ref()))?;
        for (table, ..) in &operations {
            print(&mut out, std::slice::from_ref(table))?;
        }
        if !snapshots.is_empty() {
            print(&mut out, &[SnapshotTimes::table(&snapshots)])?;
        }
        out.text(&about(&measured, floors.as_ref()))?;
        out.flush()?;
    }
    draw(&args.out, &measured, floors.as_ref(), &device)?;
    let mut all = figures(&measured);
    all.extend(operations.into_iter().flat_map(|(_, _, figures)| figures));
    all.extend(snapshots.iter().flat_map(SnapshotTimes::figures));
    args.out.record.append(command, &device, &all)?;
    match measured.interrupted() {
        true => Err(Interrupted.into()),
        false => Ok(()),
    }
}

/// Decoded tokens whose operations are measured.
const BY_OP_TOKENS: usize = 8;

/// Seconds by operation at each length: tables, JSON, figures. A point in trouble is a table that says why.
fn by_operation(engine: &mut LilyEngine, measured: &Measured) -> Vec<(Table, Value, Vec<Figure>)> {
    let short = |point: Point| match point {
        Point::Decode { context, tokens } => {
            Point::Decode { context, tokens: tokens.min(BY_OP_TOKENS) }
        }
        point => point,
    };
    let of = |point: Point| {
        let times = engine.operations(point, Measure::Operations).unwrap_or_else(|trouble| {
            OperationTimes { trouble: Some(trouble.to_string()), ..OperationTimes::default() }
        });
        by_operation_of(point, &times)
    };
    measured.points.iter().map(|p| short(p.point)).map(of).collect()
}

/// A snapshot of each context that was measured.
fn snapshots(engine: &mut LilyEngine, measured: &Measured, rounds: usize) -> Vec<SnapshotTimes> {
    let contexts = measured.points.iter().filter_map(|p| match p.point {
        Point::Decode { context, .. } => Some(context),
        Point::Prefill { .. } => None,
    });
    contexts.map(|context| engine.snapshots(context, rounds)).collect()
}

/// What the engines were, and what the floors follow from.
fn about(measured: &Measured, floors: Option<&Floors>) -> String {
    let mut text = String::new();
    for (name, facts) in measured.engines.iter().zip(&measured.facts) {
        text.push_str(&format!("\n{name}\n"));
        for (what, value) in facts {
            text.push_str(&format!("  {what}: {value}\n"));
        }
    }
    if let Some(Limits { bytes_per_second, macs_per_second, how }) = floors.map(|f| &f.limits) {
        text.push_str(&format!(
            "\nlimits: {:.1} GB/s, {:.3} T multiply-adds/s ({how})\n",
            bytes_per_second / 1e9,
            macs_per_second / 1e12
        ));
    }
    text
}

/// Weights of which a device's caches hold next to nothing.
const COLD_WEIGHTS: u64 = 1 << 30;

/// What the machine can do: measured now on the CPU. Of a GPU how fast it reads is measured now, where there are enough
/// weights to read; the rest is known.
fn limits(compute: &ComputeArgs, engine: &mut LilyEngine) -> Limits {
    if compute.on_host() {
        let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = compute.threads.unwrap_or_else(cores);
        let isa = compute.isa.unwrap_or_else(Isa::detect);
        return cpu_limits(threads, isa, Machine::detect().available, &SystemClock::new());
    }
    let budget = engine.inner().budget();
    let enough = budget.weights.max(budget.copies) >= COLD_WEIGHTS;
    let measured = enough.then(|| engine.read_rate()).flatten();
    let known = Profile::named("h200");
    let of_known = |what: fn(Profile) -> f64| known.clone().map_or(f64::INFINITY, what);
    let reading = match measured {
        Some(_) => "reads measured in this run: a long read of the weights",
        None => "reads as known of an NVIDIA H200, not measured in this run",
    };
    Limits {
        bytes_per_second: measured.unwrap_or_else(|| of_known(|p| p.bandwidth)),
        macs_per_second: of_known(|p| p.macs.unwrap_or(f64::INFINITY)),
        how: format!("{reading}; bf16 products as known of an NVIDIA H200"),
    }
}

type Facts = Vec<(String, String)>;

/// The peers, and the checksums of files that one of them reads too. A peer that cannot be opened stays in the
/// table and says why.
fn open_peers(
    args: &CompareArgs,
    opened: &Opened,
    cancel: &Cancel,
) -> (Vec<Box<dyn Engine>>, Facts) {
    let timeout = Duration::from_secs(args.peer_timeout);
    let mut checksums = Facts::new();
    let mut open = |spec: &PeerSpec| -> Box<dyn Engine> {
        match spec {
            PeerSpec::LlamaCpp(dir) => {
                let compute = &args.run.compute;
                let options = LlamaOptions {
                    dir: dir.clone(),
                    model: args.gguf.clone(),
                    threads: compute.threads.filter(|_| compute.on_host()),
                    args: args.llama_args.split_whitespace().map(str::to_owned).collect(),
                    // Weights that lie on a GPU are read no faster for it.
                    unmapped: compute.on_host() && room_for_a_copy(&args.gguf),
                    timeout,
                };
                or_missing("llama.cpp", LlamaBench::new(options, cancel.clone()))
            }
            PeerSpec::MlxLm(python) => {
                let mlx = open_mlx(args, python, opened, timeout, cancel);
                let mlx = mlx.map(|(mlx, own)| {
                    checksums = own;
                    mlx
                });
                or_missing("mlx-lm", mlx)
            }
        }
    };
    let peers = args.peer.iter().map(&mut open).collect();
    (peers, checksums)
}

/// Whether a file fits into memory once more beside all that is mapped.
fn room_for_a_copy(file: &std::path::Path) -> bool {
    let bytes = std::fs::metadata(file).map_or(u64::MAX, |m| m.len());
    Machine::detect().available.is_some_and(|available| bytes <= available / 4)
}

fn or_missing<E: Engine + 'static>(name: &str, engine: Result<E, Trouble>) -> Box<dyn Engine> {
    match engine {
        Ok(engine) => Box::new(engine),
        Err(trouble) => Box::new(Missing::new(name, trouble)),
    }
}

fn open_mlx(
    args: &CompareArgs,
    python: &std::path::Path,
    opened: &Opened,
    timeout: Duration,
    cancel: &Cancel,
) -> Result<(MlxLm, Facts), Trouble> {
    let folder = match resolve(args.run.model.model.as_deref()) {
        Ok(Source::Folder(path)) => path,
        _ => {
            let what = "mlx-lm reads a folder; name one with --model";
            return Err(Trouble::Missing(what.into()));
        }
    };
    let mlx = MlxLm::start(python, &folder, timeout, cancel.clone())?;
    // Both must have read the same bytes, or the comparison is of two models.
    let mut checksums = Facts::new();
    for shard in opened.checkpoint.shards() {
        let own = sha256(&folder.join(shard.name()))
            .map_err(|e| Trouble::Failed(format!("{}: {e}", shard.name())))?;
        let theirs = mlx.ready().files.iter().find(|f| f.name == shard.name());
        match theirs {
            Some(file) if file.sha256 == own => {
                checksums.push((format!("sha256 of {}", shard.name()), own));
            }
            Some(file) => {
                let what = format!("{}: SHA-256 {} here, {own} in Lily", file.name, file.sha256);
                return Err(Trouble::Failed(what));
            }
            None => return Err(Trouble::Failed(format!("it did not read {}", shard.name()))),
        }
    }
    Ok((mlx, checksums))
}
