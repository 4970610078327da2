//! The recurrence of Gated DeltaNet in chunks of tokens, by matrix units: in prefill, where the device has `mma.sync`.

use crate::kernel_args;
use crate::kernels::common::Context;
use crate::kernels::delta::{ScanInputs, read, state_bytes, table_bytes, tables, write};
use crate::list::{Operand, Recorder};
use crate::profile::Profile;
use crate::scratch::Scratch;
use crate::text::Shape;
use crate::tuning::Tuning;
use lily_ops::ElementType;

kernel_args! {
    /// Of `delta_chunk_parts` and `delta_chunk`.
    pub struct ChunkArgs {
        /// Elements of a row of q, k and v.
        channels: u32,
        /// Key heads.
        key_heads: u32,
        /// Value heads.
        heads: u32,
        /// Recurrent layer.
        layer: u32,
        /// Words of one state.
        state_words: u32,
        /// Segments of so many rows take part, and of more.
        least: u32,
    }
}

/// Tokens of a chunk: `CHUNK` of the text.
const CHUNK: u32 = 32;
/// Rows of the state that a threadgroup keeps.
const VALUES: u32 = 32;
/// Simdgroups of a threadgroup.
const SIMDS: u32 = 4;
/// Elements of the largest key head that registers and threadgroup memory have room for.
const MOST_KEYS: u32 = 128;
/// Words of what is prepared of a chunk and head: two triangles of six blocks of 128, four factors a token.
const PART: u32 = 2 * 6 * 128 + 4 * CHUNK;

/// Threadgroup memory of `delta_chunk`: K, Q and V of two chunks, padded, and the corrections of one.
fn threadgroup_bytes(shape: &Shape) -> u32 {
    2 * CHUNK * (2 * (shape.key_dim + 8) + VALUES + 8) * 2 + CHUNK * VALUES * 4
}

/// Rows from which on a segment goes chunk by chunk; `u32::MAX`: none does. By default one whole chunk: below that the matrix units would multiply
/// what is not there, for a second launch. A segment's form hangs on its own rows alone.
pub fn chunked_from(shape: &Shape, profile: &Profile, tuning: &Tuning) -> u32 {
    let fits = shape.key_dim <= MOST_KEYS
        && shape.value_dim.is_multiple_of(VALUES)
        && threadgroup_bytes(shape) <= profile.threadgroup_memory;
    match profile.mma && tuning.chunked_scan && fits {
        true => profile.thresholds.chunked_from,
        false => u32::MAX,
    }
}

/// What is prepared of a step's chunks.
#[derive(Clone, Copy, Debug)]
pub struct Parts {
    operand: Operand,
    least: u32,
}

/// Rows of the segments that go chunk by chunk.
fn own(c: &Context, least: u32) -> impl Iterator<Item = u32> {
    c.step.segments.iter().copied().filter(move |n| *n >= least)
}

fn chunks(c: &Context, least: u32) -> u64 {
    own(c, least).map(|n| u64::from(n.div_ceil(CHUNK))).sum()
}

fn args(c: &Context, inputs: ScanInputs, layer: usize, least: u32) -> ChunkArgs {
    let (channels, heads) = inputs.sizes(c.shape);
    ChunkArgs {
        channels,
        key_heads: inputs.key_heads as u32,
        heads,
        layer: layer as u32,
        state_words: c.tables.state_words,
        least,
    }
}

/// Prepares the chunks of the segments of `least` rows or more, if there are any.
pub fn delta_chunk_parts(
    r: &mut Recorder,
    c: &Context,
    scratch: &mut Scratch,
    inputs: ScanInputs,
    least: u32,
) -> Option<Parts> {
    let longest = own(c, least).max()?;
    let args = args(c, inputs, 0, least);
    let segments = c.step.segments.len() as u32;
    // Where a segment's chunks begin hangs on its first row and its number, see `chunk_part`.
    let places = u64::from(c.step.rows() / CHUNK + segments) * u64::from(args.heads);
    let operand = scratch.take(places * u64::from(PART), ElementType::F32);
    let bindings = vec![
        read(inputs.qkv),
        read(inputs.decay),
        read(inputs.beta),
        tables(c)[0].clone(),
        write(operand),
    ];
    let grid = [longest.div_ceil(CHUNK), args.heads.div_ceil(SIMDS), segments];
    let row = 4 * args.key_heads * c.shape.key_dim + 8 * args.heads;
    let tokens: u64 = own(c, least).map(u64::from).sum();
    let units = chunks(c, least) * u64::from(args.heads);
    let bytes = tokens * u64::from(row) + units * u64::from(PART) * 4;
    r.dispatch("delta_chunk_parts", grid, SIMDS * 32, bindings, &args, bytes + table_bytes(c));
    // The lower triangles of two products, and the substitution.
    r.worth(units * u64::from(24 * c.shape.key_dim / 32 * 2048 + CHUNK * CHUNK / 2 * CHUNK));
    Some(Parts { operand, least })
}

/// The recurrence of the prepared chunks; `out` is bf16.
pub fn delta_chunk(
    r: &mut Recorder,
    c: &Context,
    inputs: ScanInputs,
    parts: Parts,
    layer: usize,
    layers: usize,
    out: Operand,
) {
    let args = args(c, inputs, layer, parts.least);
    let [entries, headers] = tables(c);
    let bindings = vec![
        read(inputs.qkv),
        read(parts.operand),
        entries,
        headers,
        c.tables.recurrent(layer, layers),
        write(out),
    ];
    let slices = c.shape.value_dim / VALUES;
    let grid = [slices, args.heads, c.step.segments.len() as u32];
    let tokens: u64 = own(c, parts.least).map(u64::from).sum();
    let units = chunks(c, parts.least) * u64::from(args.heads);
    let states = state_bytes(c, args.heads, own(c, parts.least).count());
    let row = 2 * args.channels + 2 * args.heads * c.shape.value_dim;
    let bytes = tokens * u64::from(row) + units * u64::from(PART) * 4 + states;
    r.dispatch("delta_chunk", grid, SIMDS * 32, bindings, &args, bytes + table_bytes(c));
    // A simdgroup's products of 2,048: the state with K or Q and the update, each of two parts, and a triangle of three.
    let products = 2 * (c.shape.key_dim / 16 * 4 * 2) + 3 * 6;
    r.worth(units * u64::from(slices * SIMDS * products * 2048));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_segments_go_chunk_by_chunk() {
        let on = Tuning::default();
        let off = Tuning::without("chunked_scan").unwrap();
        let real = Shape::default();
        let from = |shape: &Shape, name: &str, tuning: &Tuning| {
            chunked_from(shape, &Profile::named(name).unwrap(), tuning)
        };
        // A whole chunk.
        assert_eq!(from(&real, "h200", &on), 32);
        assert_eq!(from(&real, "h200", &off), u32::MAX);
        // No mma.sync.
        assert_eq!(from(&real, "m5-max", &on), u32::MAX);
        assert_eq!(from(&real, "softgpu", &on), u32::MAX);
        // Heads of the small models; a key head that the kernel has no registers for.
        for (key_dim, from_rows) in [(32, 32), (64, 32), (96, 32), (256, u32::MAX)] {
            let shape = Shape { key_dim, value_dim: 64, ..real };
            assert_eq!(from(&shape, "h200", &on), from_rows, "{key_dim}");
        }
        // 32 KiB of threadgroup memory hold two chunks of heads of 64, not of 128.
        let small = Profile { threadgroup_memory: 32 << 10, ..Profile::named("h200").unwrap() };
        assert_eq!(threadgroup_bytes(&real), 44_032);
        assert_eq!(chunked_from(&real, &small, &on), u32::MAX);
        assert_eq!(chunked_from(&Shape { key_dim: 64, ..real }, &small, &on), 32);
    }
}
