//! `lily bench score`: numerics against mlx-lm.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use lily_bench::peers::{MlxLm, PeerSpec};
use lily_bench::report::Table;
use lily_bench::results::{Figure, significant};
use lily_bench::score::{Agreement, MIN_POSITIONS, Reference, Scored, compare, parse_references};
use lily_engine::{Cancel, EngineError};
use serde_json::{Value, json};

use super::options::print;
use super::record::RecordArgs;
use crate::failure::{Failure, Interrupted};
use crate::interrupt::cancel_on_interrupt;
use crate::model::Opened;
use crate::options::{ComputeArgs, ModelArgs};
use crate::output::{Progress, Stdout};
use crate::resolve::{Source, resolve};
use crate::token_ids::{read_ids, read_text};

/// Compare the model's numerics with mlx-lm's, teacher-forced over at least 192 positions.
///
/// The reference is a file of log-probabilities that mlx-lm made (models/demo/golden/perplexity.json), or mlx-lm
/// itself. Shown are both perplexities, their ratio, how often the most probable token is the same, and the
/// mean and the largest difference of two log-probabilities.
#[derive(Args)]
pub struct ScoreArgs {
    #[command(flatten)]
    pub model: ModelArgs,

    /// The reference: JSON with `passages` or `sequences` of `ids` and `logprob`, and `top1` if it is known.
    #[arg(long, value_name = "FILE", required_unless_present = "token_ids")]
    pub golden: Option<PathBuf>,

    /// Ask mlx-lm about these token ids (a JSON array) instead.
    #[arg(long, value_name = "FILE", conflicts_with = "golden", requires = "peer")]
    pub token_ids: Option<PathBuf>,

    /// mlx-lm=PYTHON, an interpreter that has it.
    #[arg(long, value_name = "NAME=PATH")]
    pub peer: Option<PeerSpec>,

    /// Fail if the perplexities are further apart than this.
    #[arg(long, value_name = "PERCENT")]
    pub bound: Option<f64>,

    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub record: RecordArgs,

    #[command(flatten)]
    pub compute: ComputeArgs,
}

/// Runs the command.
pub fn score(args: &ScoreArgs) -> anyhow::Result<()> {
    let opened = Opened::new(&args.model, &args.compute)?;
    let cancel = cancel_on_interrupt()?;
    let references = references(args, &opened, &cancel)?;
    let positions: usize = references.iter().map(|r| r.logprob.len()).sum();
    if positions < MIN_POSITIONS {
        return Err(Failure::new(
            format!("the reference has {positions} positions; {MIN_POSITIONS} are the least that says something"),
            "take a longer text",
        )
        .into());
    }
    let longest = references.iter().map(|r| r.ids.len()).max().unwrap_or(1);
    opened.check_context(longest)?;
    let mut engine = opened.engine(&args.compute, longest)?;
    let mut session = engine.open_session()?;
    let mut progress = Progress::new("scoring:", args.json);
    let mut scored = Vec::new();
    for (i, reference) in references.iter().enumerate() {
        progress.show(|| format!("text {} of {}", i + 1, references.len()));
        let scores = engine.score(&mut session, &reference.ids, &cancel, |_, _| ());
        let scores = match scores {
            Err(EngineError::Cancelled { .. }) => return Err(Interrupted.into()),
            scores => scores?,
        };
        scored.push(Scored {
            logprob: scores.iter().map(|s| f64::from(s.logprob)).collect(),
            top1: scores.iter().map(|s| s.top1).collect(),
        });
    }
    progress.clear();
    let all = compare(&references, &scored);
    show(args, &opened, &all)?;
    let device = args.compute.device()?.name();
    args.record.append("score", &device, &figures(&all))?;
    bound(args, &all)
}

fn references(
    args: &ScoreArgs,
    opened: &Opened,
    cancel: &Cancel,
) -> anyhow::Result<Vec<Reference>> {
    if let Some(file) = &args.golden {
        let bad = |what: String| {
            let what = format!("{}: {what}", file.display());
            Failure::new(what, "models/demo/golden/perplexity.json shows how such a file looks")
        };
        let references = parse_references(&read_text(file)?).map_err(bad)?;
        let vocab = opened.vocab();
        let foreign = references.iter().flat_map(|r| &r.ids).find(|id| **id as usize >= vocab);
        return match foreign {
            Some(id) => {
                Err(bad(format!("token {id} is outside the model's vocabulary of {vocab}")).into())
            }
            None => Ok(references),
        };
    }
    let (Some(file), Some(PeerSpec::MlxLm(python))) = (&args.token_ids, &args.peer) else {
        let what = "only mlx-lm can be asked for its numerics";
        return Err(Failure::usage(what, "give --peer mlx-lm=PYTHON").into());
    };
    let ids = read_ids(file, opened.vocab())?;
    let Source::Folder(folder) = resolve(args.model.model.as_deref())? else {
        return Err(Failure::usage("mlx-lm reads a folder", "name one with --model").into());
    };
    let hint = "see tools/bench-peers/README.md";
    let failed = |trouble: lily_bench::Trouble| Failure::new(format!("mlx-lm: {trouble}"), hint);
    let timeout = Duration::from_secs(3600);
    let mut mlx = MlxLm::start(python, &folder, timeout, cancel.clone()).map_err(failed)?;
    let score = mlx.score(&ids).map_err(failed)?;
    let name = file.display().to_string();
    Ok(vec![Reference { name, ids, logprob: score.logprob, top1: Some(score.top1) }])
}

fn show(args: &ScoreArgs, opened: &Opened, all: &[Agreement]) -> anyhow::Result<()> {
    let mut out = Stdout::new();
    if args.json {
        let texts: Vec<Value> = all[..all.len() - 1].iter().map(as_json).collect();
        let value = json!({
            "model": opened.checkpoint.source(),
            "texts": texts,
            "all": all.last().map(as_json),
        });
        return Ok(out.json(&value)?);
    }
    let head = ["text", "positions", "reference", "lily", "ratio", "same top-1", "mean", "worst"];
    let mut rows = vec![head.map(String::from).to_vec()];
    rows.extend(all.iter().map(|a| {
        vec![
            a.name.chars().take(40).collect(),
            a.positions.to_string(),
            format!("{:.4}", a.reference),
            format!("{:.4}", a.own),
            format!("{:.5}", a.ratio()),
            a.top1.map_or("unknown".into(), |(n, of)| format!("{n} of {of}")),
            format!("{:.2e}", a.mean),
            format!("{:.2e}", a.worst),
        ]
    }));
    let title = format!("{}: perplexity, teacher-forced", opened.checkpoint.source());
    let notes = vec!["mean and worst: of the differences of log-probabilities".to_owned()];
    print(&mut out, &[Table { title, rows, notes }])?;
    Ok(out.flush()?)
}

fn as_json(a: &Agreement) -> Value {
    json!({
        "name": a.name,
        "positions": a.positions,
        "reference_perplexity": a.reference,
        "perplexity": a.own,
        "ratio": a.ratio(),
        "top1_equal": a.top1.map(|t| t.0),
        "top1_positions": a.top1.map(|t| t.1),
        "mean_logprob_difference": a.mean,
        "worst_logprob_difference": a.worst,
    })
}

fn figures(all: &[Agreement]) -> Vec<Figure> {
    let figure = |what: String, value: String, unit: &str| Figure {
        what,
        value,
        unit: unit.into(),
        rounds: Vec::new(),
    };
    let mut figures = Vec::new();
    for a in all {
        let what = |of: &str| format!("{}, {} positions: {of}", a.name, a.positions);
        figures.push(figure(
            what("perplexity over the reference's"),
            format!("{:.6}", a.ratio()),
            "times",
        ));
        let mean = what("mean difference of log-probabilities");
        figures.push(figure(mean, significant(a.mean), "nats"));
        if let Some((equal, of)) = a.top1 {
            let part = significant(100.0 * equal as f64 / of as f64);
            figures.push(figure(what("same most probable token"), part, "%"));
        }
    }
    figures
}

fn bound(args: &ScoreArgs, all: &[Agreement]) -> anyhow::Result<()> {
    let (Some(bound), Some(sum)) = (args.bound, all.last()) else { return Ok(()) };
    let apart = 100.0 * (sum.ratio() - 1.0).abs();
    // A NaN is beyond every bound.
    match apart <= bound {
        true => Ok(()),
        false => Err(Failure::new(
            format!("the perplexities are {apart:.3} % apart; {bound} % are allowed"),
            "compare with --precise, which shows whether quantized activations are to blame",
        )
        .into()),
    }
}
