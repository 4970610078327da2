//! What the program knows of each slot on the host: position, pages, sampler state.

use lily_device::{Limits, PagePool, Refusal, SlotId};
use lily_ops::plan::PAGE_TOKENS;
use lily_ops::sample::TokenCounts;

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
}

impl Slot {
    /// Pages missing for `rows` more tokens.
    pub fn pages_needed(&self, rows: usize) -> usize {
        (self.position + rows).div_ceil(PAGE_TOKENS).saturating_sub(self.pages.len())
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

    pub fn free_pages(&self) -> usize {
        self.pool.free()
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
