//! The device's choice of tokens against the rule of `lily_ops::sample`, to the bit.

mod rig;

use std::sync::Arc;

use lily_gpu::StepShape;
use lily_gpu::kernels::common::SlotHeader;
use lily_gpu::kernels::sample::{BiasEntry, Choices, ResultEntry, SamplerEntry, finish, sample};
use lily_ops::ElementType;
use lily_ops::case::Seeded;
use lily_ops::sample::{SampleParams, TokenCounts, TokenMask, argmax};
use rig::{Rig, decode};

/// One segment.
#[derive(Clone)]
struct Draw {
    logits: Vec<f32>,
    params: SampleParams,
    counts: TokenCounts,
    bias: Vec<(u32, f32)>,
    index: u32,
}

impl Draw {
    fn want(&self) -> Option<u32> {
        let mut logits = self.logits.clone();
        for &(id, value) in &self.bias {
            logits[id as usize] += value;
        }
        lily_ops::sample::sample(&mut logits, &self.params, &self.counts, u64::from(self.index))
            .map(|sampled| sampled.id)
    }
}

/// All draws in one launch; they have one vocabulary. Also checks what a step leaves behind.
fn choose(draws: &[Draw], seed: u32) -> Vec<ResultEntry> {
    let vocab = draws[0].logits.len();
    let n = draws.len();
    let mut rig = Rig::new(seed, "softgpu");
    rig.decode_segments(n);
    let header =
        |d: &Draw| SlotHeader { position: 7, last_token: 99, generated: d.index, parity: 1 };
    let headers: Vec<SlotHeader> = draws.iter().map(header).collect();
    rig.tables.headers = rig.put(ElementType::U32, &headers);
    let mut counts = vec![0u32; n * vocab];
    let (mut masks, mut biases, mut entries) = (Vec::new(), Vec::new(), Vec::new());
    for (i, d) in draws.iter().enumerate() {
        for (&id, &count) in &d.counts {
            counts[i * vocab + id as usize] = count;
        }
        let words = vocab.div_ceil(32);
        let number = d.params.mask.as_ref().map(|mask| {
            let bit = |w: usize, b: usize| u32::from(mask.contains((w * 32 + b) as u32)) << b;
            masks.extend((0..words).map(|w| (0..32).fold(0, |word, b| word | bit(w, b))));
            (masks.len() / words - 1) as u32
        });
        let mut entry = SamplerEntry::new(&d.params, i as u32, i % 2 == 0, number);
        entry.first_bias = biases.len() as u32;
        entry.biases = d.bias.len() as u32;
        biases.extend(d.bias.iter().map(|&(id, value)| BiasEntry { id, value }));
        entries.push(entry);
    }
    let logits: Vec<f32> = draws.iter().flat_map(|d| d.logits.clone()).collect();
    let choices = Choices {
        logits: rig.f32(&logits),
        vocab: vocab as u32,
        params: rig.put(ElementType::U32, &entries),
        masks: rig.u32(&masks),
        biases: rig.put(ElementType::U32, &biases),
        counts: rig.u32(&counts),
        results: rig.room(ElementType::U32, n * size_of::<ResultEntry>() / 4),
        greedy: entries.iter().all(|e| e.greedy == 1),
    };
    let (kernels, stages) = rig.run(decode(n as u32), |r, c, s| sample(r, c, s, choices));
    assert_eq!((kernels.len(), stages), if choices.greedy { (2, 2) } else { (3, 3) });
    let results: Vec<ResultEntry> = rig.get(choices.results, n);
    let after: Vec<SlotHeader> = rig.get(rig.tables.headers, n);
    let counts_after: Vec<u32> = rig.get(choices.counts, n * vocab);
    for (i, (result, after)) in results.iter().zip(after).enumerate() {
        let mut want = headers[i];
        if i % 2 == 0 {
            (want.position, want.parity) = (8, 0);
        }
        if result.status == 0 {
            (want.last_token, want.generated) = (result.token, want.generated + 1);
            counts[i * vocab + result.token as usize] += 1;
        }
        assert_eq!(after, want, "header {i}");
    }
    assert_eq!(counts_after, counts);
    results
}

fn check(draws: &[Draw], seed: u32) -> [usize; 2] {
    let mut seen = [0; 2];
    for (i, (d, result)) in draws.iter().zip(choose(draws, seed)).enumerate() {
        let got = (result.status == 0).then_some(result.token);
        let want = d.want();
        let n = d.logits.len();
        assert_eq!(got, want, "draw {i}, {n} logits, {:?}, {:?}", d.params, d.bias);
        seen[usize::from(want != argmax(&d.logits))] += 1;
    }
    seen
}

/// A random segment: coarse steps give many equal logits, -0 among them; some are -∞.
fn random(n: usize, round: u64) -> Draw {
    let mut rng = Seeded::new(&format!("draw {n} {round}"));
    let mut unit = Seeded::new(&format!("logits {n} {round}"));
    let mut pick = |list: &[f32]| list[rng.bits() as usize % list.len()];
    let (spread, step) = (pick(&[0.0, 1.0, 6.0, 40.0, 1e30]), pick(&[0.0, 0.25, 3.0]));
    let (absent, slope) = (pick(&[0.0, 0.0, 0.1, 0.9]), pick(&[0.0, 0.0, 0.01, -0.01]));
    let logits: Vec<f32> = (0..n)
        .map(|i| {
            let x = (unit.unit() + unit.unit()) * spread + i as f32 * slope;
            let x = if step > 0.0 { (x / step).round() * step } else { x };
            if unit.unit().abs() < absent { f32::NEG_INFINITY } else { x }
        })
        .collect();
    let penalized = pick(&[0.0, 0.0, 1.0]) == 1.0;
    let params = SampleParams {
        temperature: pick(&[0.0, 0.01, 0.7, 1.0, 1.5, 100.0]),
        top_k: pick(&[0.0, 0.0, 1.0, 2.0, 5.0, 20.0, 64.0, 1500.0, 9999.0]) as u32,
        top_p: pick(&[0.0, 0.1, 0.5, 0.95, 0.999_999, 1.0, 1.0]),
        min_p: pick(&[0.0, 0.0, 0.0, 1e-9, 0.05, 0.5, 1.0]),
        repetition_penalty: if penalized { pick(&[1.0, 1.1, 0.7]) } else { 1.0 },
        presence_penalty: if penalized { pick(&[0.0, 0.3, -0.1]) } else { 0.0 },
        frequency_penalty: if penalized { pick(&[0.0, 0.1, 0.37]) } else { 0.0 },
        seed: round << 30 | round,
        choice: (round % 3) as u32,
        mask: (pick(&[0.0, 0.0, 1.0]) == 1.0).then(|| {
            let allowed: Vec<bool> = (0..n).map(|_| unit.unit() < 0.7).collect();
            Arc::new(TokenMask::new(&allowed))
        }),
        ..SampleParams::GREEDY
    };
    let some = |n: usize, unit: &mut Seeded| (unit.bits() as usize % n) as u32;
    let counts = (0..n / 3).map(|_| (some(n, &mut unit), unit.bits() % 5 + 1)).collect();
    let mut bias: Vec<(u32, f32)> = match round % 4 {
        0 => (0..n.min(9)).map(|_| (some(n, &mut unit), unit.unit() * 3.0)).collect(),
        _ => Vec::new(),
    };
    bias.sort_by_key(|(id, _)| *id);
    bias.dedup_by_key(|(id, _)| *id);
    Draw { logits, params, counts, bias, index: (round % 5) as u32 }
}

#[test]
fn draws_equal_the_rule() {
    let mut seen = [0; 2];
    for (n, rounds) in
        [(1, 30), (2, 60), (5, 200), (63, 300), (64, 200), (65, 300), (300, 500), (3000, 300)]
    {
        let draws: Vec<Draw> = (0..rounds).map(|round| random(n, round)).collect();
        let [largest, others] = check(&draws, n as u32);
        seen = [seen[0] + largest, seen[1] + others];
    }
    assert!(seen.iter().all(|n| *n > 500), "both the largest and others are drawn: {seen:?}");
}

/// Logits of which more than can be ranked at once lie in one bin: looked into by keys, then by ids.
#[test]
fn crowded_bins() {
    let mut draws = Vec::new();
    for i in 0..CROWDS.len() {
        for top_k in [0, 700, 2500] {
            draws.extend((0..4).map(|index| crowd(i, top_k, index)));
        }
    }
    check(&draws, 3);
}

/// How far the logits of a crowd lie apart.
const CROWDS: [f32; 7] = [0.0, 1e-6, 1e-3, 0.05, 1.0, 1.0, 1e-3];

fn crowd(i: usize, top_k: u32, index: u32) -> Draw {
    let mut unit = Seeded::new(&format!("crowd {i}"));
    let step = if i == 5 { 0.05 } else { 0.0 };
    let logits = (0..5000)
        .map(|_| {
            let x = unit.unit() * CROWDS[i];
            let x = if step > 0.0 { (x / step).round() * step } else { x };
            // Most are one: narrowed by keys and then by ids.
            if i == 6 && unit.unit() < 0.99 { 0.0 } else { x }
        })
        .collect();
    let temperature = if i.is_multiple_of(2) { 1.0 } else { 30.0 };
    let top_p = if i.is_multiple_of(3) { 1.0 } else { 0.6 };
    let params = SampleParams { temperature, top_k, top_p, seed: 5, ..SampleParams::GREEDY };
    Draw { logits, params, counts: TokenCounts::new(), bias: vec![], index }
}

/// Few kernel threads, for sanitizers and barriers left out.
#[test]
fn small_draws() {
    let draws: Vec<Draw> = (0..6).map(|round| random(300, round)).collect();
    check(&draws, 5);
    check(&[crowd(2, 700, 0)], 6);
    check(&[crowd(6, 2500, 1)], 7);
}

/// The real model's vocabulary.
#[test]
fn a_large_vocabulary() {
    let n = 248_320;
    let mut draws = Vec::new();
    for (i, (temperature, top_k, top_p, min_p)) in
        [(0.7, 20, 0.95, 0.0), (1.0, 0, 0.95, 0.0), (100.0, 0, 0.95, 0.0), (1.0, 0, 1.0, 0.05)]
            .into_iter()
            .enumerate()
    {
        let mut unit = Seeded::new(&format!("large {i}"));
        let logits = (0..n).map(|_| (unit.unit() + unit.unit() + unit.unit()) * 6.0).collect();
        let params =
            SampleParams { temperature, top_k, top_p, min_p, seed: 11, ..SampleParams::GREEDY };
        draws.push(Draw { logits, params, counts: TokenCounts::new(), bias: vec![], index: 2 });
    }
    check(&draws, 9);
}

#[test]
fn greedy_nan_and_nothing_allowed() {
    let plain = |logits: &[f32]| Draw {
        logits: logits.to_vec(),
        params: SampleParams::GREEDY,
        counts: TokenCounts::new(),
        bias: vec![],
        index: 0,
    };
    let mut logits = vec![0.5; 200];
    logits[131] = 3.0;
    logits[70] = 3.0;
    let mut nan = logits.clone();
    nan[199] = f32::NAN;
    let mut hidden = plain(&nan);
    let allowed: Vec<bool> = (0..200).map(|i| i != 199 && i != 70).collect();
    hidden.params.mask = Some(Arc::new(TokenMask::new(&allowed)));
    let mut none = plain(&logits);
    none.params.mask = Some(Arc::new(TokenMask::new(&[])));
    let mut infinite = logits.clone();
    infinite[150] = f32::INFINITY;
    let zero: Vec<f32> = (0..200)
        .map(|i| {
            if i == 3 {
                -0.0
            } else if i == 9 {
                0.0
            } else {
                -1.0
            }
        })
        .collect();
    let draws = [plain(&logits), plain(&nan), hidden, none, plain(&infinite), plain(&zero)];
    let got: Vec<Option<u32>> =
        choose(&draws, 1).iter().map(|r| (r.status == 0).then_some(r.token)).collect();
    assert_eq!(got, [Some(70), None, Some(131), None, Some(150), Some(3)]);
    assert_eq!(got, draws.iter().map(Draw::want).collect::<Vec<_>>());
    // The same with draws among them: three stages.
    let mut drawn = draws.to_vec();
    drawn[0].params.temperature = 1.0;
    drawn[1].params.temperature = 1.0;
    drawn[4].params.temperature = 1.0;
    check(&drawn, 2);
}

#[test]
fn a_step_without_tokens_ends() {
    let mut rig = Rig::new(1, "softgpu");
    rig.decode_segments(40);
    let headers: Vec<SlotHeader> = (0..40)
        .map(|i| SlotHeader { position: i, last_token: 5, generated: 2, parity: i % 2 })
        .collect();
    rig.tables.headers = rig.put(ElementType::U32, &headers);
    rig.run(StepShape { segments: vec![1; 40], outputs: 0, context: 1 }, |r, c, _| finish(r, c));
    let after: Vec<SlotHeader> = rig.get(rig.tables.headers, 40);
    for (i, h) in after.iter().enumerate() {
        let i = i as u32;
        assert_eq!(
            *h,
            SlotHeader { position: i + 1, last_token: 5, generated: 2, parity: 1 - i % 2 }
        );
    }
}
