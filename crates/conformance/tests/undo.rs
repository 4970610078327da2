//! Steps taken back on the CPU: to the bit as if they had never run. And what a step tells of probabilities.

use std::sync::Arc;

use lily_checkpoint::Checkpoint;
use lily_conformance::fixture_path;
use lily_cpu::{CpuDevice, CpuOptions};
use lily_device::{
    Device, Input, Limits, Output, Program, Refusal, Segment, SegmentOut, SlotId, Snapshot, Step,
    StepError,
};
use lily_model::Precision;
use lily_ops::sample::{LogitBias, SampleParams, Sampled, sample};

const SLOT: SlotId = SlotId(0);

fn prepare(precision: Precision, limits: Limits) -> Box<dyn Program> {
    let checkpoint = Checkpoint::open(&fixture_path("tiny-c").join("mlx")).expect("opens");
    let model = lily_model::load(&checkpoint, precision).expect("the model loads");
    let device = CpuDevice::new(CpuOptions { threads: Some(2), isa: None });
    device.prepare(Arc::clone(&model.plan), model.weights, limits).expect("prepared")
}

fn undoing(slots: usize) -> Limits {
    Limits { undo: true, ..Limits::new(slots, 512, 300) }
}

fn tokens(n: usize) -> Input {
    Input::Tokens((0..n as u32).map(|i| (i * 7 + 3) % 512).collect())
}

/// Draws, counts and penalizes: everything that the sampler keeps matters.
fn warm() -> SampleParams {
    SampleParams {
        temperature: 1.5,
        frequency_penalty: 0.5,
        presence_penalty: 0.25,
        seed: 3,
        ..SampleParams::GREEDY
    }
}

fn run(program: &mut dyn Program, slot: SlotId, input: Input, output: Output) -> SegmentOut {
    program.run(Step::one(slot, input, output)).expect("the step runs").segments.remove(0)
}

fn sampled(program: &mut dyn Program, slot: SlotId, input: Input) -> u32 {
    match run(program, slot, input, Output::Sample(warm())) {
        SegmentOut::Sampled(sampled) => sampled.id,
        other => panic!("{other:?}"),
    }
}

fn snapshot(program: &mut dyn Program, slot: SlotId) -> Snapshot {
    program.snapshot(slot).expect("usable")
}

fn undo_refused(program: &mut dyn Program, slot: SlotId, why: &str) {
    let before = snapshot(program, slot);
    match program.undo_last(slot) {
        Err(StepError::Refused(Refusal::Invalid(text))) => assert!(text.contains(why), "{text}"),
        other => panic!("{other:?}"),
    }
    assert!(snapshot(program, slot) == before, "a refusal changes nothing");
}

#[test]
fn an_undone_step_never_ran() {
    for precision in [Precision::Standard, Precision::Precise] {
        // The answer crosses from the first page into the second.
        let mut plain = prepare(precision, Limits::new(2, 512, 300));
        let mut program = prepare(precision, undoing(2));
        let first = sampled(&mut *plain, SLOT, tokens(250));
        assert_eq!(sampled(&mut *program, SLOT, tokens(250)), first);
        sampled(&mut *program, SlotId(1), tokens(30));
        let mate = snapshot(&mut *program, SlotId(1));
        for step in 0..12 {
            let (before, pages) = (snapshot(&mut *program, SLOT), program.free_pages());
            let id = sampled(&mut *program, SLOT, Input::LastSampled);
            program.undo_last(SLOT).expect("a decode step");
            assert!(snapshot(&mut *program, SLOT) == before, "{precision:?}, step {step}");
            assert_eq!(program.free_pages(), pages, "step {step}");
            // A step with another token, held and sampled, is taken back in one too.
            run(&mut *program, SLOT, Input::Tokens(vec![5]), Output::Hold);
            program.sample(SLOT, &warm()).expect("held");
            program.undo_last(SLOT).expect("one token");
            assert!(snapshot(&mut *program, SLOT) == before, "{precision:?}, step {step}");
            assert!(program.sample(SLOT, &warm()).is_err(), "nothing is held");
            assert_eq!(sampled(&mut *program, SLOT, Input::LastSampled), id);
            assert_eq!(sampled(&mut *plain, SLOT, Input::LastSampled), id);
            assert!(snapshot(&mut *program, SLOT) == snapshot(&mut *plain, SLOT));
        }
        assert!(snapshot(&mut *program, SlotId(1)) == mate, "the other slot is untouched");
    }
}

/// Of two steps in flight the second is taken back for one of its slots.
#[test]
fn the_surplus_step_of_two_in_flight() {
    let mut program = prepare(Precision::Standard, undoing(3));
    let mut plain = prepare(Precision::Standard, Limits::new(3, 512, 300));
    for program in [&mut program, &mut plain] {
        for slot in 0..2 {
            sampled(&mut **program, SlotId(slot), tokens(20 + slot as usize));
        }
    }
    let both = || {
        let segment = |slot| Segment {
            slot: SlotId(slot),
            input: Input::LastSampled,
            output: Output::Sample(warm()),
        };
        Step { segments: vec![segment(0), segment(1)] }
    };
    let first = program.submit(both()).expect("submitted");
    let second = program.submit(both()).expect("submitted");
    undo_refused(&mut *program, SLOT, "in flight");
    let a = program.wait(first).expect("a result");
    undo_refused(&mut *program, SLOT, "in flight");
    let b = program.wait(second).expect("a result");
    program.undo_last(SLOT).expect("it has landed");
    let want = plain.run(both()).expect("the step runs");
    assert_eq!(a, want);
    assert!(snapshot(&mut *program, SLOT) == snapshot(&mut *plain, SLOT));
    let next = plain.run(both()).expect("the step runs");
    assert_eq!(b, next, "what was undone was right");
    assert!(snapshot(&mut *program, SlotId(1)) == snapshot(&mut *plain, SlotId(1)));
    let again = run(&mut *program, SLOT, Input::LastSampled, Output::Sample(warm()));
    assert_eq!(again, next.segments[0]);
}

#[test]
fn what_cannot_be_taken_back() {
    let mut program = prepare(Precision::Standard, undoing(2));
    let none = "no last step of one token";
    undo_refused(&mut *program, SLOT, none);
    sampled(&mut *program, SLOT, tokens(2));
    undo_refused(&mut *program, SLOT, none);
    sampled(&mut *program, SLOT, Input::LastSampled);
    program.undo_last(SLOT).expect("a decode step");
    undo_refused(&mut *program, SLOT, none);
    sampled(&mut *program, SLOT, Input::LastSampled);
    let kept = snapshot(&mut *program, SLOT);
    program.begin_answer(SLOT, &[]).expect("usable");
    undo_refused(&mut *program, SLOT, none);
    sampled(&mut *program, SLOT, Input::LastSampled);
    program.restore(SLOT, &kept).expect("it fits");
    undo_refused(&mut *program, SLOT, none);
    sampled(&mut *program, SLOT, Input::LastSampled);
    run(&mut *program, SLOT, tokens(3), Output::None);
    undo_refused(&mut *program, SLOT, none);
    sampled(&mut *program, SLOT, tokens(1));
    program.reset(SLOT).expect("the slot exists");
    undo_refused(&mut *program, SLOT, none);
    assert!(matches!(
        program.undo_last(SlotId(7)),
        Err(StepError::Refused(Refusal::NoSuchSlot { .. }))
    ));
    // Without the limit nothing is kept, and nothing is paid.
    let mut plain = prepare(Precision::Standard, Limits::new(2, 512, 300));
    sampled(&mut *plain, SLOT, tokens(1));
    sampled(&mut *plain, SLOT, Input::LastSampled);
    undo_refused(&mut *plain, SLOT, none);
    let (with, without) = (program.memory(), plain.memory());
    assert_eq!(with.state, 2 * without.state);
    assert_eq!(with.total() - with.state, without.total() - without.state);
}

/// An answer taken up from its tokens has the sampler, and so the draws and penalties, of the one that ran.
#[test]
fn an_answer_taken_up_from_its_tokens_goes_on_alike() {
    let mut program = prepare(Precision::Standard, Limits::new(2, 512, 64));
    let mut ids = vec![sampled(&mut *program, SLOT, tokens(20))];
    for _ in 0..7 {
        ids.push(sampled(&mut *program, SLOT, Input::LastSampled));
    }
    let Input::Tokens(mut all) = tokens(20) else { unreachable!() };
    all.extend(&ids);
    program.begin_answer(SlotId(1), &ids).expect("usable");
    let again = sampled(&mut *program, SlotId(1), Input::Tokens(all));
    assert_eq!(again, sampled(&mut *program, SLOT, Input::LastSampled));
    assert!(snapshot(&mut *program, SlotId(1)) == snapshot(&mut *program, SLOT));
}

/// Log-probabilities and biases in a step, and of held logits, are those of the scalar rule.
#[test]
fn logprobs_and_biases_follow_the_rule() {
    let mut program = prepare(Precision::Standard, Limits::new(2, 512, 64));
    let logits = match run(&mut *program, SLOT, tokens(9), Output::Logits) {
        SegmentOut::Logits(all) => all[8 * 512..].to_vec(),
        other => panic!("{other:?}"),
    };
    let bias = LogitBias::new([(7, -100.0), (11, 4.5), (500, 3.0)]).expect("a bias");
    for params in [
        SampleParams { logprobs: Some(20), ..SampleParams::GREEDY },
        SampleParams { logprobs: Some(0), ..warm() },
        SampleParams { logit_bias: Some(Arc::new(bias)), logprobs: Some(5), ..warm() },
    ] {
        let counts = Default::default();
        let want = sample(&mut logits.clone(), &params, &counts, 0).expect("a token");
        assert!(want.logprobs.is_some());
        program.reset(SLOT).expect("the slot exists");
        let got = run(&mut *program, SLOT, tokens(9), Output::Sample(params.clone()));
        assert_eq!(got, SegmentOut::Sampled(want.clone()));
        program.reset(SLOT).expect("the slot exists");
        run(&mut *program, SLOT, tokens(9), Output::Hold);
        let held: Sampled = program.sample(SLOT, &params).expect("held");
        assert_eq!(held, want);
    }
    // An id outside the vocabulary, and too many.
    let bias = LogitBias::new([(512, 1.0)]).expect("a bias");
    for (params, why) in [
        (SampleParams { logit_bias: Some(Arc::new(bias)), ..warm() }, "token 512"),
        (SampleParams { logprobs: Some(21), ..warm() }, "logprobs is 21"),
    ] {
        let step = Step::one(SlotId(1), tokens(3), Output::Sample(params));
        match program.submit(step) {
            Err(StepError::Refused(Refusal::Invalid(text))) => {
                assert!(text.contains(why), "{text}")
            }
            other => panic!("{other:?}"),
        }
    }
}
