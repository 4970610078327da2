//! Any `tokenizer.json` (and, after a NUL byte, `tokenizer_config.json`): a tokenizer that keeps its promises, or an
//! error.
//!
//! The first `@` stands for the tokens of all bytes, which every definition needs and no mutation would keep.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use lily_chat::Tokenizer;

/// The first 256 entries of the vocabulary.
static BYTES: LazyLock<&str> = LazyLock::new(|| {
    let json = include_str!("bytes.json");
    let vocab = &json[json.find("\"vocab\":{").expect("a vocabulary") + 9..];
    &vocab[..vocab.find(",\"ab\"").expect("the entry behind the bytes")]
});

const TEXT: &str = "ab abc <|im_end|> \u{e9}e\u{301} \u{ac00}\u{1d400}12 'a.b'\n";

fuzz_target!(|data: &str| {
    let data = data.replacen('@', &BYTES, 1);
    let (tokenizer, config) = match data.split_once('\0') {
        Some((tokenizer, config)) => (tokenizer, Some(config)),
        None => (data.as_str(), None),
    };
    let Ok(tokenizer) = Tokenizer::from_json(tokenizer, config) else {
        return;
    };
    // Long texts are cut into pieces, which under the fuzzer are short ones.
    for text in [TEXT.to_owned(), format!("{}.\nNext", TEXT.repeat(8)), "a".repeat(700)] {
        let Ok(ids) = tokenizer.encode(&text) else { continue };
        assert!(ids.iter().all(|id| tokenizer.names(*id) && !tokenizer.is_control(*id)));
        let back = tokenizer.decode(&ids, false);
        // Normalization changes text; nothing else may.
        assert!(back == text || data.contains("NF"), "{text:?} came back as {back:?}");
        assert_eq!(tokenizer.encode_within(&text, ids.len()).ok(), Some(ids.clone()));
        assert!(tokenizer.encode_within(&text, ids.len() - 1).is_err());
        let _ = tokenizer.encode_rendered(&text);
    }
    for id in (0..tokenizer.vocab_len() as u32).take(1000) {
        assert_eq!(tokenizer.token_bytes(id).is_some(), tokenizer.names(id));
    }
});
