//! The boundary between a server and what makes tokens.
//!
//! A [`Generator`] takes [`Request`]s and answers each with an [`EventStream`]:
//!
//! ```text
//! Started ──► Token ──► Token ──► … ──► Finished | Failed
//! ```
//!
//! `Failed` may come at any time, in place of anything. After `Finished` or `Failed` the stream ends. A
//! stream that is dropped cancels its request, wherever it is: in the queue, in prefill, in decode.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lily_ops::sample::SampleParams;

use crate::channel::EventStream;

/// One answer to make. `n` choices of one prompt are `n` requests that share the prompt's allocation and
/// differ in [`SampleParams::choice`].
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt's tokens; at least one.
    pub prompt: Arc<[u32]>,
    /// How each token is chosen, the choice index included.
    pub sample: SampleParams,
    /// Most tokens of the answer, from 1. What the context leaves is another limit; see [`Finish::Length`].
    pub max_tokens: usize,
    /// Tokens that end the answer; they belong to it.
    pub stop_ids: Vec<u32>,
    /// Added to the logits of these tokens before anything else; at −100 a token does not occur.
    pub logit_bias: Vec<(u32, f32)>,
    /// Most likely tokens to be told with each token, besides the chosen one; `None`: no log-probabilities.
    pub logprobs: Option<u32>,
    /// Lengths of prefixes of the prompt whose state is worth keeping for later prompts, ascending.
    pub boundaries: Vec<usize>,
    /// A bound on thinking.
    pub thinking: Option<ThinkingBudget>,
    /// What was asked, for generators that answer by a script; a device does not look at it.
    pub query: Arc<str>,
}

/// If `end` is not among the first `tokens` tokens of an answer, the tokens of `close` follow them, as if they had
/// been sampled: they are told, they count, and sampling goes on behind them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThinkingBudget {
    /// Most tokens before `end`.
    pub tokens: usize,
    /// The token that ends the thinking.
    pub end: u32,
    /// What is put in place of sampled tokens; `end` is among them.
    pub close: Vec<u32>,
}

/// What happens to a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// It left the queue; its prompt is being computed.
    Started {
        /// Prompt tokens that need not be computed, because their state was kept.
        cached: usize,
        /// When.
        at: Instant,
    },
    /// The next token of the answer. One that ends the answer ([`Request::stop_ids`]) is told as well.
    Token(Token),
    /// The answer is complete.
    Finished(Finish),
    /// There is no (more) answer.
    Failed(Failure),
}

/// A token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Its log-probability and the most likely tokens', if the request asked for them.
    pub logprob: Option<Logprob>,
    /// When it was sampled.
    pub at: Instant,
    /// Whether it was sampled; else it follows by rule ([`ThinkingBudget`]), before it is computed.
    pub sampled: bool,
}

/// Log-probabilities (natural logarithm) at one position, before temperature and cuts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logprob {
    /// The chosen token's.
    pub chosen: f32,
    /// The most likely tokens and theirs, most likely first, as many as were asked for.
    pub top: Vec<(u32, f32)>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finish {
    /// A token of [`Request::stop_ids`]; it was told.
    Stop,
    /// [`Request::max_tokens`] was reached, or the context is full.
    Length,
}

/// Why there is no (more) answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The device failed; the next request may succeed.
    Device(String),
    /// The generator is being shut down and waited as long as it was told to.
    ShuttingDown,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(what) => write!(f, "the device failed: {what}; send the request again"),
            Self::ShuttingDown => {
                f.write_str("the server is shutting down; send the request again later")
            }
        }
    }
}

impl std::error::Error for Failure {}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SubmitError {
    /// As many requests run and wait as may.
    Busy {
        /// When to ask again.
        retry_after: Duration,
    },
    /// The prompt leaves no room for one token.
    ContextLength {
        /// Tokens of the context.
        limit: usize,
        /// Tokens of the prompt.
        prompt: usize,
    },
    /// The request cannot be served: the problem, and what to send instead.
    Invalid(String),
    /// No new requests are taken.
    ShuttingDown,
    /// The device is lost: why.
    Unhealthy(String),
}

impl fmt::Display for SubmitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Busy { retry_after } => {
                write!(f, "too many requests wait; try again in {} s", retry_after.as_secs().max(1))
            }
            Self::ContextLength { limit, prompt } => write!(
                f,
                "this model's maximum context length is {limit} tokens, but the prompt has {prompt}; \
                 shorten the prompt or start the server with a longer context"
            ),
            Self::Invalid(what) => f.write_str(what),
            Self::ShuttingDown => f.write_str("the server is shutting down; try again later"),
            Self::Unhealthy(why) => {
                write!(f, "the server cannot answer: {why}; restart it if this does not pass")
            }
        }
    }
}

impl std::error::Error for SubmitError {}

/// Makes tokens. Calls return at once and never wait for the device.
pub trait Generator: Send + Sync {
    /// Takes a request, or refuses it; waiting ones are served first in, first out.
    ///
    /// # Errors
    /// See [`SubmitError`]; a refused request leaves nothing behind.
    fn submit(&self, request: Request) -> Result<EventStream, SubmitError>;

    /// How it is doing.
    fn status(&self) -> Status;

    /// Takes no new requests from now on. Those that it has may go on for `grace`, then they fail with
    /// [`Failure::ShuttingDown`]. Returns at once; [`Status`] tells when nothing runs or waits any more.
    fn shutdown(&self, grace: Duration);
}

/// How a generator is doing.
#[derive(Clone, Debug, PartialEq)]
pub struct Status {
    /// Whether it can serve.
    pub health: Health,
    /// Time since the device's thread last showed life; zero while it has nothing to do.
    pub heartbeat: Duration,
    /// Requests that have left the queue and not ended.
    pub running: usize,
    /// Requests in the queue.
    pub waiting: usize,
    /// What it was set up for.
    pub limits: Limits,
    /// What it has taken and may take, by purpose.
    pub memory: Vec<MemoryUse>,
    /// Prompt tokens that were computed, since the start.
    pub prompt_tokens_computed: u64,
    /// Prompt tokens whose state was kept, since the start.
    pub prompt_tokens_cached: u64,
    /// Steps of the device, since the start.
    pub steps: u64,
    /// Requests that gave way to others and were taken up again, since the start.
    pub preemptions: u64,
    /// States of prefixes that are kept at present.
    pub prefixes: usize,
    /// Prefixes that were not kept for want of room, since the start: later prompts compute them again.
    pub prefixes_skipped: u64,
    /// Steps that failed, since the start.
    pub faults: u64,
}

/// Whether a generator can serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// It can.
    Well,
    /// It cannot: why.
    Unwell(String),
}

/// What a generator was set up for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of prompt and answer together.
    pub context: usize,
    /// Requests that run at once.
    pub parallel: usize,
    /// Requests that may wait.
    pub queue: usize,
}

/// Memory for one purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// What for: `weights`, `kv`, `state`, `scratch`, `prefix_cache`.
    pub purpose: &'static str,
    /// Bytes at present.
    pub bytes: u64,
}
