//! Rules by which sloppy messages become ones that a template takes.
//!
//! [`ChatTemplate::render_tolerant`](crate::ChatTemplate::render_tolerant) applies them in two
//! steps and says which it used.
//!
//! **Always**, because no template gives these a meaning of their own:
//!
//! - [`Rule::Content`]: `content` that is null or missing becomes an empty text (an assistant's
//!   with tool calls too); a number or a truth value becomes its JSON; one part outside of a list
//!   is a list of one.
//! - [`Rule::Parts`]: parts of text (`text`, `input_text`, `output_text`, `refusal`, bare strings)
//!   are joined without anything between them. A part of another kind (image, audio, file) is an
//!   error: the model reads text only.
//! - [`Rule::Role`]: a role in capitals or with blanks around is lowered and trimmed; `developer`
//!   becomes `system` unless the template's source knows it; `function` becomes `tool`.
//! - [`Rule::Reasoning`]: `reasoning` becomes `reasoning_content` if that is missing.
//! - [`Rule::Calls`]: `tool_calls` that is null is dropped; an old `function_call` becomes one.
//! - [`Rule::Arguments`]: arguments that are not an object, nor a JSON string of one, are wrapped:
//!   `{"arguments": …}` with what was sent. Missing, null or blank ones are an empty object.
//!
//! **Only if the template refuses** (raises, or fails) — so a template that has a rule of its own
//! for these keeps it, and all renders as Python would render it:
//!
//! - [`Rule::LeadingSystem`]: system messages at the beginning become one, a blank line between.
//! - [`Rule::RepeatedSystem`]: a later system message with the text of the first is dropped.
//! - [`Rule::LateSystem`]: any other later system message stays in its place as a user's message
//!   that begins with `System message:`. What came before it renders as before, so a cached
//!   prefix stays valid.
//! - [`Rule::OrphanTool`]: a tool's message that answers no call stays in its place as a user's
//!   message that begins with `Tool result:`.
//! - [`Rule::NoUser`]: if no user's message is left (after a compaction), one that says `Continue.`
//!   is put behind the system message.
//!
//! [`Rule::OrphanTool`] is used only if the others are not enough. What then still fails is told
//! with the template's first refusal. No messages at all, a message that is no object, one without
//! a role, and a call without a name are errors.

use serde_json::{Map, Value, json};

use crate::ChatTemplate;
use crate::error::ChatError;
use crate::render_input::{RenderInput, parse_arguments};

/// Which rule changed a message; the module describes each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the module describes each rule once")]
pub enum Rule {
    Content,
    Parts,
    Role,
    Reasoning,
    Calls,
    Arguments,
    LeadingSystem,
    RepeatedSystem,
    LateSystem,
    OrphanTool,
    NoUser,
}

/// One use of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Repair {
    /// The rule.
    pub rule: Rule,
    /// Index of the message, among those that were sent.
    pub message: usize,
}

/// A prompt and what was changed for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Tolerant {
    /// The prompt, as [`ChatTemplate::render`](crate::ChatTemplate::render) gives it.
    pub text: String,
    /// Every use of a rule; empty if the messages were taken as they are.
    pub repairs: Vec<Repair>,
}

/// A message with its index among those that were sent.
type Numbered = (usize, Map<String, Value>);

pub(crate) fn render_tolerant(
    template: &ChatTemplate,
    input: &RenderInput,
    knows_developer: bool,
) -> Result<Tolerant, ChatError> {
    if input.messages.is_empty() {
        return Err(error("messages", "the list is empty", "send at least one message"));
    }
    let mut repairs = Vec::new();
    let mut messages = Vec::with_capacity(input.messages.len());
    for (index, message) in input.messages.iter().enumerate() {
        let mut used = Vec::new();
        messages.push((index, smooth(message, index, knows_developer, &mut used)?));
        repairs.extend(used.into_iter().map(|rule| Repair { rule, message: index }));
    }
    let with = |messages: &[Numbered]| RenderInput {
        messages: messages.iter().map(|(_, fields)| Value::Object(fields.clone())).collect(),
        ..input.clone()
    };
    let first = match template.render(&with(&messages)) {
        Ok(text) => return Ok(Tolerant { text, repairs }),
        Err(error @ (ChatError::Refused { .. } | ChatError::Render { .. })) => error,
        Err(other) => return Err(other),
    };
    // A template that refuses late system messages may well take a tool's message without a call.
    for orphans in [false, true] {
        let mut repairs = repairs.clone();
        let before = repairs.len();
        let messages = rearrange(&messages, orphans, &mut repairs);
        if repairs.len() > before {
            match template.render(&with(&messages)) {
                Ok(text) => return Ok(Tolerant { text, repairs }),
                Err(limit @ ChatError::Limit { .. }) => return Err(limit),
                Err(_) => {}
            }
        }
    }
    Err(first)
}

fn error(place: &str, problem: &str, hint: &'static str) -> ChatError {
    ChatError::Message { place: place.to_owned(), problem: problem.to_owned(), hint }
}

/// The rules that always apply, for one message.
fn smooth(
    message: &Value,
    index: usize,
    knows_developer: bool,
    used: &mut Vec<Rule>,
) -> Result<Map<String, Value>, ChatError> {
    let place = format!("messages[{index}]");
    let Some(fields) = message.as_object() else {
        return Err(error(&place, "it is not an object", "send {\"role\": …, \"content\": …}"));
    };
    let mut fields = fields.clone();
    let Some(role) = fields.get("role").and_then(Value::as_str) else {
        let hint = "give it the role system, user, assistant or tool";
        return Err(error(&place, "it has no role", hint));
    };
    let mut plain = role.trim().to_lowercase();
    plain = match plain.as_str() {
        "developer" if !knows_developer => "system".into(),
        "function" => "tool".into(),
        _ => plain,
    };
    if plain != role {
        used.push(Rule::Role);
        fields.insert("role".into(), plain.into());
    }
    let content = match fields.get("content").unwrap_or(&Value::Null) {
        Value::String(_) => None,
        Value::Null => Some((String::new(), Rule::Content)),
        Value::Array(parts) => Some((join_parts(parts, &place)?, Rule::Parts)),
        part @ Value::Object(_) => {
            Some((join_parts(std::slice::from_ref(part), &place)?, Rule::Content))
        }
        scalar => Some((scalar.to_string(), Rule::Content)),
    };
    if let Some((text, rule)) = content {
        used.push(rule);
        fields.insert("content".into(), text.into());
    }
    let reasons = fields.get("reasoning_content").is_some_and(|value| !value.is_null());
    if let Some(reasoning @ Value::String(_)) = fields.get("reasoning").cloned()
        && !reasons
    {
        used.push(Rule::Reasoning);
        fields.insert("reasoning_content".into(), reasoning);
    }
    calls(&mut fields, &place, used)?;
    Ok(fields)
}

fn join_parts(parts: &[Value], place: &str) -> Result<String, ChatError> {
    let mut text = String::new();
    for (index, part) in parts.iter().enumerate() {
        let words = match part["type"].as_str() {
            None if part.is_string() => part.as_str(),
            None | Some("text" | "input_text" | "output_text") => part["text"].as_str(),
            Some("refusal") => part["refusal"].as_str(),
            Some(_) => None,
        };
        let Some(words) = words else {
            let kind = part["type"].as_str().unwrap_or("unknown");
            return Err(ChatError::Message {
                place: format!("{place}.content[{index}]"),
                problem: format!("it is a part of type {kind:?} and not text"),
                hint: "this model reads text only: leave images, audio and files out",
            });
        };
        text.push_str(words);
    }
    Ok(text)
}

fn calls(
    fields: &mut Map<String, Value>,
    place: &str,
    used: &mut Vec<Rule>,
) -> Result<(), ChatError> {
    let old = fields.get("function_call").filter(|call| call.is_object()).cloned();
    match (fields.get("tool_calls"), old) {
        (None | Some(Value::Null), Some(call)) => {
            used.push(Rule::Calls);
            fields.shift_remove("function_call");
            fields.insert("tool_calls".into(), json!([{"type": "function", "function": call}]));
        }
        (Some(Value::Null), None) => {
            used.push(Rule::Calls);
            fields.shift_remove("tool_calls");
        }
        _ => {}
    }
    let calls = match fields.get_mut("tool_calls") {
        None => return Ok(()),
        Some(Value::Array(calls)) => calls,
        Some(_) => {
            return Err(error(place, "its tool_calls are not a list", "send a list of calls"));
        }
    };
    for (index, call) in calls.iter_mut().enumerate() {
        let function = match call.get("function") {
            Some(Value::Object(_)) => call.get_mut("function"),
            _ => Some(call),
        };
        let named = function.and_then(Value::as_object_mut).filter(|function| {
            function.get("name").and_then(Value::as_str).is_some_and(|name| !name.is_empty())
        });
        let Some(function) = named else {
            let place = format!("{place}.tool_calls[{index}]");
            return Err(error(&place, "it names no function", "give it a function with a name"));
        };
        let arguments = function.get("arguments").cloned().unwrap_or_default();
        if parse_arguments(arguments.clone()).is_err() {
            used.push(Rule::Arguments);
            function.insert("arguments".into(), json!({ "arguments": arguments }));
        }
    }
    Ok(())
}

fn role(message: &Numbered) -> &str {
    message.1.get("role").and_then(Value::as_str).unwrap_or_default()
}

fn text(message: &Numbered) -> &str {
    message.1.get("content").and_then(Value::as_str).unwrap_or_default()
}

/// The rules for messages that the template refuses in this order.
fn rearrange(messages: &[Numbered], orphans: bool, repairs: &mut Vec<Repair>) -> Vec<Numbered> {
    let leading = messages.iter().take_while(|message| role(message) == "system").count();
    let texts: Vec<&str> = messages[..leading].iter().map(text).filter(|t| !t.is_empty()).collect();
    let system = texts.join("\n\n");
    let mut kept: Vec<Numbered> = Vec::with_capacity(messages.len() + 1);
    let mut calls_open = false;
    for (at, mut message) in messages.iter().cloned().enumerate() {
        let as_user = |message: &mut Numbered, label: &str| {
            let words = format!("{label}\n{}", text(message));
            message.1 = Map::new();
            message.1.insert("role".into(), "user".into());
            message.1.insert("content".into(), words.into());
        };
        let rule = match role(&message) {
            "system" if at == 0 => {
                message.1.insert("content".into(), system.clone().into());
                kept.push(message);
                continue;
            }
            "system" if at < leading => {
                repairs.push(Repair { rule: Rule::LeadingSystem, message: message.0 });
                continue;
            }
            "system" if text(&message).trim() == system.trim() && leading > 0 => {
                repairs.push(Repair { rule: Rule::RepeatedSystem, message: message.0 });
                continue;
            }
            "system" => {
                as_user(&mut message, "System message:");
                Some(Rule::LateSystem)
            }
            "tool" if orphans && !calls_open => {
                as_user(&mut message, "Tool result:");
                Some(Rule::OrphanTool)
            }
            "assistant" => {
                calls_open = message.1.get("tool_calls").is_some_and(|calls| calls != &json!([]));
                None
            }
            "user" => {
                calls_open = false;
                None
            }
            _ => None,
        };
        repairs.extend(rule.map(|rule| Repair { rule, message: message.0 }));
        kept.push(message);
    }
    if !kept.iter().any(|message| role(message) == "user") {
        let at = usize::from(leading > 0);
        let mut fields = Map::new();
        fields.insert("role".into(), "user".into());
        fields.insert("content".into(), "Continue.".into());
        repairs.push(Repair { rule: Rule::NoUser, message: leading });
        kept.insert(at, (leading, fields));
    }
    kept
}
