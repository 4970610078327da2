//! GPT-2's printable stand-ins for the 256 bytes, in which byte-level vocabularies are written.

use std::collections::HashMap;

/// Every byte with its stand-in.
pub(super) fn stand_ins() -> impl Iterator<Item = (u8, char)> {
    let mut next = 256_u32;
    (0..=u8::MAX).filter_map(move |byte| match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => Some((byte, char::from(byte))),
        _ => {
            next += 1;
            Some((byte, char::from_u32(next - 1)?))
        }
    })
}

/// The bytes that tokens stand for.
pub(super) struct Alphabet(HashMap<char, u8>);

impl Alphabet {
    pub(super) fn new() -> Self {
        Self(stand_ins().map(|(byte, stand_in)| (stand_in, byte)).collect())
    }

    /// A token with a character outside of the alphabet is taken as it is written, as the
    /// `tokenizers` decoder does.
    pub(super) fn bytes(&self, token: &str) -> Vec<u8> {
        token
            .chars()
            .map(|c| self.0.get(&c).copied())
            .collect::<Option<Vec<u8>>>()
            .unwrap_or_else(|| token.as_bytes().to_vec())
    }
}
