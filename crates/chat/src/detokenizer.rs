//! Token ids to text, while they arrive.

use std::sync::Arc;

use crate::Tokenizer;

/// Turns a stream of bytes into text without ever emitting half a character.
///
/// What it emits, joined, equals [`String::from_utf8_lossy`] of all the bytes. A sequence that is
/// known to be invalid becomes U+FFFD at once; at most three bytes wait for their continuation.
#[derive(Debug, Clone, Default)]
pub struct Utf8Stream {
    waiting: Vec<u8>,
}

impl Utf8Stream {
    /// An empty stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes bytes and appends to `text` what they complete.
    pub fn push(&mut self, bytes: &[u8], text: &mut String) {
        self.waiting.extend_from_slice(bytes);
        let mut rest = self.waiting.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    let Some(invalid) = error.error_len() else {
                        rest = after;
                        break;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &after[invalid..];
                }
            }
        }
        let done = self.waiting.len() - rest.len();
        self.waiting.drain(..done);
    }

    /// Ends the stream: a character left unfinished becomes one U+FFFD.
    pub fn finish(&mut self, text: &mut String) {
        if !self.waiting.is_empty() {
            self.waiting.clear();
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }

    /// Whether bytes wait for the rest of their character.
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }
}

/// Streaming counterpart of [`Tokenizer::decode`]: the pieces, joined, equal the whole.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    stream: Utf8Stream,
}

impl Detokenizer {
    /// Starts a stream. With `skip_special`, tokens flagged special (`<|im_end|>` and the like)
    /// leave no text; `<think>`, `<tool_call>` and their closers are not flagged and stay.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, stream: Utf8Stream::new() }
    }

    /// Takes the next token and returns the text that it completes, if any.
    ///
    /// An id that the tokenizer does not name leaves no text.
    pub fn push(&mut self, id: u32) -> Option<String> {
        if self.skip_special && self.tokenizer.is_special(id) {
            return None;
        }
        let mut text = String::new();
        if let Some(bytes) = self.tokenizer.token_bytes(id) {
            self.stream.push(bytes, &mut text);
        }
        (!text.is_empty()).then_some(text)
    }

    /// Ends the stream and returns what was still waiting, if anything. The detokenizer can then
    /// be used for another stream.
    pub fn finish(&mut self) -> Option<String> {
        let mut text = String::new();
        self.stream.finish(&mut text);
        (!text.is_empty()).then_some(text)
    }
}
