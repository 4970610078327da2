//! The state of all slots and the tables that kernels reach it by.

use std::ops::Range;

use half::bf16;
use lily_device::pages::page_runs;
use lily_device::{KvPart, Limits, Snapshot};
use lily_ops::plan::PAGE_TOKENS;
use lily_ops::{ElementType, Op, Plan, SlotState, StateLayout};

use crate::driver::{Buffer, Driver, DriverError, Placement};
use crate::kernels::common::{SlotHeader, Tables};
use crate::list::Operand;

/// Slots' state in device memory, with the tables of steps in flight.
#[derive(Debug)]
pub struct Memory {
    layout: StateLayout,
    slots: usize,
    /// Tables of each step in flight; all but the step's own are shared.
    pub tables: Vec<Tables>,
    /// What else the host writes for each step in flight, in the same buffer as the step's tables.
    pub extra: Vec<Operand>,
    /// Bytes that the host writes for a step, from the start of that buffer.
    input_bytes: u64,
}

/// Bytes of what [`Memory::new`] allocates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryBytes {
    /// KV pages.
    pub kv: u64,
    /// Recurrent and convolution state.
    pub state: u64,
    /// Tables.
    pub tables: u64,
}

/// Where in a step's buffer its parts lie: segments, rows, tokens, output rows, the rest.
struct StepParts {
    ranges: [std::ops::Range<u64>; 5],
    bytes: u64,
}

impl StepParts {
    fn new(limits: &Limits, extra: u64) -> Self {
        let rows = limits.rows as u64 * 4;
        let mut at = 0u64;
        let ranges = [limits.slots as u64 * 16, rows, rows, rows, extra].map(|bytes| {
            let start = at;
            at = (at + bytes.max(16)).next_multiple_of(64);
            start..start + bytes.max(16)
        });
        Self { ranges, bytes: at }
    }
}

/// Largest number of tokens a slot can hold.
pub fn context(limits: &Limits) -> u64 {
    limits.slot_tokens() as u64
}

fn rope_dims(plan: &Plan) -> Option<lily_ops::ops::Rope> {
    plan.nodes().find_map(|n| match &n.op {
        Op::AttentionPrep(op) => Some(op.rope),
        _ => None,
    })
}

/// Words of one slot's state: recurrent, then convolution, 16-byte aligned parts.
fn state_words(layout: &StateLayout) -> (u64, u64) {
    let conv_at = layout.recurrent_bytes() as u64 / 4;
    let conv = (layout.recurrent_layers * layout.conv_len()) as u64;
    (conv_at, (conv_at + conv.div_ceil(2)).next_multiple_of(4))
}

impl Memory {
    /// What it takes.
    pub fn need(plan: &Plan, limits: &Limits, steps: usize, extra: u64) -> MemoryBytes {
        let slots = limits.slots as u64;
        let (_, words) = state_words(&plan.state);
        let rope = rope_dims(plan).map_or(1, |r| r.dims as u64);
        let per_step = StepParts::new(limits, extra).bytes;
        MemoryBytes {
            kv: (limits.pages as u64).saturating_mul(page_bytes(&plan.state)),
            state: slots.saturating_mul(2 * words * 4),
            tables: context(limits)
                .saturating_mul(4 * rope)
                .saturating_add(slots.saturating_mul(
                    (limits.slot_pages() as u64).saturating_mul(4).saturating_add(16),
                ))
                .saturating_add((steps as u64).saturating_mul(per_step)),
        }
    }

    /// Allocates everything, all slots empty. `steps` is how many steps may be in flight, `extra` how many bytes
    /// the host writes for a step beside its tables.
    pub fn new(
        driver: &mut dyn Driver,
        plan: &Plan,
        limits: &Limits,
        steps: usize,
        extra: u64,
    ) -> Result<Self, DriverError> {
        let memory = Self::allocate(driver, plan, limits, steps, extra)?;
        memory.fill_rope(driver, plan, limits)?;
        Ok(memory)
    }

    /// As [`new`](Self::new), without the rotary angles.
    pub fn allocate(
        driver: &mut dyn Driver,
        plan: &Plan,
        limits: &Limits,
        steps: usize,
        extra: u64,
    ) -> Result<Self, DriverError> {
        let layout = plan.state;
        let mut take = |what: &str, count: u64, element: ElementType, placement: Placement| {
            let bytes = (count * element.size() as u64).max(16);
            let buffer = driver.allocate(what, bytes, placement)?;
            Ok::<_, DriverError>(Operand { buffer, offset: 0, bytes, element })
        };
        let slots = limits.slots as u64;
        let (conv_at, words) = state_words(&layout);
        let headers = take("slot headers", slots * 4, ElementType::U32, Placement::Device)?;
        let pages = take(
            "page tables",
            slots * limits.slot_pages() as u64,
            ElementType::U32,
            Placement::Device,
        )?;
        let states =
            take("recurrent state", slots * 2 * words, ElementType::F32, Placement::Device)?;
        let mut kv = Vec::new();
        for _ in 0..layout.kv_layers {
            let elements = limits.pages as u64 * layout.page_len() as u64;
            let mut part = |what| take(what, elements, ElementType::Bf16, Placement::Device);
            kv.push([part("K pages")?, part("V pages")?]);
        }
        let rope = rope_dims(plan);
        let angles = context(limits) * rope.map_or(0, |r| r.dims as u64);
        let rope_table = take("rotary angles", angles, ElementType::F32, Placement::Device)?;
        let parts = StepParts::new(limits, extra);
        let (mut tables, mut extras) = (Vec::new(), Vec::new());
        for _ in 0..steps {
            let all = take("step inputs", parts.bytes / 4, ElementType::U32, Placement::Shared)?;
            let part = |i: usize| Operand {
                offset: parts.ranges[i].start,
                bytes: parts.ranges[i].end - parts.ranges[i].start,
                ..all
            };
            tables.push(Tables {
                segments: part(0),
                row_segments: part(1),
                tokens: part(2),
                output_rows: part(3),
                headers,
                pages,
                max_pages: limits.slot_pages() as u32,
                states,
                state_words: words as u32,
                conv_at: conv_at as u32,
                kv: kv.clone(),
                rope: rope_table,
            });
            extras.push(part(4));
        }
        let input_bytes = parts.bytes;
        Ok(Self { layout, slots: limits.slots, tables, extra: extras, input_bytes })
    }

    /// Cosines and sines of every position, computed in f64.
    fn fill_rope(
        &self,
        driver: &mut dyn Driver,
        plan: &Plan,
        limits: &Limits,
    ) -> Result<(), DriverError> {
        let Some(rope) = rope_dims(plan) else { return Ok(()) };
        let table = self.table().rope;
        for first in (0..context(limits)).step_by(4096) {
            let last = (first + 4096).min(context(limits));
            let mut bytes = Vec::new();
            for position in first..last {
                let (cos, sin) = rope.angles(position as usize);
                bytes.extend(cos.iter().chain(&sin).flat_map(|x| x.to_le_bytes()));
            }
            driver.write(table.buffer, first * 4 * rope.dims as u64, &bytes)?;
        }
        Ok(())
    }

    /// The range of a shared buffer that the host writes for step `which`.
    pub fn inputs(&self, which: usize) -> (Buffer, std::ops::Range<u64>) {
        (self.tables[which].segments.buffer, 0..self.input_bytes)
    }

    fn table(&self) -> &Tables {
        &self.tables[0]
    }

    /// Writes a slot's header.
    pub fn write_header(
        &self,
        driver: &mut dyn Driver,
        slot: usize,
        header: SlotHeader,
    ) -> Result<(), DriverError> {
        let at = (slot * size_of::<SlotHeader>()) as u64;
        driver.write(self.table().headers.buffer, at, bytemuck::bytes_of(&header))
    }

    /// Reads a slot's header, after all that was submitted.
    pub fn read_header(
        &self,
        driver: &mut dyn Driver,
        slot: usize,
    ) -> Result<SlotHeader, DriverError> {
        let mut header = SlotHeader { position: 0, last_token: 0, generated: 0, parity: 0 };
        let at = (slot * size_of::<SlotHeader>()) as u64;
        driver.read(self.table().headers.buffer, at, bytemuck::bytes_of_mut(&mut header))?;
        Ok(header)
    }

    /// Writes entries of a slot's page table.
    pub fn write_pages(
        &self,
        driver: &mut dyn Driver,
        slot: usize,
        first: usize,
        pages: &[u32],
    ) -> Result<(), DriverError> {
        let at = (slot * self.table().max_pages as usize + first) as u64 * 4;
        driver.write(self.table().pages.buffer, at, bytemuck::cast_slice(pages))
    }

    fn state_at(&self, slot: usize, parity: u32) -> u64 {
        (slot as u64 * 2 + u64::from(parity)) * u64::from(self.table().state_words) * 4
    }

    /// Zeroes one of a slot's two states.
    pub fn clear(
        &self,
        driver: &mut dyn Driver,
        slot: usize,
        parity: u32,
    ) -> Result<(), DriverError> {
        debug_assert!(slot < self.slots);
        let zeros = vec![0u8; self.table().state_words as usize * 4];
        driver.write(self.table().states.buffer, self.state_at(slot, parity), &zeros)
    }

    /// The recurrent and the convolution's bytes of a slot.
    pub fn read_state(
        &self,
        driver: &mut dyn Driver,
        slot: usize,
        parity: u32,
    ) -> Result<(Vec<u8>, Vec<u8>), DriverError> {
        let (buffer, at) = (self.table().states.buffer, self.state_at(slot, parity));
        let mut recurrent = vec![0; self.layout.recurrent_bytes()];
        let mut conv = vec![0; self.layout.recurrent_layers * self.layout.conv_len() * 2];
        driver.read(buffer, at, &mut recurrent)?;
        driver.read(buffer, at + u64::from(self.table().conv_at) * 4, &mut conv)?;
        Ok((recurrent, conv))
    }

    /// The reverse of [`read_state`](Self::read_state).
    pub fn write_state(
        &self,
        driver: &mut dyn Driver,
        slot: usize,
        parity: u32,
        recurrent: &[u8],
        conv: &[u8],
    ) -> Result<(), DriverError> {
        let (buffer, at) = (self.table().states.buffer, self.state_at(slot, parity));
        driver.write(buffer, at, recurrent)?;
        driver.write(buffer, at + u64::from(self.table().conv_at) * 4, conv)
    }

    /// Calls `f` with buffer, byte offset and bytes of each run of these tokens of a slot's cache, in the order
    /// of a snapshot: layer, K then V, head, position.
    fn runs(
        &self,
        pages: &[u32],
        tokens: Range<usize>,
        mut f: impl FnMut(Buffer, u64, usize) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        let l = &self.layout;
        for part in self.table().kv.iter().flatten() {
            for head in 0..l.kv_heads {
                for run in page_runs(tokens.clone()) {
                    let page = pages[run.start / PAGE_TOKENS] as usize;
                    let row = head * PAGE_TOKENS + run.start % PAGE_TOKENS;
                    let at = page * l.page_len() + row * l.head_dim;
                    f(part.buffer, at as u64 * 2, run.len() * l.head_dim * 2)?;
                }
            }
        }
        Ok(())
    }

    /// A slot's cache of these tokens, as in [`Snapshot::kv`].
    pub fn read_kv(
        &self,
        driver: &mut dyn Driver,
        pages: &[u32],
        tokens: Range<usize>,
    ) -> Result<Vec<u8>, DriverError> {
        let l = &self.layout;
        let token = l.kv_layers * 2 * l.kv_heads * l.head_dim * 2;
        let mut kv = Vec::with_capacity(tokens.len() * token);
        self.runs(pages, tokens, |buffer, at, len| {
            let start = kv.len();
            kv.resize(start + len, 0);
            driver.read(buffer, at, &mut kv[start..])
        })?;
        Ok(kv)
    }

    /// The reverse of [`read_kv`](Self::read_kv).
    pub fn write_kv(
        &self,
        driver: &mut dyn Driver,
        pages: &[u32],
        kv: &KvPart<'_>,
    ) -> Result<(), DriverError> {
        let mut from = 0;
        self.runs(pages, kv.from..kv.to, |buffer, at, len| {
            let bytes = &kv.bytes[from..from + len];
            from += len;
            driver.write(buffer, at, bytes)
        })
    }

    /// Checks that a snapshot and its cache are of this plan.
    pub fn check_snapshot(&self, snapshot: &Snapshot, kv: &[KvPart<'_>]) -> Result<(), String> {
        let l = &self.layout;
        let want = [l.recurrent_bytes(), l.recurrent_layers * l.conv_len() * 2];
        let have = [snapshot.recurrent.len(), snapshot.conv.len()];
        if want != have {
            return Err(format!(
                "the snapshot holds {have:?} bytes of recurrent and convolution state, this model has {want:?}; it is of another model or precision"
            ));
        }
        KvPart::check(kv, snapshot.position, l.kv_layers * 2 * l.kv_heads * l.head_dim * 2)
    }

    /// Puts a canonical state into a slot.
    pub fn import(
        &self,
        driver: &mut dyn Driver,
        slot: usize,
        parity: u32,
        pages: &[u32],
        state: &SlotState,
    ) -> Result<(), DriverError> {
        let conv: Vec<u8> = state.conv.iter().flat_map(|x| bf16_bytes(*x)).collect();
        let recurrent: &[u8] = bytemuck::cast_slice(&state.recurrent);
        self.write_state(driver, slot, parity, recurrent, &conv)?;
        let l = &self.layout;
        let row = l.kv_heads * l.head_dim;
        let tokens = state.k.len() / (row * l.kv_layers.max(1));
        let mut kv = Vec::new();
        for layer in 0..l.kv_layers {
            for part in [&state.k, &state.v] {
                for head in 0..l.kv_heads {
                    for token in 0..tokens {
                        let at = (layer * tokens + token) * row + head * l.head_dim;
                        kv.extend(part[at..at + l.head_dim].iter().flat_map(|x| bf16_bytes(*x)));
                    }
                }
            }
        }
        self.write_kv(driver, pages, &KvPart { from: 0, to: tokens, bytes: &kv })
    }

    /// A slot's state in canonical form.
    pub fn export(
        &self,
        driver: &mut dyn Driver,
        slot: usize,
        parity: u32,
        pages: &[u32],
        tokens: usize,
    ) -> Result<SlotState, DriverError> {
        let (recurrent, conv) = self.read_state(driver, slot, parity)?;
        let kv = self.read_kv(driver, pages, 0..tokens)?;
        let number =
            |bytes: &[u8], i: usize| bf16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32();
        let l = &self.layout;
        let mut parts = [Vec::new(), Vec::new()];
        for layer in 0..l.kv_layers {
            for (which, part) in parts.iter_mut().enumerate() {
                for token in 0..tokens {
                    for head in 0..l.kv_heads {
                        let at = (((layer * 2 + which) * l.kv_heads + head) * tokens + token)
                            * l.head_dim;
                        part.extend((at..at + l.head_dim).map(|i| number(&kv, i)));
                    }
                }
            }
        }
        let [k, v] = parts;
        Ok(SlotState {
            position: tokens,
            recurrent: recurrent.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            conv: (0..conv.len() / 2).map(|i| number(&conv, i)).collect(),
            k,
            v,
        })
    }
}

fn bf16_bytes(x: f32) -> [u8; 2] {
    bf16::from_f32(x).to_le_bytes()
}

fn page_bytes(layout: &StateLayout) -> u64 {
    layout.kv_layers as u64 * 2 * layout.page_len() as u64 * 2
}
