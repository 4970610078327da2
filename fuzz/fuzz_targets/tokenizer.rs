//! Any `tokenizer.json` (and, after a NUL byte, `tokenizer_config.json`): a tokenizer that keeps its promises, or an
//! error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use lily_chat::Tokenizer;

fuzz_target!(|data: &str| {
    let (tokenizer, config) = match data.split_once('\0') {
        Some((tokenizer, config)) => (tokenizer, Some(config)),
        None => (data, None),
    };
    let Ok(tokenizer) = Tokenizer::from_json(tokenizer, config) else {
        return;
    };
    if let Ok(ids) = tokenizer.encode("ab <|im_end|> é\n") {
        assert!(ids.iter().all(|id| tokenizer.names(*id) && !tokenizer.is_control(*id)));
        let _ = tokenizer.decode(&ids, true);
    }
    for id in (0..tokenizer.vocab_len() as u32).take(1000) {
        assert_eq!(tokenizer.token_bytes(id).is_some(), tokenizer.names(id));
    }
});
