//! Any thoughts, cut anywhere: streamed parts equal those of the whole, and no think tag closes twice.
//!
//! The first byte is the length of the pieces and says how the answer ends.
#![no_main]

use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use lily_chat::{AnswerParser, CallPart, End, Part, Tools};
use serde_json::json;

static TOOLS: LazyLock<Arc<Tools>> = LazyLock::new(|| {
    let tool = json!({"type": "function", "function": {"name": "read"}});
    Arc::new(Tools::new(&[tool]).expect("it is well-formed"))
});

fn read(pieces: impl Iterator<Item = String>, end: End) -> (String, String, String, bool) {
    let mut parser = AnswerParser::new(true, Some(Arc::clone(&TOOLS)));
    let mut parts: Vec<Part> = Vec::new();
    for piece in pieces {
        parts.extend(parser.push(&piece));
    }
    let (rest, cut) = parser.finish(end);
    parts.extend(rest);
    let (mut reasoning, mut content, mut calls) = (String::new(), String::new(), String::new());
    for part in parts {
        match part {
            Part::Reasoning(text) => reasoning += &text,
            Part::Content { text, .. } => content += &text,
            Part::Call(CallPart::Begin { name }) => calls += &format!("[{name} "),
            Part::Call(CallPart::Arguments(text)) => calls += &text,
            Part::Call(CallPart::End) => calls += "]",
        }
    }
    (reasoning, content, calls, cut)
}

fuzz_target!(|data: &str| {
    let first = data.as_bytes().first().copied().unwrap_or(0);
    let (width, end) = (usize::from(first % 5) + 1, if first & 32 == 0 { End::Turn } else { End::Cut });
    let whole = read(std::iter::once(data.to_owned()), end);
    let letters: Vec<char> = data.chars().collect();
    let streamed = read(letters.chunks(width).map(|piece| piece.iter().collect()), end);
    assert_eq!(streamed, whole);
    let (reasoning, content, calls, _) = whole;
    assert!(!reasoning.contains("</think>"), "{reasoning}");
    assert!(!reasoning.starts_with('\n') && !reasoning.ends_with('\n'), "{reasoning:?}");
    if !data.contains("</think>") && calls.is_empty() {
        assert_eq!(content, "");
        let thoughts = data.trim_matches('\n');
        let reopened = thoughts.strip_prefix("<think>").unwrap_or(thoughts);
        assert_eq!(reasoning, reopened.trim_matches('\n'));
    }
});
