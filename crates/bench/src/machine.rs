//! What the machine can do, measured: how fast it reads memory, how fast it multiplies.

use std::hint::black_box;
use std::sync::atomic::AtomicU64;

use lily_cpu::kernels::linear::{Input, Output, Rows, WeightFormat, WeightView, linear};
use lily_cpu::kernels::quantize::{CodeKind, QuantRows};
use lily_cpu::pool::Pool;
use lily_cpu::simd::Isa;

use crate::clock::{Clock, timed};
use crate::floors::Limits;

/// Bytes that are read to find the rate: far more than any cache holds.
pub const READ_BYTES: u64 = 4 << 30;

/// Passes over the memory for each number of threads; the best counts.
const PASSES: usize = 3;

/// Calls of the multiplication; the best counts.
const CALLS: usize = 12;

/// Bytes to read on a machine with so many available: all, or a quarter of what there is.
pub fn read_bytes(available: Option<u64>) -> u64 {
    available.map_or(READ_BYTES, |a| READ_BYTES.min(a / 4)).max(64 << 20)
}

/// Bytes read in a second: best of one thread and of all.
pub fn read_rate(bytes: u64, threads: usize, clock: &dyn Clock) -> f64 {
    let words = (bytes / 8) as usize;
    let threads = threads.max(1);
    let mut memory: Vec<u64> = Vec::with_capacity(words);
    // Written, so that every page is one of its own and not the system's page of zeros.
    memory.extend((0..words as u64).map(|i| i ^ 0x9E37_79B9));
    let mut best = f64::INFINITY;
    for threads in [1, threads] {
        for _ in 0..PASSES {
            best = best.min(timed(clock, || black_box(sum(&memory, threads))).1);
        }
    }
    (words * 8) as f64 / best
}

fn sum(memory: &[u64], threads: usize) -> u64 {
    if threads == 1 {
        return sum_part(memory);
    }
    let part = memory.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let parts: Vec<_> = memory.chunks(part).map(|p| scope.spawn(|| sum_part(p))).collect();
        parts.into_iter().map(|p| p.join().unwrap_or(0)).fold(0, u64::wrapping_add)
    })
}

/// Sixteen sums at once: enough loads in flight for any memory.
fn sum_part(memory: &[u64]) -> u64 {
    let mut sums = [0u64; 16];
    let chunks = memory.chunks_exact(16);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (sum, word) in sums.iter_mut().zip(chunk) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.into_iter().chain(rest.iter().copied()).fold(0, u64::wrapping_add)
}

/// Multiply-adds in a second of the CPU's fastest matrix product, 4-bit weights by 8-bit activations, with the
/// weights in cache and all threads. It bounds what Lily's kernels reach, not what the silicon could.
pub fn matrix_rate(threads: usize, isa: Isa, clock: &dyn Clock) -> f64 {
    product_rate(WeightFormat::Q4, threads, isa, clock)
}

/// Likewise of bf16 weights by f32 activations, which bounds kernels that compute in f32.
pub fn float_rate(threads: usize, isa: Isa, clock: &dyn Clock) -> f64 {
    product_rate(WeightFormat::Bf16, threads, isa, clock)
}

fn product_rate(format: WeightFormat, threads: usize, isa: Isa, clock: &dyn Clock) -> f64 {
    let pool = Pool::new(threads.max(1));
    let quantized = format == WeightFormat::Q4;
    // bf16 matrices of 512 rows would leave a small cache.
    let (rows, outputs, cols) = (128, if quantized { 512 } else { 256 }, 1024);
    let (codes, scales) = format.row_bytes(cols);
    let mut state = 1u64;
    let noise: Vec<u8> = (0..outputs * codes)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        })
        .collect();
    let noise = match quantized {
        true => noise,
        false => [0x20u8, 0x3C].repeat(noise.len() / 2),
    };
    // bf16 0.0098 throughout: numbers too small or too large could be slower.
    let groups = [0x20u8, 0x3C].repeat(outputs * scales / 2);
    let groups = &groups[..outputs * scales];
    let weights = WeightView::dense(format, &noise, groups, groups, outputs, cols);
    let x: Vec<f32> = (0..rows * cols).map(|i| (i * 37 % 1000) as f32 / 500.0 - 1.0).collect();
    let mut quant = QuantRows::new();
    quant.quantize(&pool, isa, CodeKind::I8, &x, cols, [rows, cols]);
    let mut y = vec![0.0; rows * outputs];
    let mut best = f64::INFINITY;
    for _ in 0..CALLS {
        let output = Output { y: &mut y, stride: outputs, column: 0 };
        let input = match quantized {
            true => Input::Quantized(&quant),
            false => Input::F32 { x: &x, stride: cols },
        };
        let counter = AtomicU64::new(0);
        let call = || linear(&pool, isa, input, &weights, Rows::Dense(rows), output, &counter);
        best = best.min(timed(clock, call).1);
    }
    black_box(&y);
    (rows * outputs * cols) as f64 / best
}

/// Both limits of this CPU, measured now.
pub fn cpu_limits(threads: usize, isa: Isa, available: Option<u64>, clock: &dyn Clock) -> Limits {
    let bytes = read_bytes(available);
    Limits {
        bytes_per_second: read_rate(bytes, threads, clock),
        macs_per_second: matrix_rate(threads, isa, clock),
        how: format!(
            "measured in this run: reading {:.1} GB, best of 1 and {threads} threads; {isa} product of 4-bit \
             weights in cache by 8-bit activations, {threads} threads",
            bytes as f64 / 1e9
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use super::*;

    /// A clock that goes on by the next of these nanoseconds at every second look: a timed call takes that long.
    struct Steps(AtomicU64, Vec<u64>);

    impl Clock for Steps {
        fn now(&self) -> Duration {
            let looks = self.0.fetch_add(1, Ordering::Relaxed) as usize;
            let passed = looks.div_ceil(2);
            Duration::from_nanos((0..passed).map(|i| self.1[i % self.1.len()]).sum())
        }
    }

    #[test]
    fn sums_are_complete() {
        let memory: Vec<u64> = (0..1003).collect();
        let want: u64 = (0..1003).sum();
        for threads in [1, 2, 3, 7, 2000] {
            assert_eq!(sum(&memory, threads), want, "{threads} threads");
        }
        assert_eq!(sum(&[], 2), 0);
    }

    #[test]
    fn the_best_pass_counts() {
        let clock = Arc::new(Steps(AtomicU64::new(0), vec![4000, 2000, 9000, 1000, 5000]));
        // 8,000 bytes in the best of six passes, 1 µs.
        assert_eq!(read_rate(8000, 2, &*clock).round(), 8e9);
        let clock = Arc::new(Steps(AtomicU64::new(0), vec![1_000_000]));
        let rate = matrix_rate(1, Isa::detect(), &*clock);
        assert_eq!(rate.round(), (128u64 * 512 * 1024 * 1000) as f64);
        let clock = Arc::new(Steps(AtomicU64::new(0), vec![1_000_000]));
        let rate = float_rate(1, Isa::detect(), &*clock);
        assert_eq!(rate.round(), (128u64 * 256 * 1024 * 1000) as f64);
    }

    #[test]
    fn less_is_read_where_there_is_less() {
        assert_eq!(read_bytes(None), 4 << 30);
        assert_eq!(read_bytes(Some(64 << 30)), 4 << 30);
        assert_eq!(read_bytes(Some(8 << 30)), 2 << 30);
        assert_eq!(read_bytes(Some(0)), 64 << 20);
    }
}
