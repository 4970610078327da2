//! The one rule by which the next token is chosen, for every device.
//!
//! Penalties → temperature → top-k (by logit, equal ones: lower id first) → top-p → min-p, then a draw
//! from Philox4x32-10 whose key is `(seed, choice)` and whose counter is the index of the generated token:
//! a seeded answer is the same whatever the batch, the chunking or a restart.
//!
//! Probabilities are whole numbers ([`weight`]), so that sums are exact in any order: a device may add them
//! in parallel and needs no sort, and still chooses the same token.

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

/// The weight of the most probable token. 2²⁴ tokens as probable as that still sum up within 64 bits.
pub const ONE: u64 = 1 << 39;
/// Binary digits of a depth after the point.
const DEPTH_BITS: u32 = 25;

/// How far a logit lies below the largest one, as an exponent of two with 25 digits after the point; `None`
/// from 39 on, where the weight is zero. `scale` is [`depth_scale`] of the temperature.
///
/// A difference and a product, each rounded to f32: no compiler can fuse them, on any device.
pub fn depth(x: f32, max: f32, scale: f32) -> Option<u32> {
    let z = (max - x) * scale;
    (z < 39.0).then_some((z * (1u32 << DEPTH_BITS) as f32) as u32)
}

/// `log2 e / temperature`, computed once on the host. Bounded, so that no result depends on subnormals.
pub fn depth_scale(temperature: f32) -> f32 {
    ((std::f64::consts::LOG2_E / f64::from(temperature)) as f32).min((1u64 << 63) as f32)
}

/// `2^-depth` in units of 1 / [`ONE`], in whole numbers only, so that every device has the same bits:
/// a polynomial of degree 6 in the part after the point, then a shift. It never grows with the depth.
/// Relative error below 3e-8, or one unit.
pub fn weight(depth: u32) -> u64 {
    let fraction = depth << (32 - DEPTH_BITS);
    // Minimax of (1 − 2^-f) / f on 0…1, error 1.4e-9, in units of 2^-32, with alternating signs.
    const COEFFICIENTS: [u32; 6] =
        [472_172, 5_486_705, 41_155_296, 238_337_602, 1_031_757_278, 2_977_044_080];
    let mulhi = |a: u32, b: u32| ((u64::from(a) * u64::from(b)) >> 32) as u32;
    let r = COEFFICIENTS.into_iter().reduce(|r, c| c - mulhi(fraction, r)).unwrap_or(0);
    let mantissa = (1u32 << 31) - (mulhi(fraction, r) >> 1);
    (u64::from(mantissa) << 8) >> (depth >> DEPTH_BITS)
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
        let words = mask.0.iter().copied().chain(std::iter::repeat(0));
        for (xs, word) in logits.chunks_mut(64).zip(words) {
            if word == u64::MAX {
                continue;
            }
            for (bit, x) in xs.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
                    *x = f32::NEG_INFINITY;
                }
            }
        }
    }
    if logits.iter().fold(false, |any, x| any | x.is_nan()) {
        return None;
    }
    let best = argmax(logits)?;
    let max = logits[best as usize];
    if max == f32::NEG_INFINITY {
        return None;
    }
    if params.temperature == 0.0 || params.top_k == 1 || max == f32::INFINITY {
        return Some(best);
    }
    let k = params.top_k as usize;
    Some(match k > 0 && k < logits.len() {
        true => draw(logits, largest_ids(logits, k).into_iter(), max, params, index),
        false => draw(logits, 0..logits.len() as u32, max, params, index),
    })
}

/// The lowest id of the largest logit.
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let max = largest(logits);
    let found = logits.iter().position(|x| *x == max);
    // Nothing but NaN: the first.
    found.or((!logits.is_empty()).then_some(0)).map(|id| id as u32)
}

/// The largest element that is not NaN, else −∞.
fn largest(xs: &[f32]) -> f32 {
    let max = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (whole, rest) = xs.as_chunks::<16>();
    for chunk in whole {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = max(*lane, x);
        }
    }
    lanes.into_iter().chain(rest.iter().copied()).fold(f32::NEG_INFINITY, max)
}

/// Descending by logit (−0 equals 0, no NaN is left), then ascending by id.
fn order(logits: &[f32], a: u32, b: u32) -> Ordering {
    let by_logit = logits[b as usize].partial_cmp(&logits[a as usize]);
    by_logit.unwrap_or(Ordering::Equal).then(a.cmp(&b))
}

/// The ids of the `k` largest logits, in no order; none of −∞.
fn largest_ids(logits: &[f32], k: usize) -> Vec<u32> {
    // Collects what exceeds the k-th largest so far; many at once, so that each selection is cheap.
    let room = k + k.max(1024);
    let mut kept: Vec<u32> = Vec::with_capacity((room + 64).min(logits.len()));
    let mut least = f32::NEG_INFINITY;
    let trim = |kept: &mut Vec<u32>| {
        if kept.len() > k {
            kept.select_nth_unstable_by(k - 1, |a, b| order(logits, *a, *b));
            kept.truncate(k);
        }
    };
    for (block, xs) in logits.chunks(64).enumerate() {
        if largest(xs) <= least {
            continue;
        }
        let ids = (block * 64) as u32..;
        // One equal to the k-th has a higher id than all that are kept: it ranks behind them.
        kept.extend(ids.zip(xs).filter(|(_, x)| **x > least).map(|(id, _)| id));
        if kept.len() >= room {
            trim(&mut kept);
            least = logits[kept[k - 1] as usize];
        }
    }
    trim(&mut kept);
    kept
}

/// Top-p, min-p and the draw among `ids`.
///
/// Both cuts keep a prefix of the descending order, so that a prefix is known by its sum of weights alone.
/// Depths follow the order of the logits: sums over ranges of depths find the range in which a prefix ends,
/// and only that one is looked into.
fn draw(
    logits: &[f32],
    ids: impl Iterator<Item = u32> + Clone,
    max: f32,
    params: &SampleParams,
    index: u64,
) -> u32 {
    /// A range is 1/32 of a power of two.
    const RANGE_BITS: u32 = DEPTH_BITS - 5;
    let scale = depth_scale(params.temperature);
    let depth_of = |id: u32| depth(logits[id as usize], max, scale);
    let floor = (f64::from(params.min_p) * ONE as f64) as u64;
    let mut sums = [0u64; 39 << (DEPTH_BITS - RANGE_BITS)];
    let mut above_floor = 0;
    for depth in ids.clone().filter_map(depth_of) {
        let w = weight(depth);
        sums[(depth >> RANGE_BITS) as usize] += w;
        above_floor += if w >= floor { w } else { 0 };
    }
    // The last token of the shortest prefix whose weights reach `amount`, and their sum.
    let reach = |amount: u64| -> (u32, u64) {
        let (mut range, mut before) = (0, 0);
        while before + sums[range] < amount {
            before += sums[range];
            range += 1;
        }
        let inside = |id: &u32| depth_of(*id).is_some_and(|d| (d >> RANGE_BITS) as usize == range);
        let mut inside: Vec<u32> = ids.clone().filter(inside).collect();
        let sum = |ids: &[u32]| ids.iter().filter_map(|&id| depth_of(id)).map(weight).sum::<u64>();
        while inside.len() > 1 {
            let half = inside.len() / 2;
            inside.select_nth_unstable_by(half, |a, b| order(logits, *a, *b));
            let first = sum(&inside[..half]);
            if before + first >= amount {
                inside.truncate(half);
            } else {
                before += first;
                inside.drain(..half);
            }
        }
        (inside[0], before + sum(&inside))
    };
    let mut total: u64 = sums.iter().sum();
    if params.top_p < 1.0 {
        let bound = share(total, (f64::from(params.top_p) * 2f64.powi(64)) as u64);
        total = reach(bound.max(1)).1;
    }
    let total = total.min(above_floor);
    let [high, low, ..] = philox4x32(
        [params.seed as u32, params.choice],
        [index as u32, (index >> 32) as u32, (params.seed >> 32) as u32, 0],
    );
    reach(share(total, u64::from(high) << 32 | u64::from(low)) + 1).0
}

/// `total · fraction / 2^64`, rounded down.
fn share(total: u64, fraction: u64) -> u64 {
    ((u128::from(total) * u128::from(fraction)) >> 64) as u64
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
    use crate::case::Seeded;

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
        for (x, max, temperature) in [(1.0f32, 3.0f32, 1.0f32), (-7.5, 0.25, 0.7), (2.0, 2.0, 9.0)]
        {
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
        let weigh = |id: &u32| {
            depth(logits[*id as usize], max, depth_scale(p.temperature)).map_or(0, weight)
        };
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
