//! f32 activations times weights of any format.
//!
//! A panel of 16 rows is widened to f32 once. A tile multiplies some of its rows by up to four
//! activation rows, sixteen results in all, whose lane sums are then reduced together.

use super::{Matrix, PANEL, Task, WeightFormat, with_scratch};
use crate::kernels::quantize::GROUP;
use crate::simd::{Isa, LANES, Simd};
use crate::simd_entry;

/// Scratch bytes of a task over matrices of `cols` columns.
pub(super) fn scratch_bytes(cols: usize) -> usize {
    4 * PANEL * cols.next_multiple_of(LANES)
}

/// Runs a task and returns the weight bytes that it read.
///
/// # Safety
/// Row indices are in range of `x` (rows `stride` apart) and of the output, and nothing else uses
/// the results' places.
pub(super) unsafe fn run(isa: Isa, task: &Task<'_>, x: &[f32], stride: usize) -> usize {
    with_scratch(scratch_bytes(task.matrix.cols), |scratch| {
        // SAFETY: the scratch memory holds 16 rows; the rest is the caller's promise.
        unsafe { run_panels(isa, task, x, stride, scratch.cast()) }
    })
}

simd_entry! {
    unsafe fn run_panels(task: &Task<'_>, x: &[f32], stride: usize, panel: *mut f32) -> usize = run_panels_kernel;
}

#[inline(always)]
unsafe fn run_panels_kernel<S: Simd>(
    task: &Task<'_>,
    x: &[f32],
    stride: usize,
    panel: *mut f32,
) -> usize {
    let Matrix { format, rows, cols, .. } = task.matrix;
    let (code_bytes, scale_bytes) = format.row_bytes(cols);
    let width = cols.next_multiple_of(LANES);
    let mut bytes_read = 0;
    for index in task.panels.clone() {
        let first = index * PANEL;
        let outputs = PANEL.min(rows - first);
        for output in 0..outputs {
            // SAFETY: the row exists, and the panel has room for 16.
            unsafe { widen_row::<S>(&task.matrix, first + output, panel.add(output * width)) };
        }
        let mut start = 0;
        while start < task.rows.len {
            let rest = task.rows.len - start;
            let tile = Tile { start, rows: rest.min(4), first, outputs, width };
            // SAFETY: rows from `start` on exist; the rest is the caller's promise.
            unsafe {
                match rest {
                    1 => run_tile::<S, 1>(task, x, stride, panel, &tile),
                    2 => run_tile::<S, 2>(task, x, stride, panel, &tile),
                    _ => run_tile::<S, 4>(task, x, stride, panel, &tile),
                }
            }
            start += tile.rows;
        }
        bytes_read += outputs * (code_bytes + 2 * scale_bytes);
    }
    bytes_read
}

/// Writes a row of the matrix as f32, zeros up to a multiple of 16.
///
/// # Safety
/// The row exists and `dst` has room.
#[inline(always)]
unsafe fn widen_row<S: Simd>(matrix: &Matrix<'_>, row: usize, dst: *mut f32) {
    let cols = matrix.cols;
    let (code_bytes, scale_bytes) = matrix.format.row_bytes(cols);
    let codes = matrix.codes[row * code_bytes..][..code_bytes].as_ptr();
    let bf16 = |bytes: &[u8], at: usize| {
        f32::from_bits(u32::from(u16::from_le_bytes([bytes[at], bytes[at + 1]])) << 16)
    };
    let full = cols - cols % LANES;
    let rest = cols - full;
    // SAFETY: reads stay inside the row's `cols` elements, writes inside the padded width.
    unsafe {
        match matrix.format {
            WeightFormat::Q4 | WeightFormat::Q8 => {
                for k in (0..cols).step_by(LANES) {
                    let at = row * scale_bytes + k / GROUP * 2;
                    let scale = S::splat(bf16(matrix.scales, at));
                    let bias = S::splat(bf16(matrix.biases, at));
                    let code = match matrix.format {
                        WeightFormat::Q4 => S::load_u4(codes.add(k / 2)),
                        _ => S::load_u8(codes.add(k)),
                    };
                    S::store(dst.add(k), S::fma(scale, S::from_i32(code), bias));
                }
            }
            WeightFormat::Bf16 => {
                for k in (0..full).step_by(LANES) {
                    S::store(dst.add(k), S::load_bf16(codes.add(2 * k).cast()));
                }
                if rest > 0 {
                    S::store(dst.add(full), S::load_bf16_partial(codes.add(2 * full).cast(), rest));
                }
            }
            WeightFormat::F32 => {
                for k in (0..full).step_by(LANES) {
                    S::store(dst.add(k), S::cast_f32(S::load_i32(codes.add(4 * k))));
                }
                if rest > 0 {
                    let last = S::load_i32_partial(codes.add(4 * full), 4 * rest);
                    S::store(dst.add(full), S::cast_f32(last));
                }
            }
        }
    }
}

/// Some rows of a task against one panel.
struct Tile {
    /// First row in the task's list.
    start: usize,
    /// Number of rows; for three, the kernel for four repeats the last.
    rows: usize,
    /// First output of the panel.
    first: usize,
    /// Outputs of the panel.
    outputs: usize,
    /// Elements of a panel row.
    width: usize,
}

/// Multiplies by `R` rows, `16 / R` outputs at a time.
///
/// # Safety
/// As for [`run`]; the panel is filled and `tile` lies inside the task.
#[inline(always)]
unsafe fn run_tile<S: Simd, const R: usize>(
    task: &Task<'_>,
    x: &[f32],
    stride: usize,
    panel: *const f32,
    tile: &Tile,
) {
    let cols = task.matrix.cols;
    let mut rows = [x.as_ptr(); R];
    for (r, row) in rows.iter_mut().enumerate() {
        let index = task.rows.x(tile.start + r.min(tile.rows - 1));
        *row = x[index * stride..][..cols].as_ptr();
    }
    let step = LANES / R;
    for output in (0..tile.outputs).step_by(step) {
        let mut results = [0.0f32; LANES];
        // SAFETY: the panel has 16 rows of `width` (rows past `outputs` hold stale numbers whose
        // results are dropped), each activation row has `cols` elements.
        unsafe {
            let weights = panel.add(output * tile.width);
            let mut sums = [S::splat(0.0); LANES];
            macro_rules! multiply {
                ($outputs:literal x $rows:literal) => {
                    for o in (0..step).step_by($outputs) {
                        for r in (0..R).step_by($rows) {
                            let mut x = [rows[0]; $rows];
                            x.copy_from_slice(&rows[r..r + $rows]);
                            let weights = weights.add(o * tile.width);
                            let part =
                                lane_sums::<S, $outputs, $rows>(weights, tile.width, x, cols);
                            for (i, part) in part.into_iter().enumerate() {
                                for (j, sum) in part.into_iter().enumerate() {
                                    sums[(o + i) * R + r + j] = sum;
                                }
                            }
                        }
                    }
                };
            }
            match (S::WIDE, R) {
                (true, 1) => multiply!(16 x 1),
                (true, 2) => multiply!(8 x 2),
                (true, _) => multiply!(4 x 4),
                (false, 1) => multiply!(4 x 1),
                (false, _) => multiply!(2 x 2),
            }
            S::store(results.as_mut_ptr(), S::reduce16(sums));
        }
        for o in 0..step.min(tile.outputs - output) {
            for r in 0..tile.rows {
                let y = task.output.at(task.rows.y(tile.start + r), tile.first + output + o);
                // SAFETY: the place of this result, by the caller's promise.
                unsafe { *y = results[o * R + r] };
            }
        }
    }
}

/// The lanes of the normative dot product, for `O` weight rows by `R` activation rows.
///
/// # Safety
/// The weight rows have `cols` elements padded with zeros to 16, the activation rows have `cols`.
#[inline(always)]
unsafe fn lane_sums<S: Simd, const O: usize, const R: usize>(
    weights: *const f32,
    width: usize,
    x: [*const f32; R],
    cols: usize,
) -> [[S::F32; R]; O] {
    // SAFETY: full vectors end at or before `cols`; the last one reads what is left of x.
    unsafe {
        let mut sums = [[S::splat(0.0); R]; O];
        let mut lanes = [S::splat(0.0); R];
        macro_rules! accumulate {
            ($k:expr, $load:ident $(, $rest:expr)?) => {
                for r in 0..R {
                    lanes[r] = S::$load(x[r].add($k) $(, $rest)?);
                }
                for o in 0..O {
                    let weight = S::load(weights.add(o * width + $k));
                    for r in 0..R {
                        sums[o][r] = S::fma(weight, lanes[r], sums[o][r]);
                    }
                }
            };
        }
        let full = cols - cols % LANES;
        for k in (0..full).step_by(LANES) {
            accumulate!(k, load);
        }
        if full < cols {
            accumulate!(full, load_partial, cols - full);
        }
        sums
    }
}
