//! What goes wrong is said with a hint, and ends with the right code.

mod common;

use common::{fails, file, lily};

#[test]
fn prompts() {
    fails(&["run"], 2, &["there is no prompt", "hint: "]);
    fails(&["run", " \n"], 1, &["the prompt is empty", "hint: "]);
    fails(&["run", "-"], 1, &["the prompt is empty", "hint: "]);
    fails(&["run", "hello", "--context", "4"], 1, &["the context holds 4", "longer --context"]);
    fails(&["run", "hello", "--context", "40000"], 1, &["32768", "hint: "]);
}

#[test]
fn models() {
    fails(&["run", "hi", "--model", "/no/such"], 1, &["/no/such", "check the spelling"]);
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().to_str().unwrap();
    fails(&["run", "hi", "--model", folder], 1, &[folder]);
    // A folder is meant, which is not there.
    fails(&["inspect", "demo/"], 1, &["demo/", "check the spelling"]);
    fails(&["inspect", "Org/Name/"], 1, &["Org/Name/", "check the spelling"]);
}

/// The built-in model in a folder, with one file that is other than it should be.
fn demo_with(dir: &tempfile::TempDir, name: &str, text: &str) -> String {
    for (file, bytes) in lily_demo::FILES {
        std::fs::write(dir.path().join(file), bytes).unwrap();
    }
    std::fs::write(dir.path().join(name), text).unwrap();
    dir.path().to_str().unwrap().to_owned()
}

#[test]
fn text_files_of_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    for (name, text, words) in [
        ("generation_config.json", r#"{"top_p": 2}"#, "top_p is 2; it must lie between 0 and 1"),
        ("generation_config.json", r#"{"top_k": "x"}"#, "top_k is \"x\", but must be"),
        ("generation_config.json", r#"{"eos_token_id": 999999}"#, "the vocabulary, which has 4096"),
        ("tokenizer_config.json", r#"{"eos_token": 1}"#, "eos_token is 1"),
        ("tokenizer.json", r#"{"model": {"type": "Unigram"}}"#, "tokenizer.json: "),
    ] {
        let model = demo_with(&dir, name, text);
        fails(&["run", "hi", "--model", &model], 1, &[name, words]);
    }
    let dir = tempfile::tempdir().unwrap();
    let config = file(&dir, "config.json", r#"{"a": 1, "a": 2}"#);
    let folder = dir.path().to_str().unwrap();
    fails(&["inspect", folder], 1, &[&config, "`a` occurs twice"]);
}

#[cfg(unix)]
#[test]
fn an_interrupted_synthesis_says_what_it_leaves() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("synth");
    let folder = out.to_str().unwrap();
    let args = ["bench", "synth", "--layers", "4", "--out", folder];
    let child = common::command(&args).spawn().unwrap();
    while !out.join("model.safetensors").exists() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let run = child.wait_with_output().unwrap();
    let text = String::from_utf8(run.stderr).unwrap();
    assert_eq!(run.status.code(), Some(130), "{text}");
    assert!(text.contains(&format!("{folder} is incomplete")) && text.contains("hint: delete it"));
}

#[cfg(unix)]
#[test]
fn a_limit_on_the_size_of_files_is_no_crash() {
    let dir = tempfile::tempdir().unwrap();
    let line = "ulimit -f 1000; exec \"$0\" bench synth --layers 1 --out \"$1\"";
    let run = std::process::Command::new("sh")
        .args(["-c", line, env!("CARGO_BIN_EXE_lily")])
        .arg(dir.path().join("synth"))
        .output()
        .unwrap();
    let text = String::from_utf8(run.stderr).unwrap();
    assert_eq!(run.status.code(), Some(1), "{text}");
    assert!(text.contains("ulimit -f unlimited"), "{text}");
}

#[test]
fn flag_values() {
    for args in [
        ["--temperature", "-1"],
        ["--temperature", "hot"],
        ["--temperature", "NaN"],
        ["--top-p", "1.5"],
        ["--min-p", "-0.1"],
        ["--top-k", "-1"],
        ["--repetition-penalty", "0"],
        ["--presence-penalty", "1000"],
        ["--frequency-penalty", "inf"],
        ["--max-tokens", "0"],
        ["--context", "0"],
        ["--context", "99999999999999999999"],
        ["--chunk", "0"],
        ["--threads", "0"],
        ["--seed", "x"],
        ["--logit-bias", "5"],
        ["--logit-bias", "5:101"],
        ["--logit-bias", "5:1,x:2"],
        ["--logit-bias", "5:1,5:2"],
        ["--logit-bias", "-5:1"],
        ["--logprobs", "21"],
        ["--logprobs", "-1"],
        ["--isa", "sse"],
    ] {
        fails(&["run", "hi", args[0], args[1]], 2, &["invalid value", args[0]]);
    }
    fails(&["run", "hi", "--temperature", "-1"], 2, &["a number from 0 to 100 is needed"]);
    fails(&["run", "hi", "--isa", "sse"], 2, &["this machine has: ", "portable"]);
    fails(&["run", "hi", "--logit-bias", "4:1,"], 2, &["1234:5,77:-100"]);
    fails(&["run", "hi", "--logit-bias", "9999999:1"], 1, &["token 9999999", "hint: "]);
    fails(&["chat", "--logit-bias", "9999999:1"], 1, &["token 9999999", "hint: "]);
    fails(&["run", "hi", "--token-ids", "x"], 2, &["cannot be used with"]);
}

#[test]
fn token_ids() {
    let dir = tempfile::tempdir().unwrap();
    let run = |text: &str, says: &[&str]| {
        let path = file(&dir, "ids.json", text);
        fails(&["run", "--token-ids", &path], 1, &[says, &["hint: "]].concat());
    };
    run("[1, 2", &["not JSON", "JSON array of token ids"]);
    run("[]", &["the array is empty"]);
    run("[1, \"a\"]", &["position 1"]);
    run("[1, 4096]", &["token 4096 at position 1", "vocabulary of 4096"]);
    fails(&["run", "--token-ids", "/no/such"], 1, &["/no/such", "hint: "]);
}

#[test]
fn help_is_for_people() {
    let help = format!("{} {}", lily(&["--help"]).stdout, lily(&["run", "--help"]).stdout);
    let words: Vec<&str> = help.split_whitespace().collect();
    let help = words.join(" ");
    for part in ["Default: 8192", "generation_config.json", "avx512vnni", "130 ended by Ctrl-C"] {
        assert!(help.contains(part), "{part}: {help}");
    }
}
