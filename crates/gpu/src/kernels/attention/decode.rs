//! Attention of a decode step: the cache in splits, then their combination.

use super::Attend;
use crate::kernels::common::{Context, StepShape};
use crate::list::{Access, Binding, Operand, Recorder};
use crate::profile::Profile;
use crate::text::Shape;
use crate::thresholds::Thresholds;
use crate::tuning::Tuning;

/// Tokens of the smallest split; all splits are multiples of it.
pub const SPLIT_TOKENS: u32 = 64;

/// Simdgroups of a threadgroup of the split kernels.
pub(super) const SIMDS: u32 = 4;
/// Likewise of the combination.
const COMBINE_SIMDS: u32 = 8;
/// Threadgroups that share the combination of a head of whole lines of 128 elements.
const COMBINE_PARTS: u32 = 4;

/// How a decode step's attention is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodePolicy {
    /// Query heads of a threadgroup.
    pub pack: u32,
    /// A slot below `fixed_from` has at most so many splits: enough for every core to have its threadgroups. The splits of
    /// a slot hang on its own length only, so that its bits do not depend on what else is in the step.
    pub most_splits: u32,
    /// From so many tokens on a split is a page; `u32::MAX` where the shape has no such path.
    pub fixed_from: u32,
    /// Splits of the longest slot that the step may hold.
    pub splits: u32,
    /// Whether matrix units take the slots whose splits are pages.
    pub units: bool,
}

/// Most query heads of a KV head for the matrix units, and what their elements are a multiple of.
pub(super) const UNIT_HEADS: u32 = 8;
pub(super) const UNIT_ELEMENTS: u32 = 128;

impl DecodePolicy {
    /// The policy for slots of up to `context` tokens.
    pub fn new(
        shape: &Shape,
        profile: &Profile,
        tuning: &Tuning,
        kv_heads: u32,
        context: u32,
    ) -> Self {
        let Thresholds { split_groups, fixed_from, .. } = profile.thresholds;
        let packed = packed_heads(shape);
        // Whatever `pack_heads` and `coalesced_kv` say, which are of the lane-by-lane form: they must not change a bit.
        let units = profile.mma
            && tuning.matrix_attention
            && shape.heads_per_kv <= UNIT_HEADS
            && shape.head_dim.is_multiple_of(UNIT_ELEMENTS);
        let columns = kv_heads * shape.heads_per_kv.div_ceil(packed);
        let most_splits = (split_groups * profile.cores).div_ceil(columns.max(1)).max(1);
        let gate = shape.head_dim == 256 && shape.heads_per_kv == 8 && tuning.fixed_block;
        let fixed_from = if gate { fixed_from } else { u32::MAX };
        let general = context.min(fixed_from - 1).div_ceil(SPLIT_TOKENS).min(most_splits);
        let pages = match context >= fixed_from {
            true => context.div_ceil(lily_ops::plan::PAGE_TOKENS as u32),
            false => 0,
        };
        let pack = if tuning.pack_heads { packed } else { 1 };
        Self { pack, most_splits, fixed_from, splits: general.max(pages), units }
    }

    /// How often each byte of K and V is read.
    pub fn cache_reads(&self, shape: &Shape) -> u32 {
        shape.heads_per_kv.div_ceil(self.pack)
    }

    /// Whether the step may hold a slot whose splits are pages.
    pub fn has_fixed(&self, context: u32) -> bool {
        context >= self.fixed_from
    }
}

/// Heads that the packed kernels serve with one read of K and V: `ATTENTION_PACK` of the text.
pub(super) fn packed_heads(shape: &Shape) -> u32 {
    match shape.heads_per_kv {
        4.. if shape.head_dim <= 256 => 4,
        2.. if shape.head_dim <= 512 => 2,
        _ => 1,
    }
}

/// f32 elements of the partial outputs, then of maxima and sums.
fn scratch_parts(c: &Context, heads: u32, splits: u32) -> [u64; 2] {
    let all = u64::from(c.step.segments.len() as u32 * heads) * u64::from(splits);
    [all * u64::from(c.shape.head_dim), all * 2]
}

/// Bytes of the scratch for the partial sums of a decode step; 0 for prompts.
pub fn attention_scratch_bytes(c: &Context, heads: u32) -> u64 {
    match c.step.is_decode() {
        true => {
            let policy = policy(c, heads);
            scratch_parts(c, heads, policy.splits).iter().sum::<u64>() * 4
        }
        false => 0,
    }
}

fn policy(c: &Context, heads: u32) -> DecodePolicy {
    let kv_heads = heads / c.shape.heads_per_kv;
    DecodePolicy::new(c.shape, c.profile, c.tuning, kv_heads, c.step.context)
}

/// Records the attention of a decode step, with the output gate of `gate` (in each head the query, then the
/// gate) if it is given.
pub fn attention_decode(
    r: &mut Recorder,
    c: &Context,
    attend: &Attend,
    scratch: Operand,
    gate: Option<Operand>,
) {
    let segments = c.step.segments.len() as u32;
    debug_assert!(segments <= StepShape::DECODE_ROWS);
    let policy = policy(c, attend.heads);
    let [outputs, sums] = scratch_parts(c, attend.heads, policy.splits);
    let mut args = attend.args(c);
    args.splits = policy.splits;
    args.most_splits = policy.most_splits;
    args.fixed_from = policy.fixed_from;
    args.sums_at = outputs as u32;
    let fixed = policy.has_fixed(c.step.context);
    let kernel = split_kernel(c.tuning, fixed && !policy.units);
    let columns = args.kv_heads * policy.cache_reads(c.shape);
    let mut bindings = attend.bindings(c);
    bindings.push(Binding::new(scratch, Access::Write));
    let partial = (outputs + sums) * 4;
    let cache = u64::from(segments) * attend.cache_bytes(c);
    let traffic = attend.row_bytes(c) + cache + partial;
    if fixed && policy.units {
        // Each for its own slots; bytes and multiply-adds of both are told with the second.
        let general = [policy.most_splits, columns, segments];
        r.dispatch(kernel, general, 32 * SIMDS, bindings.clone(), &args, 0);
        let pages = [policy.splits, args.kv_heads, segments];
        r.dispatch("attention_fixed_units", pages, 32 * SIMDS, bindings, &args, traffic);
    } else {
        let grid = [policy.splits, columns, segments];
        r.dispatch(kernel, grid, 32 * SIMDS, bindings, &args, traffic);
    }
    r.worth(attend.work(c));

    let read = [scratch, c.tables.headers, c.tables.segments];
    let mut bindings: Vec<Binding> = read.map(|o| Binding::new(o, Access::Read)).to_vec();
    bindings.extend(gate.map(|qg| Binding::new(qg, Access::Read)));
    bindings.push(Binding::new(attend.out, Access::Write));
    let (kernel, gates) = match gate {
        Some(_) => ("attention_combine_gated", attend.row_bytes(c)),
        None => ("attention_combine", 0),
    };
    let traffic = partial + gates + attend.row_bytes(c);
    let parts = if c.shape.head_dim.is_multiple_of(128) { COMBINE_PARTS } else { 1 };
    r.dispatch(
        kernel,
        [attend.heads * parts, segments, 1],
        32 * COMBINE_SIMDS,
        bindings,
        &args,
        traffic,
    );
}

/// K or V of a layer, read alone as the splits read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheRead {
    /// Query heads.
    pub heads: u32,
    /// Attention layer.
    pub layer: usize,
    /// K, else V.
    pub keys: bool,
    /// As with [`Tuning::coalesced_kv`], else as without.
    pub coalesced: bool,
}

impl CacheRead {
    /// The kernel, of [texts for measuring](crate::text::Text::measuring).
    pub fn kernel(&self) -> &'static str {
        match (self.keys, self.coalesced) {
            (true, true) => "read_keys",
            (true, false) => "read_keys_strided",
            (false, true) => "read_values",
            (false, false) => "read_values_strided",
        }
    }

    /// Heads are packed: what is compared is one switch.
    fn policy(&self, c: &Context) -> DecodePolicy {
        let tuning = Tuning { pack_heads: true, ..*c.tuning };
        let kv_heads = self.heads / c.shape.heads_per_kv;
        DecodePolicy::new(c.shape, c.profile, &tuning, kv_heads, c.step.context)
    }

    fn grid(&self, c: &Context) -> [u32; 3] {
        let policy = self.policy(c);
        let columns = self.heads / c.shape.heads_per_kv * policy.cache_reads(c.shape);
        [policy.splits, columns, c.step.segments.len() as u32]
    }

    /// Words of the sums that it leaves: one a simdgroup.
    pub fn sums(&self, c: &Context) -> u64 {
        self.grid(c).iter().map(|n| u64::from(*n)).product::<u64>() * u64::from(SIMDS)
    }
}

/// Records the read of a decode step's K or V; `out` has the [sums](CacheRead::sums), u32.
pub fn read_cache(r: &mut Recorder, c: &Context, read: &CacheRead, out: Operand) {
    debug_assert!(c.step.is_decode());
    let attend = Attend { q: out, heads: read.heads, layer: read.layer, out };
    let policy = read.policy(c);
    let mut args = attend.args(c);
    args.splits = policy.splits;
    args.most_splits = policy.most_splits;
    args.fixed_from = policy.fixed_from;
    let cache = c.tables.kv[read.layer][usize::from(!read.keys)];
    let inputs = [cache, c.tables.pages, c.tables.headers, c.tables.segments];
    let mut bindings: Vec<Binding> = inputs.map(|o| Binding::new(o, Access::Read)).to_vec();
    let sums = Operand { bytes: read.sums(c) * 4, ..out };
    bindings.push(Binding::new(sums, Access::Write));
    let traffic = u64::from(args.segments) * attend.cache_bytes(c) / 2 + sums.bytes;
    r.dispatch(read.kernel(), read.grid(c), 32 * SIMDS, bindings, &args, traffic);
}

fn split_kernel(tuning: &Tuning, fixed: bool) -> &'static str {
    match (fixed, tuning.pack_heads, tuning.coalesced_kv) {
        (false, true, true) => "attention_split",
        (false, false, true) => "attention_split_unpacked",
        (false, true, false) => "attention_split_strided",
        (false, false, false) => "attention_split_unpacked_strided",
        (true, true, true) => "attention_fixed",
        (true, false, true) => "attention_fixed_unpacked",
        (true, true, false) => "attention_fixed_strided",
        (true, false, false) => "attention_fixed_unpacked_strided",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(device: &str, kv_heads: u32, context: u32, tuning: &Tuning) -> DecodePolicy {
        let profile = Profile::named(device).unwrap();
        let shape = Shape::default();
        DecodePolicy::new(&shape, &profile, tuning, kv_heads, context)
    }

    #[test]
    fn splits_fill_the_device_and_hang_on_the_context_alone() {
        let tuning = Tuning::default();
        // Device, KV heads, context, most splits, splits.
        let table = [
            // 132 cores, 2 KV heads in 2 packs each: 264 threadgroups are 66 splits.
            ("h200", 2, 64, 66, 1),
            ("h200", 2, 65, 66, 2),
            ("h200", 2, 4096, 66, 64),
            ("h200", 2, 4224, 66, 66),
            ("h200", 2, 32767, 66, 66),
            // Pages from 32K on.
            ("h200", 2, 32768, 66, 128),
            ("h200", 2, 262_144, 66, 1024),
            // 40 cores: 80 threadgroups are 20 splits.
            ("m4-max", 2, 4096, 20, 20),
            ("m4-max", 2, 32768, 20, 128),
            // The demo model has one KV head: 2 columns.
            ("m5", 1, 4096, 10, 10),
            // More columns than threadgroups are wanted.
            ("m5", 64, 4096, 1, 1),
        ];
        for (device, kv_heads, context, most_splits, splits) in table {
            let p = policy(device, kv_heads, context, &tuning);
            assert_eq!((p.most_splits, p.splits), (most_splits, splits), "{device} {context}");
        }
    }

    #[test]
    fn packing_reads_the_cache_twice_else_eight_times() {
        let shape = |head_dim, heads_per_kv| Shape { head_dim, heads_per_kv, ..Shape::default() };
        let profile = Profile::named("m4-max").unwrap();
        let h200 = Profile::named("h200").unwrap();
        // Head, query heads a KV head, packed, reads packed, reads not packed.
        let table = [
            (256, 8, 4, 2, 8),
            (64, 4, 4, 1, 4),
            (64, 6, 4, 2, 6),
            (512, 8, 2, 4, 8),
            (128, 3, 2, 2, 3),
            (64, 1, 1, 1, 1),
        ];
        for (head_dim, heads_per_kv, pack, packed, apart) in table {
            let shape = shape(head_dim, heads_per_kv);
            let of = |tuning: &Tuning| DecodePolicy::new(&shape, &profile, tuning, 2, 4096);
            let on = of(&Tuning::default());
            let off = of(&Tuning::without("pack_heads").unwrap());
            assert_eq!((on.pack, on.cache_reads(&shape)), (pack, packed));
            assert_eq!((off.pack, off.cache_reads(&shape)), (1, apart));
            assert_eq!((on.splits, on.most_splits), (off.splits, off.most_splits));
            // Matrix units take eight heads at once, of whole 128s of elements, and cut nothing otherwise.
            let tuning = Tuning::default();
            let units = DecodePolicy::new(&shape, &h200, &tuning, 2, 40_000);
            let plain = Tuning::without("matrix_attention").unwrap();
            let plain = DecodePolicy::new(&shape, &h200, &plain, 2, 40_000);
            assert_eq!(units.units, head_dim % 128 == 0);
            assert_eq!(DecodePolicy { units: false, ..units }, plain);
            for name in ["pack_heads", "coalesced_kv"] {
                let other = Tuning::without(name).unwrap();
                let other = DecodePolicy::new(&shape, &h200, &other, 2, 40_000);
                assert_eq!(other.units, units.units, "{name}");
            }
        }
    }

    #[test]
    fn fixed_blocks_have_a_gate() {
        let at = |shape: &Shape, context, tuning: &Tuning| {
            let profile = Profile::named("h200").unwrap();
            let p = DecodePolicy::new(shape, &profile, tuning, 2, context);
            p.has_fixed(context)
        };
        let (on, off) = (Tuning::default(), Tuning::without("fixed_block").unwrap());
        let shape = Shape::default();
        assert!(at(&shape, 32_768, &on) && !at(&shape, 32_767, &on) && !at(&shape, 32_768, &off));
        assert!(!at(&Shape { head_dim: 128, ..shape }, 40_000, &on));
        assert!(!at(&Shape { heads_per_kv: 4, ..shape }, 40_000, &on));
        assert_eq!(split_kernel(&on, true), "attention_fixed");
        let names: std::collections::HashSet<&str> = [true, false]
            .into_iter()
            .flat_map(|fixed| {
                ["reuse_buffers", "pack_heads", "coalesced_kv"]
                    .map(|s| split_kernel(&Tuning::without(s).unwrap(), fixed))
            })
            .collect();
        assert_eq!(names.len(), 6);
    }
}
