//! `lily pull`: a model from the hub.

use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use lily_hub::{Event, Hub, HubError, HubOptions, Spec};

use crate::interrupt::on_interrupt;
use crate::output::{Stdout, bytes, note, note_dimmed, styles_wanted};
use crate::resolve::{cache, hub_failure};

/// Download a model into the Hugging Face cache.
///
/// Only what a checkpoint needs is fetched: configuration, template, tokenizer and weights as safetensors.
/// Files that are there are not fetched again, and what broke off goes on where it ended, at the next start as
/// well. Every file is compared with its published checksum before it gets its name.
///
/// HF_HUB_CACHE or HF_HOME name the cache folder (otherwise ~/.cache/huggingface/hub), HF_ENDPOINT a mirror in
/// place of huggingface.co, HTTPS_PROXY a proxy. HF_TOKEN is sent for models that need a login.
#[derive(Args)]
pub struct PullArgs {
    /// The model, and a branch, tag or commit of it: ORG/NAME or ORG/NAME@REVISION.
    #[arg(value_name = "MODEL", value_parser = spec)]
    pub model: Spec,

    /// Nothing on stderr but errors.
    #[arg(short, long)]
    pub quiet: bool,

    /// Print one JSON object: model, path, commit, files, bytes, downloaded.
    #[arg(long)]
    pub json: bool,
}

fn spec(text: &str) -> Result<Spec, String> {
    text.parse().map_err(|error: HubError| format!("{error}; {}", error.hint()))
}

/// Runs the command.
pub fn pull(args: &PullArgs) -> anyhow::Result<()> {
    let cache = cache()?;
    let options = HubOptions::from_env(|name| std::env::var_os(name));
    let hub = Hub::new(options).map_err(|error| hub_failure(&error))?;
    on_interrupt(|| {
        note("\ninterrupted; what has arrived is kept, and the same command goes on from there");
        std::process::exit(130);
    })?;
    let mut bars = Bars::new(args.quiet);
    let pulled = hub.pull(&cache, &args.model, |event| bars.show(event));
    bars.clear();
    let pulled = pulled.map_err(|error| hub_failure(&error))?;
    let mut out = Stdout::new();
    if args.json {
        return Ok(out.json(&serde_json::json!({
            "model": args.model.to_string(),
            "path": pulled.path,
            "commit": pulled.commit,
            "files": pulled.files,
            "bytes": pulled.bytes,
            "downloaded": pulled.downloaded,
        }))?);
    }
    if !args.quiet {
        note_dimmed(&format!(
            "{}: {} files of {}, {} of them downloaded",
            args.model,
            pulled.files,
            bytes(pulled.bytes),
            bytes(pulled.downloaded),
        ));
    }
    out.line(&pulled.path.display().to_string())?;
    Ok(out.flush()?)
}

/// The progress of a download, on stderr if it is a terminal.
struct Bars {
    quiet: bool,
    bar: ProgressBar,
    /// Bytes of the files that are whole.
    before: u64,
    size: u64,
}

impl Bars {
    fn new(quiet: bool) -> Self {
        let target =
            if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        Self { quiet, bar: ProgressBar::with_draw_target(None, target), before: 0, size: 0 }
    }

    fn show(&mut self, event: Event<'_>) {
        match event {
            Event::Planned { commit, files, bytes: total, present } => {
                self.tell(&format!(
                    "commit {}: {files} files of {}, {} of them here",
                    &commit[..12.min(commit.len())],
                    bytes(total),
                    bytes(present),
                ));
                self.bar.set_length(total);
                self.bar.set_style(style());
                self.bar.enable_steady_tick(Duration::from_millis(200));
            }
            Event::File { name, size, have } => {
                self.size = size;
                self.bar.set_message(name.to_owned());
                self.bar.set_position(self.before + have);
                self.bar.reset_eta();
            }
            Event::At(have) => self.bar.set_position(self.before + have),
            Event::Done => {
                self.before += self.size;
                self.bar.set_position(self.before);
            }
            Event::Waiting { error, pause } => {
                let seconds = pause.as_secs_f64();
                self.tell(&format!("{error}; trying again in {seconds:.0} s"));
            }
            _ => {}
        }
    }

    fn tell(&self, line: &str) {
        if !self.quiet {
            self.bar.suspend(|| note_dimmed(line));
        }
    }

    fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

fn style() -> ProgressStyle {
    let bar = if styles_wanted() { "{bar:30.green/dim}" } else { "{bar:30}" };
    let line = format!(
        "{bar} {{percent:>3}} % of {{decimal_total_bytes}}, {{decimal_bytes_per_sec}}, {{eta}} left  {{wide_msg}}"
    );
    // Without it the bar is plain, which is no reason to fail.
    ProgressStyle::with_template(&line).unwrap_or_else(|_| ProgressStyle::default_bar())
}
