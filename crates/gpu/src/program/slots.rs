//! What the host knows of each slot.

use lily_device::{PagePool, Refusal, SlotId, StepSlots};
use lily_ops::plan::PAGE_TOKENS;
use lily_ops::sample::TokenCounts;

/// The token that a slot sampled last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum LastSampled {
    /// None since the slot's last step.
    #[default]
    None,
    /// The device knows it; the step is still in flight.
    OnDevice,
    /// The host knows it too.
    Known(u32),
}

/// What a slot was before its last step, one of a single token. The state itself is the other of the two.
#[derive(Clone, Copy, Debug)]
pub(super) struct Undo {
    /// Tokens sampled.
    pub generated: u64,
    /// The token sampled last.
    pub last: LastSampled,
    /// The token that the step sampled.
    pub sampled: Option<u32>,
}

/// One slot.
#[derive(Clone, Debug, Default)]
pub(super) struct Slot {
    /// Tokens seen, those of steps in flight included.
    pub position: usize,
    /// Which of its two states is current after the steps in flight.
    pub parity: u32,
    /// Tokens sampled since the answer began.
    pub generated: u64,
    /// How often each of them was, as far as the host knows.
    pub counts: TokenCounts,
    /// The token sampled last.
    pub last: LastSampled,
    /// Pages in use, in order.
    pub pages: Vec<u32>,
    /// Logits of its last step, kept until a token is chosen from them.
    pub held: Option<Vec<f32>>,
    /// A step failed here; nothing is of use until it is reset or restored.
    pub poisoned: bool,
    /// Whether the device's counts of this slot may be other than zero.
    pub counted: bool,
    /// How its last step is taken back.
    pub undo: Option<Undo>,
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
    pub fn new(slots: usize, pages: usize) -> Self {
        Self { slots: vec![Slot::default(); slots], pool: PagePool::new(pages) }
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

    /// A slot that exists.
    pub fn exists(&self, slot: SlotId) -> Result<&Slot, Refusal> {
        let slots = self.slots.len();
        self.slots.get(slot.0 as usize).ok_or(Refusal::NoSuchSlot { slot, slots })
    }

    /// A slot known to exist.
    pub fn live_mut(&mut self, slot: SlotId) -> &mut Slot {
        &mut self.slots[slot.0 as usize]
    }

    /// Takes the pages for `rows` more tokens; returns how many the slot had before.
    pub fn grow(&mut self, slot: SlotId, rows: usize) -> Result<usize, Refusal> {
        let live = &mut self.slots[slot.0 as usize];
        let (before, need) = (live.pages.len(), live.pages_needed(rows));
        let free = self.pool.free();
        let pages = self.pool.take(need).ok_or(Refusal::OutOfPages { need, free })?;
        live.pages.extend(pages);
        Ok(before)
    }

    /// Gives back the pages beyond a slot's position.
    pub fn trim(&mut self, slot: SlotId) {
        let live = &mut self.slots[slot.0 as usize];
        let keep = live.position.div_ceil(PAGE_TOKENS).min(live.pages.len());
        self.pool.give(live.pages.drain(keep..));
    }

    /// Empties a slot.
    pub fn reset(&mut self, slot: SlotId) -> Result<(), Refusal> {
        self.exists(slot)?;
        let live = self.live_mut(slot);
        let counted = live.counted;
        let pages = std::mem::take(live).pages;
        self.live_mut(slot).counted = counted;
        self.pool.give(pages);
        Ok(())
    }

    /// Makes a slot hold exactly the pages of `position` tokens; without enough of them nothing changes.
    pub fn reserve(&mut self, slot: SlotId, position: usize) -> Result<(), Refusal> {
        let need = position.div_ceil(PAGE_TOKENS);
        let have = self.exists(slot)?.pages.len();
        let free = self.pool.free() + have;
        if need > free {
            return Err(Refusal::OutOfPages { need: need - have, free: self.pool.free() });
        }
        self.reset(slot)?;
        self.live_mut(slot).pages = self.pool.take(need).unwrap_or_default();
        Ok(())
    }
}

impl StepSlots for Slots {
    fn usable(&self, slot: SlotId) -> Result<(), Refusal> {
        self.get(slot).map(|_| ())
    }

    fn has_sampled(&self, slot: SlotId) -> bool {
        self.slots[slot.0 as usize].last != LastSampled::None
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_grow_and_come_back() {
        let mut slots = Slots::new(2, 3);
        let (a, b) = (SlotId(0), SlotId(1));
        assert_eq!(slots.grow(a, 257), Ok(0));
        slots.live_mut(a).position = 257;
        assert_eq!(slots.live_mut(a).pages, [0, 1]);
        assert_eq!(slots.grow(b, 300), Err(Refusal::OutOfPages { need: 2, free: 1 }));
        slots.live_mut(a).position = 256;
        slots.trim(a);
        assert_eq!((slots.live_mut(a).pages.len(), slots.free_pages()), (1, 2));
        assert_eq!(slots.reserve(b, 900), Err(Refusal::OutOfPages { need: 4, free: 2 }));
        assert_eq!(slots.reserve(b, 300), Ok(()));
        assert_eq!(slots.reset(a), Ok(()));
        assert_eq!(slots.free_pages(), 1);
        assert!(slots.get(SlotId(2)).is_err());
        slots.live_mut(a).poisoned = true;
        assert!(slots.get(a).unwrap_err().to_string().contains("reset or restore"));
    }
}
