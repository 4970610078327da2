//! The `lily` program: runs, scores and inspects models on this machine.

#![forbid(unsafe_code)]

mod answer;
mod bench;
mod failure;
mod inspect;
mod interrupt;
mod licenses;
mod model;
mod options;
mod output;
mod report;
mod run;
mod score;
mod show;
mod token_ids;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Runs Qwen3.5/3.6 mixture-of-experts models on this machine.
///
/// Without --model, a small built-in demonstration model answers: `lily run "What is the capital of France?"`.
///
/// Results go to stdout, everything else to stderr. Exit codes: 0 success, 1 error, 2 wrong usage,
/// 130 ended by Ctrl-C.
#[derive(Parser)]
#[command(name = "lily", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::RunArgs),
    Score(score::ScoreArgs),
    Inspect(inspect::InspectArgs),
    /// Make what measurements need.
    Bench {
        #[command(subcommand)]
        command: bench::BenchCommand,
    },
    /// Print the licence of Lily and the notices of the built-in model.
    Licenses,
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Score(args) => score::score(&args),
        Command::Inspect(args) => inspect::inspect(&args),
        Command::Bench { command } => bench::bench(&command),
        Command::Licenses => licenses::licenses(),
    };
    failure::exit(result)
}
