//! Any template with any messages: an answer or an error, never a crash.
//!
//! The input is a template, then optionally a NUL byte and a JSON list of messages.
#![no_main]

mod tiny;

use libfuzzer_sys::fuzz_target;
use lily_chat::{ChatTemplate, RenderInput};
use serde_json::{Value, json};

fuzz_target!(|data: &str| {
    let (source, messages) = data.split_once('\0').unwrap_or((data, ""));
    let Ok(template) = ChatTemplate::new(source, &tiny::TINY) else {
        return;
    };
    let messages = match serde_json::from_str(messages) {
        Ok(Value::Array(messages)) => messages,
        _ => vec![
            json!({"role": "user", "content": "a <b> c"}),
            json!({"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": "{\"k\": 1.5}"}}]}),
        ],
    };
    let input = RenderInput { messages, add_generation_prompt: true, ..RenderInput::default() };
    let strict = template.render(&input);
    let tolerant = template.render_tolerant(&input);
    for text in strict.into_iter().chain(tolerant.map(|rendered| rendered.text)) {
        let _ = tiny::TINY.encode_rendered(&text);
    }
});
