//! Quantized activations times affine 4-bit weights.
//!
//! The words of 16 weight rows are transposed so that a lane is an output row; a word of four
//! activation codes then meets 16 outputs in one instruction. The nibbles stay packed until use,
//! which keeps a panel of 2048 columns at 16 KiB. When all activation rows fit one tile, words are
//! used as soon as they are transposed: even with one row that outruns main memory. Otherwise
//! some panels are packed into the second-level cache and every tile meets all of them.
//!
//! Everything is generic over the number `P` of int8 planes that the activation codes consist of.

use super::{Matrix, PANEL, Task, tiles, with_scratch};
use crate::kernels::quantize::{CodeKind, GROUP, QuantRows};
use crate::simd::{Isa, Simd};
use crate::simd_entry;

/// Panel bytes of one group: 8 words of 16 rows, then scales and biases.
const GROUP_BYTES: usize = GROUP / 2 * PANEL;
const PANEL_GROUP_BYTES: usize = GROUP_BYTES + 2 * 4 * PANEL;

/// Most rows of a tile, on any instruction set.
const MAX_TILE: usize = 12;

/// Tile bytes of one group: the codes, scales and sums of its rows.
const fn tile_group_bytes(planes: usize) -> usize {
    MAX_TILE * (planes * GROUP + 2 * 4)
}

/// Panels that are packed together take at most this much, unless one alone takes more.
const PANELS_BYTES: usize = 192 << 10;

/// Most scratch bytes of a task over matrices of `cols` columns.
pub(super) fn scratch_bytes(cols: usize) -> usize {
    let groups = cols / GROUP;
    groups * tile_group_bytes(2) + PANELS_BYTES.max(groups * PANEL_GROUP_BYTES)
}

/// Runs a task and returns the weight bytes that it read.
///
/// # Safety
/// Row indices are in range of `x` and of the output, nothing else uses the results' places, and
/// `x` has the columns of the matrix.
pub(super) unsafe fn run(isa: Isa, task: &Task<'_>, x: &QuantRows) -> usize {
    let groups = task.matrix.cols / GROUP;
    let panel_bytes = groups * PANEL_GROUP_BYTES;
    let at_once = (PANELS_BYTES / panel_bytes.max(1)).clamp(1, task.panels.len());
    let planes = x.kind().planes();
    let bytes = groups * tile_group_bytes(planes) + at_once * panel_bytes;
    debug_assert!(bytes <= scratch_bytes(task.matrix.cols));
    with_scratch(bytes, |scratch| {
        let scratch = Scratch { start: scratch, groups, planes, at_once };
        // SAFETY: the scratch memory has the size that `Scratch` divides; the rest is the caller's
        // promise.
        unsafe { run_panels(isa, task, x, scratch) }
    })
}

/// Scratch memory: a tile of activations, then `at_once` panels.
#[derive(Clone, Copy)]
struct Scratch {
    start: *mut u8,
    groups: usize,
    planes: usize,
    at_once: usize,
}

impl Scratch {
    fn tile(self) -> Tile {
        let code_bytes = self.groups * MAX_TILE * self.planes * GROUP;
        let scales: *mut f32 = self.start.wrapping_add(code_bytes).cast();
        let sums = scales.wrapping_add(self.groups * MAX_TILE);
        Tile { codes: self.start.cast(), scales, sums }
    }

    fn panel(self, index: usize) -> Panel {
        let before = tile_group_bytes(self.planes) + index * PANEL_GROUP_BYTES;
        let codes = self.start.wrapping_add(self.groups * before);
        let scales: *mut f32 = codes.wrapping_add(self.groups * GROUP_BYTES).cast();
        let biases = scales.wrapping_add(self.groups * PANEL);
        Panel { groups: self.groups, codes, scales, biases }
    }
}

/// 16 rows of weights.
#[derive(Clone, Copy)]
struct Panel {
    groups: usize,
    /// `[group][word][output][4]` bytes of packed nibbles.
    codes: *mut u8,
    /// `[group][output]`.
    scales: *mut f32,
    /// `[group][output]`.
    biases: *mut f32,
}

/// Up to 12 rows of activations, group by group, so that the kernel addresses all by one pointer.
#[derive(Clone, Copy)]
struct Tile {
    /// `[group][row][plane][64]`.
    codes: *mut i8,
    /// `[group][row]`.
    scales: *mut f32,
    /// `[group][row]`.
    sums: *mut f32,
}

simd_entry! {
    unsafe fn run_panels(task: &Task<'_>, x: &QuantRows, scratch: Scratch) -> usize = run_panels_kernel;
}

#[inline(always)]
unsafe fn run_panels_kernel<S: Simd>(task: &Task<'_>, x: &QuantRows, scratch: Scratch) -> usize {
    let (code_bytes, scale_bytes) = task.matrix.format.row_bytes(task.matrix.cols);
    let outputs = task.matrix.rows.min(task.panels.end * PANEL) - task.panels.start * PANEL;
    // SAFETY: the conditions are the same.
    unsafe {
        match x.kind() {
            CodeKind::I8 => run_rows::<S, 1>(task, x, scratch),
            CodeKind::I16 => run_rows::<S, 2>(task, x, scratch),
        }
    }
    outputs * (code_bytes + 2 * scale_bytes)
}

/// # Safety
/// As for [`run`], with `P` planes.
#[inline(always)]
unsafe fn run_rows<S: Simd, const P: usize>(task: &Task<'_>, x: &QuantRows, scratch: Scratch) {
    // SAFETY: the conditions are the same.
    unsafe {
        if task.rows.len <= S::ROW_TILE {
            run_few_rows::<S, P>(task, x, scratch);
        } else {
            run_many_rows::<S, P>(task, x, scratch);
        }
    }
}

/// Calls a function with the numbers of planes and rows as its constant parameters;
/// tiles that the instruction set does not use are not compiled.
macro_rules! with_rows {
    ($rows:expr, $function:ident($($arg:expr),*)) => {
        match $rows {
            1 => $function::<S, P, 1>($($arg),*),
            2 => $function::<S, P, 2>($($arg),*),
            3 => $function::<S, P, 3>($($arg),*),
            4 => $function::<S, P, 4>($($arg),*),
            5 if const { S::ROW_TILE >= 5 } => $function::<S, P, 5>($($arg),*),
            6 if const { S::ROW_TILE >= 6 } => $function::<S, P, 6>($($arg),*),
            7 if const { S::ROW_TILE >= 7 } => $function::<S, P, 7>($($arg),*),
            8 if const { S::ROW_TILE >= 8 } => $function::<S, P, 8>($($arg),*),
            9 if const { S::ROW_TILE >= 9 } => $function::<S, P, 9>($($arg),*),
            10 if const { S::ROW_TILE >= 10 } => $function::<S, P, 10>($($arg),*),
            11 if const { S::ROW_TILE >= 11 } => $function::<S, P, 11>($($arg),*),
            12 if const { S::ROW_TILE >= 12 } => $function::<S, P, 12>($($arg),*),
            _ => unreachable!("a tile has 1 to {} rows", S::ROW_TILE),
        }
    };
}

/// All rows fit one tile: weights are transposed and used at once, two groups at a time, so that
/// main memory is kept busy throughout.
///
/// # Safety
/// As for [`run`].
#[inline(always)]
unsafe fn run_few_rows<S: Simd, const P: usize>(task: &Task<'_>, x: &QuantRows, scratch: Scratch) {
    // SAFETY: the same conditions; the tile is gathered before it is used.
    unsafe {
        with_rows!(task.rows.len, gather_tile(task, x, scratch, 0));
        for index in task.panels.clone() {
            let panel = scratch.panel(0);
            pack_scales::<S>(task.matrix.scales, &task.matrix, index, panel.scales);
            pack_scales::<S>(task.matrix.biases, &task.matrix, index, panel.biases);
            with_rows!(task.rows.len, stream_panel(task, scratch.tile(), panel, index));
        }
    }
}

/// Several tiles: some panels are packed, then every tile of activations meets all of them.
///
/// # Safety
/// As for [`run`].
#[inline(always)]
unsafe fn run_many_rows<S: Simd, const P: usize>(task: &Task<'_>, x: &QuantRows, scratch: Scratch) {
    for start in task.panels.clone().step_by(scratch.at_once) {
        let chunk = start..task.panels.end.min(start + scratch.at_once);
        // SAFETY: the same conditions; tiles and panels are filled before they are used.
        unsafe {
            for index in chunk.clone() {
                let panel = scratch.panel(index - start);
                pack_codes::<S>(&task.matrix, index, panel.codes);
                pack_scales::<S>(task.matrix.scales, &task.matrix, index, panel.scales);
                pack_scales::<S>(task.matrix.biases, &task.matrix, index, panel.biases);
            }
            for tile in tiles(task.rows.len, S::ROW_TILE) {
                with_rows!(tile.len(), gather_tile(task, x, scratch, tile.start));
                for index in chunk.clone() {
                    let panel = scratch.panel(index - start);
                    with_rows!(
                        tile.len(),
                        run_tile(task, scratch.tile(), panel, tile.start, index)
                    );
                }
            }
        }
    }
}

/// The first byte of each row of a panel; rows past the last one of the matrix repeat it, their
/// results are not stored.
#[inline(always)]
fn row_pointers(
    bytes: &[u8],
    row_bytes: usize,
    matrix: &Matrix<'_>,
    index: usize,
) -> [*const u8; PANEL] {
    let mut rows = [bytes.as_ptr(); PANEL];
    for (i, row) in rows.iter_mut().enumerate() {
        *row = row.wrapping_add(row_bytes * (index * PANEL + i).min(matrix.rows - 1));
    }
    rows
}

/// Loads up to 64 bytes of each of 16 rows and transposes their words.
///
/// # Safety
/// Every row has `bytes` readable bytes from `start` on.
#[inline(always)]
unsafe fn transposed_words<S: Simd>(
    rows: &[*const u8; PANEL],
    start: usize,
    bytes: usize,
    ahead: usize,
) -> [S::I32; PANEL] {
    // SAFETY: by the caller's promise; a prefetch may go anywhere.
    unsafe {
        let mut words = [S::splat_i32(0); PANEL];
        for (word, row) in words.iter_mut().zip(rows) {
            let src = row.add(start);
            S::prefetch(src.wrapping_add(ahead));
            *word = if bytes == 64 { S::load_i32(src) } else { S::load_i32_partial(src, bytes) };
        }
        S::transpose16(words)
    }
}

/// Packs the nibbles of a panel.
///
/// # Safety
/// The matrix has the panel, and `packed` has room for it.
#[inline(always)]
unsafe fn pack_codes<S: Simd>(matrix: &Matrix<'_>, index: usize, packed: *mut u8) {
    let row_bytes = matrix.cols / 2;
    let rows = row_pointers(matrix.codes, row_bytes, matrix, index);
    for start in (0..row_bytes).step_by(64) {
        let bytes = 64.min(row_bytes - start);
        // SAFETY: `start + bytes <= row_bytes`; a byte of a row takes 16 of the panel.
        unsafe {
            let columns = transposed_words::<S>(&rows, start, bytes, PANEL * row_bytes);
            for (i, column) in columns.into_iter().take(bytes / 4).enumerate() {
                S::store_i32(packed.add(PANEL * (start + 4 * i)), column);
            }
        }
    }
}

/// Transposes the bf16 scales (or biases) of a panel and widens them.
///
/// # Safety
/// The matrix has the panel, and `packed` has room for it.
#[inline(always)]
unsafe fn pack_scales<S: Simd>(scales: &[u8], matrix: &Matrix<'_>, index: usize, packed: *mut f32) {
    let groups = matrix.cols / GROUP;
    let row_bytes = 2 * groups;
    let rows = row_pointers(scales, row_bytes, matrix, index);
    for start in (0..row_bytes).step_by(64) {
        let bytes = 64.min(row_bytes - start);
        // SAFETY: `start + bytes <= row_bytes`; stores stay below `groups` vectors.
        unsafe {
            let columns = transposed_words::<S>(&rows, start, bytes, PANEL * row_bytes);
            // A word is the bf16 of an even group, then that of the odd group after it.
            for (i, pair) in columns.into_iter().enumerate() {
                let group = start / 2 + 2 * i;
                if group < groups {
                    let even = S::cast_f32(S::shl_i32(pair, 16));
                    S::store(packed.add(PANEL * group), even);
                }
                if group + 1 < groups {
                    let odd = S::cast_f32(S::and_i32(pair, S::splat_i32(!0xffff)));
                    S::store(packed.add(PANEL * (group + 1)), odd);
                }
            }
        }
    }
}

/// Copies `R` activation rows, from `start` of the task's list on.
///
/// # Safety
/// The rows exist, and the scratch memory has the groups of `x`.
#[inline(always)]
unsafe fn gather_tile<S: Simd, const P: usize, const R: usize>(
    task: &Task<'_>,
    x: &QuantRows,
    scratch: Scratch,
    start: usize,
) {
    let tile = scratch.tile();
    for r in 0..R {
        let row = task.rows.x(start + r);
        let (codes, scales, sums) = (x.codes(row), x.scales(row), x.sums(row));
        for group in 0..scratch.groups {
            let at = group * R + r;
            // SAFETY: `at` is below the room for 12 rows of every group.
            unsafe {
                for p in 0..P {
                    let codes = S::load_i32(codes.add(GROUP * (group * P + p)).cast());
                    S::store_i32(tile.codes.add(GROUP * (at * P + p)).cast(), codes);
                }
                *tile.scales.add(at) = scales[group];
                *tile.sums.add(at) = sums[group];
            }
        }
    }
}

/// Adds one group to the sums: the normative chain.
///
/// # Safety
/// `codes` are the packed nibbles of the group; the tile and the panel's scales are filled.
#[inline(always)]
unsafe fn add_group<S: Simd, const P: usize, const R: usize>(
    acc: &mut [S::F32; R],
    tile: Tile,
    panel: Panel,
    codes: *const u8,
    group: usize,
) {
    // SAFETY: `group` is one of tile and panel.
    unsafe {
        let mut x = [std::ptr::null(); R];
        for (r, x) in x.iter_mut().enumerate() {
            *x = tile.codes.add(P * GROUP * (group * R + r)).cast_const();
        }
        let dots = S::group_dots::<P, R>(codes, &x);
        let scale = S::load(panel.scales.add(PANEL * group));
        let bias = S::load(panel.biases.add(PANEL * group));
        for r in 0..R {
            let at = group * R + r;
            let product = S::mul(scale, S::splat(*tile.scales.add(at)));
            acc[r] = S::fma(product, S::from_i32(dots[r]), acc[r]);
            acc[r] = S::fma(bias, S::splat(*tile.sums.add(at)), acc[r]);
        }
    }
}

/// Stores the results of a panel for the `R` rows from `start` on.
///
/// # Safety
/// The places of the results are valid, and no one else's.
#[inline(always)]
unsafe fn store_results<S: Simd, const R: usize>(
    task: &Task<'_>,
    acc: [S::F32; R],
    start: usize,
    index: usize,
) {
    let first = index * PANEL;
    let outputs = PANEL.min(task.matrix.rows - first);
    for (r, acc) in acc.into_iter().enumerate() {
        let y = task.output.at(task.rows.y(start + r), first);
        // SAFETY: by the caller's promise.
        unsafe {
            if outputs == PANEL {
                S::store(y, acc);
            } else {
                S::store_partial(y, acc, outputs);
            }
        }
    }
}

/// Multiplies a packed panel by the `R` rows of the tile, which are those from `start` on.
///
/// # Safety
/// As for [`run`]; tile and panel are filled.
#[inline(always)]
unsafe fn run_tile<S: Simd, const P: usize, const R: usize>(
    task: &Task<'_>,
    tile: Tile,
    panel: Panel,
    start: usize,
    index: usize,
) {
    // SAFETY: tile and panel have the same groups; output rows are the caller's promise.
    unsafe {
        let mut acc = [S::splat(0.0); R];
        for group in 0..panel.groups {
            let codes = panel.codes.add(GROUP_BYTES * group);
            add_group::<S, P, R>(&mut acc, tile, panel, codes, group);
        }
        store_results::<S, R>(task, acc, start, index);
    }
}

/// Multiplies a panel by the `R` rows of the task, transposing two groups at a time.
///
/// # Safety
/// As for [`run`]; the tile and the panel's scales are filled.
#[inline(always)]
unsafe fn stream_panel<S: Simd, const P: usize, const R: usize>(
    task: &Task<'_>,
    tile: Tile,
    panel: Panel,
    index: usize,
) {
    let row_bytes = task.matrix.cols / 2;
    let rows = row_pointers(task.matrix.codes, row_bytes, &task.matrix, index);
    // SAFETY: `start + bytes <= row_bytes`; the panel has room for two groups, or for one if the
    // matrix has no more; output rows are the caller's promise.
    unsafe {
        let mut acc = [S::splat(0.0); R];
        for start in (0..row_bytes).step_by(64) {
            let bytes = 64.min(row_bytes - start);
            let columns = transposed_words::<S>(&rows, start, bytes, PANEL * row_bytes);
            for (i, column) in columns.into_iter().take(bytes / 4).enumerate() {
                S::store_i32(panel.codes.add(PANEL * 4 * i), column);
            }
            for half in 0..bytes / (GROUP / 2) {
                let codes = panel.codes.add(GROUP_BYTES * half);
                add_group::<S, P, R>(&mut acc, tile, panel, codes, start / (GROUP / 2) + half);
            }
        }
        store_results::<S, R>(task, acc, 0, index);
    }
}
