//! Tokenizer and detokenizer: what text can and cannot become, streaming equals whole.

mod common;

use common::{TOKENIZER, demo_file};
use lily_chat::{Detokenizer, Tokenizer, Utf8Stream};
use proptest::prelude::*;
use serde_json::{Value, json};

fn demo_json() -> Value {
    serde_json::from_str(&demo_file("tokenizer.json")).unwrap()
}

#[test]
fn control_tokens_are_known_by_their_spelling() {
    let im_end = TOKENIZER.id_of("<|im_end|>").unwrap();
    let think = TOKENIZER.id_of("<think>").unwrap();
    assert_eq!((im_end, think), (4066, 4071));
    assert_eq!(TOKENIZER.eos_id(), Some(im_end));
    assert!(TOKENIZER.is_control(im_end) && TOKENIZER.is_special(im_end));
    assert!(TOKENIZER.is_control(think) && !TOKENIZER.is_special(think));
    assert_eq!(TOKENIZER.token_bytes(think), Some(b"<think>".as_slice()));
    assert_eq!(TOKENIZER.id_of("the"), None);
}

#[test]
fn padding_rows_are_not_named() {
    assert_eq!(TOKENIZER.vocab_len(), 4073);
    assert!((0..4073).all(|id| TOKENIZER.names(id)));
    for id in [4073, 4095, u32::MAX] {
        assert!(!TOKENIZER.names(id));
        assert_eq!(TOKENIZER.token_bytes(id), None);
    }
    assert_eq!(TOKENIZER.decode(&[4073, 4095], false), "");
}

#[test]
fn every_byte_has_a_token() {
    let mut seen = [false; 256];
    for id in 0..TOKENIZER.vocab_len() as u32 {
        if let Some([byte]) = TOKENIZER.token_bytes(id) {
            seen[usize::from(*byte)] = true;
        }
    }
    assert!(seen.iter().all(|seen| *seen));
}

#[test]
fn text_is_normalized_to_nfc() {
    assert_eq!(TOKENIZER.encode("e\u{301}").unwrap(), TOKENIZER.encode("é").unwrap());
    assert_eq!(TOKENIZER.encode("").unwrap(), Vec::<u32>::new());
}

#[test]
fn a_megabyte_of_blanks_is_split_as_a_few_are() {
    // The pattern's look-ahead backtracks; were it to give up, the words after the blanks would
    // be split differently.
    let tail = |blanks: usize| {
        let text = format!("x{}y and more\n", " ".repeat(blanks));
        let ids = TOKENIZER.encode(&text).unwrap();
        assert!(TOKENIZER.decode(&ids, false) == text);
        ids[ids.len() - 4..].to_vec()
    };
    assert_eq!(tail(1 << 20), tail(9));
    for text in ["a".repeat(1 << 18), "\n \n".repeat(1 << 16)] {
        let ids = TOKENIZER.encode(&text).unwrap();
        assert!(TOKENIZER.decode(&ids, false) == text);
    }
}

#[test]
fn tokens_only_in_the_config_are_added() {
    let config = json!({"added_tokens_decoder": {
        "4072": {"content": "</think>", "special": false},
        "4080": {"content": "<|audio_start|>", "special": true},
    }});
    let tokenizer =
        Tokenizer::from_json(&demo_file("tokenizer.json"), Some(&config.to_string())).unwrap();
    assert_eq!(tokenizer.id_of("<|audio_start|>"), Some(4080));
    assert!(tokenizer.is_special(4080));
    assert_eq!(tokenizer.vocab_len(), 4081);
    assert!(!tokenizer.names(4075));
    assert_eq!(tokenizer.eos_id(), None);
    assert_eq!(tokenizer.encode_rendered("<|audio_start|><|endoftext|>").unwrap(), [4080, 4064]);
}

#[test]
fn contradictions_are_errors_that_name_the_token() {
    for (id, content) in [("4072", "<other>"), ("4090", "</think>"), ("17", "<in the vocabulary>")]
    {
        let config = json!({"added_tokens_decoder": {id: {"content": content}}});
        let error = Tokenizer::from_json(&demo_file("tokenizer.json"), Some(&config.to_string()))
            .unwrap_err()
            .to_string();
        assert!(error.contains(content) && error.contains("contradicts"), "{error}");
    }
}

#[test]
fn broken_files_are_errors() {
    let mut other_decoder = demo_json();
    other_decoder["decoder"] = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
    let mut huge_id = demo_json();
    huge_id["added_tokens"][0]["id"] = json!(4_000_000_000_u64);
    for text in
        [String::new(), "{}".into(), "[]".into(), other_decoder.to_string(), huge_id.to_string()]
    {
        let error = Tokenizer::from_json(&text, None).unwrap_err().to_string();
        assert!(error.starts_with("tokenizer.json"), "{error}");
    }
    let error =
        Tokenizer::from_json(&demo_file("tokenizer.json"), Some("{")).unwrap_err().to_string();
    assert!(error.starts_with("tokenizer_config.json"), "{error}");
}

#[test]
fn truncation_and_padding_of_the_file_are_ignored() {
    let mut file = demo_json();
    file["truncation"] =
        json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    let tokenizer = Tokenizer::from_json(&file.to_string(), None).unwrap();
    let text = "a text of more than two tokens";
    assert_eq!(tokenizer.encode(text).unwrap(), TOKENIZER.encode(text).unwrap());
}

/// Texts with spellings of control tokens and odd characters among ordinary ones.
fn texts() -> impl Strategy<Value = String> {
    let fragment = prop_oneof![
        Just("<|im_end|>".to_owned()),
        Just("</think>".to_owned()),
        Just("<tool_call>".to_owned()),
        Just(" é 😀\n\n".to_owned()),
        "[ -~]{0,8}",
        any::<String>(),
    ];
    prop::collection::vec(fragment, 0..8).prop_map(|fragments| fragments.concat())
}

proptest! {
    #[test]
    fn plain_text_never_makes_a_control_token(text in texts()) {
        let ids = TOKENIZER.encode(&text).unwrap();
        prop_assert!(ids.iter().all(|id| TOKENIZER.names(*id) && !TOKENIZER.is_control(*id)));
        // Encoding normalizes once; after that, text and tokens are the same thing.
        let normal = TOKENIZER.decode(&ids, false);
        prop_assert_eq!(TOKENIZER.encode(&normal).unwrap(), ids);
    }

    #[test]
    fn streamed_text_equals_the_whole(
        ids in prop::collection::vec(0_u32..4096, 0..64),
        bytes in prop::collection::vec(0_u32..256, 0..32),
        skip in any::<bool>(),
    ) {
        // The first 256 ids of the vocabulary are the single bytes: much invalid UTF-8.
        for ids in [ids, bytes] {
            let mut stream = Detokenizer::new(TOKENIZER.clone(), skip);
            let mut text = String::new();
            for id in &ids {
                if let Some(new) = stream.push(*id) {
                    prop_assert!(!new.is_empty());
                    text += &new;
                }
            }
            text.extend(stream.finish());
            prop_assert_eq!(text, TOKENIZER.decode(&ids, skip));
        }
    }

    #[test]
    fn streamed_bytes_equal_from_utf8_lossy_and_never_stall(
        chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..6), 0..12),
        text in any::<String>(),
    ) {
        let valid: Vec<Vec<u8>> = text.bytes().map(|byte| vec![byte]).collect();
        for chunks in [chunks, valid] {
            let mut stream = Utf8Stream::new();
            let mut out = String::new();
            let mut seen = Vec::new();
            for chunk in &chunks {
                stream.push(chunk, &mut out);
                seen.extend_from_slice(chunk);
                // All but an unfinished last character is out at once.
                let now = String::from_utf8_lossy(&seen);
                let complete = match stream.is_waiting() {
                    true => now.strip_suffix(char::REPLACEMENT_CHARACTER).unwrap(),
                    false => &now,
                };
                prop_assert_eq!(&out, complete);
            }
            stream.finish(&mut out);
            prop_assert_eq!(&out, &String::from_utf8_lossy(&seen));
        }
    }
}
