//! Other engines: recorded outputs, and programs that behave as they do.

use std::fs;
use std::path::{Path, PathBuf};

use lily_bench::peers::{
    LlamaBench, LlamaOptions, MlxLm, parse_llama_bench, parse_ready, parse_score, parse_seconds,
};
use lily_bench::{Engine, Point, Trouble};
use lily_engine::Cancel;

fn recorded(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded").join(name);
    fs::read_to_string(path).unwrap()
}

#[test]
fn llama_bench_of_today() {
    let tests = parse_llama_bench(&recorded("llama-bench-cpu.json")).unwrap();
    assert_eq!(tests.len(), 2);
    assert_eq!((tests[0].prompt, tests[0].generated, tests[0].depth), (512, 0, 0));
    assert_eq!(tests[0].seconds, [1.53, 1.51]);
    assert_eq!((tests[1].prompt, tests[1].generated, tests[1].depth), (0, 64, 4096));
    assert_eq!(tests[1].seconds, [1.04]);
    let fact = |i: usize, key: &str| {
        tests[i].facts.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
    };
    assert_eq!(fact(0, "build_commit"), Some("5a1d3c2f"));
    assert_eq!(fact(0, "flash_attn"), Some("1"));
    assert_eq!(fact(1, "flash_attn"), Some("true"));
    assert_eq!(fact(0, "use_mmap"), Some("true"));
    assert_eq!(fact(1, "load_mode"), Some("mmap"));
}

#[test]
fn llama_bench_of_old_has_an_average_and_no_depth() {
    let tests = parse_llama_bench(&recorded("llama-bench-2024.json")).unwrap();
    assert_eq!((tests[0].prompt, tests[0].depth), (512, 0));
    assert_eq!(tests[0].seconds, [0.212_365_953]);
}

#[test]
fn what_comes_before_the_array_does_no_harm() {
    let text = format!("warning: [x] built for debugging\n{}", recorded("llama-bench-cpu.json"));
    assert_eq!(parse_llama_bench(&text).unwrap().len(), 2);
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
    let ready = parse_ready(&recorded("mlx-ready.json")).unwrap();
    assert_eq!((ready.mlx_lm.as_str(), ready.mlx.as_str()), ("0.32.2", "0.31.0"));
    assert_eq!((ready.device.as_str(), ready.load_seconds), ("Device(gpu, 0)", 3.25));
    assert_eq!(ready.files.len(), 2);
    assert!(ready.files[1].sha256.starts_with("a948904f"));
    assert_eq!(parse_seconds("{\"seconds\": 0.25}"), Ok(0.25));
    let score = parse_score("{\"logprob\": [-1.5, -0.25], \"top1\": [7, 8]}", 3).unwrap();
    assert_eq!((score.logprob, score.top1), (vec![-1.5, -0.25], vec![7, 8]));
    let failed = |text: &str| parse_seconds(text).unwrap_err().to_string();
    assert!(failed("{\"error\": \"RuntimeError: no memory\"}").contains("RuntimeError: no memory"));
    assert!(failed("{}").contains("no seconds"));
    assert!(failed("Traceback").contains("it answered Traceback"));
    assert!(parse_score("{\"logprob\": [-1.5], \"top1\": [7]}", 3).is_err());
    assert!(parse_ready("{\"ready\": true}").is_err());
}

#[test]
fn peers_that_are_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let options = |dir: &Path| LlamaOptions {
        dir: dir.into(),
        model: dir.join("model.gguf"),
        threads: None,
        args: Vec::new(),
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
        fs::write(path, format!("#!/bin/sh\n{text}")).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// A llama-bench that takes 2 s without flash attention and 1 s with it, for prompts; decoding the other way
    /// round, and fails beyond 1,000 tokens of depth. It writes down what it was asked.
    const FAKE: &str = r#"
echo "$@" >> "$(dirname "$0")/asked"
fa=0; p=0; n=0; d=0
while [ $# -gt 0 ]; do case $1 in
-fa) fa=$2; shift;; -p) p=$2; shift;; -n) n=$2; shift;; -d) d=$2; shift;;
esac; shift; done
if [ "$d" -gt 1000 ]; then echo "error: no memory" >&2; exit 1; fi
slow=2000000000; fast=1000000000
if [ "$p" -gt 0 ]; then without=$slow; with=$fast; else without=$fast; with=$slow; fi
if [ "$fa" = 1 ]; then ns=$with; else ns=$without; fi
echo "[ { \"n_prompt\": $p, \"n_gen\": $n, \"n_depth\": $d, \"flash_attn\": $fa, \"samples_ns\": [ $ns ] } ]"
"#;

    fn fake(dir: &Path) -> LlamaBench {
        fs::create_dir_all(dir.join("build/bin")).unwrap();
        script(&dir.join("build/bin/llama-bench"), FAKE);
        fs::write(dir.join("model.gguf"), "").unwrap();
        let options = LlamaOptions {
            dir: dir.into(),
            model: dir.join("model.gguf"),
            threads: Some(2),
            args: vec!["-ub".into(), "1024".into()],
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
        // Both in the warm-up, and then the better one alone.
        assert_eq!(asked.len(), 6, "{asked:?}");
        assert!(asked[2].contains("-fa 1") && asked[5].contains("-fa 0"), "{asked:?}");
        assert!(asked[2].contains("-p 512 -n 0") && asked[2].contains("-t 2"), "{asked:?}");
        assert!(asked[5].contains("-p 0 -n 16 -d 768 -ub 1024"), "{asked:?}");
        assert!(llama.facts().contains(&("flash_attn".into(), "0".into())));
    }

    #[test]
    fn its_errors_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let mut llama = fake(dir.path());
        let trouble = llama.decode(2000, 16).unwrap_err().to_string();
        assert!(trouble.contains("no memory"), "{trouble}");
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
        script(&python, "echo \"ModuleNotFoundError: No module named 'mlx_lm'\" >&2; exit 1\n");
        let trouble = MlxLm::start(&python, dir.path(), lily_bench::peers::TIMEOUT, Cancel::new());
        assert!(matches!(trouble.err(), Some(Trouble::Missing(t)) if t.contains("pip install")));
    }
}
