//! Bit-equality with plain loops in the normative order.

use super::*;
use crate::kernels::quantize::CodeKind;

/// xorshift64*, for reproducible data.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    /// Between -1 and 1.
    fn unit(&mut self) -> f32 {
        self.bits() as f32 / 2f32.powi(31) - 1.0
    }

    fn below(&mut self, n: usize) -> usize {
        self.bits() as usize % n
    }
}

fn to_bf16(x: f32) -> u16 {
    half::bf16::from_f32(x).to_bits()
}

fn from_bf16(bytes: &[u8], index: usize) -> f32 {
    half::bf16::from_bits(u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]])).to_f32()
}

/// Owns the bytes of a stack of matrices; each part starts at an odd address offset and has gaps
/// between matrices.
struct Weights {
    format: WeightFormat,
    parts: [Vec<u8>; 3],
    rows: usize,
    cols: usize,
    matrices: usize,
    strides: MatrixStrides,
}

/// Bytes before the first matrix.
const OFFSET: usize = 3;

impl Weights {
    fn new(
        random: &mut Random,
        format: WeightFormat,
        matrices: usize,
        rows: usize,
        cols: usize,
    ) -> Self {
        let (codes, scales) = format.row_bytes(cols);
        let strides = MatrixStrides {
            codes: rows * codes + 5,
            scales: rows * scales + 7,
            biases: rows * scales + 2,
        };
        let mut bf16s = |bytes: usize| -> Vec<u8> {
            (0..bytes / 2 + 1).flat_map(|_| to_bf16(random.unit() * 0.1).to_le_bytes()).collect()
        };
        // Values after the offset are misaligned bf16 or f32, so these are made per format.
        let scales =
            [bf16s(OFFSET + matrices * strides.scales), bf16s(OFFSET + matrices * strides.biases)];
        let mut weights = Self {
            format,
            parts: [Vec::new(), Vec::new(), Vec::new()],
            rows,
            cols,
            matrices,
            strides,
        };
        let codes_len = OFFSET + matrices * strides.codes;
        weights.parts[0] = (0..codes_len).map(|_| random.bits() as u8).collect();
        for (part, stride, pool) in
            [(1, strides.scales, &scales[0]), (2, strides.biases, &scales[1])]
        {
            let mut bytes = vec![0xaa; OFFSET + matrices * stride];
            for matrix in 0..matrices {
                let len = rows * format.row_bytes(cols).1;
                let at = OFFSET + matrix * stride;
                bytes[at..at + len].copy_from_slice(&pool[2 * matrix..2 * matrix + len]);
            }
            weights.parts[part] = bytes;
        }
        if !format.is_grouped() {
            weights.fill_dense(random);
        }
        weights
    }

    fn fill_dense(&mut self, random: &mut Random) {
        for matrix in 0..self.matrices {
            let mut at = OFFSET + matrix * self.strides.codes;
            for _ in 0..self.rows * self.cols {
                let value = random.unit();
                let bytes = match self.format {
                    WeightFormat::Bf16 => to_bf16(value).to_le_bytes().to_vec(),
                    _ => value.to_le_bytes().to_vec(),
                };
                self.parts[0][at..at + bytes.len()].copy_from_slice(&bytes);
                at += bytes.len();
            }
        }
    }

    fn view(&self) -> WeightView<'_> {
        WeightView {
            format: self.format,
            codes: &self.parts[0][OFFSET..],
            scales: &self.parts[1][OFFSET..],
            biases: &self.parts[2][OFFSET..],
            rows: self.rows,
            cols: self.cols,
            matrices: self.matrices,
            strides: self.strides,
        }
    }

    fn row_bytes(&self) -> usize {
        let (codes, scales) = self.format.row_bytes(self.cols);
        codes + 2 * scales
    }

    fn code(&self, matrix: usize, row: usize, col: usize) -> u8 {
        let start = OFFSET + matrix * self.strides.codes;
        let bytes = &self.parts[0][start..];
        match self.format {
            WeightFormat::Q4 => (bytes[(row * self.cols + col) / 2] >> (4 * (col % 2))) & 15,
            _ => bytes[row * self.cols + col],
        }
    }

    fn scale_bias(&self, matrix: usize, row: usize, group: usize) -> (f32, f32) {
        let index = row * self.cols / GROUP + group;
        let scales = &self.parts[1][OFFSET + matrix * self.strides.scales..];
        let biases = &self.parts[2][OFFSET + matrix * self.strides.biases..];
        (from_bf16(scales, index), from_bf16(biases, index))
    }

    fn value(&self, matrix: usize, row: usize, col: usize) -> f32 {
        let bytes = &self.parts[0][OFFSET + matrix * self.strides.codes..];
        let index = row * self.cols + col;
        match self.format {
            WeightFormat::Bf16 => from_bf16(bytes, index),
            WeightFormat::F32 => f32::from_le_bytes(bytes[4 * index..][..4].try_into().unwrap()),
            _ => {
                let (scale, bias) = self.scale_bias(matrix, row, col / GROUP);
                scale.mul_add(f32::from(self.code(matrix, row, col)), bias)
            }
        }
    }

    fn dot_quantized(&self, matrix: usize, row: usize, x: &QuantRows, x_row: usize) -> f32 {
        let mut acc = 0f32;
        for group in 0..self.cols / GROUP {
            let cols = group * GROUP..(group + 1) * GROUP;
            let products = cols
                .map(|col| i32::from(self.code(matrix, row, col)) * i32::from(x.code(x_row, col)));
            let dot: i32 = products.sum();
            let (scale, bias) = self.scale_bias(matrix, row, group);
            acc = (scale * x.scales(x_row)[group]).mul_add(dot as f32, acc);
            acc = bias.mul_add(x.sums(x_row)[group], acc);
        }
        acc
    }

    fn dot_float(&self, matrix: usize, row: usize, x: &[f32]) -> f32 {
        let mut lanes = [0f32; 16];
        for col in 0..self.cols.next_multiple_of(16) {
            let (w, x) =
                if col < self.cols { (self.value(matrix, row, col), x[col]) } else { (0.0, 0.0) };
            lanes[col % 16] = w.mul_add(x, lanes[col % 16]);
        }
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
        }
        lanes[0]
    }
}

/// Activation rows with a stride that is larger than a row.
struct Activations {
    x: Vec<f32>,
    stride: usize,
    i8: QuantRows,
    i16: QuantRows,
}

impl Activations {
    fn new(random: &mut Random, rows: usize, cols: usize) -> Self {
        let stride = cols + 3;
        let x = (0..rows * stride).map(|_| random.unit() * 3.0).collect();
        Self::from_rows(x, stride, rows, cols)
    }

    fn from_rows(x: Vec<f32>, stride: usize, rows: usize, cols: usize) -> Self {
        let [i8, i16] = [CodeKind::I8, CodeKind::I16].map(|kind| {
            let mut quant = QuantRows::new();
            if cols.is_multiple_of(GROUP) {
                quant.quantize(&Pool::new(1), Isa::detect(), kind, &x, stride, [rows, cols]);
            }
            quant
        });
        Self { x, stride, i8, i16 }
    }

    fn input(&self, kind: Option<CodeKind>) -> Input<'_> {
        match kind {
            Some(CodeKind::I8) => Input::Quantized(&self.i8),
            Some(CodeKind::I16) => Input::Quantized(&self.i16),
            None => Input::F32 { x: &self.x, stride: self.stride },
        }
    }
}

const UNTOUCHED: f32 = -77.5;
const COLUMN: usize = 2;

/// Runs every instruction set and thread count against the plain loops, and checks the byte count.
fn check(
    weights: &Weights,
    x: &Activations,
    kind: Option<CodeKind>,
    rows: Rows<'_>,
    y_rows: usize,
) {
    let stride = COLUMN + weights.rows + 1;
    let mut expected = vec![UNTOUCHED; y_rows * stride];
    let mut bytes_expected = 0;
    for group in 0..rows.group_count() {
        let (matrix, list) = rows.group(group);
        if list.len > 0 {
            bytes_expected += weights.rows * weights.row_bytes();
        }
        for i in 0..list.len {
            for row in 0..weights.rows {
                expected[list.y(i) * stride + COLUMN + row] = match x.input(kind) {
                    Input::Quantized(quant) => weights.dot_quantized(matrix, row, quant, list.x(i)),
                    Input::F32 { x, stride } => {
                        weights.dot_float(matrix, row, &x[list.x(i) * stride..])
                    }
                };
            }
        }
    }
    for isa in Isa::available() {
        for threads in [1, 2, 3] {
            let mut y = vec![UNTOUCHED; y_rows * stride];
            let bytes = AtomicU64::new(0);
            let output = Output { y: &mut y, stride, column: COLUMN };
            POOLS.with(|pools| {
                linear(
                    &pools[threads - 1],
                    isa,
                    x.input(kind),
                    &weights.view(),
                    rows,
                    output,
                    &bytes,
                );
            });
            for (at, (y, expected)) in y.iter().zip(&expected).enumerate() {
                let equal = y.to_bits() == expected.to_bits() || y.is_nan() && expected.is_nan();
                assert!(
                    equal,
                    "{isa}, {threads} threads, {kind:?} x {:?} {}x{}, row {} column {}: {y} and not {expected}",
                    weights.format,
                    weights.rows,
                    weights.cols,
                    at / stride,
                    at % stride,
                );
            }
            assert_eq!(bytes.load(Ordering::Relaxed), bytes_expected as u64);
        }
    }
}

thread_local! {
    static POOLS: [Pool; 3] = [Pool::new(1), Pool::new(2), Pool::new(3)];
}

type Family = (Option<CodeKind>, WeightFormat);

const FAMILIES: [Family; 6] = [
    (Some(CodeKind::I8), WeightFormat::Q4),
    (Some(CodeKind::I16), WeightFormat::Q4),
    (None, WeightFormat::Q4),
    (None, WeightFormat::Q8),
    (None, WeightFormat::Bf16),
    (None, WeightFormat::F32),
];

fn check_dense(random: &mut Random, family: Family, rows: usize, outputs: usize, cols: usize) {
    let weights = Weights::new(random, family.1, 1, outputs, cols);
    let x = Activations::new(random, rows, cols);
    check(&weights, &x, family.0, Rows::Dense(rows), rows);
}

#[test]
fn every_number_of_rows() {
    let mut random = Random(1);
    for family in FAMILIES {
        for rows in (0..=14).chain([31, 32, 33, 64]) {
            check_dense(&mut random, family, rows, 33, 192);
        }
    }
}

#[test]
fn every_width() {
    let mut random = Random(2);
    for family in FAMILIES {
        for cols in [64, 128, 192, 384, 2048] {
            for rows in [1, 5] {
                check_dense(&mut random, family, rows, 17, cols);
            }
        }
    }
}

/// The largest sums: all codes ±16256, all weights 15.
#[test]
fn extreme_codes_stay_exact() {
    let mut random = Random(11);
    let mut weights = Weights::new(&mut random, WeightFormat::Q4, 1, 18, 128);
    weights.parts[0].fill(0xff);
    for rows in [1, 5, 14] {
        let sign = |i: usize| if (i / 128).is_multiple_of(2) { 1.5 } else { -1.5 };
        let x = Activations::from_rows((0..rows * 128).map(sign).collect(), 128, rows, 128);
        for kind in [CodeKind::I8, CodeKind::I16] {
            check(&weights, &x, Some(kind), Rows::Dense(rows), rows);
        }
    }
}

#[test]
fn every_number_of_outputs() {
    let mut random = Random(3);
    for family in FAMILIES {
        for outputs in [1, 2, 10, 15, 16, 17, 33, 512] {
            for rows in [1, 2, 3, 13] {
                check_dense(&mut random, family, rows, outputs, 128);
            }
        }
    }
}

#[test]
fn dense_widths_that_are_no_multiple_of_the_lanes() {
    let mut random = Random(4);
    for format in [WeightFormat::Bf16, WeightFormat::F32] {
        for cols in [1, 7, 15, 17, 100] {
            check_dense(&mut random, (None, format), 3, 19, cols);
        }
    }
}

/// Groups over permuted rows, some of them empty.
fn route(
    random: &mut Random,
    counts: &[usize],
    x_rows: usize,
) -> (Vec<RowGroup>, Vec<u32>, Vec<u32>) {
    let total: usize = counts.iter().sum();
    let mut y: Vec<u32> = (0..total as u32).collect();
    for i in (1..total).rev() {
        y.swap(i, random.below(i + 1));
    }
    let x = (0..total).map(|_| random.below(x_rows) as u32).collect();
    let mut start = 0;
    let groups = counts.iter().enumerate().map(|(matrix, &count)| {
        start += count;
        RowGroup { matrix, rows: start - count..start }
    });
    (groups.collect(), x, y)
}

#[test]
fn experts_with_any_number_of_rows() {
    let mut random = Random(5);
    for family in FAMILIES {
        for counts in [[0, 1, 0, 7, 40, 2], [0, 0, 64, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0; 6]] {
            let weights = Weights::new(&mut random, family.1, 6, 40, 128);
            let x = Activations::new(&mut random, 9, 128);
            let (mut groups, x_rows, y_rows) = route(&mut random, &counts, 9);
            groups.rotate_left(2);
            let total = y_rows.len();
            let rows = Rows::Routed { groups: &groups, x_rows: &x_rows, y_rows: &y_rows };
            check(&weights, &x, family.0, rows, total);
        }
    }
}

#[test]
fn a_slice_of_fused_experts() {
    // Gate and up rows alternate by matrix; the up half is the odd half-matrices.
    let mut random = Random(6);
    let (outputs, cols) = (24, 192);
    let halves = Weights::new(&mut random, WeightFormat::Q4, 6, outputs, cols);
    let x = Activations::new(&mut random, 2, cols);
    let strides = halves.strides;
    let up = Weights {
        parts: [
            [vec![0; OFFSET], halves.parts[0][OFFSET + strides.codes..].to_vec()].concat(),
            [vec![0; OFFSET], halves.parts[1][OFFSET + strides.scales..].to_vec()].concat(),
            [vec![0; OFFSET], halves.parts[2][OFFSET + strides.biases..].to_vec()].concat(),
        ],
        format: WeightFormat::Q4,
        rows: outputs,
        cols,
        matrices: 3,
        strides: MatrixStrides {
            codes: 2 * strides.codes,
            scales: 2 * strides.scales,
            biases: 2 * strides.biases,
        },
    };
    let groups = [RowGroup { matrix: 2, rows: 0..2 }, RowGroup { matrix: 0, rows: 2..3 }];
    let rows = Rows::Routed { groups: &groups, x_rows: &[0, 1, 1], y_rows: &[2, 0, 1] };
    for kind in [Some(CodeKind::I8), Some(CodeKind::I16), None] {
        check(&up, &x, kind, rows, 3);
    }
    assert_eq!(up.code(2, 3, 9), halves.code(5, 3, 9));
}

#[test]
fn four_rows_read_the_weights_once() {
    let mut random = Random(7);
    let weights = Weights::new(&mut random, WeightFormat::Q4, 1, 256, 512);
    let x = Activations::new(&mut random, 4, 512);
    for rows in [1, 4] {
        let mut y = vec![0.0; 4 * 256];
        let bytes = AtomicU64::new(0);
        let output = Output { y: &mut y, stride: 256, column: 0 };
        linear(
            &Pool::new(2),
            Isa::detect(),
            x.input(Some(CodeKind::I16)),
            &weights.view(),
            Rows::Dense(rows),
            output,
            &bytes,
        );
        assert_eq!(bytes.load(Ordering::Relaxed), 256 * (256 + 2 * 2 * 8));
    }
}

#[test]
fn non_finite_activations_give_nan() {
    let mut random = Random(8);
    for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for family in FAMILIES {
            let weights = Weights::new(&mut random, family.1, 1, 20, 128);
            let mut x: Vec<f32> = (0..3 * 128).map(|_| random.unit()).collect();
            x[128 + 70] = poison;
            let x = Activations::from_rows(x, 128, 3, 128);
            check(&weights, &x, family.0, Rows::Dense(3), 3);
            let mut y = vec![0.0; 3 * 20];
            let output = Output { y: &mut y, stride: 20, column: 0 };
            let bytes = AtomicU64::new(0);
            let pool = Pool::new(1);
            linear(
                &pool,
                Isa::detect(),
                x.input(family.0),
                &weights.view(),
                Rows::Dense(3),
                output,
                &bytes,
            );
            assert!(y[20..40].iter().all(|y| !y.is_finite()));
            assert!(y[..20].iter().chain(&y[40..]).all(|y| y.is_finite()));
        }
    }
}

#[test]
fn unsupported_views_are_refused() {
    let bytes = vec![0; 10_000];
    let view = |format, cols| WeightView::dense(format, &bytes, &bytes, &bytes, 8, cols);
    assert!(view(WeightFormat::Q4, 128).supported(true).is_ok());
    assert!(view(WeightFormat::Q8, 128).supported(true).is_err());
    assert!(view(WeightFormat::Q8, 128).supported(false).is_ok());
    assert!(view(WeightFormat::Q4, 96).supported(false).is_err());
    assert!(view(WeightFormat::Bf16, 96).supported(false).is_ok());
    assert!(view(WeightFormat::F32, 960).supported(false).is_err());
    assert!(view(WeightFormat::Q4, 128).stacked(19).supported(true).is_ok());
    assert!(view(WeightFormat::Q4, 128).stacked(20).supported(true).is_err());
    assert!(view(WeightFormat::Q4, 128).stacked(usize::MAX).supported(true).is_err());
}

#[test]
#[should_panic = "two results go to output row 1"]
fn results_must_not_collide() {
    let mut random = Random(9);
    let weights = Weights::new(&mut random, WeightFormat::Q4, 2, 16, 64);
    let x = Activations::new(&mut random, 2, 64);
    let groups = [RowGroup { matrix: 0, rows: 0..2 }, RowGroup { matrix: 1, rows: 1..2 }];
    let rows = Rows::Routed { groups: &groups, x_rows: &[0, 1], y_rows: &[0, 1] };
    check(&weights, &x, Some(CodeKind::I8), rows, 2);
}

#[test]
#[should_panic = "activation row 3 of 2"]
fn row_indices_are_checked() {
    let mut random = Random(10);
    let weights = Weights::new(&mut random, WeightFormat::Q4, 1, 16, 64);
    let x = Activations::new(&mut random, 2, 64);
    let groups = [RowGroup { matrix: 0, rows: 0..1 }];
    let mut y = vec![0.0; 64];
    let output = Output { y: &mut y, stride: 16, column: 0 };
    let rows = Rows::Routed { groups: &groups, x_rows: &[3], y_rows: &[0] };
    let bytes = AtomicU64::new(0);
    let input = x.input(Some(CodeKind::I8));
    linear(&Pool::new(1), Isa::detect(), input, &weights.view(), rows, output, &bytes);
}

#[test]
fn tasks_are_divided_by_work() {
    assert_eq!(panels_per_task(512, Rows::Dense(1), 2), 32);
    assert_eq!(panels_per_task(1, Rows::Dense(1), 64), 1);
    assert_eq!(panels_per_task(0, Rows::Dense(1), 4), 1);
    assert_eq!(tiles(13, 12).collect::<Vec<_>>(), [0..6, 6..13]);
    assert_eq!(tiles(0, 12).count(), 0);
}
