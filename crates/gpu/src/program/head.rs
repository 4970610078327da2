//! After the layers: logits, tokens chosen from them, and what is read back.

use std::sync::Arc;

use lily_device::{Limits, Output, Refusal, Score, SegmentOut, SlotId, Step, StepError, StepOut};
use lily_ops::sample::{SampleParams, Sampled, TokenMask, sample};
use lily_ops::{ElementType, Plan};

use super::GpuProgram;
use super::record::{Head, Kind};
use super::slots::LastSampled;
use super::step::Flight;
use crate::driver::{Buffer, Driver, DriverError, Placement};
use crate::encode::Bound;
use crate::kernels::common::{Context, StepShape};
use crate::kernels::sample::{self as kernels, BiasEntry, ResultEntry, SamplerEntry};
use crate::list::{Operand, Recorder};

/// What a segment asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// Nothing.
    Nothing,
    /// A token, chosen on the device.
    Sample,
    /// A token that the host chooses: its log-probabilities are asked for, which are the same to the bit on
    /// every device.
    HostSample,
    /// Its logits are kept.
    Hold,
    /// Scores of all its rows.
    Scores,
    /// Logits of all its rows.
    Logits,
}

impl Asked {
    pub fn of(output: &Output) -> Self {
        match output {
            Output::None => Self::Nothing,
            Output::Sample(params) if on_device(params) => Self::Sample,
            Output::Sample(_) => Self::HostSample,
            Output::Hold => Self::Hold,
            Output::Scores(_) => Self::Scores,
            Output::Logits => Self::Logits,
        }
    }

    /// Whether its logits are read back when the step is submitted.
    pub fn is_read_back(&self) -> bool {
        matches!(self, Self::HostSample | Self::Hold | Self::Scores | Self::Logits)
    }
}

/// Whether the device's kernels choose by these parameters.
fn on_device(params: &SampleParams) -> bool {
    let biases = params.logit_bias.as_ref().map_or(0, |b| b.entries().len());
    params.logprobs.is_none() && biases <= MAX_BIASES
}

/// Biased tokens of one segment for which there is room on the device.
const MAX_BIASES: usize = 512;

/// Masks that are kept on the device.
pub(super) const MASKS: usize = 8;

/// What a list left for a segment.
pub(super) enum Result {
    Nothing,
    Token(u32),
    Failed(String),
}

/// Buffers that outlive a list.
#[derive(Debug)]
pub struct Io {
    /// f32 `[rows][width]`: the residual stream after the layers.
    pub hidden: Operand,
    /// f32 `[outputs][vocabulary]`.
    pub logits: Operand,
    /// u32 `[slots][vocabulary]`: how often each token was generated.
    pub counts: Operand,
    /// A bit a token for each mask.
    masks: Operand,
    /// The masks that are there, by place; the next one goes to `next_mask`.
    known_masks: Vec<Arc<TokenMask>>,
    next_mask: usize,
    /// How each segment's token is chosen, for each step in flight; written by the host.
    params: Vec<Operand>,
    /// Likewise what is added to logits.
    biases: Vec<Operand>,
    /// What each segment's is, for each step in flight; read by the host.
    results: Vec<Operand>,
    vocab: usize,
}

/// Words of a mask.
fn mask_words(vocab: usize) -> usize {
    vocab.div_ceil(32)
}

impl Io {
    fn param_bytes(limits: &Limits) -> u64 {
        ((limits.slots * size_of::<SamplerEntry>()) as u64).next_multiple_of(16)
    }

    /// Bytes that the host writes for a step beside its tables.
    pub fn input_bytes(limits: &Limits) -> u64 {
        let biases = limits.slots.saturating_mul(MAX_BIASES * size_of::<BiasEntry>());
        Self::param_bytes(limits).saturating_add(biases as u64)
    }

    fn result_words(limits: &Limits) -> usize {
        limits.slots.saturating_mul(size_of::<ResultEntry>() / 4)
    }

    /// Bytes of all of them, for two steps in flight.
    pub fn bytes(plan: &Plan, limits: &Limits) -> u64 {
        let words = |n: usize, width: usize| (n as u64).saturating_mul(width as u64 * 4);
        let width = plan.value(plan.hidden).width;
        [
            words(limits.rows, width),
            words(limits.outputs, plan.vocab),
            words(limits.slots, plan.vocab),
            words(MASKS, mask_words(plan.vocab)),
            words(2, Self::result_words(limits)),
        ]
        .into_iter()
        .fold(0, u64::saturating_add)
    }

    /// Allocates them; `inputs` are the ranges for what the host writes.
    pub fn new(
        driver: &mut dyn Driver,
        plan: &Plan,
        limits: &Limits,
        inputs: &[Operand],
    ) -> std::result::Result<Self, DriverError> {
        let mut take = |what: &str, count: usize, element, placement| {
            let bytes = (count as u64 * 4).max(16);
            let buffer = driver.allocate(what, bytes, placement)?;
            Ok::<_, DriverError>(Operand { buffer, offset: 0, bytes, element })
        };
        let (f32, u32) = (ElementType::F32, ElementType::U32);
        let device = Placement::Device;
        let (vocab, width) = (plan.vocab, plan.value(plan.hidden).width);
        let (mut params, mut biases, mut results) = (Vec::new(), Vec::new(), Vec::new());
        for input in inputs {
            let bytes = Self::param_bytes(limits);
            params.push(Operand { bytes, ..*input });
            let offset = input.offset + bytes;
            biases.push(Operand { offset, bytes: input.bytes - bytes, ..*input });
            results.push(take("results", Self::result_words(limits), u32, Placement::Shared)?);
        }
        Ok(Self {
            hidden: take("residual stream", limits.rows * width, f32, device)?,
            logits: take("logits", limits.outputs * vocab, f32, device)?,
            counts: take("token counts", limits.slots * vocab, u32, device)?,
            masks: take("token masks", MASKS * mask_words(vocab), u32, device)?,
            known_masks: Vec::new(),
            next_mask: 0,
            params,
            biases,
            results,
            vocab,
        })
    }

    /// The range of a shared buffer that a list leaves for the host.
    pub fn outputs(&self, tables: usize) -> (Buffer, std::ops::Range<u64>) {
        let results = self.results[tables];
        (results.buffer, results.offset..results.offset + results.bytes)
    }

    /// The place of a mask on the device, where it is copied unless it is there. Lists in flight read theirs
    /// before the copy takes its turn; `used` are the places that the step to come reads.
    fn mask(
        &mut self,
        driver: &mut dyn Driver,
        mask: &Arc<TokenMask>,
        used: &mut [bool; MASKS],
    ) -> std::result::Result<u32, DriverError> {
        if let Some(at) = self.known_masks.iter().position(|m| Arc::ptr_eq(m, mask)) {
            used[at] = true;
            return Ok(at as u32);
        }
        let free = (0..MASKS).map(|i| (self.next_mask + i) % MASKS).find(|at| !used[*at]);
        let at = free
            .filter(|at| *at <= self.known_masks.len())
            .ok_or_else(|| DriverError::Invalid("no room for one more mask in a step".into()))?;
        let count = mask_words(self.vocab);
        let halves = mask.words().iter().flat_map(|w| [*w as u32, (*w >> 32) as u32]);
        let words: Vec<u32> = halves.chain(std::iter::repeat(0)).take(count).collect();
        driver.write(self.masks.buffer, (at * count * 4) as u64, bytemuck::cast_slice(&words))?;
        self.next_mask = (at + 1) % MASKS;
        match self.known_masks.get_mut(at) {
            Some(known) => *known = Arc::clone(mask),
            None => self.known_masks.push(Arc::clone(mask)),
        }
        used[at] = true;
        Ok(at as u32)
    }

    /// Writes how each segment's token is chosen.
    pub fn write(
        &mut self,
        driver: &mut dyn Driver,
        tables: usize,
        step: &Step,
        on_host: bool,
    ) -> std::result::Result<(), DriverError> {
        let (mut entries, mut biases) = (Vec::new(), Vec::<BiasEntry>::new());
        let mut row = 0;
        let mut used = [false; MASKS];
        for segment in &step.segments {
            let sampled = match &segment.output {
                Output::Sample(params) if !on_host => Some(params),
                _ => None,
            };
            entries.push(match sampled {
                None => SamplerEntry::none(true),
                Some(params) => {
                    let mask = match &params.mask {
                        Some(mask) => Some(self.mask(driver, mask, &mut used)?),
                        None => None,
                    };
                    let added = params.logit_bias.as_ref().map_or(&[][..], |b| b.entries());
                    let first_bias = biases.len() as u32;
                    biases.extend(added.iter().map(|&(id, value)| BiasEntry { id, value }));
                    SamplerEntry {
                        first_bias,
                        biases: added.len() as u32,
                        ..SamplerEntry::new(params, row, true, mask)
                    }
                }
            });
            // Without read-back no segment asks for more than its last row.
            row += u32::from(!matches!(segment.output, Output::None));
        }
        let (params, list) = (self.params[tables], self.biases[tables]);
        driver.write(params.buffer, params.offset, bytemuck::cast_slice(&entries))?;
        driver.write(list.buffer, list.offset, bytemuck::cast_slice(&biases))
    }

    /// The results of a list of `segments` that chose tokens.
    pub fn results(
        &self,
        driver: &mut dyn Driver,
        tables: usize,
        segments: usize,
    ) -> std::result::Result<Vec<Result>, DriverError> {
        let at = self.results[tables];
        let mut entries: Vec<ResultEntry> = vec![bytemuck::Zeroable::zeroed(); segments];
        driver.read(at.buffer, at.offset, bytemuck::cast_slice_mut(&mut entries))?;
        let result = |e: &ResultEntry| match e.status {
            0 => Result::Token(e.token),
            _ => Result::Failed(not_finite()),
        };
        Ok(entries.iter().map(result).collect())
    }

    /// Records what follows the logits.
    pub fn head(&self, r: &mut Recorder, c: &Context, b: &mut Bound, kind: &Kind) {
        match kind.head {
            Head::Rows { .. } => {}
            Head::Finish => {
                r.op = "finish";
                kernels::finish(r, c);
            }
            Head::Sample { greedy } => {
                r.op = "sample";
                let rows = u64::from(c.step.outputs.max(1));
                let choices = kernels::Choices {
                    logits: Operand { bytes: rows * self.vocab as u64 * 4, ..self.logits },
                    vocab: self.vocab as u32,
                    params: self.params[kind.tables],
                    masks: self.masks,
                    biases: self.biases[kind.tables],
                    counts: self.counts,
                    results: self.results[kind.tables],
                    greedy,
                };
                kernels::sample(r, c, b.scratch, choices);
            }
        }
    }
}

fn not_finite() -> String {
    "the output head left a logit that is no number, or none that may be chosen; the checkpoint or the device's memory may be damaged".into()
}

impl GpuProgram {
    /// What follows the layers of a step.
    pub(super) fn head_of(&self, step: &Step, alone: bool) -> Head {
        let params = || {
            step.segments.iter().filter_map(|s| match &s.output {
                Output::Sample(params) => Some(params),
                _ => None,
            })
        };
        match alone || params().next().is_none() {
            true => Head::Finish,
            false => {
                Head::Sample { greedy: params().all(|p| p.temperature == 0.0 || p.top_k == 1) }
            }
        }
    }

    /// Logits of `count` output rows of the step just run, from row `first` of them on.
    fn rows_of_logits(
        &mut self,
        flight: &Flight,
        shape: &StepShape,
        first: usize,
        count: usize,
    ) -> std::result::Result<Vec<f32>, StepError> {
        let shape = StepShape { outputs: count as u32, ..shape.clone() };
        let kind = Kind { shape, tables: flight.tables, head: Head::Rows { first: first as u32 } };
        let failed = |this: &mut Self, e| this.failed(&flight.slots, e);
        // The layers have run: nothing can be refused any more.
        let list = self.list(kind).map_err(|e| match e {
            StepError::Refused(why) => failed(self, DriverError::Invalid(why.to_string())),
            e => e,
        })?;
        let submission = list.submit(&mut *self.driver).map_err(|e| failed(self, e))?;
        self.driver.wait(submission).map_err(|e| failed(self, e))?;
        let mut logits = vec![0f32; count * self.recording.plan().vocab];
        let buffer = self.io.logits.buffer;
        self.driver
            .read(buffer, 0, bytemuck::cast_slice_mut(&mut logits))
            .map_err(|e| failed(self, e))?;
        Ok(logits)
    }

    /// Computes the logits that a step asked for tile by tile, and does on the host what was asked.
    pub(super) fn read_back(
        &mut self,
        step: &Step,
        flight: &Flight,
        shape: &StepShape,
    ) -> std::result::Result<StepOut, StepError> {
        self.driver.wait(flight.submission).map_err(|e| self.failed(&flight.slots, e))?;
        let vocab = self.recording.plan().vocab;
        // Segment and row within it of each output row.
        let owners: Vec<(usize, usize)> = step
            .segments
            .iter()
            .zip(&shape.segments)
            .enumerate()
            .flat_map(|(i, (s, rows))| s.output.rows(*rows as usize).map(move |row| (i, row)))
            .collect();
        let mut segments: Vec<SegmentOut> =
            step.segments.iter().map(|s| empty(&s.output)).collect();
        let mut first = 0;
        for tile in owners.chunks(self.limits.outputs) {
            let mut logits = self.rows_of_logits(flight, shape, first, tile.len())?;
            first += tile.len();
            for (&(segment, row), logits) in tile.iter().zip(logits.chunks_mut(vocab)) {
                let slot = step.segments[segment].slot;
                if matches!(segments[segment], SegmentOut::Failed(_)) {
                    continue;
                }
                let output = &step.segments[segment].output;
                let taken = self.take_row(slot, output, row, logits, &mut segments[segment])?;
                if let Err(why) = taken {
                    self.slots.live_mut(slot).poisoned = true;
                    segments[segment] = SegmentOut::Failed(why);
                }
            }
        }
        let failed = segments.iter().filter(|s| matches!(s, SegmentOut::Failed(_))).count();
        match segments.first() {
            Some(SegmentOut::Failed(reason)) if failed == segments.len() => {
                Err(StepError::Failed { slots: flight.slots.clone(), reason: reason.clone() })
            }
            _ => Ok(StepOut { segments }),
        }
    }

    /// Does with one row of logits what its segment asks for.
    fn take_row(
        &mut self,
        slot: SlotId,
        output: &Output,
        row: usize,
        logits: &mut [f32],
        out: &mut SegmentOut,
    ) -> std::result::Result<std::result::Result<(), String>, StepError> {
        if !logits.iter().all(|x| x.is_finite()) {
            return Ok(Err(not_finite()));
        }
        match (output, out) {
            (Output::Scores(targets), SegmentOut::Scores(list)) => {
                list.push(score(logits, targets[row]));
            }
            (Output::Logits, SegmentOut::Logits(all)) => all.extend_from_slice(logits),
            (Output::Hold, _) => self.slots.live_mut(slot).held = Some(logits.to_vec()),
            (Output::Sample(params), out) => match self.choose(slot, params, logits)? {
                Some(sampled) => *out = SegmentOut::Sampled(sampled),
                None => return Ok(Err("no token may be chosen: the penalties leave none".into())),
            },
            _ => {}
        }
        Ok(Ok(()))
    }

    /// Chooses a token on the host and tells the device.
    fn choose(
        &mut self,
        slot: SlotId,
        params: &SampleParams,
        logits: &mut [f32],
    ) -> std::result::Result<Option<Sampled>, StepError> {
        let live = self.slots.live_mut(slot);
        let Some(sampled) = sample(logits, params, &live.counts, live.generated) else {
            return Ok(None);
        };
        live.last = LastSampled::Known(sampled.id);
        if let Some(undo) = &mut live.undo {
            undo.sampled = Some(sampled.id);
        }
        live.generated += 1;
        *live.counts.entry(sampled.id).or_default() += 1;
        live.counted = true;
        let count = live.counts[&sampled.id];
        let vocab = logits.len() as u64;
        let at = (slot.0 as u64 * vocab + u64::from(sampled.id)) * 4;
        let buffer = self.io.counts.buffer;
        self.driver.write(buffer, at, &count.to_le_bytes()).map_err(|e| self.broken(e))?;
        self.push_header(slot)?;
        Ok(Some(sampled))
    }

    /// Chooses a token from a slot's held logits.
    pub(super) fn sample_held(
        &mut self,
        slot: SlotId,
        params: &SampleParams,
    ) -> std::result::Result<Sampled, StepError> {
        self.slots.get(slot)?;
        self.check_params(params)?;
        let held = self.slots.live_mut(slot).held.clone();
        let mut logits = held.ok_or_else(|| {
            StepError::from(Refusal::Invalid(format!("slot {} holds no logits", slot.0)))
        })?;
        let chosen = self.choose(slot, params, &mut logits)?;
        if chosen.is_some() {
            self.slots.live_mut(slot).held = None;
        }
        chosen.ok_or_else(|| {
            Refusal::Invalid("no token may be chosen: the penalties leave none".into()).into()
        })
    }
}

/// A segment's result before any row of logits.
fn empty(output: &Output) -> SegmentOut {
    match output {
        Output::Scores(_) => SegmentOut::Scores(Vec::new()),
        Output::Logits => SegmentOut::Logits(Vec::new()),
        Output::None | Output::Hold | Output::Sample(_) => SegmentOut::None,
    }
}

fn score(logits: &[f32], target: u32) -> Score {
    let top1 = lily_ops::sample::argmax(logits).unwrap_or(0);
    let max = f64::from(logits[top1 as usize]);
    let sum: f64 = logits.iter().map(|x| (f64::from(*x) - max).exp()).sum();
    let logprob = |id: u32| (f64::from(logits[id as usize]) - max - sum.ln()) as f32;
    Score { logprob: logprob(target), top1, top1_logprob: logprob(top1) }
}
