//! `lily doctor --self-test`.

mod common;

use std::fs;

use common::lily_at;
use serde_json::Value;

#[test]
fn the_cpu_passes_its_self_test() {
    let home = tempfile::tempdir().unwrap();
    let report = home.path().join("report.json");
    let run =
        lily_at(home.path(), &["doctor", "--self-test", "--report", report.to_str().unwrap()]);
    assert_eq!(run.code, Some(0), "{run:?}");
    let report: Value = serde_json::from_str(&fs::read_to_string(report).unwrap()).unwrap();
    let parts = report["parts"].as_array().unwrap();
    let outcomes: Vec<_> = parts
        .iter()
        .map(|p| (p["part"].as_str().unwrap(), p["outcome"].as_str().unwrap()))
        .collect();
    let want = [
        ("kernels", "left out"),
        ("operations", "passed"),
        ("demo model", "passed"),
        ("overlapping steps", "left out"),
    ];
    assert_eq!(outcomes, want);
    assert_eq!(parts[2]["figures"]["positions"], 576);
    assert_eq!(report["device"], "cpu");
    for (part, outcome) in want {
        assert!(run.stdout.contains(&format!("{part}: {outcome}")), "{}", run.stdout);
    }
}

#[test]
#[cfg(not(target_os = "macos"))]
fn a_device_that_is_not_there_is_explained() {
    let home = tempfile::tempdir().unwrap();
    for args in
        [&["doctor", "--self-test", "--device", "metal"][..], &["run", "--device", "metal", "Hi"]]
    {
        let run = lily_at(home.path(), args);
        assert_eq!(run.code, Some(1), "{run:?}");
        assert!(run.stderr.contains("needs macOS on Apple silicon"), "{run:?}");
        assert!(run.stderr.contains("--device cpu"), "{run:?}");
    }
}
