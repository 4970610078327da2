//! Speed of the linear kernels: weight bytes a second with few rows, multiplications with many.
//!
//! `cargo run --release -p lily-cpu --example linear_bench [threads] [instruction set]`

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use lily_cpu::kernels::linear::{Input, Output, Rows, WeightFormat, WeightView, linear};
use lily_cpu::kernels::quantize::{CodeKind, QuantRows};
use lily_cpu::pool::Pool;
use lily_cpu::simd::Isa;

/// Weight bytes that a measurement goes through, far more than the caches hold.
const COLD_BYTES: usize = 320 << 20;

struct Bench {
    pool: Pool,
    isa: Isa,
    noise: Vec<u8>,
}

impl Bench {
    /// Best and median call over matrices that together fill [`COLD_BYTES`], so that none is cached.
    fn measure(
        &self,
        format: WeightFormat,
        kind: Option<CodeKind>,
        rows: usize,
        outputs: usize,
        cols: usize,
    ) {
        let (codes, scales) = format.row_bytes(cols);
        let bytes = outputs * (codes + 2 * scales);
        let macs = rows * outputs * cols;
        let cold = COLD_BYTES / bytes;
        let matrices = cold.min(40_000_000_000 / macs / 4).max(1);
        let x: Vec<f32> =
            (0..rows * cols).map(|i| (i * 2_654_435_761 % 1000) as f32 / 500.0 - 1.0).collect();
        let mut quant = QuantRows::new();
        let mut y = vec![0.0; rows * outputs];
        let mut seconds = Vec::new();
        for call in 0..4 * matrices {
            let noise = &self.noise[call % matrices * bytes..][..bytes];
            let (codes, rest) = noise.split_at(outputs * codes);
            let (scales, biases) = rest.split_at(outputs * scales);
            let weights = WeightView::dense(format, codes, scales, biases, outputs, cols);
            let start = Instant::now();
            let input = if let Some(kind) = kind {
                quant.quantize(&self.pool, self.isa, kind, &x, cols, [rows, cols]);
                Input::Quantized(&quant)
            } else {
                Input::F32 { x: &x, stride: cols }
            };
            let output = Output { y: &mut y, stride: outputs, column: 0 };
            linear(
                &self.pool,
                self.isa,
                input,
                &weights,
                Rows::Dense(rows),
                output,
                &AtomicU64::new(0),
            );
            seconds.push(start.elapsed().as_secs_f64());
        }
        seconds.sort_by(f64::total_cmp);
        let (best, median) = (seconds[0], seconds[seconds.len() / 2]);
        let activations = match kind {
            Some(CodeKind::I8) => "i8",
            Some(CodeKind::I16) => "i16",
            None => "f32",
        };
        println!(
            "{activations:>3} x {format:?} {rows:>4} x [{outputs}x{cols}]: best {:5.1} GB/s {:6.1} GMAC/s, median {:5.1} GB/s {:6.1} GMAC/s",
            bytes as f64 / best / 1e9,
            macs as f64 / best / 1e9,
            bytes as f64 / median / 1e9,
            macs as f64 / median / 1e9,
        );
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let threads = args.next().map_or(2, |threads| threads.parse().expect("a number of threads"));
    let isa = args.next().map_or(Isa::detect(), |name| name.parse().expect("an instruction set"));
    let mut state = 1u64;
    let noise = (0..COLD_BYTES).map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    });
    let bench = Bench { pool: Pool::new(threads), isa, noise: noise.collect() };
    println!("{threads} threads, {isa}");

    let start = Instant::now();
    let total = AtomicU64::new(0);
    bench.pool.run(64, &|task, _| {
        let part = bench.noise.len() / 64;
        let words = bench.noise[task * part..][..part].chunks_exact(8);
        let sum = words
            .fold(0u64, |sum, word| sum ^ u64::from_ne_bytes(word.try_into().expect("8 bytes")));
        total.fetch_xor(sum, Ordering::Relaxed);
    });
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "plain reading: {:.1} GB/s ({:x})",
        COLD_BYTES as f64 / seconds / 1e9,
        total.into_inner()
    );

    use WeightFormat::{Bf16, Q4, Q8};
    let kinds = [Some(CodeKind::I8), Some(CodeKind::I16)];
    for rows in [1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 512] {
        for kind in kinds {
            bench.measure(Q4, kind, rows, 8192, 2048);
        }
    }
    // Short calls, which other processes disturb least.
    for rows in [1, 48] {
        for kind in kinds {
            bench.measure(Q4, kind, rows, 512, 2048);
        }
    }
    for rows in [1, 4, 512] {
        for kind in kinds {
            bench.measure(Q4, kind, rows, 2048, 4096);
            bench.measure(Q4, kind, rows, 2048, 512);
        }
    }
    for (format, outputs) in [(Q8, 256), (Q4, 2048), (Bf16, 2048)] {
        for rows in [1, 4, 64] {
            bench.measure(format, None, rows, outputs, 2048);
        }
    }
}
