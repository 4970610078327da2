//! `lily bench`: the commands as people and programs see them. Speeds themselves are never asserted.

mod common;

use std::fs;

use common::{fails, file, json, lily, repository};

const SMALL: [&str; 8] =
    ["--prefill", "8,16", "--decode", "24", "--decode-tokens", "4", "--rounds", "2"];

fn golden(name: &str) -> String {
    repository().join("models/demo/golden").join(name).to_str().unwrap().to_owned()
}

#[test]
fn a_run_has_points_startup_memory_and_plots() {
    let dir = tempfile::tempdir().unwrap();
    let plots = dir.path().join("plots");
    let record = dir.path().join("results");
    let more = [
        "--json",
        "--no-floors",
        "--plots",
        plots.to_str().unwrap(),
        "--record",
        record.to_str().unwrap(),
        "--why",
        "a test",
        "--dropped",
    ];
    let value = json(&[&["bench", "run"], &SMALL[..], &more].concat());
    let points = value["measured"]["points"].as_array().unwrap();
    assert_eq!(points.len(), 3);
    assert_eq!((&points[0]["phase"], &points[0]["length"]), (&"prefill".into(), &8.into()));
    assert_eq!((&points[2]["phase"], &points[2]["tokens"]), (&"decode".into(), &4.into()));
    for point in points {
        let seconds = point["engines"][0]["seconds"].as_array().unwrap();
        assert_eq!(seconds.len(), 2);
        assert!(seconds.iter().all(|s| s.as_f64().unwrap() > 0.0), "{point}");
    }
    assert!(value["startup"]["prepare_seconds"].as_f64().unwrap() > 0.0);
    assert!(value["memory"]["total"].as_u64().unwrap() > 0);
    for name in ["prefill.svg", "decode.svg"] {
        assert!(fs::read_to_string(plots.join(name)).unwrap().contains("<polyline"), "{name}");
    }
    let rows = fs::read_to_string(record.join("run.tsv")).unwrap();
    let rows: Vec<&str> = rows.lines().collect();
    assert_eq!(rows.len(), 4, "{rows:?}");
    assert!(rows[1].contains("lily: prefill of 8 tokens") && rows[1].ends_with("\tno\ta test"));
}

#[test]
fn a_run_for_people_has_floors() {
    let run = lily(&["bench", "run", "--prefill", "8", "--rounds", "1", "--warm-up", "0"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    for part in ["start-up: ", "memory", "prefill: tokens a second", "of floor", "limits: "] {
        assert!(run.stdout.contains(part), "{part}: {run:?}");
    }
    assert!(!run.stdout.contains("decode: "), "{run:?}");
}

#[test]
fn missing_peers_are_rows_and_no_failure() {
    let peers = ["--peer", "llama.cpp=/no/such", "--peer", "mlx-lm=/no/such/python"];
    let args = [&["bench", "compare", "--no-floors"], &SMALL[..], &peers].concat();
    let run = lily(&args);
    assert_eq!(run.code, Some(0), "{run:?}");
    for part in ["no figure", "llama.cpp, prefill of 8 tokens: missing: ", "mlx-lm reads a folder"]
    {
        assert!(run.stdout.contains(part), "{part}: {run:?}");
    }
    let value = json(&[&args[..], &["--json"]].concat());
    let engines = value["measured"]["points"][0]["engines"].as_array().unwrap();
    assert_eq!(engines.len(), 3);
    assert!(engines[0]["seconds"].as_array().unwrap().len() == 2);
    assert!(engines[1]["trouble"].as_str().unwrap().contains("llama-bench"));
}

/// A llama-bench that takes an hour for everything.
#[cfg(unix)]
const SLOW: &str = r#"#!/bin/sh
while [ $# -gt 0 ]; do case $1 in -p) p=$2;; -n) n=$2;; -d) d=$2;; esac; shift; done
echo "[{\"n_prompt\": $p, \"n_gen\": $n, \"n_depth\": ${d:-0}, \"samples_ns\": [3600000000000]}]"
"#;

#[test]
#[cfg(unix)]
fn a_peer_that_answers_gives_ratios_and_means() {
    use std::os::unix::fs::PermissionsExt;

    let dir = tempfile::tempdir().unwrap();
    let bench = file(&dir, "llama-bench", SLOW);
    fs::set_permissions(&bench, fs::Permissions::from_mode(0o755)).unwrap();
    let gguf = file(&dir, "model.gguf", "");
    let peer = format!("llama.cpp={}", dir.path().display());
    let peers = ["--peer", &peer, "--gguf", &gguf];
    let args = [&["bench", "compare", "--no-floors"], &SMALL[..], &peers].concat();
    let value = json(&[&args[..], &["--json"]].concat());
    let other = &value["measured"]["points"][2]["engines"][1];
    assert_eq!(other["seconds"], serde_json::json!([3600.0, 3600.0]));
    assert_eq!(other["ratios"].as_array().unwrap().len(), 2);
    assert!(other["ratio"].as_f64().unwrap() > 1.0, "{other}");
    assert_eq!(value["measured"]["means"][0]["lengths"], 2);
    let run = lily(&args);
    assert!(run.stdout.contains("mean of lily / llama.cpp over 2 of 2 lengths"), "{run:?}");
}

#[test]
fn scores_against_the_goldens() {
    let file = golden("perplexity.json");
    let value = json(&["bench", "score", "--golden", &file, "--precise", "--json"]);
    assert_eq!(value["texts"].as_array().unwrap().len(), 3);
    assert_eq!(value["all"]["positions"], 576);
    let ratio = value["all"]["ratio"].as_f64().unwrap();
    assert!((ratio - 1.0).abs() < 1e-4, "{value}");
    let mean = value["all"]["mean_logprob_difference"].as_f64().unwrap();
    let worst = value["all"]["worst_logprob_difference"].as_f64().unwrap();
    assert!(mean > 0.0 && mean < worst && worst < 2e-3, "{value}");
    let file = golden("logprobs.json");
    let value = json(&["bench", "score", "--golden", &file, "--precise", "--json"]);
    assert_eq!(value["all"]["top1_equal"], value["all"]["top1_positions"]);
    assert!(value["all"]["top1_positions"].as_u64().unwrap() >= 192);
}

#[test]
fn scores_beyond_their_bound_fail() {
    let file = golden("perplexity.json");
    let run = lily(&["bench", "score", "--golden", &file, "--bound", "0.00000001"]);
    assert_eq!(run.code, Some(1), "{run:?}");
    assert!(run.stderr.contains("% apart") && run.stdout.contains("ratio"), "{run:?}");
    let run = lily(&["bench", "score", "--golden", &file, "--bound", "1"]);
    assert_eq!(run.code, Some(0), "{run:?}");
}

#[test]
fn refusals() {
    let dir = tempfile::tempdir().unwrap();
    let short = file(&dir, "short.json", r#"{"passages":[{"ids":[1,2,3],"logprob":[-1,-2]}]}"#);
    fails(&["bench", "score", "--golden", &short], 1, &["2 positions", "192", "hint: "]);
    let foreign =
        file(&dir, "foreign.json", r#"{"passages":[{"ids":[1,9999999],"logprob":[-1]}]}"#);
    fails(&["bench", "score", "--golden", &foreign], 1, &["9999999", "hint: "]);
    let other = file(&dir, "other.json", "{}");
    fails(&["bench", "score", "--golden", &other], 1, &["neither", "hint: "]);
    fails(&["bench", "score"], 2, &["--golden"]);
    fails(&["bench", "compare", "--peer", "ollama=/x"], 2, &["llama.cpp=DIR"]);
    fails(&["bench", "run", "--prefill", "99999"], 2, &["100000", "32768", "hint: "]);
    fails(&["bench", "run", "--max", "10"], 2, &["nothing to measure", "hint: "]);
    fails(&["bench", "synth", "--layers", "1"], 2, &["--out"]);
    fails(&["bench", "synth", "--layers", "1", "--gguf", &other], 1, &["is there already"]);
}

#[test]
fn seconds_by_operation_of_both_phases() {
    let dir = tempfile::tempdir().unwrap();
    let record = dir.path().join("results");
    let more = ["--no-floors", "--by-op", "--record", record.to_str().unwrap()];
    let args = [&["bench", "run"], &SMALL[..], &more].concat();
    let value = json(&[&args[..], &["--json"]].concat());
    let operations = value["operations"].as_array().unwrap();
    assert_eq!(operations.len(), 3);
    assert_eq!((&operations[0]["phase"], &operations[0]["steps"]), (&"prefill".into(), &1.into()));
    assert_eq!((&operations[2]["phase"], &operations[2]["steps"]), (&"decode".into(), &4.into()));
    for point in operations {
        let list = point["operations"].as_array().unwrap();
        let seconds = |name: &str| {
            list.iter().find(|o| o["operation"] == name).and_then(|o| o["seconds"].as_f64())
        };
        for name in ["embed", "linear", "attention", "delta_scan", "experts_in", "sample and score"]
        {
            assert!(seconds(name).is_some_and(|s| s > 0.0), "{name}: {point}");
        }
        let sum: f64 = list.iter().filter_map(|o| o["seconds"].as_f64()).sum();
        assert!(sum <= point["seconds"].as_f64().unwrap(), "{point}");
    }
    let run = lily(&args);
    for part in ["decode of 4 tokens after 24: seconds by operation, 4 steps", "all steps"] {
        assert!(run.stdout.contains(part), "{part}: {run:?}");
    }
    let rows = fs::read_to_string(record.join("run.tsv")).unwrap();
    assert!(rows.contains("\tdecode of 4 tokens after 24: linear\t"), "{rows}");
    // Without it nothing is measured.
    let value = json(&[&["bench", "run", "--no-floors", "--json"], &SMALL[..]].concat());
    assert_eq!(value["operations"].as_array().unwrap().len(), 0);
}

#[test]
fn snapshots_of_each_context() {
    let dir = tempfile::tempdir().unwrap();
    let record = dir.path().join("results");
    let more = ["--no-floors", "--snapshots", "--record", record.to_str().unwrap()];
    let args = [&["bench", "run"], &SMALL[..], &more].concat();
    let value = json(&[&args[..], &["--json"]].concat());
    let snapshots = value["snapshots"].as_array().unwrap();
    assert_eq!((snapshots.len(), &snapshots[0]["context"]), (1, &24.into()), "{value}");
    let all = &snapshots[0];
    for part in ["to_host_seconds", "resumed_seconds"] {
        let seconds = all[part].as_array().unwrap();
        assert!(seconds.iter().all(|s| s.as_f64().unwrap() > 0.0), "{all}");
        assert_eq!(seconds.len(), 2, "{all}");
    }
    assert!(all["bytes"].as_u64().unwrap() > 24 && all["trouble"].is_null(), "{all}");
    let run = lily(&args);
    assert!(run.stdout.contains("back, and one token ms"), "{run:?}");
    let rows = fs::read_to_string(record.join("run.tsv")).unwrap();
    assert!(rows.contains("\tsnapshot of 24 tokens, "), "{rows}");
    // Without it nothing is measured.
    let value = json(&[&["bench", "run", "--no-floors", "--json"], &SMALL[..]].concat());
    assert_eq!(value["snapshots"].as_array().unwrap().len(), 0);
}

#[test]
fn what_the_cpu_can_leave_out() {
    let dir = tempfile::tempdir().unwrap();
    let record = dir.path().join("results");
    let small = ["--prefill", "8", "--decode", "24", "--decode-tokens", "4", "--rounds", "2"];
    let args = [&["bench", "ablate", "--record", record.to_str().unwrap()], &small[..]].concat();
    let value = json(&[&args[..], &["--json"]].concat());
    let switches = value["switches"].as_array().unwrap();
    let names: Vec<&str> = switches.iter().map(|s| s["switch"].as_str().unwrap()).collect();
    assert_eq!(names, ["threads", "vectors", "quantized_activations", "chunks"]);
    for switch in switches {
        for point in switch["measured"]["points"].as_array().unwrap() {
            assert_eq!(point["engines"][1]["ratios"].as_array().unwrap().len(), 2, "{point}");
        }
    }
    let run = lily(&[&args[..], &["--switch", "chunks"]].concat());
    assert!(run.stdout.contains("time without it over time with it"), "{run:?}");
    assert!(run.stdout.contains("chunks") && !run.stdout.contains("vectors"), "{run:?}");
    let rows = fs::read_to_string(record.join("ablate.tsv")).unwrap();
    assert!(rows.contains("\twithout vectors: prefill of 8 tokens\t"), "{rows}");
    fails(&["bench", "ablate", "--switch", "fuse_norm"], 2, &["no switch fuse_norm", "threads"]);
}

#[test]
fn kernels_alone() {
    let dir = tempfile::tempdir().unwrap();
    let record = dir.path().join("results");
    let args = ["bench", "roofline", "--prefill", "4", "--rounds", "1", "--memory", "1", "--json"];
    let value = json(&[&args[..], &["--record", record.to_str().unwrap()]].concat());
    let kernels = value["kernels"].as_array().unwrap();
    assert!(kernels.len() > 15, "{value}");
    for kernel in kernels {
        for part in ["seconds", "read_only_seconds", "no_arithmetic_seconds"] {
            let seconds = kernel[part].as_array().unwrap();
            assert!(seconds.len() == 1 && seconds[0].as_f64().unwrap() > 0.0, "{part}: {kernel}");
        }
        assert!(kernel["of_limit"].as_f64().unwrap() > 0.0, "{kernel}");
    }
    assert!(value["bytes_per_second"].as_f64().unwrap() > 0.0);
    let rows = fs::read_to_string(record.join("roofline.tsv")).unwrap();
    assert!(rows.contains("\tGEMV Q4 x i8, 1 x [8192 x 2048], read-only twin\t"), "{rows}");
}
