//! `lily bench`.

use std::path::PathBuf;
use std::time::Instant;

use clap::{Args, Subcommand};
use lily_bench::synth::{Shape, Synth};

use crate::interrupt::on_interrupt;
use crate::output::{Progress, Stdout, bytes, grouped, note};

#[derive(Subcommand)]
pub enum BenchCommand {
    Synth(SynthArgs),
}

/// Write a checkpoint of the shape of Qwen3.6-35B-A3B with random weights.
///
/// It takes the time and memory of the real one and writes noise: for measuring. The layout is that of MLX
/// (4 bits in groups of 64; routers 8 bits), in files of at most 5 GiB. The same seed gives the same bytes.
/// There is no tokenizer: run it with --token-ids. All 40 layers take 19.5 GB, each layer 0.47 GB, embedding
/// and output matrix 0.57 GB.
#[derive(Args)]
pub struct SynthArgs {
    /// Layers, 1 to 1024; the real model has 40. Each fourth one has attention.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub layers: u16,

    /// How uneven the load of the experts is, 0 to 10: the share of tokens that choose the expert of rank r is
    /// proportional to r^-X, at most 0.4. 0 is even. It is made by longer router rows, so which tokens choose an
    /// expert stays random; ranks differ from layer to layer.
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub router_skew: f64,

    /// Write config.json and generation_config.json only: enough for `lily inspect`.
    #[arg(long)]
    pub config_only: bool,

    /// Seed of all values.
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub seed: u64,

    /// Folder to write to: a new or an empty one.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
}

/// Runs the command.
pub fn bench(command: &BenchCommand) -> anyhow::Result<()> {
    match command {
        BenchCommand::Synth(args) => synth(args),
    }
}

fn synth(args: &SynthArgs) -> anyhow::Result<()> {
    let synth = Synth {
        seed: args.seed,
        router_skew: args.router_skew,
        ..Synth::new(Shape::qwen3_6_35b_a3b(args.layers.into()))
    };
    let mut out = Stdout::new();
    if args.config_only {
        synth.write_config(&args.out)?;
        out.line(&format!("{}: config.json, generation_config.json", args.out.display()))?;
        return Ok(out.flush()?);
    }
    let folder = args.out.display().to_string();
    on_interrupt(move || {
        note(&format!(
            "\ninterrupted: what is in {folder} is incomplete\n hint: delete it and run the command again"
        ));
        std::process::exit(130);
    })?;
    let mut progress = Progress::new("writing:", false);
    let start = Instant::now();
    let written = synth.write(&args.out, |done, total| progress.bytes(done, total))?;
    progress.clear();
    let seconds = start.elapsed().as_secs_f64();
    out.line(&format!(
        "{}: {} tensors, {} bytes in {} {}, {seconds:.1} s, {}/s",
        args.out.display(),
        grouped(written.tensors as u64),
        grouped(written.bytes),
        written.files.len(),
        if written.files.len() == 1 { "file" } else { "files" },
        bytes((written.bytes as f64 / seconds.max(1e-9)) as u64),
    ))?;
    Ok(out.flush()?)
}
