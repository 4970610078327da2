//! Other engines: recorded outputs, and programs that behave as they do.

use std::fs;
use std::path::{Path, PathBuf};

use lily_bench::peers::{
    LlamaBench, LlamaOptions, LlamaTest, MlxLm, parse_llama_bench, parse_ready, parse_score,
    parse_seconds, sha256,
};
use lily_bench::{Engine, Point, Trouble};
use lily_engine::Cancel;

fn recorded(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded").join(name);
    fs::read_to_string(path).unwrap()
}

/// Tokens of prompt, answer and context of each test.
fn shapes(tests: &[LlamaTest]) -> Vec<(u64, u64, u64)> {
    tests.iter().map(|t| (t.prompt, t.generated, t.depth)).collect()
}

fn fact<'t>(test: &'t LlamaTest, key: &str) -> Option<&'t str> {
    test.facts.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
}

#[test]
fn a_decode_after_a_context() {
    let tests = parse_llama_bench(&recorded("llama-bench/decode.json")).unwrap();
    assert_eq!(shapes(&tests), [(0, 8, 32)]);
    // Its samples are nanoseconds of all eight tokens.
    let speed = 8.0 / tests[0].seconds[0];
    let text = recorded("llama-bench/decode.json");
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!((speed / value[0]["avg_ts"].as_f64().unwrap() - 1.0).abs() < 1e-4, "{speed}");
    assert_eq!(fact(&tests[0], "flash_attn"), Some("1"));
    assert_eq!(fact(&tests[0], "model_type"), Some("qwen35moe ?B (guessed) Q4_K - Medium"));
    assert_eq!(
        (fact(&tests[0], "n_threads"), fact(&tests[0], "backends")),
        (Some("2"), Some("CPU"))
    );
}

#[test]
fn several_settings_and_repetitions() {
    let tests = parse_llama_bench(&recorded("llama-bench/settings.json")).unwrap();
    assert_eq!(shapes(&tests), [(64, 0, 0), (0, 4, 0)].repeat(4));
    assert_eq!(tests[0].seconds, [2.918_982_268, 3.072_108_257]);
    assert!(tests.iter().all(|t| t.seconds.len() == 2));
    let settings: Vec<_> =
        tests.iter().step_by(2).map(|t| (fact(t, "flash_attn"), fact(t, "load_mode"))).collect();
    let (off, on) = (Some("0"), Some("1"));
    let (mmap, none) = (Some("mmap"), Some("none"));
    assert_eq!(settings, [(off, mmap), (on, mmap), (off, none), (on, none)]);
}

#[test]
fn what_comes_before_the_array_does_no_harm() {
    let text = format!("warning: [x] built for debugging\n{}", recorded("llama-bench/decode.json"));
    assert_eq!(parse_llama_bench(&text).unwrap().len(), 1);
}

#[test]
fn versions_without_samples_or_depth_have_an_average() {
    // Not recorded: fields that the recorded version has and older ones have not are left out.
    let mut value: serde_json::Value =
        serde_json::from_str(&recorded("llama-bench/decode.json")).unwrap();
    let test = value[0].as_object_mut().unwrap();
    let nanos = test["avg_ns"].as_f64().unwrap();
    for field in ["samples_ns", "samples_ts", "n_depth", "load_mode"] {
        assert!(test.remove(field).is_some(), "{field}");
    }
    let tests = parse_llama_bench(&value.to_string()).unwrap();
    assert_eq!(shapes(&tests), [(0, 8, 0)]);
    assert_eq!(tests[0].seconds, [nanos / 1e9]);
}

#[test]
fn outputs_in_another_form_or_cut_off_are_refused() {
    for name in ["two-tests.jsonl", "two-tests.csv", "missing.stdout", "killed.stdout"] {
        let error = parse_llama_bench(&recorded(&format!("llama-bench/{name}"))).unwrap_err();
        assert!(error.to_string().contains("llama-bench printed no JSON"), "{name}: {error}");
    }
}

#[test]
fn outputs_that_are_none() {
    for (text, want) in [
        ("", "no JSON"),
        ("[", "no JSON"),
        ("{\"n_prompt\": 1}", "no array"),
        ("[{}]", "without samples_ns and avg_ns"),
        ("[{\"avg_ns\": 1, \"n_prompt\": 1}]", "without n_gen"),
    ] {
        let error = parse_llama_bench(text).unwrap_err().to_string();
        assert!(error.contains(want), "{text}: {error}");
    }
}

#[test]
fn what_mlx_lm_says() {
    let text = recorded("mlx-lm/tiny-a.stdout");
    let lines: Vec<&str> = text.lines().collect();
    let ready = parse_ready(lines[0]).unwrap();
    assert_eq!((ready.mlx_lm.as_str(), ready.mlx.as_str()), ("0.32.2", "0.32.4"));
    assert_eq!(ready.device, "Device(cpu, 0)");
    assert!(ready.load_seconds > 0.0);
    // It read the folder of the repository: its checksum is ours.
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../conformance/fixtures/tiny-a/mlx");
    let file = folder.join(&ready.files[0].name);
    assert_eq!(ready.files.len(), 1);
    assert_eq!(ready.files[0].sha256, sha256(&file).unwrap());
    assert_eq!(ready.files[0].bytes, fs::metadata(&file).unwrap().len());
    assert_eq!(parse_seconds(lines[1]), Ok(0.4488289149994671));
    assert_eq!(parse_seconds(lines[2]), Ok(0.2776293720016838));
    let score = parse_score(lines[3], 4).unwrap();
    assert_eq!(score.logprob[0], -9.443787574768066);
    assert_eq!(score.top1, [484, 510, 496]);
    assert!(parse_score(lines[3], 5).unwrap_err().to_string().contains("each of 5 tokens"));
    let failed = |text: &str| parse_seconds(text).unwrap_err().to_string();
    assert!(failed(lines[4]).contains("there is no operation dance"));
    assert!(failed(lines[5]).contains("KeyError: 'tokens'"));
    assert!(failed("{}").contains("no seconds"));
    assert!(failed("Traceback").contains("it answered Traceback"));
    assert!(parse_ready("{\"ready\": true}").is_err());
    assert!(parse_ready(lines[1]).is_err());
}

#[test]
fn peers_that_are_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let options = |dir: &Path| LlamaOptions {
        dir: dir.into(),
        model: dir.join("model.gguf"),
        threads: None,
        args: Vec::new(),
        unmapped: false,
        timeout: lily_bench::peers::TIMEOUT,
    };
    let trouble = LlamaBench::new(options(dir.path()), Cancel::new()).err().unwrap();
    assert!(matches!(&trouble, Trouble::Missing(t) if t.contains("build/bin")), "{trouble}");
    fs::write(dir.path().join("llama-bench"), "").unwrap();
    let trouble = LlamaBench::new(options(dir.path()), Cancel::new()).err().unwrap();
    assert!(matches!(&trouble, Trouble::Missing(t) if t.contains("--gguf")), "{trouble}");
    let python = PathBuf::from("/no/such/python");
    let trouble = MlxLm::start(&python, dir.path(), lily_bench::peers::TIMEOUT, Cancel::new());
    assert!(matches!(trouble.err(), Some(Trouble::Missing(t)) if t.contains("/no/such/python")));
}

#[cfg(unix)]
mod programs {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn script(path: &Path, text: &str) {
        // Another process writes it: a process that another test starts meanwhile would inherit a file open for
        // writing, and such a file cannot be run.
        let draft = path.with_extension("draft");
        fs::write(&draft, format!("#!/bin/sh\n{text}")).unwrap();
        assert!(std::process::Command::new("cp").args([&draft, path]).status().unwrap().success());
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// A llama-bench that takes 2 s without flash attention and 1 s with it, for prompts; decoding the other way
    /// round, and fails beyond 1,000 tokens of depth. A file that it reads takes a tenth more. It writes down what it
    /// was asked.
    const FAKE: &str = r#"
if [ "$1" = --help ]; then echo "  -lm, --load-mode <auto|none|mmap>"; exit; fi
echo "$@" >> "$(dirname "$0")/asked"
fa=0; p=0; n=0; d=0
while [ $# -gt 0 ]; do case $1 in
-fa) fa=$2; shift;; -lm) lm=$2; shift;; -p) p=$2; shift;; -n) n=$2; shift;; -d) d=$2; shift;;
esac; shift; done
if [ "$d" -gt 1000 ]; then echo "error: no memory" >&2; exit 1; fi
slow=2000000000; fast=1000000000
if [ "$p" -gt 0 ]; then without=$slow; with=$fast; else without=$fast; with=$slow; fi
if [ "$fa" = 1 ]; then ns=$with; else ns=$without; fi
if [ "$lm" = none ]; then ns=$((ns + ns / 10)); fi
echo "[ { \"n_prompt\": $p, \"n_gen\": $n, \"n_depth\": $d, \"flash_attn\": $fa, \"samples_ns\": [ $ns ] } ]"
"#;

    fn fake(dir: &Path) -> LlamaBench {
        fake_with(dir, &["-ub", "1024"], true)
    }

    fn fake_with(dir: &Path, args: &[&str], unmapped: bool) -> LlamaBench {
        fs::create_dir_all(dir.join("build/bin")).unwrap();
        script(&dir.join("build/bin/llama-bench"), FAKE);
        fs::write(dir.join("model.gguf"), "").unwrap();
        let options = LlamaOptions {
            dir: dir.into(),
            model: dir.join("model.gguf"),
            threads: Some(2),
            args: args.iter().map(|a| (*a).to_owned()).collect(),
            unmapped,
            timeout: lily_bench::peers::TIMEOUT,
        };
        LlamaBench::new(options, Cancel::new()).unwrap()
    }

    #[test]
    fn the_better_setting_of_flash_attention_counts() {
        let dir = tempfile::tempdir().unwrap();
        let mut llama = fake(dir.path());
        let prefill = Point::Prefill { tokens: 512 };
        llama.warm_up(prefill).unwrap();
        assert_eq!(llama.measure(prefill), Ok(1.0));
        let decode = Point::Decode { context: 768, tokens: 16 };
        llama.warm_up(decode).unwrap();
        assert_eq!(llama.decode(768, 16), Ok(1.0));
        let asked = fs::read_to_string(dir.path().join("build/bin/asked")).unwrap();
        let asked: Vec<&str> = asked.lines().collect();
        // All four in the warm-up, and then the best one alone.
        assert_eq!(asked.len(), 10, "{asked:?}");
        assert!(asked[4].contains("-fa 1 -lm mmap"), "{asked:?}");
        assert!(asked[9].contains("-fa 0 -lm mmap"), "{asked:?}");
        assert!(asked[4].contains("-p 512 -n 0") && asked[4].contains("-t 2"), "{asked:?}");
        assert!(asked[9].contains("-p 0 -n 16 -d 768 -ub 1024"), "{asked:?}");
        let facts = llama.facts();
        let best = ("best at prefill of 512 tokens".into(), "-fa 1, mapped".into());
        assert!(facts.contains(&best), "{facts:?}");
    }

    /// Each run loads the model: what the arguments settle is not varied, and what is left alone is not chosen in a warm-up.
    #[test]
    fn flash_attention_by_the_arguments() {
        for (args, seconds, best) in [
            (["-ub", "1024", "-fa", "0"], 2.0, "-fa 0, mapped"),
            (["-fa", "1", "-ub", "1024"], 1.0, "-fa 1, mapped"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let mut llama = fake_with(dir.path(), &args, false);
            let prefill = Point::Prefill { tokens: 512 };
            llama.warm_up(prefill).unwrap();
            assert_eq!(llama.measure(prefill), Ok(seconds));
            let asked = fs::read_to_string(dir.path().join("build/bin/asked")).unwrap();
            assert_eq!(asked.lines().count(), 1, "{asked}");
            assert_eq!(asked.matches("-fa").count(), 1, "{asked}");
            let best = ("best at prefill of 512 tokens".into(), best.into());
            assert!(llama.facts().contains(&best));
        }
    }

    #[test]
    fn its_errors_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let mut llama = fake(dir.path());
        let trouble = llama.decode(2000, 16).unwrap_err().to_string();
        assert!(trouble.contains("no memory"), "{trouble}");
    }

    /// What llama-bench said when it failed is what is told, whatever it printed before.
    #[test]
    fn recorded_failures_are_told() {
        for (name, want) in [
            ("missing", "failed to open GGUF file 'none.gguf' (No such file or directory)"),
            ("bad", "invalid magic characters: 'garb', expected 'GGUF'"),
            ("cut", "data is not within the file bounds, model is corrupted or incomplete"),
            ("flag", "invalid parameter for argument: --no-such-flag"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded/llama-bench");
            let (out, errors) =
                (recorded.join("missing.stdout"), recorded.join(format!("{name}.stderr")));
            let text = format!("cat '{}'; cat '{}' >&2; exit 1\n", out.display(), errors.display());
            let mut llama = fake(dir.path());
            script(&dir.path().join("build/bin/llama-bench"), &text);
            let trouble = llama.prefill(16).unwrap_err().to_string();
            assert!(trouble.contains("exit status: 1") && trouble.contains(want), "{trouble}");
        }
    }

    /// A Python that answers as the peer's program does, and dies when it is asked for 13 tokens.
    const PYTHON: &str = r#"
echo '{"ready": true, "mlx_lm": "1", "mlx": "2", "device": "cpu", "load_seconds": 0.5, "files": []}'
while read -r line; do case $line in
*'"tokens":13'*) echo "Segmentation fault" >&2; exit 139;;
*decode*) echo '{"seconds": 0.5}';;
*prefill*) echo '{"seconds": 2.5}';;
*) echo '{"error": "ValueError: what?"}';;
esac; done
"#;

    #[test]
    fn one_process_answers_until_it_dies_and_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let python = dir.path().join("python");
        script(&python, PYTHON);
        let mut mlx =
            MlxLm::start(&python, dir.path(), lily_bench::peers::TIMEOUT, Cancel::new()).unwrap();
        assert_eq!(mlx.prefill(512), Ok(2.5));
        assert_eq!(mlx.decode(512, 64), Ok(0.5));
        let trouble = mlx.prefill(13).unwrap_err().to_string();
        assert!(trouble.contains("Segmentation fault"), "{trouble}");
        assert_eq!(mlx.prefill(16), Ok(2.5));
        let trouble = mlx.score(&[1, 2]).unwrap_err().to_string();
        assert!(trouble.contains("ValueError"), "{trouble}");
    }

    #[test]
    fn a_python_without_mlx_lm_is_missing_it() {
        let dir = tempfile::tempdir().unwrap();
        let python = dir.path().join("python");
        let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded/mlx-lm");
        let errors = recorded.join("missing-module.stderr");
        script(&python, &format!("cat '{}' >&2; exit 1\n", errors.display()));
        let trouble = MlxLm::start(&python, dir.path(), lily_bench::peers::TIMEOUT, Cancel::new());
        assert!(matches!(trouble.err(), Some(Trouble::Missing(t)) if t.contains("pip install")));
    }

    #[test]
    fn a_folder_that_mlx_lm_cannot_read_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let python = dir.path().join("python");
        let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded/mlx-lm");
        let errors = recorded.join("missing-folder.stderr");
        script(&python, &format!("cat '{}' >&2; exit 1\n", errors.display()));
        let trouble = MlxLm::start(&python, dir.path(), lily_bench::peers::TIMEOUT, Cancel::new());
        let trouble = trouble.err().unwrap().to_string();
        assert!(
            trouble.contains("No such file or directory: '/nonexistent/config.json'"),
            "{trouble}"
        );
    }
}
