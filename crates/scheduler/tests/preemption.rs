//! Pages run out: the youngest gives way, and every answer is what it would have been.

mod common;

use common::*;
use lily_engine::EngineOptions;
use lily_scheduler::*;

/// Pages for one full context and a little more; slots for many.
fn tight(pages: usize, snapshot_bytes: u64) -> Setup {
    let engine = EngineOptions::new(1024, SLOTS, 64);
    let engine = EngineOptions { pages: Some(pages), snapshot_bytes, ..engine };
    Setup { engine, gated: true, ..Setup::default() }
}

/// Submits all before the second step runs: they need pages at the same time on any machine.
fn submit_together(rig: &Rig, requests: impl IntoIterator<Item = Request>) -> Vec<EventStream> {
    let streams = requests.into_iter().map(|r| rig.submit(r)).collect();
    rig.gate.first();
    rig.gate.open();
    streams
}

#[test]
fn answers_are_those_without_preemption() {
    // With snapshots for all, for some, for none: what has no snapshot is computed again.
    for snapshot_bytes in [1 << 20, 3000, 0] {
        for (mixed, overlaps) in [(true, false), (false, false), (true, true), (false, true)] {
            let mut setup = tight(4, snapshot_bytes);
            setup.options.mixed = mixed;
            setup.overlaps = overlaps;
            let rig = setup.start();
            let prompts: Vec<Vec<u32>> = (0..6).map(|i| distinct(i, 200 + 10 * i)).collect();
            let requests = prompts.iter().enumerate().map(|(i, p)| {
                let mut r = request(p.clone(), 400);
                r.sample.seed = i as u64;
                r
            });
            let streams = submit_together(&rig, requests);
            for (i, stream) in streams.into_iter().enumerate() {
                let got = outcome(stream);
                assert_eq!(got.ids, oracle::answer(&prompts[i], i as u64, 400), "{i}");
                assert_eq!((got.cached, got.end), (Some(0), Ok(Finish::Length)));
            }
            let preemptions = rig.scheduler.status().preemptions;
            assert!(preemptions > 0, "{snapshot_bytes}: nothing was preempted");
            rig.check_whole();
        }
    }
}

#[test]
fn the_oldest_goes_on_and_order_is_kept() {
    let rig = tight(4, 1 << 20).start();
    let prompts: Vec<Vec<u32>> = (0..4).map(|i| distinct(i, 250)).collect();
    let streams = submit_together(&rig, prompts.iter().map(|p| request(p.clone(), 700)));
    let mut ends = Vec::new();
    for (mut stream, p) in streams.into_iter().zip(&prompts) {
        let mut ids = Vec::new();
        let mut last = None;
        while let Some(event) = stream.next_timeout(PATIENCE).unwrap() {
            if let Event::Token(token) = event {
                ids.push(token.id);
                last = Some(token.at);
            }
        }
        assert_eq!(ids, oracle::answer(p, 0, 700));
        ends.push(last.unwrap());
    }
    assert!(ends.is_sorted(), "who came first is done first");
    assert!(rig.scheduler.status().preemptions > 0);
}

#[test]
fn a_preempted_request_can_be_cancelled() {
    let rig = tight(4, 1 << 20).start();
    let old = rig.submit(request(distinct(0, 500), 500));
    let young = rig.submit(request(distinct(1, 250), 500));
    rig.gate.first();
    while rig.scheduler.status().preemptions == 0 {
        rig.gate.pass();
    }
    assert_eq!((rig.scheduler.status().running, rig.scheduler.status().waiting), (1, 1));
    drop(young);
    rig.gate.pass();
    rig.until("it is gone", |s| s.waiting == 0);
    rig.gate.open();
    assert_eq!(outcome(old).ids, oracle::answer(&distinct(0, 500), 0, 500));
    rig.check_whole();
}

#[test]
fn thinking_that_was_closed_stays_closed() {
    for snapshot_bytes in [1 << 20, 0] {
        let rig = tight(4, snapshot_bytes).start();
        let prompts: Vec<Vec<u32>> = (0..3).map(|i| distinct(i, 200)).collect();
        let close = vec![11, 12];
        let requests = prompts.iter().map(|p| {
            let mut r = request(p.clone(), 400);
            r.thinking = Some(ThinkingBudget { tokens: 50, end: 11, close: close.clone() });
            r
        });
        let streams = submit_together(&rig, requests);
        for (stream, p) in streams.into_iter().zip(&prompts) {
            let first = oracle::answer(p, 0, 50);
            let before = [&p[..], &first, &close].concat();
            let rest = oracle::answer_from(&before, 0, 52, 348);
            assert_eq!(outcome(stream).ids, [&first[..], &close, &rest].concat());
        }
        assert!(rig.scheduler.status().preemptions > 0);
    }
}
