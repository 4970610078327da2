//! The scalar reference against mlx-lm's figures: what every device is compared with is itself right.

use lily_conformance::{Fixture, max_abs};
use lily_model::Precision;
use lily_ops::quant::WeightRef;
use lily_ops::{Reference, ReferenceSegment, SlotState};

/// Runs `tokens` through the reference in the given chunks; returns the logits of every token.
fn run(fixture: &Fixture, precision: Precision, chunks: &[usize]) -> (Vec<f32>, SlotState) {
    let model = lily_model::load(&fixture.checkpoint, precision).expect("the model loads");
    let weights: Vec<WeightRef> = model.weights.iter().map(|w| w.as_ref()).collect();
    let mut slots = [SlotState::empty(&model.plan.state)];
    let mut logits = Vec::new();
    let mut at = 0;
    for &n in chunks {
        let segment = [ReferenceSegment { slot: 0, first: 0, rows: n }];
        let rows: Vec<usize> = (0..n).collect();
        let tokens = &fixture.tokens[at..at + n];
        logits.extend(
            Reference::new(&model.plan, &weights, &segment, tokens, &rows, &mut slots).forward(),
        );
        at += n;
    }
    (logits, slots.into_iter().next().unwrap())
}

#[test]
fn logits_equal_mlx_lm() {
    for name in ["tiny-a", "tiny-c"] {
        let fixture = Fixture::open(name);
        let runs =
            [("prefill", vec![40]), ("step", vec![1; 40]), ("mixed", fixture.mixed_chunks.clone())];
        for (kind, chunks) in runs {
            let (logits, _) = run(&fixture, Precision::Precise, &chunks);
            let (_, want) = fixture.golden(&format!("logits_f32_{kind}"));
            let error = max_abs(&logits, want);
            println!("{name} {kind}: max abs {error:.2e}");
            assert!(error <= 1e-3, "{name} {kind}: {error}");
        }
    }
}
