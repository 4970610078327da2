//! How probable the model held tokens: of its own distribution, whatever they were chosen by.

use super::{ONE, depth, depth_scale, largest, largest_ids, order, weight};

/// Most probable tokens that can be asked for.
pub const MAX_LOGPROBS: u8 = 20;

/// Natural log-probabilities at one position: the log-softmax of the model's logits, before bias, penalties,
/// temperature, cuts and mask.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Of the chosen token.
    pub logprob: f32,
    /// The most probable tokens and theirs; equal logits: lower id first.
    pub top: Vec<(u32, f32)>,
}

/// The distribution that finite logits stand for.
///
/// Its sum is one of whole [weights](weight) at temperature 1, exact in any order, so that the last bit of a
/// log-probability depends on no device, instruction set or number of threads: within 1e-6 of the exact one,
/// relative or absolute. A token beyond 2^-39 of the most probable one adds nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Distribution {
    max: f32,
    /// Natural logarithm of the sum of e^(logit − max).
    ln_sum: f64,
}

impl Distribution {
    /// Of logits none of which is NaN or infinite.
    pub fn new(logits: &[f32]) -> Self {
        let max = largest(logits);
        let scale = depth_scale(1.0);
        let sum = logits.iter().map(|x| depth(*x, max, scale).map_or(0, weight)).sum();
        Self::from_sum(max, sum)
    }

    /// From the largest logit and the sum of the weights of all, as a device has them.
    pub fn from_sum(max: f32, sum: u64) -> Self {
        Self { max, ln_sum: (sum as f64 / ONE as f64).ln() }
    }

    /// The natural log-probability of a token by its logit.
    pub fn logprob(&self, logit: f32) -> f32 {
        (f64::from(logit) - f64::from(self.max) - self.ln_sum) as f32
    }

    /// The `n` most probable tokens; equal logits: lower id first.
    pub fn top(&self, logits: &[f32], n: u8) -> Vec<(u32, f32)> {
        let mut ids = match n {
            0 => Vec::new(),
            _ => largest_ids(logits, usize::from(n)),
        };
        ids.sort_unstable_by(|a, b| order(logits, *a, *b));
        ids.into_iter().map(|id| (id, self.logprob(logits[id as usize]))).collect()
    }
}
