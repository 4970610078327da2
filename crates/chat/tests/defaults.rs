//! Generation defaults and the choice of the template.

mod common;

use common::demo_file;
use lily_chat::{GenerationDefaults, find_template, generation_defaults};
use serde_json::{Value, json};

#[test]
fn the_demo_model() {
    let config: Value = serde_json::from_str(&demo_file("config.json")).unwrap();
    let defaults =
        generation_defaults(Some(&demo_file("generation_config.json")), &config).unwrap();
    let expected = GenerationDefaults {
        temperature: 0.7,
        top_p: 0.8,
        top_k: 20,
        stop_ids: vec![4066, 4064],
        ..GenerationDefaults::default()
    };
    assert_eq!(defaults, expected);
}

#[test]
fn stop_ids_are_a_union_the_most_specific_file_first() {
    let config = json!({"eos_token_id": 7, "text_config": {"eos_token_id": [5, 9]}});
    let stops =
        |generation: Option<&str>| generation_defaults(generation, &config).unwrap().stop_ids;
    assert_eq!(stops(Some(r#"{"eos_token_id": [9, 3]}"#)), [9, 3, 7, 5]);
    assert_eq!(stops(Some(r#"{"eos_token_id": null}"#)), [7, 5, 9]);
    assert_eq!(stops(None), [7, 5, 9]);
    assert_eq!(generation_defaults(None, &json!({})).unwrap(), GenerationDefaults::default());
}

fn problem(file: &str, config: &Value) -> String {
    generation_defaults(Some(file), config).unwrap_err().to_string()
}

#[test]
fn penalties_are_taken_over() {
    let file = r#"{"presence_penalty": 1.5, "frequency_penalty": -0.25, "repetition_penalty": 1.05, "min_p": 0.1, "top_p": 0}"#;
    let expected = GenerationDefaults {
        presence_penalty: 1.5,
        frequency_penalty: -0.25,
        repetition_penalty: 1.05,
        min_p: 0.1,
        top_p: 0.0,
        ..GenerationDefaults::default()
    };
    assert_eq!(generation_defaults(Some(file), &json!({})).unwrap(), expected);
}

#[test]
fn unusable_values_are_errors_that_name_file_key_and_range() {
    for (file, words) in [
        (r#"{"temperature": -1}"#, "temperature is -1; it must lie between 0 and 100"),
        (r#"{"temperature": 1e300}"#, "temperature is inf; it must lie between 0 and 100"),
        (r#"{"top_p": 1.5}"#, "top_p is 1.5; it must lie between 0 and 1"),
        (r#"{"min_p": 2}"#, "min_p is 2; it must lie between 0 and 1"),
        (
            r#"{"repetition_penalty": 0}"#,
            "repetition_penalty is 0; it must lie between 0.01 and 100",
        ),
        (
            r#"{"presence_penalty": 101}"#,
            "presence_penalty is 101; it must lie between -100 and 100",
        ),
        (r#"{"frequency_penalty": -101}"#, "frequency_penalty is -101; it must"),
        (r#"{"top_p": "high"}"#, "top_p is \"high\", but must be a number"),
        (r#"{"frequency_penalty": [1]}"#, "frequency_penalty is [1], but must be a number"),
        (r#"{"top_k": -1}"#, "top_k is -1, but must be a whole number"),
        (r#"{"top_k": 5000000000}"#, "top_k is 5000000000, but"),
        (r#"{"do_sample": 1}"#, "do_sample is 1, but must be true or false"),
        (r#"{"eos_token_id": [1, -1]}"#, "eos_token_id is [1,-1], but"),
        (r#"{"eos_token_id": "end"}"#, "eos_token_id is \"end\", but"),
        (r#"{"eos_token_id": 10000000000}"#, "eos_token_id is 10000000000, but"),
        (r#"{"top_k": 1, "top_k": 2}"#, "the JSON key `top_k` occurs twice"),
        ("[]", "not an object"),
        ("{", "not valid JSON"),
    ] {
        let error = problem(file, &json!({}));
        assert!(error.starts_with("generation_config.json") && error.contains(words), "{error}");
    }
    let many = json!({"eos_token_id": (0..5000).collect::<Vec<u32>>()}).to_string();
    assert!(problem(&many, &json!({})).contains("at most 1024"));
}

#[test]
fn stop_tokens_are_of_the_vocabulary() {
    let config = json!({"text_config": {"vocab_size": 10, "eos_token_id": 9}});
    assert_eq!(generation_defaults(None, &config).unwrap().stop_ids, [9]);
    let error = problem(r#"{"eos_token_id": [3, 10]}"#, &config);
    assert!(
        error.starts_with("generation_config.json: eos_token_id is 10")
            && error.contains("has 10 tokens"),
        "{error}"
    );
    let config = json!({"vocab_size": 10, "eos_token_id": 11});
    let error = generation_defaults(None, &config).unwrap_err().to_string();
    assert!(error.starts_with("config.json: eos_token_id is 11"), "{error}");
}

#[test]
fn the_template_file_wins_over_the_config() {
    let string = r#"{"chat_template": "B"}"#;
    let list = r#"{"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}"#;
    let found = |file, config| find_template(file, config);
    assert_eq!(found(Some("A"), Some(string)).as_deref(), Some("A"));
    assert_eq!(found(None, Some(string)).as_deref(), Some("B"));
    assert_eq!(found(None, Some(list)).as_deref(), Some("D"));
    assert_eq!(found(None, Some("{}")), None);
    assert_eq!(found(None, None), None);
}
