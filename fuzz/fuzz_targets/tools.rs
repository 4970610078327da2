//! Any text with calls in it, cut anywhere: streamed parts equal those of the whole, and complete calls have
//! arguments that are JSON.
//!
//! The first byte is the length of the pieces and says how the answer ends.
#![no_main]

use std::sync::{Arc, LazyLock};

use libfuzzer_sys::fuzz_target;
use lily_chat::{AnswerParser, CallPart, End, Part, Tools};
use serde_json::{Value, json};

static TOOLS: LazyLock<Arc<Tools>> = LazyLock::new(|| {
    let tools = [
        json!({"type": "function", "function": {"name": "read", "parameters": {"properties": {"path": {"type": "string"}}}}}),
        json!({"type": "function", "function": {"name": "add", "parameters": {"properties": {
            "a": {"type": ["integer", "null"]}, "b": {"type": ["object", "array", "number", "boolean"]}}}}}),
    ];
    Arc::new(Tools::new(&tools).expect("they are well-formed"))
});

/// Content, and calls as name, arguments and whether they are complete.
type Answer = (String, Vec<(String, String, bool)>, bool);

fn read<'t>(pieces: impl Iterator<Item = String> + 't, end: End) -> Answer {
    let mut parser = AnswerParser::new(false, Some(Arc::clone(&TOOLS)));
    let mut parts: Vec<Part> = Vec::new();
    for piece in pieces {
        parts.extend(parser.push(&piece));
    }
    let (rest, cut) = parser.finish(end);
    parts.extend(rest);
    let (mut content, mut calls) = (String::new(), Vec::<(String, String, bool)>::new());
    for part in parts {
        match (part, calls.last_mut()) {
            (Part::Content { text, .. }, _) => content += &text,
            (Part::Call(CallPart::Begin { name }), _) => calls.push((name, String::new(), false)),
            (Part::Call(CallPart::Arguments(text)), Some(call)) => call.1 += &text,
            (Part::Call(CallPart::End), Some(call)) => call.2 = true,
            (part, _) => panic!("{part:?} without its beginning"),
        }
    }
    (content, calls, cut)
}

fuzz_target!(|data: &str| {
    let first = data.as_bytes().first().copied().unwrap_or(0);
    let (width, end) = (usize::from(first % 5) + 1, if first & 32 == 0 { End::Turn } else { End::Cut });
    let whole = read(std::iter::once(data.to_owned()), end);
    let letters: Vec<char> = data.chars().collect();
    let streamed = read(letters.chunks(width).map(|piece| piece.iter().collect()), end);
    assert_eq!(streamed, whole);
    for (_, arguments, complete) in &whole.1 {
        assert_eq!(serde_json::from_str::<Value>(arguments).is_ok(), *complete, "{arguments}");
    }
    if whole.1.is_empty() && !whole.2 {
        assert_eq!(whole.0, data);
    }
});
