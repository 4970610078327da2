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
