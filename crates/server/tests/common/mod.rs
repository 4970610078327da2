//! The demo model as a server knows it.

use std::sync::Arc;

use lily_chat::{ChatTemplate, Tokenizer, generation_defaults};
use lily_server::ServedModel;

fn file(name: &str) -> &'static str {
    let (_, bytes) = lily_demo::FILES.iter().find(|(file, _)| *file == name).unwrap();
    std::str::from_utf8(bytes).unwrap()
}

pub fn model() -> ServedModel {
    let config = file("tokenizer_config.json");
    let tokenizer = Arc::new(Tokenizer::from_json(file("tokenizer.json"), Some(config)).unwrap());
    let config = serde_json::from_str(file("config.json")).unwrap();
    ServedModel {
        id: "demo".into(),
        aliases: Vec::new(),
        any_name: false,
        created: 0,
        template: ChatTemplate::new(file("chat_template.jinja"), &tokenizer).unwrap(),
        defaults: generation_defaults(Some(file("generation_config.json")), &config).unwrap(),
        mask: None,
        tokenizer,
    }
}
