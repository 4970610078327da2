//! Prefixes of prompts are reused, told truthfully, and change no answer.

mod common;

use common::*;
use lily_engine::{EngineOptions, snapshot_bytes};
use lily_scheduler::*;

/// Whether two steps are in flight, and whether states inside a step are kept.
const KINDS: [(bool, bool); 3] = [(false, false), (true, false), (false, true)];

fn check(got: Outcome, prompt: &[u32], seed: u64, count: usize, cached: usize) {
    assert_eq!(got.ids, oracle::answer(prompt, seed, count));
    assert_eq!((got.cached, got.end), (Some(cached), Ok(Finish::Length)));
}

#[test]
fn an_equal_prompt_is_computed_once() {
    for (overlaps, marks) in KINDS {
        check_equal_prompts(&Setup { overlaps, marks, ..Setup::default() }.start());
    }
}

fn check_equal_prompts(rig: &Rig) {
    for n in [1, 2, 7, 100] {
        let p = distinct(n, n);
        check(rig.run(request(p.clone(), 6)), &p, 0, 6, 0);
        for seed in 0..3 {
            let mut warm = request(p.clone(), 6);
            warm.sample.seed = seed;
            check(rig.run(warm), &p, seed, 6, n - 1);
        }
    }
    let status = rig.scheduler.status();
    assert_eq!(status.prompt_tokens_computed, 110 + 3 * 4);
    assert_eq!(status.prompt_tokens_cached, 3 * (110 - 4));
    let bytes = status.memory.iter().find(|m| m.purpose == "prefix_cache").unwrap().bytes;
    assert!(bytes > 0);
}

#[test]
fn the_next_turn_and_another_question_reuse_what_they_share() {
    for (overlaps, marks) in KINDS {
        check_turns(&Setup { overlaps, marks, ..Setup::default() }.start());
    }
}

fn check_turns(rig: &Rig) {
    let system = distinct(0, 60);
    let first = [&system[..], &prompt(30)].concat();
    let mut r = request(first.clone(), 5);
    r.boundaries = vec![60];
    check(rig.run(r.clone()), &first, 0, 5, 0);
    // The next turn: the whole prompt before it.
    let next = [&first[..], &oracle::answer(&first, 0, 5), &[1, 2, 3]].concat();
    check(rig.run(request(next.clone(), 5)), &next, 0, 5, 89);
    // The same system text under another question.
    let other = [&system[..], &[9, 8, 7, 6]].concat();
    check(rig.run(request(other.clone(), 5)), &other, 0, 5, 60);
    // However long: of those kept, the longest that it really begins with.
    let longer = [&system[..], &distinct(5, 100)].concat();
    check(rig.run(request(longer.clone(), 5)), &longer, 0, 5, 60);
    // A prompt that departs earlier, by one token, shares nothing that is kept.
    let departs = [&system[..59], &[5, 5, 5, 5]].concat();
    check(rig.run(request(departs.clone(), 5)), &departs, 0, 5, 0);
    // Boundaries that mean nothing are passed over.
    let p = distinct(7, 20);
    let mut r = request(p.clone(), 3);
    r.boundaries = vec![0, 5, 5, 19, 20, 4000];
    check(rig.run(r), &p, 0, 3, 0);
    let half = [&p[..5], &[3, 3, 3]].concat();
    check(rig.run(request(half.clone(), 3)), &half, 0, 3, 5);
}

#[test]
fn choices_share_one_prefill() {
    let rig = Setup { gated: true, ..Setup::default() }.start();
    let p = distinct(0, 200);
    let streams: Vec<EventStream> = (0..5)
        .map(|choice| {
            let mut r = request(p.clone(), 6);
            // The fake program draws by the seed alone.
            r.sample.seed = choice;
            r.sample.choice = choice as u32;
            rig.submit(r)
        })
        .collect();
    rig.gate.first();
    rig.gate.open();
    for (choice, stream) in streams.into_iter().enumerate() {
        let cached = if choice == 0 { 0 } else { 199 };
        check(outcome(stream), &p, choice as u64, 6, cached);
    }
    assert_eq!(rig.scheduler.status().prompt_tokens_computed, 200 + 4);
    rig.check_whole();
}

/// Whoever waits for another's prefix goes on alone when that one is gone.
#[test]
fn a_leader_that_leaves_takes_nobody_with_it() {
    let rig = Setup { gated: true, ..Setup::default() }.start();
    let p = distinct(0, 200);
    let leader = rig.submit(request(p.clone(), 6));
    let follower = rig.submit(request(p.clone(), 6));
    let other = rig.submit(request(p.clone(), 6));
    rig.gate.first();
    rig.gate.pass();
    rig.gate.pass();
    drop(leader);
    drop(other);
    rig.gate.open();
    check(outcome(follower), &p, 0, 6, 0);
    rig.check_whole();
}

#[test]
fn the_cache_is_bounded_and_the_unused_goes_first() {
    let one = snapshot_bytes(&common::fake::plan(), 100);
    let options = SchedulerOptions { cache_bytes: 3 * one, ..Setup::default().options };
    let rig = Setup { options, ..Setup::default() }.start();
    let p = |kind| distinct(kind, 100);
    for kind in 0..3 {
        check(rig.run(request(p(kind), 2)), &p(kind), 0, 2, 0);
    }
    check(rig.run(request(p(0), 2)), &p(0), 0, 2, 99);
    check(rig.run(request(p(3), 2)), &p(3), 0, 2, 0);
    // The second was not used for longest.
    check(rig.run(request(p(0), 2)), &p(0), 0, 2, 99);
    check(rig.run(request(p(1), 2)), &p(1), 0, 2, 0);
    let bytes = |s: &Status| s.memory.iter().find(|m| m.purpose == "prefix_cache").unwrap().bytes;
    assert!(bytes(&rig.scheduler.status()) <= 3 * one);
    // Larger than all of it: nothing is thrown out for it, and it is told.
    assert_eq!(rig.scheduler.status().prefixes_skipped, 0);
    check(rig.run(request(distinct(9, 500), 2)), &distinct(9, 500), 0, 2, 0);
    assert_eq!(rig.scheduler.status().prefixes_skipped, 1);
    check(rig.run(request(p(1), 2)), &p(1), 0, 2, 99);
}

#[test]
fn prompts_of_any_length_are_kept() {
    let lengths = [1_000, 16_000, 64_000];
    // The states inside take as much each: of the fake program only tokens count, computed and to come.
    let snapshot_bytes =
        lengths.map(|n| 9 * snapshot_bytes(&common::fake::plan(), n + 64)).iter().sum();
    let engine = EngineOptions { snapshot_bytes, ..EngineOptions::new(65_536, SLOTS, 2_048) };
    let rig = Setup { engine, ..Setup::default() }.start();
    for (kind, n) in lengths.into_iter().enumerate() {
        let p = distinct(kind, n);
        check(rig.run(request(p.clone(), 3)), &p, 0, 3, 0);
        check(rig.run(request(p.clone(), 3)), &p, 0, 3, n - 1);
    }
    assert_eq!(rig.scheduler.status().prefixes_skipped, 0);
}

/// Prompts with one long beginning and different ends, whose places nobody tells: what is computed again is bounded.
#[test]
fn a_prompt_may_depart_anywhere() {
    for (overlaps, marks) in KINDS {
        let options = SchedulerOptions { stride: 64, ..Setup::default().options };
        let rig = Setup { options, overlaps, marks, ..Setup::default() }.start();
        let long = distinct(0, 500);
        check(rig.run(request(long.clone(), 4)), &long, 0, 4, 0);
        // The last ten tokens differ, as where a date stands at the end.
        for day in 0..3 {
            let dated = [&long[..490], &[40_000 + day; 10]].concat();
            check(rig.run(request(dated.clone(), 4)), &dated, 0, 4, 448);
        }
        for (shared, kept) in [(499, 499), (448, 448), (447, 384), (65, 64), (64, 64), (63, 0)] {
            let other = [&long[..shared], &[9, 8, 7][..]].concat();
            // One of them may have left the whole prompt of another behind.
            let got = rig.run(request(other.clone(), 4));
            assert_eq!(got.ids, oracle::answer(&other, 0, 4));
            assert_eq!(got.cached, Some(kept), "{shared}");
        }
        assert_eq!(rig.scheduler.status().prefixes_skipped, 0);
        assert!(rig.scheduler.status().prefixes >= 8);
    }
}

/// Two prompts that part in the middle, at once: the second waits for what the first computes of it.
#[test]
fn a_beginning_is_computed_once_for_two() {
    for marks in [false, true] {
        let options = SchedulerOptions { stride: 64, ..Setup::default().options };
        let rig = Setup { options, gated: true, marks, ..Setup::default() }.start();
        let (a, b) = (distinct(0, 400), [&distinct(0, 300)[..], &[5; 100]].concat());
        let first = rig.submit(request(a.clone(), 4));
        let second = rig.submit(request(b.clone(), 4));
        rig.gate.first();
        rig.gate.open();
        check(outcome(first), &a, 0, 4, 0);
        check(outcome(second), &b, 0, 4, 256);
        rig.check_whole();
    }
}

/// States inside prompts have their share of the memory and no more.
#[test]
fn inner_states_are_bounded_and_can_be_left_out() {
    let one = snapshot_bytes(&common::fake::plan(), 500);
    for (stride, cache_bytes, prefixes) in
        [(0, u64::MAX, 1), (64, u64::MAX, 8), (32, u64::MAX, 8), (64, 3 * one, 3), (64, one - 1, 0)]
    {
        for marks in [false, true] {
            let options = SchedulerOptions { stride, cache_bytes, ..Setup::default().options };
            let rig = Setup { options, marks, ..Setup::default() }.start();
            let p = distinct(0, 500);
            check(rig.run(request(p.clone(), 4)), &p, 0, 4, 0);
            rig.until("it has ended", |s| s.running == 0);
            let status = rig.scheduler.status();
            let bytes = status.memory.iter().find(|m| m.purpose == "prefix_cache").unwrap().bytes;
            assert!(bytes <= cache_bytes);
            // States inside a step have no tokens to come with them: they are smaller.
            assert!(status.prefixes >= prefixes.min(3) && status.prefixes <= 8);
            assert!(marks || status.prefixes == prefixes, "{stride} {cache_bytes}");
        }
    }
}

/// Where states inside a step are kept, a prompt takes as many steps as without them.
#[test]
fn marks_inside_a_step_cost_no_step() {
    for (marks, want) in [(false, vec![60, 20, 9, 1]), (true, vec![90])] {
        let engine = EngineOptions { chunk: 128, ..Setup::default().engine };
        let rig = Setup { engine, marks, ..Setup::default() }.start();
        let p = distinct(0, 90);
        let mut r = request(p.clone(), 1);
        r.boundaries = vec![60, 80, 90];
        check(rig.run(r.clone()), &p, 0, 1, 0);
        let steps: Vec<usize> = rig.log.lock().unwrap().steps.concat();
        assert_eq!(steps, want);
        check(rig.run(r), &p, 0, 1, 89);
        for shared in [60, 80] {
            let other = [&p[..shared], &[3, 1, 4][..]].concat();
            check(rig.run(request(other.clone(), 3)), &other, 0, 3, shared);
        }
    }
}

#[test]
fn without_memory_for_snapshots_everything_is_computed() {
    for (cache_bytes, snapshot_bytes) in [(0, 1 << 20), (u64::MAX, 0)] {
        let options = SchedulerOptions { cache_bytes, ..Setup::default().options };
        let engine = EngineOptions { snapshot_bytes, ..Setup::default().engine };
        let rig = Setup { options, engine, ..Setup::default() }.start();
        let p = distinct(0, 60);
        for _ in 0..2 {
            check(rig.run(request(p.clone(), 4)), &p, 0, 4, 0);
        }
        let twins: Vec<EventStream> = (0..2).map(|_| rig.submit(request(p.clone(), 4))).collect();
        twins.into_iter().for_each(|twin| check(outcome(twin), &p, 0, 4, 0));
    }
}
