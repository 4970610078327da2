//! `lily bench roofline`: kernels alone.

use clap::Args;
use lily_bench::roofline::{CpuRoofline, Roofline, Sizes, device_rows};
use lily_bench::{Point, Protocol, SystemClock};
use lily_cpu::Isa;
use lily_cpu::pool::Pool;
use lily_device::Measure;
use lily_engine::{Cancel, Machine};

use super::load::{Loaded, load};
use super::options::print;
use super::record::RecordArgs;
use crate::failure::{Failure, Interrupted};
use crate::interrupt::cancel_on_interrupt;
use crate::model::Opened;
use crate::options::{ComputeArgs, ModelArgs, count};
use crate::output::{Progress, Stdout};

/// Measure kernels alone, with weights that no cache holds.
///
/// Beside each kernel stand its read-only twin, which reads the same bytes straight through, and a variant that
/// divides them as the kernel does but computes nothing; and what part of the least time, by the read and matrix rates
/// measured in the same run, it reaches. The CPU's kernels have the shapes of Qwen3.6-35B-A3B and take no model. A
/// GPU's are those of real steps of --model, all layers' launches of a kernel one after another; its matrix rate is
/// known, not measured. Beside the ten costliest of a step stands what they take inside it: how much shorter the step
/// is without their launches.
#[derive(Args)]
pub struct RooflineArgs {
    #[command(flatten)]
    pub model: ModelArgs,

    /// Tokens of the chunk of a prompt. Default: 512 on the CPU, 4096 on a GPU.
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Measuring")]
    pub prefill: Option<usize>,

    /// Context of the decode step, on a GPU.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = count, help_heading = "Measuring")]
    pub decode: usize,

    /// Measurements of each kernel on the CPU; the median counts.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = count, help_heading = "Measuring")]
    pub rounds: usize,

    /// MiB of weights that a round goes through on the CPU; at least what the largest matrix takes.
    #[arg(long, value_name = "MIB", default_value_t = 640, value_parser = count, help_heading = "Measuring")]
    pub memory: usize,

    /// Print one JSON object with every round.
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub record: RecordArgs,

    #[command(flatten)]
    pub compute: ComputeArgs,
}

impl RooflineArgs {
    fn prefill(&self) -> usize {
        self.prefill.unwrap_or(if self.compute.on_host() { 512 } else { 4096 })
    }
}

/// Runs the command.
pub fn roofline(args: &RooflineArgs) -> anyhow::Result<()> {
    let cancel = cancel_on_interrupt()?;
    let roofline = match args.compute.on_host() {
        true => on_cpu(args, &cancel),
        false => on_device(args, &cancel)?,
    };
    let mut out = Stdout::new();
    match args.json {
        true => out.json(&roofline.json())?,
        false => print(&mut out, &[roofline.table()])?,
    }
    out.flush()?;
    args.record.append("roofline", &roofline.device, &roofline.figures())?;
    match cancel.is_cancelled() {
        true => Err(Interrupted.into()),
        false => Ok(()),
    }
}

fn on_cpu(args: &RooflineArgs, cancel: &Cancel) -> Roofline {
    let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
    let pool = Pool::new(args.compute.threads.unwrap_or_else(cores));
    let sizes = Sizes { cold: args.memory << 20, ..Sizes::qwen3_6_35b_a3b(args.prefill()) };
    let clock = SystemClock::new();
    let cpu = CpuRoofline {
        pool: &pool,
        isa: args.compute.isa.unwrap_or_else(Isa::detect),
        sizes,
        rounds: args.rounds,
        clock: &clock,
        available: Machine::detect().available,
    };
    let mut progress = Progress::new("measuring:", args.json);
    let roofline = cpu.run(|what| {
        progress.show(|| what.to_owned());
        !cancel.is_cancelled()
    });
    progress.clear();
    roofline
}

fn on_device(args: &RooflineArgs, cancel: &Cancel) -> anyhow::Result<Roofline> {
    let opened = Opened::new(&args.model, &args.compute)?;
    let protocol = Protocol {
        prefill: vec![args.prefill()],
        decode: vec![args.decode],
        decode_tokens: 1,
        warm_up: 1,
        rounds: 1,
    };
    opened.check_context(protocol.context())?;
    let device = || Ok(args.compute.device()?);
    let shape = (&protocol, args.compute.chunk());
    let Loaded { mut engine, device, .. } = load(&opened, 0.0, device, "lily", shape, cancel)?;
    let mut roofline = Roofline {
        device: format!("{device}, {}", opened.checkpoint.source()),
        how: "measured in this run: a long read of the weights".into(),
        ..Roofline::default()
    };
    let mut matrix_rate = None;
    for point in [
        Point::Prefill { tokens: args.prefill() },
        Point::Decode { context: args.decode, tokens: 1 },
    ] {
        let times = engine.operations(point, Measure::Twins)?;
        if let Some(why) = &times.trouble {
            let what = format!("{point}: the kernels could not be measured: {why}");
            return Err(Failure::new(what, "measure a shorter chunk with --prefill").into());
        }
        roofline.rows.extend(device_rows(&point.to_string(), &times));
        roofline.bytes_per_second = times.read_rate.unwrap_or(roofline.bytes_per_second);
        matrix_rate = times.matrix_rate;
    }
    roofline.how.push_str(&match matrix_rate {
        Some(rate) => {
            format!("; products: {:.1} T multiply-adds/s in bf16, as known of it", rate / 1e12)
        }
        None => "; how fast it multiplies is not known: the limit is that of the bytes".into(),
    });
    Ok(roofline)
}
