//! Whatever fails, each request ends rightly, the rest goes on, and no slot is lost.

mod common;

use std::time::{Duration, Instant};

use common::*;
use lily_device::{Call, Fault, Schedule};
use lily_engine::EngineOptions;
use lily_scheduler::*;

/// Four requests at once in three slots, two of them with one prompt. How many failed.
fn four(rig: &Rig, round: usize, what: &str) -> usize {
    let p = |kind: usize, n| distinct(10 * round + kind, n);
    let prompts = [p(0, 40), p(1, 7), p(0, 40), p(2, 100)];
    let streams: Vec<(usize, EventStream)> = prompts
        .iter()
        .enumerate()
        .filter_map(|(i, p)| match rig.scheduler.submit(request(p.clone(), 8)) {
            Ok(stream) => Some((i, stream)),
            Err(SubmitError::Unhealthy(_)) => None,
            Err(error) => panic!("{what}: {error}"),
        })
        .collect();
    let mut failed = prompts.len() - streams.len();
    for (i, stream) in streams {
        let got = outcome(stream);
        let want = oracle::answer(&prompts[i], 0, 8);
        match got.end {
            Ok(finish) => assert_eq!((&got.ids, finish), (&want, Finish::Length), "{what}: {i}"),
            Err(Failure::Device(_)) => {
                // What was told before is right.
                assert_eq!(got.ids[..], want[..got.ids.len()], "{what}: {i}");
                failed += 1;
            }
            Err(other) => panic!("{what}: {other}"),
        }
    }
    failed
}

#[test]
fn a_fault_at_each_call() {
    faults_at_each_call(false);
}

#[test]
fn a_fault_at_each_call_with_two_steps_in_flight() {
    faults_at_each_call(true);
}

fn faults_at_each_call(overlaps: bool) {
    let calls = [Call::Submit, Call::Wait, Call::Snapshot, Call::Restore, Call::Reset];
    let (mut failures, mut spared) = (0, 0);
    for call in calls {
        for at in 0..24 {
            for fault in [Fault::Refuse, Fault::Fail, Fault::Lose] {
                let what = format!("{call:?} {at} {fault:?}");
                let faults = vec![vec![(call, at, fault)]];
                let rig = Setup { faults, overlaps, ..Setup::default() }.start();
                let mut failed = 0;
                for round in 0..10 {
                    let some = four(&rig, round, &what);
                    assert!(some == 0 || failed == 0, "{what}: it goes on failing");
                    failed += some;
                    rig.until("well", |s| s.health == Health::Well);
                }
                if (call, fault) == (Call::Submit, Fault::Refuse) {
                    assert_eq!(failed, 0, "{what}: a refused step is tried again");
                }
                failures += failed;
                spared += usize::from(failed == 0);
                rig.check_whole();
            }
        }
    }
    assert!(failures > 100 && spared > 100, "{failures} failed, {spared} rounds without");
}

/// A segment that fails takes only its own request with it.
#[test]
fn a_failing_segment_fails_its_request_only() {
    let rig = Setup { gated: true, ..Setup::default() }.start();
    let streams: Vec<EventStream> =
        (0..3).map(|i| rig.submit(request(distinct(i, 5), 10))).collect();
    rig.gate.first();
    for _ in 0..4 {
        rig.gate.pass();
    }
    rig.log.lock().unwrap().fail_segment = true;
    rig.gate.open();
    let got: Vec<Outcome> = streams.into_iter().map(outcome).collect();
    let failed: Vec<&Outcome> = got.iter().filter(|o| o.end.is_err()).collect();
    assert_eq!(failed.len(), 1, "{got:?}");
    assert!(matches!(&failed[0].end, Err(Failure::Device(why)) if why.contains("layer 5")));
    for (i, got) in got.iter().enumerate().filter(|(_, o)| o.end.is_ok()) {
        assert_eq!(got.ids, oracle::answer(&distinct(i, 5), 0, 10));
    }
    assert_eq!(rig.scheduler.status().faults, 1);
    rig.check_whole();
}

/// A request that the device always refuses fails, and nobody else.
#[test]
fn what_is_refused_again_and_again_fails_alone() {
    let refusals: Schedule = (1..40).map(|n| (Call::Submit, n, Fault::Refuse)).collect();
    let rig = Setup { faults: vec![refusals], ..Setup::default() }.start();
    // All are refused for a while: they fail instead of being tried for ever.
    let failed = four(&rig, 0, "refusals");
    assert!(failed > 0);
    let mut round = 1;
    while four(&rig, round, "refusals go on") > 0 {
        round += 1;
    }
    rig.check_whole();
}

/// One request that the device refuses in any company does not stop the others.
#[test]
fn a_request_that_is_always_refused_fails_alone() {
    for (mixed, overlaps, few_rows) in WAYS {
        let options = SchedulerOptions { mixed, ..Setup::default().options };
        let rig = Setup { options, overlaps, few_rows, ..Setup::default() }.start();
        rig.log.lock().unwrap().refuse = Some(1001);
        let streams: Vec<EventStream> =
            (0..6).map(|i| rig.submit(request(distinct(i, 30 + i), 20))).collect();
        for (i, stream) in streams.into_iter().enumerate() {
            let got = outcome(stream);
            match i {
                1 => assert!(
                    matches!(&got.end, Err(Failure::Device(why)) if why.contains("is refused")),
                    "{got:?}"
                ),
                _ => assert_eq!(got.ids, oracle::answer(&distinct(i, 30 + i), 0, 20)),
            }
        }
        rig.check_whole();
    }
}

#[test]
fn a_lost_device_is_opened_again() {
    let lose = vec![(Call::Submit, 3, Fault::Lose)];
    let options =
        SchedulerOptions { backoff: Duration::from_millis(200), ..SchedulerOptions::default() };
    let engine = EngineOptions { slots: 2, ..Setup::default().engine };
    let setup = Setup { faults: vec![lose], options, engine, ..Setup::default() };
    let rig = Setup { gated: true, ..setup }.start();
    let streams: Vec<EventStream> =
        (0..3).map(|i| rig.submit(request(distinct(i, 30), 30))).collect();
    rig.gate.first();
    rig.gate.open();
    let mut streams = streams.into_iter().map(outcome);
    for _ in 0..2 {
        let got = streams.next().unwrap();
        assert!(matches!(&got.end, Err(Failure::Device(why)) if why.contains("injected")));
        // Unwell until it is open again.
        if let Err(error) = rig.scheduler.submit(request(distinct(9, 3), 1)) {
            assert!(matches!(error, SubmitError::Unhealthy(_)), "{error}");
        }
    }
    // The one that waited was not on the device: it is served by the next one.
    let got = streams.next().unwrap();
    assert_eq!((got.ids, got.end), (oracle::answer(&distinct(2, 30), 0, 30), Ok(Finish::Length)));
    rig.until("well", |s| s.health == Health::Well);
    assert_eq!(rig.run(request(distinct(3, 9), 4)).ids, oracle::answer(&distinct(3, 9), 0, 4));
}

/// Losses in a row and a device that does not open are waited out, longer each time.
#[test]
fn no_hot_loop() {
    let lose = || vec![(Call::Submit, 0, Fault::Lose)];
    let options =
        SchedulerOptions { backoff: Duration::from_millis(10), ..SchedulerOptions::default() };
    let rig = Setup {
        faults: vec![lose(), lose(), lose()],
        fail_prepare: 3,
        options,
        ..Setup::default()
    }
    .start();
    let begun = Instant::now();
    let got = rig.run(request(distinct(0, 9), 4));
    assert!(got.end.is_err());
    rig.until("unwell", |s| matches!(&s.health, Health::Unwell(_)));
    // Three failures to open, then two more programs that are lost with their first step.
    let mut losses = 1;
    loop {
        match rig.scheduler.submit(request(distinct(0, 9), 4)) {
            Ok(stream) => {
                let got = outcome(stream);
                if got.end.is_ok() {
                    assert_eq!(got.ids, oracle::answer(&distinct(0, 9), 0, 4));
                    break;
                }
                losses += 1;
            }
            Err(SubmitError::Unhealthy(why)) => {
                assert!(why.contains("lost"), "{why}");
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(losses, 3);
    // 10 + 20 + 40 + 80 for the first and the failures, then 160 and 320.
    assert!(begun.elapsed() >= Duration::from_millis(630), "{:?}", begun.elapsed());
    rig.check_whole();
}

#[test]
fn what_waits_fails_when_the_device_cannot_be_opened() {
    let options =
        SchedulerOptions { backoff: Duration::from_millis(5), ..SchedulerOptions::default() };
    let engine = EngineOptions { slots: 1, ..Setup::default().engine };
    let rig = Setup {
        faults: vec![vec![(Call::Submit, 2, Fault::Lose)]],
        fail_prepare: 1,
        options,
        engine,
        gated: true,
        ..Setup::default()
    }
    .start();
    let streams: Vec<EventStream> =
        (0..3).map(|i| rig.submit(request(distinct(i, 30), 30))).collect();
    rig.gate.first();
    rig.gate.open();
    for stream in streams {
        assert!(matches!(outcome(stream).end, Err(Failure::Device(_))));
    }
    rig.until("well", |s| s.health == Health::Well);
    assert_eq!(rig.run(request(distinct(3, 9), 4)).ids, oracle::answer(&distinct(3, 9), 0, 4));
}

#[test]
fn a_panic_is_a_lost_device() {
    for at in [0, 2, 5] {
        let rig = Setup { gated: true, ..Setup::default() }.start();
        rig.gate.panic_at(at);
        let streams: Vec<EventStream> =
            (0..3).map(|i| rig.submit(request(distinct(i, 30), 30))).collect();
        rig.gate.open();
        for stream in streams {
            match outcome(stream).end {
                Err(Failure::Device(why)) => assert!(why.contains("as planned"), "{why}"),
                // It came after the device was opened again.
                end => assert_eq!(end, Ok(Finish::Length)),
            }
        }
        rig.until("well", |s| s.health == Health::Well);
        assert!(rig.scheduler.status().faults > 0);
        rig.check_whole();
    }
}
