//! What all requests share, and the routes.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use lily_scheduler::{Generator, Health, ThinkingBudget};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::answer::{Answer, Reading};
use crate::body::read;
use crate::chat::chat;
use crate::completions::completions;
use crate::error::{ApiError, json_response};
use crate::guard::guard;
use crate::metrics::Metrics;
use crate::model::ServedModel;
use crate::options::Options;
use crate::run::Run;
use crate::sampling::Sampling;

/// Prompts that are read at once; more wait their turn. Each may take as much memory as a body.
const PREPARING: usize = 4;
/// A device that shows no life for so long is unwell.
const HEARTBEAT_LIMIT: std::time::Duration = std::time::Duration::from_secs(120);

/// What all requests share.
pub struct App {
    pub model: Arc<ServedModel>,
    pub generator: Arc<dyn Generator>,
    pub metrics: Arc<Metrics>,
    pub options: Options,
    preparing: Semaphore,
    stop_ids: Arc<[u32]>,
}

/// What a surface asks for.
pub struct Job {
    pub prompt: Arc<[u32]>,
    /// The field of the request that holds the prompt.
    pub prompt_field: &'static str,
    pub boundaries: Vec<usize>,
    pub query: Arc<str>,
    pub budget: Option<ThinkingBudget>,
    pub logprobs: Option<u32>,
    pub sampling: Sampling,
}

impl App {
    pub fn new(model: ServedModel, generator: Arc<dyn Generator>, options: Options) -> Self {
        Self {
            stop_ids: model.defaults.stop_ids.clone().into(),
            model: Arc::new(model),
            generator,
            metrics: Arc::default(),
            options,
            preparing: Semaphore::new(PREPARING),
        }
    }

    /// Tokens of prompt and answer together.
    pub fn context(&self) -> usize {
        self.generator.status().limits.context
    }

    /// Does work that takes a while (parsing, templates, tokens) where it delays no stream.
    pub async fn prepare<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let _permit = self.preparing.acquire().await;
        let lost =
            |_| ApiError::server("reading the request failed; this is a fault of the server");
        tokio::task::spawn_blocking(work).await.map_err(lost)?
    }

    /// Submits a job.
    pub fn submit(&self, job: Job, reading: &Reading) -> Result<Run, ApiError> {
        let Sampling { params, logit_bias, max_tokens, stops, n } = job.sampling;
        let limits = self.generator.status().limits;
        let most = limits.parallel + limits.queue;
        if n as usize > most {
            let message = format!("n is {n}, but this server takes at most {most} answers at once");
            return Err(ApiError::field("n", message));
        }
        let answer =
            |_| Answer::new(&self.model.tokenizer, reading, &stops, Arc::clone(&self.stop_ids));
        let answers = (0..n).map(answer).collect();
        let request = lily_scheduler::Request {
            prompt: job.prompt,
            sample: params,
            max_tokens: max_tokens.unwrap_or(limits.context),
            stop_ids: self.stop_ids.to_vec(),
            logit_bias,
            logprobs: job.logprobs,
            boundaries: job.boundaries,
            thinking: job.budget,
            query: job.query,
        };
        Run::submit(&*self.generator, &self.metrics, request, answers)
            .map_err(|error| ApiError::submit(&error, job.prompt_field))
    }

    fn entry(&self) -> Value {
        let context = self.context();
        json!({
            "id": self.model.id,
            "object": "model",
            "created": self.model.created,
            "owned_by": "lily",
            "context_length": context,
            "max_model_len": context,
            "meta": {"n_ctx": context},
        })
    }
}

type Shared = State<Arc<App>>;

/// Every route with its methods; docs/openapi.json describes the same.
pub const ROUTES: [(&str, &str); 6] = [
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
];

fn handler(method: &str, path: &str) -> Option<MethodRouter<Arc<App>>> {
    Some(match (method, path) {
        ("GET", "/health") => get(health),
        ("GET", "/metrics") => get(metrics),
        ("GET", "/v1/models") => get(models),
        ("GET", "/v1/models/{model}") => get(one_model),
        ("POST", "/v1/chat/completions") => post(post_chat),
        ("POST", "/v1/completions") => post(post_completions),
        _ => return None,
    })
}

/// The routes, behind the guard.
pub fn router(app: &Arc<App>) -> Router {
    let mut router = Router::new();
    for (method, path) in ROUTES {
        // A model's name may have slashes.
        let pattern = path.replace("{model}", "{*model}");
        if let Some(handler) = handler(method, path) {
            router = router.route(&pattern, handler);
        }
    }
    router
        .fallback(|request: Request| async move {
            let path: String = request.uri().path().chars().take(100).collect();
            ApiError::not_found(format!(
                "there is no {path} here; see docs/api.md for what there is"
            ))
        })
        .method_not_allowed_fallback(|request: Request| async move {
            let message = format!("{} is not a method of this path", request.method());
            ApiError::refused(StatusCode::METHOD_NOT_ALLOWED, message)
        })
        .layer(from_fn_with_state(Arc::clone(app), guard))
        .with_state(Arc::clone(app))
}

async fn health(State(app): Shared) -> Response {
    let status = app.generator.status();
    let problem = match status.health {
        Health::Unwell(why) => Some(why),
        Health::Well if status.heartbeat > HEARTBEAT_LIMIT => {
            Some(format!("the device shows no life since {} s", status.heartbeat.as_secs()))
        }
        Health::Well => None,
    };
    let Some(problem) = problem else {
        let figures = json!({"status": "ok", "running": status.running, "waiting": status.waiting});
        return json_response(StatusCode::OK, &figures);
    };
    let mut body = ApiError::server(problem).code("unhealthy").body();
    body["status"] = "unwell".into();
    json_response(StatusCode::SERVICE_UNAVAILABLE, &body)
}

async fn metrics(State(app): Shared) -> Response {
    const TEXT: HeaderValue = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(CONTENT_TYPE, TEXT)], app.metrics.text(&app.generator.status())).into_response()
}

async fn models(State(app): Shared) -> Response {
    json_response(StatusCode::OK, &json!({"object": "list", "data": [app.entry()]}))
}

async fn one_model(State(app): Shared, request: Request) -> Response {
    let name = request.uri().path().strip_prefix("/v1/models/").unwrap_or_default();
    let name = percent_decoded(name);
    match app.model.is_called(&name) {
        true => json_response(StatusCode::OK, &app.entry()),
        false => ApiError::model(&name, &app.model.id).into_response(),
    }
}

/// The name in a path; what is no percent code stays.
fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let hex = |at: usize| tail.get(at).and_then(|b| char::from(*b).to_digit(16));
        match (first, hex(0), hex(1)) {
            (b'%', Some(high), Some(low)) => {
                bytes.push((high * 16 + low) as u8);
                rest = &tail[2..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

async fn post_chat(State(app): Shared, request: Request<Body>) -> Response {
    let answer = async {
        let body = read(request, &app.options).await?;
        chat(&app, body).await
    };
    refusable(&app, answer.await)
}

async fn post_completions(State(app): Shared, request: Request<Body>) -> Response {
    let answer = async {
        let body = read(request, &app.options).await?;
        completions(&app, body).await
    };
    refusable(&app, answer.await)
}

fn refusable(app: &App, answer: Result<Response, ApiError>) -> Response {
    answer.unwrap_or_else(|error| {
        app.metrics.refused.add(1);
        error.into_response()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_has_a_handler() {
        for (method, path) in ROUTES {
            assert!(handler(method, path).is_some(), "{method} {path}");
        }
    }

    #[test]
    fn names_in_paths() {
        let table = [
            ("a%2Fb", "a/b"),
            ("a%2", "a%2"),
            ("%zz%", "%zz%"),
            ("%C3%A9", "é"),
            ("%FF", "\u{fffd}"),
        ];
        for (path, name) in table {
            assert_eq!(percent_decoded(path), name);
        }
    }
}
