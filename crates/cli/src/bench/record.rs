//! The record of measurements, and what stands in it about this machine.

use std::path::PathBuf;
use std::process::Command;

use clap::Args;
use lily_bench::results::{Figure, Run, today};

use crate::doctor::system::processor;
use crate::failure::Failure;

/// Where figures are kept.
#[derive(Args, Clone, Debug)]
pub struct RecordArgs {
    /// Append the figures with their rounds to COMMAND.tsv in DIR (bench/results if none is named).
    #[arg(long, value_name = "DIR", num_args = 0..=1, default_missing_value = "bench/results", help_heading = "Record")]
    pub record: Option<PathBuf>,

    /// Why it was measured, or why a change is kept.
    #[arg(long, value_name = "TEXT", default_value = "measured", help_heading = "Record")]
    pub why: String,

    /// Record it as dropped: the figures do not stand, or the change that they are about goes.
    #[arg(long, help_heading = "Record")]
    pub dropped: bool,

    /// The machine in words. Default: what the system tells.
    #[arg(long, value_name = "TEXT", help_heading = "Record")]
    pub machine: Option<String>,
}

impl RecordArgs {
    /// Appends figures, if they are to be kept.
    pub fn append(&self, command: &str, device: &str, figures: &[Figure]) -> Result<(), Failure> {
        let Some(dir) = &self.record else { return Ok(()) };
        let run = Run {
            date: today(),
            commit: commit(),
            machine: self.machine.clone().unwrap_or_else(|| machine(device)),
            command: command_line(),
            kept: !self.dropped,
            why: self.why.clone(),
        };
        let path = dir.join(format!("{command}.tsv"));
        run.append(&path, figures).map_err(|error| {
            let what = format!("{}: cannot be appended to: {error}", path.display());
            Failure::new(what, "name a folder that can be written to with --record DIR")
        })
    }
}

/// The machine, in a few words.
pub fn machine(device: &str) -> String {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let processor = processor().unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    let mut text = format!("{processor}, {cores} cores, {device}");
    if let Some(load) = load() {
        text.push_str(&format!(", load {load}"));
    }
    text
}

/// What ran in the last minute: figures of a busy machine are not those of a quiet one.
fn load() -> Option<String> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    Some(text.split_whitespace().next()?.to_owned())
}

/// The commit of the working directory, where the program is most likely built from.
fn commit() -> String {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_owned())
    };
    match git(&["rev-parse", "--short", "HEAD"]) {
        Some(commit) => {
            let changed = git(&["status", "--porcelain", "--untracked-files=no"]);
            let changed = changed.is_none_or(|text| !text.is_empty());
            format!("{commit}{}", if changed { "+" } else { "" })
        }
        None => concat!("version ", env!("CARGO_PKG_VERSION")).to_owned(),
    }
}

fn command_line() -> String {
    let quoted = |arg: String| match arg.chars().any(char::is_whitespace) || arg.is_empty() {
        true => format!("'{arg}'"),
        false => arg,
    };
    let args = std::env::args_os().skip(1).map(|a| quoted(a.to_string_lossy().into_owned()));
    std::iter::once("lily".to_owned()).chain(args).collect::<Vec<_>>().join(" ")
}
