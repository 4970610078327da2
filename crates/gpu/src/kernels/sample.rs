//! Choosing the next token on the device, and the end of a step. Log-probabilities are the host's, from logits read back.

use lily_ops::ElementType;
use lily_ops::sample::{ONE, SampleParams, depth_scale};

use crate::kernel_args;
use crate::kernels::common::Context;
use crate::kernels::elementwise::CountArgs;
use crate::list::{Access, Binding, Operand, Recorder};
use crate::scratch::Scratch;

kernel_args! {
    /// How the token of one segment is chosen; one for each segment of the step. Written by the host in a shared
    /// buffer.
    pub struct SamplerEntry {
        /// The row of the logits, or [`NONE`]: no token is chosen.
        row: u32,
        /// 1: the segment's slot moves on as well, by the segment's rows; 0: only a token is chosen.
        advance: u32,
        /// 1: takes the largest logit.
        greedy: u32,
        /// [`depth_scale`] of the temperature.
        scale: f32,
        /// Largest logits that are kept; 0 keeps all.
        top_k: u32,
        /// 1: cuts at top-p.
        cut_top_p: u32,
        /// `⌊top_p · 2^64⌋`, lower half.
        top_p_low: u32,
        /// Upper half.
        top_p_high: u32,
        /// Smallest weight that min-p keeps, lower half.
        floor_low: u32,
        /// Upper half.
        floor_high: u32,
        /// Seed, lower half.
        seed_low: u32,
        /// Upper half.
        seed_high: u32,
        /// Which of several answers.
        choice: u32,
        /// 1: penalties are not neutral.
        penalties: u32,
        /// Repetition penalty.
        repetition: f32,
        /// Presence penalty.
        presence: f32,
        /// Frequency penalty.
        frequency: f32,
        /// Number of its mask among [`Choices::masks`], or [`NONE`].
        mask: u32,
        /// First of its entries in [`Choices::biases`].
        first_bias: u32,
        /// How many they are.
        biases: u32,
    }

    /// What is added to a token's raw logit.
    pub struct BiasEntry {
        /// The token.
        id: u32,
        /// The addend.
        value: f32,
    }

    /// What was chosen for one segment. Read by the host from a shared buffer.
    pub struct ResultEntry {
        /// The token.
        token: u32,
        /// 0: it is one; 1: no token may be chosen, or a logit is NaN.
        status: u32,
    }

    /// Of the kernels that read logits.
    pub struct SampleArgs {
        /// Logits of a row.
        vocab: u32,
        /// Logits of a block.
        block: u32,
        /// Blocks of a row.
        blocks: u32,
        /// Threads of a block's threadgroup.
        scan_threads: u32,
        /// Threads of a row's threadgroup.
        pick_threads: u32,
        /// 0.
        zero: u32,
    }
}

/// Nothing of the kind.
pub const NONE: u32 = u32::MAX;

/// Blocks of a row at most, as `sample_pick` has room for.
const MAX_BLOCKS: u32 = 64;

/// Words of a block's results, as in sample.metal.
const PARTIAL_WORDS: u64 = 5;

/// Words of a block's bins: counts and two words of the weights each.
const BIN_WORDS: u64 = 3 * 320;

impl SamplerEntry {
    /// A segment for which no token is chosen.
    pub fn none(advance: bool) -> Self {
        Self { row: NONE, advance: u32::from(advance), ..bytemuck::Zeroable::zeroed() }
    }

    /// A segment whose token is chosen by `params` from row `row` of the logits; `mask` is the number of the
    /// parameters' mask among [`Choices::masks`].
    pub fn new(params: &SampleParams, row: u32, advance: bool, mask: Option<u32>) -> Self {
        let top_p = (f64::from(params.top_p) * 2f64.powi(64)) as u64;
        let floor = (f64::from(params.min_p) * ONE as f64) as u64;
        let greedy = params.temperature == 0.0 || params.top_k == 1;
        let neutral = params.repetition_penalty == 1.0
            && params.presence_penalty == 0.0
            && params.frequency_penalty == 0.0;
        Self {
            row,
            advance: u32::from(advance),
            greedy: u32::from(greedy),
            scale: if greedy { 0.0 } else { depth_scale(params.temperature) },
            top_k: params.top_k,
            cut_top_p: u32::from(params.top_p < 1.0),
            top_p_low: top_p as u32,
            top_p_high: (top_p >> 32) as u32,
            floor_low: floor as u32,
            floor_high: (floor >> 32) as u32,
            seed_low: params.seed as u32,
            seed_high: (params.seed >> 32) as u32,
            choice: params.choice,
            penalties: u32::from(!neutral),
            repetition: params.repetition_penalty,
            presence: params.presence_penalty,
            frequency: params.frequency_penalty,
            mask: mask.unwrap_or(NONE),
            first_bias: 0,
            biases: 0,
        }
    }
}

/// What tokens are chosen from, and where they go.
#[derive(Clone, Copy, Debug)]
pub struct Choices {
    /// `rows × vocabulary`, f32.
    pub logits: Operand,
    /// Logits of a row.
    pub vocab: u32,
    /// [`SamplerEntry`] of each segment.
    pub params: Operand,
    /// Words of the masks: a bit a token, `⌈vocabulary / 32⌉` words a mask.
    pub masks: Operand,
    /// [`BiasEntry`]s; those of a segment lie together, ascending by id.
    pub biases: Operand,
    /// How often each token was chosen: u32, `slots × vocabulary`.
    pub counts: Operand,
    /// [`ResultEntry`] of each segment.
    pub results: Operand,
    /// Whether every segment takes the largest logit, or none: one stage less.
    pub greedy: bool,
}

/// Cuts rows of logits into blocks: enough for all cores, few enough for one threadgroup to combine.
fn cut(vocab: u32) -> SampleArgs {
    let block = vocab.div_ceil(MAX_BLOCKS).next_multiple_of(32).max(64);
    SampleArgs {
        vocab,
        block,
        blocks: vocab.div_ceil(block).max(1),
        scan_threads: block.min(256),
        pick_threads: (vocab / 8).next_multiple_of(32).clamp(32, 768),
        zero: 0,
    }
}

/// Chooses a token for each segment that asks for one, and ends the step for each that
/// [advances](SamplerEntry::advance): position, parity, last token, counters.
pub fn sample(r: &mut Recorder, c: &Context, scratch: &mut Scratch, choices: Choices) {
    let Choices { logits, vocab, params, masks, biases, counts, results, greedy } = choices;
    debug_assert!(logits.element == ElementType::F32 && counts.element == ElementType::U32);
    let args = cut(vocab);
    let segments = c.step.segments.len() as u32;
    let blocks = u64::from(segments) * u64::from(args.blocks);
    let partials = scratch.take(blocks * PARTIAL_WORDS, ElementType::U32);
    // Greedy kernels are bound to bins that they do not touch.
    let bins = match greedy {
        true => partials,
        false => scratch.take(blocks * BIN_WORDS, ElementType::U32),
    };
    let read = |operand| Binding::new(operand, Access::Read);
    let write = |operand| Binding::new(operand, Access::Write);
    let common = [logits, params, c.tables.segments, counts, masks, biases].map(read);
    let with = |more: &[Binding]| [common.as_slice(), more].concat();
    let grid = [args.blocks, segments, 1];
    let row = u64::from(segments) * u64::from(vocab) * 4;
    let partial_bytes = blocks * PARTIAL_WORDS * 4;
    let scan = with(&[write(partials)]);
    r.dispatch("sample_scan", grid, args.scan_threads, scan, &args, row + partial_bytes);
    if !greedy {
        let traffic = row + 2 * partial_bytes + bins.bytes;
        let bindings = with(&[write(partials), write(bins)]);
        r.dispatch("sample_bins", grid, args.scan_threads, bindings, &args, traffic);
    }
    let mut pick = with(&[read(partials), read(bins), write(c.tables.headers), write(results)]);
    pick[3] = write(counts);
    let traffic = partial_bytes + if greedy { 0 } else { bins.bytes };
    r.dispatch("sample_pick", [segments, 1, 1], args.pick_threads, pick, &args, traffic);
}

/// Ends a step in which no segment chooses a token: every slot moves on by its segment's rows.
pub fn finish(r: &mut Recorder, c: &Context) {
    let count = c.step.segments.len() as u32;
    let bindings = vec![
        Binding::new(c.tables.segments, Access::Read),
        Binding::new(c.tables.headers, Access::Write),
    ];
    let traffic = u64::from(count) * 48;
    let groups = [count.div_ceil(32), 1, 1];
    r.dispatch("finish_step", groups, 32, bindings, &CountArgs { count }, traffic);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_cut_into_blocks() {
        for vocab in [1, 63, 64, 65, 3000, 248_320, 1 << 20] {
            let args = cut(vocab);
            assert!(args.blocks <= MAX_BLOCKS && args.block.is_multiple_of(32), "{vocab}");
            assert!(args.blocks * args.block >= vocab && (args.blocks - 1) * args.block < vocab);
            assert!(args.scan_threads.is_multiple_of(32) && args.pick_threads.is_multiple_of(32));
        }
        // Every lane of the real model's kernels has something to do.
        let args = cut(248_320);
        assert_eq!((args.block, args.blocks, args.pick_threads), (3904, 64, 768));
    }
}
