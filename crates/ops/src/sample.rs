//! The one rule by which the next token is chosen, for every device.
//!
//! Penalties → temperature → top-k (by logit, equal ones: lower id first) → top-p → min-p, then a draw
//! from Philox4x32-10 whose key is `(seed, choice)` and whose counter is the index of the generated token:
//! a seeded answer is the same whatever the batch, the chunking or a restart.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Arc;

/// How the next token is chosen from logits.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleParams {
    /// Divides the logits; 0 takes the largest logit.
    pub temperature: f32,
    /// Keep the `top_k` largest logits; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of tokens whose probability reaches `top_p`; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens of at least `min_p` times the largest probability; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens generated before; 1 is neutral.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens generated before; 0 is neutral.
    pub presence_penalty: f32,
    /// Subtracted once for each time a token was generated before; 0 is neutral.
    pub frequency_penalty: f32,
    /// Seed of the draw.
    pub seed: u64,
    /// Which of several answers to one prompt this is.
    pub choice: u32,
    /// Tokens that may be chosen; `None` allows the whole vocabulary.
    pub mask: Option<Arc<TokenMask>>,
}

impl SampleParams {
    /// Takes the largest logit.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        seed: 0,
        choice: 0,
        mask: None,
    };

    /// Checks the ranges; the error names the parameter and the range.
    pub fn check(&self) -> Result<(), String> {
        let rules = [
            ("temperature", self.temperature, 0.0..=100.0),
            ("top_p", self.top_p, 0.0..=1.0),
            ("min_p", self.min_p, 0.0..=1.0),
            ("repetition_penalty", self.repetition_penalty, 0.01..=100.0),
            ("presence_penalty", self.presence_penalty, -100.0..=100.0),
            ("frequency_penalty", self.frequency_penalty, -100.0..=100.0),
        ];
        for (name, value, range) in rules {
            if !range.contains(&value) {
                let (low, high) = (range.start(), range.end());
                return Err(format!("{name} is {value}; it must lie between {low} and {high}"));
            }
        }
        Ok(())
    }

    fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }
}

/// A set of token ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenMask(Vec<u64>);

impl TokenMask {
    /// The ids for which `allowed` is true; ids beyond it are not in the set.
    pub fn new(allowed: &[bool]) -> Self {
        let mut words = vec![0u64; allowed.len().div_ceil(64)];
        for (id, _) in allowed.iter().enumerate().filter(|(_, a)| **a) {
            words[id / 64] |= 1 << (id % 64);
        }
        Self(words)
    }

    /// Whether `id` is in the set.
    pub fn contains(&self, id: u32) -> bool {
        let word = self.0.get(id as usize / 64).copied().unwrap_or(0);
        word >> (id % 64) & 1 == 1
    }
}

/// How often each token was generated.
pub type TokenCounts = HashMap<u32, u32>;

/// `e^x` in f32 from exactly specified operations, so that every device draws alike: round `x / ln 2` to
/// the nearest integer, subtract it in two parts, a polynomial of degree 6, scale by a power of two.
/// Relative error below 2e-7; 0 below −87.
pub fn exp(x: f32) -> f32 {
    if x < -87.0 {
        return 0.0;
    }
    let n = (x * std::f32::consts::LOG2_E).round_ties_even();
    let r = n.mul_add(-0.693_145_75, x);
    let r = n.mul_add(-1.428_606_8e-6, r);
    let coefficients = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    let p = coefficients.into_iter().fold(0f32, |a, c| a.mul_add(r, c));
    p * f32::from_bits(((n as i32 + 127) as u32) << 23)
}

/// Chooses a token from `logits`, which are changed by the penalties. `index` counts the tokens generated
/// before this one. `None` if no token may be chosen or a logit is NaN.
pub fn sample(
    logits: &mut [f32],
    params: &SampleParams,
    counts: &TokenCounts,
    index: u64,
) -> Option<u32> {
    if params.has_penalties() {
        for (&id, &count) in counts {
            let Some(x) = logits.get_mut(id as usize) else {
                continue;
            };
            *x = if *x > 0.0 {
                *x / params.repetition_penalty
            } else {
                *x * params.repetition_penalty
            };
            *x -= params.presence_penalty + params.frequency_penalty * count as f32;
        }
    }
    if let Some(mask) = &params.mask {
        for (id, x) in logits.iter_mut().enumerate() {
            if !mask.contains(id as u32) {
                *x = f32::NEG_INFINITY;
            }
        }
    }
    if logits.iter().any(|x| x.is_nan()) {
        return None;
    }
    let best = argmax(logits)?;
    if logits[best as usize] == f32::NEG_INFINITY {
        return None;
    }
    let certain = logits[best as usize] == f32::INFINITY;
    if params.temperature == 0.0 || params.top_k == 1 || certain {
        return Some(best);
    }
    Some(draw(logits, best, params, index))
}

/// The lowest id of the largest logit.
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let (mut best, mut largest) = (None, f32::NEG_INFINITY);
    for (id, &x) in logits.iter().enumerate() {
        if best.is_none() || x > largest {
            (best, largest) = (Some(id as u32), x);
        }
    }
    best
}

fn draw(logits: &[f32], best: u32, params: &SampleParams, index: u64) -> u32 {
    let max = logits[best as usize];
    let probability = |id: u32| exp((logits[id as usize] - max) / params.temperature);
    let order = |a: &u32, b: &u32| {
        // No NaN is left, and −0 equals 0.
        let by_logit = logits[*b as usize].partial_cmp(&logits[*a as usize]);
        by_logit.unwrap_or(Ordering::Equal).then(a.cmp(b))
    };
    // A token whose probability rounds to zero is never drawn and adds nothing to a sum.
    let mut kept: Vec<u32> = (0..logits.len() as u32).filter(|&id| probability(id) > 0.0).collect();
    let k = params.top_k as usize;
    if k > 0 && k < kept.len() {
        kept.select_nth_unstable_by(k - 1, order);
        kept.truncate(k);
    }
    kept.sort_unstable_by(order);
    let mut p: Vec<f32> = kept.iter().map(|&id| probability(id)).collect();
    if params.top_p < 1.0 {
        let bound = params.top_p * p.iter().sum::<f32>();
        let mut sum = 0f32;
        let reached = p.iter().position(|x| {
            sum += x;
            sum >= bound
        });
        p.truncate(reached.map_or(p.len(), |i| i + 1));
    }
    let floor = params.min_p * p[0];
    let enough = p.iter().take_while(|&&x| x >= floor).count();
    p.truncate(enough.max(1));
    let [word, ..] = philox4x32(
        [params.seed as u32, params.choice],
        [index as u32, (index >> 32) as u32, (params.seed >> 32) as u32, 0],
    );
    // 24 bits: every multiple of 2^-24 below one is an f32.
    let target = (word >> 8) as f32 / (1u32 << 24) as f32 * p.iter().sum::<f32>();
    let mut sum = 0f32;
    let chosen = p.iter().position(|x| {
        sum += x;
        sum > target
    });
    kept[chosen.unwrap_or(p.len() - 1)]
}

/// Philox4x32 with 10 rounds (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011).
pub fn philox4x32(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    let (mut k, mut c) = (key, counter);
    for _ in 0..10 {
        let a = u64::from(c[0]) * 0xD251_1F53;
        let b = u64::from(c[2]) * 0xCD9E_8D57;
        c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn exponential() {
        for i in -870..=0 {
            let x = i as f32 / 10.0;
            let want = f64::from(x).exp();
            assert!((f64::from(exp(x)) - want).abs() <= 3e-7 * want, "{x}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-100.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
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
            (0..32)
                .map(|i| sample(&mut logits.clone(), &p, &TokenCounts::new(), i).unwrap())
                .collect()
        };
        assert_eq!(run(1, 0), run(1, 0));
        assert_ne!(run(1, 0), run(2, 0));
        assert_ne!(run(1, 0), run(1, 1));
        assert_ne!(run(1, 0), run(1 << 32 | 1, 0));
    }

    #[test]
    fn ranges() {
        assert!(params().check().is_ok());
        for bad in [
            SampleParams { temperature: -0.1, ..params() },
            SampleParams { temperature: f32::NAN, ..params() },
            SampleParams { top_p: 1.1, ..params() },
            SampleParams { min_p: -1.0, ..params() },
            SampleParams { repetition_penalty: 0.0, ..params() },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }
}
