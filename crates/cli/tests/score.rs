//! `lily score`.

mod common;

use common::{fails, file, golden, ids, json, lily, lily_with_stdin};

#[test]
fn precise_scores_equal_the_goldens() {
    let dir = tempfile::tempdir().unwrap();
    let golden = golden("logprobs.json");
    for sequence in golden["sequences"].as_array().unwrap() {
        let tokens = ids(&sequence["ids"]);
        let path = file(&dir, "ids.json", &sequence["ids"].to_string());
        let args = ["score", "--model", "demo", "--token-ids", &path, "--precise", "--json"];
        let value = json(&args);
        assert_eq!(value["tokens"], tokens.len());
        let positions = value["positions"].as_array().unwrap();
        assert_eq!(positions.len(), tokens.len() - 1);
        let (mut worst, mut sum) = (0f64, 0f64);
        for (i, position) in positions.iter().enumerate() {
            let number = |v: &serde_json::Value| v.as_f64().unwrap();
            assert_eq!(position["id"], tokens[i + 1]);
            worst = worst
                .max((number(&position["logprob"]) - number(&sequence["logprob"][i + 1])).abs());
            worst = worst.max(
                (number(&position["top1_logprob"]) - number(&sequence["top1_logprob"][i])).abs(),
            );
            if number(&sequence["margin"][i]) > 1e-3 {
                assert_eq!(position["top1"], sequence["top1"][i], "position {i}");
            }
            sum -= number(&position["logprob"]);
        }
        println!("{}: largest difference {worst:.2e}", sequence["name"]);
        assert!(worst <= 2e-3, "{}: {worst}", sequence["name"]);
        let perplexity = (sum / positions.len() as f64).exp();
        assert!((value["perplexity"].as_f64().unwrap() / perplexity - 1.0).abs() < 1e-6);
    }
}

#[test]
fn texts_and_summaries() {
    let dir = tempfile::tempdir().unwrap();
    let text = "The capital of France is Paris.";
    let path = file(&dir, "text.txt", text);
    let by_file = json(&["score", "--text", &path, "--json"]);
    assert!(by_file["tokens"].as_u64() > Some(3), "{by_file}");
    let run = lily_with_stdin(&["score", "--text", "-", "--json"], text);
    assert_eq!(serde_json::from_str::<serde_json::Value>(&run.stdout).unwrap(), by_file);
    let run = lily(&["score", "--text", &path]);
    for part in ["tokens", "perplexity", "top-1"] {
        assert!(run.stdout.contains(part), "{run:?}");
    }
}

#[test]
fn refusals() {
    let dir = tempfile::tempdir().unwrap();
    let one = file(&dir, "one.json", "[5]");
    fails(&["score", "--token-ids", &one], 1, &["1 of the two tokens", "hint: "]);
    let empty = file(&dir, "empty.txt", "");
    fails(&["score", "--text", &empty], 1, &["0 of the two tokens", "hint: "]);
    fails(&["score"], 2, &["--text", "--token-ids"]);
    fails(&["score", "--text", &empty, "--token-ids", &one], 2, &["cannot be used with"]);
    let long = format!("[{}7]", "7,".repeat(33_000));
    let long = file(&dir, "long.json", &long);
    fails(&["score", "--token-ids", &long], 1, &["33001", "32768", "hint: "]);
}
