//! What can go wrong between messages and tokens.

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
        expected: &'static str,
    },
    /// A configuration file is not valid JSON.
    #[error("{file} is not valid JSON: {problem}; download the file again")]
    Json {
        /// The file at fault.
        file: &'static str,
        /// What the parser said, with the line.
        problem: String,
    },
}

/// Parses a configuration file, naming it when it is broken.
pub(crate) fn parse_json(file: &'static str, text: &str) -> Result<serde_json::Value, ChatError> {
    serde_json::from_str(text).map_err(|error| ChatError::Json { file, problem: error.to_string() })
}
