//! Byte-level BPE tokenizer: a thin, strict wrapper of the `tokenizers` crate.

use std::collections::HashMap;
use std::fmt;
use std::panic::AssertUnwindSafe;

use serde_json::Value;

use crate::error::{ChatError, parse_object};
use crate::marks::{ControlSpellings, Piece, unmark};

mod added;
mod alphabet;
mod definition;
mod pieces;

use added::{Added, added_tokens, wrong_type};
use alphabet::Alphabet;
use definition::{Definition, define};

const TOKENIZER_FILE: &str = "tokenizer.json";
const CONFIG_FILE: &str = "tokenizer_config.json";
const WRONG_FILE: &str = "use the tokenizer files published with this model";

/// What an id stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// No tokenizer entry has this id: a padding row of the embedding.
    Unnamed,
    Text,
    /// A control token; `special` ones are dropped when special tokens are skipped.
    Control {
        special: bool,
    },
}

/// Tokenizer of one checkpoint.
///
/// Control tokens (the added tokens of the file) are kept apart from the text vocabulary: plain
/// [`encode`](Self::encode) cannot produce one, whatever the text says.
pub struct Tokenizer {
    /// The BPE without any added token.
    text: tokenizers::Tokenizer,
    control: ControlSpellings,
    control_ids: HashMap<String, u32>,
    eos_id: Option<u32>,
    kinds: Vec<Kind>,
    /// Raw bytes of all tokens, one after another; token `id` is `bytes[ends[id-1]..ends[id]]`.
    bytes: Vec<u8>,
    ends: Vec<u32>,
    /// Most bytes of a text for which one token can stand.
    longest: usize,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_len", &self.vocab_len())
            .field("control_tokens", &self.control_ids.len())
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads `tokenizer.json` and, if given, `tokenizer_config.json`.
    ///
    /// Entries of the config's `added_tokens_decoder` that `tokenizer.json` lacks are added.
    ///
    /// # Errors
    ///
    /// A file that is not valid, that has a key twice, that is not the definition of a byte-level
    /// BPE (another kind is named), or two entries that contradict each other (one id with two
    /// spellings, one spelling with two ids).
    pub fn from_json(
        tokenizer_json: &str,
        tokenizer_config: Option<&str>,
    ) -> Result<Self, ChatError> {
        let mut file = parse_object(TOKENIZER_FILE, tokenizer_json)?;
        let config = tokenizer_config
            .map(|text| parse_object(CONFIG_FILE, text))
            .transpose()?
            .unwrap_or(Value::Null);
        let added = added_tokens(&file, &config)?;
        let eos = eos_token(&config)?;
        check_template(&config)?;
        let definition = define(&mut file).map_err(|problem| broken(TOKENIZER_FILE, problem))?;
        Self::assemble(definition, added, eos)
    }

    fn assemble(
        definition: Definition,
        added: Vec<Added>,
        eos: Option<&str>,
    ) -> Result<Self, ChatError> {
        let Definition { text, vocab, normalizes } = definition;
        let len = vocab
            .values()
            .copied()
            .chain(added.iter().map(|token| token.id))
            .max()
            .map_or(0, |id| id as usize + 1);
        let mut kinds = vec![Kind::Unnamed; len];
        let mut spellings = Vec::with_capacity(vocab.len() + added.len());
        let alphabet = Alphabet::new();
        for (token, id) in &vocab {
            kinds[*id as usize] = Kind::Text;
            spellings.push((*id, alphabet.bytes(token)));
        }
        let longest = spellings.iter().map(|(_, bytes)| bytes.len()).max().unwrap_or(1);
        for token in &added {
            let kind = &mut kinds[token.id as usize];
            // Some models list a control token in the vocabulary too; then both must agree.
            let listed = vocab.get(&token.content);
            if listed.is_some_and(|id| *id != token.id) || listed.is_none() && *kind == Kind::Text {
                return Err(contradiction(TOKENIZER_FILE, token.id, &token.content));
            }
            if listed.is_none() {
                spellings.push((token.id, token.content.clone().into_bytes()));
            }
            *kind = Kind::Control { special: token.special };
        }
        spellings.sort_unstable();
        let (mut bytes, mut ends) = (Vec::new(), vec![0; len]);
        let mut spellings = spellings.into_iter().peekable();
        for (id, end) in ends.iter_mut().enumerate() {
            if let Some((_, spelling)) = spellings.next_if(|(named, _)| *named as usize == id) {
                bytes.extend(spelling);
            }
            // Both files together are far below 4 GiB.
            *end = bytes.len() as u32;
        }
        let control_ids: HashMap<String, u32> =
            added.into_iter().map(|token| (token.content, token.id)).collect();
        Ok(Self {
            text,
            control: ControlSpellings::new(control_ids.iter().map(|(s, id)| (s.as_str(), *id)))
                .map_err(|problem| broken(TOKENIZER_FILE, problem))?,
            eos_id: eos.and_then(|content| control_ids.get(content).copied()),
            control_ids,
            kinds,
            bytes,
            ends,
            longest: longest * if normalizes { MOST_SHRINKING } else { 1 },
        })
    }

    /// Tokenizes plain text. No control token is ever produced, whatever the text says.
    ///
    /// # Errors
    ///
    /// A text that is too long for any model.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, ChatError> {
        self.encode_within(text, usize::MAX)
    }

    /// [`encode`](Self::encode) of a text that may have up to `limit` tokens. One that has more
    /// costs no more work than one that fits.
    ///
    /// # Errors
    ///
    /// [`ChatError::TooLong`] for a text of more tokens, else as [`encode`](Self::encode).
    pub fn encode_within(&self, text: &str, limit: usize) -> Result<Vec<u32>, ChatError> {
        let mut ids = Ids::new(self, text.len(), limit)?;
        ids.text(text)?;
        Ok(ids.ids)
    }

    /// Tokenizes the output of [`ChatTemplate::render`](crate::ChatTemplate::render): splits at
    /// unmarked control tokens, removes the marks, and tokenizes each piece whole.
    ///
    /// Text that never went through `render` is trusted here: control tokens in it are real.
    ///
    /// # Errors
    ///
    /// A text that is too long for any model.
    pub fn encode_rendered(&self, rendered: &str) -> Result<Vec<u32>, ChatError> {
        self.encode_rendered_within(rendered, usize::MAX)
    }

    /// [`encode_rendered`](Self::encode_rendered) of a prompt that may have up to `limit` tokens.
    /// One that has more costs no more work than one that fits.
    ///
    /// # Errors
    ///
    /// [`ChatError::TooLong`] for a prompt of more tokens, else as
    /// [`encode_rendered`](Self::encode_rendered).
    pub fn encode_rendered_within(
        &self,
        rendered: &str,
        limit: usize,
    ) -> Result<Vec<u32>, ChatError> {
        let pieces = self.control.split(rendered);
        // Marks are no text, so they do not count.
        let bytes = pieces.iter().map(|piece| match piece {
            Piece::Control(_) => 0,
            Piece::Text(text) => unmark(text).len(),
        });
        let mut ids = Ids::new(self, bytes.sum(), limit)?;
        for piece in pieces {
            match piece {
                Piece::Control(id) => ids.push(&[id])?,
                Piece::Text(text) => ids.text(&unmark(text))?,
            }
        }
        Ok(ids.ids)
    }

    /// Tokens of a piece of text, without looking at its length.
    fn encode_piece(&self, text: &str) -> Result<Vec<u32>, ChatError> {
        let failed = |problem: String| ChatError::Encode { bytes: text.len(), problem };
        let encoding = fence(|| self.text.encode_fast(text, false)).map_err(failed)?;
        let ids = encoding.get_ids();
        match ids.iter().find(|id| self.is_control(**id)) {
            None => Ok(ids.to_vec()),
            Some(id) => Err(failed(format!("its merges spell the control token {id}"))),
        }
    }

    /// Raw bytes of a token, the byte-level alphabet undone; control tokens give their spelling.
    /// `None` for an id that no tokenizer entry names.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        if !self.names(id) {
            return None;
        }
        let at = id as usize;
        let start = at.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some(&self.bytes[start as usize..self.ends[at] as usize])
    }

    /// Whether the id is a control token: one that plain text cannot make.
    pub fn is_control(&self, id: u32) -> bool {
        matches!(self.kind(id), Kind::Control { .. })
    }

    /// Whether the id is a control token flagged special: one that decoding can skip.
    /// `<think>`, `<tool_call>` and their closers are control tokens but not special.
    pub fn is_special(&self, id: u32) -> bool {
        matches!(self.kind(id), Kind::Control { special: true })
    }

    /// The id of the control token with this spelling.
    pub fn id_of(&self, content: &str) -> Option<u32> {
        self.control_ids.get(content).copied()
    }

    /// The `eos_token` of `tokenizer_config.json`: for chat models, the end of a turn.
    pub fn eos_id(&self) -> Option<u32> {
        self.eos_id
    }

    /// One more than the highest id that is named. The embedding table may have more rows.
    pub fn vocab_len(&self) -> usize {
        self.kinds.len()
    }

    /// Whether a tokenizer entry has this id. Others must never be sampled: they have no text.
    pub fn names(&self, id: u32) -> bool {
        self.kind(id) != Kind::Unnamed
    }

    /// Text of a whole sequence; invalid UTF-8 becomes U+FFFD, unnamed ids leave no text.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let bytes: Vec<u8> = ids
            .iter()
            .filter(|id| !(skip_special && self.is_special(**id)))
            .filter_map(|id| self.token_bytes(*id))
            .flatten()
            .copied()
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub(crate) fn control(&self) -> &ControlSpellings {
        &self.control
    }

    fn kind(&self, id: u32) -> Kind {
        self.kinds.get(id as usize).copied().unwrap_or(Kind::Unnamed)
    }
}

/// Bytes of text by which normalization can shrink to one: a mathematical letter to an ASCII one
/// takes four, three Hangul letters to a syllable nine for three.
const MOST_SHRINKING: usize = 4;

/// The tokens of a prompt, as they come.
struct Ids<'t> {
    tokenizer: &'t Tokenizer,
    ids: Vec<u32>,
    bytes: usize,
    limit: usize,
}

impl<'t> Ids<'t> {
    fn new(tokenizer: &'t Tokenizer, bytes: usize, limit: usize) -> Result<Self, ChatError> {
        let least = bytes / tokenizer.longest;
        match least > limit {
            true => Err(ChatError::TooLong { bytes, limit }),
            false => {
                let ids = Vec::with_capacity((bytes / 3).min(limit));
                Ok(Self { tokenizer, ids, bytes, limit })
            }
        }
    }

    fn push(&mut self, more: &[u32]) -> Result<(), ChatError> {
        self.ids.extend_from_slice(more);
        match self.ids.len() > self.limit {
            true => Err(ChatError::TooLong { bytes: self.bytes, limit: self.limit }),
            false => Ok(()),
        }
    }

    fn text(&mut self, text: &str) -> Result<(), ChatError> {
        let mut rest = text;
        while !rest.is_empty() {
            let piece = pieces::next(self.tokenizer, rest)?;
            self.push(&self.tokenizer.encode_piece(piece)?)?;
            rest = &rest[piece.len()..];
        }
        Ok(())
    }
}

/// The spelling of `eos_token`, which is a text or an added token.
fn eos_token(config: &Value) -> Result<Option<&str>, ChatError> {
    match &config["eos_token"] {
        Value::Null => Ok(None),
        Value::String(content) => Ok(Some(content)),
        entry => match &entry["content"] {
            Value::String(content) => Ok(Some(content)),
            _ => Err(wrong_type(CONFIG_FILE, "eos_token", entry, "a text or an added token")),
        },
    }
}

/// The types that [`find_template`](crate::find_template) relies on.
fn check_template(config: &Value) -> Result<(), ChatError> {
    let template = &config["chat_template"];
    let good = match template {
        Value::Null | Value::String(_) => true,
        Value::Array(named) => {
            named.iter().all(|entry| entry["name"].is_string() && entry["template"].is_string())
        }
        _ => false,
    };
    match good {
        true => Ok(()),
        false => {
            let expected = "a text or a list of named texts";
            Err(wrong_type(CONFIG_FILE, "chat_template", template, expected))
        }
    }
}

/// Calls the `tokenizers` crate, whose panics become errors. None is known that checked definitions
/// bring about; this is the last line.
fn fence<T>(
    call: impl FnOnce() -> Result<T, Box<dyn std::error::Error + Send + Sync>>,
) -> Result<T, String> {
    match std::panic::catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => {
            let words = panic.downcast_ref::<String>().map(String::as_str);
            let words = words.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(format!("the tokenizer library failed: {}", words.unwrap_or("no reason given")))
        }
    }
}

fn broken(file: &'static str, problem: String) -> ChatError {
    ChatError::Tokenizer { file, problem, hint: WRONG_FILE }
}

fn contradiction(file: &'static str, id: u32, content: &str) -> ChatError {
    broken(
        file,
        format!(
            "the entry {id} = {content:?} contradicts another entry of the same id or spelling"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_the_library_is_an_error() {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let failed: Result<(), String> = fence(|| panic!("on purpose"));
        let formatted: Result<(), String> = fence(|| panic!("{}", 1));
        std::panic::set_hook(hook);
        assert_eq!(failed.unwrap_err(), "the tokenizer library failed: on purpose");
        assert_eq!(formatted.unwrap_err(), "the tokenizer library failed: 1");
    }
}
