use std::sync::Arc;

use lily_ops::sample::{SampleParams, Sampled, TokenCounts};
use lily_ops::{Case, CaseOutputs, Plan, SlotState};

use crate::step::{Refusal, SlotId, Step, StepError, StepOut, Ticket};
use crate::times::{Measure, OperationTimes};
use crate::weights::Weight;

/// How much a program is prepared for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Slots: timelines that can be alive at once.
    pub slots: usize,
    /// Tokens of one slot; the last page of a full one may be filled.
    pub context: usize,
    /// Tokens of one step, all segments together.
    pub rows: usize,
    /// Rows of logits held at once; more are computed one tile after another.
    pub outputs: usize,
    /// KV pages of 256 tokens, shared by all slots.
    pub pages: usize,
    /// Whether a slot's last step of one token can be [taken back](Program::undo_last). It may take memory
    /// for the state before it, and the time of a copy a step.
    pub undo: bool,
}

impl Limits {
    /// Limits for `slots` timelines of `context` tokens each, in steps of at most `rows` tokens, without undo.
    /// Absurd numbers saturate, and a device's budget then refuses them.
    pub fn new(slots: usize, context: usize, rows: usize) -> Self {
        let pages = slots.saturating_mul(context.div_ceil(lily_ops::plan::PAGE_TOKENS));
        let outputs = rows.min(32).max(slots);
        Self { slots, context, rows, outputs, pages, undo: false }
    }

    /// KV pages that one slot can hold.
    pub fn slot_pages(&self) -> usize {
        self.context.div_ceil(lily_ops::plan::PAGE_TOKENS).min(self.pages)
    }

    /// Tokens that one slot can hold.
    pub fn slot_tokens(&self) -> usize {
        self.slot_pages().saturating_mul(lily_ops::plan::PAGE_TOKENS)
    }
}

/// Bytes a program allocates, computed before it does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryNeed {
    /// KV pages.
    pub kv: u64,
    /// Recurrent and convolution state of all slots, and what it was before where steps can be taken back.
    pub state: u64,
    /// Values between operations, logits and the device's own work space.
    pub scratch: u64,
    /// Copies of weights; 0 where the mapped checkpoint is used in place.
    pub weights: u64,
}

impl MemoryNeed {
    /// All of it, at most the largest number there is.
    pub fn total(&self) -> u64 {
        [self.state, self.scratch, self.weights].into_iter().fold(self.kv, u64::saturating_add)
    }
}

/// The memory that a device's programs are made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryLimit {
    /// The host's: what the machine, or the container that the process runs in, has.
    Host,
    /// The host's, and at most so many bytes of it at present.
    HostWithin(u64),
    /// The device's own, so many bytes at present.
    Own(u64),
}

/// Why a plan cannot be prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// An operation has no kernel for these types and shapes.
    #[error("{device} cannot run {operations}")]
    Unsupported {
        /// The device.
        device: String,
        /// Each operation with its types and shapes.
        operations: String,
    },
    /// The plan, its weights or the limits contradict each other.
    #[error("the plan cannot be prepared: {0}")]
    Invalid(String),
    /// There is not enough memory.
    #[error("{0}")]
    OutOfMemory(String),
}

/// What a program counted since it was prepared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Steps run.
    pub steps: u64,
    /// Bytes read of each weight of the plan, by its index. A matrix that serves many rows of a step counts
    /// as often as it is fetched.
    pub weight_bytes: Vec<u64>,
}

/// A kind of processor that runs plans.
pub trait Device: Send + Sync {
    /// Name, with what matters of the machine: `cpu (avx512-vnni, 2 threads)`.
    fn name(&self) -> String;

    /// Whether [`submit`](Program::submit) returns before its step has run, so that keeping two in flight
    /// saves time.
    fn overlaps(&self) -> bool {
        false
    }

    /// Rows up to which a step runs in another form than with more, if there is such a number: then what a segment comes
    /// to hangs, by roundings, on what it shares the step with. It does not where a step has either segments of one token, at most
    /// so many; or one segment of at most so many tokens; or segments that are all longer.
    fn few_rows(&self) -> Option<usize> {
        None
    }

    /// Bytes that [`prepare`](Self::prepare) would allocate.
    fn memory(&self, plan: &Plan, limits: &Limits) -> MemoryNeed;

    /// What a program may take at present, other programs of the device being as they are. What a device does
    /// not tell is the host's.
    fn memory_limit(&self) -> MemoryLimit {
        MemoryLimit::Host
    }

    /// Chooses kernels, lays out memory and returns a program. `weights` are the plan's, in its order.
    fn prepare(
        &self,
        plan: Arc<Plan>,
        weights: Vec<Weight>,
        limits: Limits,
    ) -> Result<Box<dyn Program>, PrepareError>;

    /// Runs one operation alone, as conformance tests do.
    fn evaluate(&self, case: &Case) -> Result<CaseOutputs, PrepareError>;
}

/// The state of one slot, away from the device: exact, and the same bytes on every device.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// Tokens seen.
    pub position: usize,
    /// The last token that was sampled, if any.
    pub last_sampled: Option<u32>,
    /// Tokens sampled since the answer began.
    pub generated: u64,
    /// How often each of them was.
    pub counts: TokenCounts,
    /// `[recurrent layer][head][dv][dk]` f32, little-endian.
    pub recurrent: Vec<u8>,
    /// `[recurrent layer][taps − 1][channels]` in the plan's element type.
    pub conv: Vec<u8>,
    /// For each attention layer K, then V: `[kv head][position][head_dim]` in the plan's element type.
    pub kv: Vec<u8>,
}

impl Snapshot {
    /// Bytes it takes.
    pub fn bytes(&self) -> usize {
        self.recurrent.len() + self.conv.len() + self.kv.len()
    }
}

/// K and V of the tokens `from..to` of a slot, as in [`Snapshot::kv`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPart<'a> {
    /// The first token.
    pub from: usize,
    /// Behind the last token.
    pub to: usize,
    /// For each attention layer K, then V: `[kv head][token][head_dim]` in the plan's element type.
    pub bytes: &'a [u8],
}

impl KvPart<'_> {
    /// Checks that parts are the cache of `position` tokens in order, of `per_token` bytes each.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn check(parts: &[Self], position: usize, per_token: usize) -> Result<(), String> {
        let mut at = 0;
        for part in parts {
            let tokens = part.to.checked_sub(part.from).filter(|_| part.from == at);
            if tokens.and_then(|n| n.checked_mul(per_token)) != Some(part.bytes.len()) {
                return Err(format!(
                    "{} bytes are not the cache of the tokens {} to {} behind {at} others, of {per_token} bytes each; the snapshot is of another model or precision",
                    part.bytes.len(),
                    part.from,
                    part.to
                ));
            }
            at = part.to;
        }
        match at == position {
            true => Ok(()),
            false => Err(format!("the cache of {at} tokens came with the state of {position}")),
        }
    }
}

/// A prepared plan and the state of its slots.
pub trait Program: Send {
    /// The plan.
    fn plan(&self) -> &Plan;

    /// The limits it was prepared for.
    fn limits(&self) -> Limits;

    /// Whether the host takes part in this step, so that none may be in flight when it is submitted. It has run
    /// when [`submit`](Self::submit) returns.
    fn alone(&self, step: &Step) -> bool;

    /// Hands a step to the device without waiting. At most two may be in flight, and none beside one that runs
    /// [alone](Self::alone).
    fn submit(&mut self, step: Step) -> Result<Ticket, StepError>;

    /// Waits for a submitted step.
    fn wait(&mut self, ticket: Ticket) -> Result<StepOut, StepError>;

    /// Chooses a token from the logits that a step with [`Output::Hold`](crate::Output::Hold) left on the device.
    fn sample(&mut self, slot: SlotId, params: &SampleParams) -> Result<Sampled, StepError>;

    /// Takes back the last step of a slot, one of a single token: position, pages, recurrent state, the token
    /// for [`LastSampled`](crate::Input::LastSampled), the sampler's counter and token counts are as if
    /// it had never run. Logits held before it are not held again.
    ///
    /// This is for the surplus step of two in flight, when the first one's token turns out to end the answer.
    ///
    /// # Errors
    /// Refused without [`Limits::undo`], for a step of several tokens, before the step was waited for, for the
    /// step before the last, and after [`reset`](Self::reset), [`restore`](Self::restore) or
    /// [`begin_answer`](Self::begin_answer).
    fn undo_last(&mut self, slot: SlotId) -> Result<(), StepError>;

    /// Forgets everything of a slot and frees its pages. A poisoned slot is usable again.
    fn reset(&mut self, slot: SlotId) -> Result<(), StepError>;

    /// Starts an answer in a slot, or takes one up that has these tokens already: the sampler's counter and
    /// token counts are as if they had been sampled. Nothing else changes.
    fn begin_answer(&mut self, slot: SlotId, answered: &[u32]) -> Result<(), StepError>;

    /// Tokens a slot has seen.
    fn position(&self, slot: SlotId) -> Result<usize, StepError>;

    /// Copies a slot's state off the device.
    fn snapshot(&mut self, slot: SlotId) -> Result<Snapshot, StepError> {
        self.snapshot_behind(slot, 0)
    }

    /// As [`snapshot`](Self::snapshot), with K and V of the tokens from `from` on only: what is before them an
    /// earlier snapshot of the slot has.
    fn snapshot_behind(&mut self, slot: SlotId, from: usize) -> Result<Snapshot, StepError>;

    /// Puts a slot into a state copied before, from a program of the same plan.
    fn restore(&mut self, slot: SlotId, snapshot: &Snapshot) -> Result<(), StepError> {
        let whole = KvPart { from: 0, to: snapshot.position, bytes: &snapshot.kv };
        self.restore_parts(slot, snapshot, &[whole])
    }

    /// As [`restore`](Self::restore), with K and V in parts, ascending, in place of the snapshot's own.
    fn restore_parts(
        &mut self,
        slot: SlotId,
        snapshot: &Snapshot,
        kv: &[KvPart<'_>],
    ) -> Result<(), StepError>;

    /// Whether states inside a step can be [kept](Self::mark); else they are there at the ends of steps only.
    fn marks(&self) -> bool {
        false
    }

    /// Has the next step of a slot copy the recurrent state behind so many of its tokens each, in place of what was
    /// asked for before. Those that the step does not go beyond are passed over.
    ///
    /// # Errors
    /// The device cannot do it, or the numbers do not ascend from 1.
    fn mark(&mut self, _slot: SlotId, rows: &[usize]) -> Result<(), StepError> {
        match rows.is_empty() {
            true => Ok(()),
            false => {
                Err(Refusal::Invalid("this device keeps no state inside a step".into()).into())
            }
        }
    }

    /// The copies that the last step of a slot made, in order, once: as [`snapshot_behind`](Self::snapshot_behind)
    /// there, K and V of each from where the one before it ends.
    fn take_marked(&mut self, _slot: SlotId, _from: usize) -> Result<Vec<Snapshot>, StepError> {
        Ok(Vec::new())
    }

    /// A slot's state in the canonical form of the reference, for tests.
    fn export(&mut self, slot: SlotId) -> Result<SlotState, StepError>;

    /// KV pages not in use.
    fn free_pages(&self) -> usize;

    /// Bytes allocated.
    fn memory(&self) -> MemoryNeed;

    /// Highest use of scratch so far, in bytes.
    fn scratch_high_water(&self) -> u64;

    /// What was counted so far.
    fn counters(&self) -> Counters;

    /// From now on measures this of every step, and forgets what was measured before. Results stay the same;
    /// steps may take several times as long and more memory.
    ///
    /// # Errors
    /// The device cannot measure it.
    fn measure(&mut self, what: Measure) -> Result<(), StepError> {
        match what {
            Measure::Nothing => Ok(()),
            _ => Err(Refusal::Invalid("this device does not time its operations".into()).into()),
        }
    }

    /// What was measured since it began.
    fn operation_times(&self) -> OperationTimes {
        OperationTimes::default()
    }

    /// Submits a step and waits for it.
    fn run(&mut self, step: Step) -> Result<StepOut, StepError> {
        let ticket = self.submit(step)?;
        self.wait(ticket)
    }
}
