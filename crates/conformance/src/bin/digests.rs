//! One line for each case and each fixture: a digest of the bits that the CPU computes. Two machines that keep
//! the promise of docs/numerics.md print the same lines; `.ci/aarch64` compares AArch64 with x86-64.
//!
//! `cargo run -p lily-conformance --bin digests [ISA]`
#![forbid(unsafe_code)]

use std::sync::Arc;

use lily_conformance::{Fixture, case_bits};
use lily_cpu::{CpuDevice, CpuOptions, Isa};
use lily_device::{Device, Input, Limits, Output, SegmentOut, SlotId, Step};
use lily_model::Precision;
use lily_ops::Op;

/// FNV-1a over the words. NaNs are equal whatever their payload: processors make different ones.
fn digest(bits: impl IntoIterator<Item = u32>) -> u64 {
    let canonical = |w: u32| if w & 0x7fff_ffff > 0x7f80_0000 { 0x7fc0_0000 } else { w };
    let bytes = bits.into_iter().flat_map(|w| canonical(w).to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Logits of a fixture's prompt.
fn logits(device: &CpuDevice, fixture: &Fixture, precision: Precision) -> Vec<f32> {
    let model = lily_model::load(&fixture.checkpoint, precision).expect("the model loads");
    let limits = Limits { outputs: 16, ..Limits::new(1, 512, 64) };
    let mut program =
        device.prepare(Arc::clone(&model.plan), model.weights, limits).expect("prepared");
    let step = Step::one(SlotId(0), Input::Tokens(fixture.tokens.clone()), Output::Logits);
    match program.run(step).expect("the step runs").segments.remove(0) {
        SegmentOut::Logits(rows) => rows,
        other => panic!("{other:?}"),
    }
}

fn main() {
    let isa = std::env::args().nth(1).map_or(Isa::detect(), |name| {
        name.parse().unwrap_or_else(|e| {
            eprintln!("digests: {e}");
            std::process::exit(2)
        })
    });
    eprintln!("{isa}");
    let device = CpuDevice::new(CpuOptions { threads: Some(2), isa: Some(isa) });
    for case in Op::all_cases() {
        let outputs = device.evaluate(&case).unwrap_or_else(|e| panic!("{}: {e}", case.name));
        println!("{:016x} {}", digest(case_bits(&outputs)), case.name);
    }
    for name in ["tiny-a", "tiny-c"] {
        let fixture = Fixture::open(name);
        for precision in [Precision::Standard, Precision::Precise] {
            let rows = logits(&device, &fixture, precision);
            let hash = digest(rows.into_iter().map(f32::to_bits));
            println!("{hash:016x} {name} {precision:?}");
        }
    }
}
