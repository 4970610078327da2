//! What the protocol knows of an engine.

use std::fmt;

/// The two phases, which are never measured together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// A whole prompt at once.
    Prefill,
    /// One token after another.
    Decode,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        })
    }
}

/// One thing to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Point {
    /// A prompt, from nothing to the logits of its last token.
    Prefill {
        /// Its tokens.
        tokens: usize,
    },
    /// Tokens after a context that is there already.
    Decode {
        /// Tokens of the context.
        context: usize,
        /// Tokens decoded.
        tokens: usize,
    },
}

impl Point {
    /// Its phase.
    pub fn phase(self) -> Phase {
        match self {
            Self::Prefill { .. } => Phase::Prefill,
            Self::Decode { .. } => Phase::Decode,
        }
    }

    /// Its place on the frontier: tokens of the prompt, or of the context.
    pub fn length(self) -> usize {
        match self {
            Self::Prefill { tokens } => tokens,
            Self::Decode { context, .. } => context,
        }
    }

    /// Tokens that its seconds are for.
    pub fn tokens(self) -> usize {
        match self {
            Self::Prefill { tokens } | Self::Decode { tokens, .. } => tokens,
        }
    }

    /// Tokens that a session must have room for.
    pub fn room(self) -> usize {
        match self {
            Self::Prefill { tokens } => tokens + 1,
            Self::Decode { context, tokens } => context + tokens + 1,
        }
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Prefill { tokens } => write!(f, "prefill of {tokens} tokens"),
            Self::Decode { context, tokens } => {
                write!(f, "decode of {tokens} tokens after {context}")
            }
        }
    }
}

/// Why an engine has no figure. It becomes a row of the report.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
    /// The engine is not there.
    #[error("missing: {0}")]
    Missing(String),
    /// The engine could not measure the point.
    #[error("failed: {0}")]
    Failed(String),
    /// It took longer than it was given.
    #[error("took more than {seconds} s and was ended; --peer-timeout gives it more")]
    TimedOut {
        /// The time it was given.
        seconds: u64,
    },
    /// The person at the keyboard ended it.
    #[error("interrupted")]
    Interrupted,
}

/// Something that reads prompts and decodes tokens, and tells how long it took.
pub trait Engine {
    /// Its name in reports.
    fn name(&self) -> &str;

    /// What was measured exactly: version, file, checksum.
    fn facts(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Brings the engine to the point, untimed: what a first run would pay for, a choice of settings, a context.
    fn warm_up(&mut self, point: Point) -> Result<(), Trouble> {
        self.measure(point).map(drop)
    }

    /// Seconds for a prompt of `tokens` tokens, from an empty state to the logits of its last token.
    fn prefill(&mut self, tokens: usize) -> Result<f64, Trouble>;

    /// Seconds for `tokens` tokens decoded one by one after `context` tokens. What fills the context is not
    /// in them.
    fn decode(&mut self, context: usize, tokens: usize) -> Result<f64, Trouble>;

    /// Seconds of a point.
    fn measure(&mut self, point: Point) -> Result<f64, Trouble> {
        match point {
            Point::Prefill { tokens } => self.prefill(tokens),
            Point::Decode { context, tokens } => self.decode(context, tokens),
        }
    }
}

/// An engine that is not there: its rows say why.
#[derive(Clone, Debug)]
pub struct Missing {
    name: String,
    trouble: Trouble,
}

impl Missing {
    /// An engine of this name that answers everything with this trouble.
    pub fn new(name: impl Into<String>, trouble: Trouble) -> Self {
        Self { name: name.into(), trouble }
    }
}

impl Engine for Missing {
    fn name(&self) -> &str {
        &self.name
    }

    fn prefill(&mut self, _: usize) -> Result<f64, Trouble> {
        Err(self.trouble.clone())
    }

    fn decode(&mut self, _: usize, _: usize) -> Result<f64, Trouble> {
        Err(self.trouble.clone())
    }
}
