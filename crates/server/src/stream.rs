//! Server-sent events.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use crate::answer::{Delta, FinishReason};
use crate::error::ApiError;
use crate::run::{Happened, Run};

/// A stream is never silent for longer.
const KEEP_ALIVE: Duration = Duration::from_secs(3);
/// Events that are sent at once if they are there.
const BATCH: usize = 64;

/// How a surface spells its events.
pub trait Wire: Send + 'static {
    /// What is sent before the first token.
    fn begin(&mut self, run: &Run, out: &mut Events);
    /// The next pieces of a choice, and its end.
    fn deltas(
        &mut self,
        choice: usize,
        deltas: Vec<Delta>,
        ended: Option<FinishReason>,
        out: &mut Events,
    );
    /// What is sent behind the last choice.
    fn end(&mut self, run: &Run, out: &mut Events);
    /// What is sent where an answer breaks off.
    fn failed(&mut self, error: &ApiError, out: &mut Events);
}

/// Events to be sent.
#[derive(Debug, Default)]
pub struct Events(String);

impl Events {
    /// An event without a name.
    pub fn data(&mut self, value: &Value) {
        // JSON as serde writes it has no line ends.
        self.0.push_str("data: ");
        self.0.push_str(&value.to_string());
        self.0.push_str("\n\n");
    }

    /// The last event of OpenAI's streams.
    pub fn done(&mut self) {
        self.0.push_str("data: [DONE]\n\n");
    }

    fn comment(&mut self) {
        self.0.push_str(": keep-alive\n\n");
    }

    fn take(&mut self) -> Option<Bytes> {
        (!self.0.is_empty()).then(|| Bytes::from(std::mem::take(&mut self.0)))
    }
}

struct State<W> {
    run: Run,
    wire: W,
    events: Events,
    begun: bool,
    over: bool,
}

impl<W: Wire> State<W> {
    async fn next(&mut self) -> Option<Bytes> {
        if !self.begun {
            self.begun = true;
            self.wire.begin(&self.run, &mut self.events);
        }
        let silent = Instant::now() + KEEP_ALIVE;
        loop {
            if let Some(bytes) = self.events.take() {
                return Some(bytes);
            }
            if self.over {
                return None;
            }
            match timeout_at(silent, self.run.next()).await {
                Err(_) => self.events.comment(),
                Ok(happened) => {
                    self.take(happened);
                    for _ in 0..BATCH {
                        let Some(happened) = self.run.try_next() else { break };
                        self.take(happened);
                    }
                }
            }
        }
    }

    fn take(&mut self, happened: Happened) {
        match happened {
            Happened::Deltas { choice, deltas, ended } => {
                self.wire.deltas(choice, deltas, ended, &mut self.events);
            }
            Happened::Failed(failure) => {
                self.wire.failed(&ApiError::failure(&failure), &mut self.events);
                self.over = true;
            }
            Happened::Done => {
                self.wire.end(&self.run, &mut self.events);
                self.over = true;
            }
        }
    }
}

/// The response of a stream: headers at once, then events as they come. If the client goes away, the body is
/// dropped and the run with it.
pub fn respond<W: Wire>(run: Run, wire: W) -> Response {
    let state = State { run, wire, events: Events::default(), begun: false, over: false };
    let body = futures_util::stream::unfold(state, |mut state| async move {
        let bytes = state.next().await?;
        Some((Ok::<_, Infallible>(bytes), state))
    });
    const NO_BUFFER: HeaderName = HeaderName::from_static("x-accel-buffering");
    let headers = [
        (CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (CACHE_CONTROL, "no-cache"),
        (NO_BUFFER, "no"),
    ];
    (headers, Body::from_stream(body)).into_response()
}
