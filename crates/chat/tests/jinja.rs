//! Templates render as Python's jinja2 renders them: the fixtures of tools/template-fixtures.

mod common;

use std::path::PathBuf;
use std::sync::LazyLock;

use common::{TOKENIZER, demo_file};
use lily_chat::{ChatError, ChatTemplate, RenderInput, marks};
use serde_json::{Map, Value};

fn fixture(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

static FIXTURES: LazyLock<Value> =
    LazyLock::new(|| serde_json::from_str(&fixture("templates.json")).unwrap());

fn at_the_fixtures_time(source: &str) -> Result<ChatTemplate, ChatError> {
    let seconds = FIXTURES["now"].as_u64().unwrap();
    Ok(ChatTemplate::new(source, &TOKENIZER)?.at_time(seconds))
}

/// The text, or the kind of the error, in the form of the fixtures.
fn outcome(template: &Result<ChatTemplate, ChatError>, input: &RenderInput) -> Value {
    let result = match template {
        Ok(template) => template.render(input),
        Err(error) => return serde_json::json!({"error": "syntax", "why": error.to_string()}),
    };
    match result {
        Ok(text) => serde_json::json!({"text": marks::unmark(&text)}),
        Err(error @ ChatError::TemplateSyntax { .. }) => {
            serde_json::json!({"error": "syntax", "why": error.to_string()})
        }
        Err(ChatError::Refused { message }) => {
            serde_json::json!({"error": "raised", "message": message})
        }
        Err(error @ ChatError::Render { .. }) => {
            let text = error.to_string();
            let undefined = ["undefined", "unknown function", "unknown method"];
            let undefined = undefined.iter().any(|words| text.contains(words));
            let kind = if undefined { "undefined" } else { "other" };
            serde_json::json!({"error": kind, "why": text})
        }
        Err(error) => serde_json::json!({"error": "other", "why": error.to_string()}),
    }
}

/// Whether both are the same text, or errors of the same kind (and, if raised, words).
fn agree(ours: &Value, python: &Value) -> bool {
    ours["text"] == python["text"]
        && ours["error"] == python["error"]
        && ours["message"] == python["message"]
}

fn input_of(chat: &Value) -> RenderInput {
    RenderInput {
        messages: chat["messages"].as_array().unwrap().clone(),
        tools: chat["tools"].as_array().cloned(),
        add_generation_prompt: chat["generate"].as_bool().unwrap_or(true),
        enable_thinking: chat["enable_thinking"].as_bool(),
        kwargs: chat["kwargs"].as_object().cloned().unwrap_or_default(),
    }
}

fn chats_agree(name: &str, source: &str) {
    let template = at_the_fixtures_time(source);
    let chats = FIXTURES["chats"].as_array().unwrap();
    assert!(chats.len() >= 120);
    let mut wrong = Vec::new();
    for (index, chat) in chats.iter().enumerate() {
        let ours = outcome(&template, &input_of(chat));
        if !agree(&ours, &chat[name]) {
            wrong.push(format!("{index}\n  ours   {ours}\n  python {}", chat[name]));
        }
    }
    assert!(wrong.is_empty(), "{} differ\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn the_demo_template_renders_as_python_renders_it() {
    chats_agree("demo", &demo_file("chat_template.jinja"));
}

#[test]
fn every_construct_renders_as_python_renders_it() {
    chats_agree("constructs", &fixture("constructs.jinja"));
}

#[test]
fn snippets_render_as_python_renders_them() {
    let mut variables: Map<String, Value> = FIXTURES["variables"].as_object().unwrap().clone();
    let messages = variables.remove("messages").unwrap().as_array().unwrap().clone();
    let input = RenderInput { messages, kwargs: variables, ..RenderInput::default() };
    // The differences that the documentation of `ChatTemplate` names; they must not vanish unseen.
    let known = fixture("known-differences.txt");
    let known: Vec<&str> = known.lines().collect();
    let (mut wrong, mut differing) = (Vec::new(), 0);
    for pair in FIXTURES["snippets"].as_array().unwrap() {
        let (source, python) = (pair[0].as_str().unwrap(), &pair[1]);
        let ours = outcome(&at_the_fixtures_time(source), &input);
        let expected = !known.contains(&source);
        differing += usize::from(!expected);
        if agree(&ours, python) != expected {
            wrong.push(format!("{source:?}\n  ours   {ours}\n  python {python}"));
        }
    }
    assert!(wrong.is_empty(), "{} are wrong\n{}", wrong.len(), wrong.join("\n"));
    assert_eq!(differing, known.len());
}
