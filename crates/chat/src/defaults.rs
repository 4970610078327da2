//! What a checkpoint's configuration files say about generation and about its chat template.

use lily_ops::sample::SampleParams;
use serde_json::Value;

use crate::error::{ChatError, parse_object};

const GENERATION_FILE: &str = "generation_config.json";
const CONFIG_FILE: &str = "config.json";
const STOP_KEY: &str = "eos_token_id";
/// Stop tokens of all files together; models have one to three.
const MAX_STOPS: usize = 1024;

/// Sampling defaults and stop tokens of a checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationDefaults {
    /// Whether to sample; `false` means greedy. Absent in the file: `true`.
    pub do_sample: bool,
    /// Divides the logits; 0 means greedy. Absent: 1.
    pub temperature: f32,
    /// Nucleus mass, 0 to 1. Absent: 1 (off).
    pub top_p: f32,
    /// How many tokens to keep; 0 is off. Absent: 0.
    pub top_k: u32,
    /// Least probability, as a fraction of the best one's. Absent: 0 (off).
    pub min_p: f32,
    /// Subtracted once from every token already generated. Absent: 0 (off).
    pub presence_penalty: f32,
    /// Subtracted from a token for each time it was generated. Absent: 0 (off).
    pub frequency_penalty: f32,
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
            frequency_penalty: 0.0,
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
/// JSON that is not an object or has a key twice, a value of the wrong type, one outside of the
/// range of [`SampleParams::check`], and a stop token outside of the vocabulary (`vocab_size` of
/// config): each by file and key.
pub fn generation_defaults(
    generation_config: Option<&str>,
    config: &Value,
) -> Result<GenerationDefaults, ChatError> {
    let generation = generation_config
        .map(|text| parse_object(GENERATION_FILE, text))
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
    for (key, field) in numbers(&mut defaults) {
        if let Some(value) = present(&generation, key) {
            let number =
                value.as_f64().ok_or_else(|| unusable(GENERATION_FILE, key, value, "a number"))?;
            *field = number as f32;
        }
    }
    check_ranges(&defaults)?;
    defaults.stop_ids = all_stop_ids(&generation, config)?;
    Ok(defaults)
}

fn numbers(defaults: &mut GenerationDefaults) -> [(&'static str, &mut f32); 6] {
    [
        ("temperature", &mut defaults.temperature),
        ("top_p", &mut defaults.top_p),
        ("min_p", &mut defaults.min_p),
        ("presence_penalty", &mut defaults.presence_penalty),
        ("frequency_penalty", &mut defaults.frequency_penalty),
        ("repetition_penalty", &mut defaults.repetition_penalty),
    ]
}

/// The sampler's own rule, whose message names the key and its range.
fn check_ranges(defaults: &GenerationDefaults) -> Result<(), ChatError> {
    let params = SampleParams {
        temperature: defaults.temperature,
        top_k: defaults.top_k,
        top_p: defaults.top_p,
        min_p: defaults.min_p,
        repetition_penalty: defaults.repetition_penalty,
        presence_penalty: defaults.presence_penalty,
        frequency_penalty: defaults.frequency_penalty,
        ..SampleParams::GREEDY
    };
    // No ids are named here: the vocabulary does not matter.
    params.check(usize::MAX).map_err(|problem| ChatError::Range { file: GENERATION_FILE, problem })
}

fn all_stop_ids(generation: &Value, config: &Value) -> Result<Vec<u32>, ChatError> {
    let text_config = &config["text_config"];
    let vocab = present(text_config, "vocab_size").or_else(|| present(config, "vocab_size"));
    let vocab = vocab.and_then(Value::as_u64).unwrap_or(u64::MAX);
    let mut all = Vec::new();
    for (file, root) in
        [(GENERATION_FILE, generation), (CONFIG_FILE, config), (CONFIG_FILE, text_config)]
    {
        for id in stop_ids(file, root, vocab)? {
            if !all.contains(&id) {
                all.push(id);
            }
        }
        if all.len() > MAX_STOPS {
            let count = Value::from(all.len());
            return Err(unusable(file, STOP_KEY, &count, "at most 1024 token ids"));
        }
    }
    Ok(all)
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
    // Its types were checked when the tokenizer was read.
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
fn stop_ids(file: &'static str, root: &Value, vocab: u64) -> Result<Vec<u32>, ChatError> {
    let Some(value) = present(root, STOP_KEY) else {
        return Ok(Vec::new());
    };
    let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    // Looked for one by one among those before: a list beyond reason is not.
    let list = &list[..list.len().min(MAX_STOPS + 1)];
    let mut ids = Vec::with_capacity(list.len());
    for id in list {
        let id = id
            .as_u64()
            .ok_or_else(|| unusable(file, STOP_KEY, value, "a token id or a list of them"))?;
        match u32::try_from(id) {
            Ok(id) if u64::from(id) < vocab => ids.push(id),
            _ => {
                let expected = format!("an id of the vocabulary, which has {vocab} tokens");
                return Err(unusable(file, STOP_KEY, &Value::from(id), &expected));
            }
        }
    }
    Ok(ids)
}

fn unusable(file: &'static str, key: &'static str, value: &Value, expected: &str) -> ChatError {
    let value = value.to_string();
    let cut = value.char_indices().nth(200).map_or(value.len(), |(at, _)| at);
    ChatError::Defaults { file, key, value: value[..cut].to_owned(), expected: expected.to_owned() }
}
