use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use lily_device::{Input, Output, Segment, SlotId};

use crate::policy::chunk_rows;
use crate::snapshot::SessionSnapshot;

/// Where the time of a prompt and its answer went. The first token of an answer comes out of the last
/// prompt step and belongs to prefill; decode counts the tokens after it. Only steps are timed, not what the
/// caller does between them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timings {
    /// Prompt tokens computed; reused ones are not among them.
    pub prefill_tokens: u64,
    /// Seconds in steps of prompt tokens.
    pub prefill_seconds: f64,
    /// Tokens decoded one by one.
    pub decode_tokens: u64,
    /// Seconds in decode steps.
    pub decode_seconds: f64,
}

/// Slots whose sessions ended. Shared with every session, so that one dropped anywhere (in a task that
/// failed, on another thread) gives its slot back.
pub(crate) type Returned = Arc<Mutex<Vec<SlotId>>>;

#[derive(Debug)]
pub(crate) struct Lease {
    pub slot: SlotId,
    pub returned: Returned,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.returned.lock().unwrap_or_else(PoisonError::into_inner).push(self.slot);
    }
}

/// One timeline of tokens in one slot of an engine.
///
/// Dropping it gives the slot back at the engine's next call; [`Engine::close`](crate::Engine::close) does so
/// at once.
#[derive(Debug)]
pub struct Session {
    pub(crate) lease: Lease,
    /// Exactly what the device has seen.
    pub(crate) tokens: Vec<u32>,
    /// Prompt tokens that follow and are not computed yet.
    pub(crate) pending: Vec<u32>,
    /// The token sampled by the last step, which the device has not seen as an input yet.
    pub(crate) last_sampled: Option<u32>,
    pub(crate) checkpoints: VecDeque<SessionSnapshot>,
    pub(crate) timings: Timings,
    /// Changes with every prompt, so that a generation knows whether it is still about this one.
    pub(crate) epoch: u64,
}

impl Session {
    pub(crate) fn new(lease: Lease, epoch: u64) -> Self {
        Self {
            lease,
            tokens: Vec::new(),
            pending: Vec::new(),
            last_sampled: None,
            checkpoints: VecDeque::new(),
            timings: Timings::default(),
            epoch,
        }
    }

    /// Its slot.
    pub fn slot(&self) -> SlotId {
        self.lease.slot
    }

    /// The tokens in the state. The last sampled token is not among them until it is decoded from.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Prompt tokens accepted and not computed yet.
    pub fn pending(&self) -> &[u32] {
        &self.pending
    }

    /// The token that the last step sampled.
    pub fn last_sampled(&self) -> Option<u32> {
        self.last_sampled
    }

    /// Times since the last prompt was given.
    pub fn timings(&self) -> Timings {
        self.timings
    }

    /// The next chunk of the prompt: at most `max_rows` tokens, fewer as the context grows. `last` is asked
    /// for if it is the last chunk. `None` if no prompt tokens are left.
    pub fn prefill_segment(&mut self, max_rows: usize, last: &Output) -> Option<Work<'_>> {
        let rows = chunk_rows(self.tokens.len(), max_rows).min(self.pending.len());
        let output = if rows == self.pending.len() { last.clone() } else { Output::None };
        (rows > 0).then(|| self.chunk(rows, output))
    }

    /// The next `rows` prompt tokens with an output of its own.
    pub(crate) fn chunk(&mut self, rows: usize, output: Output) -> Work<'_> {
        let input = Input::Tokens(self.pending[..rows].to_vec());
        Work { segment: Segment { slot: self.slot(), input, output }, rows, session: self }
    }

    /// The token sampled last, to be decoded from. `None` if the last step sampled none: prompt tokens are
    /// left, or logits are held.
    pub fn decode_segment(&mut self, output: Output) -> Option<Work<'_>> {
        self.last_sampled?;
        let segment = Segment { slot: self.slot(), input: Input::LastSampled, output };
        Some(Work { segment, rows: 1, session: self })
    }

    /// Ends what was begun: prompt tokens left over, the sampled token, the times.
    pub(crate) fn renew(&mut self, epoch: u64) {
        self.pending.clear();
        self.last_sampled = None;
        self.timings = Timings::default();
        self.epoch = epoch;
    }
}

/// A session's part of a step, for [`Engine::step`](crate::Engine::step).
#[derive(Debug)]
#[must_use = "it does nothing until it is given to Engine::step"]
pub struct Work<'s> {
    pub(crate) session: &'s mut Session,
    pub(crate) segment: Segment,
    pub(crate) rows: usize,
}

impl Work<'_> {
    /// Tokens it computes: its share of the rows of a step.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Records that the device has computed it.
    pub(crate) fn done(self, sampled: Option<u32>, seconds: f64) {
        let Session { tokens, pending, last_sampled, timings, .. } = self.session;
        match self.segment.input {
            Input::Tokens(_) => {
                tokens.extend(pending.drain(..self.rows));
                timings.prefill_tokens += self.rows as u64;
                timings.prefill_seconds += seconds;
            }
            Input::LastSampled => {
                tokens.extend(*last_sampled);
                timings.decode_tokens += 1;
                timings.decode_seconds += seconds;
            }
        }
        *last_sampled = sampled;
    }
}
