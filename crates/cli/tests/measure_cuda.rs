//! tools/gpu/measure_cuda.py, in its short form on the CPU: every part runs, what fails is told and keeps nothing else from running.
#![cfg(unix)]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::repository;
use serde_json::Value;

/// A program by another process: one that a test starts meanwhile would inherit a file open for writing, and such a file cannot be run.
fn script(path: &Path, text: &str) -> PathBuf {
    let draft = path.with_extension("draft");
    fs::write(&draft, format!("#!/bin/sh\n{text}")).unwrap();
    assert!(Command::new("cp").args([&draft, path]).status().unwrap().success());
    fs::remove_file(&draft).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    path.to_owned()
}

/// A llama-bench that takes an hour for everything, by its own account.
const BENCH: &str = r#"
while [ $# -gt 0 ]; do case $1 in -p) p=$2;; -n) n=$2;; -d) d=$2;; esac; shift; done
echo "[{\"n_prompt\": ${p:-0}, \"n_gen\": ${n:-0}, \"n_depth\": ${d:-0}, \"samples_ns\": [3600000000000]}]"
"#;

/// A cmake that builds it.
const CMAKE: &str = r#"
case "$1" in
--build) mkdir -p "$2/bin" && cp "$(dirname "$0")/bench" "$2/bin/llama-bench" ;;
-S) grep -q project "$2/CMakeLists.txt" ;;
esac
"#;

struct Rig {
    dir: tempfile::TempDir,
    lily: PathBuf,
}

impl Rig {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self { dir, lily: env!("CARGO_BIN_EXE_lily").into() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// `None` where there is no python3.
    fn run(&self, args: &[&str]) -> Option<Output> {
        let output = Command::new("python3")
            .arg(repository().join("tools/gpu/measure_cuda.py"))
            .args(["--device", "cpu", "--short", "--port", "18217"])
            .arg("--lily")
            .arg(&self.lily)
            .arg("--work")
            .arg(self.path("work"))
            .arg("--out")
            .arg(self.path("out"))
            .arg("--model")
            .arg(repository().join("models/demo"))
            .args(args)
            .env(
                "PATH",
                format!(
                    "{}:{}",
                    self.dir.path().display(),
                    std::env::var("PATH").unwrap_or_default()
                ),
            )
            .output();
        if output.is_err() {
            eprintln!("there is no python3: the script was not run");
        }
        output.ok()
    }

    fn summary(&self) -> String {
        fs::read_to_string(self.path("out/summary.txt")).unwrap()
    }

    fn results(&self) -> Value {
        serde_json::from_str(&fs::read_to_string(self.path("out/results.json")).unwrap()).unwrap()
    }
}

#[test]
fn every_part_beside_a_peer_that_is_built_first() {
    let rig = Rig::new();
    script(&rig.path("bench"), BENCH);
    script(&rig.path("cmake"), CMAKE);
    fs::create_dir(rig.path("llama")).unwrap();
    fs::write(rig.path("llama/CMakeLists.txt"), "project(x)").unwrap();
    fs::write(rig.path("model.gguf"), "").unwrap();
    let test = script(&rig.path("cases"), "echo 'test result: ok. 7 passed'");
    let (llama, gguf) = (rig.path("llama"), rig.path("model.gguf"));
    let paths = [&llama, &gguf, &test].map(|p| p.to_str().unwrap().to_owned());
    let args = ["--llama", &paths[0], "--gguf", &paths[1], "--test", &paths[2]];
    let Some(output) = rig.run(&args) else { return };
    let said = format!("{output:?}");
    assert_eq!(output.status.code(), Some(0), "{said}");
    let summary = rig.summary();
    for part in ["correctness", "roofline", "by_op", "decode", "frontiers", "slots", "ablate"] {
        assert!(summary.contains(&format!("{part}: passed")), "{part}: {summary}");
    }
    for line in [
        "576 positions",
        "perplexity.json, 576 positions: perplexity",
        "cases: test result: ok. 7 passed",
        "23 decode steps behind 40 tokens, 2 times",
        "logprobs-0: the same ids",
        "isa-portable: the same ids",
        "snapshot at 32, ",
        "decode at 32: lily ",
        "2 slots: ",
        "threads, decode at 32: ",
        "made for it: llama.cpp: there after",
    ] {
        assert!(summary.contains(line), "{line}: {summary}");
    }
    let results = rig.results();
    let parts = results["parts"].as_array().unwrap();
    let frontiers =
        &parts.iter().find(|p| p["part"] == "frontiers").unwrap()["values"]["frontiers"];
    let points = frontiers["measured"]["points"].as_array().unwrap();
    assert_eq!(points.len(), 4);
    assert!(points.iter().all(|p| p["engines"][1]["seconds"][0] == 3600.0), "{frontiers}");
    let mut files: Vec<String> = fs::read_dir(rig.path("out"))
        .unwrap()
        .map(|f| f.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    let want = ["decode.svg", "figures.tsv", "logs.tar.gz", "prefill.svg", "results.json"];
    assert_eq!(files[..5], want);
    assert_eq!(files[5..], ["summary.txt"]);
    let figures = fs::read_to_string(rig.path("out/figures.tsv")).unwrap();
    assert_eq!(figures.matches("date\tcommit").count(), 1, "one head");
    for command in ["bench compare", "bench roofline", "bench ablate", "bench run"] {
        assert!(figures.contains(command), "{command}");
    }
}

#[test]
fn what_fails_is_told_and_the_rest_goes_on() {
    let mut rig = Rig::new();
    // Other ids with another instruction set, another perplexity, and a peer that does not answer.
    let wrapper = format!(
        "case \"$*\" in *score*) '{0}' \"$@\" | sed 's/\"ratio\":[0-9.]*/\"ratio\":1.0031/g' ;;\n*portable*) '{0}' \"$@\" | sed 's/\"token_ids\":\\[[0-9]*/\"token_ids\":[99999/' ;;\n*) exec '{0}' \"$@\" ;; esac",
        rig.lily.display()
    );
    rig.lily = script(&rig.path("wrapped"), &wrapper);
    fs::create_dir(rig.path("llama")).unwrap();
    script(&rig.path("llama/llama-bench"), "sleep 1000");
    fs::write(rig.path("model.gguf"), "").unwrap();
    let test = script(&rig.path("cases"), "echo 'thread panicked: an error' >&2; exit 101");
    let (llama, gguf) = (rig.path("llama"), rig.path("model.gguf"));
    let paths = [&llama, &gguf, &test].map(|p| p.to_str().unwrap().to_owned());
    let args = ["--llama", &paths[0], "--gguf", &paths[1], "--test", &paths[2]];
    let more = ["--only", "ablate,frontiers,correctness", "--limit", "frontiers=12"];
    let Some(output) = rig.run(&[&args[..], &more].concat()) else { return };
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let summary = rig.summary();
    for line in [
        "correctness: FAILED",
        "test-cases: status 101: thread panicked: an error",
        "FAILED: perplexity.json, 576 positions: perplexity +0.310 %",
        "logprobs-0: the same ids",
        "isa-portable: other ids from token 0 on",
        "threads-1: the same ids",
        "frontiers: FAILED",
        "out of time after",
        "ablate: passed",
    ] {
        assert!(summary.contains(line), "{line}: {summary}");
    }
}

#[test]
fn no_time_and_wrong_arguments() {
    let rig = Rig::new();
    let Some(output) = rig.run(&["--seconds", "2", "--only", "by_op,slots"]) else { return };
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let summary = rig.summary();
    assert!(summary.contains("call again with --only by_op"), "{summary}");
    assert!(summary.contains("call again with --only slots"), "{summary}");
    for wrong in [["--only", "nonsense"], ["--limit", "slots"], ["--limit", "nonsense=3"]] {
        let Some(output) = rig.run(&wrong) else { return };
        assert_eq!(output.status.code(), Some(2), "{wrong:?}: {output:?}");
    }
}

/// Scores everything as it is told to, and can do nothing else.
const SCORER: &str = r#"
case "$*" in *perplexity-long.json*) ;; *) exit 1;; esac
echo '{"model": "stand-in", "texts": [], "all": {"positions": 18432, "ratio": RATIO, "mean_logprob_difference": MEAN, "top1_equal": 18353, "top1_positions": 18432}}'
"#;

#[test]
fn a_long_golden_is_bounded_by_what_mlx_lm_comes_to() {
    for (ratio, mean, right) in [
        ("1.00045", "0.00675", true),
        // What int8 activations give: the ratio alone would pass half as far.
        ("1.00100", "0.01829", false),
        ("1.00215", "0.00675", false),
        ("null", "0.00675", false),
        ("1.00045", "null", false),
    ] {
        let mut rig = Rig::new();
        let text = SCORER.replace("RATIO", ratio).replace("MEAN", mean);
        rig.lily = script(&rig.path("lily"), &text);
        let only = ["--only", "correctness", "--goldens", "perplexity-long.json"];
        let Some(output) = rig.run(&only) else { return };
        // All else fails, as it is no engine.
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let summary = rig.summary();
        let line = summary.lines().find(|l| l.contains("perplexity-long.json, 18432 positions"));
        let line = line.unwrap_or_else(|| panic!("{summary}"));
        assert_eq!(!line.contains("FAILED"), right, "{ratio}, {mean}: {line}");
        assert!(line.contains("(allowed 0.106 %)") && line.contains("(allowed 0.01218)"), "{line}");
    }
}
