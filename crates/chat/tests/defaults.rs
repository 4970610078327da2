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

#[test]
fn values_out_of_range_are_errors_that_name_them() {
    for (file, key) in [
        (r#"{"temperature": -1}"#, "temperature"),
        (r#"{"top_p": 0}"#, "top_p"),
        (r#"{"top_p": "high"}"#, "top_p"),
        (r#"{"top_k": -1}"#, "top_k"),
        (r#"{"min_p": 2}"#, "min_p"),
        (r#"{"repetition_penalty": 0}"#, "repetition_penalty"),
        (r#"{"do_sample": 1}"#, "do_sample"),
        (r#"{"eos_token_id": [1, -1]}"#, "eos_token_id"),
        ("{", "not valid JSON"),
    ] {
        let error = generation_defaults(Some(file), &json!({})).unwrap_err().to_string();
        assert!(error.contains("generation_config.json") && error.contains(key), "{error}");
    }
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
