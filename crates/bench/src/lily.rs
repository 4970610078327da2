//! Lily as an engine of the protocol.

use std::ops::ControlFlow;
use std::sync::Arc;

use lily_device::{Measure, OperationTimes, Output};
use lily_engine::{
    Cancel, Engine as Inner, EngineError, GenerateParams, SampleParams, Session, SessionSnapshot,
};

use crate::cache::CacheReads;
use crate::clock::{Clock, timed};
use crate::engine::{Engine, Point, Trouble};
use crate::snapshots::{Moves, SnapshotTimes};

/// Token ids without meaning: the same for the same length, spread over the vocabulary.
pub fn prompt_ids(tokens: usize, vocab: usize) -> Vec<u32> {
    let word = |i: u64| {
        let mut z = (i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z ^ (z >> 31)
    };
    (0..tokens as u64).map(|i| (word(i) % vocab.max(1) as u64) as u32).collect()
}

/// Lily on some device.
pub struct LilyEngine {
    name: String,
    facts: Vec<(String, String)>,
    inner: Inner,
    session: Option<Session>,
    /// The state just before the last token of a context, so that no round has to fill it again.
    context: Option<(usize, SessionSnapshot)>,
    clock: Arc<dyn Clock>,
    cancel: Cancel,
}

impl LilyEngine {
    /// An engine with one slot. With [snapshot memory](lily_engine::EngineOptions::snapshot_bytes) for its longest
    /// context, contexts are filled once a point, else once a round; neither is timed.
    pub fn new(
        name: impl Into<String>,
        inner: Inner,
        clock: Arc<dyn Clock>,
        cancel: Cancel,
    ) -> Self {
        let (session, context) = (None, None);
        Self { name: name.into(), facts: Vec::new(), inner, session, context, clock, cancel }
    }

    /// Adds to what is told of it.
    pub fn with_facts(mut self, facts: Vec<(String, String)>) -> Self {
        self.facts = facts;
        self
    }

    /// Adds to what is told of it, once it is known.
    pub fn add_facts(&mut self, facts: impl IntoIterator<Item = (String, String)>) {
        self.facts.extend(facts);
    }

    /// The engine itself.
    pub fn inner(&self) -> &Inner {
        &self.inner
    }

    fn prompt(&self, tokens: usize) -> Vec<u32> {
        prompt_ids(tokens, self.inner.plan().vocab)
    }

    /// A session in an empty slot.
    fn empty_session(&mut self) -> Result<Session, EngineError> {
        if let Some(old) = self.session.take() {
            self.inner.close(old)?;
        }
        self.inner.open_session()
    }

    /// A session that has seen all of a prompt but its last token.
    fn filled_session(&mut self, prompt: &[u32]) -> Result<Session, EngineError> {
        let mut session = self.empty_session()?;
        let fill = &prompt[..prompt.len() - 1];
        if let Some((_, snapshot)) = self.context.as_ref().filter(|(n, _)| *n == prompt.len()) {
            self.inner.restore(&mut session, snapshot)?;
            return Ok(session);
        }
        // One context is kept at a time.
        self.context = None;
        if fill.is_empty() {
            return Ok(session);
        }
        self.inner.stage(&mut session, fill)?;
        let max_rows = self.inner.options().chunk;
        while let Some(work) = session.prefill_segment(max_rows, &Output::None) {
            if self.cancel.is_cancelled() {
                return Err(EngineError::Cancelled { done: 0, total: fill.len() });
            }
            self.inner.step(vec![work])?;
        }
        match self.inner.snapshot(&session) {
            Ok(snapshot) => self.context = Some((prompt.len(), snapshot)),
            Err(EngineError::SnapshotMemory { .. }) => {}
            Err(error) => return Err(error),
        }
        Ok(session)
    }

    fn timed_prefill(&mut self, tokens: usize) -> Result<f64, EngineError> {
        let prompt = self.prompt(tokens);
        let mut session = self.empty_session()?;
        let (clock, cancel) = (Arc::clone(&self.clock), self.cancel.clone());
        let (done, seconds) = timed(&*clock, || {
            self.inner.sync(&mut session, &prompt, &cancel, |_, _| ())?;
            let mut answer = self.inner.start(&mut session, params(1))?;
            answer.next(&mut self.inner, &mut session, &cancel)
        });
        self.session = Some(session);
        match done? {
            Some(_) => Ok(seconds),
            None => Err(EngineError::Cancelled { done: tokens, total: tokens }),
        }
    }

    fn timed_decode(&mut self, context: usize, tokens: usize) -> Result<f64, EngineError> {
        let prompt = self.prompt(context);
        let mut session = self.filled_session(&prompt)?;
        self.inner.stage(&mut session, &prompt)?;
        // The first token belongs to the prompt: the time begins when it is there.
        let (mut first, mut last, mut count) = (None, None, 0);
        let clock = Arc::clone(&self.clock);
        let params = params(tokens + 1);
        self.inner.generate(&mut session, &params, &self.cancel, |_| {
            let now = clock.now();
            first.get_or_insert(now);
            last = Some(now);
            count += 1;
            ControlFlow::Continue(())
        })?;
        self.session = Some(session);
        match (first, last) {
            (Some(first), Some(last)) if count == tokens + 1 => {
                Ok(last.saturating_sub(first).as_secs_f64())
            }
            _ => Err(EngineError::Cancelled { done: count, total: tokens + 1 }),
        }
    }

    /// Runs a point once, untimed, and measures its operations: for a prompt all its steps, for decoding the steps
    /// behind the context alone.
    pub fn operations(&mut self, point: Point, what: Measure) -> Result<OperationTimes, Trouble> {
        let measured = match point {
            Point::Prefill { tokens } => self.prefill_operations(tokens, what),
            Point::Decode { context, tokens } => self.decode_operations(context, tokens, what),
        };
        let times = measured.map(|()| self.inner.program().operation_times());
        let stopped = self.inner.measure(Measure::Nothing);
        times.and_then(|times| stopped.map(|()| times)).map_err(|e| self.trouble(&e))
    }

    /// Reads K and V of a context, each alone, as attention would.
    pub fn cache_reads(&mut self, context: usize) -> CacheReads {
        let times = self.operations(Point::Decode { context, tokens: 1 }, Measure::Cache);
        let reads =
            times.map_err(|trouble| trouble.to_string()).and_then(|times| match times.trouble {
                Some(why) => Err(why),
                None => Ok(times.cache),
            });
        CacheReads { context, reads }
    }

    /// Copies a session of a context to the host, and goes on from the copy in an empty one, some rounds.
    pub fn snapshots(&mut self, context: usize, rounds: usize) -> SnapshotTimes {
        let times = self.timed_snapshots(context, rounds).map_err(|e| self.trouble(&e).to_string());
        SnapshotTimes { context, times }
    }

    fn timed_snapshots(&mut self, context: usize, rounds: usize) -> Result<Moves, EngineError> {
        // A copy that is alive would spare the next one its K and V.
        self.context = None;
        let clock = Arc::clone(&self.clock);
        let prompt = self.prompt(context + 1);
        let mut session = self.filled_session(&prompt)?;
        let mut moves = Moves::default();
        for _ in 0..rounds {
            self.context = None;
            let (snapshot, to_host) = timed(&*clock, || self.inner.snapshot(&session));
            let snapshot = snapshot?;
            self.session = Some(session);
            session = self.empty_session()?;
            let (resumed, seconds) = timed(&*clock, || {
                self.inner.restore(&mut session, &snapshot)?;
                self.inner.stage(&mut session, &prompt)?;
                self.inner
                    .generate(&mut session, &params(1), &self.cancel, |_| ControlFlow::Continue(()))
            });
            resumed?;
            moves.bytes = snapshot.bytes();
            moves.to_host.push(to_host);
            moves.resumed.push(seconds);
            // Back to where it was before that token.
            self.inner.restore(&mut session, &snapshot)?;
        }
        self.session = Some(session);
        Ok(moves)
    }

    /// Bytes a second that the device reads its weights at, where it can tell.
    pub fn read_rate(&mut self) -> Option<f64> {
        self.inner.measure(Measure::Twins).ok()?;
        let rate = self.inner.program().operation_times().read_rate;
        self.inner.measure(Measure::Nothing).ok()?;
        rate
    }

    fn prefill_operations(&mut self, tokens: usize, what: Measure) -> Result<(), EngineError> {
        self.context = None;
        self.inner.measure(what)?;
        self.timed_prefill(tokens).map(drop)
    }

    fn decode_operations(
        &mut self,
        context: usize,
        tokens: usize,
        what: Measure,
    ) -> Result<(), EngineError> {
        let prompt = self.prompt(context);
        let mut session = self.filled_session(&prompt)?;
        self.inner.stage(&mut session, &prompt)?;
        let sample = Output::Sample(SampleParams::GREEDY);
        let max_rows = self.inner.options().chunk;
        while let Some(work) = session.prefill_segment(max_rows, &sample) {
            self.inner.step(vec![work])?;
        }
        self.inner.measure(what)?;
        for done in 0..tokens {
            if self.cancel.is_cancelled() {
                return Err(EngineError::Cancelled { done, total: tokens });
            }
            if let Some(work) = session.decode_segment(sample.clone()) {
                self.inner.step(vec![work])?;
            }
        }
        self.session = Some(session);
        Ok(())
    }

    fn trouble(&self, error: &EngineError) -> Trouble {
        match self.cancel.is_cancelled() {
            true => Trouble::Interrupted,
            false => Trouble::Failed(error.to_string()),
        }
    }
}

/// Greedy, and no token ends the answer.
fn params(max_tokens: usize) -> GenerateParams {
    GenerateParams { sample: SampleParams::GREEDY, max_tokens, stop_ids: Vec::new() }
}

impl Engine for LilyEngine {
    fn name(&self) -> &str {
        &self.name
    }

    fn facts(&self) -> Vec<(String, String)> {
        self.facts.clone()
    }

    fn prefill(&mut self, tokens: usize) -> Result<f64, Trouble> {
        // The slot's pages are needed; a context of another point is not.
        self.context = None;
        self.timed_prefill(tokens).map_err(|e| self.trouble(&e))
    }

    fn decode(&mut self, context: usize, tokens: usize) -> Result<f64, Trouble> {
        self.timed_decode(context, tokens).map_err(|e| self.trouble(&e))
    }

    fn warm_up(&mut self, point: Point) -> Result<(), Trouble> {
        match point {
            // Two chunks warm everything that a longer prompt uses.
            Point::Prefill { tokens } => {
                let short = tokens.min(2 * self.inner.options().chunk);
                self.prefill(short).map(drop)
            }
            Point::Decode { context, tokens } => self.decode(context, tokens.min(8)).map(drop),
        }
    }
}
