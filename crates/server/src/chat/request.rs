//! A chat request: its fields, its prompt.

use std::sync::Arc;

use lily_chat::{AnswerParser, ChatError, RenderInput, Tools};
use lily_scheduler::ThinkingBudget;
use serde_json::{Map, Value};

use super::messages::{Messages, messages};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::model::ServedModel;
use crate::sampling::{Sampling, streaming};

/// A chat request, checked, with its prompt.
#[derive(Debug)]
pub struct ChatRequest {
    /// The name under which it is answered.
    pub model: String,
    pub prompt: Arc<[u32]>,
    pub boundaries: Vec<usize>,
    pub query: Arc<str>,
    /// Whether the prompt leaves the think block open.
    pub thinking: bool,
    pub budget: Option<ThinkingBudget>,
    /// Functions that may be called.
    pub tools: Option<Arc<Tools>>,
    /// Whether the answer ends behind the first call.
    pub one_call: bool,
    pub sampling: Sampling,
    pub logprobs: Option<u32>,
    pub stream: bool,
    pub include_usage: bool,
}

/// Fields with an effect that this server cannot have.
const REFUSED: [(&str, &str); 4] = [
    ("functions", "use tools"),
    ("function_call", "use tool_choice"),
    ("audio", "this model makes text only"),
    ("web_search_options", "this server cannot search"),
];

impl ChatRequest {
    /// Reads a request and makes its prompt.
    pub fn read(body: &Value, model: &ServedModel, context: usize) -> Result<Self, ApiError> {
        let fields = Fields::root(body)?;
        let name = model.name(&fields)?;
        refuse(&fields)?;
        let sampling = Sampling::read(&fields, model)?;
        let (stream, include_usage) = streaming(&fields)?;
        let logprobs = logprobs(&fields)?;
        let (definitions, tools) = tools(&fields)?;
        let (enable_thinking, kwargs) = thinking(&fields)?;
        let parallel = fields.bool("parallel_tool_calls")?;
        let budget = fields.integer("thinking_budget", 0..=i64::from(i32::MAX))?;
        // Each message takes some tokens: that many need not be looked at.
        let count = fields.get("messages").and_then(Value::as_array).map_or(0, Vec::len);
        if count > context {
            return Err(ApiError::too_long("messages", context, context));
        }
        let Messages { list, query } = messages(fields.get("messages"))?;
        let input = RenderInput {
            messages: list,
            tools: definitions,
            add_generation_prompt: true,
            enable_thinking,
            kwargs,
        };
        let rendered = model.template.render_conversation(&input).map_err(unrenderable)?;
        let prompt = tokens(model, &rendered, context, "messages", unrenderable)?;
        let thinking = AnswerParser::is_opened_by(&rendered);
        Ok(Self {
            model: name,
            boundaries: boundaries(&prompt, model),
            prompt: prompt.into(),
            query: query.into(),
            thinking,
            budget: budget.filter(|_| thinking).and_then(|tokens| close(tokens, model)),
            tools,
            one_call: parallel == Some(false),
            sampling,
            logprobs,
            stream,
            include_usage,
        })
    }
}

/// The tokens of a prompt. How many a longer one has is told up to a few times the context; beyond that they are
/// not counted.
pub fn tokens(
    model: &ServedModel,
    text: &str,
    context: usize,
    field: &str,
    other: impl FnOnce(ChatError) -> ApiError,
) -> Result<Vec<u32>, ApiError> {
    let counted = context.saturating_mul(COUNTED).max(LEAST_COUNTED);
    model.tokenizer.encode_rendered_within(text, counted).map_err(|error| match error {
        ChatError::TooLong { .. } => ApiError::too_long(field, context, counted),
        error => other(error),
    })
}

/// Contexts, and tokens at least, up to which a prompt that is too long is counted.
const COUNTED: usize = 4;
const LEAST_COUNTED: usize = 32_768;

fn refuse(fields: &Fields<'_>) -> Result<(), ApiError> {
    for (name, instead) in REFUSED {
        if fields.get(name).is_some() {
            return Err(ApiError::field(name, format!("{name} is not supported; {instead}")));
        }
    }
    if let Some(modalities) = fields.array("modalities")?
        && modalities.iter().any(|kind| kind != "text")
    {
        let message = "modalities: this model makes text only; send [\"text\"] or leave it out";
        return Err(ApiError::field("modalities", message));
    }
    if let Some(format) = fields.object("response_format")?
        && format.string("type")? != Some("text")
    {
        let message = "response_format: this server makes text only so far; send {\"type\": \"text\"} or leave it out";
        return Err(ApiError::field("response_format", message));
    }
    Ok(())
}

fn logprobs(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    let wanted = fields.bool("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=20)?;
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0) as u32)),
        (false, None) => Ok(None),
        (false, Some(_)) => {
            let message = "top_logprobs needs logprobs: true beside it";
            Err(ApiError::field("top_logprobs", message))
        }
    }
}

/// What the template is told, and what may be called.
type Declared = (Option<Vec<Value>>, Option<Arc<Tools>>);

fn tools(fields: &Fields<'_>) -> Result<Declared, ApiError> {
    let definitions = fields.array("tools")?.filter(|list| !list.is_empty());
    let tools = match definitions {
        None => Tools::default(),
        Some(list) => {
            Tools::new(list).map_err(|error| ApiError::field("tools", error.to_string()))?
        }
    };
    let callable = choice(fields, &tools)?;
    let definitions = definitions.cloned();
    Ok((definitions, (callable && !tools.is_empty()).then(|| Arc::new(tools))))
}

/// Whether calls are looked for.
fn choice(fields: &Fields<'_>, tools: &Tools) -> Result<bool, ApiError> {
    const PARAM: &str = "tool_choice";
    let unsupported = |what: &str| {
        let message = format!("tool_choice: {what} is not supported; use \"auto\" or \"none\"");
        Err(ApiError::field(PARAM, message))
    };
    match fields.get("tool_choice") {
        None => Ok(true),
        Some(Value::String(word)) => match word.as_str() {
            "auto" => Ok(true),
            "none" => Ok(false),
            "required" if tools.is_empty() => {
                Err(ApiError::field(PARAM, "tool_choice is \"required\", but there are no tools"))
            }
            "required" => unsupported("\"required\""),
            _ => Err(fields.error(PARAM, "\"auto\", \"none\", \"required\" or a function")),
        },
        Some(named) => match named["function"]["name"].as_str() {
            Some(name) if named["type"] == "function" && tools.declares(name) => {
                unsupported("a named function")
            }
            Some(name) if named["type"] == "function" => {
                let name: String = name.chars().take(64).collect();
                let message = format!("tool_choice names {name:?}, which tools does not declare");
                Err(ApiError::field(PARAM, message))
            }
            _ => Err(fields.error(PARAM, "\"auto\", \"none\", \"required\" or a function")),
        },
    }
}

/// The more specific switch wins: template variables, the field, the effort.
fn thinking(fields: &Fields<'_>) -> Result<(Option<bool>, Map<String, Value>), ApiError> {
    let effort = match fields.string("reasoning_effort")? {
        None => None,
        Some("none") => Some(false),
        Some("minimal" | "low" | "medium" | "high") => Some(true),
        Some(_) => {
            let needed = "one of none, minimal, low, medium, high";
            return Err(fields.error("reasoning_effort", needed));
        }
    };
    let top = fields.bool("enable_thinking")?;
    let kwargs = fields.object("chat_template_kwargs")?;
    let specific = kwargs.as_ref().map(|k| k.bool("enable_thinking")).transpose()?.flatten();
    let mut variables = kwargs.map(|kwargs| kwargs.map().clone()).unwrap_or_default();
    variables.shift_remove("enable_thinking");
    if let Some(preserve) = fields.bool("preserve_thinking")? {
        variables.entry("preserve_thinking").or_insert(preserve.into());
    }
    Ok((specific.or(top).or(effort), variables))
}

/// Tokens that end the thoughts when the budget is spent.
fn close(tokens: i64, model: &ServedModel) -> Option<ThinkingBudget> {
    let end = model.tokenizer.id_of("</think>")?;
    let close = model.tokenizer.encode_rendered("\n</think>\n\n").ok()?;
    Some(ThinkingBudget { tokens: usize::try_from(tokens).ok()?, end, close })
}

fn unrenderable(error: ChatError) -> ApiError {
    match &error {
        ChatError::Message { place, .. } => ApiError::field(place.clone(), error.to_string()),
        _ => ApiError::field("messages", error.to_string()),
    }
}

/// Where later prompts are likely to depart from this one: behind system and tools, before the last user's
/// message, where the answer begins, at the end.
fn boundaries(prompt: &[u32], model: &ServedModel) -> Vec<usize> {
    let Some(start) = model.tokenizer.id_of("<|im_start|>") else { return vec![prompt.len()] };
    let starts: Vec<usize> = (0..prompt.len()).filter(|at| prompt[*at] == start).collect();
    let is = |at: &usize, role: &str| {
        let header = prompt.get(at + 1..).unwrap_or_default();
        model.tokenizer.decode(&header[..header.len().min(4)], false).starts_with(role)
    };
    let system = starts.first().filter(|at| is(at, "system")).and(starts.get(1));
    let user = starts.iter().rev().find(|at| is(at, "user"));
    let mut found: Vec<usize> =
        [system, user, starts.last()].into_iter().flatten().copied().collect();
    found.push(prompt.len());
    found.sort_unstable();
    found.dedup();
    found.retain(|at| *at > 0);
    found
}
