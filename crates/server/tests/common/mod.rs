//! The demo model as a server knows it.

use std::sync::Arc;
use std::time::Duration;

use lily_chat::{ChatTemplate, Tokenizer, generation_defaults};
use lily_scheduler::{Health, Limits, Status};
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

/// The state of a backend that is well, with so many requests running.
pub fn well(running: usize) -> Status {
    Status {
        health: Health::Well,
        heartbeat: Duration::ZERO,
        running,
        waiting: 0,
        limits: Limits { context: 1 << 20, parallel: 8, queue: 8 },
        memory: Vec::new(),
        prompt_tokens_computed: 0,
        prompt_tokens_cached: 0,
        steps: 0,
        preemptions: 0,
        prefixes: 0,
        prefixes_skipped: 0,
        faults: 0,
    }
}
