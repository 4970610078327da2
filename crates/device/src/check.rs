//! The rules of a step, the same on every device: checked before anything changes.

use lily_ops::plan::PAGE_TOKENS;
use lily_ops::sample::SampleParams;

use crate::program::Limits;
use crate::step::{Input, Output, Refusal, SlotId, Step};

/// Steps that may be in flight: submitted and not yet waited for.
pub const MAX_IN_FLIGHT: usize = 2;

/// What a step's rules ask of the slots.
pub trait StepSlots {
    /// Refuses a slot that does not exist or holds no usable state.
    fn usable(&self, slot: SlotId) -> Result<(), Refusal>;

    /// Whether a token was sampled in the last step of a usable slot.
    fn has_sampled(&self, slot: SlotId) -> bool;

    /// Tokens that a usable slot has seen.
    fn position(&self, slot: SlotId) -> usize;

    /// KV pages that a usable slot needs for `rows` more tokens.
    fn pages_needed(&self, slot: SlotId, rows: usize) -> usize;

    /// KV pages not in use.
    fn free_pages(&self) -> usize;
}

/// Checks a step that is submitted while `in_flight` others are.
pub fn check_step(
    step: &Step,
    vocab: usize,
    limits: &Limits,
    in_flight: usize,
    slots: &impl StepSlots,
) -> Result<(), Refusal> {
    let invalid = |what: String| Err(Refusal::Invalid(what));
    if in_flight >= MAX_IN_FLIGHT {
        return invalid(format!("{MAX_IN_FLIGHT} steps are in flight; wait for one first"));
    }
    if step.segments.is_empty() {
        return invalid("the step has no segments".into());
    }
    let beyond = |id: &u32| *id as usize >= vocab;
    let (mut rows, mut need) = (0, 0);
    for (i, segment) in step.segments.iter().enumerate() {
        let slot = segment.slot;
        slots.usable(slot)?;
        if step.segments[..i].iter().any(|s| s.slot == slot) {
            return invalid(format!("two segments name slot {}", slot.0));
        }
        let count = match &segment.input {
            Input::Tokens(list) => {
                if let Some(at) = list.iter().position(beyond) {
                    let id = list[at];
                    return invalid(format!("token {at} is {id}; the vocabulary has {vocab} ids"));
                }
                list.len()
            }
            Input::LastSampled if !slots.has_sampled(slot) => {
                return invalid(format!("nothing was sampled in slot {} yet", slot.0));
            }
            Input::LastSampled => 1,
        };
        if count == 0 {
            return invalid(format!("the segment of slot {} has no tokens", slot.0));
        }
        match &segment.output {
            Output::Scores(targets) if targets.len() != count || targets.iter().any(beyond) => {
                return invalid(format!(
                    "{} targets for {count} tokens, each below {vocab}, are needed",
                    targets.len()
                ));
            }
            Output::Sample(params) => check_params(params, vocab)?,
            _ => {}
        }
        check_room(limits, slot, slots.position(slot).saturating_add(count))?;
        need += slots.pages_needed(slot, count);
        rows += count;
    }
    if rows > limits.rows {
        let most = limits.rows;
        return invalid(format!("{rows} tokens in one step; the program was prepared for {most}"));
    }
    let free = slots.free_pages();
    match need <= free {
        true => Ok(()),
        false => Err(Refusal::OutOfPages { need, free }),
    }
}

/// Checks that a slot can hold that many tokens.
pub fn check_room(limits: &Limits, slot: SlotId, tokens: usize) -> Result<(), Refusal> {
    // Where there are fewer pages than that, they run out.
    let most = limits.context.div_ceil(PAGE_TOKENS).saturating_mul(PAGE_TOKENS);
    match tokens <= most {
        true => Ok(()),
        false => Err(Refusal::Invalid(format!(
            "slot {} would hold {tokens} tokens; the program was prepared for {most} a slot",
            slot.0
        ))),
    }
}

/// Checks sampling parameters' ranges, and that their mask leaves a token.
pub fn check_params(params: &SampleParams, vocab: usize) -> Result<(), Refusal> {
    params.check(vocab).map_err(Refusal::Invalid)?;
    match &params.mask {
        Some(mask) if !(0..vocab as u32).any(|id| mask.contains(id)) => {
            Err(Refusal::Invalid("the mask allows no token of the vocabulary".into()))
        }
        _ => Ok(()),
    }
}
