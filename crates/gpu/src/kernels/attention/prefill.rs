//! Attention over prompts.

use std::mem::offset_of;

use super::{Attend, AttentionArgs};
use crate::kernels::common::Context;
use crate::list::{Access, Binding, Recorder};
use crate::profile::{Platform, Profile};
use crate::text::Shape;

/// How a prompt's attention is cut into tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlashPolicy {
    /// Query rows of a simdgroup, all of one head: 8 or 16. Bits do not depend on it.
    pub simd_rows: u32,
    /// Simdgroups of a threadgroup.
    pub simds: u32,
    /// Query rows of a threadgroup.
    pub tile_rows: u32,
    /// Threadgroups for the heads of one KV head.
    pub columns: u32,
}

impl FlashPolicy {
    /// The policy for segments of at most `longest` rows.
    pub fn new(shape: &Shape, profile: &Profile, longest: u32) -> Self {
        let only = matches!(profile.platform, Platform::Cuda | Platform::HostUnits);
        let simd_rows = if only || longest > 8 { profile.thresholds.flash_rows } else { 8 };
        let heads = shape.heads_per_kv.clamp(1, 8);
        let simds = simds(shape);
        Self {
            simd_rows,
            simds,
            tile_rows: simd_rows * (simds / heads),
            columns: shape.heads_per_kv.div_ceil(8),
        }
    }
}

/// Simdgroups of a threadgroup: `FLASH_SIMDS` of the text.
pub(super) fn simds(shape: &Shape) -> u32 {
    let heads = shape.heads_per_kv.clamp(1, 8);
    if 8u32.is_multiple_of(heads) { 8 } else { heads }
}

/// Records causal flash attention of a step of any segments.
pub fn attention_prefill(r: &mut Recorder, c: &Context, attend: &Attend) {
    let longest = c.step.segments.iter().copied().max().unwrap_or(0);
    let policy = FlashPolicy::new(c.shape, c.profile, longest);
    let mut args = attend.args(c);
    let mut bindings = attend.bindings(c);
    bindings.push(Binding::new(attend.out, Access::Write));
    args.tiles = c.step.segments.iter().map(|rows| rows.div_ceil(policy.tile_rows)).sum();
    let kernel = if policy.simd_rows == 16 { "flash_attention_16" } else { "flash_attention_8" };
    let groups = [args.tiles, args.kv_heads * policy.columns, 1];
    let cache = c.step.segments.len() as u64 * attend.cache_bytes(c);
    let traffic = 2 * attend.row_bytes(c) + cache;
    r.dispatch(kernel, groups, 32 * policy.simds, bindings, &args, traffic);
    r.worth(attend.work(c));
    r.may_cut(0, offset_of!(AttentionArgs, first));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::thresholds::Thresholds;

    #[test]
    fn tiles_have_eight_simdgroups_of_one_head_each() {
        // Query heads a KV head, platform, longest segment: rows of a simdgroup, simdgroups, rows of a tile, columns.
        let table = [
            (8, Platform::Cuda, 2048, [16, 8, 16, 1]),
            (8, Platform::Metal, 2048, [8, 8, 8, 1]),
            (8, Platform::MetalTensor, 2048, [8, 8, 8, 1]),
            (8, Platform::Host, 8, [8, 8, 8, 1]),
            (8, Platform::Host, 9, [16, 8, 16, 1]),
            (8, Platform::HostUnits, 8, [16, 8, 16, 1]),
            (4, Platform::Cuda, 9, [16, 8, 32, 1]),
            (2, Platform::Metal, 9, [8, 8, 32, 1]),
            (1, Platform::Metal, 9, [8, 8, 64, 1]),
            (3, Platform::Metal, 9, [8, 3, 8, 1]),
            (16, Platform::Cuda, 9, [16, 8, 16, 2]),
        ];
        for (heads_per_kv, platform, longest, want) in table {
            let shape = Shape { heads_per_kv, ..Shape::default() };
            let thresholds = Thresholds::of(platform, "");
            let host = Profile::named("softgpu").unwrap();
            let p = FlashPolicy::new(&shape, &Profile { platform, thresholds, ..host }, longest);
            assert_eq!([p.simd_rows, p.simds, p.tile_rows, p.columns], want, "{heads_per_kv}");
        }
    }
}
