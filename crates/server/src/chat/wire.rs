//! Chat answers in OpenAI's form, whole and streamed.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use lily_chat::Tokenizer;
use serde_json::{Map, Value, json};

use crate::answer::{Delta, FinishReason, TokenInfo};
use crate::error::ApiError;
use crate::model::ServedModel;
use crate::run::{Happened, Run};
use crate::sampling::random;
use crate::stream::{Events, Wire};

/// What all chunks of an answer share.
#[derive(Debug, Clone)]
pub struct Head {
    id: String,
    created: u64,
    model: String,
}

impl Head {
    pub fn new(model: String) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Self { id: unique("chatcmpl-"), created, model }
    }
}

/// A name that no other has.
pub fn unique(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", random(), random())
}

/// The choices of an answer.
#[derive(Debug)]
pub struct Choices {
    head: Head,
    tokenizer: Arc<Tokenizer>,
    thinking: bool,
    logprobs: Option<u32>,
    count: usize,
}

impl Choices {
    pub fn new(
        head: Head,
        model: &ServedModel,
        run: &Run,
        thinking: bool,
        logprobs: Option<u32>,
    ) -> Self {
        let tokenizer = Arc::clone(&model.tokenizer);
        Self { head, tokenizer, thinking, logprobs, count: run.choices() }
    }

    /// The answer once it is complete.
    pub async fn whole(self, mut run: Run) -> Result<Value, ApiError> {
        let mut messages: Vec<Message> = (0..self.count).map(|_| Message::default()).collect();
        loop {
            match run.next().await {
                Happened::Done => break,
                Happened::Failed(failure) => return Err(ApiError::failure(&failure)),
                Happened::Deltas { choice, deltas, ended } => {
                    let message = &mut messages[choice];
                    deltas.into_iter().for_each(|delta| message.take(delta));
                    message.ended = message.ended.or(ended);
                }
            }
        }
        let choices: Vec<Value> = messages
            .into_iter()
            .enumerate()
            .map(|(index, message)| message.choice(index, &self))
            .collect();
        Ok(json!({
            "id": self.head.id,
            "object": "chat.completion",
            "created": self.head.created,
            "model": self.head.model,
            "choices": choices,
            "usage": run.usage(),
            "timings": run.timings(),
        }))
    }

    /// The answer as it comes.
    pub fn streamed(self, usage: bool) -> Streamed {
        Streamed { choices: self, usage }
    }

    fn logprobs(&self, tokens: &[TokenInfo]) -> Value {
        if self.logprobs.is_none() {
            return Value::Null;
        }
        let entry = |id: u32, logprob: f32| {
            let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
            // JSON has no infinity; this is what OpenAI sends for what cannot be.
            let logprob = if logprob.is_finite() { logprob } else { -9999.0 };
            json!({"token": String::from_utf8_lossy(bytes), "bytes": bytes, "logprob": logprob})
        };
        let tokens: Vec<Value> = tokens
            .iter()
            .map(|token| {
                let mut info = entry(token.id, token.logprob.chosen);
                let top = token.logprob.top.iter().map(|(id, logprob)| entry(*id, *logprob));
                info["top_logprobs"] = top.collect();
                info
            })
            .collect();
        json!({"content": tokens, "refusal": null})
    }
}

/// A message, put together from its pieces.
#[derive(Debug, Default)]
struct Message {
    reasoning: String,
    content: String,
    tokens: Vec<TokenInfo>,
    calls: Vec<(String, String)>,
    /// A call that is not complete.
    open: Option<(String, String)>,
    ended: Option<FinishReason>,
}

impl Message {
    fn take(&mut self, delta: Delta) {
        match delta {
            Delta::Reasoning(text) => self.reasoning.push_str(&text),
            Delta::Content { text, tokens } => {
                self.content.push_str(&text);
                self.tokens.extend(tokens);
            }
            Delta::CallBegin { name, .. } => self.open = Some((name, String::new())),
            Delta::CallArguments { text, .. } => {
                if let Some((_, arguments)) = &mut self.open {
                    arguments.push_str(&text);
                }
            }
            Delta::CallEnd => self.calls.extend(self.open.take()),
        }
    }

    fn choice(self, index: usize, choices: &Choices) -> Value {
        let mut message = Map::new();
        message.insert("role".into(), "assistant".into());
        let content = match self.content.is_empty() && !self.calls.is_empty() {
            true => Value::Null,
            false => self.content.into(),
        };
        message.insert("content".into(), content);
        if choices.thinking {
            message.insert("reasoning_content".into(), self.reasoning.into());
        }
        if !self.calls.is_empty() {
            let call = |(name, arguments)| json!({"id": unique("call_"), "type": "function", "function": {"name": name, "arguments": arguments}});
            message.insert("tool_calls".into(), self.calls.into_iter().map(call).collect());
        }
        json!({
            "index": index,
            "message": message,
            "logprobs": choices.logprobs(&self.tokens),
            "finish_reason": self.ended.map(FinishReason::name),
        })
    }
}

/// Chunks.
#[derive(Debug)]
pub struct Streamed {
    choices: Choices,
    usage: bool,
}

impl Streamed {
    fn chunk(&self, choices: Value) -> Value {
        let head = &self.choices.head;
        json!({
            "id": head.id,
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
            "choices": choices,
        })
    }

    fn delta(&self, index: usize, delta: Value, logprobs: Value, out: &mut Events) {
        out.data(&self.chunk(json!([
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": null}
        ])));
    }
}

impl Wire for Streamed {
    fn begin(&mut self, _: &Run, out: &mut Events) {
        for index in 0..self.choices.count {
            let delta = json!({"role": "assistant", "content": ""});
            self.delta(index, delta, Value::Null, out);
        }
    }

    fn deltas(
        &mut self,
        choice: usize,
        deltas: Vec<Delta>,
        ended: Option<FinishReason>,
        out: &mut Events,
    ) {
        for delta in deltas {
            let (delta, logprobs) = match delta {
                Delta::Reasoning(text) => (json!({"reasoning_content": text}), Value::Null),
                Delta::Content { text, tokens } => {
                    (json!({"content": text}), self.choices.logprobs(&tokens))
                }
                Delta::CallBegin { index, name } => {
                    let function = json!({"name": name, "arguments": ""});
                    let id = unique("call_");
                    let call =
                        json!({"index": index, "id": id, "type": "function", "function": function});
                    (json!({"tool_calls": [call]}), Value::Null)
                }
                Delta::CallArguments { index, text } => {
                    let call = json!({"index": index, "function": {"arguments": text}});
                    (json!({"tool_calls": [call]}), Value::Null)
                }
                Delta::CallEnd => continue,
            };
            self.delta(choice, delta, logprobs, out);
        }
        if let Some(reason) = ended {
            let last = json!([
                {"index": choice, "delta": {}, "logprobs": null, "finish_reason": reason.name()}
            ]);
            out.data(&self.chunk(last));
        }
    }

    fn end(&mut self, run: &Run, out: &mut Events) {
        if self.usage {
            let mut chunk = self.chunk(json!([]));
            chunk["usage"] = run.usage();
            chunk["timings"] = run.timings();
            out.data(&chunk);
        }
        out.done();
    }

    fn failed(&mut self, error: &ApiError, out: &mut Events) {
        out.data(&error.body());
    }
}
