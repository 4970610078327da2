//! Whole models on the CPU against mlx-lm's figures.

use std::sync::Arc;

use lily_conformance::{Fixture, argmax_equal, max_abs};
use lily_cpu::{CpuDevice, CpuOptions};
use lily_device::{Device, Input, Limits, Output, Program, SegmentOut, SlotId, Step};
use lily_model::Precision;
use lily_ops::sample::SampleParams;

const SLOT: SlotId = SlotId(0);

fn program(fixture: &Fixture, precision: Precision) -> Box<dyn Program> {
    let model = lily_model::load(&fixture.checkpoint, precision).expect("the model loads");
    let device = CpuDevice::new(CpuOptions::default());
    let limits = Limits { outputs: 16, ..Limits::new(1, 512, 64) };
    device.prepare(Arc::clone(&model.plan), model.weights, limits).expect("the plan is prepared")
}

/// Logits of all tokens, fed in the given chunks.
fn logits(program: &mut dyn Program, tokens: &[u32], chunks: &[usize]) -> Vec<f32> {
    let mut all = Vec::new();
    let mut at = 0;
    for &n in chunks {
        let step = Step::one(SLOT, Input::Tokens(tokens[at..at + n].to_vec()), Output::Logits);
        match &program.run(step).expect("the step runs").segments[..] {
            [SegmentOut::Logits(rows)] => all.extend_from_slice(rows),
            other => panic!("{other:?}"),
        }
        at += n;
    }
    all
}

fn runs(fixture: &Fixture) -> [(&'static str, Vec<usize>); 3] {
    [("prefill", vec![40]), ("step", vec![1; 40]), ("mixed", fixture.mixed_chunks.clone())]
}

#[test]
fn precise_logits_equal_mlx_lm() {
    for name in ["tiny-a", "tiny-c"] {
        let fixture = Fixture::open(name);
        let mut program = program(&fixture, Precision::Precise);
        for (kind, chunks) in runs(&fixture) {
            program.reset(SLOT).expect("the slot exists");
            let got = logits(&mut *program, &fixture.tokens, &chunks);
            let (_, want) = fixture.golden(&format!("logits_f32_{kind}"));
            let error = max_abs(&got, want);
            println!("{name} precise {kind}: max abs {error:.2e}");
            assert!(error <= 1e-3, "{name} {kind}: {error}");
        }
    }
}

#[test]
fn standard_logits_stay_near_mlx_lm() {
    for (name, bound, least) in [("tiny-a", 1.5, 32), ("tiny-c", 0.6, 35)] {
        let fixture = Fixture::open(name);
        let mut program = program(&fixture, Precision::Standard);
        let vocab = program.plan().vocab;
        for (kind, chunks) in runs(&fixture) {
            program.reset(SLOT).expect("the slot exists");
            let got = logits(&mut *program, &fixture.tokens, &chunks);
            let (_, want) = fixture.golden(&format!("logits_f32_{kind}"));
            let (error, equal) = (max_abs(&got, want), argmax_equal(&got, want, vocab));
            println!("{name} standard {kind}: max abs {error:.3}, top-1 equal {equal} of 40");
            assert!(error <= bound && equal >= least, "{name} {kind}: {error}, {equal}");
        }
    }
}

#[test]
fn precise_greedy_continuations_equal_mlx_lm() {
    for name in ["tiny-a", "tiny-c"] {
        let fixture = Fixture::open(name);
        let mut program = program(&fixture, Precision::Precise);
        let greedy = || Output::Sample(SampleParams::GREEDY);
        let mut ids = Vec::new();
        let mut input = Input::Tokens(fixture.tokens.clone());
        while ids.len() < fixture.greedy.len() {
            let out = program.run(Step::one(SLOT, input, greedy())).expect("the step runs");
            match out.segments[..] {
                [SegmentOut::Sampled(ref sampled)] => ids.push(sampled.id),
                ref other => panic!("{other:?}"),
            }
            input = Input::LastSampled;
        }
        assert_eq!(ids, fixture.greedy, "{name}");
    }
}

#[test]
fn precise_caches_equal_mlx_lm() {
    for name in ["tiny-a", "tiny-c"] {
        let fixture = Fixture::open(name);
        let mut program = program(&fixture, Precision::Precise);
        logits(&mut *program, &fixture.tokens, &[1; 40]);
        let state = program.export(SLOT).expect("the slot is usable");
        let plan = program.plan();
        let s = plan.state;
        let (mut recurrent, mut attention) = (0, 0);
        for (layer, kind) in plan.layers.iter().enumerate() {
            let compare = |part: &str, got: Vec<f32>| {
                let (_, want) = fixture.golden(&format!("cache.L{layer}.{part}"));
                let scale = want.iter().fold(0f32, |m, x| m.max(x.abs()));
                let error = max_abs(&got, want) / scale;
                assert!(error <= 1e-4, "{name} layer {layer} {part}: {error}");
            };
            match kind {
                lily_ops::LayerKind::Recurrent => {
                    let part = |all: &[f32], len: usize| all[recurrent * len..][..len].to_vec();
                    compare("state", part(&state.recurrent, s.recurrent_len()));
                    compare("conv", part(&state.conv, s.conv_len()));
                    recurrent += 1;
                }
                lily_ops::LayerKind::Attention => {
                    // mlx-lm keeps [head][token][dim].
                    let row = s.kv_heads * s.head_dim;
                    let by_head = |all: &[f32]| -> Vec<f32> {
                        let layer = &all[attention * 40 * row..][..40 * row];
                        let line = |(h, t)| &layer[t * row + h * s.head_dim..][..s.head_dim];
                        (0..s.kv_heads)
                            .flat_map(|h| (0..40).map(move |t| (h, t)))
                            .flat_map(|at| line(at).to_vec())
                            .collect()
                    };
                    compare("k", by_head(&state.k));
                    compare("v", by_head(&state.v));
                    attention += 1;
                }
            }
        }
    }
}
