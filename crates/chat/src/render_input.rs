//! What a template is given: messages checked, tool arguments parsed, content marked.

use minijinja::value::Value as TemplateValue;
use serde_json::{Map, Value};

use crate::bigint::{self, BigInt};
use crate::error::ChatError;
use crate::limits::MAX_DEPTH;
use crate::marks::{ControlSpellings, MARK, THINK_CLOSE};

/// Everything that a chat template renders a prompt from.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RenderInput {
    /// The messages in OpenAI's form: objects with `role`, `content` and, by role,
    /// `reasoning_content`, `tool_calls`, `tool_call_id`, `name`. The arguments of a tool call may
    /// be an object or a JSON string of one.
    pub messages: Vec<Value>,
    /// Tool definitions, as the request gives them. `None` and an empty list mean the same.
    pub tools: Option<Vec<Value>>,
    /// Whether to end the prompt where the assistant begins to speak.
    pub add_generation_prompt: bool,
    /// Whether the model is to think first; `None` leaves it to the template.
    pub enable_thinking: Option<bool>,
    /// More variables for the template (`preserve_thinking` and the like). The fields above win
    /// over variables of the same name.
    pub kwargs: Map<String, Value>,
}

/// How strings that are not under a `role` or `type` key are marked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Inside a message: keys are field names.
    Message,
    /// Inside arguments or tool definitions, where keys are content too.
    Data,
    /// Extra variables, which templates compare with fixed words.
    Words,
}

/// The variables of the template, everything in them marked.
pub(crate) fn variables(
    input: &RenderInput,
    control: &ControlSpellings,
    template_splits_thinking: bool,
) -> Result<Map<String, Value>, ChatError> {
    check_depth(input)?;
    let mut variables = Map::new();
    for (key, value) in &input.kwargs {
        variables.insert(key.clone(), mark(control, value, Place::Words));
    }
    let messages = input
        .messages
        .iter()
        .enumerate()
        .map(|(index, m)| message(m, index, control, template_splits_thinking))
        .collect::<Result<_, _>>()?;
    variables.insert("messages".into(), Value::Array(messages));
    // Templates of Hugging Face always see `tools`, none when there are none.
    let tools = input.tools.as_ref().filter(|tools| !tools.is_empty());
    let tools = tools.map(|tools| tools.iter().map(|t| mark(control, t, Place::Data)).collect());
    variables.insert("tools".into(), tools.map_or(Value::Null, Value::Array));
    variables.insert("add_generation_prompt".into(), input.add_generation_prompt.into());
    if let Some(thinking) = input.enable_thinking {
        variables.insert("enable_thinking".into(), thinking.into());
    }
    Ok(variables)
}

/// The variables for minijinja.
pub(crate) fn to_value(variables: &Map<String, Value>) -> TemplateValue {
    TemplateValue::from_pairs(variables.iter().map(|(k, v)| (k.as_str(), template_value(v))))
}

fn template_value(value: &Value) -> TemplateValue {
    match value {
        Value::Null => TemplateValue::from(()),
        Value::Bool(truth) => TemplateValue::from(*truth),
        Value::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
            (Some(whole), _, _) => TemplateValue::from(whole),
            (_, Some(whole), _) => TemplateValue::from(whole),
            (_, _, Some(float)) => TemplateValue::from(float),
            _ => TemplateValue::from(()),
        },
        Value::String(text) => match text.strip_prefix(BIG) {
            Some(digits) => match digits.parse::<i128>() {
                Ok(number) => TemplateValue::from(number),
                Err(_) => TemplateValue::from_object(BigInt(digits.to_owned())),
            },
            None => TemplateValue::from(text.as_str()),
        },
        Value::Array(items) => items.iter().map(template_value).collect::<Vec<_>>().into(),
        Value::Object(map) => {
            TemplateValue::from_pairs(map.iter().map(|(k, v)| (k.as_str(), template_value(v))))
        }
    }
}

/// Begins a big number among marked strings: marking never puts two marks at a start.
const BIG: &str = "\u{10FFF0}\u{10FFF0}";

/// Refuses what recursion could not survive. JSON parsers have the same limit; a program may not.
fn check_depth(input: &RenderInput) -> Result<(), ChatError> {
    let tools = input.tools.iter().flatten();
    let mut level: Vec<&Value> =
        input.messages.iter().chain(tools).chain(input.kwargs.values()).collect();
    for _ in 0..MAX_DEPTH {
        let mut next = Vec::new();
        for value in level {
            match value {
                Value::Array(items) => next.extend(items),
                Value::Object(map) => next.extend(map.values()),
                _ => {}
            }
        }
        if next.is_empty() {
            return Ok(());
        }
        level = next;
    }
    Err(ChatError::Limit { limit: crate::limits::DEPTH_LIMIT })
}

fn message(
    value: &Value,
    index: usize,
    control: &ControlSpellings,
    template_splits_thinking: bool,
) -> Result<Value, ChatError> {
    let error = |problem: &str, hint: &'static str| ChatError::Message {
        place: format!("messages[{index}]"),
        problem: problem.to_owned(),
        hint,
    };
    let Some(fields) = value.as_object() else {
        return Err(error("it is not an object", "send {\"role\": …, \"content\": …}"));
    };
    let Some(role) = value["role"].as_str() else {
        return Err(error("it has no role", "give it the role system, user, assistant or tool"));
    };
    let thinking =
        template_splits_thinking && role == "assistant" && !value["reasoning_content"].is_string();
    let mut marked = Map::new();
    for (key, field) in fields {
        let field = match key.as_str() {
            "content" if thinking => assistant_content(control, field),
            "tool_calls" => tool_calls(control, field, index)?,
            "role" => Value::String(control.mark_word(role)),
            _ => mark(control, field, Place::Message),
        };
        marked.insert(key.clone(), field);
    }
    Ok(Value::Object(marked))
}

/// Content that may hold thinking for the template to split off; see the rules in `marks`.
fn assistant_content(control: &ControlSpellings, content: &Value) -> Value {
    // The split runs over the joined parts, so the parts must be joined to be marked alike.
    let joined = match content {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => parts.iter().map(|part| part["text"].as_str()).collect(),
        _ => None,
    };
    match joined {
        Some(text) if text.contains(THINK_CLOSE) => {
            Value::String(control.mark_with_thinking(&text))
        }
        _ => mark(control, content, Place::Message),
    }
}

fn tool_calls(
    control: &ControlSpellings,
    calls: &Value,
    message: usize,
) -> Result<Value, ChatError> {
    let Some(calls) = calls.as_array() else {
        return Ok(mark(control, calls, Place::Message));
    };
    let mut marked = Vec::with_capacity(calls.len());
    for (index, call) in calls.iter().enumerate() {
        let mut call = call.clone();
        let function = match call.get_mut("function") {
            Some(function) => function,
            None => &mut call,
        };
        let (arguments, big) = match function.get_mut("arguments") {
            Some(arguments) => {
                parse_arguments(arguments.take()).map_err(|problem| ChatError::Message {
                    place: format!("messages[{message}].tool_calls[{index}]"),
                    problem,
                    hint: "send an object, or a JSON string of an object",
                })?
            }
            None => (Value::Object(Map::new()), None),
        };
        let mut arguments = mark(control, &arguments, Place::Data);
        if let Some(sign) = big {
            unquote(&mut arguments, sign);
        }
        let mut call = mark(control, &call, Place::Message);
        let function = match call.get_mut("function") {
            Some(function) => function,
            None => &mut call,
        };
        if let Some(function) = function.as_object_mut() {
            function.insert("arguments".into(), arguments);
        }
        marked.push(call);
    }
    Ok(Value::Array(marked))
}

/// Arguments as an object: clients send OpenAI's JSON string, or the object itself. With them, the
/// sign of big numbers in quotes.
pub(crate) fn parse_arguments(arguments: Value) -> Result<(Value, Option<char>), String> {
    let mut sign = None;
    let parsed = match arguments {
        Value::Null => Value::Object(Map::new()),
        Value::String(text) if text.trim().is_empty() => Value::Object(Map::new()),
        Value::String(text) => {
            let quoted = bigint::quote(&text);
            sign = quoted.as_ref().map(|(_, sign)| *sign);
            let text = quoted.map_or(text, |(text, _)| text);
            serde_json::from_str(&text)
                .map_err(|error| format!("its arguments are not valid JSON ({error})"))?
        }
        other => other,
    };
    if parsed.is_object() {
        Ok((parsed, sign))
    } else {
        Err(format!("its arguments are not an object but {parsed}"))
    }
}

/// Makes the numbers that [`bigint::quote`] put in quotes known to [`template_value`].
fn unquote(value: &mut Value, sign: char) {
    match value {
        Value::String(text) => {
            // Digits are never marked at their start, unless a control token is made of them.
            if let Some(digits) = text.trim_start_matches(MARK).strip_prefix(sign) {
                *text = format!("{BIG}{}", digits.replace(MARK, ""));
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| unquote(item, sign)),
        Value::Object(map) => map.values_mut().for_each(|item| unquote(item, sign)),
        _ => {}
    }
}

fn mark(control: &ControlSpellings, value: &Value, place: Place) -> Value {
    match value {
        Value::String(text) if place == Place::Words => Value::String(control.mark_word(text)),
        Value::String(text) => Value::String(control.mark(text)),
        Value::Array(items) => {
            Value::Array(items.iter().map(|item| mark(control, item, place)).collect())
        }
        Value::Object(map) => map
            .iter()
            .map(|(key, item)| {
                let item = match item {
                    Value::String(text) if key == "type" => Value::String(control.mark_word(text)),
                    other => mark(control, other, place),
                };
                let key = match place {
                    Place::Data => control.mark(key),
                    Place::Message | Place::Words => control.mark_word(key),
                };
                (key, item)
            })
            .collect(),
        other => other.clone(),
    }
}
