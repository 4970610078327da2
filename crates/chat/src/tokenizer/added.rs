//! Control tokens, as `tokenizer.json` and `tokenizer_config.json` name them.

use std::collections::HashMap;

use serde_json::Value;

use super::definition::{MAX_ID, brief};
use super::{CONFIG_FILE, TOKENIZER_FILE, broken, contradiction};
use crate::error::ChatError;

/// Added tokens of both files; published models have some thousand at most.
const MAX_ADDED: usize = 1 << 17;
/// Bytes of one.
const MAX_CONTENT: usize = 256;

/// An added token, as either file gives it.
pub(super) struct Added {
    pub(super) id: u32,
    pub(super) content: String,
    pub(super) special: bool,
}

/// All that are known, each id and each spelling once.
#[derive(Default)]
struct Known {
    tokens: Vec<Added>,
    by_id: HashMap<u32, usize>,
    by_content: HashMap<String, usize>,
}

/// The added tokens of both files.
///
/// # Errors
///
/// Entries of the wrong type, and two that contradict each other.
pub(super) fn added_tokens(file: &Value, config: &Value) -> Result<Vec<Added>, ChatError> {
    let mut known = Known::default();
    match &file["added_tokens"] {
        Value::Null => {}
        Value::Array(list) => {
            for entry in list {
                known.add(TOKENIZER_FILE, entry["id"].as_u64(), entry)?;
            }
        }
        other => return Err(wrong_type(TOKENIZER_FILE, "added_tokens", other, "a list")),
    }
    match &config["added_tokens_decoder"] {
        Value::Null => {}
        Value::Object(entries) => {
            for (id, entry) in entries {
                known.add(CONFIG_FILE, id.parse().ok(), entry)?;
            }
        }
        other => return Err(wrong_type(CONFIG_FILE, "added_tokens_decoder", other, "an object")),
    }
    Ok(known.tokens)
}

pub(super) fn wrong_type(
    file: &'static str,
    key: &str,
    found: &Value,
    expected: &str,
) -> ChatError {
    broken(file, format!("{key} is {}, not {expected}", brief(found)))
}

impl Known {
    /// Takes one, unless it is known already or contradicts what is known.
    fn add(&mut self, file: &'static str, id: Option<u64>, entry: &Value) -> Result<(), ChatError> {
        let content = entry["content"].as_str().filter(|text| !text.is_empty());
        let id = id.filter(|id| *id < MAX_ID).and_then(|id| u32::try_from(id).ok());
        let (Some(id), Some(content)) = (id, content) else {
            let entry = brief(entry);
            return Err(broken(
                file,
                format!("an added token has no usable id and content: {entry}"),
            ));
        };
        if content.len() > MAX_CONTENT {
            let len = content.len();
            return Err(broken(
                file,
                format!("the added token {id} has {len} bytes; up to {MAX_CONTENT} are accepted"),
            ));
        }
        let flags = Flags::of(entry)
            .map_err(|problem| broken(file, format!("the added token {content:?} {problem}")))?;
        match (self.by_id.get(&id), self.by_content.get(content)) {
            (None, None) if self.tokens.len() == MAX_ADDED => {
                Err(broken(file, format!("it has more than {MAX_ADDED} added tokens")))
            }
            (None, None) => {
                self.by_id.insert(id, self.tokens.len());
                self.by_content.insert(content.to_owned(), self.tokens.len());
                self.tokens.push(Added { id, content: content.to_owned(), special: flags.special });
                Ok(())
            }
            (Some(one), Some(other)) if one == other => Ok(()),
            _ => Err(contradiction(file, id, content)),
        }
    }
}

/// What an entry says about its token.
struct Flags {
    special: bool,
}

impl Flags {
    fn of(entry: &Value) -> Result<Self, String> {
        let flag = |key: &str| match &entry[key] {
            Value::Null => Ok(false),
            Value::Bool(flag) => Ok(*flag),
            other => Err(format!("has {key} {}, not true or false", brief(other))),
        };
        // These take blanks and words around the token away from the text; Qwen's have none.
        for key in ["single_word", "lstrip", "rstrip"] {
            if flag(key)? {
                return Err(format!("has {key}, which is not supported"));
            }
        }
        flag("normalized")?;
        Ok(Self { special: flag("special")? })
    }
}
