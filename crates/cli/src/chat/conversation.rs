//! What was said.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::failure::Failure;
use crate::token_ids::read_text;

/// Names the format of saved conversations.
const FORMAT: &str = "lily-chat-1";
const LOAD_HINT: &str = "the file must be one that /save has written, or hold {\"messages\": [{\"role\": \
    \"user\", \"content\": \"…\"}, {\"role\": \"assistant\", \"content\": \"…\"}]}";

/// The messages of a conversation: a system message perhaps, then questions and answers in turn.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    system: Option<String>,
    messages: Vec<Value>,
}

impl Conversation {
    /// Forgets all but the system message.
    pub fn clear(&mut self) {
        self.messages.clear();
    }

    pub fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    /// Sets the system message; an empty one is none.
    pub fn set_system(&mut self, text: &str) {
        self.system = (!text.is_empty()).then(|| text.to_owned());
    }

    /// All messages, as templates take them.
    pub fn messages(&self) -> Vec<Value> {
        let system = self.system.iter().map(|s| json!({ "role": "system", "content": s }));
        system.chain(self.messages.iter().cloned()).collect()
    }

    /// The messages and one more question.
    pub fn messages_with(&self, question: &str) -> Vec<Value> {
        let mut messages = self.messages();
        messages.push(json!({ "role": "user", "content": question }));
        messages
    }

    /// Adds a question and its answer.
    pub fn push(&mut self, question: &str, thinking: &str, answer: &str) {
        self.messages.push(json!({ "role": "user", "content": question }));
        let mut message = json!({ "role": "assistant", "content": answer });
        if !thinking.is_empty() {
            message["reasoning_content"] = thinking.into();
        }
        self.messages.push(message);
    }

    /// Writes the conversation. A file that is something else is never overwritten.
    pub fn save(&self, path: &Path, model: &str) -> Result<(), Failure> {
        if path.exists() && Self::load(path).is_err() {
            return Err(Failure::new(
                format!("{} exists and is no saved conversation", path.display()),
                "choose another name",
            ));
        }
        let value = json!({ "format": FORMAT, "model": model, "messages": self.messages() });
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".part");
        let part = path.with_file_name(name);
        fs::write(&part, format!("{value:#}\n")).and_then(|()| fs::rename(&part, path)).map_err(
            |error| {
                let _ = fs::remove_file(&part);
                Failure::new(
                    format!("{} cannot be written: {error}", path.display()),
                    "check the folder and its permissions",
                )
            },
        )
    }

    /// Reads a saved conversation and checks all of it.
    pub fn load(path: &Path) -> Result<Self, Failure> {
        let text = read_text(path)?;
        let name = path.display();
        let bad = |what: String| Failure::new(format!("{name}: {what}"), LOAD_HINT);
        let value: Value =
            serde_json::from_str(&text).map_err(|error| bad(format!("not JSON: {error}")))?;
        if value.get("format").is_some_and(|format| format != FORMAT) {
            return Err(bad("it is of another format".into()));
        }
        let messages = if value.is_array() { &value } else { &value["messages"] };
        let messages = messages.as_array().ok_or_else(|| bad("it holds no messages".into()))?;
        Self::from_messages(messages).map_err(bad)
    }

    fn from_messages(messages: &[Value]) -> Result<Self, String> {
        let mut loaded = Self::default();
        for (index, message) in messages.iter().enumerate() {
            let bad = |what: &str| Err(format!("messages[{index}]: {what}"));
            let Some(content) = content(message) else {
                return bad("its content is not a text");
            };
            let content = content.as_str();
            let turn = if loaded.messages.len().is_multiple_of(2) { "user" } else { "assistant" };
            match message["role"].as_str() {
                Some("system") if index == 0 => loaded.set_system(content),
                Some(role) if role == turn => {}
                Some("system") => return bad("a system message is allowed at the beginning only"),
                Some("user" | "assistant") => {
                    return bad(&format!("it is the turn of the {turn}"));
                }
                _ => return bad("its role is neither system nor user nor assistant"),
            }
            if message["role"] == "system" {
                continue;
            }
            let mut kept = json!({ "role": turn, "content": content });
            match &message["reasoning_content"] {
                Value::Null => {}
                Value::String(text) => kept["reasoning_content"] = text.as_str().into(),
                _ => return bad("its reasoning_content is not a text"),
            }
            loaded.messages.push(kept);
        }
        match loaded.messages.len().is_multiple_of(2) {
            true => Ok(loaded),
            false => Err("the last question has no answer".into()),
        }
    }
}

/// The text of a message as other programs save it: a text, parts of text, or, of an assistant that only
/// thought, null.
fn content(message: &Value) -> Option<String> {
    match &message["content"] {
        Value::String(text) => Some(text.clone()),
        Value::Null if message["role"] == "assistant" => Some(String::new()),
        Value::Array(parts) => {
            parts.iter().map(|part| part.as_str().or_else(|| part["text"].as_str())).collect()
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_and_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("talk.json");
        let mut talk = Conversation::default();
        talk.save(&path, "m").unwrap();
        assert_eq!(Conversation::load(&path).unwrap(), talk);
        talk.set_system("Be \"brief\".");
        talk.push("a\n\u{1F600}", "hm", "b");
        talk.push("c", "", "d<|im_end|>");
        talk.save(&path, "m").unwrap();
        assert_eq!(Conversation::load(&path).unwrap(), talk);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        // OpenAI's bare list is as good.
        fs::write(&path, json!(talk.messages()).to_string()).unwrap();
        assert_eq!(Conversation::load(&path).unwrap(), talk);
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        fs::write(
            &path,
            json!([{"role": "user", "content": parts}, {"role": "assistant", "content": null}])
                .to_string(),
        )
        .unwrap();
        assert_eq!(Conversation::load(&path).unwrap().messages()[0]["content"], "ab");
        talk.clear();
        assert_eq!(talk.messages().len(), 1);
        let error = talk.save(&dir.path().join("no/such"), "m").unwrap_err().to_string();
        assert!(error.contains("cannot be written") && error.contains("hint: "), "{error}");
        fs::write(&path, "my thesis").unwrap();
        let error = talk.save(&path, "m").unwrap_err().to_string();
        assert!(error.contains("no saved conversation"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "my thesis");
    }

    #[test]
    fn what_is_no_conversation() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("talk.json");
        for (text, says) in [
            ("", "not JSON"),
            ("{}", "no messages"),
            (r#"{"messages":{}}"#, "no messages"),
            (r#"{"format":"lily-chat-9","messages":[]}"#, "another format"),
            ("[7]", "messages[0]: its content"),
            (r#"[{"role":"user","content":null}]"#, "messages[0]: its content"),
            (r#"[{"role":"user","content":[{"type":"image"}]}]"#, "messages[0]: its content"),
            (r#"[{"role":"tool","content":"x"}]"#, "messages[0]: its role"),
            (r#"[{"content":"x"}]"#, "messages[0]: its role"),
            (r#"[{"role":"assistant","content":"x"}]"#, "messages[0]: it is the turn of the user"),
            (r#"[{"role":"user","content":"x"}]"#, "the last question has no answer"),
            (
                r#"[{"role":"user","content":"x"},{"role":"user","content":"x"}]"#,
                "messages[1]: it is the turn of the assistant",
            ),
            (
                r#"[{"role":"user","content":"x"},{"role":"system","content":"x"}]"#,
                "messages[1]: a system message",
            ),
            (
                r#"[{"role":"user","content":"x"},{"role":"assistant","content":"x","reasoning_content":1}]"#,
                "messages[1]: its reasoning_content",
            ),
        ] {
            fs::write(&path, text).unwrap();
            let error = Conversation::load(&path).unwrap_err().to_string();
            assert!(error.contains(says) && error.contains("hint: "), "{text}: {error}");
        }
    }
}
