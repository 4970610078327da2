//! Seconds to choose a token at the vocabulary of the real shape: `cargo run --release -p lily-ops --example
//! sample_bench`.

use std::sync::Arc;
use std::time::Instant;

use lily_ops::case::Seeded;
use lily_ops::sample::{SampleParams, TokenCounts, TokenMask, sample};

const VOCAB: usize = 248_320;

/// Logits about as a model's: a bell of spread 2.5 and a few larger ones.
fn logits() -> Vec<f32> {
    let mut rng = Seeded::new("sample_bench");
    let mut bell = || (0..12).map(|_| rng.unit()).sum::<f32>() * 1.25;
    let mut logits: Vec<f32> = (0..VOCAB).map(|_| bell()).collect();
    for (i, x) in [18.0, 17.5, 16.0, 15.0, 14.5, 14.0].into_iter().enumerate() {
        logits[i * 40_009] = x;
    }
    logits
}

fn main() {
    let original = logits();
    let mut work = original.clone();
    let warm = SampleParams { temperature: 1.0, seed: 1, ..SampleParams::GREEDY };
    let allowed: Vec<bool> = (0..VOCAB).map(|id| id < 248_077).collect();
    let mask = Some(Arc::new(TokenMask::new(&allowed)));
    let hot = SampleParams { temperature: 100.0, top_p: 0.95, ..warm.clone() };
    for (name, params) in [
        ("greedy", SampleParams::GREEDY),
        ("greedy, mask", SampleParams { mask, ..SampleParams::GREEDY }),
        ("top_k 20", SampleParams { top_k: 20, ..warm.clone() }),
        ("top_k 20, top_p 0.95", SampleParams { top_k: 20, top_p: 0.95, ..warm.clone() }),
        ("top_k 5000", SampleParams { top_k: 5000, ..warm.clone() }),
        ("top_p 0.95", SampleParams { top_p: 0.95, ..warm.clone() }),
        ("min_p 0.05", SampleParams { min_p: 0.05, ..warm.clone() }),
        ("no cut", warm),
        ("temperature 100, top_p 0.95", hot),
        ("greedy, 20 logprobs", SampleParams { logprobs: Some(20), ..SampleParams::GREEDY }),
    ] {
        let mut best = f64::INFINITY;
        let mut sum = 0u64;
        for index in 0..20 {
            work.copy_from_slice(&original);
            let start = Instant::now();
            let id = sample(&mut work, &params, &TokenCounts::new(), index);
            best = best.min(start.elapsed().as_secs_f64());
            sum += u64::from(id.map_or(0, |sampled| sampled.id));
        }
        println!("{name:28} {:7.3} ms (ids {sum})", best * 1e3);
    }
}
