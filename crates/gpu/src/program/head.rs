//! After the layers: logits, tokens chosen from them, and what is read back.

use lily_device::{Limits, Output, Score, SegmentOut, SlotId, Step, StepError, StepOut, Refusal};
use lily_ops::sample::{SampleParams, Sampled, sample};
use lily_ops::{ElementType, Plan};

use super::record::{Head, Kind};
use super::slots::{LastSampled, Slots};
use super::step::Flight;
use super::GpuProgram;
use crate::driver::{Buffer, Driver, DriverError, Placement};
use crate::encode::Bound;
use crate::kernels::common::{Context, StepShape};
use crate::kernels::sample as kernels;
use crate::list::{Operand, Recorder};

/// What a segment asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// Nothing.
    Nothing,
    /// A token, chosen on the device.
    Sample,
    /// A token that the host chooses: its parameters have a part that the device's kernels have not.
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
        matches!(self, Self::HostSample | Self::Scores | Self::Logits)
    }
}

/// Whether the device's kernels choose by these parameters.
fn on_device(params: &SampleParams) -> bool {
    params.mask.is_none() && params.logit_bias.is_empty() && params.logprobs.is_none()
}

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
    /// f32 `[slots][vocabulary]`: held logits.
    pub held: Operand,
    /// u32 `[slots][vocabulary]`: how often each token was generated.
    pub counts: Operand,
    /// How each segment's token is chosen, for each step in flight; written by the host.
    params: Vec<Operand>,
    /// What each segment's is, for each step in flight; read by the host.
    results: Vec<Operand>,
    vocab: usize,
}

impl Io {
    /// Bytes that the host writes for a step beside its tables.
    pub fn input_bytes(limits: &Limits) -> u64 {
        (limits.slots * size_of::<kernels::SamplerEntry>()) as u64
    }

    fn result_bytes(limits: &Limits) -> u64 {
        ((limits.slots * size_of::<kernels::ResultEntry>()) as u64).next_multiple_of(16)
    }

    /// Bytes of all of them, for two steps in flight.
    pub fn bytes(plan: &Plan, limits: &Limits) -> u64 {
        let rows = |n: usize, width: usize| (n as u64).saturating_mul(width as u64 * 4);
        let width = plan.value(plan.hidden).width;
        rows(limits.rows, width)
            .saturating_add(rows(limits.outputs, plan.vocab))
            .saturating_add(rows(limits.slots, 2 * plan.vocab))
            .saturating_add(2 * Self::result_bytes(limits))
    }

    /// Allocates them; `params` are the ranges for what the host writes.
    pub fn new(
        driver: &mut dyn Driver,
        plan: &Plan,
        limits: &Limits,
        params: &[Operand],
    ) -> std::result::Result<Self, DriverError> {
        let mut take = |what: &str, count: usize, element, placement| {
            let bytes = (count as u64 * 4).max(16);
            let buffer = driver.allocate(what, bytes, placement)?;
            Ok::<_, DriverError>(Operand { buffer, offset: 0, bytes, element })
        };
        let (f32, u32) = (ElementType::F32, ElementType::U32);
        let device = Placement::Device;
        let (vocab, width) = (plan.vocab, plan.value(plan.hidden).width);
        let words = (Self::result_bytes(limits) / 4) as usize;
        let mut results = Vec::new();
        for _ in params {
            results.push(take("results", words, u32, Placement::Shared)?);
        }
        Ok(Self {
            hidden: take("residual stream", limits.rows * width, f32, device)?,
            logits: take("logits", limits.outputs * vocab, f32, device)?,
            held: take("held logits", limits.slots * vocab, f32, device)?,
            counts: take("token counts", limits.slots * vocab, u32, device)?,
            params: params.to_vec(),
            results,
            vocab,
        })
    }

    /// The range of a shared buffer that a list leaves for the host.
    pub fn outputs(&self, tables: usize) -> (Buffer, std::ops::Range<u64>) {
        let results = self.results[tables];
        (results.buffer, results.offset..results.offset + results.bytes)
    }

    /// Writes how each segment's token is chosen.
    pub fn write(
        &self,
        driver: &mut dyn Driver,
        tables: usize,
        step: &Step,
        slots: &Slots,
    ) -> std::result::Result<(), DriverError> {
        let _ = slots;
        let entries: Vec<kernels::SamplerEntry> = step
            .segments
            .iter()
            .map(|s| match &s.output {
                Output::Sample(params) if on_device(params) => kernels::SamplerEntry::of(params),
                Output::Hold => kernels::SamplerEntry::hold(),
                _ => kernels::SamplerEntry::none(),
            })
            .collect();
        let at = self.params[tables];
        driver.write(at.buffer, at.offset, bytemuck::cast_slice(&entries))
    }

    /// The results of a list of `segments`.
    pub fn results(
        &self,
        driver: &mut dyn Driver,
        tables: usize,
        segments: usize,
    ) -> std::result::Result<Vec<Result>, DriverError> {
        let at = self.results[tables];
        let mut entries = vec![kernels::ResultEntry::default(); segments];
        driver.read(at.buffer, at.offset, bytemuck::cast_slice_mut(&mut entries))?;
        Ok(entries.iter().map(|e| match e.status {
            kernels::STATUS_TOKEN => Result::Token(e.token),
            kernels::STATUS_NONE => Result::Nothing,
            _ => Result::Failed(not_finite()),
        }).collect())
    }

    /// Records what follows the logits.
    pub fn head(
        &self,
        r: &mut Recorder,
        c: &Context,
        _b: &mut Bound,
        kind: &Kind,
    ) -> std::result::Result<(), String> {
        let (params, results) = (self.params[kind.tables], self.results[kind.tables]);
        match kind.head {
            Head::Rows { .. } => {}
            Head::Finish => {
                r.op = "finish";
                kernels::finish(r, c, results);
            }
            Head::Sample { greedy, holds } => {
                r.op = "sample";
                let rows = u64::from(c.step.outputs);
                let logits = Operand { bytes: rows * self.vocab as u64 * 4, ..self.logits };
                let held = holds.then_some(self.held);
                kernels::sample(r, c, _b.scratch, &kernels::Sample { logits, params, counts: self.counts, results, held, greedy, vocab: self.vocab as u32 });
            }
            Head::Held => {}
        }
        Ok(())
    }
}

fn not_finite() -> String {
    "the output head left a logit that is no number, or none that may be chosen; the checkpoint or the device's memory may be damaged".into()
}

impl GpuProgram {
    /// What follows the layers of a step.
    pub(super) fn head_of(&self, step: &Step, alone: bool) -> Head {
        let mut outputs = step.segments.iter().map(|s| &s.output);
        let holds = outputs.clone().any(|o| matches!(o, Output::Hold));
        let samples = outputs.clone().any(|o| matches!(o, Output::Sample(_)));
        if alone || !(holds || samples) {
            return Head::Finish;
        }
        let greedy = outputs.all(|o| match o {
            Output::Sample(p) => kernels::is_greedy(p),
            _ => true,
        });
        Head::Sample { greedy, holds }
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
        let list = self.list(kind)?;
        let failed = |this: &mut Self, e| this.failed(&flight.slots, e);
        let submission = self.driver.submit(&list).map_err(|e| failed(self, e))?;
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
        let mut segments: Vec<SegmentOut> = step.segments.iter().map(|s| empty(&s.output)).collect();
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
            (Output::Hold, _) => {
                let at = slot.0 as u64 * logits.len() as u64 * 4;
                let buffer = self.io.held.buffer;
                self.driver
                    .write(buffer, at, bytemuck::cast_slice(logits))
                    .map_err(|e| self.broken(e))?;
                self.slots.live_mut(slot).holds = true;
            }
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
        let live = self.slots.live_mut(slot);
        if !live.holds {
            return Err(Refusal::Invalid(format!("slot {} holds no logits", slot.0)).into());
        }
        live.holds = false;
        let mut logits = vec![0f32; self.recording.plan().vocab];
        let at = slot.0 as u64 * logits.len() as u64 * 4;
        let buffer = self.io.held.buffer;
        self.driver
            .read(buffer, at, bytemuck::cast_slice_mut(&mut logits))
            .map_err(|e| self.broken(e))?;
        let chosen = self.choose(slot, params, &mut logits)?;
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
