//! A tokenizer of a few tokens, for targets whose subject is not the tokenizer.

use std::sync::{Arc, LazyLock};

use lily_chat::Tokenizer;

pub static TINY: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let json = include_str!("bytes.json");
    Arc::new(Tokenizer::from_json(json, None).expect("this is a valid tokenizer"))
});
