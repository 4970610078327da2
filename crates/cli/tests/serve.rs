//! `lily serve`: what it refuses to do, and the conformance suite of tools/api-suite.

mod common;

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;

use common::{fails, file};

#[test]
fn a_wide_address_needs_a_key() {
    let hint = ["--api-key", "127.0.0.1", "hint: "];
    fails(&["serve", "--host", "0.0.0.0"], 2, &hint);
    fails(&["serve", "--host", "::"], 2, &hint);
    fails(&["serve", "--host", "192.0.2.1", "--api-key", ""], 2, &hint);
    fails(&["serve", "--host", "example.org"], 2, &["an IP address or localhost is needed"]);
}

#[test]
fn a_port_in_use_is_told() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    fails(&["serve", "--port", &port], 1, &[&port, "choose another --port", "hint: "]);
}

#[test]
fn a_broken_script_is_told_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    for bad in ["{", "{\"match\": \"\"}", "{\"match\": \"\", \"text\": \"\", \"split\": \"word\"}"]
    {
        let script =
            file(&dir, "bad.jsonl", &format!("{{\"match\": \"\", \"text\": \"\"}}\n{bad}\n"));
        fails(&["serve", "--port", "0", "--replay", &script], 1, &[&script, "line 2: "]);
    }
}

/// Everything that needs no model, but for what is slow by nature (.ci/api-suite runs that too).
#[test]
fn conformance_suite() {
    let suite = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tools/api-suite");
    let model = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let groups = "ops,chat,stream,reasoning,tools,stop,params,prompt,completions,security,robust";
    let run = Command::new("python3")
        .arg(suite.join("run.py"))
        .args(["--lily", env!("CARGO_BIN_EXE_lily"), "--modes", "replay", "--quiet"])
        .args(["--groups", groups, "--time-scale", "4", "--model"])
        .arg(model)
        .output();
    let Ok(run) = run else {
        eprintln!("there is no python3: the conformance suite was not run");
        return;
    };
    let report = String::from_utf8(run.stdout).unwrap();
    let waiting = std::fs::read_to_string(suite.join("waiting.txt")).unwrap();
    let failed: Vec<&str> = report
        .lines()
        .filter_map(|line| line.strip_prefix("FAIL "))
        .filter(|line| !waiting.lines().any(|id| line.split(' ').next() == Some(id)))
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
    let counts = report.lines().last().unwrap_or_default();
    let passed = counts.split(' ').next().and_then(|n| n.parse::<u32>().ok());
    assert!(passed.is_some_and(|n| n > 300), "{report}{}", String::from_utf8_lossy(&run.stderr));
}
