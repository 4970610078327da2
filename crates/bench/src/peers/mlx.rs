//! mlx-lm in one warm Python process.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use lily_engine::Cancel;
use serde_json::{Value, json};

use super::process::{Lines, Patience};
use crate::engine::{Engine, Trouble};

/// The program that it runs; its head describes the protocol.
const SCRIPT: &str = include_str!("../../../../tools/bench-peers/mlx_lm_peer.py");

/// What the peer says when it is ready.
#[derive(Clone, Debug, PartialEq)]
pub struct MlxReady {
    /// Version of mlx-lm.
    pub mlx_lm: String,
    /// Version of mlx.
    pub mlx: String,
    /// Where it computes.
    pub device: String,
    /// Seconds to read the model.
    pub load_seconds: f64,
    /// The weight files that it read.
    pub files: Vec<MlxFile>,
}

/// A weight file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MlxFile {
    /// Its name.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// Its SHA-256, hexadecimal.
    pub sha256: String,
}

/// Teacher-forced scores of a text, for each token from the second on.
#[derive(Clone, Debug, PartialEq)]
pub struct MlxScore {
    /// Natural log-probabilities.
    pub logprob: Vec<f64>,
    /// The most probable tokens.
    pub top1: Vec<u32>,
}

fn parse(line: &str) -> Result<Value, Trouble> {
    let value: Value = serde_json::from_str(line)
        .map_err(|_| Trouble::Failed(format!("it answered {}", shortened(line))))?;
    match value["error"].as_str() {
        Some(error) => Err(Trouble::Failed(shortened(error))),
        None => Ok(value),
    }
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(300) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

fn missing(what: &str, line: &str) -> Trouble {
    Trouble::Failed(format!("its answer has no {what}: {}", shortened(line)))
}

/// Parses the first line.
pub fn parse_ready(line: &str) -> Result<MlxReady, Trouble> {
    let value = parse(line)?;
    if value["ready"] != true {
        return Err(missing("ready", line));
    }
    let text = |value: &Value, key: &str| {
        value[key].as_str().map(str::to_owned).ok_or_else(|| missing(key, line))
    };
    let files = value["files"].as_array().ok_or_else(|| missing("files", line))?;
    let file = |f: &Value| {
        let bytes = f["bytes"].as_u64().ok_or_else(|| missing("bytes", line))?;
        Ok(MlxFile { name: text(f, "name")?, bytes, sha256: text(f, "sha256")? })
    };
    Ok(MlxReady {
        mlx_lm: text(&value, "mlx_lm")?,
        mlx: text(&value, "mlx")?,
        device: text(&value, "device")?,
        load_seconds: value["load_seconds"]
            .as_f64()
            .ok_or_else(|| missing("load_seconds", line))?,
        files: files.iter().map(file).collect::<Result<_, Trouble>>()?,
    })
}

/// Parses the answer to a measurement.
pub fn parse_seconds(line: &str) -> Result<f64, Trouble> {
    parse(line)?["seconds"].as_f64().ok_or_else(|| missing("seconds", line))
}

/// Parses the answer to a text of `tokens` tokens.
pub fn parse_score(line: &str, tokens: usize) -> Result<MlxScore, Trouble> {
    let value = parse(line)?;
    let list = |key: &str| value[key].as_array().ok_or_else(|| missing(key, line));
    let logprob: Vec<f64> = list("logprob")?.iter().filter_map(Value::as_f64).collect();
    let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
    let top1: Vec<u32> = list("top1")?.iter().filter_map(id).collect();
    match logprob.len() + 1 == tokens && top1.len() + 1 == tokens {
        true => Ok(MlxScore { logprob, top1 }),
        false => Err(missing(&format!("score for each of {tokens} tokens"), line)),
    }
}

/// mlx-lm. It reads the folder that Lily reads.
pub struct MlxLm {
    python: PathBuf,
    folder: PathBuf,
    patience: Patience,
    process: Option<Lines>,
    ready: MlxReady,
}

impl MlxLm {
    /// Starts it, loads the model and waits until it is ready.
    pub fn start(
        python: &Path,
        folder: &Path,
        timeout: Duration,
        cancel: Cancel,
    ) -> Result<Self, Trouble> {
        let patience = Patience { timeout, cancel };
        let (process, ready) = launch(python, folder, &patience)?;
        let (python, folder) = (python.to_owned(), folder.to_owned());
        Ok(Self { python, folder, patience, process: Some(process), ready })
    }

    /// What it said.
    pub fn ready(&self) -> &MlxReady {
        &self.ready
    }

    /// Scores a text.
    pub fn score(&mut self, ids: &[u32]) -> Result<MlxScore, Trouble> {
        let line = self.ask(&json!({ "op": "score", "ids": ids }))?;
        parse_score(&line, ids.len())
    }

    /// Asks the process; one that ended or hangs is replaced at the next question.
    fn ask(&mut self, request: &Value) -> Result<String, Trouble> {
        let mut process = match self.process.take() {
            Some(process) => process,
            None => launch(&self.python, &self.folder, &self.patience)?.0,
        };
        let line = process.ask(&request.to_string(), &self.patience)?;
        self.process = Some(process);
        Ok(line)
    }
}

fn launch(python: &Path, folder: &Path, patience: &Patience) -> Result<(Lines, MlxReady), Trouble> {
    let mut command = Command::new(python);
    command.arg("-c").arg(SCRIPT).arg(folder);
    let mut process = Lines::start(command)?;
    let ready = match process.receive(patience) {
        Err(Trouble::Failed(text)) if text.contains("ModuleNotFoundError") => {
            let python = python.display();
            return Err(Trouble::Missing(format!(
                "{python} has no mlx-lm; install it there ({python} -m pip install mlx-lm)"
            )));
        }
        line => parse_ready(&line?)?,
    };
    Ok((process, ready))
}

impl Engine for MlxLm {
    fn name(&self) -> &str {
        "mlx-lm"
    }

    fn facts(&self) -> Vec<(String, String)> {
        let r = &self.ready;
        let mut facts = vec![
            ("mlx-lm".to_owned(), r.mlx_lm.clone()),
            ("mlx".to_owned(), r.mlx.clone()),
            ("device".to_owned(), r.device.clone()),
            ("load seconds".to_owned(), format!("{:.2}", r.load_seconds)),
        ];
        let sha = |f: &MlxFile| (format!("sha256 of {}", f.name), f.sha256.clone());
        facts.extend(r.files.iter().map(sha));
        facts
    }

    fn prefill(&mut self, tokens: usize) -> Result<f64, Trouble> {
        parse_seconds(&self.ask(&json!({ "op": "prefill", "tokens": tokens }))?)
    }

    fn decode(&mut self, context: usize, tokens: usize) -> Result<f64, Trouble> {
        let request = json!({ "op": "decode", "context": context, "tokens": tokens });
        parse_seconds(&self.ask(&request)?)
    }
}
