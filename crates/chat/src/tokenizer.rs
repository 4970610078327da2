//! Byte-level BPE tokenizer: a thin, strict wrapper of the `tokenizers` crate.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

use serde_json::Value;

use crate::error::{ChatError, parse_json};
use crate::marks::{ControlSpellings, Piece, unmark};

const TOKENIZER_FILE: &str = "tokenizer.json";
const CONFIG_FILE: &str = "tokenizer_config.json";
const WRONG_FILE: &str = "use the tokenizer files published with this model";

/// Ids above this are a broken file, not a vocabulary.
const MAX_ID: u64 = 1 << 22;

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

/// An added token, as either file gives it.
struct Added {
    id: u32,
    content: String,
    special: bool,
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
    /// A file that is not valid, a decoder other than byte-level, or two entries that contradict
    /// each other (one id with two spellings, one spelling with two ids).
    pub fn from_json(
        tokenizer_json: &str,
        tokenizer_config: Option<&str>,
    ) -> Result<Self, ChatError> {
        let mut file = parse_json(TOKENIZER_FILE, tokenizer_json)?;
        let config = tokenizer_config
            .map(|text| parse_json(CONFIG_FILE, text))
            .transpose()?
            .unwrap_or(Value::Null);
        let bad = |problem: String| broken(TOKENIZER_FILE, problem);

        if !uses_byte_level_decoder(&file["decoder"]) {
            return Err(bad("its decoder is not ByteLevel".into()));
        }
        let mut added = Vec::new();
        for entry in file["added_tokens"].as_array().into_iter().flatten() {
            let id = entry["id"].as_u64();
            add(&mut added, TOKENIZER_FILE, id, entry)?;
        }
        for (id, entry) in config["added_tokens_decoder"].as_object().into_iter().flatten() {
            add(&mut added, CONFIG_FILE, id.parse().ok(), entry)?;
        }

        // Without added tokens the library can only produce text tokens; truncation and padding
        // belong to training and would silently change a prompt.
        let Some(root) = file.as_object_mut() else {
            return Err(bad("it is not a JSON object".into()));
        };
        root.insert("added_tokens".into(), Value::Array(Vec::new()));
        for key in ["truncation", "padding", "post_processor"] {
            root.insert(key.into(), Value::Null);
        }
        let text = tokenizers::Tokenizer::from_str(&file.to_string())
            .map_err(|error| bad(error.to_string()))?;

        let vocab = text.get_vocab(false);
        for token in &added {
            // Some models list a control token in the vocabulary too; then the ids must agree.
            if vocab.get(&token.content).is_some_and(|id| *id != token.id) {
                return Err(contradiction(TOKENIZER_FILE, token.id, &token.content));
            }
        }
        Self::assemble(text, vocab, added, &config)
    }

    fn assemble(
        text: tokenizers::Tokenizer,
        vocab: HashMap<String, u32>,
        added: Vec<Added>,
        config: &Value,
    ) -> Result<Self, ChatError> {
        let len = vocab
            .values()
            .copied()
            .chain(added.iter().map(|token| token.id))
            .max()
            .map_or(0, |id| id as usize + 1);
        if len as u64 > MAX_ID {
            return Err(broken(TOKENIZER_FILE, format!("it names the id {}", len - 1)));
        }
        let mut kinds = vec![Kind::Unnamed; len];
        let mut spellings: Vec<Option<Vec<u8>>> = vec![None; len];
        let alphabet = byte_level_alphabet();
        for (token, id) in &vocab {
            let slot = &mut spellings[*id as usize];
            if slot.is_some() {
                return Err(contradiction(TOKENIZER_FILE, *id, token));
            }
            *slot = Some(undo_byte_level(&alphabet, token));
            kinds[*id as usize] = Kind::Text;
        }
        for token in &added {
            let at = token.id as usize;
            if kinds[at] == Kind::Text && vocab.get(&token.content) != Some(&token.id) {
                return Err(contradiction(CONFIG_FILE, token.id, &token.content));
            }
            spellings[at] = Some(token.content.clone().into_bytes());
            kinds[at] = Kind::Control { special: token.special };
        }
        let (mut bytes, mut ends) = (Vec::new(), Vec::with_capacity(len));
        for spelling in spellings {
            bytes.extend(spelling.unwrap_or_default());
            ends.push(
                u32::try_from(bytes.len()).map_err(|_| {
                    broken(TOKENIZER_FILE, "its tokens take more than 4 GiB".into())
                })?,
            );
        }
        let control_ids: HashMap<String, u32> =
            added.into_iter().map(|token| (token.content, token.id)).collect();
        let eos = &config["eos_token"];
        let eos_id = eos
            .as_str()
            .or_else(|| eos["content"].as_str())
            .and_then(|content| control_ids.get(content).copied());
        Ok(Self {
            text,
            control: ControlSpellings::new(control_ids.iter().map(|(s, id)| (s.as_str(), *id))),
            control_ids,
            eos_id,
            kinds,
            bytes,
            ends,
        })
    }

    /// Tokenizes plain text. No control token is ever produced, whatever the text says.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, ChatError> {
        let failed = |problem: String| ChatError::Encode { bytes: text.len(), problem };
        let encoding =
            self.text.encode_fast(text, false).map_err(|error| failed(error.to_string()))?;
        let ids = encoding.get_ids();
        match ids.iter().find(|id| self.is_control(**id)) {
            None => Ok(ids.to_vec()),
            Some(id) => Err(failed(format!("its merges spell the control token {id}"))),
        }
    }

    /// Tokenizes the output of [`ChatTemplate::render`](crate::ChatTemplate::render): splits at
    /// unmarked control tokens, removes the marks, and tokenizes each piece whole.
    ///
    /// Text that never went through `render` is trusted here: control tokens in it are real.
    pub fn encode_rendered(&self, rendered: &str) -> Result<Vec<u32>, ChatError> {
        let mut ids = Vec::with_capacity(rendered.len() / 3);
        for piece in self.control.split(rendered) {
            match piece {
                Piece::Control(id) => ids.push(id),
                Piece::Text(text) => ids.extend(self.encode(&unmark(text))?),
            }
        }
        Ok(ids)
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

/// Takes one added token, unless it is known already or contradicts what is known.
fn add(
    known: &mut Vec<Added>,
    file: &'static str,
    id: Option<u64>,
    entry: &Value,
) -> Result<(), ChatError> {
    let content = entry["content"].as_str().filter(|text| !text.is_empty());
    let id = id.filter(|id| *id < MAX_ID).and_then(|id| u32::try_from(id).ok());
    let (Some(id), Some(content)) = (id, content) else {
        return Err(broken(file, format!("an added token has no usable id and content: {entry}")));
    };
    match known.iter().find(|t| t.id == id || t.content == content) {
        Some(same) if same.id == id && same.content == content => Ok(()),
        Some(_) => Err(contradiction(file, id, content)),
        None => {
            known.push(Added {
                id,
                content: content.to_owned(),
                special: entry["special"].as_bool().unwrap_or(false),
            });
            Ok(())
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

fn uses_byte_level_decoder(decoder: &Value) -> bool {
    match decoder["type"].as_str() {
        Some("ByteLevel") => true,
        Some("Sequence") => match decoder["decoders"].as_array().map(Vec::as_slice) {
            Some([only]) => uses_byte_level_decoder(only),
            _ => false,
        },
        _ => false,
    }
}

/// GPT-2's printable stand-ins for the 256 bytes.
fn byte_level_alphabet() -> HashMap<char, u8> {
    let mut stand_in = 256_u32;
    (0..=u8::MAX)
        .filter_map(|byte| {
            let c = match byte {
                b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
                _ => {
                    stand_in += 1;
                    char::from_u32(stand_in - 1)?
                }
            };
            Some((c, byte))
        })
        .collect()
}

fn undo_byte_level(alphabet: &HashMap<char, u8>, token: &str) -> Vec<u8> {
    token
        .chars()
        .map(|c| alphabet.get(&c).copied())
        .collect::<Option<Vec<u8>>>()
        // A token with a character outside the alphabet is taken as it is written, as the
        // `tokenizers` decoder does.
        .unwrap_or_else(|| token.as_bytes().to_vec())
}
