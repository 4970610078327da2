//! Long texts, piece by piece: the `tokenizers` crate takes some 200 bytes of memory for each byte
//! of a text that it is given at once.
//!
//! A text is cut behind a line break that stands alone between a printable ASCII character and a
//! letter, or before a space that stands alone between two ASCII letters. Every published pattern of
//! byte-level BPE ends a word there, whatever comes before and after, and no normalization joins
//! across it; each cut is tested on the text around it all the same.

use super::Tokenizer;
use crate::error::ChatError;

/// Bytes of a piece from which on it is cut where it can be.
const PIECE: usize = if cfg!(fuzzing) { 128 } else { 256 << 10 };
/// Bytes that are taken whole where no cut is found.
const LONGEST_PIECE: usize = if cfg!(fuzzing) { 512 } else { 8 << 20 };
/// Bytes around a cut on which it is tested.
const AROUND: usize = 64;
/// Cuts that are tested for one piece.
const TESTED: usize = 1000;

/// The first piece of a text, of 1 byte or more.
pub(super) fn next<'t>(tokenizer: &Tokenizer, text: &'t str) -> Result<&'t str, ChatError> {
    if text.len() <= PIECE + AROUND {
        return Ok(text);
    }
    let bytes = text.as_bytes();
    let end = bytes.len().min(LONGEST_PIECE);
    let cuts = (PIECE..end - 1).filter_map(|at| cut(bytes[at - 1], bytes[at], bytes[at + 1], at));
    for at in cuts.take(TESTED) {
        if holds(tokenizer, text, at)? {
            return Ok(&text[..at]);
        }
    }
    match end == bytes.len() {
        true => Ok(text),
        false => Err(ChatError::Encode {
            bytes: text.len(),
            problem: format!("no line or word begins within {LONGEST_PIECE} bytes of it"),
        }),
    }
}

/// Where a text may be cut at a byte between two others.
fn cut(before: u8, byte: u8, after: u8, at: usize) -> Option<usize> {
    match byte {
        b'\n' if before.is_ascii_graphic() && after.is_ascii_alphabetic() => Some(at + 1),
        b' ' if before.is_ascii_alphabetic() && after.is_ascii_alphabetic() => Some(at),
        _ => None,
    }
}

/// Whether both sides of a cut, tokenized apart, give what they give together.
fn holds(tokenizer: &Tokenizer, text: &str, cut: usize) -> Result<bool, ChatError> {
    let start = (0..=cut - AROUND).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    let end = (cut + AROUND..=text.len()).find(|at| text.is_char_boundary(*at));
    let end = end.unwrap_or(text.len());
    let mut apart = tokenizer.encode_piece(&text[start..cut])?;
    apart.extend(tokenizer.encode_piece(&text[cut..end])?);
    Ok(apart == tokenizer.encode_piece(&text[start..end])?)
}
