//! Errors as clients of OpenAI's API expect them.

use axum::http::header::{HeaderName, RETRY_AFTER};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use lily_scheduler::{Failure, SubmitError};
use serde_json::{Value, json};

/// An answer that is none.
#[derive(Debug, Clone)]
pub struct ApiError {
    status: StatusCode,
    kind: &'static str,
    param: Option<String>,
    code: Option<&'static str>,
    message: String,
    retry_after: Option<u64>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, param: None, code: None, message: message.into(), retry_after: None }
    }

    /// The request is at fault.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// A field of the request is at fault.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::invalid(message) }
    }

    /// There is nothing of this name.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
    }

    /// A refusal with a status of its own.
    pub fn refused(status: StatusCode, message: impl Into<String>) -> Self {
        Self::new(status, "invalid_request_error", message)
    }

    /// The server is at fault.
    pub fn server(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// A model that is not served.
    pub fn model(name: &str, served: &str) -> Self {
        let shown: String = name.chars().take(100).collect();
        let dots = if shown.len() < name.len() { "…" } else { "" };
        Self {
            code: Some("model_not_found"),
            param: Some("model".into()),
            ..Self::not_found(format!(
                "the model {shown:?}{dots} does not exist here; this server serves {served:?}"
            ))
        }
    }

    /// With a code for programs.
    #[must_use]
    pub fn code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// A request that a generator did not take; `prompt` is the field that holds the prompt.
    pub fn submit(error: &SubmitError, prompt: &str) -> Self {
        let message = error.to_string();
        match error {
            SubmitError::Busy { retry_after } => Self {
                retry_after: Some(retry_after.as_secs().max(1)),
                code: Some("server_busy"),
                ..Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
            },
            SubmitError::ContextLength { .. } => {
                Self::field(prompt, message).code("context_length_exceeded")
            }
            SubmitError::Invalid(_) => Self::invalid(message),
            SubmitError::ShuttingDown => Self {
                retry_after: Some(5),
                code: Some("shutting_down"),
                ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
            },
            SubmitError::Unhealthy(_) => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
                    .code("unhealthy")
            }
        }
    }

    /// A prompt that was not read to its end, because it is far beyond the context.
    pub fn too_long(prompt: &str, context: usize, tokens: usize) -> Self {
        let message = format!(
            "this model's maximum context length is {context} tokens, but the prompt has more than {tokens}; \
             shorten the prompt or start the server with a longer context"
        );
        Self::field(prompt, message).code("context_length_exceeded")
    }

    /// An answer that broke off.
    pub fn failure(failure: &Failure) -> Self {
        let message = failure.to_string();
        match failure {
            Failure::Device(_) => Self::server(message).code("device_fault"),
            Failure::ShuttingDown => Self {
                retry_after: Some(5),
                code: Some("shutting_down"),
                ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
            },
        }
    }

    /// The error object.
    pub fn body(&self) -> Value {
        json!({"error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
    }

    /// The message.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json_response(self.status, &self.body());
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// A JSON answer.
pub fn json_response(status: StatusCode, body: &Value) -> Response {
    const TYPE: (HeaderName, HeaderValue) =
        (axum::http::header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    (status, [TYPE], body.to_string()).into_response()
}
