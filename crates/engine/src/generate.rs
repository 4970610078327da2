//! Answers, token by token.

use std::collections::VecDeque;
use std::ops::ControlFlow;

use lily_device::{Output, SegmentOut};
use lily_ops::sample::{Logprobs, SampleParams, Sampled};

use crate::cancel::Cancel;
use crate::engine::{Engine, next_epoch};
use crate::error::EngineError;
use crate::session::{Session, Timings, Work};

/// How to answer.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateParams {
    /// How each token is chosen.
    pub sample: SampleParams,
    /// Most tokens of the answer.
    pub max_tokens: usize,
    /// Tokens that end the answer; they belong to it.
    pub stop_ids: Vec<u32>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// A stop token was sampled; it is the last token of the answer.
    Stop,
    /// The answer has as many tokens as were asked for.
    Length,
    /// The context is full.
    ContextFull,
    /// The caller ended it.
    Cancelled,
}

/// A finished answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// Its tokens.
    pub ids: Vec<u32>,
    /// The log-probabilities of each, if they were asked for.
    pub logprobs: Vec<Logprobs>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Times of the prompt, from the sync on, and of the answer.
    pub timings: Timings,
}

/// An answer under way. It borrows nothing: engine and session are given to each call, so that a scheduler
/// can keep many of them.
#[derive(Clone, Debug)]
pub struct Generation {
    params: GenerateParams,
    epoch: u64,
    /// Prompt tokens.
    prompt: usize,
    context: usize,
    ids: Vec<u32>,
    logprobs: Vec<Logprobs>,
    finish: Option<FinishReason>,
}

impl Generation {
    /// Computes the next token. `None` once the answer is [finished](Self::finish).
    ///
    /// # Errors
    /// After [`OutOfPages`](EngineError::OutOfPages) the call can be repeated; the answer goes on.
    pub fn next(
        &mut self,
        engine: &mut Engine,
        session: &mut Session,
        cancel: &Cancel,
    ) -> Result<Option<u32>, EngineError> {
        let max_rows = engine.options().chunk;
        loop {
            if cancel.is_cancelled() {
                self.cancel();
            }
            let Some(work) = self.work(session, max_rows)? else {
                return Ok(None);
            };
            if let Some(token) = self.take(engine.step(vec![work])?) {
                return Ok(Some(token));
            }
        }
    }

    /// Accepts what the answer's only segment of a step sampled.
    fn take(&mut self, out: Vec<SegmentOut>) -> Option<u32> {
        match out.into_iter().next() {
            Some(SegmentOut::Sampled(sampled)) => {
                let token = sampled.id;
                self.accept(sampled);
                Some(token)
            }
            _ => None,
        }
    }

    /// What the session has to compute next: a chunk of at most `max_rows` prompt tokens, or one decode
    /// step. `None` once the answer is finished, or will be by the steps in flight. After the [step](Engine::step), a sampled token is
    /// [accepted](Self::accept).
    pub fn work<'s>(
        &self,
        session: &'s mut Session,
        max_rows: usize,
    ) -> Result<Option<Work<'s>>, EngineError> {
        if self.finish.is_some() {
            return Ok(None);
        }
        let sampled = usize::from(session.last_sampled.is_some());
        let known = session.tokens.len() + session.pending.len() + sampled;
        if session.epoch != self.epoch || known != self.prompt + self.ids.len() {
            return Err(EngineError::StaleGeneration { slot: session.slot().0 });
        }
        let coming = self.ids.len() + session.coming_samples();
        if coming > 0 && self.limit(coming).is_some() {
            return Ok(None);
        }
        let output = Output::Sample(self.params.sample.clone());
        Ok(match session.prompt_left() {
            true => session.prefill_segment(max_rows, &output),
            false => session.decode_segment(output),
        })
    }

    /// Takes a sampled token into the answer and decides whether it ends.
    pub fn accept(&mut self, sampled: Sampled) {
        let token = sampled.id;
        self.ids.push(token);
        self.logprobs.extend(sampled.logprobs);
        self.finish = match self.params.stop_ids.contains(&token) {
            true => Some(FinishReason::Stop),
            false => self.limit(self.ids.len()),
        };
    }

    /// Why an answer of `tokens` tokens ends, if its last one is no stop.
    fn limit(&self, tokens: usize) -> Option<FinishReason> {
        if tokens >= self.params.max_tokens {
            Some(FinishReason::Length)
        } else if self.prompt + tokens > self.context {
            // The last token has no place in the context: nothing can be sampled after it.
            Some(FinishReason::ContextFull)
        } else {
            None
        }
    }

    /// Ends the answer, unless it has ended.
    pub fn cancel(&mut self) {
        self.finish.get_or_insert(FinishReason::Cancelled);
    }

    /// Why it ended; `None` while it goes on.
    pub fn finish(&self) -> Option<FinishReason> {
        self.finish
    }

    /// The answer so far.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The log-probabilities of each token so far, if they were asked for.
    pub fn logprobs(&self) -> &[Logprobs] {
        &self.logprobs
    }
}

impl Engine {
    /// Tells the sampler of a session that the prompt that was [staged](Self::stage) is to be answered. Where
    /// the prompt ends with the beginning of the answer, `answered` is that beginning: the answer goes on as if
    /// its tokens had been sampled, with the same draws and penalties. For those who do without a
    /// [`Generation`]; [`start`](Self::start) does it.
    pub fn begin(&mut self, session: &mut Session, answered: &[u32]) -> Result<(), EngineError> {
        self.usable(session)?;
        if session.pending.is_empty() {
            return Err(EngineError::NothingToGenerate);
        }
        let begun = self.program.begin_answer(session.slot(), answered);
        self.note(session, begun)?;
        session.epoch = next_epoch();
        Ok(())
    }

    /// Begins an answer to the prompt that was [synced](Self::sync) or [staged](Self::stage).
    pub fn start(
        &mut self,
        session: &mut Session,
        params: GenerateParams,
    ) -> Result<Generation, EngineError> {
        self.usable(session)?;
        params.sample.check(self.plan().vocab).map_err(EngineError::Parameters)?;
        self.begin(session, &[])?;
        Ok(Generation {
            finish: (params.max_tokens == 0).then_some(FinishReason::Length),
            params,
            epoch: session.epoch,
            prompt: session.tokens.len() + session.pending.len(),
            context: self.options().context,
            ids: Vec::new(),
            logprobs: Vec::new(),
        })
    }

    /// Answers the prompt that was [synced](Self::sync). `on_token` is told each token as it comes and may end
    /// the answer ([`Cancelled`](FinishReason::Cancelled)).
    ///
    /// Afterwards the session has seen the prompt and the answer but for its last token. To go on, sync the
    /// whole conversation again.
    pub fn generate(
        &mut self,
        session: &mut Session,
        params: &GenerateParams,
        cancel: &Cancel,
        mut on_token: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated, EngineError> {
        let mut generation = self.start(session, params.clone())?;
        let mut flights = VecDeque::new();
        let mut refused = None;
        loop {
            if cancel.is_cancelled() {
                generation.cancel();
            }
            while refused.is_none() && flights.len() < self.depth() {
                let Some(work) = generation.work(session, self.options().chunk)? else { break };
                // Others' steps in flight `submit` ends itself.
                if !flights.is_empty() && self.waits(std::slice::from_ref(&work)) {
                    break;
                }
                match self.submit(vec![work]) {
                    Ok(flight) => flights.push_back(flight),
                    Err(error) => refused = Some(error),
                }
            }
            let Some(flight) = flights.pop_front() else { break };
            let surplus = generation.finish.is_some();
            let out = self.wait(flight, &mut [session])?;
            if surplus {
                self.undo(session)?;
            } else if let Some(token) = generation.take(out)
                && on_token(token).is_break()
            {
                generation.cancel();
            }
        }
        match (generation.finish, refused) {
            (None, Some(error)) => Err(error),
            _ => {
                let Generation { ids, logprobs, finish, .. } = generation;
                let finish = finish.unwrap_or(FinishReason::Cancelled);
                Ok(Generated { ids, logprobs, finish, timings: session.timings })
            }
        }
    }
}
