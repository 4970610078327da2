//! `lily run`: one answer.

use std::io::{self, IsTerminal};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use clap::Args;
use lily_chat::RenderInput;
use lily_engine::{
    Cancel, Engine, EngineError, FinishReason, GenerateParams, Generated, MAX_LOGPROBS, Session,
    Timings,
};
use serde::Serialize;
use serde_json::json;

use crate::failure::{Failure, Interrupted};
use crate::interrupt::cancel_on_interrupt;
use crate::logprobs::{Position, lines, positions};
use crate::model::Opened;
use crate::options::{ComputeArgs, ModelArgs, count};
use crate::output::{Progress, Stdout, note, note_dimmed};
use crate::sampling::SamplingArgs;
use crate::show::Show;
use crate::token_ids::{read_ids, read_text};

/// Context of a short prompt: a long answer fits, the cache of the largest model stays small.
const CONTEXT: usize = 8192;
/// Room for the answer to a long prompt.
const ANSWER: usize = 4096;

/// Answer a prompt.
///
/// The answer is streamed to stdout. What the model thinks before it is shown dimmed if stdout is a
/// terminal; otherwise stdout carries the answer alone, and the thinking is shown on stderr if that is a
/// terminal. Figures follow on stderr: the prompt (prefill) and the answer (decode) apart.
///
/// Sampling options that are not given are those of --preset, or else of the checkpoint's generation_config.json.
///
/// Ctrl-C ends the answer; what there is of it stays.
#[derive(Args)]
pub struct RunArgs {
    /// The question or instruction; `-` reads it from stdin.
    pub prompt: Option<String>,

    #[command(flatten)]
    pub model: ModelArgs,

    /// Answer at once, without thinking first.
    #[arg(long)]
    pub no_think: bool,

    /// System message: how the model is to behave.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,

    /// Continue these token ids instead of answering a prompt: a JSON array in FILE (`-` is stdin). No chat
    /// template is applied, and any token of the vocabulary may follow. Without a tokenizer the ids of the
    /// answer are printed.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "no_think", "system"])]
    pub token_ids: Option<PathBuf>,

    /// Most tokens of the answer, thinking included. Default: until the model ends it or the context is full.
    #[arg(long, value_name = "N", value_parser = count)]
    pub max_tokens: Option<usize>,

    /// Tokens that prompt and answer may have together; memory is set aside for them. Default: 8192, or what a
    /// longer prompt needs with --max-tokens (or 4096) for the answer, at most what the model was made for.
    #[arg(long, value_name = "N", value_parser = count)]
    pub context: Option<usize>,

    #[command(flatten)]
    pub sampling: SamplingArgs,

    #[command(flatten)]
    pub compute: ComputeArgs,

    /// Tell how probable the model held each token of the answer and the N most probable ones in its place,
    /// 0 to 20: natural logarithms, of the model's own distribution before bias, penalties, temperature and
    /// cuts. They follow the answer on stdout, one line a token, or are in the output of --json.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u8).range(0..=i64::from(MAX_LOGPROBS)))]
    pub logprobs: Option<u8>,

    /// Nothing on stderr but errors.
    #[arg(short, long)]
    pub quiet: bool,

    /// Print one JSON object instead of text: token_ids (generated, the stop token included), text,
    /// reasoning, finish_reason (stop, length, context_full or cancelled), timings (tokens and seconds of
    /// prefill and decode), model, prompt_tokens, seed, logprobs (with --logprobs: for each token id, token,
    /// logprob and top, a list of the same three).
    #[arg(long)]
    pub json: bool,
}

#[derive(Serialize)]
struct Output<'a> {
    token_ids: &'a [u32],
    text: Option<&'a str>,
    reasoning: Option<&'a str>,
    finish_reason: &'static str,
    timings: serde_json::Value,
    model: &'a str,
    prompt_tokens: usize,
    seed: u64,
    logprobs: Option<Vec<Position>>,
}

/// Runs the command.
pub fn run(args: &RunArgs) -> anyhow::Result<()> {
    let text = prompt_text(args)?;
    let opened = Opened::new(&args.model, &args.compute)?;
    let defaults = opened.defaults()?;
    let mut sample = args.sampling.params(&defaults);
    sample.logprobs = args.logprobs;
    opened.check_sampling(&sample)?;
    let (prompt, show) = match &text {
        Some(text) => {
            let tokenizer = opened.need_tokenizer()?;
            let input = render_input(args, text);
            let rendered = opened.template(&tokenizer)?.render(&input)?;
            let prompt = tokenizer.encode_rendered(&rendered)?;
            sample.mask = Some(opened.named_tokens(&tokenizer));
            let show = Show::chat(&tokenizer, &prompt);
            (prompt, show)
        }
        None => {
            let file = args.token_ids.as_deref().unwrap_or(Path::new("-"));
            (read_ids(file, opened.vocab())?, Show::raw(opened.tokenizer()?.as_ref()))
        }
    };
    let max = opened.model.config.max_position_embeddings;
    let context = args.context.unwrap_or_else(|| context(prompt.len(), args.max_tokens, max));
    opened.check_context(context)?;
    let engine = opened.engine(&args.compute, context)?;
    let params = GenerateParams {
        sample,
        max_tokens: args.max_tokens.unwrap_or(usize::MAX),
        stop_ids: defaults.stop_ids,
    };
    answer(args, &opened, engine, &prompt, &params, show)
}

/// The prompt, or `None` where token ids are given.
fn prompt_text(args: &RunArgs) -> Result<Option<String>, Failure> {
    let text = match args.prompt.as_deref() {
        None if args.token_ids.is_some() => return Ok(None),
        None => {
            return Err(Failure::usage(
                "there is no prompt",
                "lily run \"What is the capital of France?\"; - reads the prompt from stdin",
            ));
        }
        Some("-") => read_text(Path::new("-"))?,
        Some(text) => text.to_owned(),
    };
    match text.trim().is_empty() {
        true => Err(Failure::new("the prompt is empty", "give a question or an instruction")),
        false => Ok(Some(text)),
    }
}

fn render_input(args: &RunArgs, text: &str) -> RenderInput {
    let system = args.system.iter().map(|s| json!({ "role": "system", "content": s }));
    let user = json!({ "role": "user", "content": text });
    RenderInput {
        messages: system.chain([user]).collect(),
        add_generation_prompt: true,
        enable_thinking: (args.no_think || args.sampling.no_think()).then_some(false),
        ..RenderInput::default()
    }
}

/// Tokens that a session needs where nothing is asked for.
fn context(prompt: usize, max_tokens: Option<usize>, max: usize) -> usize {
    // Never less than the prompt: one that is too long for the model is refused by its own length.
    let needed = prompt.saturating_add(max_tokens.unwrap_or(ANSWER));
    needed.max(CONTEXT).min(max).max(prompt)
}

fn answer(
    args: &RunArgs,
    opened: &Opened,
    mut engine: Engine,
    prompt: &[u32],
    params: &GenerateParams,
    mut show: Show,
) -> anyhow::Result<()> {
    let cancel = cancel_on_interrupt()?;
    let mut session = engine.open_session()?;
    if !read_prompt(&mut engine, &mut session, prompt, &cancel, args.quiet)? {
        return Err(Interrupted.into());
    }
    if args.model.model.is_none() && !args.quiet {
        note_dimmed(&format!("{} answers: {}", lily_demo::NAME, lily_demo::ABOUT));
    }
    let mut out = Stdout::new();
    show.begin(&out, args.json, args.quiet);
    let mut failed: io::Result<()> = Ok(());
    let stops = &params.stop_ids;
    let generated = engine.generate(&mut session, params, &cancel, |id| {
        failed = show.token(&mut out, id, stops.contains(&id));
        if failed.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    failed?;
    show.end(&mut out)?;
    let logprobs = match args.logprobs {
        Some(_) => {
            let tokenizer = opened.tokenizer()?;
            Some(positions(&generated.ids, &generated.logprobs, tokenizer.as_deref()))
        }
        None => None,
    };
    if args.json {
        let Timings { prefill_tokens, prefill_seconds, decode_tokens, decode_seconds } =
            generated.timings;
        out.json(&Output {
            token_ids: &generated.ids,
            text: show.text(),
            reasoning: show.thinking(),
            finish_reason: finish_name(generated.finish),
            timings: json!({
                "prefill_tokens": prefill_tokens,
                "prefill_seconds": prefill_seconds,
                "decode_tokens": decode_tokens,
                "decode_seconds": decode_seconds,
            }),
            model: opened.checkpoint.source(),
            prompt_tokens: prompt.len(),
            seed: params.sample.seed,
            logprobs,
        })?;
    } else if let Some(logprobs) = logprobs {
        out.line("")?;
        for line in lines(&logprobs) {
            out.line(&line)?;
        }
        out.flush()?;
    }
    if !args.quiet {
        figures(&generated, &show, io::stderr().is_terminal());
    }
    match generated.finish {
        FinishReason::Cancelled => Err(Interrupted.into()),
        _ => Ok(()),
    }
}

/// Computes the prompt. `false` if Ctrl-C ended it.
fn read_prompt(
    engine: &mut Engine,
    session: &mut Session,
    prompt: &[u32],
    cancel: &Cancel,
    quiet: bool,
) -> anyhow::Result<bool> {
    let mut progress = Progress::new("reading the prompt:", quiet);
    let synced = engine.sync(session, prompt, cancel, |done, total| {
        progress.show(|| format!("{done} of {total} tokens"));
    });
    match synced {
        Ok(_) => Ok(true),
        Err(EngineError::Cancelled { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn finish_name(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::ContextFull => "context_full",
        FinishReason::Cancelled => "cancelled",
    }
}

/// Prompt and answer apart, and why the answer ended if not by itself.
fn figures(generated: &Generated, show: &Show, spaced: bool) {
    if spaced {
        note("");
    }
    let line = |what: &str, tokens: u64, seconds: f64| {
        let rate = if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
        note_dimmed(&format!("{what} {tokens:>6} tokens {seconds:>8.3} s {rate:>8.1} tokens/s"));
    };
    let t = generated.timings;
    line("prefill", t.prefill_tokens, t.prefill_seconds);
    line("decode ", t.decode_tokens, t.decode_seconds);
    let why = match generated.finish {
        FinishReason::Stop => return,
        FinishReason::Length => "--max-tokens was reached",
        FinishReason::ContextFull => "the context is full; use a longer --context",
        FinishReason::Cancelled => "interrupted",
    };
    match show.is_thinking() {
        true => note_dimmed(&format!("ended while thinking: {why}; --no-think answers at once")),
        false => note_dimmed(&format!("ended: {why}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_contexts() {
        let table = [
            // (prompt, --max-tokens, model's longest, context)
            (10, None, 262_144, 8192),
            (10, Some(100), 262_144, 8192),
            (10, Some(20_000), 262_144, 20_010),
            (10_000, None, 262_144, 14_096),
            (10, None, 4096, 4096),
            (262_000, None, 262_144, 262_144),
            (300_000, None, 262_144, 300_000),
        ];
        for (prompt, max_tokens, max, want) in table {
            assert_eq!(context(prompt, max_tokens, max), want, "{prompt} {max_tokens:?} {max}");
        }
    }
}
