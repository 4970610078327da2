//! `lily doctor --self-test`.

mod common;

use std::fs;
use std::path::Path;

use common::{command, isolate, lily_at};
use serde_json::Value;

/// Writes a program for the shell.
fn script(path: &Path, text: &str) {
    fs::write(path, format!("#!/bin/sh\n{text}\n")).unwrap();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
}

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

/// The measurements run to their end on small sizes, each figure by a run of its own, all in one report.
#[test]
fn measurements_end_and_stand_in_the_report() {
    let home = tempfile::tempdir().unwrap();
    let report = home.path().join("report.json");
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo");
    let args = [
        "doctor",
        "--self-test",
        "--report",
        report.to_str().unwrap(),
        "--measure",
        demo,
        "--lengths",
        "8,16",
        "--rounds",
        "1",
        "--part-seconds",
        "600",
    ];
    let parts = ["checkpoint", "rows", "thresholds", "optimisations", "frontiers"];
    let args: Vec<&str> =
        args.into_iter().chain(parts.iter().flat_map(|p| ["--part", *p])).collect();
    // An interpreter without mlx-lm.
    let bin = home.path().join("bin");
    fs::create_dir(&bin).unwrap();
    script(&bin.join("python3"), "exit 1");
    let mut command = command(&args);
    isolate(&mut command, home.path());
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let output = command.env("PATH", path).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = fs::read_to_string(&report).unwrap();
    let report: Value = serde_json::from_str(&text).unwrap();
    let found: Vec<_> = report["parts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| (p["part"].as_str().unwrap(), p["outcome"].as_str().unwrap()))
        .collect();
    let want = parts.map(|p| (p, if p == "thresholds" { "left out" } else { "passed" }));
    assert_eq!(found, want);
    let figures = |at: usize| &report["parts"][at]["figures"];
    assert_eq!(figures(1)["steps"].as_array().unwrap().len(), 15);
    let switches = figures(3)["switches"].as_array().unwrap();
    assert_eq!(switches.len(), 4);
    for switch in switches {
        // Two prompts and two contexts.
        assert_eq!(switch["measured"]["points"].as_array().unwrap().len(), 4, "{switch}");
    }
    let lengths = figures(4)["lengths"].as_array().unwrap();
    assert_eq!(lengths.len(), 2);
    for run in lengths {
        let point = &run["measured"]["points"][0]["engines"][0];
        assert!(point["tokens_per_second"].as_f64().is_some_and(|s| s > 0.0), "{run}");
    }
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(
        stdout.contains("python3 has no mlx_lm") && stdout.contains("without vectors"),
        "{stdout}"
    );
}

/// Where python3 has mlx-lm, its frontiers stand beside Lily's; what goes wrong with it costs Lily nothing.
#[test]
#[cfg(unix)]
fn frontiers_stand_beside_those_of_mlx_lm() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let own = lily_bench::peers::sha256(&demo.join("model.safetensors")).unwrap();
    let cases = [
        (own.as_str(), "mlx-lm 3.2 tokens/s"),
        ("0000", "mlx-lm: failed: model.safetensors: SHA-256 0000 here"),
    ];
    for (sha256, said) in cases {
        let home = tempfile::tempdir().unwrap();
        let (report, bin) = (home.path().join("report.json"), home.path().join("bin"));
        fs::create_dir(&bin).unwrap();
        script(&bin.join("python3"), &mlx_lm(sha256));
        let args = ["doctor", "--self-test", "--report", report.to_str().unwrap()];
        let measure = ["--measure", demo.to_str().unwrap(), "--part", "frontiers"];
        let small = ["--lengths", "8", "--rounds", "1"];
        let mut command = command(&[&args[..], &measure, &small].concat());
        isolate(&mut command, home.path());
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
        let output = command.env("PATH", path).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let stdout = String::from_utf8(output.stdout).unwrap();
        assert!(stdout.contains("beside mlx-lm") && stdout.contains(said), "{stdout}");
        let report: Value = serde_json::from_str(&fs::read_to_string(&report).unwrap()).unwrap();
        let points = &report["parts"][0]["figures"]["lengths"][0]["measured"]["points"];
        for (point, theirs) in points.as_array().unwrap().iter().zip([8.0 / 2.5, 64.0 / 0.5]) {
            let speed = |at: usize| point["engines"][at]["tokens_per_second"].as_f64();
            assert!(speed(0).is_some_and(|s| s > 0.0), "{point}");
            assert_eq!(point["engines"][1]["engine"], "mlx-lm");
            assert_eq!(speed(1), (sha256 == own).then_some(theirs), "{point}");
        }
        assert_eq!(points.as_array().unwrap().len(), 2, "{points}");
    }
}

/// A python3 that has mlx-lm, as far as the self-test asks it: a prompt takes 2.5 s, 64 tokens take 0.5 s.
#[cfg(unix)]
fn mlx_lm(sha256: &str) -> String {
    let files = format!(r#"[{{"name": "model.safetensors", "bytes": 1, "sha256": "{sha256}"}}]"#);
    let ready = r#""ready": true, "mlx_lm": "1", "mlx": "2", "device": "cpu", "load_seconds": 0.5"#;
    let answers = r#"while read -r line; do case $line in
*decode*) echo '{"seconds": 0.5}';;
*prefill*) echo '{"seconds": 2.5}';;
*) echo '{"error": "ValueError: what?"}';;
esac; done"#;
    format!(
        "[ \"$2\" = 'import mlx_lm' ] && exit 0\necho '{{{ready}, \"files\": {files}}}'\n{answers}"
    )
}

/// What takes too long is ended, and what was found before it stays in the report.
#[test]
fn a_part_that_takes_too_long_is_unfinished() {
    let home = tempfile::tempdir().unwrap();
    let report = home.path().join("report.json");
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo");
    let (lengths, rounds) = ("8,512", "100000");
    let args = [
        "doctor",
        "--self-test",
        "--part",
        "frontiers",
        "--measure",
        demo,
        "--lengths",
        lengths,
        "--rounds",
        rounds,
        "--part-seconds",
        "1",
        "--report",
        report.to_str().unwrap(),
    ];
    let run = lily_at(home.path(), &args);
    assert_eq!(run.code, Some(0), "{run:?}");
    assert!(run.stdout.contains("frontiers: unfinished"), "{}", run.stdout);
    assert!(run.stdout.contains("512 tokens: not measured"), "{}", run.stdout);
    let report: Value = serde_json::from_str(&fs::read_to_string(report).unwrap()).unwrap();
    let part = &report["parts"][0];
    assert_eq!(part["outcome"], "unfinished");
    assert!(part["figures"]["not_measured"].as_array().is_some_and(|n| !n.is_empty()), "{part}");
}

#[test]
fn unknown_parts_are_refused() {
    let home = tempfile::tempdir().unwrap();
    let run = lily_at(home.path(), &["doctor", "--self-test", "--part", "weather"]);
    assert_eq!(run.code, Some(2), "{run:?}");
    assert!(run.stderr.contains("demo model") && run.stderr.contains("--measure"), "{run:?}");
}
