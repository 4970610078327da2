use lily_device::PrepareError;

use crate::budget::MemoryRefusal;

/// An error of this crate. Each says what happened, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The engine's options contradict themselves.
    #[error("{option} is {value}; it must be at least 1")]
    Options {
        /// The option.
        option: &'static str,
        /// Its value.
        value: usize,
    },
    /// A session alone could run out of pages.
    #[error(
        "{pages} KV pages of 256 tokens cannot hold a context of {context}, which takes {need}; set aside more pages or shorten the context"
    )]
    TooFewPages {
        /// Pages asked for.
        pages: usize,
        /// Pages that one session can fill.
        need: usize,
        /// Tokens of the context.
        context: usize,
    },
    /// Snapshots and checkpoints take all the host memory set aside for them. Nothing changed.
    #[error(
        "a snapshot of {need} bytes does not fit: {used} of the {cap} bytes set aside for snapshots are in use; drop some, or set more aside"
    )]
    SnapshotMemory {
        /// Bytes of the snapshot.
        need: u64,
        /// Bytes in use.
        used: u64,
        /// Bytes set aside.
        cap: u64,
    },
    /// More logits were asked for than memory was set aside for. Nothing changed.
    #[error(
        "logits of {rows} rows are asked for in one step, memory is set aside for {most}; prepare the engine with more logit_rows"
    )]
    LogitRows {
        /// Rows asked for.
        rows: usize,
        /// Rows set aside.
        most: usize,
    },
    /// A step of the session is in flight.
    #[error("a step of slot {slot} is in flight; wait for it first")]
    InFlight {
        /// The slot.
        slot: u32,
    },
    /// The last step of the session is not one that can be taken back.
    #[error(
        "the last step of slot {slot} was no decode step; only the last one can be taken back, once"
    )]
    NothingToUndo {
        /// The slot.
        slot: u32,
    },
    /// The machine has too little memory for the model in this context.
    #[error("not enough memory for {model} on {device}: {refusal}")]
    OutOfMemory {
        /// The model.
        model: String,
        /// The device.
        device: String,
        /// The figures, and what to do.
        refusal: Box<MemoryRefusal>,
    },
    /// The device cannot run the plan.
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    /// All slots are taken.
    #[error("all {slots} slots are in use; close a session, or start with more slots")]
    NoFreeSlot {
        /// Slots of the engine.
        slots: usize,
    },
    /// A session was given to an engine that did not open it.
    #[error("the session belongs to another engine; use it with the engine that opened it")]
    ForeignSession,
    /// There are no tokens.
    #[error("the prompt is empty; give at least one token")]
    EmptyPrompt,
    /// The prompt is longer than the context.
    #[error(
        "the prompt has {tokens} tokens, the context holds {context}; shorten the prompt or use a longer --context"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens of the context.
        context: usize,
    },
    /// A token does not belong to the vocabulary.
    #[error(
        "token {id} at position {position} is outside the vocabulary of {vocab}; check that the tokenizer belongs to this model"
    )]
    TokenOutOfRange {
        /// The token.
        id: u32,
        /// Its place in the prompt.
        position: usize,
        /// Tokens of the vocabulary.
        vocab: usize,
    },
    /// A parameter of sampling is out of its range.
    #[error("{0}")]
    Parameters(String),
    /// A step would run past the context.
    #[error(
        "the session has {context} tokens and its context is full; end it, or use a longer --context"
    )]
    ContextFull {
        /// Tokens of the context.
        context: usize,
    },
    /// No KV pages are left. Nothing changed: the call can be repeated when another session is closed.
    #[error(
        "{need} more KV pages of 256 tokens are needed, {free} are free; close another session or use a shorter context"
    )]
    OutOfPages {
        /// Pages needed.
        need: usize,
        /// Pages free.
        free: usize,
    },
    /// The device refused a call that breaks its rules. Nothing changed.
    #[error("the device refused the call: {0}; nothing changed, but this is a bug of the caller")]
    Refused(String),
    /// A step failed while it ran. The session holds no usable state.
    #[error(
        "the step after token {position} of slot {slot} failed: {reason}; sync the session again, which recomputes it from its first token"
    )]
    StepFailed {
        /// The slot.
        slot: u32,
        /// Tokens seen before the step.
        position: usize,
        /// What happened.
        reason: String,
    },
    /// A step of this session failed before.
    #[error(
        "slot {slot} holds no usable state since a step failed ({reason}); sync the session again, which recomputes it from its first token"
    )]
    Poisoned {
        /// The slot.
        slot: u32,
        /// What happened then.
        reason: String,
    },
    /// The device is gone, and all sessions with it.
    #[error("the device is lost: {0}; open the device and load the model again")]
    DeviceLost(String),
    /// The caller cancelled. The session keeps what was computed.
    #[error("cancelled after {done} of {total} tokens; what was computed is kept")]
    Cancelled {
        /// Tokens in the state.
        done: usize,
        /// Tokens asked for.
        total: usize,
    },
    /// An answer was asked for without a prompt to answer.
    #[error("there is no prompt token left to generate from; sync the whole prompt first")]
    NothingToGenerate,
    /// A generation was continued on a session that has moved on.
    #[error(
        "the session in slot {slot} has changed since this generation began; start a new generation after a sync"
    )]
    StaleGeneration {
        /// The slot.
        slot: u32,
    },
    /// A snapshot contradicts itself.
    #[error(
        "the snapshot holds the state of {position} tokens but lists {tokens}; take a new snapshot"
    )]
    SnapshotMismatch {
        /// Tokens its state has seen.
        position: usize,
        /// Tokens it lists.
        tokens: usize,
    },
}
