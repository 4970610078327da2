//! `lily score`: how probable a text is to the model.

use std::path::PathBuf;

use clap::{ArgGroup, Args};
use lily_engine::{EngineError, Score};
use serde::Serialize;

use crate::failure::{Failure, Interrupted};
use crate::interrupt::cancel_on_interrupt;
use crate::model::Opened;
use crate::options::{ComputeArgs, ModelArgs};
use crate::output::{Progress, Stdout, grouped};
use crate::token_ids::{read_ids, read_text};

/// Score a text: how probable each of its tokens is after those before it.
///
/// Teacher-forced: the model is given the text itself, whatever it would have written. Any token of the
/// vocabulary counts. No chat template is applied.
#[derive(Args)]
#[command(group = ArgGroup::new("input").required(true))]
pub struct ScoreArgs {
    #[command(flatten)]
    pub model: ModelArgs,

    /// Score the text in FILE (UTF-8; `-` is stdin).
    #[arg(long, value_name = "FILE", group = "input")]
    pub text: Option<PathBuf>,

    /// Score token ids: a JSON array in FILE (`-` is stdin).
    #[arg(long, value_name = "FILE", group = "input")]
    pub token_ids: Option<PathBuf>,

    #[command(flatten)]
    pub compute: ComputeArgs,

    /// Print one JSON object: tokens, perplexity, and positions with id, logprob (natural logarithm), top1 (the
    /// most probable token) and top1_logprob for each token from the second on.
    #[arg(long)]
    pub json: bool,
}

#[derive(Serialize)]
struct Output {
    tokens: usize,
    perplexity: f64,
    positions: Vec<Position>,
}

#[derive(Serialize)]
struct Position {
    id: u32,
    logprob: f32,
    top1: u32,
    top1_logprob: f32,
}

/// Runs the command.
pub fn score(args: &ScoreArgs) -> anyhow::Result<()> {
    let opened = Opened::new(&args.model, &args.compute)?;
    let ids = match (&args.text, &args.token_ids) {
        (Some(file), _) => opened.need_tokenizer()?.encode(&read_text(file)?)?,
        (None, Some(file)) => read_ids(file, opened.vocab())?,
        (None, None) => Vec::new(),
    };
    if ids.len() < 2 {
        return Err(Failure::new(
            format!("the input has {} of the two tokens that a score needs", ids.len()),
            "each token is scored after those before it: give a longer text",
        )
        .into());
    }
    opened.check_context(ids.len())?;
    let scores = scores(args, &opened, &ids)?;
    let positions: Vec<Position> = ids[1..].iter().zip(&scores).map(position).collect();
    let output = Output { tokens: ids.len(), perplexity: perplexity(&scores), positions };
    let mut out = Stdout::new();
    if args.json {
        return Ok(out.json(&output)?);
    }
    let right = output.positions.iter().filter(|p| p.id == p.top1).count();
    let scored = output.positions.len();
    out.line(&format!(
        "tokens      {} ({} scored)",
        grouped(ids.len() as u64),
        grouped(scored as u64)
    ))?;
    out.line(&format!("perplexity  {:.4}", output.perplexity))?;
    out.line(&format!(
        "top-1       {:.1} % of tokens were the most probable one",
        100.0 * right as f64 / scored as f64
    ))?;
    Ok(out.flush()?)
}

fn scores(args: &ScoreArgs, opened: &Opened, ids: &[u32]) -> anyhow::Result<Vec<Score>> {
    let cancel = cancel_on_interrupt()?;
    let mut engine = opened.engine(&args.compute, ids.len())?;
    let mut session = engine.open_session()?;
    let mut progress = Progress::new("scoring:", false);
    let scored = engine.score(&mut session, ids, &cancel, |done, total| {
        progress.show(|| format!("{done} of {total} tokens"));
    });
    match scored {
        Err(EngineError::Cancelled { .. }) => Err(Interrupted.into()),
        result => Ok(result?),
    }
}

fn position((id, score): (&u32, &Score)) -> Position {
    let Score { logprob, top1, top1_logprob } = *score;
    Position { id: *id, logprob, top1, top1_logprob }
}

/// `exp` of the mean negative log-probability.
fn perplexity(scores: &[Score]) -> f64 {
    let sum: f64 = scores.iter().map(|s| f64::from(s.logprob)).sum();
    (-sum / scores.len() as f64).exp()
}
