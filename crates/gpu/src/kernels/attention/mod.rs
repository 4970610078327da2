//! Attention: q/k preparation and the cache write, split decode, flash attention over prompts.

use crate::kernel_args;
use crate::kernels::common::Context;
use crate::list::{Access, Binding, Operand, Recorder};
use crate::text::Shape;

pub mod decode;
pub mod prefill;
pub mod prep;

pub use decode::{attention_decode, attention_scratch_bytes};
pub use prefill::attention_prefill;
pub use prep::{Prep, attention_prep};

kernel_args! {
    /// Of the kernels that prepare q and k and write the cache.
    pub struct AttentionPrepArgs {
        /// Query heads.
        heads: u32,
        /// KV heads.
        kv_heads: u32,
        /// Entries of a slot in the page table.
        max_pages: u32,
        /// Rotated elements of a head.
        rope_dims: u32,
        /// Weights of the queries' norm: unit in their slab.
        q_norm: u32,
        /// Weights of the keys' norm: unit in their slab.
        k_norm: u32,
        /// Added to the mean of squares.
        eps: f32,
    }

    /// Of the decode kernels and of flash attention.
    pub struct AttentionArgs {
        /// Query heads.
        heads: u32,
        /// KV heads.
        kv_heads: u32,
        /// Entries of a slot in the page table.
        max_pages: u32,
        /// Segments of the step.
        segments: u32,
        /// Splits of a head that the scratch has room for.
        splits: u32,
        /// A slot below `fixed_from` has at most so many splits.
        most_splits: u32,
        /// From so many tokens on a split is a page.
        fixed_from: u32,
        /// First element of the maxima and sums in the scratch.
        sums_at: u32,
        /// Of flash attention: tiles of the step.
        tiles: u32,
        /// Tiles in front of the dispatch's, where it is one of several.
        first: u32,
        /// `log2(e) / sqrt(head_dim)`.
        scale: f32,
    }
}

/// What attention reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct Attend {
    /// bf16 queries: `rows × heads · head_dim`.
    pub q: Operand,
    /// Query heads.
    pub heads: u32,
    /// Attention layer whose cache it reads.
    pub layer: usize,
    /// bf16, as `q`.
    pub out: Operand,
}

impl Attend {
    /// KV heads.
    pub(crate) fn kv_heads(&self, shape: &Shape) -> u32 {
        debug_assert!(self.heads.is_multiple_of(shape.heads_per_kv), "{} heads", self.heads);
        self.heads / shape.heads_per_kv
    }

    fn args(&self, c: &Context) -> AttentionArgs {
        AttentionArgs {
            heads: self.heads,
            kv_heads: self.kv_heads(c.shape),
            max_pages: c.tables.max_pages,
            segments: c.step.segments.len() as u32,
            splits: 0,
            most_splits: 1,
            fixed_from: u32::MAX,
            sums_at: 0,
            tiles: 0,
            first: 0,
            scale: std::f32::consts::LOG2_E / (c.shape.head_dim as f32).sqrt(),
        }
    }

    /// Bytes of the step's queries; as many are written.
    fn row_bytes(&self, c: &Context) -> u64 {
        u64::from(c.step.rows() * self.heads * c.shape.head_dim) * 2
    }

    /// Bytes of K and V of one slot of `c.step.context` tokens.
    fn cache_bytes(&self, c: &Context) -> u64 {
        u64::from(c.step.context) * u64::from(self.kv_heads(c.shape) * c.shape.head_dim) * 4
    }

    /// Queries, K, V, page table, headers, segments: what every attention kernel binds first.
    fn bindings(&self, c: &Context) -> Vec<Binding> {
        let [k, v] = c.tables.kv[self.layer];
        [self.q, k, v, c.tables.pages, c.tables.headers, c.tables.segments]
            .map(|operand| Binding::new(operand, Access::Read))
            .to_vec()
    }
}

/// Attention of the step, by the kernels for its kind. `scratch` has [`attention_scratch_bytes`]; prompts need
/// none.
pub fn attention(r: &mut Recorder, c: &Context, attend: &Attend, scratch: Operand) {
    match c.step.is_decode() {
        true => attention_decode(r, c, attend, scratch, None),
        false => attention_prefill(r, c, attend),
    }
}
