//! `y = x Wᵀ` for dense matrices and for stacks of experts.
//!
//! Two families: quantized activations with 4-bit weights (`int4`), and f32 activations with every
//! format (`float`). Both take a panel of 16 output rows at a time and read its weights once,
//! however many activation rows there are.

mod float;
mod int4;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use crate::kernels::quantize::{GROUP, QuantRows};
use crate::pool::Pool;
use crate::simd::Isa;

/// Output rows of a panel, one a lane.
const PANEL: usize = 16;

/// Tasks for each thread that a call aims at, so that threads finish together.
const TASKS_PER_THREAD: usize = 8;

/// How a matrix is stored; everything is little-endian and may be unaligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightFormat {
    /// Affine 4-bit codes, low nibble first; a bf16 scale and bias for each 64 columns.
    Q4,
    /// Affine 8-bit codes; a bf16 scale and bias for each 64 columns.
    Q8,
    /// bf16.
    Bf16,
    /// f32.
    F32,
}

impl WeightFormat {
    /// Bytes of one row: codes (or values), and scales, which biases equal.
    pub fn row_bytes(self, cols: usize) -> (usize, usize) {
        match self {
            Self::Q4 => (cols / 2, cols / GROUP * 2),
            Self::Q8 => (cols, cols / GROUP * 2),
            Self::Bf16 => (cols * 2, 0),
            Self::F32 => (cols * 4, 0),
        }
    }

    fn is_grouped(self) -> bool {
        matches!(self, Self::Q4 | Self::Q8)
    }
}

/// Bytes from one matrix of a stack to the next. More than a matrix when, for instance, gate and up
/// projections of an expert follow one another.
#[derive(Clone, Copy, Debug, Default)]
pub struct MatrixStrides {
    /// In the codes or values.
    pub codes: usize,
    /// In the scales.
    pub scales: usize,
    /// In the biases.
    pub biases: usize,
}

/// A stack of matrices `[rows, cols]`, usually straight from the mapped checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct WeightView<'a> {
    /// Storage of the elements.
    pub format: WeightFormat,
    /// Codes or values; starts at matrix 0, row 0.
    pub codes: &'a [u8],
    /// Scales, empty for dense formats.
    pub scales: &'a [u8],
    /// Biases, empty for dense formats.
    pub biases: &'a [u8],
    /// Outputs of one matrix.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Number of matrices.
    pub matrices: usize,
    /// Distances between matrices; unused for a single one.
    pub strides: MatrixStrides,
}

impl<'a> WeightView<'a> {
    /// A single matrix.
    pub fn dense(
        format: WeightFormat,
        codes: &'a [u8],
        scales: &'a [u8],
        biases: &'a [u8],
        rows: usize,
        cols: usize,
    ) -> Self {
        Self {
            format,
            codes,
            scales,
            biases,
            rows,
            cols,
            matrices: 1,
            strides: MatrixStrides::default(),
        }
    }

    /// Matrices that follow one another without gaps.
    pub fn stacked(mut self, matrices: usize) -> Self {
        let (codes, scales) = self.format.row_bytes(self.cols);
        self.matrices = matrices;
        self.strides = MatrixStrides {
            codes: self.rows * codes,
            scales: self.rows * scales,
            biases: self.rows * scales,
        };
        self
    }

    /// Whether the kernels can multiply this; `quantized` tells the kind of the activations.
    pub fn supported(&self, quantized: bool) -> Result<(), String> {
        if quantized && self.format != WeightFormat::Q4 {
            return Err(format!("quantized activations need 4-bit weights, not {:?}", self.format));
        }
        if self.format.is_grouped() && !self.cols.is_multiple_of(GROUP) {
            return Err(format!("{} columns are not whole groups of {GROUP}", self.cols));
        }
        let (codes, scales) = self.format.row_bytes(self.cols);
        let parts = [
            ("codes", self.codes, codes, self.strides.codes),
            ("scales", self.scales, scales, self.strides.scales),
            ("biases", self.biases, scales, self.strides.biases),
        ];
        for (name, bytes, row_bytes, stride) in parts {
            let before_last = self.matrices.saturating_sub(1).checked_mul(stride);
            let needed = before_last.and_then(|n| n.checked_add(self.rows.checked_mul(row_bytes)?));
            if self.matrices > 0 && needed.is_none_or(|needed| needed > bytes.len()) {
                return Err(format!("{} bytes of {name} are too few for the shape", bytes.len()));
            }
        }
        Ok(())
    }

    /// The bytes of one matrix.
    fn matrix(&self, index: usize) -> Matrix<'a> {
        assert!(index < self.matrices, "matrix {index} of {}", self.matrices);
        let (codes, scales) = self.format.row_bytes(self.cols);
        let part = |bytes: &'a [u8], row_bytes: usize, stride: usize| {
            if row_bytes == 0 { &[] } else { &bytes[index * stride..][..self.rows * row_bytes] }
        };
        Matrix {
            format: self.format,
            codes: part(self.codes, codes, self.strides.codes),
            scales: part(self.scales, scales, self.strides.scales),
            biases: part(self.biases, scales, self.strides.biases),
            rows: self.rows,
            cols: self.cols,
        }
    }
}

/// One matrix; the slices have exactly the bytes of the shape.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    format: WeightFormat,
    codes: &'a [u8],
    scales: &'a [u8],
    biases: &'a [u8],
    rows: usize,
    cols: usize,
}

/// The activation rows that meet one matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowGroup {
    /// Index of the matrix.
    pub matrix: usize,
    /// Range in the index lists of [`Rows::Routed`]; may be empty.
    pub rows: Range<usize>,
}

/// Which activation rows meet which matrices.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// Rows `0..n` meet matrix 0; row i of x gives row i of y.
    Dense(usize),
    /// Each group meets its matrix; entry i of the lists reads row `x_rows[i]` and gives `y_rows[i]`.
    Routed {
        /// Groups; ranges must not overlap.
        groups: &'a [RowGroup],
        /// Rows of x, repeated at will.
        x_rows: &'a [u32],
        /// Rows of y, all different.
        y_rows: &'a [u32],
    },
}

impl<'a> Rows<'a> {
    fn group_count(&self) -> usize {
        match self {
            Self::Dense(_) => 1,
            Self::Routed { groups, .. } => groups.len(),
        }
    }

    /// The matrix of a group and its rows.
    fn group(&self, index: usize) -> (usize, RowList<'a>) {
        match *self {
            Self::Dense(rows) => (0, RowList { len: rows, indices: None }),
            Self::Routed { groups, x_rows, y_rows } => {
                let RowGroup { matrix, rows } = &groups[index];
                let indices = Some((&x_rows[rows.clone()], &y_rows[rows.clone()]));
                (*matrix, RowList { len: rows.len(), indices })
            }
        }
    }
}

/// The rows of one group.
#[derive(Clone, Copy)]
struct RowList<'a> {
    len: usize,
    /// Rows of x and of y, both `len` long; `None` for the identity.
    indices: Option<(&'a [u32], &'a [u32])>,
}

impl RowList<'_> {
    #[inline(always)]
    fn x(&self, i: usize) -> usize {
        self.indices.map_or(i, |(x, _)| x[i] as usize)
    }

    #[inline(always)]
    fn y(&self, i: usize) -> usize {
        self.indices.map_or(i, |(_, y)| y[i] as usize)
    }
}

/// Activations.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// Codes, for 4-bit weights.
    Quantized(&'a QuantRows),
    /// f32 rows.
    F32 {
        /// The rows.
        x: &'a [f32],
        /// Elements from one row to the next.
        stride: usize,
    },
}

impl Input<'_> {
    fn check(&self, cols: usize, rows: usize) {
        match *self {
            Self::Quantized(x) => {
                assert!(x.cols() == cols, "activations have {} columns, weights {cols}", x.cols());
                assert!(rows <= x.rows(), "activation row {} of {}", rows - 1, x.rows());
            }
            Self::F32 { x, stride } => {
                let enough = rows == 0 || (rows - 1) * stride + cols <= x.len();
                assert!(enough, "activations are too short for {rows} rows");
            }
        }
    }
}

/// Where results go: output o of row r is `y[r * stride + column + o]`.
#[derive(Debug)]
pub struct Output<'a> {
    /// The buffer.
    pub y: &'a mut [f32],
    /// Elements from one row to the next.
    pub stride: usize,
    /// First column.
    pub column: usize,
}

/// [`Output`] as the tasks see it.
#[derive(Clone, Copy)]
struct RawOutput {
    y: *mut f32,
    stride: usize,
    column: usize,
}

impl RawOutput {
    /// Address of an output of a row.
    #[inline(always)]
    fn at(&self, row: usize, output: usize) -> *mut f32 {
        self.y.wrapping_add(row * self.stride + self.column + output)
    }
}

/// What one task computes: some panels of one matrix, for all rows of one group.
struct Task<'a> {
    matrix: Matrix<'a>,
    rows: RowList<'a>,
    panels: Range<usize>,
    output: RawOutput,
}

/// Multiplies and returns when `output` is complete.
///
/// `bytes_read` grows by the weight bytes that were read: those of a matrix once for each group
/// with rows, however many rows there are.
///
/// # Panics
/// The view is not [supported](WeightView::supported), an index is out of range, or two results go
/// to one place.
pub fn linear(
    pool: &Pool,
    isa: Isa,
    input: Input<'_>,
    weights: &WeightView<'_>,
    rows: Rows<'_>,
    output: Output<'_>,
    bytes_read: &AtomicU64,
) {
    let quantized = matches!(input, Input::Quantized(_));
    weights.supported(quantized).unwrap_or_else(|reason| panic!("{reason}"));
    check_rows(&input, weights, rows, &output);

    let y = AtomicPtr::new(output.y.as_mut_ptr());
    let (stride, column) = (output.stride, output.column);
    let panels = weights.rows.div_ceil(PANEL);
    let block = panels_per_task(panels, rows, pool.threads());
    let blocks = panels.div_ceil(block);
    pool.run(rows.group_count() * blocks, &|task, _| {
        let (matrix, rows) = rows.group(task / blocks);
        if rows.len == 0 {
            return;
        }
        let first = task % blocks * block;
        let task = Task {
            matrix: weights.matrix(matrix),
            rows,
            panels: first..panels.min(first + block),
            output: RawOutput { y: y.load(Ordering::Relaxed), stride, column },
        };
        // SAFETY: `check_rows` has found every row index in range and every result in a place of
        // its own, and `matrix` the weight bytes.
        let bytes = unsafe {
            match input {
                Input::Quantized(x) => int4::run(isa, &task, x),
                Input::F32 { x, stride } => float::run(isa, &task, x, stride),
            }
        };
        bytes_read.fetch_add(bytes as u64, Ordering::Relaxed);
    });
}

/// Asserts everything that the unsafe kernels rely on.
fn check_rows(input: &Input<'_>, weights: &WeightView<'_>, rows: Rows<'_>, output: &Output<'_>) {
    let (x_rows, y_rows) = match rows {
        Rows::Dense(rows) => (rows, rows),
        Rows::Routed { groups, x_rows, y_rows } => {
            let lists = groups.iter().flat_map(|group| {
                assert!(
                    group.matrix < weights.matrices,
                    "matrix {} of {}",
                    group.matrix,
                    weights.matrices
                );
                x_rows[group.rows.clone()].iter().zip(&y_rows[group.rows.clone()])
            });
            RowSet::with(|seen| {
                lists.fold((0, 0), |(x_end, y_end), (&x, &y)| {
                    seen.insert(y as usize);
                    (x_end.max(x as usize + 1), y_end.max(y as usize + 1))
                })
            })
        }
    };
    assert!(
        output.column + weights.rows <= output.stride,
        "results are wider than a row of the output"
    );
    assert!(
        y_rows * output.stride <= output.y.len() + output.stride - output.column - weights.rows
    );
    input.check(weights.cols, x_rows);
}

/// A set of row numbers that asserts that none comes twice.
#[derive(Default)]
struct RowSet {
    words: Vec<u64>,
}

impl RowSet {
    /// Calls `f` with an empty set; the memory is kept for the next call of this thread.
    fn with<T>(f: impl FnOnce(&mut Self) -> T) -> T {
        thread_local! {
            static SET: RefCell<RowSet> = RefCell::default();
        }
        SET.with_borrow_mut(|set| {
            set.words.clear();
            f(set)
        })
    }

    fn insert(&mut self, row: usize) {
        let word = row / 64;
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        let bit = 1 << (row % 64);
        assert!(self.words[word] & bit == 0, "two results go to output row {row}");
        self.words[word] |= bit;
    }
}

/// How many panels make a task: enough tasks for the threads even when one group has most rows.
fn panels_per_task(panels: usize, rows: Rows<'_>, threads: usize) -> usize {
    // Reading a panel costs as much as multiplying it by a few rows.
    let cost = |rows: usize| if rows == 0 { 0 } else { rows + 4 };
    let costs = (0..rows.group_count()).map(|group| cost(rows.group(group).1.len));
    let (total, largest) =
        costs.fold((0, 1), |(total, largest), cost| (total + cost, cost.max(largest)));
    (total * panels / (threads * TASKS_PER_THREAD * largest)).clamp(1, panels.max(1))
}

/// Most scratch memory that a thread keeps for matrices of `cols` columns, in bytes.
pub fn scratch_bytes(cols: usize) -> usize {
    int4::scratch_bytes(cols).max(float::scratch_bytes(cols))
}

/// Scratch memory of the current thread, aligned for vectors and of at least `bytes` bytes.
fn with_scratch<T>(bytes: usize, f: impl FnOnce(*mut u8) -> T) -> T {
    #[derive(Clone, Copy)]
    #[repr(C, align(64))]
    struct Line([u8; 64]);
    thread_local! {
        static SCRATCH: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
    }
    SCRATCH.with_borrow_mut(|lines| {
        let needed = bytes.div_ceil(64);
        if lines.len() < needed {
            lines.resize(needed, Line([0; 64]));
        }
        f(lines.as_mut_ptr().cast())
    })
}

/// Cuts `rows` into tiles of nearly equal size, each at most `largest`.
fn tiles(rows: usize, largest: usize) -> impl Iterator<Item = Range<usize>> {
    let count = rows.div_ceil(largest);
    (0..count).map(move |tile| rows * tile / count..rows * (tile + 1) / count)
}
