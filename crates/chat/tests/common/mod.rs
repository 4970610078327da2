//! The demo model's text side, shared by the tests.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use lily_chat::{ChatTemplate, RenderInput, Tokenizer};
use serde_json::{Value, json};

pub fn demo_file(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/demo").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

pub static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let config = demo_file("tokenizer_config.json");
    Arc::new(Tokenizer::from_json(&demo_file("tokenizer.json"), Some(&config)).unwrap())
});

pub static TEMPLATE: LazyLock<ChatTemplate> =
    LazyLock::new(|| ChatTemplate::new(&demo_file("chat_template.jinja"), &TOKENIZER).unwrap());

pub fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, &TOKENIZER).unwrap()
}

pub fn user(content: &str) -> RenderInput {
    RenderInput {
        messages: vec![json!({"role": "user", "content": content})],
        add_generation_prompt: true,
        ..RenderInput::default()
    }
}

pub fn input(messages: Value) -> RenderInput {
    RenderInput { messages: messages.as_array().unwrap().clone(), ..RenderInput::default() }
}

/// What a person sees of the prompt.
pub fn shown(template: &ChatTemplate, input: &RenderInput) -> String {
    lily_chat::marks::unmark(&template.render(input).unwrap()).into_owned()
}

/// The control tokens of the prompt, in order.
pub fn controls(template: &ChatTemplate, input: &RenderInput) -> Vec<u32> {
    let ids = TOKENIZER.encode_rendered(&template.render(input).unwrap());
    let mut ids = ids.unwrap();
    ids.retain(|id| TOKENIZER.is_control(*id));
    ids
}
