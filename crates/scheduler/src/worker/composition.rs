//! What shares a step.
//!
//! On a GPU a step of few rows runs in another form than one of many, and their results differ by roundings
//! ([`Engine::few_rows`]). A request's tokens hang on no mate all the same, but for where time cuts its prompt: there a step has either single tokens, of those that
//! decode and of prompts' ends, no more than that form takes; or one short piece of a prompt; or longer ones. Single
//! tokens and prompts alternate, and each has its turn.

use lily_engine::Engine;

use super::Worker;
use crate::job::Running;
use crate::pace::{GRAIN, cut};

/// What a running job does in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Its number: places change when others leave.
    pub seq: u64,
    /// Most prompt tokens; 0 decodes.
    pub rows: usize,
}

impl Worker {
    /// The next step: those that decode, and prompts, by turns where they cannot be all of them.
    pub(super) fn plan(&mut self) -> Vec<Part> {
        let Some(engine) = &self.engine else { return Vec::new() };
        let few = engine.few_rows();
        // Where states inside a step cannot be kept, it ends where the next one is.
        let inside = engine.marks();
        let until = |r: &Running| if inside { r.left() } else { r.until_mark() };
        let context = self.shared.limits.context;
        let (mut singles, mut prompts) = (Vec::new(), Vec::new());
        for running in self.running.iter().filter(|r| r.ready(context)) {
            let seq = running.job.seq;
            match until(running) {
                _ if running.left() == 0 => singles.push(Part { seq, rows: 0 }),
                1 if few.is_some() => singles.push(Part { seq, rows: 1 }),
                rows => prompts.push(Part { seq, rows }),
            }
        }
        let all = singles.len();
        if let Some(most) = few {
            self.by_turns(&mut singles);
            singles.truncate(most);
        }
        let mixed = self.options.mixed && few.is_none();
        if !prompts.is_empty() && !singles.is_empty() && !mixed {
            // All that wait for a single token have had one between two steps of prompts.
            if self.singles < all.div_ceil(singles.len()) {
                prompts.clear();
            } else {
                singles.clear();
            }
        }
        match prompts.is_empty() {
            true => self.singles = self.singles.saturating_add(1),
            false => self.singles = 0,
        }
        self.add_prompts(&mut singles, prompts, few);
        singles
    }

    /// Adds prompts to a step as far as there is room, `rows` of each at most: those after the last one that had its turn,
    /// then those before it.
    fn add_prompts(&mut self, parts: &mut Vec<Part>, mut prompts: Vec<Part>, few: Option<usize>) {
        let mut room = self.room(parts.len());
        prompts.sort_unstable_by_key(|part| (part.seq <= self.last_prompt, part.seq));
        for (nth, Part { seq, rows: until }) in prompts.into_iter().enumerate() {
            let rows = cut(until, room);
            let short = few.is_some_and(|most| rows <= most);
            // Neither too little room for a chunk of one more prompt is used, nor is its rest to be short for its mates' sake; what
            // is short goes alone. It is the first in the next step.
            let ragged = rows < until && (rows < GRAIN || few.is_some() && until - rows < GRAIN);
            if rows == 0 || nth > 0 && (ragged || short) {
                break;
            }
            room -= rows;
            self.last_prompt = seq;
            parts.push(Part { seq, rows });
            if short {
                break;
            }
        }
    }

    /// Prompt tokens that fit into a step beside others' `parts`.
    fn room(&self, parts: usize) -> usize {
        let Some(options) = self.engine.as_ref().map(Engine::options) else { return 0 };
        let limit = options.limits().rows;
        let most = limit.min(options.chunk);
        // Those that wait for their last token decode, too.
        let decodes = self.running.iter().any(|r| r.session.is_some() && r.left() == 0);
        let room = match decodes {
            true => self.pace.rows(self.options.delay, self.options.min_chunk.max(1), most),
            false => most,
        };
        room.min(limit.saturating_sub(parts))
    }

    /// Those first that have waited longest for their turn.
    fn by_turns(&mut self, parts: &mut [Part]) {
        let runs = |seq: &u64| self.running.iter().any(|r| r.job.seq == *seq);
        self.turns.retain(runs);
        for running in &self.running {
            if !self.turns.contains(&running.job.seq) {
                self.turns.push(running.job.seq);
            }
        }
        parts.sort_by_key(|part| self.turns.iter().position(|seq| *seq == part.seq));
    }

    /// A job is part of a step that the device has.
    pub(super) fn had_its_turn(&mut self, seq: u64) {
        if let Some(at) = self.turns.iter().position(|other| *other == seq) {
            self.turns[at..].rotate_left(1);
        }
    }

    /// Prompt tokens of a step of so many parts that tell how long prompts take.
    pub(super) fn paced(&self, rows: usize, parts: usize) -> Option<usize> {
        paced(self.engine.as_ref().and_then(Engine::few_rows), rows, parts)
    }
}

/// Single tokens that went with those that decode tell how long those take, a short piece alone neither: its few tokens take as long
/// as many.
fn paced(few: Option<usize>, rows: usize, parts: usize) -> Option<usize> {
    match few {
        Some(_) if rows <= parts => Some(0),
        Some(most) if rows <= most => None,
        _ => Some(rows),
    }
}

#[cfg(test)]
mod tests {
    use super::paced;

    #[test]
    fn a_short_piece_alone_tells_nothing() {
        for (few, rows, parts, want) in [
            (Some(8), 0, 3, Some(0)),
            (Some(8), 2, 3, Some(0)),
            (Some(8), 1, 1, Some(0)),
            (Some(8), 2, 1, None),
            (Some(8), 8, 1, None),
            (Some(8), 9, 1, Some(9)),
            (None, 2, 1, Some(2)),
            (None, 1, 3, Some(1)),
        ] {
            assert_eq!(paced(few, rows, parts), want, "{few:?}, {rows} rows, {parts} parts");
        }
    }
}
