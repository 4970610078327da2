//! Who may run, and who gives way.

use lily_engine::snapshot_bytes;
use lily_ops::plan::PAGE_TOKENS;

use super::{Fate, Lost, Worker, fate};
use crate::job::{Job, Running};
use crate::shared::Counters;

/// A prefix that is computed for another job is waited for if it saves this many tokens.
const WORTH_WAITING: usize = 32;

/// States kept inside a prompt at most: each takes the recurrent state's bytes.
const MOST_INNER: usize = 8;

/// Lengths of the prefixes of a prompt that are kept though nothing says that others depart there: every `stride`
/// tokens, or twice, four times … as many in a long prompt. Prompts with the same beginning have the same ones, or
/// every other.
fn inner_marks(stride: usize, prompt: usize) -> impl Iterator<Item = usize> {
    let mut step = stride;
    while step > 0 && prompt / step > MOST_INNER {
        step = step.saturating_mul(2);
    }
    let count = prompt.checked_div(step).unwrap_or(0);
    (1..=count).map(move |n| n * step)
}

fn pages(tokens: usize) -> usize {
    tokens.div_ceil(PAGE_TOKENS)
}

impl Worker {
    /// Lets jobs run, first come first served, as long as there are slots, and pages for the prompt and one
    /// more.
    pub(super) fn admit(&mut self) -> Result<(), Lost> {
        while self.running.len() + self.parked.len() < self.shared.limits.parallel
            && self.waiting.front().is_some_and(|job| self.fits(job))
        {
            let Some(job) = self.waiting.pop_front() else { break };
            self.running.push(Running::new(job));
        }
        let mut at = 0;
        while at < self.running.len() {
            let waits = self.running[at].session.is_some() || self.follows(at);
            if waits || self.open(at)? {
                at += 1;
            }
        }
        Ok(())
    }

    fn fits(&self, job: &Job) -> bool {
        let Some(engine) = &self.engine else { return false };
        if self.running.is_empty() {
            return true;
        }
        // Pages that are promised and not taken yet.
        let missing = |r: &Running| pages(r.job.len()).saturating_sub(pages(r.seen()));
        let promised: usize = self.running.iter().map(missing).sum();
        pages(job.len()) + 1 + promised <= engine.free_pages()
    }

    /// Whether a job does well to wait for the prefix that another one is computing.
    fn follows(&self, at: usize) -> bool {
        let job = &self.running[at].job;
        if job.kept.is_some() {
            return false;
        }
        let tokens = job.tokens();
        let have = self.cache.longest(&tokens);
        self.running.iter().filter(|r| r.session.is_some() && r.left() > 0).any(|leader| {
            let prompt = &leader.job.request.prompt;
            let coming = leader.marks.iter().filter(|mark| **mark > leader.seen());
            coming.into_iter().any(|&mark| {
                mark >= have + WORTH_WAITING
                    && mark < tokens.len()
                    && prompt[..mark] == tokens[..mark]
            })
        })
    }

    /// Gives a job a session, in the state that it had or in that of the longest kept prefix. `false` if the
    /// job runs no more.
    fn open(&mut self, at: usize) -> Result<bool, Lost> {
        let result = self.try_open(at);
        match result.map_err(fate) {
            Ok(()) => {}
            Err(Fate::Lost(lost)) => return Err(lost),
            Err(Fate::Pages) if self.running.len() > 1 => {
                // It waits until others have given pages back.
                let job = self.leave(at)?;
                self.wait_again(job);
                return Ok(false);
            }
            Err(Fate::Pages) => {
                self.fail(at, "it has too few KV pages for this prompt".into())?;
                return Ok(false);
            }
            Err(Fate::Refused(reason) | Fate::Failed(reason)) => {
                self.fail(at, reason)?;
                return Ok(false);
            }
        }
        // A thinking budget of nothing is over before the first token.
        let context = self.shared.limits.context;
        if self.running[at].job.ids.is_empty() {
            match self.running[at].job.close_thinking(context) {
                (Some(finish), _) => {
                    self.finish(at, finish)?;
                    return Ok(false);
                }
                (None, true) => return self.feed(at),
                (None, false) => {}
            }
        }
        Ok(true)
    }

    fn try_open(&mut self, at: usize) -> Result<(), lily_engine::EngineError> {
        let Some(engine) = &mut self.engine else { return Ok(()) };
        let running = &mut self.running[at];
        let job = &mut running.job;
        let mut session = engine.open_session()?;
        if let Some(kept) = job.kept.take() {
            match engine.restore(&mut session, &kept) {
                Ok(()) => {
                    running.session = Some(session);
                    return Ok(());
                }
                Err(error) => match fate(error) {
                    Fate::Lost(Lost(reason)) => {
                        return Err(lily_engine::EngineError::DeviceLost(reason));
                    }
                    // What cannot be restored is computed again.
                    _ => drop(kept),
                },
            }
        }
        let tokens = job.tokens();
        if let Some(prefix) = self.cache.find(&tokens)
            && let Err(error) = engine.restore(&mut session, &prefix)
        {
            match fate(error) {
                Fate::Lost(Lost(reason)) => {
                    return Err(lily_engine::EngineError::DeviceLost(reason));
                }
                _ => self.cache.remove(prefix.tokens()),
            }
        }
        let reuse = engine.stage(&mut session, &tokens)?;
        engine.begin(&mut session, &job.ids)?;
        if job.start(reuse.reused) {
            Counters::add(&self.shared.counters.cached, reuse.reused);
        }
        // The whole prompt but its last token, whose logits the answer begins with, is worth keeping too, and
        // states inside: prompts may depart anywhere.
        let prompt = job.request.prompt.len();
        let mut marks = job.request.boundaries.clone();
        marks.push(prompt - 1);
        marks.extend(inner_marks(self.options.stride, prompt));
        marks.retain(|mark| *mark > reuse.reused && *mark < prompt);
        marks.sort_unstable();
        marks.dedup();
        let wanted = marks.len();
        marks.retain(|mark| {
            let rest = tokens.len().saturating_sub(*mark) * size_of::<u32>();
            self.cache.takes(snapshot_bytes(engine.plan(), *mark) + rest as u64)
        });
        Counters::add(&self.shared.counters.skipped, wanted - marks.len());
        running.marks = marks;
        running.session = Some(session);
        Ok(())
    }

    /// Stages the tokens of an answer that the device has not seen. `false` if the job runs no more.
    pub(super) fn feed(&mut self, at: usize) -> Result<bool, Lost> {
        let Some(engine) = &mut self.engine else { return Ok(true) };
        let running = &mut self.running[at];
        let Some(session) = &mut running.session else { return Ok(true) };
        let tokens = running.job.tokens();
        let staged =
            engine.stage(session, &tokens).and_then(|_| engine.begin(session, &running.job.ids));
        match staged.map_err(fate) {
            Ok(()) => Ok(true),
            Err(Fate::Lost(lost)) => Err(lost),
            Err(Fate::Pages) => Ok(true),
            Err(Fate::Refused(reason) | Fate::Failed(reason)) => {
                self.fail(at, reason)?;
                Ok(false)
            }
        }
    }

    /// Puts a job back among those that wait, by its number.
    pub(super) fn wait_again(&mut self, job: Job) {
        let at = self.waiting.partition_point(|other| other.seq < job.seq);
        self.waiting.insert(at, job);
    }

    /// The youngest job that holds pages gives way: its state is kept if there is memory, else it is computed
    /// again. `false` if there is only one.
    pub(super) fn preempt(&mut self) -> Result<bool, Lost> {
        let holders = self.running.iter().enumerate().filter(|(_, r)| r.seen() > 0);
        let youngest = holders.clone().max_by_key(|(_, r)| r.job.seq).map(|(at, _)| at);
        let (Some(at), true) = (youngest, holders.count() > 1) else { return Ok(false) };
        debug_assert!(self.flights.is_empty(), "what is in flight cannot be copied");
        let kept = match (&mut self.engine, &self.running[at].session) {
            (Some(engine), Some(session)) => loop {
                match engine.snapshot(session) {
                    Ok(snapshot) => break Some(snapshot),
                    Err(lily_engine::EngineError::SnapshotMemory { .. }) if self.cache.evict() => {}
                    Err(error) => match fate(error) {
                        Fate::Lost(lost) => return Err(lost),
                        _ => break None,
                    },
                }
            },
            _ => None,
        };
        let mut job = self.leave(at)?;
        job.kept = kept;
        Counters::add(&self.shared.counters.preemptions, 1);
        self.wait_again(job);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inner_states_are_few_and_their_places_recur() {
        let marks = |stride, prompt| inner_marks(stride, prompt).collect::<Vec<_>>();
        assert!(marks(1024, 1023).is_empty());
        assert_eq!(marks(1024, 2500), [1024, 2048]);
        assert_eq!(marks(1024, 8192), (1..=8).map(|n| n * 1024).collect::<Vec<_>>());
        assert_eq!(marks(1024, 9216), [2048, 4096, 6144, 8192]);
        assert!(marks(0, 100_000).is_empty());
        assert!(marks(usize::MAX, 100_000).is_empty());
        for prompt in (1..400_000).step_by(777) {
            let list = marks(1024, prompt);
            assert!(list.len() <= MOST_INNER);
            let most = 1024.max(prompt.div_ceil(MOST_INNER) * 2);
            let ends = [0].iter().chain(&list).zip(list.iter().chain([&prompt]));
            assert!(ends.into_iter().all(|(a, b)| b - a <= most), "{prompt}: {list:?}");
        }
    }
}
