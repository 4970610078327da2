//! Tokenizer and detokenizer: what text can and cannot become, streaming equals whole.

mod common;

use common::{TOKENIZER, demo_file};
use lily_chat::{ChatError, Detokenizer, Tokenizer, Utf8Stream};
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
    let mut huge_id = demo_json();
    huge_id["added_tokens"][0]["id"] = json!(4_000_000_000_u64);
    for text in [String::new(), "{}".into(), "[]".into(), huge_id.to_string()] {
        let error = Tokenizer::from_json(&text, None).unwrap_err().to_string();
        assert!(error.starts_with("tokenizer.json"), "{error}");
    }
    let twice = demo_file("tokenizer.json").replacen('{', r#"{"version": "0","#, 1);
    let error = Tokenizer::from_json(&twice, None).unwrap_err().to_string();
    assert!(error.contains("`version` occurs twice"), "{error}");
}

/// What is said of the demo's tokenizer with the value at this place changed.
fn changed(place: &str, value: Value) -> Result<Tokenizer, String> {
    let mut file = demo_json();
    *file.pointer_mut(place).unwrap_or_else(|| panic!("{place}")) = value;
    Tokenizer::from_json(&file.to_string(), None).map_err(|error| error.to_string())
}

#[test]
fn definitions_that_are_no_byte_level_bpe_are_refused_by_name() {
    let sequence = |key: &str, list: Value| json!({"type": "Sequence", key: list});
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false});
    let split = |pattern: Value, behavior: &str| {
        let split =
            json!({"type": "Split", "pattern": pattern, "behavior": behavior, "invert": false});
        sequence("pretokenizers", json!([split, byte_level]))
    };
    for (place, value, words) in [
        ("/model/type", json!("WordPiece"), "its model is \"WordPiece\", and only BPE"),
        ("/model", json!({"type": "Unigram", "vocab": []}), "its model is \"Unigram\""),
        ("/model", json!(3), "its model is 3"),
        ("/model/dropout", json!(0.1), "dropout 0.1, which makes tokens random"),
        ("/model/continuing_subword_prefix", json!("##"), "continuing_subword_prefix"),
        ("/model/end_of_word_suffix", json!("</w>"), "end_of_word_suffix"),
        ("/model/byte_fallback", json!("yes"), "byte_fallback \"yes\", not true or false"),
        ("/model/vocab", json!([]), "its vocab is []"),
        ("/model/vocab/!", json!(-1), "the token \"!\" has the id -1"),
        ("/model/vocab/!", json!(1 << 22), "the token \"!\" has the id 4194304"),
        ("/model/vocab/!", json!(7), "contradicts another one of the id 7"),
        ("/model/merges", json!({}), "its merges are {}"),
        ("/model/merges", json!(["a"]), "the merge \"a\" is no pair"),
        ("/model/merges", json!([["a"]]), "the merge [\"a\"] is no pair"),
        ("/model/merges", json!([["a", 1]]), "is no pair"),
        ("/model/merges", json!([7]), "the merge 7 is no pair"),
        // Its whole is longer than any token: the library would write behind its buffer.
        ("/model/merges", json!([["Ġt", "Q!"]]), "needs \"Q!\""),
        ("/decoder", json!({"type": "WordPiece"}), "its decoder is \"WordPiece\""),
        ("/decoder", json!(null), "it has no decoder"),
        ("/decoder", sequence("decoders", json!([byte_level, byte_level])), "several steps"),
        ("/decoder", sequence("decoders", json!(1)), "no list \"decoders\""),
        (
            "/normalizer",
            json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
            "its normalizer is \"Precompiled\"",
        ),
        (
            "/normalizer",
            json!({"type": "Replace", "pattern": {"String": ""}, "content": "x"}),
            "its normalizer is \"Replace\"",
        ),
        (
            "/normalizer",
            json!({"type": "Prepend", "prepend": "x"}),
            "its normalizer is \"Prepend\"",
        ),
        ("/normalizer", json!([1]), "its normalizer is [1]"),
        (
            "/normalizer",
            sequence("normalizers", json!(vec![json!({"type": "NFC"}); 20])),
            "more than 16 steps",
        ),
        (
            "/post_processor",
            json!({"type": "RobertaProcessing"}),
            "its post_processor is \"RobertaProcessing\"",
        ),
        ("/pre_tokenizer", json!(null), "does not end with ByteLevel"),
        (
            "/pre_tokenizer",
            json!({"type": "FixedLength", "length": 0}),
            "does not end with ByteLevel",
        ),
        (
            "/pre_tokenizer",
            sequence("pretokenizers", json!([{"type": "FixedLength", "length": 0}, byte_level])),
            "its pre_tokenizer is \"FixedLength\"",
        ),
        (
            "/pre_tokenizer",
            sequence("pretokenizers", json!([byte_level, byte_level])),
            "its pre_tokenizer is \"ByteLevel\"",
        ),
        ("/pre_tokenizer", json!({"type": "ByteLevel"}), "add_prefix_space"),
        (
            "/pre_tokenizer",
            json!({"type": "ByteLevel", "add_prefix_space": 0}),
            "\"add_prefix_space\" of its pre_tokenizer is 0",
        ),
        ("/pre_tokenizer", split(json!({"Regex": "a"}), "Removed"), "removes text"),
        ("/pre_tokenizer", split(json!({"Regex": "a"}), "Other"), "unknown behavior \"Other\""),
        ("/pre_tokenizer", split(json!({"Regex": "(a"}), "Isolated"), "cannot be used"),
        ("/pre_tokenizer", split(json!({"Regex": ""}), "Isolated"), "a pattern of 0 bytes"),
        (
            "/pre_tokenizer",
            split(json!({"String": "a".repeat(9000)}), "Isolated"),
            "a pattern of 9000 bytes",
        ),
        ("/pre_tokenizer", split(json!("a"), "Isolated"), "has the pattern \"a\""),
        ("/added_tokens", json!({}), "added_tokens is {}, not a list"),
        ("/added_tokens/0", json!(null), "no usable id and content"),
        ("/added_tokens/0/lstrip", json!(true), "has lstrip"),
        ("/added_tokens/0/special", json!(1), "has special 1"),
        ("/added_tokens/0/content", json!("x".repeat(300)), "has 300 bytes"),
    ] {
        let error = changed(place, value).unwrap_err();
        assert!(error.starts_with("tokenizer.json: ") && error.contains(words), "{place}: {error}");
        assert!(error.len() < 300, "{error}");
    }
}

#[test]
fn every_byte_of_text_needs_a_token() {
    let mut file = demo_json();
    file["model"]["merges"] = json!([]);
    file["model"]["vocab"].as_object_mut().unwrap().remove("Q");
    let error = Tokenizer::from_json(&file.to_string(), None).unwrap_err().to_string();
    assert!(error.contains("no token for the byte 0x51 ('Q')"), "{error}");
}

#[test]
fn the_forms_that_published_files_have_are_read() {
    let text = "Hello, wörld! It's 1234 <|im_end|>\n\n  done";
    let ids = TOKENIZER.encode(text).unwrap();
    let merges: Vec<Value> = demo_json()["model"]["merges"]
        .as_array()
        .unwrap()
        .iter()
        .map(|pair| json!(format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap())))
        .collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false});
    for (place, value) in [
        ("/model/merges", Value::from([vec![json!("#version: 0.2")], merges].concat())),
        ("/model/dropout", json!(0.0)),
        ("/model/end_of_word_suffix", json!("")),
        ("/model/unk_token", json!("!")),
        ("/model/fuse_unk", json!(true)),
        ("/model/byte_fallback", json!(true)),
        ("/decoder", json!({"type": "Sequence", "decoders": [byte_level]})),
        (
            "/normalizer",
            json!({"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": []}, {"type": "NFC"}]}),
        ),
        (
            "/post_processor",
            json!({"type": "Sequence", "processors": [byte_level, {"type": "TemplateProcessing"}]}),
        ),
    ] {
        let tokenizer = changed(place, value).unwrap_or_else(|error| panic!("{place}: {error}"));
        assert_eq!(tokenizer.encode(text).unwrap(), ids, "{place}");
    }
    // GPT-2's own: no split of its own, and then digits and punctuation as DeepSeek has them.
    let gpt2 = json!({"type": "ByteLevel", "add_prefix_space": false});
    let steps = json!([{"type": "Digits", "individual_digits": true}, {"type": "Punctuation"},
        {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithNext", "invert": false}, gpt2]);
    for value in [gpt2.clone(), json!({"type": "Sequence", "pretokenizers": steps})] {
        let tokenizer = changed("/pre_tokenizer", value).unwrap();
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(tokenizer.decode(&ids, false), text);
    }
}

#[test]
fn tokenizer_configs_of_wrong_types_are_errors_that_name_the_key() {
    for (config, words) in [
        ("{", "not valid JSON"),
        (r#"{"eos_token": "a", "eos_token": "b"}"#, "`eos_token` occurs twice"),
        (r#"{"eos_token": 3}"#, "eos_token is 3"),
        (r#"{"eos_token": {"content": 3}}"#, "eos_token is {\"content\":3}"),
        (r#"{"added_tokens_decoder": []}"#, "added_tokens_decoder is []"),
        (r#"{"added_tokens_decoder": {"x": {"content": "y"}}}"#, "no usable id and content"),
        (r#"{"chat_template": 3}"#, "chat_template is 3"),
        (r#"{"chat_template": [{"name": "default"}]}"#, "chat_template is [{"),
    ] {
        let error = Tokenizer::from_json(&demo_file("tokenizer.json"), Some(config))
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("tokenizer_config.json: ") && error.contains(words), "{error}");
    }
}

#[test]
fn a_hundred_thousand_added_tokens() {
    let added: serde_json::Map<String, Value> = (0..100_000)
        .map(|n| {
            (
                (5000 + n).to_string(),
                json!({"content": format!("<|reserved_{n}|>"), "special": true}),
            )
        })
        .collect();
    let config = json!({ "added_tokens_decoder": added }).to_string();
    let tokenizer = Tokenizer::from_json(&demo_file("tokenizer.json"), Some(&config)).unwrap();
    assert_eq!(tokenizer.encode_rendered("<|reserved_99999|>").unwrap(), [104_999]);
    let more: serde_json::Map<String, Value> = (0..200_000)
        .map(|n| ((5000 + n).to_string(), json!({"content": format!("<{n}>")})))
        .collect();
    let config = json!({ "added_tokens_decoder": more }).to_string();
    let error = Tokenizer::from_json(&demo_file("tokenizer.json"), Some(&config)).unwrap_err();
    assert!(error.to_string().contains("more than 131072 added tokens"), "{error}");
}

#[test]
fn texts_that_cannot_fit_are_refused_before_they_are_tokenized() {
    let text = "one two three ";
    let count = TOKENIZER.encode(text).unwrap().len();
    assert_eq!(TOKENIZER.encode_within(text, count).unwrap().len(), count);
    for text in [text.to_owned(), "word ".repeat(100_000), "\u{1D400}".repeat(1 << 20)] {
        match TOKENIZER.encode_within(&text, count - 1) {
            Err(ChatError::TooLong { bytes, limit }) => {
                assert_eq!((bytes, limit), (text.len(), count - 1));
            }
            other => panic!("{other:?}"),
        }
    }
    let prompt = "<|im_start|>user\nx<|im_end|>";
    let ids = TOKENIZER.encode_rendered(prompt).unwrap();
    assert_eq!(TOKENIZER.encode_rendered_within(prompt, ids.len()).unwrap(), ids);
    assert!(TOKENIZER.encode_rendered_within(prompt, ids.len() - 1).is_err());
}

#[test]
fn long_texts_are_tokenized_in_pieces_as_they_are_whole() {
    let line = "A line, with 3 words:\n\n  and more é\nend.\nNext ";
    let lines = line.repeat(50_000);
    assert!(lines.len() > 2 << 20);
    let ids = TOKENIZER.encode(&lines).unwrap();
    // As by the line: behind "end.\n" a word always ends.
    let end = line.find("Next").unwrap();
    let (first, rest) = lines.split_at(end);
    let mut expected = TOKENIZER.encode(first).unwrap();
    let middle = TOKENIZER.encode(&rest[..line.len()]).unwrap();
    for _ in 1..50_000 {
        expected.extend(&middle);
    }
    expected.extend(TOKENIZER.encode("Next ").unwrap());
    assert!(ids == expected);
    // Without a line break: between words.
    let words = "all of it words, 12 345  and é too ";
    let ids = TOKENIZER.encode(&words.repeat(30_000)).unwrap();
    let mut expected = TOKENIZER.encode(words.trim_end()).unwrap();
    let middle = TOKENIZER.encode(&format!(" {}", words.trim_end())).unwrap();
    for _ in 1..30_000 {
        expected.extend(&middle);
    }
    expected.extend(TOKENIZER.encode(" ").unwrap());
    assert!(ids == expected);
    let error = TOKENIZER.encode(&"a".repeat(9 << 20)).unwrap_err().to_string();
    assert!(error.contains("no line or word begins"), "{error}");
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
