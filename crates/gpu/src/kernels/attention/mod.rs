//! Attention: q/k preparation and the cache write, split decode, flash attention over prompts.

use crate::kernel_args;
use crate::kernels::common::Context;
use crate::list::{Access, Binding, Operand, Recorder};
use crate::profile::{Platform, Profile};
use crate::text::Shape;

pub mod decode;
pub mod prefill;
pub mod prep;

pub use decode::{CacheRead, attention_decode, attention_scratch_bytes, read_cache};
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

/// Bytes of threadgroup memory that the largest kernel of flash attention and of the splits declares.
fn threadgroup_bytes(shape: &Shape, platform: Platform) -> u32 {
    let Shape { head_dim, heads_per_kv, .. } = *shape;
    // FLASH_WORDS: a padded block of 32 rows, or with `mma.sync` two of them; else also each simdgroup's own floats.
    let block = 32 * (head_dim + 8);
    let flash = match platform {
        Platform::Cuda | Platform::HostUnits => 2 * block * 2,
        _ => block * 2 + prefill::simds(shape) * (8 * 36 + 64) * 4,
    };
    // The simdgroups' sums of the packed heads, and their queries.
    let pack = decode::packed_heads(shape);
    let split = (decode::SIMDS + 1) * pack * head_dim * 4 + decode::SIMDS * pack * 8;
    // The pages' sums by matrix units, where the text has them.
    let units = match heads_per_kv <= decode::UNIT_HEADS && head_dim % decode::UNIT_ELEMENTS == 0 {
        true if platform != Platform::Metal && platform != Platform::MetalTensor => {
            16 * (head_dim + 2) * 4
        }
        _ => 0,
    };
    flash.max(split).max(units)
}

/// Whether the kernels are right for these sizes and have room on the device; if not, why, and what to do.
pub fn supported(shape: &Shape, profile: &Profile) -> Result<(), String> {
    let fits = |head_dim| {
        let bytes = threadgroup_bytes(&Shape { head_dim, ..*shape }, profile.platform);
        bytes <= profile.threadgroup_memory
    };
    let Shape { head_dim, heads_per_kv, .. } = *shape;
    let most = (1..=32).map(|n| n * 32).take_while(|n| fits(*n)).last().unwrap_or(0);
    match head_dim > 0 && heads_per_kv > 0 && head_dim.is_multiple_of(32) && head_dim <= most {
        true => Ok(()),
        false => Err(format!(
            "attention heads of {head_dim} elements, {heads_per_kv} to a KV head: the GPU kernels take multiples of 32, \
             here up to {most}; use --device cpu"
        )),
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

    /// Multiply-adds with the keys and the values that each row of the step sees, where every slot is as long as `c.step.context` behind it.
    fn work(&self, c: &Context) -> u64 {
        let keys = |rows: &u32| {
            let (rows, context) = (u64::from(*rows), u64::from(c.step.context));
            rows * context.saturating_sub(rows) + rows * (rows + 1) / 2
        };
        let keys: u64 = c.step.segments.iter().map(keys).sum();
        2 * keys * u64::from(self.heads * c.shape.head_dim)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_the_kernels_take() {
        let of = |device: &str, heads_per_kv, head_dim| {
            let profile = Profile::named(device).unwrap();
            supported(&Shape { heads_per_kv, head_dim, ..Shape::default() }, &profile)
        };
        // Device, query heads a KV head, elements of the largest head. Tests of whole texts: crates/softgpu/tests/attention.rs.
        let table = [
            ("h200", 8, 352),
            ("h200", 1, 352),
            ("m4-max", 8, 320),
            ("m5", 4, 320),
            ("m4-max", 3, 416),
            ("softgpu", 8, 320),
        ];
        for (device, heads_per_kv, most) in table {
            for head_dim in [32, 64, 96, 256, most] {
                assert_eq!(of(device, heads_per_kv, head_dim), Ok(()), "{device} {head_dim}");
            }
            for head_dim in [0, 16, 80, 200, most + 32, 512, 2048] {
                let why = of(device, heads_per_kv, head_dim).unwrap_err();
                let told = [&*format!("of {head_dim} elements"), &*format!("up to {most}"), "cpu"];
                assert!(told.iter().all(|t| why.contains(t)), "{why}");
            }
        }
    }
}
