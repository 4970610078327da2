//! A script in place of a device: exact answers, for client developers and tests.
//!
//! A replay file is JSON Lines. `{"match": "weather", "text": "Sunny."}`: the first line whose `match` is part of
//! the last user's message (everything, if it is empty) gives the raw output of the model. Optional keys:
//! `token_ms` waits before each token, `prefill_ms` before the first one, `fail_after` N makes the device fail
//! after N tokens, `split: "char"` makes each character of the text a token of its own.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lily_chat::Tokenizer;
use lily_scheduler::{
    Event, EventSender, EventStream, Failure, Finish, Generator, Health, Limits, Logprob, Request,
    Status, SubmitError, Token, events,
};
use serde_json::Value;

/// While something runs, the script looks for clients that went away at least this often.
const TICK: Duration = Duration::from_millis(10);

/// What is wrong with a replay file.
#[derive(Debug, thiserror::Error)]
#[error("line {line}: {problem}; a line is {{\"match\": \"…\", \"text\": \"…\"}}")]
pub struct ReplayError {
    /// The line, from 1.
    pub line: usize,
    /// What is wrong there.
    pub problem: String,
}

/// One line of a script.
#[derive(Debug)]
struct Line {
    matches: String,
    tokens: Arc<[u32]>,
    token_time: Duration,
    prefill_time: Duration,
    fail_after: Option<usize>,
}

/// A script.
#[derive(Debug)]
pub struct Script(Vec<Line>);

impl Script {
    /// Reads a replay file. `end` is the token that ends a turn.
    ///
    /// # Errors
    /// A line that is not of the form described above.
    pub fn parse(text: &str, tokenizer: &Tokenizer, end: u32) -> Result<Self, ReplayError> {
        let numbered = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let parse = |(index, line)| {
            Line::parse(line, tokenizer, end)
                .map_err(|problem| ReplayError { line: index + 1, problem })
        };
        numbered.map(parse).collect::<Result<_, _>>().map(Self)
    }

    fn find(&self, query: &str) -> Option<&Line> {
        self.0.iter().find(|line| query.contains(&line.matches))
    }
}

impl Line {
    fn parse(line: &str, tokenizer: &Tokenizer, end: u32) -> Result<Self, String> {
        let line: Value = serde_json::from_str(line).map_err(|error| error.to_string())?;
        let text = |key: &str| {
            line[key].as_str().map(str::to_owned).ok_or_else(|| format!("{key} is not a string"))
        };
        let number = |key: &str| match &line[key] {
            Value::Null => Ok(None),
            value => value
                .as_u64()
                .map(Some)
                .ok_or_else(|| format!("{key} is not a whole number from 0")),
        };
        let time = |key: &str| Ok::<_, String>(Duration::from_millis(number(key)?.unwrap_or(0)));
        let by_character = match line["split"].as_str() {
            None if line["split"].is_null() => false,
            Some("char") => true,
            _ => return Err("split is not \"char\"".into()),
        };
        let encode =
            |text: &str| tokenizer.encode_rendered(text).map_err(|error| error.to_string());
        let mut tokens = encode(&text("text")?)?;
        if by_character {
            tokens = characters(&tokens, tokenizer)?;
        }
        tokens.push(end);
        Ok(Self {
            matches: text("match")?,
            tokens: tokens.into(),
            token_time: time("token_ms")?,
            prefill_time: time("prefill_ms")?,
            fail_after: number("fail_after")?.map(|n| n as usize),
        })
    }
}

/// The same text with a token, or a few, for each character between control tokens.
fn characters(tokens: &[u32], tokenizer: &Tokenizer) -> Result<Vec<u32>, String> {
    let mut split = Vec::new();
    for run in tokens.chunk_by(|a, b| !tokenizer.is_control(*a) && !tokenizer.is_control(*b)) {
        if tokenizer.is_control(run[0]) {
            split.extend(run);
            continue;
        }
        for c in tokenizer.decode(run, false).chars() {
            let ids = tokenizer.encode(c.encode_utf8(&mut [0; 4]));
            split.extend(ids.map_err(|error| error.to_string())?);
        }
    }
    Ok(split)
}

/// An answer of the script that waits or runs.
#[derive(Debug)]
struct Answer {
    sender: EventSender,
    request: Request,
    tokens: Arc<[u32]>,
    token_time: Duration,
    prefill_time: Duration,
    fail_after: Option<usize>,
    told: usize,
    next: Instant,
}

impl Answer {
    fn new(line: &Line, request: Request, sender: EventSender) -> Self {
        Self {
            sender,
            request,
            tokens: Arc::clone(&line.tokens),
            token_time: line.token_time,
            prefill_time: line.prefill_time,
            fail_after: line.fail_after,
            told: 0,
            next: Instant::now(),
        }
    }

    fn start(&mut self) {
        let now = Instant::now();
        self.sender.send(Event::Started { cached: 0, at: now });
        self.next = now + self.prefill_time + self.token_time;
    }

    /// Tells the next token. `false`: the answer has ended.
    fn step(&mut self, context: usize, faults: &mut u64) -> bool {
        if self.fail_after.is_some_and(|n| self.told >= n) {
            *faults += 1;
            let failure = Failure::Device("the script says so".into());
            self.sender.send(Event::Failed(failure));
            return false;
        }
        let Some(&id) = self.tokens.get(self.told) else { return false };
        self.told += 1;
        let at = Instant::now();
        let logprob = self.request.logprobs.map(|top| certain(id, top));
        let mut goes_on = self.sender.send(Event::Token(Token { id, logprob, at, sampled: true }));
        let most = self.request.max_tokens.min(context.saturating_sub(self.request.prompt.len()));
        if self.request.stop_ids.contains(&id) || self.told == self.tokens.len() {
            self.sender.send(Event::Finished(Finish::Stop));
            goes_on = false;
        } else if self.told >= most {
            self.sender.send(Event::Finished(Finish::Length));
            goes_on = false;
        }
        self.next = at + self.token_time;
        goes_on
    }
}

/// The script leaves no choice: the token has probability one.
fn certain(id: u32, top: u32) -> Logprob {
    let others = (0..).filter(|other| *other != id).map(|other| (other, f32::NEG_INFINITY));
    let top = std::iter::once((id, 0.0)).chain(others).take(top as usize).collect();
    Logprob { chosen: 0.0, top }
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Answer>,
    running: Vec<Answer>,
    /// Running ones are told when they may go on at most.
    deadline: Option<Instant>,
    closing: bool,
    dropped: bool,
    steps: u64,
    faults: u64,
    prompt_tokens: u64,
}

impl State {
    fn forget_cancelled(&mut self) {
        self.waiting.retain(|answer| !answer.sender.is_cancelled());
        self.running.retain(|answer| !answer.sender.is_cancelled());
    }
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    limits: Limits,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Answers by a script, within the limits that a device would have.
#[derive(Debug)]
pub struct Replay {
    script: Script,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Replay {
    /// Starts the thread that tells the tokens.
    ///
    /// # Errors
    /// The system grants no thread.
    pub fn start(script: Script, limits: Limits) -> std::io::Result<Self> {
        let state = Mutex::new(State::default());
        let shared = Arc::new(Shared { state, changed: Condvar::new(), limits });
        let told = Arc::clone(&shared);
        let thread =
            std::thread::Builder::new().name("replay".into()).spawn(move || tell(&told))?;
        Ok(Self { script, shared, thread: Some(thread) })
    }
}

fn tell(shared: &Shared) {
    let mut state = shared.lock();
    loop {
        state.forget_cancelled();
        if state.dropped {
            return;
        }
        admit(&mut state, shared.limits);
        let now = Instant::now();
        if state.deadline.is_some_and(|deadline| now >= deadline) {
            let state = &mut *state;
            for answer in state.running.drain(..).chain(state.waiting.drain(..)) {
                answer.sender.send(Event::Failed(Failure::ShuttingDown));
            }
        }
        if state.running.is_empty() && state.waiting.is_empty() {
            state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        }
        let due = state.running.iter().map(|answer| answer.next).min().unwrap_or(now + TICK);
        if due > now {
            let time = (due - now).min(TICK);
            let waited = shared.changed.wait_timeout(state, time);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            continue;
        }
        step(&mut state, shared.limits.context, now);
    }
}

fn admit(state: &mut State, limits: Limits) {
    while state.running.len() < limits.parallel {
        let Some(mut answer) = state.waiting.pop_front() else { return };
        answer.start();
        state.prompt_tokens += answer.request.prompt.len() as u64;
        state.running.push(answer);
    }
}

/// One token for each answer whose time has come.
fn step(state: &mut State, context: usize, now: Instant) {
    let State { running, faults, steps, .. } = state;
    *steps += 1;
    running.retain_mut(|answer| answer.next > now || answer.step(context, faults));
}

impl Generator for Replay {
    fn submit(&self, request: Request) -> Result<EventStream, SubmitError> {
        let Limits { context, parallel, queue } = self.shared.limits;
        let prompt = request.prompt.len();
        if prompt >= context {
            return Err(SubmitError::ContextLength { limit: context, prompt });
        }
        let line = self.script.find(&request.query).ok_or_else(|| {
            let message = "no line of the replay file matches the last user's message; end the file with a line \
                           whose match is empty";
            SubmitError::Invalid(message.into())
        })?;
        let mut state = self.shared.lock();
        if state.closing {
            return Err(SubmitError::ShuttingDown);
        }
        state.forget_cancelled();
        if state.running.len() + state.waiting.len() >= parallel + queue {
            return Err(SubmitError::Busy { retry_after: Duration::from_secs(1) });
        }
        let (sender, stream) = events();
        state.waiting.push_back(Answer::new(line, request, sender));
        drop(state);
        self.shared.changed.notify_all();
        Ok(stream)
    }

    fn status(&self) -> Status {
        let mut state = self.shared.lock();
        state.forget_cancelled();
        Status {
            health: Health::Well,
            heartbeat: Duration::ZERO,
            running: state.running.len(),
            waiting: state.waiting.len(),
            limits: self.shared.limits,
            memory: Vec::new(),
            prompt_tokens_computed: state.prompt_tokens,
            prompt_tokens_cached: 0,
            steps: state.steps,
            preemptions: 0,
            prefixes: 0,
            prefixes_skipped: 0,
            faults: state.faults,
        }
    }

    fn shutdown(&self, grace: Duration) {
        let mut state = self.shared.lock();
        state.closing = true;
        state.deadline = Some(Instant::now() + grace);
        drop(state);
        self.shared.changed.notify_all();
    }
}

impl Drop for Replay {
    fn drop(&mut self) {
        self.shared.lock().dropped = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
