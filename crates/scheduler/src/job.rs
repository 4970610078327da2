//! A request and what has become of it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use lily_engine::{Sampled, Session, SessionSnapshot};
use lily_ops::sample::SampleParams;

use crate::api::{Event, Failure, Finish, Logprob, Request, Token};
use crate::channel::EventSender;
use crate::shared::Place;

/// A request that was taken.
#[derive(Debug)]
pub(crate) struct Job {
    /// Requests are served in this order.
    pub seq: u64,
    pub request: Request,
    /// Bias and log-probabilities included.
    pub params: SampleParams,
    pub events: EventSender,
    /// The answer so far.
    pub ids: Vec<u32>,
    /// When it left the queue first.
    pub started: Option<Instant>,
    /// The state that it had when it gave way to others.
    pub kept: Option<SessionSnapshot>,
    /// Whether its thinking was closed for it.
    pub closed: bool,
    /// Counted among those that run and wait until it ends.
    pub place: Arc<Place>,
}

impl Job {
    /// Prompt and answer so far.
    pub fn tokens(&self) -> Vec<u32> {
        [&self.request.prompt[..], &self.ids].concat()
    }

    pub fn len(&self) -> usize {
        self.request.prompt.len() + self.ids.len()
    }

    /// Tells that its prompt is being computed, once.
    pub fn start(&mut self, cached: usize) -> bool {
        let first = self.started.is_none();
        if first {
            let at = Instant::now();
            self.started = Some(at);
            self.events.send(Event::Started { cached, at });
        }
        first
    }

    /// Takes a sampled token into the answer, and those that follow it by rule. Whether the answer ends, and
    /// whether tokens followed that the device has not seen.
    pub fn accept(&mut self, sampled: Sampled, context: usize) -> (Option<Finish>, bool) {
        let logprob = sampled.logprobs.map(|l| Logprob { chosen: l.logprob, top: l.top });
        let end = self.push(sampled.id, logprob, true, context);
        match end {
            None => self.close_thinking(context),
            end => (end, false),
        }
    }

    /// Whether the answer goes on after `more` tokens unless one of them ends it, with a sampled token.
    pub fn goes_on(&self, more: usize, context: usize) -> bool {
        let tokens = self.ids.len() + more;
        let thinking = self.request.thinking.iter();
        let thinking = thinking.filter(|b| !self.closed && !self.ids.contains(&b.end));
        tokens < self.request.max_tokens
            && self.request.prompt.len() + tokens < context
            && thinking.into_iter().all(|budget| tokens < budget.tokens)
    }

    /// Closes the thinking if its bound is reached.
    pub fn close_thinking(&mut self, context: usize) -> (Option<Finish>, bool) {
        let Some(budget) = self.request.thinking.clone() else { return (None, false) };
        let over = self.ids.len() == budget.tokens && !self.ids.contains(&budget.end);
        if self.closed || !over {
            return (None, false);
        }
        self.closed = true;
        for id in budget.close {
            let end = self.push(id, None, false, context);
            if end.is_some() {
                return (end, true);
            }
        }
        (None, true)
    }

    fn push(
        &mut self,
        id: u32,
        logprob: Option<Logprob>,
        sampled: bool,
        context: usize,
    ) -> Option<Finish> {
        self.ids.push(id);
        self.events.send(Event::Token(Token { id, logprob, at: Instant::now(), sampled }));
        if self.request.stop_ids.contains(&id) {
            Some(Finish::Stop)
        } else if self.ids.len() >= self.request.max_tokens || self.len() >= context {
            Some(Finish::Length)
        } else {
            None
        }
    }

    /// Gives its place up and tells how it ended, in this order: who is told may ask again at once.
    pub fn finish(self, finish: Finish) {
        self.end(Event::Finished(finish));
    }

    pub fn fail(self, failure: Failure) {
        self.end(Event::Failed(failure));
    }

    fn end(self, event: Event) {
        self.place.leave();
        self.events.send(event);
    }
}

/// A job that has left the queue.
#[derive(Debug)]
pub(crate) struct Running {
    pub job: Job,
    /// `None` while it waits for the prefix that another job computes.
    pub session: Option<Session>,
    /// Lengths of prefixes to be kept when they are reached, ascending.
    pub marks: Vec<usize>,
    /// Its parts of steps in flight, in order.
    pub ahead: VecDeque<Ahead>,
}

/// A part of a step in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ahead {
    /// That many prompt tokens.
    Prompt(usize),
    /// A decode step.
    Decode,
}

impl Ahead {
    fn rows(self) -> usize {
        match self {
            Self::Prompt(rows) => rows,
            Self::Decode => 1,
        }
    }
}

impl Running {
    /// A job that has just left the queue.
    pub fn new(job: Job) -> Self {
        Self { job, session: None, marks: Vec::new(), ahead: VecDeque::new() }
    }

    /// Tokens in its state when the steps in flight have landed.
    pub fn seen(&self) -> usize {
        let landed = self.session.as_ref().map_or(0, |s| s.tokens().len());
        landed + self.ahead.iter().map(|a| a.rows()).sum::<usize>()
    }

    /// Prompt tokens left that no step has.
    pub fn left(&self) -> usize {
        let pending = self.session.as_ref().map_or(0, |s| s.pending().len());
        let flying = self.ahead.iter().map(|a| match a {
            Ahead::Prompt(rows) => *rows,
            Ahead::Decode => 0,
        });
        pending - flying.sum::<usize>()
    }

    /// Whether its next part does not depend on what is in flight.
    pub fn ready(&self, context: usize) -> bool {
        if self.session.is_none() {
            return false;
        }
        if self.ahead.is_empty() {
            return true;
        }
        if self.left() > 0 {
            // A prefix that is to be kept is copied before the state moves on.
            return !self.marks.contains(&self.seen());
        }
        // Of the prompt only the last part samples; it is the first of those that do.
        let decodes = self.ahead.iter().filter(|a| **a == Ahead::Decode).count();
        let samples = decodes + usize::from(matches!(self.ahead[0], Ahead::Prompt(_)));
        self.job.goes_on(samples, context)
    }

    /// The next marks that lie inside a step of so many prompt tokens, as tokens of the step.
    pub fn marks_inside(&self, rows: usize) -> impl Iterator<Item = usize> {
        let seen = self.seen();
        self.marks
            .iter()
            .filter_map(move |mark| mark.checked_sub(seen))
            .filter(move |n| (1..rows).contains(n))
    }

    /// Prompt tokens until the next mark, or until the end.
    pub fn until_mark(&self) -> usize {
        let seen = self.seen();
        let next = self.marks.iter().find(|mark| **mark > seen);
        next.map_or(self.left(), |mark| mark - seen)
    }
}
