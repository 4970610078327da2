//! Batching, fairness, order, cancellation, limits.

mod common;

use std::time::Duration;

use common::*;
use lily_engine::EngineOptions;
use lily_scheduler::*;

fn finished(prompt: &[u32], seed: u64, count: usize, cached: usize) -> Outcome {
    Outcome {
        cached: Some(cached),
        ids: oracle::answer(prompt, seed, count),
        end: Ok(Finish::Length),
    }
}

#[test]
fn answers_in_company_are_those_alone() {
    for (mixed, overlaps, few_rows) in WAYS {
        let options = SchedulerOptions { mixed, ..Setup::default().options };
        let rig = Setup { options, overlaps, few_rows, ..Setup::default() }.start();
        let prompts: Vec<Vec<u32>> = (0..12).map(|i| distinct(i, 1 + 17 * i)).collect();
        let streams: Vec<EventStream> = prompts
            .iter()
            .enumerate()
            .map(|(i, p)| {
                let mut r = request(p.clone(), 5 + i);
                r.sample.seed = i as u64;
                // On a device that overlaps, steps with these run alone.
                r.logprobs = (i % 3 == 1).then_some(i as u32 % 2 * 5);
                rig.submit(r)
            })
            .collect();
        for (i, stream) in streams.into_iter().enumerate() {
            assert_eq!(outcome(stream), finished(&prompts[i], i as u64, 5 + i, 0), "{i}");
        }
        let status = rig.scheduler.status();
        let all: usize = prompts.iter().map(Vec::len).sum();
        assert_eq!(status.prompt_tokens_computed, all as u64);
        assert_eq!((status.preemptions, status.faults), (0, 0));
        rig.check_whole();
    }
}

#[test]
fn stops_and_lengths() {
    for overlaps in [false, true] {
        let rig = Setup { overlaps, ..Setup::default() }.start();
        check_stops_and_lengths(&rig);
        rig.check_whole();
    }
}

fn check_stops_and_lengths(rig: &Rig) {
    let p = distinct(1, 20);
    let want = oracle::answer(&p, 0, 10);
    let mut r = request(p.clone(), 10);
    r.stop_ids = vec![7, want[4]];
    let got = rig.run(r);
    assert_eq!((&got.ids[..], got.end), (&want[..5], Ok(Finish::Stop)), "the stop is told");
    assert_eq!(rig.run(request(p.clone(), 1)).ids, want[..1]);
    // The context holds prompt and answer together.
    let long = distinct(2, 1020);
    let got = rig.run(request(long.clone(), 1000));
    assert_eq!(got, finished(&long, 0, 4, 0));
    let got = rig.run(request(distinct(3, 1023), usize::MAX));
    assert_eq!((got.ids.len(), got.end), (1, Ok(Finish::Length)));
}

#[test]
fn what_is_not_taken() {
    let rig = Setup::default().start();
    let refuse = |r: Request| rig.scheduler.submit(r).map(drop).unwrap_err();
    let error = refuse(request(distinct(0, 1024), 1));
    assert_eq!(error, SubmitError::ContextLength { limit: 1024, prompt: 1024 });
    let ok = request(distinct(0, 4), 1);
    let hot = lily_engine::SampleParams { temperature: -1.0, ..ok.sample.clone() };
    let thinking = ThinkingBudget { tokens: 1, end: 1, close: vec![1, 60_000] };
    let cases = [
        (Request { prompt: [].into(), ..ok.clone() }, "prompt is empty"),
        (Request { prompt: [1, 50_021].into(), ..ok.clone() }, "token 50021"),
        (Request { max_tokens: 0, ..ok.clone() }, "max_tokens"),
        (Request { sample: hot, ..ok.clone() }, "temperature"),
        (Request { logit_bias: vec![(1, 200.0)], ..ok.clone() }, "between -100 and 100"),
        (Request { logit_bias: vec![(50_021, 1.0)], ..ok.clone() }, "token 50021"),
        (Request { logprobs: Some(21), ..ok.clone() }, "logprobs"),
        (Request { logprobs: Some(300), ..ok.clone() }, "logprobs"),
        (Request { thinking: Some(thinking), ..ok.clone() }, "token 60000"),
    ];
    for (r, why) in cases {
        match refuse(r) {
            SubmitError::Invalid(text) => assert!(text.contains(why), "{text}"),
            other => panic!("{why}: {other:?}"),
        }
    }
    assert_eq!(rig.scheduler.status().waiting + rig.scheduler.status().running, 0);
    rig.check_whole();
}

#[test]
fn first_come_first_served_and_no_more_than_fit() {
    let options = SchedulerOptions { queue: 5, ..Setup::default().options };
    let engine = EngineOptions { slots: 2, ..Setup::default().engine };
    let rig = Setup { options, engine, gated: true, ..Setup::default() }.start();
    // Later ones are shorter: they would be done first if they were let in.
    let prompts: Vec<Vec<u32>> = (0..7).map(|i| distinct(i, 70 - 10 * i)).collect();
    let streams: Vec<EventStream> =
        prompts.iter().map(|p| rig.submit(request(p.clone(), 3))).collect();
    rig.gate.first();
    match rig.scheduler.submit(request(distinct(8, 3), 1)) {
        Err(SubmitError::Busy { retry_after }) => {
            assert!((1..=60).contains(&retry_after.as_secs()), "{retry_after:?}");
        }
        other => panic!("{other:?}"),
    }
    rig.gate.open();
    let mut starts = Vec::new();
    for (mut stream, p) in streams.into_iter().zip(&prompts) {
        match stream.next_timeout(PATIENCE).unwrap() {
            Some(Event::Started { at, cached: 0 }) => starts.push(at),
            other => panic!("{other:?}"),
        }
        let mut ids = Vec::new();
        while let Some(event) = stream.next_timeout(PATIENCE).unwrap() {
            if let Event::Token(token) = event {
                ids.push(token.id);
            }
        }
        assert_eq!(ids, oracle::answer(p, 0, 3));
    }
    assert!(starts.is_sorted(), "{starts:?}");
    rig.until("nothing runs", |s| s.running + s.waiting == 0);
    assert!(rig.scheduler.submit(request(distinct(8, 3), 1)).is_ok());
}

/// While a long prompt is computed, every step (or every other one) decodes all that are decoding, and
/// prompts take no more than the bound.
#[test]
fn a_long_prompt_delays_a_token_by_one_chunk_at_most() {
    for (mixed, overlaps) in [(true, false), (false, false), (true, true), (false, true)] {
        let options = SchedulerOptions { mixed, min_chunk: 4, ..Setup::default().options };
        let rig = Setup { options, overlaps, gated: true, ..Setup::default() }.start();
        // The steps that decode it run alone where others overlap.
        let logprobs = overlaps.then_some(0);
        let a = rig.submit(Request { logprobs, ..request(distinct(0, 3), 200) });
        let b = rig.submit(request(distinct(1, 3), 200));
        rig.gate.first();
        // Both prompts, then a few steps of decoding.
        for _ in 0..6 {
            rig.gate.pass();
        }
        let long = distinct(2, 900);
        let c = rig.submit(request(long.clone(), 2));
        rig.log.lock().unwrap().steps.clear();
        rig.gate.open();
        assert_eq!(outcome(c), finished(&long, 0, 2, 0));
        let steps = rig.log.lock().unwrap().steps.clone();
        let prompts = |rows: &[usize]| rows.iter().filter(|n| **n > 1).sum::<usize>();
        let last = steps.iter().rposition(|rows| prompts(rows) > 0).unwrap();
        let mut without = 0;
        for rows in &steps[..=last] {
            assert!(prompts(rows) <= 16, "{rows:?}");
            let decoded = rows.iter().filter(|n| **n == 1).count();
            without = if decoded >= 2 { 0 } else { without + 1 };
            assert!(without <= if mixed { 0 } else { 1 }, "{mixed}: {steps:?}");
        }
        assert!(steps[..=last].len() >= 900 / 16);
        assert_eq!(outcome(a), finished(&distinct(0, 3), 0, 200, 0));
        assert_eq!(outcome(b), finished(&distinct(1, 3), 0, 200, 0));
    }
}

/// A short prompt behind a long one takes its turn.
#[test]
fn prompts_take_turns() {
    let rig = Setup { gated: true, ..Setup::default() }.start();
    let long = rig.submit(request(distinct(0, 900), 1));
    rig.gate.first();
    let short = rig.submit(request(distinct(1, 30), 1));
    rig.gate.open();
    let end = |mut stream: EventStream| {
        let mut last = None;
        while let Some(event) = stream.next_timeout(PATIENCE).unwrap() {
            if let Event::Token(token) = event {
                last = Some(token.at);
            }
        }
        last.unwrap()
    };
    assert!(end(short) < end(long));
}

#[test]
fn cancelled_within_one_step_in_every_phase() {
    // Prefill: the first chunk of many has run.
    let rig = Setup { gated: true, ..Setup::default() }.start();
    let stream = rig.submit(request(distinct(0, 500), 5));
    rig.gate.first();
    rig.gate.pass();
    drop(stream);
    let other = rig.submit(request(distinct(1, 8), 3));
    rig.gate.pass();
    assert_eq!(rig.scheduler.status().running, 1, "the next step is the other's");
    rig.gate.open();
    assert_eq!(outcome(other), finished(&distinct(1, 8), 0, 3, 0));
    rig.until("nothing runs", |s| s.running + s.waiting == 0);
    let steps = rig.log.lock().unwrap().steps.clone();
    assert_eq!(steps[..3], [vec![16], vec![16], vec![7]]);
    rig.check_whole();

    // Decode, with a mate that is not disturbed.
    let rig = Setup { gated: true, ..Setup::default() }.start();
    let mut stream = rig.submit(request(distinct(0, 4), 500));
    let mate = rig.submit(request(distinct(1, 4), 20));
    rig.gate.first();
    for _ in 0..5 {
        rig.gate.pass();
    }
    let mut tokens = 0;
    while let Some(event) = stream.try_next() {
        tokens += usize::from(matches!(event, Event::Token(_)));
    }
    assert!(tokens > 0);
    drop(stream);
    rig.gate.pass();
    rig.gate.pass();
    assert_eq!(rig.scheduler.status().running, 1);
    rig.gate.open();
    assert_eq!(outcome(mate), finished(&distinct(1, 4), 0, 20, 0));
    rig.check_whole();

    // Queue: it is never begun.
    let engine = EngineOptions { slots: 1, ..Setup::default().engine };
    let rig = Setup { engine, gated: true, ..Setup::default() }.start();
    let first = rig.submit(request(distinct(0, 20), 8));
    rig.gate.first();
    let queued = rig.submit(request(distinct(1, 20), 8));
    let last = rig.submit(request(distinct(2, 20), 8));
    assert_eq!((rig.scheduler.status().running, rig.scheduler.status().waiting), (1, 2));
    drop(queued);
    rig.gate.pass();
    rig.until("the queue is shorter", |s| s.waiting == 1);
    rig.gate.open();
    assert_eq!(outcome(first), finished(&distinct(0, 20), 0, 8, 0));
    assert_eq!(outcome(last), finished(&distinct(2, 20), 0, 8, 0));
    assert_eq!(rig.scheduler.status().prompt_tokens_computed, 40);
}

#[test]
fn thinking_is_closed_when_its_budget_is_used_up() {
    for overlaps in [false, true] {
        check_thinking(&Setup { overlaps, ..Setup::default() }.start());
    }
}

fn check_thinking(rig: &Rig) {
    let p = distinct(0, 20);
    let close = vec![11, 12, 13];
    for budget in [0, 1, 5] {
        let mut r = request(p.clone(), 12);
        r.thinking = Some(ThinkingBudget { tokens: budget, end: 12, close: close.clone() });
        let got = rig.run(r.clone());
        // Until then the answer is what it is; then what follows is the model's again, and its draws go on.
        let first = oracle::answer(&p, 0, budget);
        let before = [&p[..], &first, &close].concat();
        let rest = oracle::answer_from(&before, 0, budget + 3, 12 - budget - 3);
        assert_eq!(got.ids, [&first[..], &close, &rest].concat(), "{budget}");
        assert_eq!(got.end, Ok(Finish::Length));
        let mut stream = rig.submit(r.clone());
        let mut by_rule = Vec::new();
        while let Some(event) = stream.next_timeout(PATIENCE).unwrap() {
            if let Event::Token(token) = event {
                by_rule.extend((!token.sampled).then_some(token.id));
            }
        }
        assert_eq!(by_rule, close);
        // A limit inside of what is put in its place, and a stop.
        r.max_tokens = budget + 2;
        let got = rig.run(r.clone());
        assert_eq!(got.ids, [&first[..], &close[..2]].concat());
        r.max_tokens = 12;
        r.stop_ids = vec![13];
        let got = rig.run(r);
        assert_eq!((got.ids.len(), got.end), (budget + 3, Ok(Finish::Stop)));
    }
    // Thinking that ends in time is left alone.
    let want = oracle::answer(&p, 0, 12);
    for tokens in [5, 12] {
        let mut r = request(p.clone(), 12);
        r.thinking = Some(ThinkingBudget { tokens, end: want[4], close: close.clone() });
        assert_eq!(rig.run(r).ids, want);
    }
    rig.check_whole();
}

#[test]
fn log_probabilities_are_passed_on() {
    let rig = Setup::default().start();
    let p = distinct(0, 9);
    let mut r = request(p.clone(), 5);
    r.logprobs = Some(3);
    let mut stream = rig.submit(r);
    let mut tokens = p;
    let mut told = Vec::new();
    while let Some(event) = stream.next_timeout(PATIENCE).unwrap() {
        if let Event::Token(token) = event {
            tokens.push(token.id);
            told.push(token.logprob.expect("asked for"));
        }
    }
    let want = oracle::scores(&tokens);
    assert_eq!(told.len(), 5);
    for (told, want) in told.iter().zip(&want[8..]) {
        assert_eq!((told.chosen, told.top.len()), (want.logprob, 3));
    }
    let mut stream = rig.submit(request(distinct(0, 9), 1));
    while let Some(event) = stream.next_timeout(PATIENCE).unwrap() {
        assert!(!matches!(event, Event::Token(token) if token.logprob.is_some()));
    }
}

#[test]
fn a_shutdown_lets_what_runs_end() {
    let engine = EngineOptions { slots: 1, ..Setup::default().engine };
    let rig = Setup { engine, gated: true, ..Setup::default() }.start();
    let running = rig.submit(request(distinct(0, 20), 8));
    let waiting = rig.submit(request(distinct(1, 20), 8));
    rig.gate.first();
    rig.scheduler.shutdown(PATIENCE);
    let late = rig.scheduler.submit(request(distinct(2, 3), 1));
    assert!(matches!(late, Err(SubmitError::ShuttingDown)), "{late:?}");
    rig.gate.open();
    assert_eq!(outcome(running), finished(&distinct(0, 20), 0, 8, 0));
    assert_eq!(outcome(waiting), finished(&distinct(1, 20), 0, 8, 0));
    rig.until("nothing runs", |s| s.running + s.waiting == 0);
    assert!(rig.scheduler.join(PATIENCE));
}

#[test]
fn a_shutdown_ends_what_takes_too_long() {
    let engine = EngineOptions { slots: 1, ..Setup::default().engine };
    let rig = Setup { engine, gated: true, ..Setup::default() }.start();
    let running = rig.submit(request(distinct(0, 20), 800));
    let waiting = rig.submit(request(distinct(1, 20), 8));
    rig.gate.first();
    rig.gate.pass();
    rig.scheduler.shutdown(Duration::ZERO);
    rig.gate.open();
    assert_eq!(outcome(running).end, Err(Failure::ShuttingDown));
    let got = outcome(waiting);
    assert_eq!((got.cached, got.end), (None, Err(Failure::ShuttingDown)));
    assert!(rig.scheduler.join(PATIENCE));
    // A handle that is dropped does the same.
    let rig = Setup { gated: true, ..Setup::default() }.start();
    let running = rig.submit(request(distinct(0, 20), 800));
    rig.gate.first();
    drop(rig.scheduler);
    rig.gate.open();
    assert_eq!(outcome(running).end, Err(Failure::ShuttingDown));
}

#[test]
fn the_heartbeat_tells_a_step_that_hangs() {
    let rig = Setup { gated: true, ..Setup::default() }.start();
    assert_eq!(rig.scheduler.status().heartbeat, Duration::ZERO);
    let stream = rig.submit(request(distinct(0, 20), 3));
    rig.gate.first();
    let step = Duration::from_millis(30);
    rig.until("the heart has stopped", |s| s.heartbeat > step);
    rig.gate.open();
    outcome(stream);
    rig.until("idle", |s| s.heartbeat == Duration::ZERO && s.running == 0);
    let status = rig.scheduler.status();
    assert_eq!(status.limits, Limits { context: 1024, parallel: SLOTS, queue: 64 });
    let purposes: Vec<&str> = status.memory.iter().map(|m| m.purpose).collect();
    let want = ["weights", "weights_read_once", "kv", "state", "scratch", "prefix_cache"];
    assert_eq!(purposes, want);
    assert!(status.steps > 0);
}

/// Where two steps in flight save time, the second is on its way before the first one's token is known; a stop
/// costs one surplus step, a length none.
#[test]
fn two_steps_in_flight() {
    let tokens = |stream: &mut EventStream| {
        let mut tokens = 0;
        while let Some(event) = stream.try_next() {
            tokens += usize::from(matches!(event, Event::Token(_)));
        }
        tokens
    };
    for overlaps in [false, true] {
        let rig = Setup { overlaps, gated: true, ..Setup::default() }.start();
        let p = distinct(0, 1);
        let mut stream = rig.submit(request(p.clone(), 100));
        rig.gate.first();
        for step in 1..5 {
            rig.gate.pass();
            assert_eq!(tokens(&mut stream), usize::from(!overlaps || step > 1), "step {step}");
        }
        rig.gate.open();
        drop(stream);
        rig.until("nothing runs", |s| s.running + s.waiting == 0);
        let want = oracle::answer(&p, 0, 9);
        let rig = Setup { overlaps, ..Setup::default() }.start();
        assert_eq!(rig.run(request(p.clone(), 9)).ids, want);
        rig.until("idle", |s| s.heartbeat == Duration::ZERO);
        assert_eq!(rig.log.lock().unwrap().steps.len(), 9);
        let mut r = request(p, 9);
        r.stop_ids = vec![want[4]];
        assert_eq!(rig.run(r).ids, want[..5]);
        rig.until("idle", |s| s.heartbeat == Duration::ZERO);
        assert_eq!(rig.log.lock().unwrap().steps.len(), 9 + 5 + usize::from(overlaps));
    }
}

/// Answers that end by a stop leave a surplus step behind: their slots are free when it has landed, not before.
#[test]
fn stops_in_company() {
    for overlaps in [false, true] {
        let engine = EngineOptions { slots: 2, ..Setup::default().engine };
        let rig = Setup { overlaps, engine, ..Setup::default() }.start();
        let requests: Vec<Request> = (0..30)
            .map(|i| {
                let p = distinct(i, 3 + i);
                let want = oracle::answer(&p, 0, 20);
                Request { stop_ids: vec![want[i % 19]], ..request(p, 20) }
            })
            .collect();
        let streams: Vec<EventStream> = requests.iter().map(|r| rig.submit(r.clone())).collect();
        for (i, stream) in streams.into_iter().enumerate() {
            let want = oracle::answer(&requests[i].prompt, 0, 1 + i % 19);
            let got = outcome(stream);
            assert_eq!((got.ids, got.end), (want, Ok(Finish::Stop)), "{i}");
        }
        assert_eq!(rig.scheduler.status().faults, 0);
    }
}

/// Where a step of few rows runs in another form: those that decode take turns, eight a step; prompts' ends go with them, short pieces
/// of prompts alone; nobody waits for more than all others' turns.
#[test]
fn what_shares_a_step_of_few_rows() {
    const FEW: usize = 8;
    let tokens = |stream: &mut EventStream| {
        let tokens = std::iter::from_fn(|| stream.try_next());
        tokens.filter(|event| matches!(event, Event::Token(_))).count()
    };
    for overlaps in [false, true] {
        let engine = EngineOptions::new(1024, 20, 64);
        let engine = EngineOptions { snapshot_bytes: 1 << 20, ..engine };
        let setup = Setup { engine, overlaps, few_rows: Some(FEW), ..Setup::default() };
        let rig = Setup { gated: true, ..setup }.start();
        let mut decode: Vec<EventStream> =
            (0..16).map(|i| rig.submit(request(distinct(i, 1), 100))).collect();
        rig.gate.first();
        let mut counts = [0usize; 16];
        for step in 0..24 {
            rig.gate.pass();
            for (count, stream) in counts.iter_mut().zip(&mut decode) {
                *count += tokens(stream);
            }
            // The first step may have begun before all had come.
            if step == 3 {
                counts = [0; 16];
            }
            let (least, most) = (counts.iter().min(), counts.iter().max());
            assert!(step < 4 || most <= least.map(|n| n + 1).as_ref(), "step {step}: {counts:?}");
        }
        assert_eq!(counts.iter().sum::<usize>(), 20 * FEW, "{counts:?}");

        rig.log.lock().unwrap().steps.clear();
        let prompts = [distinct(20, 900), distinct(21, 5), distinct(22, 70), distinct(23, 45)];
        let streams = prompts.iter().map(|prompt| {
            // The piece between the two is short.
            let boundaries = vec![prompt.len() * 2 / 3, prompt.len() * 2 / 3 + 6];
            rig.submit(Request { boundaries, ..request(prompt.clone(), 3) })
        });
        let streams: Vec<EventStream> = streams.collect();
        rig.gate.open();
        for (stream, prompt) in streams.into_iter().zip(&prompts) {
            assert_eq!(outcome(stream).ids, oracle::answer(prompt, 0, 3));
        }
        let steps = rig.log.lock().unwrap().steps.clone();
        let (mut singles, mut kinds) = (0, [0; 3]);
        for rows in &steps {
            let kind = match &rows[..] {
                rows if rows.iter().all(|n| *n == 1) => 0,
                [rows] if *rows <= FEW => 1,
                _ => 2,
            };
            kinds[kind] += 1;
            assert!(kind != 0 || rows.len() <= FEW, "{rows:?} of {steps:?}");
            assert!(kind != 2 || rows.iter().all(|n| *n > FEW), "{rows:?} of {steps:?}");
            singles = if kind == 0 { singles + 1 } else { 0 };
            // Sixteen that decode, and four more.
            let prompts_left = kinds[1] + kinds[2] < 4;
            assert!(!prompts_left || singles <= 3, "{steps:?}");
        }
        assert!(kinds.iter().all(|n| *n >= 4), "{kinds:?}: {steps:?}");
        drop(decode);
        rig.until("nothing runs", |s| s.running + s.waiting == 0);
    }
}
