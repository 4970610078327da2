//! Steps in flight, and steps taken back.

mod common;

use std::ops::ControlFlow;

use common::*;
use lily_device::{Call, Fault};
use lily_engine::*;

const TWO: EngineOptions = EngineOptions { undo: true, ..OPTIONS };

fn overlapping() -> FakeDevice {
    FakeDevice { overlaps: true, ..FakeDevice::default() }
}

/// Parameters of an answer of 12 tokens that ends with the `stop`-th of the oracle's, if any.
fn stopping(tokens: &[u32], stop: Option<usize>) -> (GenerateParams, Vec<u32>) {
    let mut want = oracle::answer(tokens, 0, 12);
    let mut p = params(12);
    if let Some(at) = stop {
        want.truncate(at + 1);
        p.stop_ids = vec![want[at]];
    }
    (p, want)
}

#[test]
fn answers_are_the_same_with_two_steps_in_flight() {
    let tokens = prompt(40);
    for stop in (0..12).map(Some).chain([None]) {
        let device = overlapping();
        let mut engine = device.engine(TWO);
        assert_eq!(engine.depth(), 2);
        let mut session = engine.open_session().unwrap();
        let (p, want) = stopping(&tokens, stop);
        let got = answer_with(&mut engine, &mut session, &tokens, &p).unwrap();
        assert_eq!(got.ids, want);
        // A surplus step runs only where a stop ends the answer early, and leaves no trace.
        let surplus = usize::from(stop.is_some_and(|at| at < 11));
        assert_eq!(device.log.lock().unwrap().undos, surplus, "{stop:?}");
        assert_eq!(device.steps().len(), 3 + want.len() - 1 + surplus);
        assert_eq!(got.timings.decode_tokens, want.len() as u64 - 1);
        assert_eq!(session.tokens().len(), 40 + want.len() - 1);
        assert_eq!(session.last_sampled(), want.last().copied());
        let mut longer = tokens.clone();
        longer.extend(&want);
        longer.push(9);
        let reuse = engine.sync(&mut session, &longer, &Cancel::new(), |_, _| {}).unwrap();
        assert_eq!(reuse.computed, 2);
        let got = answer(&mut engine, &mut session, &longer, 5).unwrap();
        assert_eq!(got.ids, oracle::answer(&longer, 0, 5));
    }
}

#[test]
fn one_step_at_a_time_where_two_do_not_pay() {
    let tokens = prompt(40);
    for (device, options) in [(FakeDevice::default(), TWO), (overlapping(), OPTIONS)] {
        let mut engine = device.engine(options);
        assert_eq!(engine.depth(), 1);
        let mut session = engine.open_session().unwrap();
        let (p, want) = stopping(&tokens, Some(3));
        let got = answer_with(&mut engine, &mut session, &tokens, &p).unwrap();
        assert_eq!((got.ids, device.steps().len()), (want, 6));
    }
}

#[test]
fn the_callback_and_the_flag_leave_no_surplus_step() {
    let tokens = prompt(40);
    for flag in [false, true] {
        let device = overlapping();
        let mut engine = device.engine(TWO);
        let mut session = engine.open_session().unwrap();
        let cancel = Cancel::new();
        engine.sync(&mut session, &tokens, &cancel, |_, _| {}).unwrap();
        let mut left = 4;
        let got = engine.generate(&mut session, &params(50), &cancel, |_| {
            left -= 1;
            if left == 0 && flag {
                cancel.cancel();
            }
            if left == 0 && !flag { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        let got = got.unwrap();
        assert_eq!((got.ids, got.finish), (oracle::answer(&tokens, 0, 4), FinishReason::Cancelled));
        assert_eq!(session.tokens().len(), 43);
        assert_eq!(device.log.lock().unwrap().undos, 1);
    }
}

/// Prompt chunks and decode steps of two sessions, two steps ahead throughout.
#[test]
fn a_scheduler_keeps_two_steps_in_flight() {
    let device = overlapping();
    let mut engine = device.engine(TWO);
    let prompts = [prompt(3), prompt(40)];
    let mut sessions: Vec<Session> = Vec::new();
    let mut answers = Vec::new();
    for p in &prompts {
        let mut session = engine.open_session().unwrap();
        engine.stage(&mut session, p).unwrap();
        answers.push(engine.start(&mut session, params(10)).unwrap());
        sessions.push(session);
    }
    let mut flights: std::collections::VecDeque<(Vec<usize>, Flight)> = Default::default();
    loop {
        while flights.len() < 2 {
            let mut taken = Vec::new();
            let mut work = Vec::new();
            for (i, (session, answer)) in sessions.iter_mut().zip(&answers).enumerate() {
                if let Some(w) = answer.work(session, 8).unwrap() {
                    taken.push(i);
                    work.push(w);
                }
            }
            if work.is_empty() {
                break;
            }
            flights.push_back((taken, engine.submit(work).unwrap()));
        }
        let Some((taken, flight)) = flights.pop_front() else { break };
        let mut list: Vec<&mut Session> = sessions
            .iter_mut()
            .enumerate()
            .filter_map(|(i, session)| taken.contains(&i).then_some(session))
            .collect();
        for (i, out) in taken.iter().zip(engine.wait(flight, &mut list).unwrap()) {
            if let SegmentOut::Sampled(sampled) = out {
                answers[*i].accept(sampled);
            }
        }
    }
    for (answer, p) in answers.iter().zip(&prompts) {
        assert_eq!(answer.ids(), oracle::answer(p, 0, 10));
        assert_eq!(answer.finish(), Some(FinishReason::Length));
    }
}

/// A session with a prompt computed, an answer begun, and one decode step run.
fn begun(engine: &mut Engine) -> Session {
    let mut session = engine.open_session().unwrap();
    engine.stage(&mut session, &prompt(20)).unwrap();
    engine.start(&mut session, params(50)).unwrap();
    let sample = Output::Sample(SampleParams::GREEDY);
    while let Some(work) = session.prefill_segment(16, &sample) {
        engine.step(vec![work]).unwrap();
    }
    decode(engine, &mut session);
    session
}

fn decode(engine: &mut Engine, session: &mut Session) {
    let work = session.decode_segment(Output::Sample(SampleParams::GREEDY)).unwrap();
    engine.step(vec![work]).unwrap();
}

#[test]
fn taken_back_a_step_never_ran() {
    let mut engine = FakeDevice::default().engine(TWO);
    let mut session = begun(&mut engine);
    let before = engine.snapshot(&session).unwrap();
    let (tokens, last) = (session.tokens().to_vec(), session.last_sampled());
    decode(&mut engine, &mut session);
    engine.undo(&mut session).unwrap();
    assert_eq!((session.tokens(), session.last_sampled()), (&tokens[..], last));
    assert_eq!(engine.snapshot(&session).unwrap().state(), before.state());
    // Once, and no other kind of step.
    let error = engine.undo(&mut session).unwrap_err();
    assert!(matches!(error, EngineError::NothingToUndo { slot: 0 }), "{error}");
    decode(&mut engine, &mut session);
    let mut want = prompt(20);
    want.extend(oracle::answer(&prompt(20), 0, 3));
    assert_eq!(session.tokens()[..22], want[..22]);
    assert_eq!(session.last_sampled(), Some(want[22]));
    for change in [
        |engine: &mut Engine, session: &mut Session, _: &SessionSnapshot| {
            engine.stage(session, &prompt(30)).map(drop)
        },
        |engine: &mut Engine, session: &mut Session, snapshot: &SessionSnapshot| {
            engine.restore(session, snapshot)
        },
    ] {
        change(&mut engine, &mut session, &before).unwrap();
        assert!(engine.undo(&mut session).is_err());
        engine.restore(&mut session, &before).unwrap();
        decode(&mut engine, &mut session);
    }
    // Without the option the device refuses.
    let mut engine = FakeDevice::default().engine(OPTIONS);
    let mut session = begun(&mut engine);
    let error = engine.undo(&mut session).unwrap_err();
    assert!(matches!(error, EngineError::Refused(_)), "{error}");
    decode(&mut engine, &mut session);
}

#[test]
fn a_session_in_flight_is_left_alone() {
    let mut engine = overlapping().engine(TWO);
    let mut session = begun(&mut engine);
    let snapshot = engine.snapshot(&session).unwrap();
    let mut other = engine.open_session().unwrap();
    let submit = |engine: &mut Engine, session: &mut Session| {
        let work = session.decode_segment(Output::Sample(SampleParams::GREEDY)).unwrap();
        engine.submit(vec![work])
    };
    let first = submit(&mut engine, &mut session).unwrap();
    let second = submit(&mut engine, &mut session).unwrap();
    let refused = [
        engine.stage(&mut session, &prompt(3)).map(drop),
        engine.snapshot(&session).map(drop),
        engine.restore(&mut session, &snapshot),
        engine.checkpoint(&mut session).map(drop),
        engine.start(&mut session, params(1)).map(drop),
        engine.sample_held(&mut session, &SampleParams::GREEDY).map(drop),
        engine.undo(&mut session),
        engine.score(&mut session, &prompt(3), &Cancel::new(), |_, _| {}).map(drop),
        engine.sync(&mut other, &prompt(30), &Cancel::new(), |_, _| {}).map(drop),
    ];
    for (i, result) in refused.into_iter().enumerate() {
        let error = result.unwrap_err();
        assert!(matches!(error, EngineError::InFlight { slot: 0 }), "{i}: {error}");
    }
    // A third is the device's to refuse; nothing changes.
    assert!(matches!(submit(&mut engine, &mut session), Err(EngineError::Refused(_))));
    engine.wait(first, &mut [&mut session]).unwrap();
    engine.wait(second, &mut [&mut session]).unwrap();
    let mut want = prompt(20);
    want.extend(oracle::answer(&prompt(20), 0, 3));
    assert_eq!(session.tokens(), want);
    answer(&mut engine, &mut other, &prompt(30), 1).unwrap();
}

#[test]
fn steps_that_nobody_waits_for() {
    let submit = |engine: &mut Engine, session: &mut Session| {
        let work = session.decode_segment(Output::Sample(SampleParams::GREEDY)).unwrap();
        engine.submit(vec![work]).unwrap()
    };
    // A flight that is dropped, waited for out of order, or with other sessions.
    for how in 0..3 {
        let mut engine = overlapping().engine(TWO);
        let mut session = begun(&mut engine);
        let mut other = engine.open_session().unwrap();
        let flight = submit(&mut engine, &mut session);
        match how {
            0 => drop(flight),
            1 => {
                let second = submit(&mut engine, &mut session);
                assert!(engine.wait(second, &mut [&mut session]).is_err());
                drop(flight);
            }
            _ => assert!(engine.wait(flight, &mut [&mut other]).is_err()),
        }
        answer(&mut engine, &mut other, &prompt(5), 2).unwrap();
        let error = engine.snapshot(&session).unwrap_err();
        assert!(matches!(error, EngineError::Poisoned { slot: 0, .. }), "{how}: {error}");
        let got = answer(&mut engine, &mut session, &prompt(20), 3).unwrap();
        assert_eq!(got.ids, oracle::answer(&prompt(20), 0, 3), "{how}");
    }
    // A session that ends while its step is in flight gives its slot back afterwards.
    let mut engine = overlapping().engine(EngineOptions { slots: 1, ..TWO });
    let mut session = begun(&mut engine);
    let flight = submit(&mut engine, &mut session);
    drop(session);
    assert!(matches!(engine.open_session(), Err(EngineError::NoFreeSlot { .. })));
    drop(flight);
    let mut session = engine.open_session().unwrap();
    let got = answer(&mut engine, &mut session, &prompt(20), 3).unwrap();
    assert_eq!(got.ids, oracle::answer(&prompt(20), 0, 3));
}

/// Every call fails in every way, with two steps in flight.
#[test]
fn faults_with_two_steps_in_flight() {
    let tokens = prompt(40);
    let (p, want) = stopping(&tokens, Some(3));
    let mut seen = [0; 2];
    for call in [Call::Submit, Call::Wait, Call::Undo] {
        for at in 0..9 {
            for fault in [Fault::Refuse, Fault::Fail, Fault::Lose] {
                let mut device = overlapping();
                device.schedule = vec![(call, at, fault)];
                let mut engine = device.engine(TWO);
                let mut session = engine.open_session().unwrap();
                let got = answer_with(&mut engine, &mut session, &tokens, &p);
                let what = format!("{call:?} {at} {fault:?}");
                match got {
                    Ok(got) => {
                        assert_eq!(got.ids, want, "{what}");
                        seen[0] += 1;
                    }
                    Err(EngineError::DeviceLost(_)) => {
                        assert_eq!(fault, Fault::Lose);
                        assert!(engine.open_session().is_err());
                        seen[1] += 1;
                        continue;
                    }
                    Err(EngineError::Refused(_)) => assert_eq!(fault, Fault::Refuse, "{what}"),
                    Err(EngineError::StepFailed { slot: 0, .. }) => {}
                    Err(error) => panic!("{what}: {error}"),
                }
                let again = answer_with(&mut engine, &mut session, &tokens, &p);
                match again {
                    Ok(got) => assert_eq!(got.ids, want, "{what}: again"),
                    // The fault was still to come.
                    Err(EngineError::DeviceLost(_)) => assert_eq!(fault, Fault::Lose, "{what}"),
                    Err(_) => {
                        let got = answer_with(&mut engine, &mut session, &tokens, &p).unwrap();
                        assert_eq!(got.ids, want, "{what}: a third time");
                    }
                }
            }
        }
    }
    assert!(seen[0] > 20 && seen[1] > 10, "{seen:?}");
}

/// A batch mate of a step that failed goes on where the device says that it is intact, two steps ahead or not.
#[test]
fn batch_mates_of_a_failed_step_in_flight() {
    let device = overlapping();
    let mut engine = device.engine(TWO);
    let mut a = begun(&mut engine);
    let mut b = begun(&mut engine);
    let sample = || Output::Sample(SampleParams::GREEDY);
    device.log.lock().unwrap().fail_segment = true;
    let work = vec![a.decode_segment(sample()).unwrap(), b.decode_segment(sample()).unwrap()];
    let first = engine.submit(work).unwrap();
    let work = vec![a.decode_segment(sample()).unwrap(), b.decode_segment(sample()).unwrap()];
    let second = engine.submit(work).unwrap();
    let want = oracle::answer(&prompt(20), 0, 4);
    let out = engine.wait(first, &mut [&mut a, &mut b]).unwrap();
    assert!(matches!(&out[0], SegmentOut::Failed(reason) if reason.contains("layer 5")));
    assert_eq!(out[1], SegmentOut::Sampled(want[2].into()));
    // What the device made of the failed one afterwards is of no use.
    let out = engine.wait(second, &mut [&mut a, &mut b]).unwrap();
    assert!(matches!(&out[0], SegmentOut::Failed(_)));
    assert_eq!(out[1], SegmentOut::Sampled(want[3].into()));
    assert!(engine.snapshot(&b).is_ok());
    assert!(matches!(engine.snapshot(&a), Err(EngineError::Poisoned { .. })));
    let got = answer(&mut engine, &mut a, &prompt(20), 4).unwrap();
    assert_eq!(got.ids, want);
}

/// A failure that leaves a batch mate where it was: alone it goes on, but not if a step was submitted behind.
#[test]
fn what_was_submitted_behind_a_failed_step_is_of_no_use() {
    for behind in [false, true] {
        let device = overlapping();
        let mut engine = device.engine(TWO);
        let mut a = begun(&mut engine);
        let mut b = begun(&mut engine);
        let sample = || Output::Sample(SampleParams::GREEDY);
        device.log.lock().unwrap().fail_late = true;
        let work = vec![a.decode_segment(sample()).unwrap(), b.decode_segment(sample()).unwrap()];
        let first = engine.submit(work).unwrap();
        let second =
            behind.then(|| engine.submit(vec![b.decode_segment(sample()).unwrap()]).unwrap());
        let error = engine.wait(first, &mut [&mut a, &mut b]).unwrap_err();
        assert!(matches!(error, EngineError::StepFailed { slot: 0, .. }), "{error}");
        if let Some(second) = second {
            let out = engine.wait(second, &mut [&mut b]).unwrap();
            assert!(matches!(&out[0], SegmentOut::Failed(_)), "{out:?}");
            assert!(engine.is_poisoned(&b));
        }
        assert!(engine.is_poisoned(&a));
        if !behind {
            assert!(!engine.is_poisoned(&b));
            decode(&mut engine, &mut b);
            let want = oracle::answer(&prompt(20), 0, 3);
            assert_eq!(b.last_sampled(), Some(want[2]));
        }
        let got = answer(&mut engine, &mut b, &prompt(20), 4).unwrap();
        assert_eq!(got.ids, oracle::answer(&prompt(20), 0, 4));
    }
}

#[test]
fn pages_that_run_out_in_flight_end_nothing() {
    let device = FakeDevice { pages: Some(2), ..overlapping() };
    let mut engine = device.engine(TWO);
    let mut one = engine.open_session().unwrap();
    answer(&mut engine, &mut one, &prompt(3), 1).unwrap();
    let mut two = engine.open_session().unwrap();
    let error = answer(&mut engine, &mut two, &prompt(250), 20).unwrap_err();
    assert!(matches!(error, EngineError::OutOfPages { need: 1, free: 0 }), "{error}");
    // All that was computed was taken in: 250 and 6 more fill the page.
    assert_eq!(two.tokens().len(), 256);
    engine.close(one).unwrap();
    let got = answer(&mut engine, &mut two, &prompt(250), 20).unwrap();
    assert_eq!(got.ids, oracle::answer(&prompt(250), 0, 20));
}

/// A token with its log-probability.
fn told() -> Output {
    Output::Sample(SampleParams { logprobs: Some(0), ..SampleParams::GREEDY })
}

/// Steps in which the host takes part run alone on a device that overlaps: no step is in flight beside them, none is
/// surplus, and each token is told before the next step begins.
#[test]
fn answers_that_the_host_chooses() {
    let tokens = prompt(40);
    for stop in (0..12).map(Some).chain([None]) {
        let device = overlapping();
        let mut engine = device.engine(TWO);
        let mut session = engine.open_session().unwrap();
        let (mut p, want) = stopping(&tokens, stop);
        p.sample.logprobs = Some(0);
        engine.stage(&mut session, &tokens).unwrap();
        let mut steps = Vec::new();
        let got = engine.generate(&mut session, &p, &Cancel::new(), |_| {
            steps.push(device.log.lock().unwrap().steps.len());
            ControlFlow::Continue(())
        });
        let got = got.unwrap();
        assert_eq!((&got.ids, got.logprobs.len()), (&want, want.len()));
        assert_eq!(steps, (3..3 + want.len()).collect::<Vec<_>>());
        let log = device.log.lock().unwrap();
        assert_eq!((log.undos, log.steps.len()), (0, 2 + want.len()));
        // The prompt's chunks ask for nothing and overlap.
        assert_eq!(log.in_flight[1], 1);
        assert!(log.in_flight[2..].iter().all(|n| *n == 0), "{:?}", log.in_flight);
    }
}

/// A step that runs alone, submitted while others are in flight, of the same session or not: the device ends those first, what came
/// of them is kept.
#[test]
fn a_step_that_runs_alone_is_submitted_beside_others() {
    for (outputs, same) in [(0, true), (0, false), (1, true), (1, false), (2, true), (2, false)] {
        let device = overlapping();
        let mut engine = device.engine(TWO);
        let mut a = begun(&mut engine);
        let mut b = begun(&mut engine);
        let want = oracle::answer(&prompt(20), 0, 5);
        let plain = Output::Sample(SampleParams::GREEDY);
        let read_back = || [told(), Output::Hold, Output::Scores(vec![want[3]])][outputs].clone();
        let first = engine.submit(vec![a.decode_segment(plain.clone()).unwrap()]).unwrap();
        let other = if same { &mut a } else { &mut b };
        let work = vec![other.decode_segment(read_back()).unwrap()];
        assert!(engine.waits(&work));
        let second = engine.submit(work).unwrap();
        // The device has nothing left, and still two steps are not waited for.
        let work = vec![b.decode_segment(plain.clone())];
        if let Some(work) = work.into_iter().flatten().next() {
            let error = engine.submit(vec![work]).unwrap_err();
            assert!(matches!(error, EngineError::Refused(_)), "{error}");
        }
        let out = engine.wait(first, &mut [&mut a]).unwrap();
        assert_eq!(out, [SegmentOut::Sampled(want[2].into())]);
        let other = if same { &mut a } else { &mut b };
        let out = engine.wait(second, &mut [&mut *other]).unwrap();
        let next = want[if same { 3 } else { 2 }];
        match outputs {
            0 => assert!(matches!(&out[0], SegmentOut::Sampled(s) if s.id == next), "{out:?}"),
            1 => {
                let sampled = engine.sample_held(other, &SampleParams::GREEDY).unwrap();
                assert_eq!(sampled.id, next);
            }
            _ => assert!(matches!(&out[0], SegmentOut::Scores(s) if s.len() == 1), "{out:?}"),
        }
        if outputs < 2 {
            decode(&mut engine, other);
            assert_eq!(other.last_sampled(), Some(want[if same { 4 } else { 3 }]));
            engine.undo(other).unwrap();
        }
        let decoded = |s: &Session| s.timings().decode_tokens;
        assert_eq!((decoded(&a), decoded(&b)), if same { (3, 1) } else { (2, 2) });
    }
}

/// The step before one that runs alone fails, is dropped, or loses the device.
#[test]
fn faults_before_a_step_that_runs_alone() {
    let plain = || Output::Sample(SampleParams::GREEDY);
    for fault in [Fault::Refuse, Fault::Fail, Fault::Lose] {
        for same in [true, false] {
            let mut device = overlapping();
            // Each session has waited for three steps when it has begun.
            device.schedule = vec![(Call::Wait, 6, fault)];
            let mut engine = device.engine(TWO);
            let mut a = begun(&mut engine);
            let mut b = begun(&mut engine);
            let first = engine.submit(vec![a.decode_segment(plain()).unwrap()]).unwrap();
            let other = if same { &mut a } else { &mut b };
            let second = engine.submit(vec![other.decode_segment(told()).unwrap()]);
            let error = engine.wait(first, &mut [&mut a]).unwrap_err();
            let what = format!("{fault:?} {same}: {error}");
            if fault == Fault::Lose {
                assert!(matches!(error, EngineError::DeviceLost(_)), "{what}");
                assert!(matches!(second, Err(EngineError::DeviceLost(_))), "{what}");
                continue;
            }
            assert!(matches!(error, EngineError::StepFailed { slot: 0, .. }), "{what}");
            assert!(engine.is_poisoned(&a) && !engine.is_poisoned(&b), "{what}");
            let want = oracle::answer(&prompt(20), 0, 4);
            if let Ok(second) = second {
                let other = if same { &mut a } else { &mut b };
                let out = engine.wait(second, &mut [other]).unwrap();
                match same {
                    true => assert!(matches!(&out[0], SegmentOut::Failed(_)), "{what}"),
                    false => assert!(matches!(&out[0], SegmentOut::Sampled(s) if s.id == want[2])),
                }
            } else {
                assert!(same, "{what}");
            }
            let got = answer(&mut engine, &mut a, &prompt(20), 4).unwrap();
            assert_eq!(got.ids, want, "{what}");
        }
    }
    // One that nobody waits for.
    let device = overlapping();
    let mut engine = device.engine(TWO);
    let mut a = begun(&mut engine);
    let mut b = begun(&mut engine);
    let first = engine.submit(vec![a.decode_segment(plain()).unwrap()]).unwrap();
    let second = engine.submit(vec![b.decode_segment(told()).unwrap()]).unwrap();
    drop(first);
    drop(second);
    for session in [&mut a, &mut b] {
        let got = answer(&mut engine, session, &prompt(20), 3).unwrap();
        assert_eq!(got.ids, oracle::answer(&prompt(20), 0, 3));
    }
}

/// An answer whose steps run alone, while a step is in flight that its owner has not waited for: results come in order, so it is refused,
/// never ended without a word.
#[test]
fn an_answer_the_host_chooses_beside_another_flight() {
    let device = overlapping();
    let mut engine = device.engine(TWO);
    let mut a = begun(&mut engine);
    let work = a.decode_segment(Output::Sample(SampleParams::GREEDY)).unwrap();
    let held = engine.submit(vec![work]).unwrap();
    let mut b = engine.open_session().unwrap();
    let (mut p, _) = stopping(&prompt(5), None);
    p.sample.logprobs = Some(0);
    engine.stage(&mut b, &prompt(5)).unwrap();
    let error = engine.generate(&mut b, &p, &Cancel::new(), |_| ControlFlow::Continue(()));
    assert!(matches!(error, Err(EngineError::Refused(_))), "{error:?}");
    let out = engine.wait(held, &mut [&mut a]).unwrap();
    assert_eq!(out, [SegmentOut::Sampled(oracle::answer(&prompt(20), 0, 3)[2].into())]);
}

#[test]
fn logprobs_come_with_the_answer() {
    for device in [FakeDevice::default(), overlapping()] {
        let mut engine = device.engine(TWO);
        let mut session = engine.open_session().unwrap();
        let mut p = params(5);
        assert!(
            answer_with(&mut engine, &mut session, &prompt(9), &p).unwrap().logprobs.is_empty()
        );
        p.sample.logprobs = Some(3);
        let got = answer_with(&mut engine, &mut session, &prompt(9), &p).unwrap();
        assert_eq!((got.ids.len(), got.logprobs.len()), (5, 5));
        let mut tokens = prompt(9);
        tokens.extend(&got.ids);
        let want = oracle::scores(&tokens);
        for (got, want) in got.logprobs.iter().zip(&want[8..]) {
            assert_eq!((got.logprob, got.top.len()), (want.logprob, 3));
        }
    }
    // Ranges are checked before anything runs.
    let mut engine = FakeDevice::default().engine(OPTIONS);
    let mut session = engine.open_session().unwrap();
    engine.stage(&mut session, &prompt(9)).unwrap();
    let mut p = params(1);
    p.sample.logprobs = Some(21);
    assert!(matches!(engine.start(&mut session, p), Err(EngineError::Parameters(_))));
    let mut p = params(1);
    let bias = LogitBias::new([(VOCAB as u32, 1.0)]).unwrap();
    p.sample.logit_bias = Some(std::sync::Arc::new(bias));
    let error = engine.start(&mut session, p).unwrap_err();
    assert!(error.to_string().contains("the vocabulary has 50021"), "{error}");
}
