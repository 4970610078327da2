//! Thousands of requests of all kinds, cancelled at random, with faults and too few pages.

mod common;

use std::time::Duration;

use common::*;
use lily_device::{Call, Fault};
use lily_engine::EngineOptions;
use lily_scheduler::*;

/// xorshift64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % n
    }
}

fn some_request(random: &mut Random) -> Request {
    let mut tokens = distinct(random.below(6), 1 + random.below(250));
    for _ in 0..random.below(3) {
        tokens.push(random.below(4) as u32);
    }
    let n = tokens.len();
    let mut r = request(tokens, 1 + random.below(130));
    r.sample.seed = random.below(3) as u64;
    if random.below(5) == 0 {
        r.logprobs = Some(random.below(3) as u32);
    }
    if random.below(4) == 0 {
        let want = oracle::answer(&r.prompt, r.sample.seed, r.max_tokens);
        r.stop_ids = vec![want[random.below(want.len())]];
    }
    if random.below(2) == 0 {
        r.boundaries = vec![random.below(n + 2), random.below(n + 2)];
        r.boundaries.sort_unstable();
    }
    r
}

/// Compares what came with what should have. Whether the answer is whole.
fn judge(request: &Request, got: &Outcome) -> bool {
    let mut want = oracle::answer(&request.prompt, request.sample.seed, request.max_tokens);
    let stop = want.iter().position(|id| request.stop_ids.contains(id));
    want.truncate(stop.map_or(want.len(), |at| at + 1));
    let end = if stop.is_some() { Finish::Stop } else { Finish::Length };
    assert_eq!(got.ids[..], want[..got.ids.len()], "{} tokens", request.prompt.len());
    match &got.end {
        Ok(finish) => {
            assert_eq!((*finish, got.ids.len()), (end, want.len()));
            assert!(got.cached.unwrap() < request.prompt.len());
            true
        }
        Err(failure) => {
            assert!(matches!(failure, Failure::Device(_)), "{failure}");
            false
        }
    }
}

#[test]
fn two_thousand_random_requests() {
    two_thousand(7, false, false);
}

#[test]
fn two_thousand_random_requests_with_two_steps_in_flight() {
    two_thousand(8, true, false);
}

#[test]
fn two_thousand_random_requests_with_states_inside_steps() {
    two_thousand(9, false, true);
}

fn two_thousand(seed: u64, overlaps: bool, marks: bool) {
    let mut random = Random(seed);
    let faults = (0..4).map(|_| {
        let mut list = Vec::new();
        for (call, most) in
            [(Call::Submit, 9000), (Call::Wait, 9000), (Call::Snapshot, 900), (Call::Restore, 300)]
        {
            for _ in 0..8 {
                let fault = if random.below(2) == 0 { Fault::Refuse } else { Fault::Fail };
                list.push((call, random.below(most) as u64, fault));
            }
        }
        list.push((Call::Submit, 3000 + random.below(6000) as u64, Fault::Lose));
        list
    });
    let faults = faults.collect();
    let engine = EngineOptions::new(512, SLOTS + 1, 48);
    let engine = EngineOptions { pages: Some(5), snapshot_bytes: 20_000, ..engine };
    let options = SchedulerOptions {
        queue: 20,
        cache_bytes: 12_000,
        backoff: Duration::from_millis(1),
        ..SchedulerOptions::default()
    };
    let options = SchedulerOptions { stride: 50, ..options };
    let rig = Setup { engine, options, faults, overlaps, marks, ..Setup::default() }.start();
    let (mut taken, mut whole, mut cancelled, mut failed, mut refused) = (0, 0, 0, 0, 0);
    let mut open: Vec<(Request, EventStream)> = Vec::new();
    while taken < 2000 {
        let r = some_request(&mut random);
        match rig.scheduler.submit(r.clone()) {
            Ok(stream) => {
                taken += 1;
                open.push((r, stream));
            }
            Err(SubmitError::Busy { .. } | SubmitError::Unhealthy(_)) => refused += 1,
            Err(error) => panic!("{error}"),
        }
        while open.len() > 18 + random.below(12) {
            let (r, mut stream) = open.swap_remove(random.below(open.len()));
            if random.below(3) == 0 {
                // Leaves in the queue, in prefill or in the middle of the answer.
                for _ in 0..random.below(6) {
                    if stream.next_timeout(PATIENCE).expect("an event comes").is_none() {
                        break;
                    }
                }
                drop(stream);
                cancelled += 1;
            } else {
                let ok = judge(&r, &outcome(stream));
                whole += usize::from(ok);
                failed += usize::from(!ok);
            }
        }
    }
    for (r, stream) in open {
        whole += usize::from(judge(&r, &outcome(stream)));
    }
    let status = rig.scheduler.status();
    println!(
        "{whole} whole, {cancelled} cancelled, {failed} failed, {refused} refused, {status:?}"
    );
    assert!(whole > 1000 && cancelled > 300, "{whole} {cancelled}");
    assert!(status.preemptions > 20 && status.prompt_tokens_cached > 1000, "{status:?}");
    rig.check_whole();
}
