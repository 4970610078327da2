//! A router that prefers some experts.

use super::fill::Stream;

/// Highest share of tokens that one expert is given. A router without a bias chooses an expert for less
/// than half of all tokens, however large its row.
pub const MAX_SHARE: f64 = 0.4;

/// Share of the tokens that select the expert of each rank: proportional to `rank^-skew` (ranks from 1),
/// none above [`MAX_SHARE`], `experts_per_token` in sum.
pub fn expert_shares(experts: usize, experts_per_token: usize, skew: f64) -> Vec<f64> {
    let even = experts_per_token as f64 / experts as f64;
    if even >= MAX_SHARE {
        return vec![even; experts];
    }
    let weights: Vec<f64> = (1..=experts).map(|rank| (rank as f64).powf(-skew)).collect();
    // Experts at the cap are the first ones; what is left is shared out among the others.
    for capped in 0..experts {
        let left = experts_per_token as f64 - MAX_SHARE * capped as f64;
        let scale = left / weights[capped..].iter().sum::<f64>();
        if scale * weights[capped] <= MAX_SHARE {
            let share = |rank: usize| match rank < capped {
                true => MAX_SHARE,
                false => scale * weights[rank],
            };
            return (0..experts).map(share).collect();
        }
    }
    vec![even; experts]
}

/// Factors by which the router's rows are lengthened, by expert; the ranks are dealt out at random.
///
/// The logits of a row of length σ are N(0, σ²) over tokens, and an expert is selected where its logit
/// passes a threshold t. It passes for a share p of the tokens if `σ = t / Φ⁻¹(1 − p)`. Nothing depends on
/// the depth of the layer, and which tokens select an expert stays random.
pub(super) fn row_gains(
    experts: usize,
    experts_per_token: usize,
    skew: f64,
    stream: Stream,
) -> Vec<f64> {
    let even = experts_per_token as f64 / experts as f64;
    if skew == 0.0 || even >= MAX_SHARE {
        return vec![1.0; experts];
    }
    let threshold = normal_quantile(1.0 - even);
    let mut gains: Vec<f64> = expert_shares(experts, experts_per_token, skew)
        .iter()
        .map(|share| threshold / normal_quantile(1.0 - share))
        .collect();
    for i in (1..experts).rev() {
        gains.swap(i, (stream.word(i as u64) % (i as u64 + 1)) as usize);
    }
    gains
}

/// Φ⁻¹ for p in (0.5, 1): Abramowitz and Stegun 26.2.23, absolute error below 4.5e-4.
fn normal_quantile(p: f64) -> f64 {
    let t = (-2.0 * (1.0 - p).ln()).sqrt();
    let numerator = 2.515_517 + t * (0.802_853 + t * 0.010_328);
    let denominator = 1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308));
    t - numerator / denominator
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles() {
        for (p, want) in [(0.6, 0.253_347), (0.968_75, 1.862_732), (0.999, 3.090_232)] {
            assert!((normal_quantile(p) - want).abs() < 5e-4, "{p}");
        }
    }

    #[test]
    fn shares_sum_up_and_fall() {
        for (experts, k) in [(256, 8), (16, 2), (16, 4), (32, 8)] {
            for skew in [0.0, 0.5, 1.0, 3.0] {
                let shares = expert_shares(experts, k, skew);
                let sum: f64 = shares.iter().sum();
                assert!((sum - k as f64).abs() < 1e-9, "{experts} {k} {skew}: {sum}");
                assert!(shares.windows(2).all(|w| w[0] >= w[1]));
                assert!(shares[0] <= MAX_SHARE + 1e-12);
                assert!(skew == 0.0 || shares[0] > shares[experts - 1]);
            }
        }
        assert_eq!(expert_shares(4, 2, 1.0), [0.5; 4]);
    }
}
