//! What a `tokenizer.json` may say. All of it is checked here; the `tokenizers` crate, which panics
//! on some definitions and drops text by others, is then built from checked parts only.
//!
//! The subset is that of byte-level BPE: a vocabulary with a token for every byte of UTF-8, text
//! that is at most normalized (NFC and its like) and split, never removed or added to. Another
//! kind is refused by its name.

use std::collections::{HashMap, HashSet};

use serde_json::Value;
use tokenizers::SplitDelimiterBehavior;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::{NFC, NFD, NFKC, NFKD, NormalizerWrapper, Sequence as Normalizers};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::punctuation::Punctuation;
use tokenizers::pre_tokenizers::sequence::Sequence as PreTokenizers;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};

use super::alphabet::stand_ins;
use super::fence;

/// Ids from this on are a broken file, not a vocabulary.
pub(super) const MAX_ID: u64 = 1 << 22;
/// Bytes of one token of the vocabulary.
const MAX_TOKEN: usize = 4096;
/// Bytes of one pattern; published ones take some hundred.
const MAX_PATTERN: usize = 8192;
/// Steps of a normalizer or pre-tokenizer, all sequences counted together.
const MAX_STEPS: usize = 16;

/// The part of a `tokenizer.json` that turns text into tokens.
pub(super) struct Definition {
    /// The BPE without any added token.
    pub(super) text: tokenizers::Tokenizer,
    pub(super) vocab: HashMap<String, u32>,
    /// Whether text is normalized first, so that it may shrink.
    pub(super) normalizes: bool,
}

/// Checks a definition and builds its tokenizer; the error is a sentence about the file.
///
/// Truncation, padding and the post-processor are not taken over: the first two belong to training
/// and would silently change a prompt, and only the chat template makes control tokens.
pub(super) fn define(file: &mut Value) -> Result<Definition, String> {
    byte_level_decoder(&file["decoder"])?;
    post_processor(&file["post_processor"])?;
    let normalizers = normalizers(&file["normalizer"])?;
    let pre_tokenizers = pre_tokenizers(&file["pre_tokenizer"])?;
    let Model { vocab, merges, ignore_merges } = model(file["model"].take())?;
    let normalizes = !normalizers.is_empty();

    let text = fence(|| {
        let bpe = BPE::builder()
            .vocab_and_merges(vocab.clone().into_iter().collect::<Vocab>(), merges)
            .ignore_merges(ignore_merges)
            .build()?;
        let mut text = tokenizers::Tokenizer::new(bpe);
        text.with_pre_tokenizer(Some(PreTokenizers::new(pre_tokenizers)));
        if normalizes {
            text.with_normalizer(Some(Normalizers::new(normalizers)))?;
        }
        Ok(text)
    })?;
    Ok(Definition { text, vocab, normalizes })
}

fn kind(value: &Value) -> Option<&str> {
    value["type"].as_str()
}

/// `its WHAT NAME is not supported`, naming a kind that this program does not know.
fn unknown(what: &str, value: &Value, known: &str) -> String {
    match kind(value) {
        Some(name) => format!("its {what} is {name:?}, and only {known} can be used"),
        None => format!("its {what} is {}, and only {known} can be used", brief(value)),
    }
}

/// A value for a message: never more than a line.
pub(super) fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// The steps of nested sequences, one after another.
fn steps<'v>(what: &str, list_key: &str, value: &'v Value) -> Result<Vec<&'v Value>, String> {
    let (mut waiting, mut found) = (vec![value], Vec::new());
    while let Some(value) = waiting.pop() {
        if value.is_null() {
            continue;
        }
        if kind(value) != Some("Sequence") {
            found.push(value);
        } else {
            let list = value[list_key]
                .as_array()
                .ok_or_else(|| format!("a sequence of its {what} has no list {list_key:?}"))?;
            waiting.extend(list.iter().rev());
        }
        if found.len() + waiting.len() > MAX_STEPS {
            return Err(format!("its {what} has more than {MAX_STEPS} steps"));
        }
    }
    Ok(found)
}

fn normalizers(value: &Value) -> Result<Vec<NormalizerWrapper>, String> {
    steps("normalizer", "normalizers", value)?
        .into_iter()
        .map(|step| match kind(step) {
            Some("NFC") => Ok(NFC.into()),
            Some("NFD") => Ok(NFD.into()),
            Some("NFKC") => Ok(NFKC.into()),
            Some("NFKD") => Ok(NFKD.into()),
            _ => Err(unknown("normalizer", step, "NFC, NFD, NFKC, NFKD and sequences of them")),
        })
        .collect()
}

/// Splits, and the byte-level step at the end, which leaves no character without a token.
fn pre_tokenizers(value: &Value) -> Result<Vec<PreTokenizerWrapper>, String> {
    const WHAT: &str = "pre_tokenizer";
    let found = steps(WHAT, "pretokenizers", value)?;
    let Some((last, splits)) =
        found.split_last().filter(|(last, _)| kind(last) == Some("ByteLevel"))
    else {
        return Err(format!("its {WHAT} does not end with ByteLevel, so it is no byte-level BPE"));
    };
    let mut steps: Vec<PreTokenizerWrapper> = Vec::with_capacity(found.len());
    for step in splits {
        steps.push(match kind(step) {
            Some("Split") => split(step)?.into(),
            Some("Digits") => Digits::new(flag(step, "individual_digits", false)?).into(),
            Some("Punctuation") => Punctuation::new(behavior(step, true)?).into(),
            _ => {
                let known = "Split, Digits, Punctuation and, at the end, one ByteLevel";
                return Err(unknown(WHAT, step, known));
            }
        });
    }
    if flag(last, "add_prefix_space", true)? {
        return Err(format!("its {WHAT} has add_prefix_space, which would change every text"));
    }
    steps.push(ByteLevel::new(false, false, flag(last, "use_regex", true)?).into());
    Ok(steps)
}

fn flag(step: &Value, key: &str, absent: bool) -> Result<bool, String> {
    match &step[key] {
        Value::Null => Ok(absent),
        Value::Bool(flag) => Ok(*flag),
        other => {
            Err(format!("{key:?} of its pre_tokenizer is {}, not true or false", brief(other)))
        }
    }
}

fn behavior(step: &Value, optional: bool) -> Result<SplitDelimiterBehavior, String> {
    match &step["behavior"] {
        Value::Null if optional => Ok(SplitDelimiterBehavior::Isolated),
        Value::String(name) => match name.as_str() {
            "Isolated" => Ok(SplitDelimiterBehavior::Isolated),
            "MergedWithPrevious" => Ok(SplitDelimiterBehavior::MergedWithPrevious),
            "MergedWithNext" => Ok(SplitDelimiterBehavior::MergedWithNext),
            "Contiguous" => Ok(SplitDelimiterBehavior::Contiguous),
            "Removed" => Err("a split of its pre_tokenizer removes text (\"Removed\")".into()),
            other => {
                Err(format!("a split of its pre_tokenizer has the unknown behavior {other:?}"))
            }
        },
        other => Err(format!("a split of its pre_tokenizer has the behavior {}", brief(other))),
    }
}

fn split(step: &Value) -> Result<Split, String> {
    let invert = flag(step, "invert", false)?;
    let behavior = behavior(step, false)?;
    let pattern = match (step["pattern"]["Regex"].as_str(), step["pattern"]["String"].as_str()) {
        (Some(regex), None) => SplitPattern::Regex(regex.to_owned()),
        (None, Some(text)) => SplitPattern::String(text.to_owned()),
        _ => {
            let pattern = brief(&step["pattern"]);
            return Err(format!("a split of its pre_tokenizer has the pattern {pattern}"));
        }
    };
    let (SplitPattern::Regex(text) | SplitPattern::String(text)) = &pattern;
    if text.is_empty() || text.len() > MAX_PATTERN {
        return Err(format!(
            "a split of its pre_tokenizer has a pattern of {} bytes; 1 to {MAX_PATTERN} are accepted",
            text.len()
        ));
    }
    fence(|| Split::new(pattern, behavior, invert))
        .map_err(|problem| format!("a pattern of its pre_tokenizer cannot be used: {problem}"))
}

fn byte_level_decoder(value: &Value) -> Result<(), String> {
    let found = steps("decoder", "decoders", value)?;
    match found.as_slice() {
        [only] if kind(only) == Some("ByteLevel") => Ok(()),
        [] => Err("it has no decoder, and ByteLevel is needed".into()),
        [other] => Err(unknown("decoder", other, "ByteLevel")),
        _ => Err("its decoder has several steps, and only ByteLevel can be used".into()),
    }
}

/// Known ones add control tokens or adjust offsets, both of which are not used.
fn post_processor(value: &Value) -> Result<(), String> {
    const WHAT: &str = "post_processor";
    for step in steps(WHAT, "processors", value)? {
        if !matches!(kind(step), Some("ByteLevel" | "TemplateProcessing")) {
            return Err(unknown(WHAT, step, "ByteLevel, TemplateProcessing and sequences of them"));
        }
    }
    Ok(())
}

type Merges = Vec<(String, String)>;

struct Model {
    vocab: HashMap<String, u32>,
    merges: Merges,
    /// Whether a word that is a token stays whole, whatever the merges.
    ignore_merges: bool,
}

fn model(mut model: Value) -> Result<Model, String> {
    match kind(&model) {
        Some("BPE") => {}
        // Files of before 2020 do not say it.
        None if model["vocab"].is_object() && model["merges"].is_array() => {}
        _ => return Err(unknown("model", &model, "BPE")),
    }
    for (key, why) in [
        ("dropout", "which makes tokens random"),
        ("continuing_subword_prefix", "which byte-level BPE does not have"),
        ("end_of_word_suffix", "which byte-level BPE does not have"),
    ] {
        let value = &model[key];
        let off = value.is_null() || value.as_f64() == Some(0.0) || value.as_str() == Some("");
        if !off {
            return Err(format!("its model has {key} {}, {why}", brief(value)));
        }
    }
    for key in ["fuse_unk", "byte_fallback", "ignore_merges"] {
        if !matches!(model[key], Value::Null | Value::Bool(_)) {
            return Err(format!("its model has {key} {}, not true or false", brief(&model[key])));
        }
    }
    let vocab = vocabulary(model["vocab"].take())?;
    let merges = merges(model["merges"].take(), &vocab)?;
    Ok(Model { vocab, merges, ignore_merges: model["ignore_merges"] == true })
}

fn vocabulary(vocab: Value) -> Result<HashMap<String, u32>, String> {
    let Value::Object(entries) = vocab else {
        return Err(format!("its vocab is {}, not an object of tokens and ids", brief(&vocab)));
    };
    let mut vocab = HashMap::with_capacity(entries.len());
    let mut ids = HashSet::with_capacity(entries.len());
    for (token, id) in entries {
        let Some(number) = id.as_u64().filter(|id| *id < MAX_ID) else {
            let id = brief(&id);
            return Err(format!(
                "the token {token:?} has the id {id}, not a number below {MAX_ID}"
            ));
        };
        if token.is_empty() || token.len() > MAX_TOKEN {
            let len = token.len();
            return Err(format!(
                "the token {number} has {len} bytes; 1 to {MAX_TOKEN} are accepted"
            ));
        }
        if !ids.insert(number) {
            return Err(format!("the token {token:?} contradicts another one of the id {number}"));
        }
        vocab.insert(token, number as u32);
    }
    // Bytes that UTF-8 does not use may lack a token.
    for (byte, stand_in) in stand_ins() {
        let used = !matches!(byte, 0xC0 | 0xC1 | 0xF5..);
        if used && !vocab.contains_key(stand_in.encode_utf8(&mut [0; 4]) as &str) {
            return Err(format!(
                "its vocab has no token for the byte 0x{byte:02X} ({stand_in:?}), so text could be lost"
            ));
        }
    }
    Ok(vocab)
}

/// `["a", "b"]` or, as older files have it, `"a b"`; both parts and the whole must be tokens.
fn merges(merges: Value, vocab: &HashMap<String, u32>) -> Result<Merges, String> {
    let Value::Array(list) = merges else {
        return Err(format!("its merges are {}, not a list", brief(&merges)));
    };
    let mut whole = String::new();
    list.into_iter()
        .filter(|merge| !merge.as_str().is_some_and(|line| line.starts_with("#version")))
        .map(|merge| {
            let pair = match &merge {
                Value::String(line) => line.split_once(' ').filter(|(_, b)| !b.contains(' ')),
                Value::Array(pair) => match pair.as_slice() {
                    [Value::String(a), Value::String(b)] => Some((a.as_str(), b.as_str())),
                    _ => None,
                },
                _ => None,
            };
            let (a, b) = pair.ok_or_else(|| format!("the merge {} is no pair", brief(&merge)))?;
            whole.clear();
            whole.push_str(a);
            whole.push_str(b);
            match [a, b, &whole].into_iter().find(|token| !vocab.contains_key(*token)) {
                None => Ok((a.to_owned(), b.to_owned())),
                Some(lacking) => Err(format!(
                    "the merge {} needs {lacking:?}, which the vocab does not have",
                    brief(&merge)
                )),
            }
        })
        .collect()
}
