//! Prompts: what of them is reused, what is computed, what they score.

use lily_device::{Output, Score, SegmentOut};

use crate::cancel::Cancel;
use crate::engine::{Engine, next_epoch};
use crate::error::EngineError;
use crate::policy::chunk_rows;
use crate::session::Session;

/// How a prompt was met. The two add up to its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reuse {
    /// Tokens whose state was there already.
    pub reused: usize,
    /// Tokens that are computed, those among them that the first step of the answer computes.
    pub computed: usize,
}

impl Engine {
    /// Gives a session its whole prompt and computes nothing: the state is brought to the longest prefix that
    /// can be reused, the tokens after it are [pending](Session::pending).
    ///
    /// Candidates are what the session has seen and its [checkpoints](Engine::checkpoint). At most all tokens
    /// but one are reused: the last one has to be computed for the token that follows it. A poisoned session
    /// starts anew, and its checkpoints are dropped, as what made it fail may be in them.
    pub fn stage(&mut self, session: &mut Session, tokens: &[u32]) -> Result<Reuse, EngineError> {
        self.land_abandoned();
        self.owned(session)?;
        self.settled(session)?;
        self.check_tokens(tokens)?;
        session.renew(next_epoch());
        if self.is_poisoned(session) {
            self.reset(session)?;
        }
        let usable = |seen: &[u32]| seen.len() < tokens.len() && tokens.starts_with(seen);
        let kept = usable(&session.tokens).then_some(session.tokens.len());
        let saved = (0..session.checkpoints.len())
            .filter(|&i| usable(session.checkpoints[i].tokens()))
            .max_by_key(|&i| session.checkpoints[i].tokens().len())
            .filter(|&i| session.checkpoints[i].tokens().len() > kept.unwrap_or(0));
        match (saved, kept) {
            (Some(i), _) => self.restore_checkpoint(session, i)?,
            (None, Some(_)) => {}
            (None, None) => self.reset(session)?,
        }
        let reused = session.tokens.len();
        session.pending.extend_from_slice(&tokens[reused..]);
        Ok(Reuse { reused, computed: tokens.len() - reused })
    }

    /// Gives a session its whole prompt and computes it but for its last chunk, which the first step of the
    /// answer computes (a step of its own for the last token would read all weights once more).
    ///
    /// `progress` is told the prompt tokens in the state and all of them: once before the first step and after
    /// each.
    ///
    /// # Errors
    /// [`Cancelled`](EngineError::Cancelled) within one step of the flag. After any error the same or another
    /// prompt can be given again: what is in the state is reused, and a session whose step failed starts anew.
    pub fn sync(
        &mut self,
        session: &mut Session,
        tokens: &[u32],
        cancel: &Cancel,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Reuse, EngineError> {
        let reuse = self.stage(session, tokens)?;
        let total = tokens.len();
        progress(reuse.reused, total);
        let max_rows = self.options().chunk;
        loop {
            if cancel.is_cancelled() {
                session.pending.clear();
                return Err(EngineError::Cancelled { done: session.tokens.len(), total });
            }
            if session.pending.len() <= chunk_rows(session.tokens.len(), max_rows) {
                return Ok(reuse);
            }
            let work = session.prefill_segment(max_rows, &Output::None);
            self.step(work.into_iter().collect())?;
            progress(session.tokens.len(), total);
        }
    }

    /// Teacher-forced scores: for each token from the second on, how probable the model held it after those
    /// before it. The session starts anew and has seen all tokens but the last afterwards.
    ///
    /// `progress` is told the tokens scored and all that will be, after each step.
    pub fn score(
        &mut self,
        session: &mut Session,
        tokens: &[u32],
        cancel: &Cancel,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Vec<Score>, EngineError> {
        self.land_abandoned();
        self.owned(session)?;
        self.settled(session)?;
        self.check_tokens(tokens)?;
        session.renew(next_epoch());
        self.reset(session)?;
        let total = tokens.len() - 1;
        session.pending.extend_from_slice(&tokens[..total]);
        let mut scores = Vec::with_capacity(total);
        while scores.len() < total {
            if cancel.is_cancelled() {
                session.pending.clear();
                return Err(EngineError::Cancelled { done: scores.len(), total });
            }
            let first = session.tokens.len();
            let rows = chunk_rows(first, self.options().chunk).min(session.pending.len());
            let targets = tokens[first + 1..][..rows].to_vec();
            for out in self.step(vec![session.chunk(rows, Output::Scores(targets))])? {
                if let SegmentOut::Scores(chunk) = out {
                    scores.extend(chunk);
                }
            }
            progress(scores.len(), total);
        }
        Ok(scores)
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<(), EngineError> {
        let context = self.options().context;
        let vocab = self.plan().vocab;
        if tokens.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        if tokens.len() > context {
            return Err(EngineError::PromptTooLong { tokens: tokens.len(), context });
        }
        match tokens.iter().position(|&id| id as usize >= vocab) {
            Some(position) => {
                Err(EngineError::TokenOutOfRange { id: tokens[position], position, vocab })
            }
            None => Ok(()),
        }
    }
}
