//! What can go wrong between messages and tokens.

use serde_json::Value;

/// An error of this crate. Each says what happened, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// `tokenizer.json` or `tokenizer_config.json` cannot be used.
    #[error("{file}: {problem}; {hint}")]
    Tokenizer {
        /// The file at fault.
        file: &'static str,
        /// What is wrong with it.
        problem: String,
        /// What to do about it.
        hint: &'static str,
    },
    /// The tokenizer could not encode a text.
    #[error(
        "cannot tokenize a text of {bytes} bytes: {problem}; shorten the text, or check that tokenizer.json belongs to this model"
    )]
    Encode {
        /// Length of the text.
        bytes: usize,
        /// What the tokenizer said.
        problem: String,
    },
    /// The chat template does not compile.
    #[error(
        "the chat template cannot be read: {problem}; use the chat_template.jinja published with this model"
    )]
    TemplateSyntax {
        /// What the template engine said, with the line.
        problem: String,
    },
    /// The template itself refused the messages (`raise_exception`).
    #[error("the chat template refuses these messages: {message}")]
    Refused {
        /// The template's own words.
        message: String,
    },
    /// The template failed while rendering.
    #[error(
        "the chat template failed on these messages: {problem}; check that every message has the fields its role needs"
    )]
    Render {
        /// What the template engine said, with the line.
        problem: String,
    },
    /// The template took more steps, or wrote more text, than one prompt may.
    #[error(
        "the chat template exceeded its limit of {limit}; send fewer or shorter messages, or fix the template if it loops"
    )]
    Limit {
        /// The limit, in words.
        limit: &'static str,
    },
    /// A message is not of the form that a chat needs.
    #[error("{place}: {problem}; {hint}")]
    Message {
        /// Which message and field, as a path like `messages[2].tool_calls[0]`.
        place: String,
        /// What is wrong with it.
        problem: String,
        /// What to do about it.
        hint: &'static str,
    },
    /// A text has more tokens than there is room for.
    #[error(
        "a text of {bytes} bytes has more than the {limit} tokens that there is room for; shorten it, or use a longer context"
    )]
    TooLong {
        /// Length of the text.
        bytes: usize,
        /// Tokens that there is room for.
        limit: usize,
    },
    /// `generation_config.json` or `config.json` holds a value that cannot be used.
    #[error("{file}: {key} is {value}, but must be {expected}; correct or remove that line")]
    Defaults {
        /// The file at fault.
        file: &'static str,
        /// The key at fault.
        key: &'static str,
        /// The value found.
        value: String,
        /// What is accepted.
        expected: String,
    },
    /// `generation_config.json` holds a value that is out of its range.
    #[error("{file}: {problem}; correct or remove that line")]
    Range {
        /// The file at fault.
        file: &'static str,
        /// Key, value and range.
        problem: String,
    },
    /// A configuration file is not a JSON object whose keys are there once.
    #[error("{file}: {problem}; download the file again")]
    Json {
        /// The file at fault.
        file: &'static str,
        /// What the parser said, with the line.
        problem: String,
    },
}

/// Bytes of a configuration file.
const MAX_FILE: usize = 64 << 20;

/// Parses a configuration file, naming it when it is broken: an object, each key once.
pub(crate) fn parse_object(file: &'static str, text: &str) -> Result<Value, ChatError> {
    let bad = |problem: String| ChatError::Json { file, problem };
    if text.len() > MAX_FILE {
        return Err(bad(format!("it has {} bytes, more than {MAX_FILE}", text.len())));
    }
    lily_checkpoint::parse_json_object(text.as_bytes())
        .map(Value::Object)
        .map_err(|problem| bad(problem.to_string()))
}
