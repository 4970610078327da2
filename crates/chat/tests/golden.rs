//! The reference outputs in models/demo/golden: made with Hugging Face's tokenizers and jinja2.

mod common;

use common::{TEMPLATE, TOKENIZER, demo_file};
use lily_chat::{Detokenizer, RenderInput, marks};
use serde_json::Value;

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn prompts_ids_and_texts_equal_the_reference() {
    let golden: Value = serde_json::from_str(&demo_file("golden/greedy.json")).unwrap();
    let prompts = golden["prompts"].as_array().unwrap();
    assert_eq!(prompts.len(), 13);
    for prompt in prompts {
        let name = prompt["name"].as_str().unwrap();
        let input = RenderInput {
            messages: prompt["messages"].as_array().unwrap().clone(),
            tools: prompt["tools"].as_array().cloned(),
            add_generation_prompt: true,
            enable_thinking: prompt["enable_thinking"].as_bool(),
            ..RenderInput::default()
        };
        let rendered = TEMPLATE.render(&input).unwrap();
        assert_eq!(marks::unmark(&rendered), prompt["prompt"].as_str().unwrap(), "{name}");
        let prompt_ids = TOKENIZER.encode_rendered(&rendered).unwrap();
        assert_eq!(prompt_ids, ids(&prompt["prompt_ids"]), "{name}");

        let output = ids(&prompt["output_ids"]);
        let text = prompt["text"].as_str().unwrap();
        assert_eq!(TOKENIZER.decode(&output, false), text, "{name}");
        let mut stream = Detokenizer::new(TOKENIZER.clone(), false);
        let mut streamed: String = output.iter().filter_map(|id| stream.push(*id)).collect();
        streamed.extend(stream.finish());
        assert_eq!(streamed, text, "{name}");
        assert_eq!(TOKENIZER.decode(&output, true), text.replace("<|im_end|>", ""), "{name}");
    }
}

#[test]
fn held_out_text_has_the_reference_ids() {
    let golden: Value = serde_json::from_str(&demo_file("golden/logprobs.json")).unwrap();
    let first = &golden["sequences"][0];
    let text = first["text"].as_str().unwrap();
    assert_eq!(TOKENIZER.encode(text).unwrap(), ids(&first["ids"]));
}
