//! Cancellation and failures, at every step.

mod common;

use std::ops::ControlFlow;

use common::*;
use lily_device::Fault;
use lily_engine::*;

/// A prompt of 40 in chunks of 16, and an answer of 5: three prompt steps, four decode steps.
const STEPS: u64 = 7;

fn check_answer(engine: &mut Engine, session: &mut Session, tokens: &[u32], what: &str) {
    let got = answer(engine, session, tokens, 5).unwrap();
    assert_eq!(got.ids, oracle::answer(tokens, 0, 5), "{what}");
}

#[test]
fn a_cancelled_prompt_ends_within_a_step_and_keeps_what_it_has() {
    let tokens = prompt(100);
    for at in 1..=6 {
        let device = FakeDevice::default();
        let mut engine = device.engine(OPTIONS);
        let mut session = engine.open_session().unwrap();
        let cancel = device.cancel_at(at);
        let error = engine.sync(&mut session, &tokens, &cancel, |_, _| {}).unwrap_err();
        assert!(matches!(error, EngineError::Cancelled { total: 100, done } if done == 16 * at));
        assert_eq!(device.steps().len(), at);
        assert_eq!(session.tokens(), &tokens[..16 * at]);
        let cancel = Cancel::new();
        let go = |_| ControlFlow::Continue(());
        let error = engine.generate(&mut session, &params(1), &cancel, go).unwrap_err();
        assert!(matches!(error, EngineError::NothingToGenerate), "{error}");
        let reuse = engine.sync(&mut session, &tokens, &cancel, |_, _| {}).unwrap();
        assert_eq!(reuse.reused, 16 * at);
        check_answer(&mut engine, &mut session, &tokens, "after a cancelled prompt");
    }
}

#[test]
fn a_raised_flag_stops_before_the_first_step() {
    let device = FakeDevice::default();
    let mut engine = device.engine(OPTIONS);
    let mut session = engine.open_session().unwrap();
    let cancel = Cancel::new();
    let clone = cancel.clone();
    clone.cancel();
    assert!(cancel.is_cancelled());
    for n in [1, 100] {
        assert!(engine.sync(&mut session, &prompt(n), &cancel, |_, _| {}).is_err());
        assert!(engine.score(&mut session, &prompt(n + 1), &cancel, |_, _| {}).is_err());
    }
    engine.sync(&mut session, &prompt(5), &Cancel::new(), |_, _| {}).unwrap();
    let got = engine.generate(&mut session, &params(3), &cancel, |_| panic!("no token")).unwrap();
    assert_eq!((got.ids.len(), got.finish), (0, FinishReason::Cancelled));
    assert!(device.steps().is_empty());
    check_answer(&mut engine, &mut session, &prompt(5), "after all that");
}

#[test]
fn a_cancelled_answer_ends_within_a_step() {
    let tokens = prompt(40);
    for at in 1..=5usize {
        let device = FakeDevice::default();
        let mut engine = device.engine(OPTIONS);
        let mut session = engine.open_session().unwrap();
        engine.sync(&mut session, &tokens, &Cancel::new(), |_, _| {}).unwrap();
        let cancel = device.cancel_at(at);
        let go = |_| ControlFlow::Continue(());
        let got = engine.generate(&mut session, &params(50), &cancel, go).unwrap();
        assert_eq!(got.finish, FinishReason::Cancelled);
        assert_eq!(got.ids, oracle::answer(&tokens, 0, at));
        assert_eq!(session.tokens().len(), 40 + at - 1);
        let mut longer = tokens.clone();
        longer.extend(&got.ids);
        let reuse = engine.sync(&mut session, &longer, &Cancel::new(), |_, _| {}).unwrap();
        assert_eq!(reuse.computed, 1);
        check_answer(&mut engine, &mut session, &longer, "after a cancelled answer");
    }
}

#[test]
fn the_callback_ends_an_answer() {
    let mut engine = FakeDevice::default().engine(OPTIONS);
    let mut session = engine.open_session().unwrap();
    engine.sync(&mut session, &prompt(4), &Cancel::new(), |_, _| {}).unwrap();
    let mut left = 3;
    let got = engine.generate(&mut session, &params(50), &Cancel::new(), |_| {
        left -= 1;
        if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let got = got.unwrap();
    assert_eq!((got.ids.len(), got.finish), (3, FinishReason::Cancelled));
}

#[test]
fn cancelled_scores_leave_a_usable_session() {
    let device = FakeDevice::default();
    let mut engine = device.engine(OPTIONS);
    let mut session = engine.open_session().unwrap();
    let cancel = device.cancel_at(2);
    let error = engine.score(&mut session, &prompt(100), &cancel, |_, _| {}).unwrap_err();
    assert!(matches!(error, EngineError::Cancelled { done: 32, total: 99 }), "{error}");
    assert_eq!(session.tokens(), prompt(32));
    check_answer(&mut engine, &mut session, &prompt(100), "after cancelled scores");
}

#[test]
fn a_refused_step_changes_nothing() {
    let tokens = prompt(40);
    for at in 0..STEPS {
        let mut engine = failing(&[(at, Fault::Refuse)]).engine(OPTIONS);
        let mut session = engine.open_session().unwrap();
        let error = answer(&mut engine, &mut session, &tokens, 5).unwrap_err();
        assert!(matches!(error, EngineError::Refused(_)), "{error}");
        assert_eq!(session.tokens().len(), [0, 16, 32, 40, 41, 42, 43][at as usize]);
        check_answer(&mut engine, &mut session, &tokens, "after a refusal");
    }
}

#[test]
fn an_answer_goes_on_after_a_refused_step() {
    let cancel = Cancel::new();
    for at in 2..STEPS {
        let mut engine = failing(&[(at, Fault::Refuse)]).engine(OPTIONS);
        let mut session = engine.open_session().unwrap();
        engine.sync(&mut session, &prompt(40), &cancel, |_, _| {}).unwrap();
        let mut generation = engine.start(&mut session, params(5)).unwrap();
        let mut errors = 0;
        while generation.finish().is_none() {
            errors += usize::from(generation.next(&mut engine, &mut session, &cancel).is_err());
            assert!(errors <= 1);
        }
        assert_eq!(errors, 1);
        assert_eq!(generation.ids(), oracle::answer(&prompt(40), 0, 5));
    }
}

#[test]
fn a_failed_step_poisons_until_the_next_sync() {
    let tokens = prompt(40);
    for at in 0..STEPS {
        let device = failing(&[(at, Fault::Fail)]);
        let mut engine = device.engine(OPTIONS);
        let mut session = engine.open_session().unwrap();
        let error = answer(&mut engine, &mut session, &tokens, 5).unwrap_err();
        let seen = [0, 16, 32, 40, 41, 42, 43][at as usize];
        match error {
            EngineError::StepFailed { slot: 0, position, reason } => {
                assert_eq!((position, reason.as_str()), (seen, "injected"));
            }
            other => panic!("{other}"),
        }
        let go = |_| ControlFlow::Continue(());
        let poisoned = [
            engine.snapshot(&session).map(drop),
            engine.checkpoint(&mut session).map(drop),
            engine.sample_held(&mut session, &SampleParams::GREEDY).map(drop),
            engine.generate(&mut session, &params(1), &Cancel::new(), go).map(drop),
        ];
        for result in poisoned {
            let error = result.unwrap_err();
            assert!(matches!(error, EngineError::Poisoned { .. }), "{error}");
            assert!(error.to_string().contains("sync the session again"), "{error}");
        }
        device.steps();
        check_answer(&mut engine, &mut session, &tokens, "after a failure");
        assert_eq!(device.steps(), [16, 16, 8, 1, 1, 1, 1], "everything is computed again");
    }
}

#[test]
fn checkpoints_do_not_outlive_a_failure() {
    let device = failing(&[(4, Fault::Fail)]);
    let mut engine = device.engine(OPTIONS);
    let mut session = engine.open_session().unwrap();
    engine.sync(&mut session, &prompt(20), &Cancel::new(), |_, _| {}).unwrap();
    engine.checkpoint(&mut session).unwrap();
    assert!(answer(&mut engine, &mut session, &prompt(60), 1).is_err());
    let reuse = engine.sync(&mut session, &prompt(60), &Cancel::new(), |_, _| {}).unwrap();
    assert_eq!(reuse.reused, 0);
}

#[test]
fn scores_and_snapshots_heal_too() {
    let mut engine = failing(&[(1, Fault::Fail), (5, Fault::Fail)]).engine(OPTIONS);
    let mut session = engine.open_session().unwrap();
    let cancel = Cancel::new();
    engine.score(&mut session, &prompt(30), &cancel, |_, _| {}).unwrap_err();
    let scores = engine.score(&mut session, &prompt(30), &cancel, |_, _| {}).unwrap();
    assert_eq!(scores, oracle::scores(&prompt(30)));
    let snapshot = engine.snapshot(&session).unwrap();
    answer(&mut engine, &mut session, &prompt(100), 1).unwrap_err();
    engine.restore(&mut session, &snapshot).unwrap();
    assert_eq!(session.tokens(), prompt(29));
    let reuse = engine.sync(&mut session, &prompt(30), &cancel, |_, _| {}).unwrap();
    assert_eq!(reuse.reused, 29);
    check_answer(&mut engine, &mut session, &prompt(30), "after a restore");
}

#[test]
fn a_poisoned_slot_is_clean_for_the_next_session() {
    let mut engine = failing(&[(0, Fault::Fail)]).engine(EngineOptions { slots: 1, ..OPTIONS });
    let mut session = engine.open_session().unwrap();
    answer(&mut engine, &mut session, &prompt(9), 1).unwrap_err();
    drop(session);
    let mut session = engine.open_session().unwrap();
    assert!(engine.snapshot(&session).is_ok());
    check_answer(&mut engine, &mut session, &prompt(9), "in a slot that was poisoned");
}

#[test]
fn a_lost_device_is_lost_for_all() {
    let tokens = prompt(40);
    for at in 0..STEPS {
        let mut engine = failing(&[(at, Fault::Lose)]).engine(OPTIONS);
        let mut session = engine.open_session().unwrap();
        let other = engine.open_session().unwrap();
        let error = answer(&mut engine, &mut session, &tokens, 5).unwrap_err();
        assert!(matches!(error, EngineError::DeviceLost(_)), "{error}");
        let again = [
            answer(&mut engine, &mut session, &tokens, 5).map(drop),
            engine.score(&mut session, &tokens, &Cancel::new(), |_, _| {}).map(drop),
            engine.snapshot(&other).map(drop),
            engine.open_session().map(drop),
            engine.close(other),
        ];
        for result in again {
            assert!(matches!(result, Err(EngineError::DeviceLost(_))));
        }
    }
}

/// Stages the two prompts and runs their first chunks together.
fn step_of_two(engine: &mut Engine, two: [&mut Session; 2]) -> Result<(), EngineError> {
    let [a, b] = two;
    let output = Output::Sample(SampleParams::GREEDY);
    let work = vec![a.prefill_segment(8, &output).unwrap(), b.prefill_segment(8, &output).unwrap()];
    engine.step(work).map(drop)
}

#[test]
fn a_batch_mate_survives_a_failure_that_does_not_name_it() {
    let device = FakeDevice::default();
    let mut engine = device.engine(OPTIONS);
    let mut a = engine.open_session().unwrap();
    let mut b = engine.open_session().unwrap();
    for session in [&mut a, &mut b] {
        answer(&mut engine, session, &prompt(3), 1).unwrap();
        engine.stage(session, &prompt(20)).unwrap();
    }
    device.log.lock().unwrap().fail_first = true;
    let error = step_of_two(&mut engine, [&mut a, &mut b]).unwrap_err();
    assert!(matches!(error, EngineError::StepFailed { slot: 0, position: 3, .. }), "{error}");
    assert!(error.to_string().contains("layer 3"), "{error}");
    assert!(matches!(engine.snapshot(&a), Err(EngineError::Poisoned { slot: 0, .. })));
    assert_eq!(b.pending().len(), 17);
    let got =
        engine.generate(&mut b, &params(5), &Cancel::new(), |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(got.ids, oracle::answer(&prompt(20), 0, 5));
    check_answer(&mut engine, &mut a, &prompt(20), "the one that failed");
}

#[test]
fn a_failing_segment_poisons_its_session_alone() {
    let device = FakeDevice::default();
    let mut engine = device.engine(OPTIONS);
    let mut a = engine.open_session().unwrap();
    let mut b = engine.open_session().unwrap();
    for session in [&mut a, &mut b] {
        engine.stage(session, &prompt(5)).unwrap();
    }
    device.log.lock().unwrap().fail_segment = true;
    let output = Output::Sample(SampleParams::GREEDY);
    let work = [&mut a, &mut b].map(|s| s.prefill_segment(8, &output).unwrap());
    let out = engine.step(work.into()).unwrap();
    assert!(matches!(&out[0], SegmentOut::Failed(reason) if reason.contains("layer 5")));
    let first = oracle::answer(&prompt(5), 0, 1)[0];
    assert_eq!(out[1], SegmentOut::Sampled(first.into()));
    assert!(matches!(engine.snapshot(&a), Err(EngineError::Poisoned { slot: 0, .. })));
    assert_eq!((a.tokens().len(), b.tokens().len()), (0, 5));
    check_answer(&mut engine, &mut a, &prompt(5), "the one that failed");
    check_answer(&mut engine, &mut b, &prompt(9), "its batch mate");
    // Alone in its step, it is a failed step.
    device.log.lock().unwrap().fail_segment = true;
    let error = answer(&mut engine, &mut a, &prompt(7), 1).unwrap_err();
    assert!(matches!(error, EngineError::StepFailed { slot: 0, .. }), "{error}");
    check_answer(&mut engine, &mut a, &prompt(7), "after it");
}

#[test]
fn results_that_were_not_asked_for_are_a_failure() {
    let device = FakeDevice::default();
    let mut engine = device.engine(OPTIONS);
    let mut a = engine.open_session().unwrap();
    let mut b = engine.open_session().unwrap();
    for session in [&mut a, &mut b] {
        engine.stage(session, &prompt(5)).unwrap();
    }
    device.log.lock().unwrap().garble = true;
    let error = step_of_two(&mut engine, [&mut a, &mut b]).unwrap_err();
    assert!(matches!(error, EngineError::StepFailed { .. }), "{error}");
    for session in [&mut a, &mut b] {
        assert!(matches!(engine.snapshot(session), Err(EngineError::Poisoned { .. })));
        check_answer(&mut engine, session, &prompt(5), "after garbled results");
    }
}
