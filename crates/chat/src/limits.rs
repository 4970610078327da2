//! What one rendering may use, and the stack that it runs on.

use std::fmt;

use minijinja::{Error, ErrorKind};

/// Work that one rendering may do: a step or 64 bytes of text is one unit. A message takes some
/// 150 steps, so ten thousand messages of any context fit; memory stays under 320 MB.
pub(crate) const FUEL: u64 = 5_000_000;
/// In words.
pub(crate) const FUEL_LIMIT: &str = "5 million steps";
/// Bytes that one rendering may write: far above any context, far below memory.
pub(crate) const MAX_OUTPUT: usize = 64 << 20;
/// In words.
pub(crate) const OUTPUT_LIMIT: &str = "64 MiB of text";
/// Bytes that one value may take when it is printed or turned into JSON.
pub(crate) const MAX_VALUE: usize = 16 << 20;
/// In words.
pub(crate) const VALUE_LIMIT: &str = "16 MiB for one printed value";
/// How deep values may nest that a template keeps, prints or turns into JSON, and that it is given.
pub(crate) const MAX_DEPTH: usize = 128;
/// In words.
pub(crate) const DEPTH_LIMIT: &str = "128 nested values";
/// Frames (macros, loops, blocks) within each other.
pub(crate) const MAX_FRAMES: usize = 400;

/// Stack of a rendering, whatever the template: what minijinja needs to compile and run it.
const STACK: usize = 16 << 20;
/// And for each bracket or filter of the template. minijinja compares, prints and drops nested
/// values recursively. Within [`MAX_FRAMES`], macros call each other some 80 deep, and each call
/// may wrap a value once per bracket; a level takes up to 800 bytes.
const STACK_PER_WRAP: usize = 64 << 10;

/// A limit that was hit, as the source of a minijinja error.
#[derive(Debug)]
pub(crate) struct LimitHit(pub(crate) &'static str);

impl fmt::Display for LimitHit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "more than {}", self.0)
    }
}

impl std::error::Error for LimitHit {}

fn hit(limit: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, "limit").with_source(LimitHit(limit))
}

pub(crate) fn deep() -> Error {
    hit(DEPTH_LIMIT)
}

pub(crate) fn long() -> Error {
    hit(VALUE_LIMIT)
}

/// Runs on a stack for a template with so many brackets and filters; `None` if the system grants
/// no such thread. Only the pages that are used take memory.
#[allow(unexpected_cfgs, reason = "cargo-fuzz sets `fuzzing`, of which cargo does not know")]
pub(crate) fn on_deep_stack<T: Send>(wraps: usize, work: impl FnOnce() -> T + Send) -> Option<T> {
    // A thread for each input would take nearly all the time; the fuzzer's own stack is as large.
    if cfg!(fuzzing) {
        return Some(work());
    }
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("chat-template".into())
            .stack_size(STACK + wraps * STACK_PER_WRAP)
            .spawn_scoped(scope, work)
            .ok()?;
        match thread.join() {
            Ok(result) => Some(result),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}
