//! The rules of the step interface on the CPU: what is refused changes nothing, what fails says where.

use std::fs::OpenOptions;
use std::io::{Seek, SeekFrom, Write};
use std::sync::Arc;

use lily_checkpoint::Checkpoint;
use lily_conformance::fixture_path;
use lily_cpu::{CpuDevice, CpuOptions};
use lily_device::{
    Device, Input, Limits, Output, PrepareError, Program, Refusal, Segment, SegmentOut, SlotId,
    Step, StepError,
};
use lily_model::Precision;
use lily_ops::sample::{SampleParams, TokenMask};
use lily_ops::{Op, Plan};

fn device() -> CpuDevice {
    CpuDevice::new(CpuOptions { threads: Some(2), isa: None })
}

fn prepare(checkpoint: &Checkpoint, limits: Limits) -> Box<dyn Program> {
    let model = lily_model::load(checkpoint, Precision::Standard).expect("the model loads");
    device().prepare(Arc::clone(&model.plan), model.weights, limits).expect("prepared")
}

fn fixture(limits: Limits) -> Box<dyn Program> {
    prepare(&Checkpoint::open(&fixture_path("tiny-c").join("mlx")).expect("opens"), limits)
}

fn tokens(n: usize) -> Input {
    Input::Tokens((0..n as u32).map(|i| (i * 7 + 3) % 512).collect())
}

fn greedy() -> Output {
    Output::Sample(SampleParams::GREEDY)
}

fn sampled(program: &mut dyn Program, slot: u32, input: Input) -> u32 {
    match program.run(Step::one(SlotId(slot), input, greedy())).expect("the step runs").segments[..]
    {
        [SegmentOut::Sampled(ref sampled)] => sampled.id,
        ref other => panic!("{other:?}"),
    }
}

fn refusal(program: &mut dyn Program, step: Step) -> Refusal {
    match program.submit(step) {
        Err(StepError::Refused(refusal)) => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn what_is_refused_changes_nothing() {
    let mut program = fixture(Limits { pages: 2, outputs: 4, ..Limits::new(2, 512, 32) });
    let want = sampled(&mut *fixture(Limits::new(1, 512, 32)), 0, tokens(20));
    let one = |slot, input, output| Step::one(SlotId(slot), input, output);
    let twice = Step {
        segments: vec![
            Segment { slot: SlotId(0), input: tokens(2), output: Output::None },
            Segment { slot: SlotId(0), input: tokens(2), output: Output::None },
        ],
    };
    let hot = SampleParams { temperature: -1.0, ..SampleParams::GREEDY };
    let invalid = [
        (Step::default(), "no segments"),
        (one(0, Input::Tokens(vec![]), Output::None), "no tokens"),
        (one(0, Input::LastSampled, greedy()), "nothing was sampled"),
        (one(0, Input::Tokens(vec![1, 512]), Output::None), "token 1 is 512"),
        (one(0, tokens(33), Output::None), "33 tokens in one step"),
        (one(0, tokens(3), Output::Scores(vec![1, 2])), "2 targets for 3 tokens"),
        (one(0, tokens(2), Output::Scores(vec![1, 512])), "each below 512"),
        (one(0, tokens(2), Output::Sample(hot)), "temperature is -1"),
        (twice, "two segments name slot 0"),
    ];
    for (step, want) in invalid {
        let got = refusal(&mut *program, step);
        assert!(matches!(&got, Refusal::Invalid(m) if m.contains(want)), "{got:?}, want {want}");
    }
    let none = refusal(&mut *program, one(2, tokens(1), Output::None));
    assert_eq!(none, Refusal::NoSuchSlot { slot: SlotId(2), slots: 2 });
    assert_eq!((program.free_pages(), program.position(SlotId(0))), (2, Ok(0)));
    assert_eq!(sampled(&mut *program, 0, tokens(20)), want);
}

#[test]
fn pages_run_out_and_come_back() {
    let mut program = fixture(Limits { pages: 2, outputs: 4, ..Limits::new(3, 512, 200) });
    sampled(&mut *program, 0, tokens(200));
    sampled(&mut *program, 1, tokens(100));
    assert_eq!(program.free_pages(), 0);
    let full = refusal(&mut *program, Step::one(SlotId(2), tokens(1), greedy()));
    assert_eq!(full, Refusal::OutOfPages { need: 1, free: 0 });
    // Room is left in the pages that the slots have.
    sampled(&mut *program, 0, tokens(56));
    let full = refusal(&mut *program, Step::one(SlotId(0), Input::LastSampled, greedy()));
    assert_eq!(full, Refusal::OutOfPages { need: 1, free: 0 });
    let snapshot = program.snapshot(SlotId(0)).expect("usable");
    assert!(matches!(
        program.restore(SlotId(2), &snapshot),
        Err(StepError::Refused(Refusal::OutOfPages { need: 1, free: 0 }))
    ));
    program.reset(SlotId(1)).expect("the slot exists");
    sampled(&mut *program, 0, Input::LastSampled);
    assert_eq!(program.free_pages(), 0);
    program.reset(SlotId(0)).expect("the slot exists");
    program.restore(SlotId(2), &snapshot).expect("there is room again");
    assert_eq!((program.free_pages(), program.position(SlotId(2))), (1, Ok(256)));
}

#[test]
fn two_steps_may_be_in_flight() {
    let mut program = fixture(Limits::new(1, 512, 32));
    let first = program.submit(Step::one(SlotId(0), tokens(5), greedy())).expect("submitted");
    let second =
        program.submit(Step::one(SlotId(0), Input::LastSampled, greedy())).expect("submitted");
    let third = refusal(&mut *program, Step::one(SlotId(0), Input::LastSampled, greedy()));
    assert!(matches!(third, Refusal::Invalid(_)));
    // In any order.
    let b = program.wait(second).expect("a result");
    let a = program.wait(first).expect("a result");
    let mut serial = fixture(Limits::new(1, 512, 32));
    let want = [sampled(&mut *serial, 0, tokens(5)), sampled(&mut *serial, 0, Input::LastSampled)];
    let got = [a, b].map(|out| out.segments[0].clone());
    assert_eq!(got, want.map(|id| SegmentOut::Sampled(id.into())));
    assert!(program.wait(lily_device::Ticket(77)).is_err());
}

#[test]
fn held_logits_are_sampled_later_with_a_mask() {
    let mut program = fixture(Limits::new(2, 512, 32));
    let want = sampled(&mut *program, 0, tokens(9));
    let out = program.run(Step::one(SlotId(1), tokens(9), Output::Hold)).expect("the step runs");
    assert_eq!(out.segments, [SegmentOut::None]);
    // A mask without any token is refused and leaves the logits where they are.
    let nothing =
        SampleParams { mask: Some(Arc::new(TokenMask::new(&[]))), ..SampleParams::GREEDY };
    assert!(matches!(program.sample(SlotId(1), &nothing), Err(StepError::Refused(_))));
    let allowed: Vec<bool> = (0..512).map(|id| id != want).collect();
    let masked =
        SampleParams { mask: Some(Arc::new(TokenMask::new(&allowed))), ..SampleParams::GREEDY };
    let other = program.sample(SlotId(1), &masked).expect("a token is left").id;
    assert_ne!(other, want);
    assert!(matches!(program.sample(SlotId(1), &masked), Err(StepError::Refused(_))));
    // The handoff takes what was sampled.
    let next = sampled(&mut *program, 1, Input::LastSampled);
    program.reset(SlotId(0)).expect("the slot exists");
    let Input::Tokens(mut list) = tokens(9) else { unreachable!() };
    list.push(other);
    assert_eq!(sampled(&mut *program, 0, Input::Tokens(list)), next);
}

/// An infinite scale in one layer: the step fails with that layer's name, and only its slots are lost.
#[test]
fn a_value_that_is_not_finite_names_its_layer() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let source = fixture_path("tiny-c").join("mlx");
    for entry in std::fs::read_dir(&source).expect("the fixture") {
        let path = entry.expect("an entry").path();
        std::fs::copy(&path, dir.path().join(path.file_name().expect("a name"))).expect("copied");
    }
    let cases = [
        ("language_model.model.layers.2.mlp.shared_expert.down_proj.scales", "layer 2"),
        ("language_model.model.layers.0.linear_attn.in_proj_qkv.scales", "layer 0"),
        ("language_model.model.layers.3.self_attn.k_proj.biases", "layer 3"),
        ("language_model.lm_head.scales", "output head"),
    ];
    for (name, place) in cases {
        let (shard, offset, before) = {
            let checkpoint = Checkpoint::open(dir.path()).expect("the copy opens");
            let data = &checkpoint.get(name).expect("the tensor").data;
            (data.shard().name().to_string(), data.offset(), data.map()[..2].to_vec())
        };
        let patch = |bytes: &[u8]| {
            let mut file =
                OpenOptions::new().write(true).open(dir.path().join(&shard)).expect("the shard");
            file.seek(SeekFrom::Start(offset)).expect("sought");
            file.write_all(bytes).expect("written");
        };
        patch(&[0x80, 0x7f]);
        let checkpoint = Checkpoint::open(dir.path()).expect("the copy opens");
        let mut program = prepare(&checkpoint, Limits::new(2, 512, 32));
        program.run(Step::one(SlotId(1), tokens(1), Output::None)).ok();
        let error = program.run(Step::one(SlotId(0), tokens(3), greedy())).expect_err("it fails");
        match &error {
            StepError::Failed { slots, reason } => {
                assert_eq!(slots[..], [SlotId(0)]);
                assert!(reason.contains(place), "{name}: {reason}");
            }
            other => panic!("{name}: {other:?}"),
        }
        // The slot is of no use until it is reset.
        assert!(matches!(
            program.submit(Step::one(SlotId(0), tokens(1), greedy())),
            Err(StepError::Refused(Refusal::Invalid(_)))
        ));
        assert!(program.snapshot(SlotId(0)).is_err());
        program.reset(SlotId(0)).expect("the slot exists");
        assert_eq!(program.position(SlotId(0)), Ok(0));
        patch(&before);
    }
    let mut program =
        prepare(&Checkpoint::open(dir.path()).expect("the copy opens"), Limits::new(1, 512, 32));
    let want = sampled(&mut *fixture(Limits::new(1, 512, 32)), 0, tokens(3));
    assert_eq!(sampled(&mut *program, 0, tokens(3)), want, "the patches are undone");
}

/// A neighbour that fails takes nobody with it: its state is poisoned by a snapshot that holds a NaN.
#[test]
fn a_failing_segment_leaves_its_batch_mates_alone() {
    let mut program = fixture(Limits::new(3, 512, 64));
    let mut serial = fixture(Limits::new(1, 512, 64));
    let want = [sampled(&mut *serial, 0, tokens(20)), sampled(&mut *serial, 0, Input::LastSampled)];
    program.run(Step::one(SlotId(0), tokens(5), Output::None)).expect("the step runs");
    let mut snapshot = program.snapshot(SlotId(0)).expect("usable");
    snapshot.recurrent[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    program.restore(SlotId(0), &snapshot).expect("the snapshot fits");
    let step = |input: [Input; 2]| Step {
        segments: input
            .into_iter()
            .enumerate()
            .map(|(slot, input)| Segment { slot: SlotId(slot as u32), input, output: greedy() })
            .collect(),
    };
    let out = program.run(step([tokens(3), tokens(20)])).expect("one segment has a result");
    match &out.segments[..] {
        [SegmentOut::Failed(reason), SegmentOut::Sampled(sampled)] => {
            assert!(reason.contains("layer 0"), "{reason}");
            assert_eq!(sampled.id, want[0]);
        }
        other => panic!("{other:?}"),
    }
    assert!(program.position(SlotId(0)).is_err(), "the slot is poisoned");
    assert_eq!(program.position(SlotId(1)), Ok(20));
    assert_eq!(sampled(&mut *program, 1, Input::LastSampled), want[1]);
}

/// What a step sampled or held is gone with the next step of the slot, whatever that asks for.
#[test]
fn the_token_handoff_is_that_of_the_step_before() {
    let mut program = fixture(Limits::new(1, 512, 32));
    sampled(&mut *program, 0, tokens(4));
    program.run(Step::one(SlotId(0), tokens(2), Output::Hold)).expect("the step runs");
    let stale = refusal(&mut *program, Step::one(SlotId(0), Input::LastSampled, greedy()));
    assert!(matches!(stale, Refusal::Invalid(_)), "{stale:?}");
    program.run(Step::one(SlotId(0), tokens(2), Output::None)).expect("the step runs");
    assert!(program.sample(SlotId(0), &SampleParams::GREEDY).is_err(), "the logits are stale");
}

#[test]
fn a_mask_without_tokens_is_refused_before_the_step() {
    let mut program = fixture(Limits::new(2, 512, 32));
    let nothing = SampleParams {
        mask: Some(Arc::new(TokenMask::new(&[false; 512]))),
        ..SampleParams::GREEDY
    };
    let segments = [greedy(), Output::Sample(nothing)];
    let segments = segments.into_iter().enumerate().map(|(slot, output)| Segment {
        slot: SlotId(slot as u32),
        input: tokens(3),
        output,
    });
    let refused = refusal(&mut *program, Step { segments: segments.collect() });
    assert!(matches!(&refused, Refusal::Invalid(m) if m.contains("mask")), "{refused:?}");
    assert_eq!(program.position(SlotId(0)), Ok(0));
}

#[test]
fn a_snapshot_of_another_model_is_refused() {
    let mut program = fixture(Limits::new(1, 512, 32));
    sampled(&mut *program, 0, tokens(4));
    let other = Checkpoint::open(&fixture_path("tiny-a").join("mlx")).expect("opens");
    let mut other = prepare(&other, Limits::new(1, 512, 32));
    let foreign = other.snapshot(SlotId(0)).expect("usable");
    let error = program.restore(SlotId(0), &foreign).expect_err("refused");
    assert!(error.to_string().contains("another model"), "{error}");
    assert_eq!(program.position(SlotId(0)), Ok(4), "nothing changed");
}

#[test]
fn plans_without_a_kernel_are_refused_when_they_are_prepared() {
    let checkpoint = Checkpoint::open(&fixture_path("tiny-a").join("mlx")).expect("opens");
    let model = lily_model::load(&checkpoint, Precision::Standard).expect("the model loads");
    let prepare = |plan: Plan| {
        device().prepare(Arc::new(plan), model.weights.clone(), Limits::new(1, 64, 8)).map(|_| ())
    };
    let mut plan = (*model.plan).clone();
    plan.state.dk = 8;
    assert!(matches!(
        prepare(plan),
        Err(PrepareError::Invalid(_) | PrepareError::Unsupported { .. })
    ));
    // A rotary embedding of its own in one layer.
    let mut plan = (*model.plan).clone();
    let last = plan.body.iter_mut().rev().find_map(|n| match &mut n.op {
        Op::AttentionPrep(op) => Some(op),
        _ => None,
    });
    last.expect("the model has attention").rope.theta = 5e6;
    let error = prepare(plan).expect_err("one rotary embedding a program");
    assert!(
        matches!(&error, PrepareError::Unsupported { operations, .. } if operations.contains("rotary"))
    );
    let few = model.weights[1..].to_vec();
    let prepared = device().prepare(Arc::clone(&model.plan), few, Limits::new(1, 64, 8));
    assert!(matches!(prepared, Err(PrepareError::Invalid(_))));
}
