use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use lily_device::{Input, Output, Segment, SlotId};

use crate::policy::chunk_rows;
use crate::snapshot::{Mark, SessionSnapshot};

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
    /// States inside its next step, or its last, that are kept: tokens before each, and memory.
    pub(crate) marks: Vec<Mark>,
    /// Steps of it that are in flight, in order.
    pub(crate) flown: VecDeque<Flown>,
    /// Whether its last step was a decode step.
    pub(crate) decoded_last: bool,
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
            marks: Vec::new(),
            flown: VecDeque::new(),
            decoded_last: false,
            epoch,
        }
    }

    /// Tokens in the state when all steps in flight have landed.
    pub(crate) fn coming(&self) -> usize {
        self.tokens.len() + self.flown.iter().map(|f| f.rows).sum::<usize>()
    }

    /// Whether prompt tokens are left that no step has.
    pub(crate) fn prompt_left(&self) -> bool {
        self.pending.len() > self.flown_prompt()
    }

    /// Prompt tokens in flight.
    fn flown_prompt(&self) -> usize {
        self.flown.iter().filter(|f| !f.decode).map(|f| f.rows).sum()
    }

    /// Tokens that steps in flight will have sampled.
    pub(crate) fn coming_samples(&self) -> usize {
        self.flown.iter().filter(|f| f.samples).count()
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
        let left = self.pending.len() - self.flown_prompt();
        let rows = chunk_rows(self.coming(), max_rows).min(left);
        let output = if rows == left { last.clone() } else { Output::None };
        (rows > 0).then(|| self.chunk(rows, output))
    }

    /// The next `rows` prompt tokens with an output of its own.
    pub(crate) fn chunk(&mut self, rows: usize, output: Output) -> Work<'_> {
        let from = self.flown_prompt();
        let input = Input::Tokens(self.pending[from..from + rows].to_vec());
        Work { segment: Segment { slot: self.slot(), input, output }, rows, session: self }
    }

    /// The token sampled last, to be decoded from; it may still be in flight. `None` if the last step samples
    /// none: prompt tokens are left, or logits are held.
    pub fn decode_segment(&mut self, output: Output) -> Option<Work<'_>> {
        let samples = self.flown.back().map_or(self.last_sampled.is_some(), |f| f.samples);
        let segment = Segment { slot: self.slot(), input: Input::LastSampled, output };
        samples.then_some(Work { segment, rows: 1, session: self })
    }

    /// Ends what was begun: prompt tokens left over, the sampled token, the times.
    pub(crate) fn renew(&mut self, epoch: u64) {
        self.pending.clear();
        self.marks.clear();
        self.flown.clear();
        self.last_sampled = None;
        self.timings = Timings::default();
        self.epoch = epoch;
    }

    /// Records that the device has computed a step.
    pub(crate) fn land(&mut self, flown: Flown, sampled: Option<u32>, seconds: f64) {
        if flown.decode {
            self.tokens.extend(self.last_sampled);
            self.timings.decode_tokens += 1;
            self.timings.decode_seconds += seconds;
        } else {
            self.tokens.extend(self.pending.drain(..flown.rows));
            self.timings.prefill_tokens += flown.rows as u64;
            self.timings.prefill_seconds += seconds;
        }
        self.last_sampled = sampled;
        self.decoded_last = flown.decode;
    }

    /// Records that the last step, a decode step, was taken back. The time that it took stays.
    pub(crate) fn take_back(&mut self) {
        self.last_sampled = self.tokens.pop();
        self.timings.decode_tokens = self.timings.decode_tokens.saturating_sub(1);
        self.decoded_last = false;
    }
}

/// A step in flight, of one session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flown {
    /// Tokens it computes.
    pub rows: usize,
    /// Whether it decodes from the token sampled last; else its tokens are the next of the prompt.
    pub decode: bool,
    /// Whether it samples a token.
    pub samples: bool,
}

/// A session's part of a step, for [`Engine::step`](crate::Engine::step) or [`Engine::submit`](crate::Engine::submit).
#[derive(Debug)]
#[must_use = "it does nothing until it is given to the engine"]
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
}
