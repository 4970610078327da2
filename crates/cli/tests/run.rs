//! `lily run`.

mod common;

use std::io::Read;

use common::{
    command, file, fixture_without, golden, ids, json, lily, lily_with_stdin, repository,
};
use serde_json::Value;

const CAPITAL: &str = "What is the capital of France?";

#[test]
fn the_demo_model_answers_and_says_what_it_is() {
    let run = lily(&["run", CAPITAL, "--temperature", "0", "--no-think"]);
    assert_eq!(run.code, Some(0), "{run:?}");
    assert_eq!(run.stdout, "The capital of France is Paris.\n");
    assert_eq!(run.stderr.matches("not a general assistant").count(), 1, "{run:?}");
    for part in ["prefill", "decode", "tokens/s"] {
        assert!(run.stderr.contains(part), "{run:?}");
    }
    assert!(!run.stderr.contains('\x1b'), "{run:?}");
    let run = lily(&["run", CAPITAL, "--temperature", "0", "--no-think", "--quiet"]);
    assert_eq!(
        (run.stdout.as_str(), run.stderr.as_str()),
        ("The capital of France is Paris.\n", "")
    );
    // Named, it needs no introduction.
    let run = lily(&["run", CAPITAL, "--model", "demo", "--max-tokens", "1"]);
    assert!(!run.stderr.contains("general assistant"), "{run:?}");
}

#[test]
fn thinking_stays_out_of_a_piped_answer_and_is_in_the_json() {
    let greedy = ["run", CAPITAL, "--temperature", "0"];
    let run = lily(&greedy);
    assert!(run.stdout.contains("Paris"), "{run:?}");
    assert_eq!(run.stdout.lines().count(), 1, "{run:?}");
    let value = json(&[&greedy[..], &["--json"]].concat());
    assert_eq!(format!("{}\n", value["text"].as_str().unwrap()), run.stdout);
    assert!(!value["reasoning"].as_str().unwrap().is_empty(), "{value}");
    assert_eq!(value["finish_reason"], "stop");
    assert_eq!(value["model"], "lily-demo-4bit");
    let generated = ids(&value["token_ids"]);
    assert_eq!(generated.last(), Some(&4066), "the stop token is included");
    let timings = &value["timings"];
    assert_eq!(timings["prefill_tokens"], value["prompt_tokens"]);
    assert_eq!(timings["decode_tokens"], generated.len() - 1);
    assert!(timings["prefill_seconds"].as_f64().unwrap() > 0.0);
    assert!(timings["decode_seconds"].as_f64().unwrap() > 0.0);
    // An answer that ends while thinking has no text.
    let value = json(&[&greedy[..], &["--json", "--max-tokens", "2"]].concat());
    assert_eq!(value["finish_reason"], "length");
    assert_eq!(value["text"], "");
    let run = lily(&[&greedy[..], &["--max-tokens", "2"]].concat());
    assert!(run.stdout.is_empty(), "{run:?}");
    assert!(run.stderr.contains("ended while thinking: --max-tokens was reached"), "{run:?}");
}

#[test]
fn prompts_from_stdin_and_a_system_message() {
    let args = ["run", "-", "--temperature", "0", "--no-think", "--quiet"];
    let run = lily_with_stdin(&args, &format!("{CAPITAL}\n"));
    assert_eq!(run.stdout, "The capital of France is Paris.\n");
    let plain = json(&["run", CAPITAL, "--max-tokens", "1", "--json"]);
    let with = json(&["run", CAPITAL, "--system", "Be brief.", "--max-tokens", "1", "--json"]);
    assert!(with["prompt_tokens"].as_u64() > plain["prompt_tokens"].as_u64());
}

#[test]
fn token_ids_continue_as_the_goldens_do() {
    let dir = tempfile::tempdir().unwrap();
    let golden = golden("greedy.json");
    for name in ["capital, thinking off", "tool call"] {
        let prompts = golden["prompts"].as_array().unwrap();
        let prompt = prompts.iter().find(|p| p["name"] == name).unwrap();
        let path = file(&dir, "ids.json", &prompt["prompt_ids"].to_string());
        let tail = ["--max-tokens", "64", "--temperature", "0", "--json", "--precise"];
        let value = json(&[&["run", "--token-ids", &path], &tail[..]].concat());
        assert_eq!(ids(&value["token_ids"]), ids(&prompt["output_ids"]), "{name}");
        assert_eq!(value["finish_reason"], "stop");
        assert!(value["text"].is_string() && value["reasoning"].is_null(), "{value}");
    }
}

#[test]
fn a_checkpoint_without_a_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let none = ["tokenizer.json", "tokenizer_config.json"];
    let model = fixture_without(&dir, "tiny-c", &none);
    let text = std::fs::read_to_string(
        repository().join("crates/conformance/fixtures/tiny-c/tokens.json"),
    );
    let tokens: Value = serde_json::from_str(&text.unwrap()).unwrap();
    let path = file(&dir, "ids.json", &tokens["tokens"].to_string());
    let args = ["run", "--model", &model, "--token-ids", &path, "--max-tokens", "24"];
    let args = [&args[..], &["--temperature", "0", "--precise"]].concat();
    let value = json(&[&args[..], &["--json"]].concat());
    let generated = ids(&value["token_ids"]);
    assert_eq!(generated, ids(&tokens["greedy_f32"])[..generated.len()]);
    assert!(generated.len() == 24 || value["finish_reason"] == "stop", "{value}");
    assert_eq!(value["text"], Value::Null);
    // For people the ids themselves are the answer.
    let run = lily(&args);
    let printed: Vec<u32> = run.stdout.split_whitespace().map(|id| id.parse().unwrap()).collect();
    assert_eq!(printed[..], generated[..printed.len()]);
    common::fails(&["run", "hello", "--model", &model], 1, &["no tokenizer.json", "--token-ids"]);
    // With its tokenizer, but without a template, text cannot be rendered.
    let dir = tempfile::tempdir().unwrap();
    let model = fixture_without(&dir, "tiny-c", &[]);
    common::fails(&["run", "hello", "--model", &model], 1, &["no chat template", "--token-ids"]);
}

#[test]
fn text_never_holds_tokens_without_a_name_and_token_ids_may() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir, "ids.json", "[4065, 302, 260, 198]");
    let wild = ["--temperature", "100", "--top-k", "0", "--top-p", "1", "--seed", "3", "--json"];
    let wild = [&wild[..], &["--max-tokens", "1200"]].concat();
    // The tokenizer names 4,064 byte-pair entries and 9 control tokens.
    let unnamed = |value: &Value| ids(&value["token_ids"]).iter().filter(|id| **id >= 4073).count();
    assert_eq!(unnamed(&json(&[&["run", "Say something."], &wild[..]].concat())), 0);
    assert!(unnamed(&json(&[&["run", "--token-ids", &path], &wild[..]].concat())) > 0);
}

#[test]
fn seeds_repeat_and_are_told() {
    let args = ["run", "Tell me a story.", "--max-tokens", "24", "--json"];
    let first = json(&args);
    let seed = first["seed"].to_string();
    let again = json(&[&args[..], &["--seed", &seed]].concat());
    assert_eq!(first["token_ids"], again["token_ids"]);
    assert_ne!(json(&args)["seed"], first["seed"]);
    // Neither threads nor instruction sets change it.
    let other = ["--seed", &seed, "--threads", "1", "--isa", "portable", "--chunk", "3"];
    assert_eq!(first["token_ids"], json(&[&args[..], &other].concat())["token_ids"]);
}

#[test]
fn biases_change_the_answer_and_logprobs_do_not() {
    let args = ["run", CAPITAL, "--temperature", "0", "--no-think", "--json"];
    let plain = json(&args);
    assert_eq!(plain["logprobs"], Value::Null);
    let told = json(&[&args[..], &["--logprobs", "3"]].concat());
    assert_eq!(told["token_ids"], plain["token_ids"]);
    let positions = told["logprobs"].as_array().unwrap();
    assert_eq!(positions.len(), ids(&told["token_ids"]).len());
    for (position, id) in positions.iter().zip(ids(&told["token_ids"])) {
        // Greedy: the chosen token is the most probable one.
        assert_eq!(position["id"], id);
        let top = position["top"].as_array().unwrap();
        assert_eq!(
            (top.len(), &top[0]["id"], &top[0]["logprob"]),
            (3, &position["id"], &position["logprob"])
        );
        assert!(top[0]["token"].is_string());
        let logprobs: Vec<f64> = top.iter().map(|t| t["logprob"].as_f64().unwrap()).collect();
        assert!(logprobs.is_sorted_by(|a, b| a >= b) && logprobs[0] <= 0.0, "{logprobs:?}");
    }
    // Against a bias the model's own distribution is told all the same.
    let first = positions[0]["id"].to_string();
    let biased = ["--logprobs", "1", "--logit-bias", &format!("{first}:-100")];
    let biased = json(&[&args[..], &biased].concat());
    assert_ne!(biased["token_ids"][0], plain["token_ids"][0]);
    let position = &biased["logprobs"][0];
    assert_eq!(position["top"][0], positions[0]["top"][0]);
    assert!(position["logprob"].as_f64() < position["top"][0]["logprob"].as_f64());
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let mut child = command(&["run", "Tell me a story.", "--seed", "1"]).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut byte = [0];
    stdout.read_exact(&mut byte).unwrap();
    drop(stdout);
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !stderr.contains("panicked"), "{stderr}");
}

#[test]
#[cfg(unix)]
fn ctrl_c_ends_the_answer() {
    // Hot enough that the answer does not end by itself for long.
    let wild = ["--temperature", "100", "--top-k", "0", "--top-p", "1", "--seed", "3"];
    let mut child =
        command(&[&["run", "Go on.", "--no-think"], &wild[..]].concat()).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut byte = [0];
    stdout.read_exact(&mut byte).unwrap();
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let mut rest = Vec::new();
    stdout.read_to_end(&mut rest).unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("ended: interrupted") && stderr.contains("decode"), "{stderr}");
}
