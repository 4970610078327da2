//! The state of all slots: recurrent state, convolution state and KV pages.

use std::ops::Range;

use bytemuck::Pod;
use half::bf16;
use lily_device::pages::page_runs;
use lily_device::{KvPart, Limits, PrepareError, SlotId, Snapshot};
use lily_ops::plan::PAGE_TOKENS;
use lily_ops::{ElementType, SlotState, StateLayout};

use super::values::zeroed;
use crate::kernels::StoredElem;

/// Elements of the convolution's state and of the KV pages: bf16, or f32 in precise mode.
pub(super) enum Stored {
    /// bf16 bits.
    Bf16(Cache<u16>),
    /// f32.
    F32(Cache<f32>),
}

/// Convolution state and KV pages of one element type.
pub(super) struct Cache<T> {
    /// `[slot][recurrent layer][taps − 1][channels]`.
    pub conv: Vec<T>,
    /// `conv` before each slot's last step of one token; empty without undo.
    conv_before: Vec<T>,
    /// For each attention layer `[page][kv head][token][head_dim]`.
    pub k: Vec<Vec<T>>,
    /// As `k`.
    pub v: Vec<Vec<T>>,
}

/// A slot's recurrent and convolution state inside a step.
pub(super) struct Marked {
    pub slot: SlotId,
    /// Tokens of the step before it.
    pub rows: usize,
    /// Tokens that the slot had seen there, when the step has run.
    pub position: Option<usize>,
    pub recurrent: Vec<u8>,
    pub conv: Vec<u8>,
}

/// The state of all slots.
pub(crate) struct State {
    /// What steps are to keep on their way, and have kept.
    pub(super) marked: Vec<Marked>,
    pub(super) layout: StateLayout,
    /// `[slot][recurrent layer][head][dv][dk]`.
    pub(super) recurrent: Vec<f32>,
    /// `recurrent` before each slot's last step of one token; empty without undo.
    recurrent_before: Vec<f32>,
    pub(super) stored: Stored,
}

/// An element of the cache that converts to f32 and lies in memory as it is stored.
pub(super) trait Element: StoredElem + Pod {
    fn to_f32(self) -> f32;
    fn of_f32(x: f32) -> Self;
}

impl Element for u16 {
    fn to_f32(self) -> f32 {
        bf16::from_bits(self).to_f32()
    }
    fn of_f32(x: f32) -> Self {
        bf16::from_f32(x).to_bits()
    }
}

impl Element for f32 {
    fn to_f32(self) -> f32 {
        self
    }
    fn of_f32(x: f32) -> Self {
        x
    }
}

/// Calls the same code for either element type.
macro_rules! with_cache {
    ($stored:expr, $cache:ident => $body:expr) => {
        match $stored {
            Stored::Bf16($cache) => $body,
            Stored::F32($cache) => $body,
        }
    };
}
pub(super) use with_cache;

impl<T: Element> Cache<T> {
    fn new(layout: &StateLayout, limits: &Limits) -> Result<Self, PrepareError> {
        let conv = limits.slots * layout.recurrent_layers * layout.conv_len();
        let pages = || zeroed("KV cache", limits.pages * layout.page_len());
        Ok(Self {
            conv: zeroed("convolution's state", conv)?,
            conv_before: zeroed("convolution's state", if limits.undo { conv } else { 0 })?,
            k: (0..layout.kv_layers).map(|_| pages()).collect::<Result<_, _>>()?,
            v: (0..layout.kv_layers).map(|_| pages()).collect::<Result<_, _>>()?,
        })
    }
}

/// Start of a token of a head in the pages of one layer.
fn at(layout: &StateLayout, pages: &[u32], head: usize, token: usize) -> usize {
    let page = pages[token / PAGE_TOKENS] as usize;
    page * layout.page_len() + (head * PAGE_TOKENS + token % PAGE_TOKENS) * layout.head_dim
}

/// Start and length of each run of a head's elements that lie together, for a range of tokens in order.
fn runs<'a>(
    layout: &'a StateLayout,
    pages: &'a [u32],
    head: usize,
    tokens: Range<usize>,
) -> impl Iterator<Item = (usize, usize)> + 'a {
    page_runs(tokens).map(move |run| {
        let len = run.len() * layout.head_dim;
        (at(layout, pages, head, run.start), len)
    })
}

impl State {
    pub fn new(layout: StateLayout, limits: &Limits) -> Result<Self, PrepareError> {
        let stored = match layout.cache_element {
            ElementType::Bf16 => Stored::Bf16(Cache::new(&layout, limits)?),
            _ => Stored::F32(Cache::new(&layout, limits)?),
        };
        let recurrent = limits.slots * layout.recurrent_layers * layout.recurrent_len();
        let before = if limits.undo { recurrent } else { 0 };
        Ok(Self {
            layout,
            marked: Vec::new(),
            recurrent: zeroed("recurrent state", recurrent)?,
            recurrent_before: zeroed("recurrent state", before)?,
            stored,
        })
    }

    /// Elements of one slot's recurrent state, and of its convolution state.
    pub fn slot_lens(&self) -> (usize, usize) {
        let l = &self.layout;
        (l.recurrent_layers * l.recurrent_len(), l.recurrent_layers * l.conv_len())
    }

    /// Zeroes a slot's recurrent and convolution state; its pages are overwritten as tokens come.
    pub fn clear(&mut self, slot: SlotId) {
        let (recurrent, conv) = self.slot_lens();
        let s = slot.0 as usize;
        self.recurrent[s * recurrent..][..recurrent].fill(0.0);
        with_cache!(&mut self.stored, c => c.conv[s * conv..][..conv].fill(Default::default()));
    }

    /// Keeps a slot's recurrent and convolution state for [`take_back`](Self::take_back).
    pub fn keep(&mut self, slot: SlotId) {
        let (recurrent, conv) = self.slot_ranges(slot);
        self.recurrent_before[recurrent.clone()].copy_from_slice(&self.recurrent[recurrent]);
        with_cache!(&mut self.stored, c => {
            c.conv_before[conv.clone()].copy_from_slice(&c.conv[conv]);
        });
    }

    /// Brings a slot's recurrent and convolution state back to when it was [kept](Self::keep).
    pub fn take_back(&mut self, slot: SlotId) {
        let (recurrent, conv) = self.slot_ranges(slot);
        self.recurrent[recurrent.clone()].copy_from_slice(&self.recurrent_before[recurrent]);
        with_cache!(&mut self.stored, c => {
            c.conv[conv.clone()].copy_from_slice(&c.conv_before[conv]);
        });
    }

    fn slot_ranges(&self, slot: SlotId) -> (Range<usize>, Range<usize>) {
        let (recurrent, conv) = self.slot_lens();
        let s = slot.0 as usize;
        (s * recurrent..(s + 1) * recurrent, s * conv..(s + 1) * conv)
    }

    /// Forgets what was to be kept in a slot's steps, and what was.
    pub fn unmark(&mut self, slot: SlotId) {
        self.marked.retain(|m| m.slot != slot);
    }

    /// Has a slot's next step keep its state behind so many tokens each.
    pub fn mark(&mut self, slot: SlotId, rows: &[usize]) {
        self.unmark(slot);
        let layers = self.layout.recurrent_bytes();
        let conv = self.layout.conv_bytes();
        self.marked.extend(rows.iter().map(|&rows| Marked {
            slot,
            rows,
            position: None,
            recurrent: vec![0; layers],
            conv: vec![0; conv],
        }));
    }

    /// Rows of a slot's step of `rows` tokens behind which its state is kept, and the last one.
    pub fn stops(&self, slot: SlotId, rows: usize) -> Vec<usize> {
        let new = self.marked.iter().filter(|m| m.slot == slot && m.position.is_none());
        new.map(|m| m.rows).filter(|at| *at < rows).chain([rows]).collect()
    }

    /// Keeps one layer's recurrent state of a slot, as it is behind `rows` tokens of the step.
    pub fn keep_recurrent(&mut self, slot: SlotId, rows: usize, layer: usize) {
        let (slot_len, len) = (self.slot_lens().0, self.layout.recurrent_len());
        let state = &self.recurrent[slot.0 as usize * slot_len + layer * len..][..len];
        if let Some(to) = self.marked.iter_mut().find(|m| m.slot == slot && m.rows == rows) {
            to.recurrent[layer * len * 4..][..len * 4].copy_from_slice(bytemuck::cast_slice(state));
        }
    }

    /// As [`keep_recurrent`](Self::keep_recurrent), of the convolution.
    pub fn keep_conv(&mut self, slot: SlotId, rows: usize, layer: usize) {
        let (slot_len, len) = (self.slot_lens().1, self.layout.conv_len());
        let Some(to) = self.marked.iter_mut().find(|m| m.slot == slot && m.rows == rows) else {
            return;
        };
        with_cache!(&self.stored, c => {
            let state = &c.conv[slot.0 as usize * slot_len + layer * len..][..len];
            let bytes: &[u8] = bytemuck::cast_slice(state);
            to.conv[layer * bytes.len()..][..bytes.len()].copy_from_slice(bytes);
        });
    }

    /// Before a step of `rows` tokens of a slot: what earlier ones kept is gone, and what lies beyond this one.
    pub fn begin_marks(&mut self, slot: SlotId, rows: usize) {
        self.marked.retain(|m| m.slot != slot || (m.position.is_none() && m.rows < rows));
    }

    /// After a slot's step, which began at `start`.
    pub fn end_marks(&mut self, slot: SlotId, start: usize) {
        for marked in self.marked.iter_mut().filter(|m| m.slot == slot) {
            marked.position = Some(start + marked.rows);
        }
    }

    /// Takes what a slot's last step kept.
    pub(super) fn take_marked(&mut self, slot: SlotId) -> Vec<Marked> {
        self.marked.extract_if(.., |m| m.slot == slot && m.position.is_some()).collect()
    }

    /// Bytes of a slot's cache of these tokens.
    pub fn save_kv(&self, pages: &[u32], tokens: Range<usize>) -> Vec<u8> {
        let mut kv = Vec::with_capacity(self.kv_bytes(tokens.len()));
        with_cache!(&self.stored, c => {
            for part in c.k.iter().zip(&c.v).flat_map(|(k, v)| [k, v]) {
                for head in 0..self.layout.kv_heads {
                    for (start, len) in runs(&self.layout, pages, head, tokens.clone()) {
                        kv.extend_from_slice(bytemuck::cast_slice(&part[start..start + len]));
                    }
                }
            }
        });
        kv
    }

    /// Bytes of a slot's recurrent state, convolution state and cache of these tokens.
    pub fn save(
        &self,
        slot: SlotId,
        pages: &[u32],
        tokens: Range<usize>,
    ) -> (Vec<u8>, Vec<u8>, Vec<u8>) {
        let (recurrent, conv) = self.slot_lens();
        let s = slot.0 as usize;
        let kv = self.save_kv(pages, tokens);
        let conv = with_cache!(&self.stored, c => {
            bytemuck::cast_slice(&c.conv[s * conv..][..conv]).to_vec()
        });
        let recurrent = bytemuck::cast_slice(&self.recurrent[s * recurrent..][..recurrent]);
        (recurrent.to_vec(), conv, kv)
    }

    fn kv_bytes(&self, tokens: usize) -> usize {
        let l = &self.layout;
        l.kv_layers * 2 * l.kv_heads * tokens * l.head_dim * l.cache_element.size()
    }

    /// Whether a snapshot and its cache are of this plan.
    pub fn check_snapshot(&self, snapshot: &Snapshot, kv: &[KvPart<'_>]) -> Result<(), String> {
        let (recurrent, conv) = self.slot_lens();
        let want = [recurrent * 4, conv * self.layout.cache_element.size()];
        let have = [snapshot.recurrent.len(), snapshot.conv.len()];
        if want != have {
            return Err(format!(
                "the snapshot holds {have:?} bytes of recurrent and convolution state, this model has {want:?}; it is of another model or precision"
            ));
        }
        KvPart::check(kv, snapshot.position, self.kv_bytes(1))
    }

    /// The reverse of [`save`](Self::save), but for the cache; the snapshot has been checked.
    pub fn load(&mut self, slot: SlotId, snapshot: &Snapshot) {
        let (recurrent, conv) = self.slot_lens();
        let s = slot.0 as usize;
        copy_bytes(&mut self.recurrent[s * recurrent..][..recurrent], &snapshot.recurrent);
        with_cache!(&mut self.stored, c => {
            copy_bytes(&mut c.conv[s * conv..][..conv], &snapshot.conv);
        });
    }

    /// Writes a part of a slot's cache; it has been checked.
    pub fn load_kv(&mut self, pages: &[u32], kv: &KvPart<'_>) {
        let layout = self.layout;
        let mut from = 0;
        with_cache!(&mut self.stored, c => {
            for part in c.k.iter_mut().zip(&mut c.v).flat_map(|(k, v)| [k, v]) {
                for head in 0..layout.kv_heads {
                    for (start, len) in runs(&layout, pages, head, kv.from..kv.to) {
                        let bytes = len * layout.cache_element.size();
                        copy_bytes(&mut part[start..start + len], &kv.bytes[from..from + bytes]);
                        from += bytes;
                    }
                }
            }
        });
    }

    /// The canonical form of a slot with `tokens` cached tokens.
    pub fn export(&self, slot: SlotId, pages: &[u32], tokens: usize) -> SlotState {
        let (recurrent, conv) = self.slot_lens();
        let s = slot.0 as usize;
        let l = &self.layout;
        let mut out = SlotState {
            position: tokens,
            recurrent: self.recurrent[s * recurrent..][..recurrent].to_vec(),
            ..SlotState::default()
        };
        with_cache!(&self.stored, c => {
            out.conv = c.conv[s * conv..][..conv].iter().map(|x| x.to_f32()).collect();
            for (parts, to) in [(&c.k, &mut out.k), (&c.v, &mut out.v)] {
                for part in parts {
                    for token in 0..tokens {
                        for head in 0..l.kv_heads {
                            let start = at(l, pages, head, token);
                            to.extend(part[start..start + l.head_dim].iter().map(|x| x.to_f32()));
                        }
                    }
                }
            }
        });
        out
    }

    /// The reverse of [`export`](Self::export).
    pub fn import(&mut self, slot: SlotId, pages: &[u32], state: &SlotState) {
        let (recurrent, conv) = self.slot_lens();
        let s = slot.0 as usize;
        let l = self.layout;
        self.recurrent[s * recurrent..][..recurrent].copy_from_slice(&state.recurrent);
        let row = l.kv_heads * l.head_dim;
        let tokens = state.k.len() / (row * l.kv_layers.max(1));
        with_cache!(&mut self.stored, c => {
            for (to, x) in c.conv[s * conv..][..conv].iter_mut().zip(&state.conv) {
                *to = Element::of_f32(*x);
            }
            for (parts, from) in [(&mut c.k, &state.k), (&mut c.v, &state.v)] {
                for (layer, part) in parts.iter_mut().enumerate() {
                    for token in 0..tokens {
                        for head in 0..l.kv_heads {
                            let start = at(&l, pages, head, token);
                            let source = (layer * tokens + token) * row + head * l.head_dim;
                            for (to, x) in part[start..start + l.head_dim].iter_mut().zip(&from[source..]) {
                                *to = Element::of_f32(*x);
                            }
                        }
                    }
                }
            }
        });
    }
}

fn copy_bytes<T: Pod>(to: &mut [T], from: &[u8]) {
    bytemuck::cast_slice_mut::<T, u8>(to).copy_from_slice(from);
}
