//! Times of the attention and recurrence kernels at the dimensions of the 35B model.
//!
//! `cargo run --release -p lily-cpu --example kernel_bench -- [threads] [isa]`

use std::hint::black_box;
use std::time::Instant;

use lily_cpu::kernels::attention::{
    AttentionInput, AttentionScratch, AttentionSegment, AttentionShape, PAGE_TOKENS, attention,
};
use lily_cpu::kernels::gdn::{GdnShape, ScanInput, StateSegment, causal_conv, scan};
use lily_cpu::pool::Pool;
use lily_cpu::simd::Isa;

const ATTENTION: AttentionShape = AttentionShape { heads: 16, kv_heads: 2, head_dim: 256, rot: 64 };
const GDN: GdnShape = GdnShape { key_heads: 16, value_heads: 32, dk: 128, dv: 128, taps: 4 };

fn noise(n: usize) -> Vec<f32> {
    let mut x = 1u32;
    let mut next = || {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (x >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Least milliseconds of 15 runs: other processes only add to it.
fn millis(mut run: impl FnMut()) -> f64 {
    let time = |_| {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64() * 1e3
    };
    (0..15).map(time).fold(f64::INFINITY, f64::min)
}

fn bench_attention(isa: Isa, pool: &Pool, rows: usize, context: usize) {
    let AttentionShape { heads, head_dim, .. } = ATTENTION;
    let pages: Vec<u32> = (0..((context + rows).div_ceil(PAGE_TOKENS) as u32)).collect();
    let bf16 = |n| -> Vec<u16> { noise(n).iter().map(|x| (x.to_bits() >> 16) as u16).collect() };
    let (k_pages, v_pages) =
        (bf16(pages.len() * ATTENTION.page_len()), bf16(pages.len() * ATTENTION.page_len()));
    let q = noise(rows * heads * head_dim);
    let mut out = vec![0.0; q.len()];
    let mut scratch = AttentionScratch::new(&ATTENTION, pool.threads());
    let segments = [AttentionSegment { first_row: 0, rows, start: context, pages: &pages }];
    let input = AttentionInput { q: &q, k_pages: &k_pages, v_pages: &v_pages };
    let ms = millis(|| {
        attention(isa, pool, &ATTENTION, &segments, &input, &mut scratch, black_box(&mut out));
    });
    let keys = rows * context + rows * (rows + 1) / 2;
    let gmac = (2 * keys * heads * head_dim) as f64 / ms / 1e6;
    println!("attention {rows:4} rows at {context:5}: {ms:8.3} ms, {gmac:6.1} GMAC/s");
}

fn bench_scan(isa: Isa, pool: &Pool, rows: usize, layers: usize) {
    let qkv: Vec<f32> = noise(rows * GDN.channels()).iter().map(|x| x * 0.1).collect();
    let decay = vec![0.9; rows * GDN.value_heads];
    let beta = vec![0.5; rows * GDN.value_heads];
    let mut y = vec![0.0; rows * GDN.value_width()];
    let mut states = vec![noise(GDN.state_len()); layers];
    let input = ScanInput { qkv: &qkv, decay: &decay, beta: &beta };
    let ms = millis(|| {
        for state in &mut states {
            let mut segments = [StateSegment { first_row: 0, rows, state: &mut state[..] }];
            scan(isa, pool, &GDN, &mut segments, &input, black_box(&mut y));
        }
    });
    let bytes = (2 * 4 * GDN.state_len() * layers) as f64 / ms / 1e6;
    println!("scan {rows:4} tokens, {layers:2} layers:  {ms:8.3} ms, {bytes:6.1} GB/s of state");
}

fn bench_conv(isa: Isa, pool: &Pool, rows: usize) {
    let input = noise(rows * GDN.channels());
    let weight = noise(GDN.taps * GDN.channels());
    let mut out = vec![0.0; input.len()];
    let mut state = vec![0u16; GDN.conv_state_len()];
    let ms = millis(|| {
        let mut segments = [StateSegment { first_row: 0, rows, state: &mut state[..] }];
        causal_conv(isa, pool, &GDN, &mut segments, &input, &weight, black_box(&mut out));
    });
    println!("conv {rows:4} tokens:             {ms:8.3} ms");
}

/// Rate of independent multiply-adds on one thread: the roof of the attention kernel.
fn fma_peak() -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the feature is there.
        return Some(unsafe { fma_peak_avx512() });
    }
    None
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn fma_peak_avx512() -> f64 {
    use std::arch::x86_64::{_mm512_add_ps, _mm512_fmadd_ps, _mm512_reduce_add_ps, _mm512_set1_ps};
    let (a, b) = (_mm512_set1_ps(black_box(0.999)), _mm512_set1_ps(black_box(0.001)));
    let steps = 400_000;
    let mut best = f64::INFINITY;
    // In a closure, the accumulators would live in memory.
    for _ in 0..15 {
        let mut acc = [_mm512_set1_ps(black_box(1.0)); 16];
        let start = Instant::now();
        for _ in 0..steps {
            for acc in &mut acc {
                *acc = _mm512_fmadd_ps(*acc, a, b);
            }
        }
        best = best.min(start.elapsed().as_secs_f64());
        let sum = acc.iter().fold(_mm512_set1_ps(0.0), |sum, &acc| _mm512_add_ps(sum, acc));
        black_box(_mm512_reduce_add_ps(sum));
    }
    (steps * 16 * 16) as f64 / best / 1e9
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let threads = args.first().map_or(2, |s| s.parse().expect("threads"));
    let isa = args.get(1).map_or(Isa::detect(), |s| s.parse().expect("isa"));
    let pool = Pool::new(threads);
    println!("{isa}, {threads} threads");
    if let Some(peak) = fma_peak() {
        println!("one thread's AVX-512 multiply-adds:  {peak:6.1} GMAC/s");
    }
    bench_scan(isa, &pool, 512, 1);
    bench_scan(isa, &pool, 1, 30);
    bench_attention(isa, &pool, 512, 0);
    bench_attention(isa, &pool, 512, 4096);
    bench_attention(isa, &pool, 1, 4096);
    bench_attention(isa, &pool, 1, 32768);
    bench_conv(isa, &pool, 512);
    bench_conv(isa, &pool, 1);
}
