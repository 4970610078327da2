//! `lily bench`.

pub mod ablate;
mod load;
mod measure;
mod options;
mod record;
mod roofline;
mod score;

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::{Args, Subcommand};
use lily_bench::synth::{Shape, Synth, write_gguf};

use crate::interrupt::on_interrupt;
use crate::output::{Progress, Stdout, bytes, grouped, note};

#[derive(Subcommand)]
pub enum BenchCommand {
    Run(measure::RunArgs),
    Compare(measure::CompareArgs),
    Score(score::ScoreArgs),
    Ablate(ablate::AblateArgs),
    Roofline(roofline::RooflineArgs),
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
    #[arg(long, value_name = "DIR", required_unless_present = "gguf")]
    pub out: Option<PathBuf>,

    /// Write the same shape for llama.cpp too, or alone without --out: a new GGUF file, Q4_K, of about the same
    /// size. Its values are others.
    #[arg(long, value_name = "FILE")]
    pub gguf: Option<PathBuf>,
}

/// Runs the command.
pub fn bench(command: &BenchCommand) -> anyhow::Result<()> {
    match command {
        BenchCommand::Run(args) => measure::run(args),
        BenchCommand::Compare(args) => measure::compare(args),
        BenchCommand::Score(args) => score::score(args),
        BenchCommand::Ablate(args) => ablate::ablate(args),
        BenchCommand::Roofline(args) => roofline::roofline(args),
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
    if let (true, Some(folder)) = (args.config_only, &args.out) {
        synth.write_config(folder)?;
        out.line(&format!("{}: config.json, generation_config.json", folder.display()))?;
        return Ok(out.flush()?);
    }
    let places = [&args.out, &args.gguf].into_iter().flatten().map(|p| p.display().to_string());
    let places: Vec<String> = places.collect();
    on_interrupt(move || {
        let places = places.join(", ");
        note(&format!(
            "\ninterrupted: what is in {places} is incomplete\n hint: delete it and run the command again"
        ));
        std::process::exit(130);
    })?;
    if let Some(folder) = &args.out {
        let mut progress = Progress::new("writing:", false);
        let start = Instant::now();
        let written = synth.write(folder, |done, total| progress.bytes(done, total))?;
        progress.clear();
        let files = written.files.len();
        let files = format!("{files} {}", if files == 1 { "file" } else { "files" });
        out.line(&told(folder, written.tensors, written.bytes, &files, start))?;
    }
    if let Some(file) = &args.gguf {
        let mut progress = Progress::new("writing:", false);
        let start = Instant::now();
        let progressed = |done, total| progress.bytes(done, total);
        let written = write_gguf(&synth.shape, args.seed, file, progressed)?;
        progress.clear();
        out.line(&told(file, written.tensors, written.bytes, "GGUF", start))?;
    }
    Ok(out.flush()?)
}

fn told(place: &Path, tensors: usize, written: u64, form: &str, start: Instant) -> String {
    let seconds = start.elapsed().as_secs_f64();
    format!(
        "{}: {} tensors, {} bytes in {form}, {seconds:.1} s, {}/s",
        place.display(),
        grouped(tensors as u64),
        grouped(written),
        bytes((written as f64 / seconds.max(1e-9)) as u64),
    )
}
