//! The step: what a program is asked to do, and what comes back.

use lily_ops::sample::{SampleParams, Sampled};

/// A slot: one timeline of tokens with its state on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);

/// The tokens of a segment.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// The next tokens of the slot, at least one.
    Tokens(Vec<u32>),
    /// The token that the previous step of this slot sampled, without a visit to the host.
    LastSampled,
}

/// What a segment returns.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// Nothing: a chunk of a prompt.
    None,
    /// The token that follows the segment, chosen by these parameters.
    Sample(SampleParams),
    /// The logits of the last token stay on the device until [`Program::sample`](crate::Program::sample).
    Hold,
    /// For each token of the segment the log-probability of the given next token.
    Scores(Vec<u32>),
    /// The logits of every token of the segment.
    Logits,
}

impl Output {
    /// Rows of a segment of `rows` tokens whose logits are computed: none, the last, or all.
    pub fn rows(&self, rows: usize) -> std::ops::Range<usize> {
        match self {
            Self::None => 0..0,
            Self::Sample(_) | Self::Hold => rows.saturating_sub(1)..rows,
            Self::Scores(_) | Self::Logits => 0..rows,
        }
    }
}

/// The next tokens of one slot.
#[derive(Clone, Debug, PartialEq)]
pub struct Segment {
    /// The slot; at most one segment of a step names it.
    pub slot: SlotId,
    /// Its next tokens.
    pub input: Input,
    /// What is asked for.
    pub output: Output,
}

/// Segments that run together.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Step {
    /// Any number of segments of different slots, at most the program's rows in sum.
    pub segments: Vec<Segment>,
}

impl Step {
    /// A step of one segment.
    pub fn one(slot: SlotId, input: Input, output: Output) -> Self {
        Self { segments: vec![Segment { slot, input, output }] }
    }
}

/// A submitted step. At most two are in flight.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a submitted step must be waited for"]
pub struct Ticket(pub u64);

/// A teacher-forced score of one position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// Natural log-probability of the given next token.
    pub logprob: f32,
    /// The most probable token.
    pub top1: u32,
    /// Its natural log-probability.
    pub top1_logprob: f32,
}

/// What one segment returned.
#[derive(Clone, Debug, PartialEq)]
pub enum SegmentOut {
    /// Nothing was asked for, or the logits are held on the device.
    None,
    /// The chosen token, with log-probabilities where the parameters ask for them.
    Sampled(Sampled),
    /// One score a token.
    Scores(Vec<Score>),
    /// `tokens × vocabulary` logits.
    Logits(Vec<f32>),
    /// This segment failed, and why; its slot holds no usable state until it is reset or restored. The
    /// other segments of the step are what they would have been without it.
    Failed(String),
}

/// What a step returned: one entry a segment, in order.
#[derive(Clone, Debug, PartialEq)]
pub struct StepOut {
    /// The segments' results.
    pub segments: Vec<SegmentOut>,
}

/// Why a step was refused before it changed anything.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No KV pages are left for the step.
    #[error(
        "the step needs {need} more KV pages of 256 tokens, {free} are free; end a session or shorten the context"
    )]
    OutOfPages {
        /// Pages needed.
        need: usize,
        /// Pages free.
        free: usize,
    },
    /// The slot does not exist.
    #[error("slot {} does not exist; the program has {slots} slots", slot.0)]
    NoSuchSlot {
        /// The slot.
        slot: SlotId,
        /// Slots of the program.
        slots: usize,
    },
    /// The step breaks a rule of the interface.
    #[error("{0}")]
    Invalid(String),
}

/// Why a step has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    /// Refused before it ran: nothing changed.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Failed as a whole while it ran: the named slots hold no usable state until they are reset or
    /// restored. A device that can tell which segments failed returns [`SegmentOut::Failed`] for them instead.
    #[error("the step failed: {reason}; the sessions in it must start again")]
    Failed {
        /// Slots whose state is lost.
        slots: Vec<SlotId>,
        /// What happened, and in which layer.
        reason: String,
    },
    /// The device is gone: no program of it answers any more.
    #[error("the device is lost: {0}; it must be opened again")]
    Lost(String),
}
