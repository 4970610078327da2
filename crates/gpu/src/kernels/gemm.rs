//! Matrix products for more rows than a GEMV takes.

use std::mem::offset_of;

use lily_ops::ElementType;

use crate::kernel_args;
use crate::kernels::common::{Context, DeviceWeight, Matrix};
use crate::list::{Access, Binding, Operand, Recorder};
use crate::profile::Profile;
use crate::scratch::Scratch;
use crate::tuning::Tuning;

kernel_args! {
    /// Of the `gemm_*` kernels.
    pub struct GemmArgs {
        /// The weight.
        w: Matrix,
        /// Rows of activations.
        rows: u32,
        /// Large blocks of rows; the threadgroups after those have 16 rows each.
        blocks: u32,
        /// 0: bf16, 1: f32, 2: added to an f32 residual.
        store: u32,
        /// Blocks of columns, and of rows, in front of the dispatch's, where it is one of several.
        first: [u32; 2],
    }

    /// Of `dequantize`.
    pub struct DequantizeArgs {
        /// The weight.
        w: Matrix,
    }
}

/// Threads of a tile.
pub(crate) const TILE_THREADS: u32 = 128;

/// What becomes of a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Epilogue {
    /// Stored in the element type of the output: bf16 or f32.
    Store,
    /// Added to a residual (f32), in f32.
    AddTo(Operand),
}

/// How a product is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// The kernel.
    pub kernel: &'static str,
    /// Columns of a tile.
    pub columns: u32,
    /// Threads of a tile.
    pub threads: u32,
    /// Large blocks of rows.
    pub large: u32,
    /// Blocks of 16 rows after those.
    pub small: u32,
}

/// How rows of activations are cut into blocks: those of a product, or those that chose an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowBlocks {
    /// Rows of a large block; 0: there are only blocks of 16.
    pub large: u32,
    /// Most rows that are left to blocks of 16, where there are large ones.
    pub tail: u32,
}

impl RowBlocks {
    /// Without `adaptive_tiles`.
    pub const FIXED: Self = Self { large: 0, tail: 0 };
    /// Of tiles by four simdgroups: a block costs what its rows are, or would be.
    pub const SIMDGROUPS: Self = Self { large: 32, tail: 16 };
    /// Of tiles by `mma.sync`: a weight is dequantized once a block, and a block of few rows multiplies these alone.
    pub const UNITS: Self = Self { large: 128, tail: 0 };

    /// The cut of a device's tiles.
    pub fn of(profile: &Profile, tuning: &Tuning) -> Self {
        match (tuning.adaptive_tiles, profile.mma) {
            (false, _) => Self::FIXED,
            (true, false) => Self::SIMDGROUPS,
            (true, true) => Self::UNITS,
        }
    }

    /// Large blocks of that many rows, and blocks of 16 after those.
    pub fn blocks(self, rows: u32) -> (u32, u32) {
        let large = (rows + self.large.saturating_sub(1 + self.tail)).checked_div(self.large);
        let large = large.unwrap_or(0);
        (large, rows.saturating_sub(large * self.large).div_ceil(16))
    }
}

/// The tiles for a weight of `columns` outputs in `format`.
pub fn tiles(format: u32, rows: u32, columns: u32, profile: &Profile, tuning: &Tuning) -> Tiles {
    let (large, small) = RowBlocks::of(profile, tuning).blocks(rows);
    match profile.mma {
        true => unit_tiles(format, columns, large, small, profile),
        false => simdgroup_tiles(format, columns, large, small, profile),
    }
}

/// Columns and threads of the tiles by `wgmma`.
pub(crate) const WIDE: (u32, u32) = (256, 256);

/// The widest tiles that leave few cores without a threadgroup: activations are read once for their columns. Those by `wgmma` multiply
/// half as fast again on a core, so that fewer cores do. A weight is multiplied by one kind of instruction, whatever the number of rows:
/// the order of a sum is theirs.
fn unit_tiles(format: u32, columns: u32, large: u32, small: u32, profile: &Profile) -> Tiles {
    let groups = |n: u32| columns.div_ceil(n).saturating_mul(large + small);
    if profile.wgmma && format == 0 {
        let (kernel, (columns, threads)) = match groups(WIDE.0) >= profile.cores / 3 {
            true => ("gemm_wgmma_q4_n256", WIDE),
            false => ("gemm_wgmma_q4_n64", (64, 128)),
        };
        return Tiles { kernel, columns, threads, large, small };
    }
    let kernels: &[(&str, u32)] = match format {
        0 => &[("gemm_mma_q4_n128", 128), ("gemm_mma_q4_n32", 32)],
        1 => &[("gemm_mma_q8_n128", 128), ("gemm_mma_q8_n32", 32)],
        2 => &[("gemm_mma_bf16_n128", 128), ("gemm_mma_bf16_n32", 32)],
        // f32 matrices are vectors that steer something: never large.
        _ => &[("gemm_mma_any_n32", 32)],
    };
    let wide = kernels.iter().find(|(_, n)| columns >= *n && groups(*n) >= profile.cores / 4 * 3);
    let (kernel, columns) = *wide.unwrap_or(&kernels[kernels.len() - 1]);
    Tiles { kernel, columns, threads: TILE_THREADS, large, small }
}

/// 64 columns read activations half as often; 32 are for narrow weights, and where 64 would leave cores without a
/// threadgroup.
fn simdgroup_tiles(format: u32, columns: u32, large: u32, small: u32, profile: &Profile) -> Tiles {
    let groups = columns.div_ceil(64).saturating_mul(large + small);
    let narrow = columns <= 32 || groups < profile.thresholds.tile_groups * profile.cores;
    let (kernel, columns) = match (format, narrow) {
        (0, false) => ("gemm_q4_n64", 64),
        (0, true) => ("gemm_q4_n32", 32),
        (1, false) => ("gemm_q8_n64", 64),
        (1, true) => ("gemm_q8_n32", 32),
        (2, false) => ("gemm_bf16_n64", 64),
        (2, true) => ("gemm_bf16_n32", 32),
        // f32 matrices are vectors that steer something: never large.
        _ => ("gemm_any_n32", 32),
    };
    Tiles { kernel, columns, threads: TILE_THREADS, large, small }
}

/// Whether the tiles can read rows of this many elements: 16 bytes at a time.
pub fn supports(cols: u32) -> Result<(), String> {
    match cols % 8 {
        0 => Ok(()),
        _ => Err(format!("a matrix with {cols} inputs; the kernels take multiples of 8")),
    }
}

/// A weight as a product reads it: as it is, or expanded by an earlier dispatch.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    pub(crate) weight: DeviceWeight,
    access: Access,
}

impl Source {
    pub(crate) fn binding(&self) -> Binding {
        Binding::new(self.weight.slab, self.access)
    }

    /// The weight for a product. Without [`Tuning::dequantize_in_gemm`] quantized weights are expanded to bf16 first.
    pub(crate) fn new(
        r: &mut Recorder,
        c: &Context,
        weight: &DeviceWeight,
        scratch: &mut Scratch,
    ) -> Self {
        if c.tuning.dequantize_in_gemm || weight.matrix.format > 1 {
            return Self { weight: weight.clone(), access: Access::Constant };
        }
        Self { weight: dequantize(r, weight, scratch), access: Access::Read }
    }
}

/// Expands a weight to bf16.
fn dequantize(r: &mut Recorder, weight: &DeviceWeight, scratch: &mut Scratch) -> DeviceWeight {
    let Matrix { rows, cols, .. } = weight.matrix;
    let elements = u64::from(weight.matrices) * u64::from(rows) * u64::from(cols);
    let slab = scratch.take(elements, ElementType::Bf16);
    r.dispatch(
        "dequantize",
        [(cols / 8).div_ceil(256), rows, weight.matrices],
        256,
        vec![Binding::new(weight.slab, Access::Constant), Binding::new(slab, Access::Write)],
        &DequantizeArgs { w: weight.matrix },
        weight.bytes + slab.bytes,
    );
    let stride = (u64::from(rows) * u64::from(cols) * 2 / 16) as u32;
    let matrix = Matrix {
        codes: 0,
        scales: 0,
        biases: 0,
        codes_stride: stride,
        scales_stride: 0,
        format: 2,
        ..weight.matrix
    };
    DeviceWeight { slab, matrix, matrices: weight.matrices, bytes: slab.bytes }
}

/// A product: `rows` rows of activations (bf16) with a weight.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// Activations, bf16.
    pub x: Operand,
    /// Rows of them.
    pub rows: u32,
    /// The weight.
    pub weight: &'a DeviceWeight,
    /// The result, bf16 or f32.
    pub out: Operand,
    /// What becomes of it.
    pub epilogue: Epilogue,
}

/// Records a product for any number of rows.
pub fn dense(r: &mut Recorder, c: &Context, scratch: &mut Scratch, product: &Product) {
    let Product { x, rows, weight, out, epilogue } = *product;
    if rows == 0 {
        return;
    }
    let source = Source::new(r, c, weight, scratch);
    let w = source.weight.matrix;
    let tiles = tiles(w.format, rows, w.rows, c.profile, c.tuning);
    let results = u64::from(rows) * u64::from(w.rows);
    let (store, residual, moved) = match epilogue {
        Epilogue::AddTo(residual) => (2, residual, results * 8),
        // Nothing reads the residual then; a binding must still be there.
        Epilogue::Store if out.element == ElementType::F32 => (1, x, results * 4),
        Epilogue::Store => (0, x, results * 2),
    };
    r.dispatch(
        tiles.kernel,
        [w.rows.div_ceil(tiles.columns), tiles.large + tiles.small, 1],
        tiles.threads,
        vec![
            source.binding(),
            Binding::new(x, Access::Read),
            Binding::new(residual, Access::Read),
            Binding::new(out, Access::Write),
        ],
        &GemmArgs { w, rows, blocks: tiles.large, store, first: [0; 2] },
        source.weight.bytes + u64::from(rows) * u64::from(w.cols) * 2 + moved,
    );
    r.worth(u64::from(rows) * w.elements());
    // Along the longer side.
    let rows_longer = usize::from(tiles.large + tiles.small > w.rows.div_ceil(tiles.columns));
    r.may_cut(rows_longer, offset_of!(GemmArgs, first) + rows_longer * size_of::<u32>());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_in_blocks() {
        for (rows, adaptive, want) in [
            (1, true, (0, 1)),
            (16, true, (0, 1)),
            // 17 rows in one block of 32 waste 15 rows, in two of 16 they read the weights twice.
            (17, true, (1, 0)),
            (32, true, (1, 0)),
            (33, true, (1, 1)),
            (48, true, (1, 1)),
            (49, true, (2, 0)),
            (2048, true, (64, 0)),
            (17, false, (0, 2)),
            (33, false, (0, 3)),
        ] {
            let cut = if adaptive { RowBlocks::SIMDGROUPS } else { RowBlocks::FIXED };
            assert_eq!(cut.blocks(rows), want, "{rows} rows");
        }
        for (rows, want) in [(1, (1, 0)), (128, (1, 0)), (129, (2, 0)), (4096, (32, 0))] {
            assert_eq!(RowBlocks::UNITS.blocks(rows), want, "{rows} rows");
        }
    }

    #[test]
    fn tiles_of_real_matrices() {
        let tuning = Tuning::default();
        let h200 = Profile::named("h200").unwrap();
        let a100 = Profile { wgmma: false, ..h200.clone() };
        let m4 = Profile::named("m4-max").unwrap();
        for (format, rows, columns, profile, kernel) in [
            // Enough threadgroups: wide tiles.
            (0, 2048, 2048, &m4, "gemm_q4_n64"),
            // 2 blocks of rows by 32 of columns are fewer than two a core: narrow ones.
            (0, 64, 2048, &m4, "gemm_q4_n32"),
            (0, 128, 2048, &m4, "gemm_q4_n64"),
            (0, 8192, 32, &m4, "gemm_q4_n32"),
            (3, 2048, 1, &m4, "gemm_any_n32"),
            // 16 blocks of rows by 32 of columns.
            (0, 2048, 8192, &h200, "gemm_wgmma_q4_n256"),
            (0, 2048, 8192, &a100, "gemm_mma_q4_n128"),
            // The shared expert's: 32 by 2.
            (0, 4096, 512, &h200, "gemm_wgmma_q4_n256"),
            (0, 2048, 512, &h200, "gemm_wgmma_q4_n64"),
            (0, 64, 2048, &h200, "gemm_wgmma_q4_n64"),
            (0, 64, 2048, &a100, "gemm_mma_q4_n32"),
            // The router's and the gates' weights are narrow.
            (1, 512, 256, &h200, "gemm_mma_q8_n32"),
            (1, 16384, 256, &h200, "gemm_mma_q8_n128"),
            (0, 4096, 32, &h200, "gemm_wgmma_q4_n64"),
            (0, 4096, 32, &a100, "gemm_mma_q4_n32"),
            (2, 2048, 8192, &h200, "gemm_mma_bf16_n128"),
            (2, 16, 64, &h200, "gemm_mma_bf16_n32"),
            (3, 2048, 1, &h200, "gemm_mma_any_n32"),
        ] {
            let tiles = tiles(format, rows, columns, profile, &tuning);
            assert_eq!(tiles.kernel, kernel, "{rows} rows, {columns} columns on {}", profile.name);
        }
        assert!(supports(2048).is_ok() && supports(50).unwrap_err().contains("50 inputs"));
    }
}
