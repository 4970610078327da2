//! What is known of command buffers that were committed: completion handlers tell it, on a thread of the system's.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How a command buffer ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Seconds of the GPU's clock at its first command.
    pub start: f64,
    /// Seconds at its last one.
    pub end: f64,
    /// Why it failed, if it did.
    pub failure: Option<Failure>,
}

/// A command buffer's error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// `MTLCommandBufferError`.
    pub code: i64,
    /// The system's text.
    pub text: String,
}

/// What a failure means for what follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// A new queue can go on.
    Recoverable,
    /// The system did not run it: because of what failed before it on its queue, or, if nothing has, because this program may
    /// not use the device any more.
    Ignored,
    /// The device is gone.
    Gone,
}

impl Failure {
    /// Whether anything can follow.
    pub fn verdict(&self) -> Verdict {
        match self.code {
            // "Ignored (for causing prior/excessive GPU errors)": what is committed behind a buffer that was killed gets it, too.
            4 => Verdict::Ignored,
            // Device removed.
            11 => Verdict::Gone,
            _ => Verdict::Recoverable,
        }
    }

    /// Whether the system stopped it because it took too long: it says so by code or, of other codes, in its text alone.
    fn was_too_long(&self) -> bool {
        self.code == 2 || self.text.contains("Impacting Interactivity")
    }

    /// The reason, with what can be done about it.
    pub fn reason(&self) -> String {
        let advice = match self.code {
            _ if self.was_too_long() => {
                "; the system stopped it because it ran too long: a smaller --chunk makes shorter command buffers"
            }
            4 => "; the system lets this program use the GPU no more: start it again",
            3 => "; a kernel read or wrote outside its buffers",
            8 => "; the GPU ran out of memory: close other programs, or ask for a shorter context",
            _ => "",
        };
        format!("{} (Metal's error {}){advice}", self.text, self.code)
    }
}

#[derive(Debug, Default)]
struct State {
    ended: u64,
    outcomes: Vec<(u64, Outcome)>,
}

/// Where completion handlers put outcomes and the driver takes them.
#[derive(Debug, Default)]
pub struct Completions {
    state: Mutex<State>,
    changed: Condvar,
}

impl Completions {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held; what is there is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Command buffer number `part` has ended.
    pub fn end(&self, part: u64, outcome: Outcome) {
        let mut state = self.state();
        state.ended += 1;
        state.outcomes.push((part, outcome));
        self.changed.notify_all();
    }

    /// Command buffers that have ended so far.
    pub fn ended(&self) -> u64 {
        self.state().ended
    }

    /// The outcomes since the last call.
    pub fn take(&self) -> Vec<(u64, Outcome)> {
        std::mem::take(&mut self.state().outcomes)
    }

    /// Waits until more than `seen` have ended; false if none did in all of `patience`.
    pub fn wait_beyond(&self, seen: u64, patience: Duration) -> bool {
        let state = self.state();
        let (state, _) = self
            .changed
            .wait_timeout_while(state, patience, |s| s.ended <= seen)
            .unwrap_or_else(PoisonError::into_inner);
        state.ended > seen
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn outcome(start: f64) -> Outcome {
        Outcome { start, end: start + 1.0, failure: None }
    }

    #[test]
    fn outcomes_arrive_in_any_order_and_once() {
        let all = Arc::new(Completions::default());
        let there = all.clone();
        let system = std::thread::spawn(move || [2, 1, 3].map(|n| there.end(n, outcome(n as f64))));
        let mut got = Vec::new();
        while got.len() < 3 {
            assert!(all.wait_beyond(got.len() as u64, Duration::from_secs(60)));
            got.extend(all.take());
        }
        system.join().unwrap();
        assert_eq!(got.iter().map(|(n, _)| *n).collect::<Vec<_>>(), [2, 1, 3]);
        assert_eq!((all.ended(), all.take().len()), (3, 0));
        assert!(!all.wait_beyond(3, Duration::from_millis(1)), "nothing more came");
    }

    #[test]
    fn failures_say_what_to_do() {
        let table = [
            (1, Verdict::Recoverable, ""),
            (2, Verdict::Recoverable, "--chunk"),
            (3, Verdict::Recoverable, "outside its buffers"),
            (4, Verdict::Ignored, "start it again"),
            (8, Verdict::Recoverable, "out of memory"),
            (11, Verdict::Gone, ""),
            (99, Verdict::Recoverable, ""),
        ];
        for (code, verdict, advice) in table {
            let failure = Failure { code, text: "Caused GPU Hang Error".into() };
            assert_eq!(failure.verdict(), verdict, "{code}");
            let reason = failure.reason();
            assert!(
                reason.contains(advice) && reason.contains(&format!("error {code})")),
                "{reason}"
            );
        }
        // The watchdog's own word comes with the code of an internal error.
        let text = "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)";
        let reason = Failure { code: 1, text: text.into() }.reason();
        assert!(reason.contains("--chunk"), "{reason}");
    }
}
