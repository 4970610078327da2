//! Checkpoints, snapshots, slots and memory.

mod common;

use std::sync::Arc;

use common::*;
use lily_device::{MemoryLimit, MemoryNeed};
use lily_engine::*;
use lily_ops::{Plan, WeightFormat, WeightSpec};

fn sync(engine: &mut Engine, session: &mut Session, tokens: &[u32]) -> Reuse {
    engine.sync(session, tokens, &Cancel::new(), |_, _| {}).unwrap()
}

#[test]
fn a_departing_prompt_starts_from_the_longest_checkpoint() {
    let mut engine = FakeDevice::default().engine(OPTIONS);
    let mut session = engine.open_session().unwrap();
    for boundary in [10, 50] {
        sync(&mut engine, &mut session, &prompt(boundary));
        assert!(engine.checkpoint(&mut session).unwrap());
        assert_eq!(session.pending().len(), 1);
    }
    answer(&mut engine, &mut session, &prompt(60), 5).unwrap();
    let cases = [
        // (tokens kept of the prompt, then others; reused)
        (60, 49),
        (50, 49),
        (49, 49),
        (48, 9),
        (9, 9),
        (8, 0),
        (55, 49),
    ];
    for (keep, reused) in cases {
        let mut tokens = prompt(keep);
        tokens.extend([1, 2, 3]);
        assert_eq!(sync(&mut engine, &mut session, &tokens).reused, reused, "{keep}");
        let got = answer(&mut engine, &mut session, &tokens, 4).unwrap();
        assert_eq!(got.ids, oracle::answer(&tokens, 0, 4), "{keep}");
    }
    // The very prompt of a checkpoint, answered before: at most all tokens but one are reused.
    assert_eq!(sync(&mut engine, &mut session, &prompt(49)).reused, 9);
    assert_eq!(sync(&mut engine, &mut session, &prompt(50)).reused, 49);
}

#[test]
fn a_checkpoint_beyond_the_present_state_is_preferred() {
    let mut engine = FakeDevice::default().engine(OPTIONS);
    let mut session = engine.open_session().unwrap();
    sync(&mut engine, &mut session, &prompt(100));
    engine.checkpoint(&mut session).unwrap();
    sync(&mut engine, &mut session, &prompt(20));
    assert_eq!(session.tokens(), prompt(16));
    assert_eq!(sync(&mut engine, &mut session, &prompt(120)).reused, 99);
    let got = answer(&mut engine, &mut session, &prompt(120), 4).unwrap();
    assert_eq!(got.ids, oracle::answer(&prompt(120), 0, 4));
}

#[test]
fn checkpoints_are_bounded_and_the_unused_go_first() {
    let mut engine = FakeDevice::default().engine(OPTIONS);
    let mut session = engine.open_session().unwrap();
    let mut save = |session: &mut Session, n: usize| {
        let reuse = sync(&mut engine, session, &prompt(n));
        engine.checkpoint(session).unwrap();
        reuse.reused
    };
    for n in 1..=MAX_CHECKPOINTS {
        save(&mut session, n * 10);
    }
    // The first is used, so the second goes when a fifth comes.
    assert_eq!(save(&mut session, 11), 9);
    assert_eq!(sync(&mut engine, &mut session, &prompt(21)).reused, 10);
    assert_eq!(sync(&mut engine, &mut session, &prompt(31)).reused, 29);
}

#[test]
fn an_answer_can_be_checkpointed() {
    let mut engine = FakeDevice::default().engine(OPTIONS);
    let mut session = engine.open_session().unwrap();
    let mut tokens = prompt(10);
    tokens.extend(answer(&mut engine, &mut session, &tokens, 6).unwrap().ids);
    engine.checkpoint(&mut session).unwrap();
    answer(&mut engine, &mut session, &prompt(100), 2).unwrap();
    assert_eq!(sync(&mut engine, &mut session, &tokens).reused, 15);
}

#[test]
fn forks_answer_alike_and_do_not_disturb_each_other() {
    let mut engine = FakeDevice::default().engine(OPTIONS);
    let mut one = engine.open_session().unwrap();
    sync(&mut engine, &mut one, &prompt(40));
    let snapshot = engine.snapshot(&one).unwrap();
    let mut two = engine.fork(&snapshot).unwrap();
    assert_eq!(two.tokens(), one.tokens());
    assert_eq!(two.pending(), one.pending());
    let cancel = Cancel::new();
    let seeded = |seed| {
        let mut p = params(6);
        p.sample.seed = seed;
        p
    };
    let mut a = engine.start(&mut one, seeded(1)).unwrap();
    let mut b = engine.start(&mut two, seeded(2)).unwrap();
    while a.next(&mut engine, &mut one, &cancel).unwrap().is_some() {
        b.next(&mut engine, &mut two, &cancel).unwrap();
    }
    assert_eq!(a.ids(), oracle::answer(&prompt(40), 1, 6));
    assert_eq!(b.ids(), oracle::answer(&prompt(40), 2, 6));
    assert!(matches!(engine.fork(&snapshot), Err(EngineError::NoFreeSlot { slots: 2 })));
}

#[test]
fn a_preempted_answer_goes_on_elsewhere() {
    let mut engine = FakeDevice::default().engine(OPTIONS);
    let cancel = Cancel::new();
    let mut p = params(8);
    p.sample.seed = 5;
    for before in 0..8 {
        let mut session = engine.open_session().unwrap();
        sync(&mut engine, &mut session, &prompt(40));
        let mut generation = engine.start(&mut session, p.clone()).unwrap();
        for _ in 0..before {
            generation.next(&mut engine, &mut session, &cancel).unwrap();
        }
        let snapshot = engine.snapshot(&session).unwrap();
        let stale = generation.clone();
        engine.close(session).unwrap();
        // Another slot, and other tokens in between.
        let mut other = engine.open_session().unwrap();
        answer(&mut engine, &mut other, &prompt(9), 3).unwrap();
        let mut session = engine.fork(&snapshot).unwrap();
        while generation.next(&mut engine, &mut session, &cancel).unwrap().is_some() {}
        assert_eq!(generation.ids(), oracle::answer(&prompt(40), 5, 8), "after {before}");
        // The generation as it was then does not fit the state as it is now.
        let error = stale.work(&mut session, 9).unwrap_err();
        assert!(matches!(error, EngineError::StaleGeneration { .. }), "{error}");
    }
}

/// Preempted without a snapshot: prompt and answer are computed again, and the answer goes on.
#[test]
fn an_answer_is_taken_up_from_its_tokens() {
    let mut engine = FakeDevice::default().engine(OPTIONS);
    let whole = oracle::answer(&prompt(40), 0, 9);
    for before in 0..8 {
        let mut session = engine.open_session().unwrap();
        let tokens = [&prompt(40)[..], &whole[..before]].concat();
        engine.stage(&mut session, &tokens).unwrap();
        engine.begin(&mut session, &whole[..before]).unwrap();
        let output = Output::Sample(SampleParams::GREEDY);
        let mut ids = Vec::new();
        while ids.len() < 9 - before {
            let work = match session.pending().is_empty() {
                false => session.prefill_segment(16, &output).unwrap(),
                true => session.decode_segment(output.clone()).unwrap(),
            };
            if let [SegmentOut::Sampled(sampled)] = &engine.step(vec![work]).unwrap()[..] {
                ids.push(sampled.id);
            }
        }
        assert_eq!(ids, whole[before..], "after {before}");
        engine.close(session).unwrap();
    }
}

#[test]
fn a_restored_session_is_what_it_was() {
    let mut engine = FakeDevice::default().engine(OPTIONS);
    let mut session = engine.open_session().unwrap();
    sync(&mut engine, &mut session, &prompt(40));
    let snapshot = engine.snapshot(&session).unwrap();
    assert!(snapshot.bytes() >= 160 && snapshot.state().position == snapshot.tokens().len());
    for other in [prompt(3), prompt(300)] {
        answer(&mut engine, &mut session, &other, 7).unwrap();
        engine.restore(&mut session, &snapshot).unwrap();
        assert_eq!(session.tokens(), prompt(32));
        let go = |_| std::ops::ControlFlow::Continue(());
        let got = engine.generate(&mut session, &params(5), &Cancel::new(), go).unwrap();
        assert_eq!(got.ids, oracle::answer(&prompt(40), 0, 5));
    }
    // A smaller engine cannot hold it.
    let mut small = FakeDevice::default().engine(EngineOptions { context: 39, ..OPTIONS });
    let error = small.fork(&snapshot).unwrap_err();
    assert!(matches!(error, EngineError::PromptTooLong { tokens: 40, context: 39 }), "{error}");
    assert!(small.open_session().is_ok() && small.open_session().is_ok());
}

#[test]
fn a_generation_belongs_to_its_prompt() {
    let mut engine = FakeDevice::default().engine(OPTIONS);
    let mut session = engine.open_session().unwrap();
    let cancel = Cancel::new();
    sync(&mut engine, &mut session, &prompt(10));
    let mut old = engine.start(&mut session, params(5)).unwrap();
    old.next(&mut engine, &mut session, &cancel).unwrap();
    sync(&mut engine, &mut session, &prompt(10));
    let error = old.next(&mut engine, &mut session, &cancel).unwrap_err();
    assert!(matches!(error, EngineError::StaleGeneration { slot: 0 }), "{error}");
    // Not even before its first token, when nothing but the prompt's words differ.
    let mut unused = engine.start(&mut session, params(5)).unwrap();
    sync(&mut engine, &mut session, &prompt(11)[1..]);
    let error = unused.next(&mut engine, &mut session, &cancel).unwrap_err();
    assert!(matches!(error, EngineError::StaleGeneration { slot: 0 }), "{error}");
    // Nor to another session, nor to a second generation of the same prompt.
    let mut new = engine.start(&mut session, params(5)).unwrap();
    let mut other = engine.open_session().unwrap();
    assert!(new.next(&mut engine, &mut other, &cancel).is_err());
    assert!(new.next(&mut engine, &mut session, &cancel).unwrap().is_some());
    let error = engine.start(&mut session, params(5)).unwrap_err();
    assert!(matches!(error, EngineError::NothingToGenerate), "{error}");
}

#[test]
fn slots_come_back_empty() {
    let device = FakeDevice::default();
    let mut engine = device.engine(OPTIONS);
    let all = engine.program().free_pages();
    let mut one = engine.open_session().unwrap();
    let two = engine.open_session().unwrap();
    assert_eq!((one.slot().0, two.slot().0), (0, 1));
    assert!(matches!(engine.open_session(), Err(EngineError::NoFreeSlot { slots: 2 })));
    answer(&mut engine, &mut one, &prompt(300), 2).unwrap();
    assert_eq!(engine.program().free_pages(), all - 2);
    engine.close(one).unwrap();
    assert_eq!(engine.program().free_pages(), all);
    // Dropped without being closed, on another thread.
    std::thread::spawn(move || drop(two)).join().unwrap();
    let mut one = engine.open_session().unwrap();
    let mut two = engine.open_session().unwrap();
    for session in [&mut one, &mut two] {
        assert!(session.tokens().is_empty());
        let got = answer(&mut engine, session, &prompt(4), 3).unwrap();
        assert_eq!(got.ids, oracle::answer(&prompt(4), 0, 3));
    }
    drop(engine);
    drop(one);
}

#[test]
fn a_session_belongs_to_its_engine() {
    let mut one = FakeDevice::default().engine(OPTIONS);
    let mut two = FakeDevice::default().engine(OPTIONS);
    let mut session = one.open_session().unwrap();
    let error = two.stage(&mut session, &[1]).unwrap_err();
    assert!(matches!(error, EngineError::ForeignSession), "{error}");
    assert!(matches!(two.snapshot(&session), Err(EngineError::ForeignSession)));
}

#[test]
fn pages_may_run_out_and_come_back() {
    let device = FakeDevice { pages: Some(3), ..FakeDevice::default() };
    let mut engine = device.engine(OPTIONS);
    let mut one = engine.open_session().unwrap();
    let mut two = engine.open_session().unwrap();
    answer(&mut engine, &mut one, &prompt(257), 1).unwrap();
    // Runs out in the middle of a prompt: what was computed stays, and it goes on when there is room.
    let error = answer(&mut engine, &mut two, &prompt(300), 1).unwrap_err();
    assert!(matches!(error, EngineError::OutOfPages { need: 1, free: 0 }), "{error}");
    assert_eq!(two.tokens(), prompt(256));
    // And in the middle of an answer.
    let error = answer(&mut engine, &mut two, &prompt(255), 4).unwrap_err();
    assert!(matches!(error, EngineError::OutOfPages { .. }), "{error}");
    sync(&mut engine, &mut two, &prompt(255));
    let mut generation = engine.start(&mut two, params(4)).unwrap();
    let cancel = Cancel::new();
    assert!(generation.next(&mut engine, &mut two, &cancel).unwrap().is_some());
    assert!(generation.next(&mut engine, &mut two, &cancel).unwrap().is_some());
    assert!(generation.next(&mut engine, &mut two, &cancel).is_err());
    engine.close(one).unwrap();
    while generation.next(&mut engine, &mut two, &cancel).unwrap().is_some() {}
    assert_eq!(generation.ids(), oracle::answer(&prompt(255), 0, 4));
}

#[test]
fn what_does_not_fit_is_refused_before_it_is_prepared() {
    const G: u64 = 1 << 30;
    let need = MemoryNeed { kv: 4 * G, state: G, scratch: G, weights: 0 };
    let device = FakeDevice { need, ..FakeDevice::default() };
    let mut plan = Plan::clone(&plan());
    plan.weights.push(WeightSpec {
        role: "w".into(),
        class: "w",
        format: WeightFormat::Affine { bits: 4 },
        matrices: 2,
        rows: 1 << 20,
        cols: 64,
    });
    let plan = Arc::new(plan);
    let with = |options: EngineOptions, total: u64, available: u64| {
        let machine = Machine { total: Some(total), available: Some(available) };
        Engine::on_machine(&device, Arc::clone(&plan), vec![], options, &machine)
    };
    let options = EngineOptions { snapshot_bytes: 0, ..OPTIONS };
    let new = |total, available| with(options, total, available);
    // 2 · 2^20 rows of 32 bytes of codes, 2 of scales and 2 of biases.
    let weights = 72 << 20;
    let engine = new(6 * G + weights, 6 * G).unwrap();
    assert_eq!(engine.budget().weights, weights);
    assert_eq!(engine.budget().total(), 6 * G + weights);
    for (total, available) in [(6 * G + weights - 1, 6 * G), (100 * G, 6 * G - 1)] {
        let text = new(total, available).unwrap_err().to_string();
        for part in ["fake model on fake", "72.0 MiB", "4.0 GiB", "--context"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
    // Snapshots and logits count too.
    for more in [
        EngineOptions { snapshot_bytes: 4 * VOCAB as u64, ..options },
        EngineOptions { logit_rows: 1, ..options },
    ] {
        let all = 6 * G + 4 * VOCAB as u64;
        assert_eq!(with(more, 100 * G, all).unwrap().budget().anonymous(), all);
        assert!(with(more, 100 * G, all - 1).is_err());
    }
}

#[test]
fn snapshots_of_all_sessions_share_their_memory() {
    // The fake model's snapshots are counted by their tokens.
    assert_eq!(snapshot_bytes(&plan(), 100), 400);
    let options = EngineOptions { snapshot_bytes: 1000, ..OPTIONS };
    let mut engine = FakeDevice::default().engine(options);
    let mut one = engine.open_session().unwrap();
    let mut two = engine.open_session().unwrap();
    sync(&mut engine, &mut one, &prompt(161));
    sync(&mut engine, &mut two, &prompt(81));
    // 161 tokens in chunks of 16 leave one token pending.
    let first = engine.snapshot(&one).unwrap();
    assert_eq!((first.bytes(), engine.snapshot_bytes_used()), (644, 644));
    let error = engine.snapshot(&one).unwrap_err();
    assert!(
        matches!(error, EngineError::SnapshotMemory { need: 644, used: 644, cap: 1000 }),
        "{error}"
    );
    assert!(engine.checkpoint(&mut two).unwrap());
    assert_eq!(engine.snapshot_bytes_used(), 644 + 324);
    // A checkpoint makes room for the next one of its session, never for another's.
    sync(&mut engine, &mut two, &prompt(85));
    assert!(engine.checkpoint(&mut two).unwrap());
    assert_eq!(engine.snapshot_bytes_used(), 644 + 340);
    assert!(!engine.checkpoint(&mut one).unwrap());
    // Clones share their bytes; the last one gives them back.
    let clone = first.clone();
    drop(first);
    assert!(!engine.checkpoint(&mut one).unwrap());
    drop(clone);
    assert!(engine.checkpoint(&mut one).unwrap());
    engine.close(one).unwrap();
    assert_eq!(engine.snapshot_bytes_used(), 340);
    engine.close(two).unwrap();
    assert_eq!(engine.snapshot_bytes_used(), 0);
}

/// A plan whose tokens take 8 bytes of K and V each.
fn plan_with_cache() -> Arc<Plan> {
    let mut plan = Plan::clone(&plan());
    plan.state.kv_layers = 1;
    plan.state.head_dim = 1;
    assert_eq!(snapshot_bytes(&plan, 100), 100 * (8 + 4));
    Arc::new(plan)
}

fn with_cache(options: EngineOptions) -> Engine {
    let device = FakeDevice::default();
    Engine::on_machine(&device, plan_with_cache(), Vec::new(), options, &Machine::UNKNOWN).unwrap()
}

/// Computes a prompt but for its last token.
fn compute(engine: &mut Engine, session: &mut Session, tokens: &[u32]) {
    engine.stage(session, tokens).unwrap();
    while session.pending().len() > 1 {
        let rows = session.pending().len() - 1;
        let work = session.prefill_segment(rows.min(16), &Output::None).unwrap();
        engine.step(vec![work]).unwrap();
    }
}

#[test]
fn snapshots_of_a_prompt_share_its_cache() {
    let mut engine = with_cache(EngineOptions { context: 2048, slots: 3, ..OPTIONS });
    let mut one = engine.open_session().unwrap();
    let mut taken = Vec::new();
    for n in [101, 301, 301, 701] {
        compute(&mut engine, &mut one, &prompt(n));
        let need = engine.snapshot_need(&one);
        let used = engine.snapshot_bytes_used();
        taken.push(engine.snapshot(&one).unwrap());
        assert_eq!(engine.snapshot_bytes_used() - used, need);
    }
    // Tokens, one of them pending, are copied each time, K and V once.
    let state = |n: u64| (n + 1) * 4;
    let all = state(100) + 2 * state(300) + state(700) + 700 * 8;
    assert_eq!(engine.snapshot_bytes_used(), all);
    assert_eq!(SessionSnapshot::bytes_of(&taken), all);
    let clones = taken.iter().chain(&taken).cloned().collect::<Vec<_>>();
    assert_eq!(SessionSnapshot::bytes_of(&clones), all);
    drop(clones);
    assert_eq!(taken[3].bytes(), state(700) + 700 * 8);
    // Another session goes on from one of them, and shares it too, whatever follows.
    let mut two = engine.fork(&taken[1]).unwrap();
    let other = [&prompt(300)[..], &[7; 200]].concat();
    compute(&mut engine, &mut two, &other);
    assert_eq!(engine.snapshot_need(&two), state(499) + 199 * 8);
    let branch = engine.snapshot(&two).unwrap();
    // The first ones go: what the others need of them stays.
    taken.drain(..3);
    assert_eq!(engine.snapshot_bytes_used(), state(700) + state(499) + (700 + 199) * 8);
    for (snapshot, tokens) in [(&taken[0], prompt(701)), (&branch, other)] {
        let mut three = engine.fork(snapshot).unwrap();
        let got = answer(&mut engine, &mut three, &tokens, 5).unwrap();
        assert_eq!(got.ids, oracle::answer(&tokens, 0, 5));
        engine.close(three).unwrap();
    }
    drop(taken);
    assert_eq!(engine.snapshot_bytes_used(), state(499) + 499 * 8);
    drop(branch);
    assert_eq!(engine.snapshot_bytes_used(), 0);
    // Nothing is left to share.
    assert_eq!(engine.snapshot_need(&two), state(499) + 499 * 8);
}

/// What a slot's snapshots have is forgotten with the slot's state, and with a token that is taken back.
#[test]
fn what_is_shared_belongs_to_the_state() {
    let mut engine = with_cache(EngineOptions { undo: true, ..OPTIONS });
    let mut session = engine.open_session().unwrap();
    compute(&mut engine, &mut session, &prompt(100));
    let first = engine.snapshot(&session).unwrap();
    // Other tokens in the same session, as many and more.
    for n in [100, 150] {
        let other: Vec<u32> = prompt(n).iter().map(|t| t + 1).collect();
        compute(&mut engine, &mut session, &other);
        let second = engine.snapshot(&session).unwrap();
        let mut fork = engine.fork(&second).unwrap();
        let got = answer(&mut engine, &mut fork, &other, 4).unwrap();
        assert_eq!(got.ids, oracle::answer(&other, 0, 4));
        engine.close(fork).unwrap();
    }
    // A session in the slot of one that has ended.
    engine.close(session).unwrap();
    let mut session = engine.open_session().unwrap();
    compute(&mut engine, &mut session, &prompt(120)[1..]);
    let third = engine.snapshot(&session).unwrap();
    engine.restore(&mut session, &third).unwrap();
    engine.restore(&mut session, &first).unwrap();
    // A decode step, copied and taken back; then another token in its place.
    let decode = |engine: &mut Engine, session: &mut Session| {
        let output = Output::Sample(SampleParams::GREEDY);
        let work = match session.pending().is_empty() {
            false => session.prefill_segment(16, &output),
            true => session.decode_segment(output),
        };
        engine.step(work.into_iter().collect()).unwrap();
    };
    engine.begin(&mut session, &[]).unwrap();
    decode(&mut engine, &mut session);
    decode(&mut engine, &mut session);
    let decoded = engine.snapshot(&session).unwrap();
    engine.undo(&mut session).unwrap();
    let tokens = [&prompt(100)[..], &[5, 6]].concat();
    compute(&mut engine, &mut session, &tokens);
    let last = engine.snapshot(&session).unwrap();
    for snapshot in [&decoded, &last] {
        engine.restore(&mut session, snapshot).unwrap();
        assert_eq!(session.tokens().len(), 101);
    }
    let got = answer(&mut engine, &mut session, &tokens, 4).unwrap();
    assert_eq!(got.ids, oracle::answer(&tokens, 0, 4));
}

#[test]
fn logits_need_memory_set_aside() {
    let output = Output::Logits;
    let mut engine = FakeDevice::default().engine(EngineOptions { logit_rows: 3, ..OPTIONS });
    let mut session = engine.open_session().unwrap();
    engine.stage(&mut session, &prompt(7)).unwrap();
    let work = session.prefill_segment(16, &output).unwrap();
    let error = engine.step(vec![work]).unwrap_err();
    assert!(matches!(error, EngineError::LogitRows { rows: 7, most: 3 }), "{error}");
    assert_eq!(session.pending().len(), 7);
    for rows in [3, 3, 1] {
        let work = session.prefill_segment(rows, &output).unwrap();
        engine.step(vec![work]).unwrap();
    }
    assert_eq!(session.tokens(), prompt(7));
}

#[test]
fn fewer_pages_than_sessions_could_fill() {
    let options = EngineOptions { pages: Some(5), ..OPTIONS };
    assert_eq!(options.limits().pages, 5);
    let mut engine = FakeDevice::default().engine(options);
    assert_eq!(engine.free_pages(), 5);
    let mut one = engine.open_session().unwrap();
    let mut two = engine.open_session().unwrap();
    answer(&mut engine, &mut one, &prompt(600), 1).unwrap();
    let error = answer(&mut engine, &mut two, &prompt(600), 1).unwrap_err();
    assert!(matches!(error, EngineError::OutOfPages { need: 1, free: 0 }), "{error}");
    engine.close(one).unwrap();
    let got = answer(&mut engine, &mut two, &prompt(600), 3).unwrap();
    assert_eq!(got.ids, oracle::answer(&prompt(600), 0, 3));
    // One session alone must never run out.
    let options = EngineOptions { pages: Some(3), ..OPTIONS };
    let error =
        Engine::on_machine(&FakeDevice::default(), plan(), Vec::new(), options, &Machine::UNKNOWN);
    let error = error.unwrap_err();
    assert!(matches!(error, EngineError::TooFewPages { pages: 3, need: 4, .. }), "{error}");
}

#[test]
fn what_the_device_cannot_bear_is_refused_before_it_is_prepared() {
    let need = MemoryNeed { kv: 600, weights: 400, ..MemoryNeed::default() };
    for (limit, fits) in [
        (None, true),
        (Some(MemoryLimit::Own(1000)), true),
        (Some(MemoryLimit::Own(999)), false),
        (Some(MemoryLimit::HostWithin(1000)), true),
        (Some(MemoryLimit::HostWithin(999)), false),
    ] {
        let device = FakeDevice { need, limit, ..FakeDevice::default() };
        let engine = Engine::on_machine(&device, plan(), Vec::new(), OPTIONS, &Machine::UNKNOWN);
        match engine {
            Ok(_) => assert!(fits, "{limit:?}"),
            Err(EngineError::OutOfMemory { refusal, .. }) => {
                assert!(!fits && refusal.to_string().contains("1000 B"), "{limit:?}: {refusal}");
            }
            Err(other) => panic!("{limit:?}: {other}"),
        }
    }
}

#[test]
fn options_are_checked() {
    for (options, name) in [
        (EngineOptions { context: 0, ..OPTIONS }, "context"),
        (EngineOptions { slots: 0, ..OPTIONS }, "slots"),
        (EngineOptions { chunk: 0, ..OPTIONS }, "chunk"),
    ] {
        let device = FakeDevice::default();
        let error = Engine::new(&device, plan(), vec![], options).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
    }
    // A decode step of all slots fits even where chunks are small.
    assert_eq!(EngineOptions::new(100, 8, 4).limits().rows, 8);
    assert_eq!(EngineOptions::new(100, 1, 512).limits().rows, 100);
}

/// States inside steps, taken while a prompt is computed, are as good as snapshots, and share its cache with them.
#[test]
fn states_inside_a_step_are_snapshots() {
    let device = FakeDevice { marks: true, ..FakeDevice::default() };
    let options = EngineOptions { context: 2048, chunk: 300, slots: 3, ..OPTIONS };
    let plan = plan_with_cache();
    let mut engine =
        Engine::on_machine(&device, plan, Vec::new(), options, &Machine::UNKNOWN).unwrap();
    assert!(engine.marks());
    let mut session = engine.open_session().unwrap();
    engine.stage(&mut session, &prompt(700)).unwrap();
    let mut taken = Vec::new();
    for marks in [&[10, 299, 300][..], &[], &[50, 99]] {
        engine.mark(&mut session, marks).unwrap();
        let work = session.prefill_segment(300, &Output::None).unwrap();
        engine.step(vec![work]).unwrap();
        let new = engine.take_marked(&mut session).unwrap();
        assert!(engine.take_marked(&mut session).unwrap().is_empty());
        taken.extend(new);
    }
    let lengths: Vec<usize> = taken.iter().map(|s| s.tokens().len()).collect();
    assert_eq!(lengths, [10, 299, 650, 699]);
    let states: u64 = lengths.iter().map(|n| *n as u64 * 4).sum();
    assert_eq!(engine.snapshot_bytes_used(), states + 699 * 8);
    assert_eq!(SessionSnapshot::bytes_of(&taken), states + 699 * 8);
    for snapshot in &taken {
        let mut fork = engine.fork(snapshot).unwrap();
        let tokens = [snapshot.tokens(), &[8, 9]].concat();
        let got = answer(&mut engine, &mut fork, &tokens, 4).unwrap();
        assert_eq!(got.ids, oracle::answer(&tokens, 0, 4));
        engine.close(fork).unwrap();
    }
    // Without room for all of them none is asked for, and nothing is lost.
    let small = EngineOptions { snapshot_bytes: 50 * 12, ..options };
    let mut engine =
        Engine::on_machine(&device, plan_with_cache(), Vec::new(), small, &Machine::UNKNOWN)
            .unwrap();
    let mut session = engine.open_session().unwrap();
    engine.stage(&mut session, &prompt(100)).unwrap();
    let error = engine.mark(&mut session, &[40, 60]).unwrap_err();
    assert!(matches!(error, EngineError::SnapshotMemory { .. }), "{error}");
    assert_eq!(engine.snapshot_bytes_used(), 0);
    engine.mark(&mut session, &[40]).unwrap();
    let work = session.prefill_segment(300, &Output::None).unwrap();
    engine.step(vec![work]).unwrap();
    assert_eq!(engine.take_marked(&mut session).unwrap().len(), 1);
    assert_eq!(engine.snapshot_bytes_used(), 0);
}
