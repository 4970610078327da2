//! The test of tensor operations: large products by them and by simdgroup matrices must be the same, for every kernel that has both.
//!
//! Compilers have been seen that get small products right and large ones wrong, without a word, and some shapes right and others
//! wrong.

use std::sync::Arc;

use lily_gpu::kernels::gemm::{GemmArgs, RowBlocks};
use lily_gpu::kernels::moe::{ExpertsInArgs, ExpertsOutArgs};
use lily_gpu::{
    Access, Binding, Buffer, CommandList, Driver, DriverError, Matrix, Operand, Pipeline,
    Placement, Recorder,
};
use lily_ops::ElementType;

/// What a kernel multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// All rows with one matrix.
    Dense,
    /// Rows in a list's order with an expert's gate and up projections, which are one here.
    ExpertsIn,
    /// Rows in a list's order with an expert's matrix.
    ExpertsOut,
}

/// A kernel that is tested, the format of its weight, and the columns of a threadgroup.
pub(crate) struct Product {
    pub kernel: &'static str,
    kind: Kind,
    format: u32,
    columns: u32,
}

const fn product_of(kernel: &'static str, kind: Kind, format: u32, columns: u32) -> Product {
    Product { kernel, kind, format, columns }
}

const Q4: u32 = 0;
const Q8: u32 = 1;
const BF16: u32 = 2;

/// All kernels of matrix tiles.
pub(crate) const PRODUCTS: [Product; 13] = [
    product_of("gemm_bf16_n64", Kind::Dense, BF16, 64),
    product_of("gemm_bf16_n32", Kind::Dense, BF16, 32),
    product_of("gemm_q4_n64", Kind::Dense, Q4, 64),
    product_of("gemm_q4_n32", Kind::Dense, Q4, 32),
    product_of("gemm_q8_n64", Kind::Dense, Q8, 64),
    product_of("gemm_q8_n32", Kind::Dense, Q8, 32),
    product_of("gemm_any_n32", Kind::Dense, Q8, 32),
    product_of("experts_in_q4", Kind::ExpertsIn, Q4, 32),
    product_of("experts_in_q8", Kind::ExpertsIn, Q8, 32),
    product_of("experts_in_any", Kind::ExpertsIn, BF16, 32),
    product_of("experts_out_q4", Kind::ExpertsOut, Q4, 64),
    product_of("experts_out_q8", Kind::ExpertsOut, Q8, 64),
    product_of("experts_out_any", Kind::ExpertsOut, BF16, 64),
];

impl Product {
    /// What it writes.
    fn element(&self) -> ElementType {
        match self.kind {
            Kind::Dense => ElementType::F32,
            Kind::ExpertsIn | Kind::ExpertsOut => ElementType::Bf16,
        }
    }

    /// Bytes of its result.
    fn bytes(&self, [rows, columns, _]: [u32; 3]) -> u64 {
        let width = if self.element() == ElementType::F32 { 4 } else { 2 };
        u64::from(rows) * u64::from(columns) * width
    }

    /// How far its results may be apart, in units of their root mean square: both sum in f32, in other orders; a result of
    /// bf16 may be rounded to the neighbour.
    fn allowed(&self, want: f64, rms: f64) -> f64 {
        match self.element() {
            ElementType::F32 => TOLERANCE,
            _ => 8.0 * TOLERANCE + want.abs() / rms / 128.0,
        }
    }
}

/// Of results in f32.
const TOLERANCE: f64 = 1e-3;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as u32
    }

    /// bf16 numbers between -1 and 1, none of them tiny.
    fn bf16(&mut self, count: usize) -> Vec<u8> {
        let number = |x: u32| ((x & 0x8000) | 0x3d00 | (x & 0x27f)) as u16;
        (0..count).flat_map(|_| number(self.next()).to_le_bytes()).collect()
    }
}

/// What the products share.
struct Operands {
    x: Operand,
    slab: Operand,
    order: Operand,
    blocks: Operand,
    out: Operand,
    /// The weight in each format: bf16, 4 bits, 8 bits.
    weights: [Matrix; 3],
}

/// A slab of one matrix in bf16, one in 4 bits and one in 8, whose scales serve as biases too; its bytes.
fn slab(columns: u32, inner: u32, random: &mut Random) -> (Vec<u8>, [Matrix; 3]) {
    let elements = columns as usize * inner as usize;
    let mut bytes = random.bf16(elements);
    let unit = |bytes: &Vec<u8>| (bytes.len() / 16) as u32;
    let dense = Matrix {
        codes: 0,
        scales: 0,
        biases: 0,
        codes_stride: 0,
        scales_stride: 0,
        rows: columns,
        cols: inner,
        format: BF16,
    };
    let mut packed = [dense; 2];
    for (matrix, (format, codes)) in packed.iter_mut().zip([(Q4, elements / 2), (Q8, elements)]) {
        (matrix.format, matrix.codes) = (format, unit(&bytes));
        bytes.extend((0..codes).map(|_| random.next() as u8));
        (matrix.scales, matrix.biases) = (unit(&bytes), unit(&bytes));
        bytes.extend(random.bf16(elements / 64));
    }
    let [q4, q8] = packed;
    (bytes, [q4, q8, dense])
}

/// All rows as those of one expert, last ones first: their order, and their blocks.
fn routes(rows: u32) -> (Vec<u8>, Vec<u8>) {
    let (large, small) = RowBlocks::SIMDGROUPS.blocks(rows);
    let starts = (0..large).map(|i| i * 32).chain((0..small).map(|i| large * 32 + i * 16));
    let mut blocks = vec![large, small, 0, 0];
    for (i, first) in starts.enumerate() {
        let most = if (i as u32) < large { 32 } else { 16 };
        blocks.extend([first, most.min(rows - first), 0, 0]);
    }
    let bytes = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect();
    (bytes(&(0..rows).rev().collect::<Vec<u32>>()), bytes(&blocks))
}

/// The products' results, one behind the other.
pub(crate) fn run(
    driver: &mut dyn Driver,
    size: [u32; 3],
    pipelines: Vec<Pipeline>,
) -> Result<Vec<u8>, DriverError> {
    let mut buffers: Vec<Buffer> = Vec::new();
    let result = products(driver, size, pipelines, &mut buffers);
    buffers.into_iter().for_each(|b| driver.release(b));
    result
}

fn products(
    driver: &mut dyn Driver,
    size: [u32; 3],
    pipelines: Vec<Pipeline>,
    buffers: &mut Vec<Buffer>,
) -> Result<Vec<u8>, DriverError> {
    let [rows, columns, inner] = size;
    let mut random = Random(7);
    let x_bytes = random.bf16(rows as usize * inner as usize);
    let (slab_bytes, weights) = slab(columns, inner, &mut random);
    let (order_bytes, blocks_bytes) = routes(rows);
    let out_bytes: u64 = PRODUCTS.iter().map(|p| p.bytes(size)).sum();
    let mut take = |bytes: u64, element| -> Result<Operand, DriverError> {
        let buffer = driver.allocate("the test of tensor operations", bytes, Placement::Device)?;
        buffers.push(buffer);
        Ok(Operand { buffer, offset: 0, bytes, element })
    };
    let all = Operands {
        x: take(x_bytes.len() as u64, ElementType::Bf16)?,
        slab: take(slab_bytes.len() as u64, ElementType::U32)?,
        order: take(order_bytes.len() as u64, ElementType::U32)?,
        blocks: take(blocks_bytes.len() as u64, ElementType::U32)?,
        out: take(out_bytes, ElementType::F32)?,
        weights,
    };
    for (operand, bytes) in [
        (all.x, x_bytes),
        (all.slab, slab_bytes),
        (all.order, order_bytes),
        (all.blocks, blocks_bytes),
    ] {
        driver.write(operand.buffer, 0, &bytes)?;
    }
    let mut recorder = Recorder::default();
    let mut offset = 0;
    for product in &PRODUCTS {
        let bytes = product.bytes(size);
        let out = Operand { offset, bytes, element: product.element(), ..all.out };
        record(&mut recorder, product, &all, out, rows);
        offset += bytes;
    }
    let list = CommandList { pipelines, ..recorder.finish(true) };
    let submission = driver.submit(&Arc::new(list))?;
    driver.wait(submission)?;
    let mut results = vec![0; out_bytes as usize];
    driver.read(all.out.buffer, 0, &mut results)?;
    Ok(results)
}

fn record(r: &mut Recorder, product: &Product, all: &Operands, out: Operand, rows: u32) {
    let w = all.weights[product.format as usize];
    let (large, small) = RowBlocks::SIMDGROUPS.blocks(rows);
    let groups = [w.rows.div_ceil(product.columns), large + small, 1];
    let constant = Binding::new(all.slab, Access::Constant);
    let read = |operand: Operand| Binding::new(operand, Access::Read);
    let write = Binding::new(out, Access::Write);
    let (listed, traffic) = ([read(all.order), read(all.blocks)], out.bytes + all.x.bytes);
    let mut bindings = vec![constant.clone()];
    match product.kind {
        Kind::Dense => {
            bindings.extend([read(all.x), read(all.x), write]);
            let args = GemmArgs { w, rows, blocks: large, store: 1, first: [0; 2] };
            r.dispatch(product.kernel, groups, 128, bindings, &args, traffic + all.slab.bytes);
        }
        Kind::ExpertsIn => {
            bindings.extend([constant, read(all.x)].into_iter().chain(listed).chain([write]));
            let args = ExpertsInArgs { gate: w, up: w, k: 1, first: 0 };
            r.dispatch(product.kernel, groups, 128, bindings, &args, traffic + all.slab.bytes);
        }
        Kind::ExpertsOut => {
            bindings.extend([read(all.x)].into_iter().chain(listed).chain([write]));
            let args = ExpertsOutArgs { down: w, first: 0 };
            r.dispatch(product.kernel, groups, 128, bindings, &args, traffic + all.slab.bytes);
        }
    }
    r.worth(u64::from(rows) * u64::from(w.rows) * u64::from(w.cols));
}

fn numbers(bytes: &[u8], element: ElementType) -> Vec<f64> {
    let wide = |b: &[u8; 4]| f64::from(f32::from_le_bytes(*b));
    match element {
        ElementType::F32 => bytes.as_chunks().0.iter().map(wide).collect(),
        _ => bytes.as_chunks().0.iter().map(|[a, b]| wide(&[0, 0, *a, *b])).collect(),
    }
}

/// Whether two runs came to the same: how far products in f32 are apart at most, in units of the results' root mean square.
pub(crate) fn compare(got: &[u8], want: &[u8], size: [u32; 3]) -> Result<f64, String> {
    let (mut most, mut at) = (0.0f64, 0);
    for product in &PRODUCTS {
        let kernel = product.kernel;
        let end = at + product.bytes(size) as usize;
        let part = |all: &[u8]| all.get(at..end).map(|part| numbers(part, product.element()));
        let (Some(got), Some(want)) = (part(got), part(want)) else {
            return Err(format!("{kernel}: the comparison itself came to nothing"));
        };
        at = end;
        let rms = (want.iter().map(|w| w * w).sum::<f64>() / want.len().max(1) as f64).sqrt();
        if !(rms > 0.0 && rms.is_finite()) {
            return Err(format!("{kernel}: the comparison itself came to nothing"));
        }
        for (g, w) in got.iter().zip(&want) {
            let (error, allowed) = ((g - w).abs() / rms, product.allowed(*w, rms));
            if error.is_nan() || error > allowed {
                return Err(format!(
                    "{kernel} differs by {error:.1e} of its results' size from the product without them; {allowed:.0e} is allowed"
                ));
            }
            if product.kind == Kind::Dense {
                most = most.max(error);
            }
        }
    }
    Ok(most)
}

#[cfg(test)]
mod tests {
    use lily_gpu::{Platform, text};

    use super::*;

    const SIZE: [u32; 3] = [1, 4, 64];

    fn results(change: impl Fn(usize, &mut [f32; 4])) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (i, product) in PRODUCTS.iter().enumerate() {
            let mut numbers = [1.0, -2.0, 3.0, 4.0];
            change(i, &mut numbers);
            let from = if product.element() == ElementType::F32 { 0 } else { 2 };
            bytes.extend(numbers.iter().flat_map(|x| x.to_le_bytes()[from..].to_vec()));
        }
        bytes
    }

    #[test]
    fn every_kernel_of_tiles_is_tested() {
        let all = text::kernels(Platform::MetalTensor);
        let tiles: Vec<&String> = all.iter().filter(|name| text::is_tile_kernel(name)).collect();
        assert_eq!(tiles.len(), PRODUCTS.len());
        assert!(PRODUCTS.iter().all(|p| tiles.iter().any(|name| *name == p.kernel)));
    }

    #[test]
    fn what_is_the_same() {
        let want = results(|_, _| ());
        assert_eq!(compare(&want, &want, SIZE), Ok(0.0));
        let near = results(|_, n| n[3] = 4.0001);
        assert!(compare(&near, &want, SIZE).is_ok_and(|e| e > 1e-5));
        for (at, product) in PRODUCTS.iter().enumerate() {
            let wrongs: [[f32; 4]; 4] = [
                [1.0, -2.1, 3.0, 4.0],
                [1.0, -2.0, f32::NAN, 4.0],
                [1.0, -2.0, 3.0, f32::INFINITY],
                [0.0; 4],
            ];
            for wrong in wrongs {
                let got = results(|i, n| {
                    if i == at {
                        *n = wrong
                    }
                });
                let error = compare(&got, &want, SIZE).unwrap_err();
                assert!(error.starts_with(product.kernel), "{error}");
            }
            let nothing = results(|i, n| {
                if i == at {
                    *n = [0.0; 4]
                }
            });
            assert!(compare(&nothing, &nothing, SIZE).is_err(), "nothing was compared");
        }
        assert!(compare(&want[..want.len() - 1], &want, SIZE).is_err());
    }

    #[test]
    fn rows_are_those_of_one_expert() {
        let words = |bytes: Vec<u8>| -> Vec<u32> {
            bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
        };
        let (order, blocks) = routes(40);
        assert_eq!(words(order), (0..40).rev().collect::<Vec<_>>());
        assert_eq!(words(blocks), [1, 1, 0, 0, 0, 32, 0, 0, 32, 8, 0, 0]);
    }
}
