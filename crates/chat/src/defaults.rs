//! What a checkpoint's configuration files say about generation and about its chat template.

use serde_json::Value;

use crate::error::{ChatError, parse_json};

const GENERATION_FILE: &str = "generation_config.json";
const CONFIG_FILE: &str = "config.json";

/// Sampling defaults and stop tokens of a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationDefaults {
    /// Whether to sample; `false` means greedy. Absent in the file: `true`.
    pub do_sample: bool,
    /// Divides the logits. Absent: 1.
    pub temperature: f32,
    /// Nucleus mass, in (0, 1]. Absent: 1 (off).
    pub top_p: f32,
    /// How many tokens to keep; 0 is off. Absent: 0.
    pub top_k: u32,
    /// Least probability, as a fraction of the best one's. Absent: 0 (off).
    pub min_p: f32,
    /// Subtracted once from every token already generated. Absent: 0 (off).
    pub presence_penalty: f32,
    /// Divides the logits of tokens already seen. Absent: 1 (off).
    pub repetition_penalty: f32,
    /// Tokens that end generation, the most specific file first.
    pub stop_ids: Vec<u32>,
}

impl Default for GenerationDefaults {
    fn default() -> Self {
        Self {
            do_sample: true,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
            stop_ids: Vec::new(),
        }
    }
}

/// Reads the generation defaults from `generation_config.json` (its text) and `config.json`.
///
/// The stop tokens are the union of `eos_token_id` in generation_config, at the top of config and
/// in its `text_config`, in this order. A union, because Qwen's `text_config` alone names only
/// `<|endoftext|>`, with which a chat would never stop, while either one ends a text.
///
/// # Errors
///
/// Invalid JSON, or a value outside its range, by file and key.
pub fn generation_defaults(
    generation_config: Option<&str>,
    config: &Value,
) -> Result<GenerationDefaults, ChatError> {
    let generation = generation_config
        .map(|text| parse_json(GENERATION_FILE, text))
        .transpose()?
        .unwrap_or(Value::Null);
    let mut defaults = GenerationDefaults::default();

    if let Some(value) = present(&generation, "do_sample") {
        defaults.do_sample = value
            .as_bool()
            .ok_or_else(|| unusable(GENERATION_FILE, "do_sample", value, "true or false"))?;
    }
    if let Some(value) = present(&generation, "top_k") {
        defaults.top_k = value
            .as_u64()
            .and_then(|k| u32::try_from(k).ok())
            .ok_or_else(|| unusable(GENERATION_FILE, "top_k", value, "a whole number from 0"))?;
    }
    type Rule = (&'static str, fn(f64) -> bool, &'static str);
    let fields: [(&mut f32, Rule); 5] = [
        (&mut defaults.temperature, ("temperature", |t| t >= 0.0, "a number from 0")),
        (&mut defaults.top_p, ("top_p", |p| p > 0.0 && p <= 1.0, "above 0 and at most 1")),
        (&mut defaults.min_p, ("min_p", |p| (0.0..=1.0).contains(&p), "between 0 and 1")),
        (&mut defaults.presence_penalty, ("presence_penalty", |_| true, "a number")),
        (&mut defaults.repetition_penalty, ("repetition_penalty", |p| p > 0.0, "a number above 0")),
    ];
    for (field, (key, accepts, expected)) in fields {
        if let Some(value) = present(&generation, key) {
            *field = value
                .as_f64()
                .filter(|number| accepts(*number))
                .ok_or_else(|| unusable(GENERATION_FILE, key, value, expected))?
                as f32;
        }
    }

    for (file, root) in [
        (GENERATION_FILE, &generation),
        (CONFIG_FILE, config),
        (CONFIG_FILE, &config["text_config"]),
    ] {
        for id in stop_ids(file, root)? {
            if !defaults.stop_ids.contains(&id) {
                defaults.stop_ids.push(id);
            }
        }
    }
    Ok(defaults)
}

/// The source of the chat template: the file `chat_template.jinja` if there is one, else
/// `chat_template` of `tokenizer_config.json` (a string, or a list of named templates of which
/// the one called `default`, or else the first, is taken).
pub fn find_template(
    chat_template_jinja: Option<&str>,
    tokenizer_config: Option<&str>,
) -> Option<String> {
    if let Some(source) = chat_template_jinja {
        return Some(source.to_owned());
    }
    let config: Value = serde_json::from_str(tokenizer_config?).ok()?;
    match &config["chat_template"] {
        Value::String(source) => Some(source.clone()),
        Value::Array(named) => named
            .iter()
            .find(|entry| entry["name"] == "default")
            .or(named.first())
            .and_then(|entry| entry["template"].as_str())
            .map(str::to_owned),
        _ => None,
    }
}

fn present<'v>(root: &'v Value, key: &str) -> Option<&'v Value> {
    root.get(key).filter(|value| !value.is_null())
}

/// `eos_token_id` of one object: an id, a list of ids, or nothing.
fn stop_ids(file: &'static str, root: &Value) -> Result<Vec<u32>, ChatError> {
    const KEY: &str = "eos_token_id";
    let Some(value) = present(root, KEY) else {
        return Ok(Vec::new());
    };
    let one = std::slice::from_ref(value);
    value
        .as_array()
        .map_or(one, Vec::as_slice)
        .iter()
        .map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()))
        .collect::<Option<_>>()
        .ok_or_else(|| unusable(file, KEY, value, "a token id or a list of them"))
}

fn unusable(
    file: &'static str,
    key: &'static str,
    value: &Value,
    expected: &'static str,
) -> ChatError {
    ChatError::Defaults { file, key, value: value.to_string(), expected }
}
