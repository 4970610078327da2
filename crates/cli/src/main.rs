//! The `lily` program: runs, scores, inspects and downloads models on this machine.

#![forbid(unsafe_code)]

mod answer;
mod bench;
mod chat;
mod doctor;
mod failure;
mod fit;
mod inspect;
mod interrupt;
mod licenses;
mod logprobs;
mod model;
mod models;
mod options;
mod output;
mod plan;
mod pull;
mod report;
mod resolve;
mod run;
mod sampling;
mod score;
mod serve;
mod shell;
mod show;
mod token_ids;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

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
    Chat(chat::ChatArgs),
    Serve(serve::ServeArgs),
    Pull(pull::PullArgs),
    Models(models::ModelsArgs),
    Doctor(doctor::DoctorArgs),
    Score(score::ScoreArgs),
    Inspect(inspect::InspectArgs),
    Plan(plan::PlanArgs),
    /// Measure this machine: speed, comparisons with other engines, numerics.
    Bench {
        #[command(subcommand)]
        command: bench::BenchCommand,
    },
    /// Print the licence of Lily and the notices of the built-in model.
    Licenses,
    Completions(shell::CompletionsArgs),
    Man(shell::ManArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Chat(args) => chat::chat(&args),
        Command::Serve(args) => serve::serve(&args),
        Command::Pull(args) => pull::pull(&args),
        Command::Models(args) => models::models(&args),
        Command::Doctor(args) => doctor::doctor(&args),
        Command::Score(args) => score::score(&args),
        Command::Inspect(args) => inspect::inspect(&args),
        Command::Plan(args) => plan::plan(&args),
        Command::Bench { command } => bench::bench(&command),
        Command::Licenses => licenses::licenses(),
        Command::Completions(args) => shell::completions(&args, Cli::command()),
        Command::Man(args) => shell::man(&args, Cli::command()),
    };
    failure::exit(result)
}
