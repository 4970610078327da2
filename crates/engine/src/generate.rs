//! Answers, token by token.

use std::ops::ControlFlow;

use lily_device::Output;
use lily_ops::sample::SampleParams;

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
            engine.step(vec![work])?;
            if let Some(token) = session.last_sampled {
                self.accept(token);
                return Ok(Some(token));
            }
        }
    }

    /// What the session has to compute next: a chunk of at most `max_rows` prompt tokens, or one decode
    /// step. `None` once the answer is finished. After the [step](Engine::step), a sampled token is
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
        let output = Output::Sample(self.params.sample.clone());
        Ok(match session.pending.is_empty() {
            false => session.prefill_segment(max_rows, &output),
            true => session.decode_segment(output),
        })
    }

    /// Takes a sampled token into the answer and decides whether it ends.
    pub fn accept(&mut self, token: u32) {
        self.ids.push(token);
        self.finish = if self.params.stop_ids.contains(&token) {
            Some(FinishReason::Stop)
        } else if self.ids.len() >= self.params.max_tokens {
            Some(FinishReason::Length)
        } else if self.prompt + self.ids.len() > self.context {
            // The last token has no place in the context: nothing can be sampled after it.
            Some(FinishReason::ContextFull)
        } else {
            None
        };
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
}

impl Engine {
    /// Begins an answer to the prompt that was [synced](Self::sync) or [staged](Self::stage).
    pub fn start(
        &mut self,
        session: &mut Session,
        params: GenerateParams,
    ) -> Result<Generation, EngineError> {
        self.usable(session)?;
        params.sample.check().map_err(EngineError::Parameters)?;
        if session.pending.is_empty() {
            return Err(EngineError::NothingToGenerate);
        }
        let begun = self.program.begin_answer(session.slot());
        self.note(session, begun)?;
        session.epoch = next_epoch();
        Ok(Generation {
            finish: (params.max_tokens == 0).then_some(FinishReason::Length),
            params,
            epoch: session.epoch,
            prompt: session.tokens.len() + session.pending.len(),
            context: self.options().context,
            ids: Vec::new(),
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
        while let Some(token) = generation.next(self, session, cancel)? {
            if on_token(token).is_break() {
                generation.cancel();
            }
        }
        let finish = generation.finish.unwrap_or(FinishReason::Cancelled);
        Ok(Generated { ids: generation.ids, finish, timings: session.timings })
    }
}
