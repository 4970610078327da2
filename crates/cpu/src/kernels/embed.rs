//! Token embedding: rows of a quantized or dense table as f32.

use super::common::{SharedMut, blocks, store_n};
use crate::pool::Pool;
use crate::simd::{Isa, Simd};
use crate::simd_entry;

/// Weights that share a scale and a bias.
const GROUP: usize = 64;

/// Rows of an embedding table, as unaligned bytes of the checkpoint.
#[derive(Clone, Copy, Debug)]
pub enum EmbedTable<'a> {
    /// Affine codes (`w = scale * code + bias`), scales and biases bf16 for each group of 64.
    Affine {
        /// Bits of a code: 4 (low nibble first) or 8.
        bits: u32,
        /// Codes, `width * bits / 8` bytes a row.
        codes: &'a [u8],
        /// Little-endian bf16, `width / 64` a row.
        scales: &'a [u8],
        /// Little-endian bf16, `width / 64` a row.
        biases: &'a [u8],
    },
    /// Little-endian bf16.
    Bf16(&'a [u8]),
    /// Little-endian f32.
    F32(&'a [u8]),
}

impl EmbedTable<'_> {
    /// Whether [`embed`] takes rows of this width; the error says why not.
    pub fn supported(&self, width: usize) -> Result<(), String> {
        match self {
            EmbedTable::Affine { bits, .. } if !matches!(bits, 4 | 8) => {
                Err(format!("{bits}-bit embedding: need 4 or 8"))
            }
            EmbedTable::Affine { .. } if !width.is_multiple_of(GROUP) => {
                Err(format!("quantized embedding of width {width}: need a multiple of {GROUP}"))
            }
            _ => Ok(()),
        }
    }
}

/// Writes the table rows of `tokens` to `out` (`[tokens][width]`).
pub fn embed(
    isa: Isa,
    pool: &Pool,
    table: &EmbedTable<'_>,
    width: usize,
    tokens: &[u32],
    out: &mut [f32],
) {
    table.supported(width).expect("table checked at prepare time");
    assert_eq!(out.len(), tokens.len() * width);
    let blocks = blocks(tokens.len(), width);
    let out = SharedMut::new(out);
    pool.run(blocks.count, &|task, _| {
        for i in blocks.range(task) {
            // SAFETY: each task has its own rows.
            let out = unsafe { out.slice(i * width, width) };
            embed_row(isa, table, tokens[i] as usize, out);
        }
    });
}

simd_entry! {
    fn embed_row(table: &EmbedTable<'_>, id: usize, out: &mut [f32]) = embed_row_kernel;
}

#[inline(always)]
unsafe fn embed_row_kernel<S: Simd>(table: &EmbedTable<'_>, id: usize, out: &mut [f32]) {
    let width = out.len();
    match *table {
        EmbedTable::Affine { bits, codes, scales, biases } => {
            let bytes = GROUP * bits as usize / 8;
            let groups = width / GROUP;
            let codes = &codes[id * groups * bytes..][..groups * bytes];
            let scales = &scales[id * groups * 2..][..groups * 2];
            let biases = &biases[id * groups * 2..][..groups * 2];
            for (g, out) in out.chunks_exact_mut(GROUP).enumerate() {
                // SAFETY: a group has `bytes` bytes of codes and 64 outputs.
                unsafe {
                    let scale = S::splat(bf16(&scales[2 * g..]));
                    let bias = S::splat(bf16(&biases[2 * g..]));
                    for part in 0..GROUP / 16 {
                        let from = codes.as_ptr().add(g * bytes + part * bytes / 4);
                        let code = if bits == 4 { S::load_u4(from) } else { S::load_u8(from) };
                        let w = S::fma(scale, S::from_i32(code), bias);
                        S::store(out.as_mut_ptr().add(part * 16), w);
                    }
                }
            }
        }
        EmbedTable::Bf16(values) => {
            let row = &values[id * width * 2..][..width * 2];
            for (out, row) in out.chunks_mut(16).zip(row.chunks(32)) {
                // SAFETY: unaligned loads of the bytes of `row`.
                unsafe { store_n::<S>(out, S::load_bf16_partial(row.as_ptr().cast(), out.len())) }
            }
        }
        EmbedTable::F32(values) => {
            let row = &values[id * width * 4..][..width * 4];
            for (out, row) in out.chunks_mut(16).zip(row.chunks(64)) {
                // SAFETY: unaligned loads of the bytes of `row`.
                unsafe { store_n::<S>(out, S::load_partial(row.as_ptr().cast(), out.len())) }
            }
        }
    }
}

fn bf16(bytes: &[u8]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16)
}
