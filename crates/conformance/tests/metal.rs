//! Whole models through the Metal host code on a device in software: the tokens of softgpu, two steps under way, no rule of
//! Metal broken, and every fault ends as its error with nothing left behind.
#![cfg(all(metal_soft, not(target_os = "macos")))]

mod metal_common;

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lily_conformance::metal::{open, open_with, options, profile, softgpu};
use lily_conformance::{Fixture, max_abs};
use lily_device::{Input, Output, SegmentOut, Step};
use lily_engine::{Cancel, Engine, EngineOptions, GenerateParams, Machine};
use lily_gpu::GpuDevice;
use lily_gpu::conformance::check;
use lily_gpu::device::Open;
use lily_ops::Op;
use lily_ops::sample::SampleParams;
use lily_softmetal::{Caps, Fault, Soft};
use metal_common::*;

/// Every case of every operation, against the scalar reference.
#[test]
fn every_operation_agrees_with_the_reference() {
    every_operation(Caps::without_tensors());
}

/// The same with every access noted.
#[test]
fn every_operation_keeps_to_its_bindings() {
    every_operation(Caps { tracked: true, ..Caps::without_tensors() });
}

fn every_operation(caps: Caps) {
    let (soft, open) = open(caps);
    let mut driver = open().expect("the device opens");
    let only = std::env::var("CASES").unwrap_or_default();
    let mut failures = Vec::new();
    let mut count = 0;
    for case in Op::all_cases().iter().filter(|c| c.name.contains(&only)) {
        count += 1;
        failures.extend(check(&mut *driver, &Tuning::default(), case).err());
    }
    println!("{count} cases");
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    drop(driver);
    nothing_is_left(&soft);
}

/// Greedy and drawn tokens, an odd prefill, and 128 decode steps with two under way: the ids of the same kernels without
/// Metal.
#[test]
fn tokens_are_those_of_softgpu() {
    let fixture = Fixture::open("tiny-c");
    let (soft, metal) = open(Caps::without_tensors());
    let reference = softgpu(&profile(&metal));
    let [mut metal, mut reference] =
        [metal, reference].map(|open| prepare(open, model(&fixture), limits(512, 64)));
    for (params, count) in [(SampleParams::GREEDY, 128), (drawn(), 24)] {
        let run = |p: &mut dyn Program| generate(p, &fixture.tokens, &params, count);
        assert_eq!(run(&mut *metal), run(&mut *reference));
    }
    drop(metal);
    nothing_is_left(&soft);
}

/// The demo model's answer to the first of its golden prompts.
#[test]
fn the_demo_model_answers_as_on_softgpu() {
    let golden = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../models/demo/golden/greedy.json");
    let golden = lily_conformance::read_json(&golden);
    let prompt: Vec<u32> = golden["prompts"][0]["prompt_ids"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|x| x.as_u64().expect("an id") as u32)
        .collect();
    let checkpoint = lily_demo::open().expect("the demo model opens");
    let load = || lily_model::load(&checkpoint, Precision::Standard).expect("it loads");
    let (soft, metal) = open(Caps::without_tensors());
    let reference = softgpu(&profile(&metal));
    let [mut metal, mut reference] =
        [metal, reference].map(|open| prepare(open, load(), limits(512, 64)));
    let run = |p: &mut dyn Program| generate(p, &prompt, &SampleParams::GREEDY, 16);
    assert_eq!(run(&mut *metal), run(&mut *reference));
    drop(metal);
    nothing_is_left(&soft);
}

/// 1,000 tokens in chunks, on a device so slow that a chunk is more than one command buffer may be.
#[test]
fn a_long_prompt_in_chunks_and_parts() {
    let fixture = Fixture::open("tiny-a");
    let caps = Caps { thread_seconds: 1e-7, ..Caps::without_tensors() };
    let options = lily_metal::Options { part_seconds: 0.002, ..options(|_| ()) };
    let (soft, metal) = open_with(caps, options);
    let reference = softgpu(&profile(&metal));
    let [mut metal, mut reference] =
        [metal, reference].map(|open| prepare(open, model(&fixture), limits(1024, 256)));
    let vocab = metal.plan().vocab as u32;
    let prompt: Vec<u32> = (0..1000).map(|i| (i * 7 + 3) % vocab).collect();
    let run = |p: &mut dyn Program| {
        p.reset(SLOT).expect("the slot exists");
        let (last, head) = prompt.split_last().expect("a prompt");
        for chunk in head.chunks(256) {
            p.run(Step::one(SLOT, Input::Tokens(chunk.to_vec()), Output::None)).expect("it runs");
        }
        let sample = || Output::Sample(SampleParams::GREEDY);
        let mut input = Input::Tokens(vec![*last]);
        let mut ids = Vec::new();
        for _ in 0..6 {
            let input = std::mem::replace(&mut input, Input::LastSampled);
            match p.run(Step::one(SLOT, input, sample())).expect("it runs").segments[..] {
                [SegmentOut::Sampled(ref s)] => ids.push(s.id),
                ref other => panic!("{other:?}"),
            }
        }
        ids
    };
    let before = soft.committed();
    let got = run(&mut *metal);
    let buffers = soft.committed() - before;
    println!("{buffers} command buffers for 10 steps");
    assert!(buffers >= 4 + 6 + 6, "{buffers} command buffers for 10 steps");
    assert_eq!(got, run(&mut *reference));
    drop(metal);
    nothing_is_left(&soft);
}

/// A dispatch that alone takes longer than a command buffer may becomes several, which leave the same tokens.
#[test]
fn a_dispatch_that_is_too_long_is_cut() {
    let fixture = Fixture::open("tiny-a");
    let run = |open: Open| {
        let mut program = prepare(open, model(&fixture), limits(256, 64));
        generate(&mut *program, &fixture.tokens, &SampleParams::GREEDY, 2)
    };
    let caps = Caps { thread_seconds: 1e-6, ..Caps::without_tensors() };
    // Times correct a guess by 64 at most: the limit is below that of a launch.
    let short = lily_metal::Options { part_seconds: 2e-5, ..options(|_| ()) };
    let (slow, in_pieces) = open_with(caps, short);
    let (fast, whole) = open(Caps::without_tensors());
    let want = run(softgpu(&profile(&whole)));
    assert_eq!(run(in_pieces), want);
    assert_eq!(run(whole), want);
    // Where nothing takes long, each step is one command buffer: two chunks and a token.
    assert_eq!(fast.committed(), 3);
    let (pieces, dispatches) = (slow.launches()[0], fast.launches()[0]);
    println!("{pieces} launches of {dispatches} dispatches");
    assert!(pieces > dispatches, "{pieces} launches of {dispatches} dispatches");
    nothing_is_left(&slow);
    nothing_is_left(&fast);
}

fn engine(open: Open) -> Engine {
    let (dir, model) = micro();
    let device = GpuDevice::new(profile(&open), Tuning::default(), open);
    let options = EngineOptions { undo: true, ..EngineOptions::new(1280, 1, 64) };
    let engine = Engine::on_machine(&device, model.plan, model.weights, options, &Machine::UNKNOWN)
        .expect("an engine");
    drop(dir);
    engine
}

/// The ids that an engine answers with, and the command buffer before the first token was there.
fn answer(
    engine: &mut Engine,
    soft: Option<&Soft>,
    count: usize,
    params: SampleParams,
) -> (Vec<u32>, u64) {
    let mut session = engine.open_session().expect("a session");
    let prompt: Vec<u32> = (0..40).map(|i| (i * 7 + 3) % 100).collect();
    let cancel = Cancel::new();
    engine.sync(&mut session, &prompt, &cancel, |_, _| {}).expect("the prompt fits");
    let params = GenerateParams { sample: params, max_tokens: count, stop_ids: Vec::new() };
    let mut first = None;
    let done = engine.generate(&mut session, &params, &cancel, |_| {
        first.get_or_insert_with(|| soft.map_or(0, Soft::committed));
        ControlFlow::Continue(())
    });
    let ids = done.expect("it answers").ids;
    engine.close(session).expect("closed");
    (ids, first.unwrap_or(0))
}

/// Each step's command buffer is held open until the next step's is committed: an engine that waits for a token before it
/// encodes the next step never ends.
#[test]
fn the_next_step_is_committed_while_one_runs() {
    let (soft, open) = open_with(
        Caps::without_tensors(),
        lily_metal::Options { patience: Duration::from_secs(20), ..options(|_| ()) },
    );
    let reference = softgpu(&profile(&open));
    let want = answer(&mut engine(reference), None, 40, SampleParams::GREEDY).0;
    let mut engine = engine(open);
    assert_eq!(engine.depth(), 2);
    let before = soft.committed();
    assert_eq!(answer(&mut engine, None, 40, SampleParams::GREEDY).0, want);
    let buffers = soft.committed() - before;
    // The answer's steps but for the last one, whose successor is none.
    let now = soft.committed();
    soft.hold(now + buffers - 39..now + buffers - 1);
    assert_eq!(answer(&mut engine, None, 40, SampleParams::GREEDY).0, want);
    assert_eq!(soft.committed() - now, buffers);
    drop(engine);
    nothing_is_left(&soft);
}

#[test]
fn a_thousand_steps_with_random_delays() {
    let (soft, open) = open(Caps::without_tensors());
    let mut reference = engine(softgpu(&profile(&open)));
    let want = answer(&mut reference, None, 1000, drawn()).0;
    let mut engine = engine(open);
    soft.delay(Duration::from_millis(4));
    let (ids, first) = answer(&mut engine, Some(&soft), 1000, drawn());
    assert_eq!(ids, want);
    assert!(first >= 2, "one step ahead from the first token on");
    drop(engine);
    nothing_is_left(&soft);
}

/// With every access noted: what the barriers and fences of prefill and decode leave unordered touches nothing of each other's,
/// and no kernel leaves its bindings.
#[test]
fn nothing_unordered_is_touched() {
    let (soft, open) = open(Caps { tracked: true, ..Caps::without_tensors() });
    let reference = softgpu(&profile(&open));
    let mut want = engine(reference);
    let mut engine = engine(open);
    let want = answer(&mut want, None, 6, drawn()).0;
    assert_eq!(answer(&mut engine, None, 6, drawn()).0, want);
    drop(engine);
    nothing_is_left(&soft);
}

/// Logits of a prompt.
fn logits(open: Open, fixture: &Fixture) -> Vec<f32> {
    let mut program = prepare(open, model(fixture), Limits { outputs: 40, ..limits(256, 64) });
    let step = Step::one(SLOT, Input::Tokens(fixture.tokens.clone()), Output::Logits);
    match &program.run(step).expect("it runs").segments[..] {
        [SegmentOut::Logits(rows)] => rows.clone(),
        other => panic!("{other:?}"),
    }
}

/// Tensor operations (in the emulator's stand-in) agree with simdgroup matrices; where they are missing, do not compile or are
/// wrong, the simdgroup path takes their place, and one line says so.
#[test]
fn tensor_operations_and_their_replacement() {
    let fixture = Fixture::open("tiny-a");
    let plain = logits(open(Caps::without_tensors()).1, &fixture);
    let faults = [(None, 0), (Some(Fault::CompileTensor), 1), (Some(Fault::WrongTensor), 1)];
    for (fault, lines) in faults {
        let log: Arc<Mutex<Vec<String>>> = Arc::default();
        let sink = log.clone();
        let (soft, open) = open_with(
            Caps::default(),
            options(move |line| sink.lock().expect("no panic").push(line.to_owned())),
        );
        if let Some(fault) = fault {
            soft.inject(fault);
        }
        let got = logits(open, &fixture);
        let log = log.lock().expect("no panic").clone();
        assert_eq!(log.len(), lines, "{fault:?}: {log:?}");
        let error = max_abs(&got, &plain);
        match fault {
            None => {
                println!("tensor operations against simdgroup matrices: max abs {error:.1e}");
                assert!(error < 0.2, "{error}");
                let [plain, tensors] = soft.launches();
                assert!(tensors > 40 && plain > 40, "{plain} and {tensors} launches");
            }
            Some(_) => assert!(got == plain, "{fault:?}: the simdgroup path's bits"),
        }
        nothing_is_left(&soft);
    }
}
