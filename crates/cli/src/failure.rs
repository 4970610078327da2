//! Errors with hints, and how the program ends.

use std::fmt;
use std::io;
use std::process::ExitCode;

use lily_engine::EngineError;

use crate::output::note;

/// What happened and what to do about it.
#[derive(Debug)]
pub struct Failure {
    what: String,
    hint: String,
    code: u8,
}

impl Failure {
    /// The command failed.
    pub fn new(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { what: what.into(), hint: hint.into(), code: 1 }
    }

    /// The command was asked for wrongly.
    pub fn usage(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { code: 2, ..Self::new(what, hint) }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n hint: {}", self.what, self.hint)
    }
}

impl std::error::Error for Failure {}

/// Ended by Ctrl-C.
#[derive(Debug)]
pub struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// Reports an error on stderr and gives the exit code.
pub fn exit(result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    if error.is::<Interrupted>() {
        return ExitCode::from(130);
    }
    // Who reads our output has had enough of it (`lily run … | head`): not an error.
    let closed = |e: &io::Error| e.kind() == io::ErrorKind::BrokenPipe;
    if error.chain().any(|cause| cause.downcast_ref().is_some_and(closed)) {
        return ExitCode::SUCCESS;
    }
    note(&format!("error: {}", message(&error)));
    ExitCode::from(error.downcast_ref::<Failure>().map_or(1, |f| f.code))
}

/// The error and its causes, but for those that a message before them repeats.
pub fn message(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.downcast_ref().and_then(engine).unwrap_or_else(|| cause.to_string());
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Errors of the engine whose own words speak of sessions, which are no business of the program's users.
fn engine(error: &EngineError) -> Option<String> {
    let what = match error {
        EngineError::StepFailed { position, reason, .. } => {
            format!("the computation failed after {position} tokens: {reason}")
        }
        EngineError::Poisoned { reason, .. } => {
            format!("what was computed is lost since the computation failed: {reason}")
        }
        _ => return None,
    };
    let hint = "ask again, which computes it anew; if it fails again, lily inspect MODEL --verify looks for damaged \
                weights";
    Some(Failure::new(what, hint).to_string())
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn a_failed_step_is_told_in_the_words_of_a_user() {
        let failed =
            EngineError::StepFailed { slot: 3, position: 17, reason: "NaN in layer 2".into() };
        let poisoned = EngineError::Poisoned { slot: 3, reason: "NaN in layer 2".into() };
        for error in [failed, poisoned] {
            let text = message(&Err::<(), _>(error).context("answering").unwrap_err());
            assert!(text.starts_with("answering: ") && text.contains("NaN in layer 2"), "{text}");
            assert!(text.contains("hint: ask again"), "{text}");
            assert!(!text.contains("slot") && !text.contains("session"), "{text}");
        }
        let text = message(&EngineError::EmptyPrompt.into());
        assert_eq!(text, EngineError::EmptyPrompt.to_string());
    }
}
