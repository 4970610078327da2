//! What the program knows of each slot on the host: position, pages, sampler state.

use lily_device::{Limits, PagePool, Refusal, SlotId, StepSlots};
use lily_ops::plan::PAGE_TOKENS;
use lily_ops::sample::TokenCounts;

/// What the sampler of a slot was before its last step.
#[derive(Debug)]
pub(super) struct Undo {
    /// The token sampled last then.
    pub last_sampled: Option<u32>,
    /// Tokens sampled in the answer then.
    pub generated: u64,
    /// The token that the step sampled.
    pub sampled: Option<u32>,
}

/// One timeline.
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// Tokens seen.
    pub position: usize,
    /// Its pages, by position.
    pub pages: Vec<u32>,
    /// The last token sampled.
    pub last_sampled: Option<u32>,
    /// Tokens sampled in this answer.
    pub generated: u64,
    /// How often each of them was.
    pub counts: TokenCounts,
    /// Room for the logits of one row, kept for a later choice.
    pub held: Vec<f32>,
    /// Whether `held` is that of the last step.
    pub holds: bool,
    /// A step failed in it: its state is of no use until it is reset or restored.
    pub poisoned: bool,
    /// How to take the last step back.
    pub undo: Option<Undo>,
}

impl Slot {
    /// Pages missing for `rows` more tokens.
    pub fn pages_needed(&self, rows: usize) -> usize {
        (self.position + rows).div_ceil(PAGE_TOKENS).saturating_sub(self.pages.len())
    }

    /// Remembers the sampler as it is before a step.
    pub fn remember(&mut self) {
        let (last_sampled, generated) = (self.last_sampled, self.generated);
        self.undo = Some(Undo { last_sampled, generated, sampled: None });
    }

    /// Makes the sampler that of an answer with these tokens.
    pub fn begin_answer(&mut self, answered: &[u32]) {
        self.undo = None;
        self.generated = answered.len() as u64;
        self.counts.clear();
        for id in answered {
            *self.counts.entry(*id).or_default() += 1;
        }
    }

    /// Notes a sampled token.
    pub fn sampled(&mut self, id: u32) {
        self.last_sampled = Some(id);
        self.generated += 1;
        *self.counts.entry(id).or_default() += 1;
        if let Some(undo) = &mut self.undo {
            undo.sampled = Some(id);
        }
    }

    /// Makes the sampler what it was before the step.
    fn take_back(&mut self, undo: Undo) {
        self.last_sampled = undo.last_sampled;
        self.generated = undo.generated;
        self.holds = false;
        if let Some(id) = undo.sampled
            && let Some(count) = self.counts.get_mut(&id)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&id);
            }
        }
    }
}

/// All slots, and the pages they share.
#[derive(Debug)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    pool: PagePool,
}

impl Slots {
    pub fn new(limits: &Limits) -> Self {
        let slots = (0..limits.slots).map(|_| Slot::default()).collect();
        Self { slots, pool: PagePool::new(limits.pages) }
    }

    /// Bytes of the logits that slots keep room for.
    pub fn held_bytes(&self) -> u64 {
        self.slots.iter().map(|s| s.held.capacity() as u64 * 4).sum()
    }

    /// A slot that exists and is usable.
    pub fn get(&self, slot: SlotId) -> Result<&Slot, Refusal> {
        let found = self.exists(slot)?;
        match found.poisoned {
            true => Err(Refusal::Invalid(format!(
                "a step failed in slot {}; reset or restore it first",
                slot.0
            ))),
            false => Ok(found),
        }
    }

    fn exists(&self, slot: SlotId) -> Result<&Slot, Refusal> {
        let slots = self.slots.len();
        self.slots.get(slot.0 as usize).ok_or(Refusal::NoSuchSlot { slot, slots })
    }

    /// A slot known to exist.
    pub fn live_mut(&mut self, slot: SlotId) -> &mut Slot {
        &mut self.slots[slot.0 as usize]
    }

    /// Takes the pages for `rows` more tokens; the caller has checked that there are enough.
    pub fn grow(&mut self, slot: SlotId, rows: usize) {
        let live = &mut self.slots[slot.0 as usize];
        let pages = self.pool.take(live.pages_needed(rows)).expect("the step was checked");
        live.pages.extend(pages);
    }

    /// Takes back the last step of a slot, one token, but for the state.
    pub fn undo(&mut self, slot: SlotId) -> Result<(), Refusal> {
        self.get(slot)?;
        let live = &mut self.slots[slot.0 as usize];
        let undo = live.undo.take().ok_or_else(|| {
            Refusal::Invalid(format!("slot {} has no last step of one token to take back", slot.0))
        })?;
        live.take_back(undo);
        live.position -= 1;
        let keep = live.position.div_ceil(PAGE_TOKENS);
        self.pool.give(live.pages.drain(keep..));
        Ok(())
    }

    pub fn reset(&mut self, slot: SlotId) -> Result<(), Refusal> {
        self.exists(slot)?;
        let live = std::mem::take(self.live_mut(slot));
        self.pool.give(live.pages);
        Ok(())
    }

    /// Makes a slot hold exactly the pages of `position` tokens; without enough of them nothing changes.
    pub fn reserve_for_restore(&mut self, slot: SlotId, position: usize) -> Result<(), Refusal> {
        let need = position.div_ceil(PAGE_TOKENS);
        let have = self.exists(slot)?.pages.len();
        let free = self.pool.free() + have;
        if need > free {
            return Err(Refusal::OutOfPages { need: need - have, free: self.pool.free() });
        }
        self.reset(slot)?;
        self.live_mut(slot).pages = self.pool.take(need).expect("counted above");
        Ok(())
    }
}

impl StepSlots for Slots {
    fn usable(&self, slot: SlotId) -> Result<(), Refusal> {
        self.get(slot).map(|_| ())
    }

    fn has_sampled(&self, slot: SlotId) -> bool {
        self.slots[slot.0 as usize].last_sampled.is_some()
    }

    fn position(&self, slot: SlotId) -> usize {
        self.slots[slot.0 as usize].position
    }

    fn pages_needed(&self, slot: SlotId, rows: usize) -> usize {
        self.slots[slot.0 as usize].pages_needed(rows)
    }

    fn free_pages(&self) -> usize {
        self.pool.free()
    }
}
