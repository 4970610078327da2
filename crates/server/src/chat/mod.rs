//! `/v1/chat/completions`.

mod messages;
mod request;
mod wire;

use std::sync::Arc;

use axum::http::StatusCode;
use axum::response::Response;
use bytes::Bytes;

use crate::answer::Reading;
use crate::app::{App, Job};
use crate::body::json;
use crate::error::{ApiError, json_response};
use crate::stream;
use request::ChatRequest;
pub use request::tokens;
pub use wire::unique;
use wire::{Choices, Head};

/// Answers a chat.
pub async fn chat(app: &App, body: Bytes) -> Result<Response, ApiError> {
    let model = Arc::clone(&app.model);
    let context = app.context();
    let request = app.prepare(move || ChatRequest::read(&json(&body)?, &model, context)).await?;
    let reading = Reading::Chat {
        thinking: request.thinking,
        tools: request.tools,
        one_call: request.one_call,
    };
    let head = Head::new(request.model);
    let job = Job {
        prompt: request.prompt,
        prompt_field: "messages",
        boundaries: request.boundaries,
        query: request.query,
        budget: request.budget,
        logprobs: request.logprobs,
        sampling: request.sampling,
    };
    let run = app.submit(job, &reading)?;
    let choices = Choices::new(head, &app.model, &run, request.thinking, request.logprobs);
    match request.stream {
        true => Ok(stream::respond(run, choices.streamed(request.include_usage))),
        false => Ok(json_response(StatusCode::OK, &choices.whole(run).await?)),
    }
}
