//! Prompts and answers that go well.

mod common;

use std::ops::ControlFlow;

use common::*;
use lily_engine::*;

#[test]
fn an_answer_does_not_depend_on_the_chunks() {
    for length in [1, 2, 3, 15, 16, 17, 31, 32, 33, 100] {
        let want = oracle::answer(&prompt(length), 0, 8);
        for chunk in [1, 2, 7, 16, 1000] {
            let mut engine = FakeDevice::default().engine(EngineOptions { chunk, ..OPTIONS });
            let mut session = engine.open_session().unwrap();
            let got = answer(&mut engine, &mut session, &prompt(length), 8).unwrap();
            assert_eq!(got.ids, want, "{length} tokens in chunks of {chunk}");
            assert_eq!(got.finish, FinishReason::Length);
        }
    }
}

#[test]
fn the_last_chunk_waits_for_the_answer() {
    let device = FakeDevice::default();
    let mut engine = device.engine(OPTIONS);
    let mut session = engine.open_session().unwrap();
    let mut seen = Vec::new();
    let tokens = prompt(40);
    let reuse =
        engine.sync(&mut session, &tokens, &Cancel::new(), |d, t| seen.push((d, t))).unwrap();
    assert_eq!(reuse, Reuse { reused: 0, computed: 40 });
    assert_eq!(seen, [(0, 40), (16, 40), (32, 40)]);
    assert_eq!(session.tokens(), &tokens[..32]);
    assert_eq!(session.pending(), &tokens[32..]);
    let cancel = Cancel::new();
    engine.generate(&mut session, &params(3), &cancel, |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(device.steps(), [16, 16, 8, 1, 1]);
}

#[test]
fn long_contexts_get_smaller_chunks() {
    let device = FakeDevice::default();
    let options = EngineOptions::new(34_000, 1, 512);
    let mut engine = device.engine(options);
    let mut session = engine.open_session().unwrap();
    let got = answer(&mut engine, &mut session, &prompt(33_500), 4).unwrap();
    assert_eq!(got.ids, oracle::answer(&prompt(33_500), 0, 4));
    let steps = device.steps();
    assert_eq!(&steps[..64], [512; 64]);
    assert_eq!(&steps[64..], [256, 256, 220, 1, 1, 1]);
}

#[test]
fn the_session_holds_what_the_device_has_seen() {
    let mut engine = FakeDevice::default().engine(OPTIONS);
    let mut session = engine.open_session().unwrap();
    let got = answer(&mut engine, &mut session, &prompt(20), 5).unwrap();
    let mut seen = prompt(20);
    seen.extend(&got.ids[..4]);
    assert_eq!(session.tokens(), seen);
    assert_eq!(session.last_sampled(), Some(got.ids[4]));
}

#[test]
fn the_same_prompt_again_gives_the_same_answer() {
    let mut engine = FakeDevice::default().engine(OPTIONS);
    let mut session = engine.open_session().unwrap();
    for length in [1, 1, 16, 40, 40, 40, 1] {
        let got = answer(&mut engine, &mut session, &prompt(length), 6).unwrap();
        assert_eq!(got.ids, oracle::answer(&prompt(length), 0, 6), "{length}");
    }
    // Without an answer in between nothing is computed twice but the pending chunk.
    engine.sync(&mut session, &prompt(40), &Cancel::new(), |_, _| {}).unwrap();
    let reuse = engine.sync(&mut session, &prompt(40), &Cancel::new(), |_, _| {}).unwrap();
    assert_eq!(reuse, Reuse { reused: 32, computed: 8 });
}

#[test]
fn a_conversation_reuses_all_but_the_last_token_of_the_answer() {
    let device = FakeDevice::default();
    let mut engine = device.engine(OPTIONS);
    let mut session = engine.open_session().unwrap();
    let mut tokens = prompt(20);
    tokens.extend(answer(&mut engine, &mut session, &tokens, 5).unwrap().ids);
    tokens.extend([7, 8, 9]);
    device.steps();
    let reuse = engine.sync(&mut session, &tokens, &Cancel::new(), |_, _| {}).unwrap();
    assert_eq!(reuse, Reuse { reused: 24, computed: 4 });
    let got = answer(&mut engine, &mut session, &tokens, 5).unwrap();
    assert_eq!(got.ids, oracle::answer(&tokens, 0, 5));
    assert_eq!(device.steps(), [4, 1, 1, 1, 1]);
}

#[test]
fn a_prompt_that_departs_starts_anew() {
    let mut engine = FakeDevice::default().engine(OPTIONS);
    let mut session = engine.open_session().unwrap();
    answer(&mut engine, &mut session, &prompt(40), 2).unwrap();
    let mut other = prompt(40);
    other[39] = 1;
    let reuse = engine.sync(&mut session, &other, &Cancel::new(), |_, _| {}).unwrap();
    assert_eq!(reuse.reused, 0);
    let got = answer(&mut engine, &mut session, &other, 4).unwrap();
    assert_eq!(got.ids, oracle::answer(&other, 0, 4));
    // A prefix of what was seen cannot be reached either.
    let reuse = engine.sync(&mut session, &other[..30], &Cancel::new(), |_, _| {}).unwrap();
    assert_eq!(reuse.reused, 0);
}

#[test]
fn answers_end_for_a_reason() {
    let mut engine = FakeDevice::default().engine(EngineOptions { context: 30, ..OPTIONS });
    let mut session = engine.open_session().unwrap();
    let tokens = prompt(25);
    let want = oracle::answer(&tokens, 0, 30);
    let go = |_| ControlFlow::Continue(());
    let cancel = Cancel::new();
    let mut run = |max_tokens: usize, stop: &[u32]| {
        engine.sync(&mut session, &tokens, &cancel, |_, _| {}).unwrap();
        let p = GenerateParams { stop_ids: stop.to_vec(), ..params(max_tokens) };
        let got = engine.generate(&mut session, &p, &cancel, go).unwrap();
        assert_eq!(got.ids, want[..got.ids.len()]);
        (got.ids.len(), got.finish)
    };
    assert_eq!(run(0, &[]), (0, FinishReason::Length));
    assert_eq!(run(1, &[]), (1, FinishReason::Length));
    assert_eq!(run(4, &[]), (4, FinishReason::Length));
    // Token 30 of the context is the fifth of the answer; the sixth is sampled from it and has no place.
    assert_eq!(run(6, &[]), (6, FinishReason::Length));
    assert_eq!(run(7, &[]), (6, FinishReason::ContextFull));
    assert_eq!(run(100, &[3, want[2]]), (3, FinishReason::Stop));
    assert_eq!(run(3, &[want[2]]), (3, FinishReason::Stop));
    assert_eq!(run(100, &[want[0]]), (1, FinishReason::Stop));
    assert_eq!(run(100, &[want[5]]), (6, FinishReason::Stop));
}

#[test]
fn a_prompt_may_fill_the_context() {
    let mut engine = FakeDevice::default().engine(EngineOptions { context: 30, ..OPTIONS });
    let mut session = engine.open_session().unwrap();
    let got = answer(&mut engine, &mut session, &prompt(30), 9).unwrap();
    assert_eq!((got.ids.len(), got.finish), (1, FinishReason::ContextFull));
    let work = session.decode_segment(Output::None).unwrap();
    let error = engine.step(vec![work]).unwrap_err();
    assert!(matches!(error, EngineError::ContextFull { context: 30 }), "{error}");
}

#[test]
fn bad_prompts_are_refused_before_anything_runs() {
    let device = FakeDevice::default();
    let mut engine = device.engine(OPTIONS);
    let mut session = engine.open_session().unwrap();
    answer(&mut engine, &mut session, &prompt(20), 1).unwrap();
    device.steps();
    let mut sync = |tokens: &[u32]| {
        let error = engine.sync(&mut session, tokens, &Cancel::new(), |_, _| panic!()).unwrap_err();
        (error.to_string(), session.tokens().len())
    };
    let (text, seen) = sync(&[]);
    assert!(text.contains("prompt is empty") && seen == 20, "{text}");
    let (text, seen) = sync(&prompt(1025));
    assert!(text.contains("1025 tokens") && text.contains("1024") && seen == 20, "{text}");
    let (text, seen) = sync(&[1, 2, VOCAB as u32]);
    assert!(text.contains("token 50021 at position 2") && seen == 20, "{text}");
    assert!(device.steps().is_empty());
    let error = engine.score(&mut session, &[], &Cancel::new(), |_, _| {}).unwrap_err();
    assert!(matches!(error, EngineError::EmptyPrompt));
}

#[test]
fn sampling_is_seeded_and_checked() {
    let mut engine = FakeDevice::default().engine(OPTIONS);
    let mut session = engine.open_session().unwrap();
    let tokens = prompt(5);
    let cancel = Cancel::new();
    let go = |_| ControlFlow::Continue(());
    for seed in [1, 2, 1] {
        engine.sync(&mut session, &tokens, &cancel, |_, _| {}).unwrap();
        let mut p = params(4);
        p.sample.seed = seed;
        let got = engine.generate(&mut session, &p, &cancel, go).unwrap();
        assert_eq!(got.ids, oracle::answer(&tokens, seed, 4));
    }
    engine.sync(&mut session, &tokens, &cancel, |_, _| {}).unwrap();
    let mut p = params(4);
    p.sample.top_p = 2.0;
    let error = engine.generate(&mut session, &p, &cancel, go).unwrap_err();
    assert!(error.to_string().contains("top_p"), "{error}");
}

#[test]
fn prefill_and_decode_are_timed_apart() {
    let mut engine = FakeDevice::default().engine(OPTIONS);
    let mut session = engine.open_session().unwrap();
    let t = answer(&mut engine, &mut session, &prompt(40), 5).unwrap().timings;
    assert_eq!((t.prefill_tokens, t.decode_tokens), (40, 4));
    assert!(t.prefill_seconds > 0.0 && t.decode_seconds > 0.0);
    let mut longer = session.tokens().to_vec();
    longer.extend([1, 2, 3]);
    let t = answer(&mut engine, &mut session, &longer, 1).unwrap().timings;
    assert_eq!((t.prefill_tokens, t.decode_tokens), (3, 0));
    assert_eq!(t.decode_seconds, 0.0);
}

#[test]
fn scores_do_not_depend_on_the_chunks() {
    for length in [1, 2, 16, 17, 18, 100] {
        let tokens = prompt(length);
        for chunk in [1, 5, 16, 500] {
            let mut engine = FakeDevice::default().engine(EngineOptions { chunk, ..OPTIONS });
            let mut session = engine.open_session().unwrap();
            // What was there before does not matter.
            answer(&mut engine, &mut session, &prompt(7), 2).unwrap();
            let mut last = (0, length - 1);
            let got = engine.score(&mut session, &tokens, &Cancel::new(), |d, t| last = (d, t));
            assert_eq!(got.unwrap(), oracle::scores(&tokens), "{length} in chunks of {chunk}");
            assert_eq!(last, (length - 1, length - 1));
            assert_eq!(session.tokens(), &tokens[..length - 1]);
            let got = answer(&mut engine, &mut session, &tokens, 3).unwrap();
            assert_eq!(got.ids, oracle::answer(&tokens, 0, 3));
        }
    }
}

#[test]
fn a_scheduler_mixes_prefill_and_decode_in_one_step() {
    let device = FakeDevice::default();
    let mut engine = device.engine(EngineOptions::new(512, 3, 16));
    let prompts = [prompt(3), prompt(21), prompt(40)];
    let mut all: Vec<(Session, Generation)> = Vec::new();
    for p in &prompts {
        let mut session = engine.open_session().unwrap();
        engine.stage(&mut session, p).unwrap();
        let generation = engine.start(&mut session, params(10)).unwrap();
        all.push((session, generation));
    }
    while all.iter().any(|(_, g)| g.finish().is_none()) {
        let mut taken = Vec::new();
        let mut work = Vec::new();
        for (i, (session, generation)) in all.iter_mut().enumerate() {
            if let Some(w) = generation.work(session, 5).unwrap() {
                taken.push(i);
                work.push(w);
            }
        }
        let out = engine.step(work).unwrap();
        for (i, out) in taken.into_iter().zip(out) {
            if let SegmentOut::Sampled(token) = out {
                all[i].1.accept(token);
            }
        }
    }
    for ((_, generation), p) in all.iter().zip(&prompts) {
        assert_eq!(generation.ids(), oracle::answer(p, 0, 10));
    }
    assert_eq!(
        device.log.lock().unwrap().steps[..5],
        [vec![3, 5, 5], vec![1, 5, 5], vec![1, 5, 5], vec![1, 5, 5], vec![1, 1, 5]]
    );
    assert!(engine.step(Vec::new()).unwrap().is_empty());
}

#[test]
fn held_logits_are_sampled_later() {
    let mut engine = FakeDevice::default().engine(OPTIONS);
    let mut session = engine.open_session().unwrap();
    let tokens = prompt(10);
    engine.stage(&mut session, &tokens).unwrap();
    engine.start(&mut session, params(9)).unwrap();
    let error = engine.sample_held(&mut session, &SampleParams::GREEDY).unwrap_err();
    assert!(matches!(error, EngineError::Refused(_)), "{error}");
    let work = session.prefill_segment(16, &Output::Hold).unwrap();
    assert_eq!(engine.step(vec![work]).unwrap(), [SegmentOut::None]);
    assert!(session.decode_segment(Output::Hold).is_none());
    let mut ids = vec![engine.sample_held(&mut session, &SampleParams::GREEDY).unwrap().id];
    for _ in 0..3 {
        let work = session.decode_segment(Output::Hold).unwrap();
        engine.step(vec![work]).unwrap();
        ids.push(engine.sample_held(&mut session, &SampleParams::GREEDY).unwrap().id);
    }
    assert_eq!(ids, oracle::answer(&tokens, 0, 4));
}
