use super::*;
use crate::case::Seeded;

/// The token alone.
fn sample(
    logits: &mut [f32],
    params: &SampleParams,
    counts: &TokenCounts,
    index: u64,
) -> Option<u32> {
    super::sample(logits, params, counts, index).map(|sampled| sampled.id)
}

fn params() -> SampleParams {
    SampleParams { temperature: 1.0, ..SampleParams::GREEDY }
}

#[test]
fn philox_known_answers() {
    // From the authors' Random123 known-answer file.
    assert_eq!(
        philox4x32([0, 0], [0, 0, 0, 0]),
        [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
    );
    assert_eq!(
        philox4x32([u32::MAX; 2], [u32::MAX; 4]),
        [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
    );
    assert_eq!(
        philox4x32(
            [0xa409_3822, 0x299f_31d0],
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]
        ),
        [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
    );
}

#[test]
fn weights_are_powers_and_never_grow() {
    assert_eq!(weight(0), ONE);
    assert_eq!(weight((39 << DEPTH_BITS) - 1), 1);
    // Each power of two below repeats the first one's digits, shifted: all of that, then some of the rest.
    let mut before = ONE;
    for depth in 0..=1u32 << DEPTH_BITS {
        let w = weight(depth);
        assert!(w <= before, "{depth}");
        before = w;
    }
    for depth in (0..39 << DEPTH_BITS).step_by(7919) {
        let want = (-f64::from(depth) / f64::from(1 << DEPTH_BITS)).exp2() * ONE as f64;
        assert!((weight(depth) as f64 - want).abs() <= 3e-8 * want + 1.0, "{depth}");
    }
}

#[test]
fn depths_measure_logits() {
    for (x, max, temperature) in [(1.0f32, 3.0f32, 1.0f32), (-7.5, 0.25, 0.7), (2.0, 2.0, 9.0)] {
        let d = depth(x, max, depth_scale(temperature)).unwrap();
        let want = (f64::from(x - max) / f64::from(temperature)).exp();
        assert!((weight(d) as f64 / ONE as f64 - want).abs() <= 1e-6 * want, "{x} {max}");
    }
    let scale = depth_scale(1.0);
    assert_eq!(depth(f32::NEG_INFINITY, 0.0, scale), None);
    assert_eq!(depth(f32::MIN, f32::MAX, scale), None);
    assert_eq!(depth(-27.1, 0.0, scale), None);
    // The smallest temperature there is leaves the largest logits alone.
    let scale = depth_scale(f32::from_bits(1));
    assert_eq!(depth(5.0, 5.0, scale), Some(0));
    assert_eq!(depth(5.0 - 1e-6, 5.0, scale), None);
}

/// The rule word by word: sort everything, cut, walk.
fn plain(logits: &[f32], p: &SampleParams, index: u64) -> u32 {
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    ids.sort_by(|a, b| order(logits, *a, *b));
    if p.top_k > 0 {
        ids.truncate(p.top_k as usize);
    }
    let max = logits[ids[0] as usize];
    let weigh =
        |id: &u32| depth(logits[*id as usize], max, depth_scale(p.temperature)).map_or(0, weight);
    let mut w: Vec<u64> = ids.iter().map(weigh).collect();
    if p.top_p < 1.0 {
        let bound = f64::from(p.top_p) * 2f64.powi(64);
        let bound = (u128::from(w.iter().sum::<u64>()) * (bound as u128)) >> 64;
        let mut sum = 0;
        let reached = w.iter().position(|x| {
            sum += u128::from(*x);
            sum >= bound
        });
        w.truncate(reached.unwrap() + 1);
    }
    let floor = (f64::from(p.min_p) * w[0] as f64) as u64;
    w.truncate(w.iter().take_while(|x| **x >= floor).count());
    let [high, low, ..] = philox4x32(
        [p.seed as u32, p.choice],
        [index as u32, (index >> 32) as u32, (p.seed >> 32) as u32, 0],
    );
    let random = u128::from(high) << 32 | u128::from(low);
    let target = (random * u128::from(w.iter().sum::<u64>())) >> 64;
    let mut sum = 0;
    let chosen = w.iter().position(|x| {
        sum += u128::from(*x);
        sum > target
    });
    ids[chosen.unwrap()]
}

#[test]
fn draws_equal_the_plain_rule() {
    let mut rng = Seeded::new("plain");
    let mut pick = |list: &[f32]| list[rng.bits() as usize % list.len()];
    let mut seen = [0; 2];
    for round in 0..4000u64 {
        let n = pick(&[1.0, 2.0, 5.0, 63.0, 64.0, 65.0, 300.0, 3000.0]) as usize;
        // Coarse steps give many equal logits, −0 among them; some are −∞.
        let (spread, step) = (pick(&[0.0, 1.0, 6.0, 40.0, 1e30]), pick(&[0.0, 0.25, 3.0]));
        let absent = pick(&[0.0, 0.0, 0.1, 0.9]);
        let slope = pick(&[0.0, 0.0, 0.01, -0.01]);
        let mut unit = Seeded::new(&format!("plain {round}"));
        let mut logits: Vec<f32> = (0..n)
            .map(|i| {
                let x = (unit.unit() + unit.unit()) * spread + i as f32 * slope;
                let x = if step > 0.0 { (x / step).round() * step } else { x };
                if unit.unit().abs() < absent { f32::NEG_INFINITY } else { x }
            })
            .collect();
        if largest(&logits) == f32::NEG_INFINITY {
            logits[n / 2] = -3.0;
        }
        let p = SampleParams {
            temperature: pick(&[0.01, 0.7, 1.0, 1.5, 100.0]),
            top_k: pick(&[0.0, 0.0, 2.0, 5.0, 20.0, 64.0, 1500.0, 9999.0]) as u32,
            top_p: pick(&[0.0, 0.1, 0.5, 0.95, 0.999_999, 1.0, 1.0]),
            min_p: pick(&[0.0, 0.0, 0.0, 1e-9, 0.05, 0.5, 1.0]),
            seed: round,
            ..params()
        };
        for index in 0..3 {
            let want = plain(&logits, &p, index);
            let got = sample(&mut logits.clone(), &p, &TokenCounts::new(), index);
            assert_eq!(got, Some(want), "round {round}, {n} logits, {p:?}");
            seen[usize::from(want != argmax(&logits).unwrap())] += 1;
        }
    }
    assert!(seen.iter().all(|n| *n > 2000), "both the largest and others are drawn: {seen:?}");
}

/// A large vocabulary, where the k-th largest logit rises while it is looked for.
#[test]
fn the_largest_of_many() {
    for (name, rise) in [("flat", 0.0), ("rising", 1e-3), ("falling", -1e-3)] {
        let mut rng = Seeded::new(name);
        let logits: Vec<f32> = (0..30_000)
            .map(|i| (rng.unit() * 40.0).round() * 0.1 + (i as f32 * rise).round())
            .collect();
        let mut want: Vec<u32> = (0..30_000).collect();
        want.sort_by(|a, b| order(&logits, *a, *b));
        for k in [2, 20, 1024, 5000, 29_999] {
            let mut got = largest_ids(&logits, k);
            got.sort_by(|a, b| order(&logits, *a, *b));
            assert!(got == want[..k], "{name} {k}");
        }
    }
}

#[test]
fn greedy_takes_the_lowest_id_of_equal_logits() {
    let mut logits = [0.0, 3.0, 3.0, -1.0];
    assert_eq!(sample(&mut logits, &SampleParams::GREEDY, &TokenCounts::new(), 0), Some(1));
}

#[test]
fn penalties_change_the_choice() {
    let counts = TokenCounts::from([(1, 2)]);
    let pick = |p: SampleParams| sample(&mut [2.0, 3.0, -1.0], &p, &counts, 0);
    assert_eq!(pick(SampleParams::GREEDY), Some(1));
    assert_eq!(pick(SampleParams { presence_penalty: 1.5, ..SampleParams::GREEDY }), Some(0));
    assert_eq!(pick(SampleParams { frequency_penalty: 0.6, ..SampleParams::GREEDY }), Some(0));
    assert_eq!(pick(SampleParams { frequency_penalty: 0.4, ..SampleParams::GREEDY }), Some(1));
    assert_eq!(pick(SampleParams { repetition_penalty: 2.0, ..SampleParams::GREEDY }), Some(0));
    // A negative logit grows more negative.
    let p = SampleParams { repetition_penalty: 2.0, ..SampleParams::GREEDY };
    assert_eq!(sample(&mut [-1.5, -1.0], &p, &counts, 0), Some(0));
}

#[test]
fn masks_and_nan() {
    let mask = Arc::new(TokenMask::new(&[true, false, true]));
    let p = SampleParams { mask: Some(mask), ..SampleParams::GREEDY };
    let none = TokenCounts::new();
    assert_eq!(sample(&mut [1.0, 9.0, 2.0, 99.0], &p, &none, 0), Some(2));
    let p = SampleParams { mask: Some(Arc::new(TokenMask::new(&[]))), ..p };
    assert_eq!(sample(&mut [1.0, 2.0], &p, &none, 0), None);
    assert_eq!(sample(&mut [1.0, f32::NAN], &SampleParams::GREEDY, &none, 0), None);
    assert_eq!(sample(&mut [], &SampleParams::GREEDY, &none, 0), None);
    assert_eq!(sample(&mut [1.0, f32::INFINITY], &params(), &none, 0), Some(1));
}

/// How often each id is drawn from `logits` in 20,000 draws.
fn frequencies(logits: &[f32], p: &SampleParams) -> Vec<f64> {
    let n = 20_000;
    let mut seen = vec![0f64; logits.len()];
    for index in 0..n {
        let id = sample(&mut logits.to_vec(), p, &TokenCounts::new(), index).unwrap();
        seen[id as usize] += 1.0 / n as f64;
    }
    seen
}

#[test]
fn draws_follow_the_distribution() {
    let logits = [1.0, 0.0, 2.0, -1.0f32];
    for temperature in [0.5, 1.0, 2.0f32] {
        let p = SampleParams { temperature, seed: 7, ..params() };
        let w: Vec<f64> = logits.iter().map(|x| f64::from(x / temperature).exp()).collect();
        let sum: f64 = w.iter().sum();
        for (seen, w) in frequencies(&logits, &p).iter().zip(&w) {
            assert!((seen - w / sum).abs() < 0.015, "{seen} {}", w / sum);
        }
    }
}

#[test]
fn cuts() {
    // Probabilities 0.5, 0.25, 0.15, 0.1.
    let logits: Vec<f32> = [0.5f32, 0.25, 0.15, 0.1].iter().map(|p| p.ln()).collect();
    let alive = |p: SampleParams| -> Vec<bool> {
        frequencies(&logits, &p).iter().map(|&f| f > 0.0).collect()
    };
    assert_eq!(alive(SampleParams { top_k: 2, ..params() }), [true, true, false, false]);
    assert_eq!(alive(SampleParams { top_p: 0.7, ..params() }), [true, true, false, false]);
    assert_eq!(alive(SampleParams { top_p: 0.8, ..params() }), [true, true, true, false]);
    assert_eq!(alive(SampleParams { top_p: 0.0, ..params() }), [true, false, false, false]);
    assert_eq!(alive(SampleParams { min_p: 0.4, ..params() }), [true, true, false, false]);
    assert_eq!(alive(params()), [true; 4]);
    // Equal logits at the top-k boundary: the lower id stays.
    let p = SampleParams { top_k: 1, temperature: 1.0, ..params() };
    assert_eq!(sample(&mut [1.0, 1.0], &p, &TokenCounts::new(), 3), Some(0));
}

#[test]
fn seeds_choices_and_positions_differ_and_repeat() {
    let logits: Vec<f32> = (0..50).map(|i| (i % 7) as f32 * 0.1).collect();
    let run = |seed: u64, choice: u32| -> Vec<u32> {
        let p = SampleParams { seed, choice, ..params() };
        (0..32).map(|i| sample(&mut logits.clone(), &p, &TokenCounts::new(), i).unwrap()).collect()
    };
    assert_eq!(run(1, 0), run(1, 0));
    assert_ne!(run(1, 0), run(2, 0));
    assert_ne!(run(1, 0), run(1, 1));
    assert_ne!(run(1, 0), run(1 << 32 | 1, 0));
}

#[test]
fn ranges() {
    assert!(params().check(4).is_ok());
    for bad in [
        SampleParams { temperature: -0.1, ..params() },
        SampleParams { temperature: f32::NAN, ..params() },
        SampleParams { top_p: 1.1, ..params() },
        SampleParams { min_p: -1.0, ..params() },
        SampleParams { repetition_penalty: 0.0, ..params() },
        SampleParams { logprobs: Some(MAX_LOGPROBS + 1), ..params() },
        SampleParams { logit_bias: Some(bias(&[(1, 1.0), (4, 0.5)])), ..params() },
    ] {
        assert!(bad.check(4).is_err(), "{bad:?}");
    }
}

fn bias(entries: &[(u32, f32)]) -> Arc<LogitBias> {
    Arc::new(LogitBias::new(entries.iter().copied()).unwrap())
}

#[test]
fn biases_are_checked_and_sorted() {
    let entries = [(7, -100.0), (2, 0.5), (3, 100.0)];
    let sorted = LogitBias::new(entries).unwrap();
    assert_eq!(sorted.entries(), [(2, 0.5), (3, 100.0), (7, -100.0)]);
    assert_eq!(LogitBias::new([]).unwrap().entries(), []);
    for (bad, why) in [
        (vec![(1, 100.5)], "token 1 is 100.5"),
        (vec![(1, f32::NAN)], "token 1 is NaN"),
        (vec![(5, 1.0), (4, 0.0), (5, 2.0)], "token 5 twice"),
    ] {
        let error = LogitBias::new(bad).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
    let p = SampleParams { logit_bias: Some(bias(&entries)), ..params() };
    assert!(p.check(8).is_ok());
    let error = p.check(7).unwrap_err();
    assert!(error.contains("token 7; the vocabulary has 7 ids"), "{error}");
    assert!(SampleParams { logprobs: Some(20), ..params() }.check(1).is_ok());
}

#[test]
fn a_bias_comes_before_the_penalties() {
    let counts = TokenCounts::from([(0, 1)]);
    let pick = |logits: &[f32], list: &[(u32, f32)], repetition_penalty| {
        let p = SampleParams {
            logit_bias: Some(bias(list)),
            repetition_penalty,
            ..SampleParams::GREEDY
        };
        sample(&mut logits.to_vec(), &p, &counts, 0)
    };
    assert_eq!(pick(&[1.0, 0.0], &[(1, 1.5)], 1.0), Some(1));
    assert_eq!(pick(&[1.0, 0.0], &[(0, -100.0)], 1.0), Some(1));
    // (1 + 3) / 2 = 2 stays below 2.5; 1 / 2 + 3 would not.
    assert_eq!(pick(&[1.0, 2.5], &[(0, 3.0)], 2.0), Some(1));
    // An id without a logit is passed over.
    assert_eq!(pick(&[1.0, 0.0], &[(9, 3.0)], 1.0), Some(0));
}

/// Biases equal logits that were moved by as much, whatever else is asked for.
#[test]
fn a_bias_is_a_moved_logit() {
    for round in 0..300u64 {
        let mut rng = Seeded::new(&format!("bias {round}"));
        let n = 1 + rng.bits() as usize % 200;
        let logits: Vec<f32> = (0..n).map(|_| (rng.unit() * 8.0).round() * 0.5).collect();
        let entries: Vec<(u32, f32)> = (0..n as u32)
            .map(|id| (id, (rng.unit() * 160.0).round()))
            .filter(|(_, bias)| bias.abs() <= 100.0)
            .collect();
        let p = SampleParams {
            temperature: if round % 3 == 0 { 0.0 } else { 1.0 },
            top_k: (rng.bits() % 30) as u32,
            presence_penalty: 0.5,
            repetition_penalty: 1.25,
            seed: round,
            ..params()
        };
        let counts = TokenCounts::from([(0, 2), (rng.bits() as u32 % n as u32, 1)]);
        let mut moved = logits.clone();
        for (id, bias) in &entries {
            moved[*id as usize] += bias;
        }
        let with = SampleParams { logit_bias: Some(bias(&entries)), ..p.clone() };
        let got = sample(&mut logits.clone(), &with, &counts, 3);
        assert_eq!(got, sample(&mut moved, &p, &counts, 3), "round {round}");
    }
}

/// Log-probabilities by definition: in f64, everything sorted.
fn naive(logits: &[f32], id: u32, n: usize) -> (f64, Vec<(u32, f64)>) {
    let max = logits.iter().fold(f32::NEG_INFINITY, |m, x| m.max(*x));
    let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    let logprob = |id: u32| f64::from(logits[id as usize]) - f64::from(max) - sum.ln();
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    ids.sort_by(|a, b| order(logits, *a, *b));
    (logprob(id), ids.into_iter().take(n).map(|id| (id, logprob(id))).collect())
}

#[test]
fn logprobs_equal_the_definition_and_change_no_choice() {
    let close = |got: f32, want: f64| (f64::from(got) - want).abs() <= 1e-6 * (1.0 + want.abs());
    let mut ties = 0;
    for round in 0..600u64 {
        let mut rng = Seeded::new(&format!("logprobs {round}"));
        let n = [1, 2, 3, 19, 21, 64, 65, 1000, 5000][round as usize % 9];
        let spread = [0.0, 1.0, 5.0, 30.0][rng.bits() as usize % 4];
        let step = [0.0, 0.5][rng.bits() as usize % 2];
        let logits: Vec<f32> = (0..n)
            .map(|_| {
                let x = (rng.unit() + rng.unit()) * spread;
                if step > 0.0 { (x / step).round() * step } else { x }
            })
            .collect();
        let asked = [0u8, 1, 5, 20][rng.bits() as usize % 4];
        let mask: Vec<bool> = (0..n).map(|id| id % 3 != 1).collect();
        let plain = SampleParams {
            temperature: [0.0, 0.7, 3.0][round as usize % 3],
            top_p: 0.9,
            frequency_penalty: 0.5,
            logit_bias: Some(bias(&[(0, 2.0), (n as u32 / 2 + 1, -3.0)])),
            mask: (round % 2 == 0).then(|| Arc::new(TokenMask::new(&mask))),
            seed: round,
            ..params()
        };
        let counts = TokenCounts::from([(0, 1), (rng.bits() as u32 % n as u32, 2)]);
        let asking = SampleParams { logprobs: Some(asked), ..plain.clone() };
        let got = super::sample(&mut logits.clone(), &asking, &counts, round).unwrap();
        assert_eq!(Some(got.id), sample(&mut logits.clone(), &plain, &counts, round));
        let (want, top) = naive(&logits, got.id, usize::from(asked));
        let found = got.logprobs.unwrap();
        assert!(close(found.logprob, want), "round {round}: {} {want}", found.logprob);
        assert_eq!(found.top.len(), top.len(), "round {round}");
        for ((id, got), (want_id, want)) in found.top.iter().zip(&top) {
            assert_eq!(id, want_id, "round {round}: {:?} {top:?}", found.top);
            assert!(close(*got, *want), "round {round}: {got} {want}");
        }
        ties += top.windows(2).filter(|w| w[0].1 == w[1].1).count();
    }
    assert!(ties > 500, "equal logits are among the most probable: {ties}");
}

#[test]
fn logprobs_that_are_not_asked_for_are_not_given() {
    let sampled = super::sample(&mut [1.0, 2.0], &params(), &TokenCounts::new(), 0).unwrap();
    assert_eq!(sampled.logprobs, None);
    let p = SampleParams { logprobs: Some(0), ..params() };
    let sampled = super::sample(&mut [5.0], &p, &TokenCounts::new(), 0).unwrap();
    assert_eq!(sampled.logprobs, Some(Logprobs { logprob: 0.0, top: Vec::new() }));
}
