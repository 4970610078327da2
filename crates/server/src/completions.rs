//! `/v1/completions`: raw text in, raw text out.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::StatusCode;
use axum::response::Response;
use bytes::Bytes;
use lily_chat::Tokenizer;
use serde_json::{Map, Value, json};

use crate::answer::{Delta, FinishReason, Reading, TokenInfo};
use crate::app::{App, Job};
use crate::body::json as parse;
use crate::chat::{tokens, unique};
use crate::error::{ApiError, json_response};
use crate::fields::Fields;
use crate::model::ServedModel;
use crate::run::{Happened, Run};
use crate::sampling::{Sampling, streaming};
use crate::stream::{self, Events, Wire};

/// A request, checked, with its prompt.
struct Completion {
    model: String,
    prompt: Arc<[u32]>,
    query: Arc<str>,
    sampling: Sampling,
    logprobs: Option<u32>,
    stream: bool,
    include_usage: bool,
}

/// Answers a completion.
pub async fn completions(app: &App, body: Bytes) -> Result<Response, ApiError> {
    let model = Arc::clone(&app.model);
    let context = app.context();
    let request = app.prepare(move || Completion::read(&parse(&body)?, &model, context)).await?;
    let wire = Completed::new(&request, &app.model.tokenizer);
    let job = Job {
        boundaries: vec![request.prompt.len()],
        prompt: request.prompt,
        prompt_field: "prompt",
        query: request.query,
        budget: None,
        logprobs: request.logprobs,
        sampling: request.sampling,
    };
    let run = app.submit(job, &Reading::Raw)?;
    match request.stream {
        true => Ok(stream::respond(run, wire)),
        false => Ok(json_response(StatusCode::OK, &wire.whole(run).await?)),
    }
}

impl Completion {
    fn read(body: &Value, model: &ServedModel, context: usize) -> Result<Self, ApiError> {
        let fields = Fields::root(body)?;
        let name = model.name(&fields)?;
        refuse(&fields)?;
        let sampling = Sampling::read(&fields, model)?;
        let (stream, include_usage) = streaming(&fields)?;
        let logprobs = fields.integer("logprobs", 0..=20)?;
        let text = prompt(&fields)?;
        let unreadable = |error: lily_chat::ChatError| ApiError::field("prompt", error.to_string());
        let prompt = tokens(model, text, context, "prompt", unreadable)?;
        Ok(Self {
            model: name,
            prompt: prompt.into(),
            query: text.into(),
            sampling,
            logprobs: logprobs.map(|n| n as u32),
            stream,
            include_usage,
        })
    }
}

/// One prompt: a string, or a list of one.
fn prompt<'a>(fields: &Fields<'a>) -> Result<&'a str, ApiError> {
    let needed = "a string that is not empty, or a list of one";
    let text = match fields.get("prompt") {
        Some(Value::String(text)) => Some(text),
        Some(Value::Array(list)) => match list.as_slice() {
            [Value::String(text)] => Some(text),
            _ => None,
        },
        _ => None,
    };
    match text {
        Some(text) if !text.is_empty() => Ok(text),
        _ => Err(fields.error("prompt", needed)),
    }
}

/// Fields with an effect that this server cannot have.
fn refuse(fields: &Fields<'_>) -> Result<(), ApiError> {
    if fields.bool("echo")? == Some(true) {
        return Err(ApiError::field("echo", "echo is not supported; the prompt is known to you"));
    }
    if fields.string("suffix")?.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ApiError::field("suffix", "suffix is not supported; put it into the prompt"));
    }
    if fields.integer("best_of", 1..=128)?.is_some_and(|n| n != 1) {
        return Err(ApiError::field("best_of", "best_of is not supported; use n and choose"));
    }
    Ok(())
}

/// Completions in OpenAI's form.
struct Completed {
    id: String,
    created: u64,
    model: String,
    tokenizer: Arc<Tokenizer>,
    logprobs: bool,
    usage: bool,
}

impl Completed {
    fn new(request: &Completion, tokenizer: &Arc<Tokenizer>) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Self {
            id: unique("cmpl-"),
            created,
            model: request.model.clone(),
            tokenizer: Arc::clone(tokenizer),
            logprobs: request.logprobs.is_some(),
            usage: request.include_usage,
        }
    }

    fn object(&self, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    fn choice(
        &self,
        index: usize,
        text: &str,
        tokens: &[TokenInfo],
        ended: Option<FinishReason>,
    ) -> Value {
        json!({
            "index": index,
            "text": text,
            "logprobs": self.logprobs(tokens),
            "finish_reason": ended.map(FinishReason::name),
        })
    }

    /// The old form: lists side by side.
    fn logprobs(&self, tokens: &[TokenInfo]) -> Value {
        if !self.logprobs {
            return Value::Null;
        }
        let finite = |x: f32| if x.is_finite() { x } else { -9999.0 };
        let text = |id: u32| {
            let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
            String::from_utf8_lossy(bytes).into_owned()
        };
        let top = |info: &TokenInfo| {
            let pairs = info.logprob.top.iter().map(|(id, x)| (text(*id), finite(*x).into()));
            pairs.collect::<Map<String, Value>>()
        };
        json!({
            "tokens": tokens.iter().map(|info| text(info.id)).collect::<Vec<_>>(),
            "token_logprobs": tokens.iter().map(|info| finite(info.logprob.chosen)).collect::<Vec<_>>(),
            "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
            "text_offset": tokens.iter().map(|info| info.at).collect::<Vec<_>>(),
        })
    }

    async fn whole(self, mut run: Run) -> Result<Value, ApiError> {
        let mut choices = vec![(String::new(), Vec::new(), None); run.choices()];
        loop {
            match run.next().await {
                Happened::Done => break,
                Happened::Failed(failure) => return Err(ApiError::failure(&failure)),
                Happened::Deltas { choice, deltas, ended } => {
                    let (text, tokens, end) = &mut choices[choice];
                    for (piece, infos) in deltas.into_iter().filter_map(content) {
                        text.push_str(&piece);
                        tokens.extend(infos);
                    }
                    *end = end.or(ended);
                }
            }
        }
        let choices = choices.iter().enumerate();
        let choices: Vec<Value> = choices
            .map(|(index, (text, tokens, ended))| self.choice(index, text, tokens, *ended))
            .collect();
        let mut answer = self.object(choices.into());
        answer["usage"] = run.usage();
        answer["timings"] = run.timings();
        Ok(answer)
    }
}

fn content(delta: Delta) -> Option<(String, Vec<TokenInfo>)> {
    match delta {
        Delta::Content { text, tokens } => Some((text, tokens)),
        _ => None,
    }
}

impl Wire for Completed {
    fn begin(&mut self, _: &Run, _: &mut Events) {}

    fn deltas(
        &mut self,
        choice: usize,
        deltas: Vec<Delta>,
        ended: Option<FinishReason>,
        out: &mut Events,
    ) {
        for (text, tokens) in deltas.into_iter().filter_map(content) {
            out.data(&self.object(json!([self.choice(choice, &text, &tokens, None)])));
        }
        if ended.is_some() {
            out.data(&self.object(json!([self.choice(choice, "", &[], ended)])));
        }
    }

    fn end(&mut self, run: &Run, out: &mut Events) {
        if self.usage {
            let mut chunk = self.object(json!([]));
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
