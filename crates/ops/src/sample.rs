//! The one rule by which the next token is chosen, for every device.
//!
//! Bias → penalties → temperature → top-k (by logit, equal ones: lower id first) → top-p → min-p, then a
//! draw from Philox4x32-10 whose key is `(seed, choice)` and whose counter is the index of the generated
//! token: a seeded answer is the same whatever the batch, the chunking or a restart.
//!
//! Probabilities are whole numbers ([`weight`]), so that sums are exact in any order: a device may add them
//! in parallel and needs no sort, and still chooses the same token and tells the same log-probabilities.

mod logprobs;

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Arc;

pub use logprobs::{Distribution, Logprobs, MAX_LOGPROBS};

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
    /// Added to the logits of some tokens before anything else.
    pub logit_bias: Option<Arc<LogitBias>>,
    /// Asks for the log-probability of the chosen token and of that many most probable ones, at most
    /// [`MAX_LOGPROBS`]. They never change what is chosen.
    pub logprobs: Option<u8>,
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
        logit_bias: None,
        logprobs: None,
    };

    /// Checks the ranges, for a vocabulary of `vocab` ids; the error names the parameter and the range.
    pub fn check(&self, vocab: usize) -> Result<(), String> {
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
        if let Some(n) = self.logprobs.filter(|n| *n > MAX_LOGPROBS) {
            return Err(format!("logprobs is {n}; it must lie between 0 and {MAX_LOGPROBS}"));
        }
        let last = self.logit_bias.as_ref().and_then(|bias| bias.entries().last());
        match last.filter(|(id, _)| *id as usize >= vocab) {
            Some((id, _)) => {
                Err(format!("logit_bias names token {id}; the vocabulary has {vocab} ids"))
            }
            None => Ok(()),
        }
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

    /// A bit an id, lowest first.
    pub fn words(&self) -> &[u64] {
        &self.0
    }

    /// Whether `id` is in the set.
    pub fn contains(&self, id: u32) -> bool {
        let word = self.0.get(id as usize / 64).copied().unwrap_or(0);
        word >> (id % 64) & 1 == 1
    }
}

/// Amounts that are added to the logits of some tokens, in ascending order of ids, each id once.
#[derive(Clone, Debug, PartialEq)]
pub struct LogitBias(Vec<(u32, f32)>);

impl LogitBias {
    /// Checks and sorts. An id given twice is refused: which of the two is meant is not known.
    pub fn new(entries: impl IntoIterator<Item = (u32, f32)>) -> Result<Self, String> {
        let mut entries: Vec<(u32, f32)> = entries.into_iter().collect();
        entries.sort_by_key(|(id, _)| *id);
        if let Some((id, bias)) = entries.iter().find(|(_, bias)| !(-100.0..=100.0).contains(bias))
        {
            return Err(format!(
                "the logit_bias of token {id} is {bias}; it must lie between -100 and 100"
            ));
        }
        match entries.windows(2).find(|w| w[0].0 == w[1].0) {
            Some(w) => Err(format!("logit_bias names token {} twice", w[0].0)),
            None => Ok(Self(entries)),
        }
    }

    /// Ids and amounts, in ascending order of ids.
    pub fn entries(&self) -> &[(u32, f32)] {
        &self.0
    }
}

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub id: u32,
    /// How probable the model held it and others, where [`SampleParams::logprobs`] asks for it.
    pub logprobs: Option<Logprobs>,
}

impl From<u32> for Sampled {
    fn from(id: u32) -> Self {
        Self { id, logprobs: None }
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

/// Chooses a token from `logits`, which are changed by bias, penalties and mask. `index` counts the tokens
/// generated before this one. `None` if no token may be chosen or a logit is NaN.
pub fn sample(
    logits: &mut [f32],
    params: &SampleParams,
    counts: &TokenCounts,
    index: u64,
) -> Option<Sampled> {
    let Some(n) = params.logprobs else {
        return choose(logits, params, counts, index).map(Sampled::from);
    };
    let natural = Distribution::new(logits);
    let top = natural.top(logits, n);
    // What is chosen may be a token whose logit changes.
    let bias = params.logit_bias.iter().flat_map(|bias| bias.entries());
    let changing = counts.keys().copied().chain(bias.map(|(id, _)| *id));
    let before: HashMap<u32, f32> =
        changing.filter_map(|id| Some((id, *logits.get(id as usize)?))).collect();
    let id = choose(logits, params, counts, index)?;
    let logit = before.get(&id).copied().unwrap_or(logits[id as usize]);
    Some(Sampled { id, logprobs: Some(Logprobs { logprob: natural.logprob(logit), top }) })
}

/// The rule for the token alone.
fn choose(
    logits: &mut [f32],
    params: &SampleParams,
    counts: &TokenCounts,
    index: u64,
) -> Option<u32> {
    for (id, bias) in params.logit_bias.iter().flat_map(|bias| bias.entries()) {
        if let Some(x) = logits.get_mut(*id as usize) {
            *x += bias;
        }
    }
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
mod tests;
