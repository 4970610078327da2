//! How much of what is wanted fits into memory.

/// A context that nobody asked for is not made shorter than this.
const LEAST_CONTEXT: usize = 4096;

/// What a server is prepared for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Tokens of a request.
    pub context: usize,
    /// Requests at once.
    pub parallel: usize,
}

/// What may be made less.
#[derive(Clone, Copy, Debug)]
pub struct Free {
    /// The context.
    pub context: bool,
    /// The number of requests at once.
    pub parallel: bool,
}

/// The largest size up to `wanted` that fits: context and requests are halved by turns. If none fits it is the
/// smallest, which the engine then refuses with all figures.
pub fn fitting(wanted: Size, free: Free, fits: impl Fn(Size) -> bool) -> Size {
    let mut size = wanted;
    let mut turn = false;
    while !fits(size) {
        let shorter = (free.context && size.context > LEAST_CONTEXT)
            .then(|| Size { context: (size.context / 2).max(LEAST_CONTEXT), ..size });
        let fewer = (free.parallel && size.parallel > 1)
            .then_some(Size { parallel: size.parallel / 2, ..size });
        let less = if turn { fewer.or(shorter) } else { shorter.or(fewer) };
        let Some(less) = less else { break };
        size = less;
        turn = !turn;
    }
    size
}

/// What was made less, and how to insist; `None` if nothing was.
pub fn told(wanted: Size, size: Size) -> Option<String> {
    let mut changes = Vec::new();
    if size.context < wanted.context {
        let Size { context, .. } = size;
        changes.push(format!("a context of {context} tokens instead of {}", wanted.context));
    }
    if size.parallel < wanted.parallel {
        let Size { parallel, .. } = size;
        changes.push(format!("{parallel} at once instead of {}", wanted.parallel));
    }
    let changes = (!changes.is_empty()).then(|| changes.join(", "))?;
    Some(format!("{changes}: memory bears no more; --ctx and --parallel set them"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: Size = Size { context: 32768, parallel: 4 };
    const ALL: Free = Free { context: true, parallel: true };

    /// The size for which `tokens` of all requests together fit.
    fn within(tokens: usize, free: Free) -> (usize, usize) {
        let size = fitting(WANTED, free, |s| s.context * s.parallel <= tokens);
        (size.context, size.parallel)
    }

    #[test]
    fn context_and_requests_shrink_by_turns() {
        assert_eq!(within(32768 * 4, ALL), (32768, 4));
        assert_eq!(within(32768 * 4 - 1, ALL), (16384, 4));
        assert_eq!(within(32768, ALL), (16384, 2));
        assert_eq!(within(16384, ALL), (8192, 2));
        assert_eq!(within(8192, ALL), (8192, 1));
        assert_eq!(within(4096, ALL), (4096, 1));
        assert_eq!(within(1, ALL), (4096, 1));
    }

    #[test]
    fn what_was_asked_for_stays() {
        assert_eq!(within(1, Free { context: false, parallel: true }), (32768, 1));
        assert_eq!(within(1, Free { context: true, parallel: false }), (4096, 4));
        assert_eq!(within(1, Free { context: false, parallel: false }), (32768, 4));
        let short = Size { context: 1000, parallel: 1 };
        assert_eq!(fitting(short, ALL, |_| false), short);
    }

    #[test]
    fn what_became_less_is_told() {
        assert_eq!(told(WANTED, WANTED), None);
        let text = told(WANTED, Size { context: 8192, parallel: 2 }).unwrap();
        assert!(
            text.starts_with("a context of 8192 tokens instead of 32768, 2 at once instead of 4: ")
        );
        let text = told(WANTED, Size { parallel: 1, ..WANTED }).unwrap();
        assert!(text.starts_with("1 at once instead of 4: "), "{text}");
    }
}
