//! The test of tensor operations: a large product by them and by simdgroup matrices must be the same.
//!
//! Compilers have been seen that get small products right and large ones wrong, without a word.

use std::sync::Arc;

use lily_gpu::kernels::gemm::{GemmArgs, RowBlocks};
use lily_gpu::{
    Access, Binding, Buffer, CommandList, Driver, DriverError, Matrix, Operand, Pipeline,
    Placement, Recorder,
};
use lily_ops::ElementType;

/// The kernels that are tested.
pub(crate) const KERNELS: [&str; 2] = ["gemm_bf16_n64", "gemm_q4_n64"];

/// How far the results may be apart, in units of their root mean square: both sum in f32, in other orders.
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

/// Parts of the weight's slab, in bytes: a bf16 matrix, 4-bit codes, their scales and biases.
fn layout(columns: u32, inner: u32) -> [u64; 4] {
    let elements = u64::from(columns) * u64::from(inner);
    [elements * 2, elements / 2, elements / 32, elements / 32]
}

/// The products' results, f32, one behind the other.
pub(crate) fn run(
    driver: &mut dyn Driver,
    [rows, columns, inner]: [u32; 3],
    pipelines: Vec<Pipeline>,
) -> Result<Vec<u8>, DriverError> {
    let mut buffers: Vec<Buffer> = Vec::new();
    let result = product(driver, [rows, columns, inner], pipelines, &mut buffers);
    buffers.into_iter().for_each(|b| driver.release(b));
    result
}

fn product(
    driver: &mut dyn Driver,
    [rows, columns, inner]: [u32; 3],
    pipelines: Vec<Pipeline>,
    buffers: &mut Vec<Buffer>,
) -> Result<Vec<u8>, DriverError> {
    let mut random = Random(7);
    let x_bytes = random.bf16(rows as usize * inner as usize);
    let parts = layout(columns, inner);
    let mut slab_bytes = random.bf16(parts[0] as usize / 2);
    slab_bytes.extend((0..parts[1]).map(|_| random.next() as u8));
    slab_bytes.extend(random.bf16(parts[2] as usize));
    let out_bytes = u64::from(rows) * u64::from(columns) * 4;
    let mut take = |bytes: u64, element| -> Result<Operand, DriverError> {
        let buffer = driver.allocate("the test of tensor operations", bytes, Placement::Device)?;
        buffers.push(buffer);
        Ok(Operand { buffer, offset: 0, bytes, element })
    };
    let x = take(x_bytes.len() as u64, ElementType::Bf16)?;
    let slab = take(slab_bytes.len() as u64, ElementType::U32)?;
    let out = take(out_bytes * KERNELS.len() as u64, ElementType::F32)?;
    driver.write(x.buffer, 0, &x_bytes)?;
    driver.write(slab.buffer, 0, &slab_bytes)?;

    let unit = |bytes: u64| (bytes / 16) as u32;
    let quantized = Matrix {
        codes: unit(parts[0]),
        scales: unit(parts[0] + parts[1]),
        // The scales serve as biases too.
        biases: unit(parts[0] + parts[1]),
        codes_stride: 0,
        scales_stride: 0,
        rows: columns,
        cols: inner,
        format: 0,
    };
    let dense = Matrix { codes: 0, scales: 0, biases: 0, format: 2, ..quantized };
    let (blocks, tail) = RowBlocks::SIMDGROUPS.blocks(rows);
    let mut recorder = Recorder::default();
    for (i, (kernel, w)) in KERNELS.into_iter().zip([dense, quantized]).enumerate() {
        let out = Operand { offset: i as u64 * out_bytes, bytes: out_bytes, ..out };
        let bindings = vec![
            Binding::new(slab, Access::Constant),
            Binding::new(x, Access::Read),
            Binding::new(x, Access::Read),
            Binding::new(out, Access::Write),
        ];
        let groups = [columns.div_ceil(64), blocks + tail, 1];
        let args = GemmArgs { w, rows, blocks, store: 1, first: [0; 2] };
        recorder.dispatch(kernel, groups, 128, bindings, &args, out_bytes + x.bytes + slab.bytes);
        recorder.worth(u64::from(rows) * u64::from(columns) * u64::from(inner));
    }
    let list = CommandList { pipelines, ..recorder.finish(true) };
    let submission = driver.submit(&Arc::new(list))?;
    driver.wait(submission)?;
    let mut results = vec![0; out.bytes as usize];
    driver.read(out.buffer, 0, &mut results)?;
    Ok(results)
}

/// Whether two runs came to the same: how far they are apart at most, in units of the results' root mean square.
pub(crate) fn compare(got: &[u8], want: &[u8]) -> Result<f64, String> {
    let mut most = 0.0f64;
    let half = want.len() / KERNELS.len();
    for (kernel, (got, want)) in KERNELS.iter().zip(got.chunks(half).zip(want.chunks(half))) {
        let numbers = |bytes: &[u8]| -> Vec<f64> {
            bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
        };
        let (got, want) = (numbers(got), numbers(want));
        let rms = (want.iter().map(|w| w * w).sum::<f64>() / want.len().max(1) as f64).sqrt();
        if !(rms > 0.0 && rms.is_finite()) {
            return Err(format!("{kernel}: the comparison itself came to nothing"));
        }
        let off = |(g, w): (&f64, &f64)| {
            let error = (g - w).abs() / rms;
            if error.is_nan() { f64::INFINITY } else { error }
        };
        let worst = got.iter().zip(&want).map(off).fold(0.0, f64::max);
        if worst > TOLERANCE || got.len() != want.len() {
            return Err(format!(
                "{kernel} differs by {worst:.1e} of its results' size from the product without them; {TOLERANCE:.0e} is allowed"
            ));
        }
        most = most.max(worst);
    }
    Ok(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_the_same() {
        let bytes = |x: [f32; 4]| -> Vec<u8> { x.iter().flat_map(|x| x.to_le_bytes()).collect() };
        let want = bytes([1.0, -2.0, 3.0, 4.0]);
        assert_eq!(compare(&want, &want), Ok(0.0));
        assert!(compare(&bytes([1.0, -2.0, 3.0, 4.0001]), &want).is_ok_and(|e| e > 1e-5));
        for wrong in [
            bytes([1.0, -2.01, 3.0, 4.0]),
            bytes([1.0, -2.0, f32::NAN, 4.0]),
            bytes([1.0, -2.0, 3.0, f32::INFINITY]),
            bytes([0.0; 4]),
        ] {
            assert!(compare(&wrong, &want).is_err());
        }
        assert!(compare(&bytes([0.0; 4]), &bytes([0.0; 4])).is_err(), "nothing was compared");
    }
}
