//! The CPU's kernels alone: what is measured, never how fast it is.

use lily_bench::SystemClock;
use lily_bench::roofline::{CpuRoofline, Sizes};
use lily_cpu::kernels::attention::AttentionShape;
use lily_cpu::kernels::gdn::GdnShape;
use lily_cpu::pool::Pool;
use lily_cpu::simd::Isa;

fn sizes() -> Sizes {
    Sizes {
        cold: 1 << 20,
        hidden: 128,
        projection: 192,
        inner: 256,
        vocab: 1000,
        experts: 8,
        top_k: 2,
        expert_width: 64,
        rows: 20,
        contexts: vec![300, 600],
        attention: AttentionShape { heads: 4, kv_heads: 2, head_dim: 64, rot: 16 },
        delta: GdnShape { key_heads: 2, value_heads: 4, dk: 64, dv: 64, taps: 4 },
    }
}

#[test]
fn every_kernel_has_its_twin_and_its_variant() {
    let (pool, clock) = (Pool::new(2), SystemClock::new());
    let isa = Isa::detect();
    let available = Some(256 << 20);
    let cpu = CpuRoofline { pool: &pool, isa, sizes: sizes(), rounds: 2, clock: &clock, available };
    let mut seen = Vec::new();
    let roofline = cpu.run(|what| {
        seen.push(what.to_owned());
        true
    });
    let names: Vec<&str> = roofline.rows.iter().map(|r| r.kernel.as_str()).collect();
    assert_eq!(seen[1..], names);
    for part in ["GEMV Q4", "GEMV Q8", "GEMV Bf16", "GEMM Q4", "experts in", "experts out"] {
        assert!(names.iter().any(|n| n.starts_with(part)), "{part}: {names:?}");
    }
    assert!(names.contains(&"attention bf16, 1 at 600"), "{names:?}");
    assert!(names.iter().any(|n| n.starts_with("recurrence f32, 20 tokens")), "{names:?}");
    assert!(roofline.bytes_per_second > 0.0);
    for row in &roofline.rows {
        for rounds in [&row.seconds, &row.read_only, &row.no_arithmetic] {
            assert_eq!(rounds.len(), 2, "{row:?}");
            assert!(rounds.iter().all(|s| *s > 0.0), "{row:?}");
        }
        assert!(row.bytes > 0.0 && row.macs.is_some_and(|n| n > 0.0), "{row:?}");
    }
    // A 4-bit matrix of 192 rows of 128 columns: half a byte a weight, two scales of two bytes for each 64.
    let gemv = &roofline.rows[0];
    assert_eq!(gemv.kernel, "GEMV Q4 x i8, 1 x [192 x 128]");
    assert_eq!((gemv.bytes, gemv.macs), ((192 * (64 + 8)) as f64, Some((192 * 128) as f64)));
    let experts = roofline.rows.iter().find(|r| r.kernel.starts_with("experts in Q4 x i8, 1 x 2"));
    assert_eq!(experts.map(|r| r.bytes), Some((2 * 64 * (64 + 8)) as f64));
}

#[test]
fn who_says_stop_is_heard() {
    let (pool, clock) = (Pool::new(1), SystemClock::new());
    let isa = Isa::detect();
    let available = Some(0);
    let cpu = CpuRoofline { pool: &pool, isa, sizes: sizes(), rounds: 1, clock: &clock, available };
    let mut calls = 0;
    let roofline = cpu.run(|_| {
        calls += 1;
        calls <= 3
    });
    assert_eq!(roofline.rows.len(), 2);
}
