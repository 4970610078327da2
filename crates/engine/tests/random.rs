//! Random calls in any order: whatever happened before, a prompt is answered as the oracle answers it.

mod common;

use common::*;
use lily_device::{Call, Fault};
use lily_engine::*;

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

/// A prompt that shares a beginning with others.
fn some_prompt(random: &mut Random) -> Vec<u32> {
    let mut tokens = prompt(1 + random.below(120));
    for _ in 0..random.below(4) {
        tokens.push(random.below(3) as u32);
    }
    tokens
}

/// Cancelled, refused, failed and out of pages are part of the plan; anything else is a mistake.
fn expected<T>(result: Result<T, EngineError>) -> Option<T> {
    use EngineError as E;
    match result {
        Ok(value) => Some(value),
        Err(E::Cancelled { .. } | E::Refused(_) | E::StepFailed { .. } | E::Poisoned { .. }) => {
            None
        }
        Err(other) => panic!("{other}"),
    }
}

/// Returns how many answers were compared.
fn run(seed: u64) -> usize {
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let faults: Vec<(u64, Fault)> = (0..12)
        .map(|_| {
            let fault = if random.below(2) == 0 { Fault::Refuse } else { Fault::Fail };
            (random.below(400) as u64, fault)
        })
        .collect();
    // Every other run keeps two steps in flight, and waiting and taking back fail too.
    let overlaps = seed % 2 == 1;
    let mut schedule = Vec::new();
    for (call, most) in [(Call::Wait, 400), (Call::Undo, 30)] {
        let fault = if random.below(2) == 0 { Fault::Refuse } else { Fault::Fail };
        schedule.push((call, random.below(most) as u64, fault));
    }
    let device = FakeDevice { faults, schedule, overlaps, ..FakeDevice::default() };
    let chunk = 1 + random.below(40);
    let mut engine =
        device.engine(EngineOptions { context: 200, slots: 3, chunk, undo: overlaps, ..OPTIONS });
    let mut sessions: Vec<Session> = (0..3).map(|_| engine.open_session().unwrap()).collect();
    let mut saved: Vec<SessionSnapshot> = Vec::new();
    let calm = Cancel::new();
    let mut compared = 0;
    for _ in 0..60 {
        let tokens = some_prompt(&mut random);
        let i = random.below(3);
        let session = &mut sessions[i];
        match random.below(8) {
            0 => {
                let cancel = device.cancel_at(1 + random.below(4));
                expected(engine.sync(session, &tokens, &cancel, |_, _| {}));
            }
            1 => {
                if expected(engine.sync(session, &tokens, &calm, |_, _| {})).is_some() {
                    expected(engine.checkpoint(session));
                }
            }
            2 => {
                saved.extend(expected(engine.snapshot(session)));
            }
            3 if !saved.is_empty() => {
                let snapshot = &saved[random.below(saved.len())];
                engine.restore(session, snapshot).unwrap();
                assert_eq!(session.tokens(), snapshot.tokens());
            }
            4 => {
                let scores = expected(engine.score(session, &tokens, &calm, |_, _| {}));
                assert!(scores.is_none_or(|s| s == oracle::scores(&tokens)));
            }
            5 => {
                let old = sessions.remove(i);
                drop(old);
                sessions.insert(i, engine.open_session().unwrap());
            }
            _ => {
                // Half of the time the prompt goes on from what the session holds.
                let mut longer = session.tokens().to_vec();
                longer.extend(session.last_sampled());
                longer.extend(&tokens[..tokens.len().min(9)]);
                let tokens =
                    if random.below(2) == 0 && longer.len() < 180 { longer } else { tokens };
                let count = 1 + random.below(12);
                let mut want = oracle::answer(&tokens, 0, count);
                let mut p = params(count);
                if random.below(2) == 0 {
                    let stop = want[random.below(count)];
                    p.stop_ids.push(stop);
                    let end = want.iter().position(|id| *id == stop).unwrap_or(0);
                    want.truncate(end + 1);
                }
                if let Some(got) = expected(answer_with(&mut engine, session, &tokens, &p)) {
                    assert_eq!(got.ids, want, "seed {seed}");
                    compared += 1;
                }
            }
        }
    }
    compared
}

#[test]
fn any_order_of_calls() {
    let compared: usize = (0..300).map(run).sum();
    assert!(compared > 3000, "only {compared} answers were compared");
}
