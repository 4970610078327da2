//! Messages of a request: checked strictly, brought into the form that templates take.

use serde_json::{Map, Value};

use crate::error::ApiError;

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// Messages for a template.
#[derive(Debug)]
pub struct Messages {
    /// Contents are strings; leading system messages are one.
    pub list: Vec<Value>,
    /// The text of the last user's message; empty if there is none.
    pub query: String,
}

/// Reads `messages`.
pub fn messages(value: Option<&Value>) -> Result<Messages, ApiError> {
    let list = value.and_then(Value::as_array).ok_or_else(|| {
        ApiError::field("messages", "messages must be an array of messages, and is needed")
    })?;
    if list.is_empty() {
        return Err(ApiError::field("messages", "messages is empty; send at least one message"));
    }
    let mut read: Vec<Value> = Vec::with_capacity(list.len());
    let mut query = String::new();
    let mut system = Vec::new();
    let mut leading = true;
    for (index, value) in list.iter().enumerate() {
        let message = message(value, &format!("messages[{index}]"))?;
        let text = message["content"].as_str().unwrap_or_default();
        match message["role"].as_str() {
            Some("system") if leading => {
                system.push(text.trim().to_owned());
                continue;
            }
            Some("user") => text.clone_into(&mut query),
            _ => {}
        }
        leading = false;
        read.push(message);
    }
    if !system.is_empty() {
        system.retain(|text| !text.is_empty());
        read.insert(0, serde_json::json!({"role": "system", "content": system.join("\n\n")}));
    }
    Ok(Messages { list: read, query })
}

fn message(value: &Value, path: &str) -> Result<Value, ApiError> {
    let Some(fields) = value.as_object() else {
        return Err(ApiError::field(
            path,
            format!("{path} is not an object with role and content"),
        ));
    };
    let role = fields.get("role").and_then(Value::as_str).filter(|role| ROLES.contains(role));
    let Some(role) = role else {
        let param = format!("{path}.role");
        let message = format!("{param} must be one of {}", ROLES.join(", "));
        return Err(ApiError::field(param, message));
    };
    let mut fields = fields.clone();
    let content = content(fields.get("content").unwrap_or(&Value::Null), role, path)?;
    fields.insert("content".into(), content.into());
    if role == "developer" {
        fields.insert("role".into(), "system".into());
    }
    if role == "assistant" {
        reasoning(&mut fields, path)?;
        tool_calls(&mut fields, path)?;
    }
    Ok(Value::Object(fields))
}

fn content(content: &Value, role: &str, path: &str) -> Result<String, ApiError> {
    let path = format!("{path}.content");
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Null if matches!(role, "assistant" | "tool") => Ok(String::new()),
        Value::Array(parts) => {
            parts.iter().enumerate().map(|(at, part)| part_text(part, &path, at)).collect()
        }
        _ => {
            let message = format!("{path} must be a string or an array of text parts");
            Err(ApiError::field(path, message))
        }
    }
}

fn part_text<'p>(part: &'p Value, path: &str, at: usize) -> Result<&'p str, ApiError> {
    let path = format!("{path}[{at}]");
    match (part["type"].as_str(), part["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(text),
        (Some("text"), None) => {
            let message = format!("{path}.text must be a string");
            Err(ApiError::field(format!("{path}.text"), message))
        }
        (kind, _) => {
            let kind: String = kind.unwrap_or("none").chars().take(40).collect();
            let message = format!(
                "{path} is a part of type {kind:?}, but this model takes text only; send parts \
                 {{\"type\": \"text\", \"text\": …}}"
            );
            Err(ApiError::field(path, message))
        }
    }
}

/// `reasoning` is another name of `reasoning_content`.
fn reasoning(fields: &mut Map<String, Value>, path: &str) -> Result<(), ApiError> {
    for name in ["reasoning_content", "reasoning"] {
        match fields.get(name) {
            None | Some(Value::String(_)) => {}
            Some(Value::Null) => {
                fields.shift_remove(name);
            }
            Some(_) => {
                let path = format!("{path}.{name}");
                return Err(ApiError::field(&path, format!("{path} must be a string")));
            }
        }
    }
    if let Some(reasoning) = fields.shift_remove("reasoning") {
        fields.entry("reasoning_content").or_insert(reasoning);
    }
    Ok(())
}

fn tool_calls(fields: &mut Map<String, Value>, path: &str) -> Result<(), ApiError> {
    let path = format!("{path}.tool_calls");
    match fields.get("tool_calls") {
        None => return Ok(()),
        Some(Value::Null) => {
            fields.shift_remove("tool_calls");
            return Ok(());
        }
        Some(Value::Array(calls)) => {
            for (at, call) in calls.iter().enumerate() {
                let function = &call["function"];
                let path = format!("{path}[{at}].function");
                if function["name"].as_str().is_none_or(str::is_empty) {
                    let message = format!("{path}.name must be the name of a function");
                    return Err(ApiError::field(format!("{path}.name"), message));
                }
                arguments(&function["arguments"], &format!("{path}.arguments"))?;
            }
        }
        Some(_) => {
            return Err(ApiError::field(&path, format!("{path} must be an array of calls")));
        }
    }
    Ok(())
}

/// Arguments in history: an object, a JSON string of one, or nothing.
fn arguments(value: &Value, path: &str) -> Result<(), ApiError> {
    let problem = match value {
        Value::Null | Value::Object(_) => return Ok(()),
        Value::String(text) if text.trim().is_empty() => return Ok(()),
        Value::String(text) => match serde_json::from_str::<Value>(text) {
            Ok(Value::Object(_)) => return Ok(()),
            Ok(_) => "it is the JSON of something else".to_owned(),
            Err(error) => format!("it is no JSON: {error}"),
        },
        _ => "it is neither".to_owned(),
    };
    let message = format!("{path} must be an object or a JSON string of an object, but {problem}");
    Err(ApiError::field(path, message))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(list: Value) -> Messages {
        messages(Some(&list)).unwrap()
    }

    #[test]
    fn leading_system_messages_become_one() {
        let read = read(json!([
            {"role": "system", "content": " a "}, {"role": "developer", "content": [{"type": "text", "text": "b"}]},
            {"role": "system", "content": " "}, {"role": "user", "content": "u"}, {"role": "system", "content": "late"},
        ]));
        let roles: Vec<_> = read.list.iter().map(|m| (&m["role"], &m["content"])).collect();
        let expected = json!([["system", "a\n\nb"], ["user", "u"], ["system", "late"]]);
        assert_eq!(json!(roles), expected);
        assert_eq!(read.query, "u");
    }

    #[test]
    fn a_blank_system_message_stays() {
        let read =
            read(json!([{"role": "system", "content": " "}, {"role": "user", "content": "u"}]));
        assert_eq!(read.list[0], json!({"role": "system", "content": ""}));
    }

    #[test]
    fn reasoning_has_two_names() {
        let read = read(json!([
            {"role": "assistant", "content": null, "reasoning": "r", "reasoning_content": null},
            {"role": "assistant", "reasoning": "r", "reasoning_content": "c"},
        ]));
        assert_eq!(read.list[0]["reasoning_content"], "r");
        assert_eq!(read.list[1]["reasoning_content"], "c");
        assert_eq!(read.query, "");
    }

    #[test]
    fn errors_name_the_place() {
        let call = |arguments: Value| json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]});
        for (bad, param) in [
            (json!({"role": "wizard", "content": "x"}), "messages[1].role"),
            (json!({"role": "user"}), "messages[1].content"),
            (json!({"role": "user", "content": [{"type": "image_url"}]}), "messages[1].content[0]"),
            (json!({"role": "tool", "content": 5}), "messages[1].content"),
            (call(json!("[]")), "messages[1].tool_calls[0].function.arguments"),
            (call(json!("{")), "messages[1].tool_calls[0].function.arguments"),
            (json!([]), "messages[1]"),
        ] {
            let list = json!([{"role": "user", "content": "x"}, bad]);
            let error = messages(Some(&list)).unwrap_err().body();
            assert_eq!(error["error"]["param"], param, "{bad}");
        }
    }
}
