//! Any `config.json`: a plan that checks, or an error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use lily_model::Precision;

fuzz_target!(|data: &[u8]| {
    if let Ok(config) = serde_json::from_slice(data) {
        // A plan has entries per layer; the number of layers alone is no parser's business.
        let layers = |c: &serde_json::Value| c["num_hidden_layers"].as_u64().unwrap_or(0);
        if layers(&config).max(layers(&config["text_config"])) > 64 {
            return;
        }
        let _ = lily_model::plan_of_config("fuzzed", &config, Precision::default());
        let text = std::str::from_utf8(data).ok();
        let _ = lily_chat::generation_defaults(text, &config);
        let _ = lily_chat::find_template(None, text);
    }
});
