//! How long dispatches will take, and where a list is cut so that no command buffer takes too long.
//!
//! macOS stops a command buffer that keeps the screen waiting, after a time that it does not document. A list is cut into
//! parts that should each end well within it. The first guess is from bytes and multiply-adds; measured times of parts
//! correct it kernel by kernel.

use std::ops::Range;

/// Of a launch itself.
const LAUNCH_SECONDS: f64 = 2e-6;

/// How far a kernel's correction may go from the first guess, either way.
const MOST_CORRECTION: f64 = 64.0;

/// One dispatch, as far as its time is guessed from it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// The pipeline.
    pub pipeline: u32,
    /// Bytes read and written.
    pub traffic: u64,
    /// Multiply-adds, where they are known to matter.
    pub work: u64,
}

/// Guesses the time of dispatches.
#[derive(Clone, Debug)]
pub struct Estimator {
    bandwidth: f64,
    macs: f64,
    /// For each pipeline what its first guess is multiplied by.
    corrections: Vec<f64>,
}

impl Estimator {
    /// From bytes and multiply-adds that the device can do in a second.
    pub fn new(bandwidth: f64, macs: f64) -> Self {
        Self { bandwidth: bandwidth.max(1.0), macs: macs.max(1.0), corrections: Vec::new() }
    }

    /// Seconds of a dispatch.
    pub fn seconds(&self, cost: &Cost) -> f64 {
        let correction = self.corrections.get(cost.pipeline as usize).copied().unwrap_or(1.0);
        let guess = cost.traffic as f64 / self.bandwidth + cost.work as f64 / self.macs;
        (LAUNCH_SECONDS + guess) * correction
    }

    /// A part that was expected to take the sum of `shares` (pipeline, seconds) took `measured` seconds. Each pipeline is
    /// corrected as far as it was to blame: by all of the ratio if the part was its own.
    pub fn learn(&mut self, shares: &[(u32, f64)], measured: f64) {
        let expected: f64 = shares.iter().map(|(_, s)| s).sum();
        if !(measured > 0.0 && measured.is_finite() && expected > 0.0) {
            return;
        }
        let ratio = measured / expected;
        for (pipeline, seconds) in shares {
            let at = *pipeline as usize;
            if self.corrections.len() <= at {
                self.corrections.resize(at + 1, 1.0);
            }
            let corrected = self.corrections[at] * ratio.powf(seconds / expected);
            self.corrections[at] = corrected.clamp(1.0 / MOST_CORRECTION, MOST_CORRECTION);
        }
    }
}

/// Cuts dispatches of these `seconds`, in `stages` (the first of each), into parts of at most `limit` seconds each: between
/// stages where that is possible, within a stage where the stage alone takes longer. A dispatch is never cut.
pub fn split(seconds: &[f64], stages: &[Range<usize>], limit: f64) -> Vec<Range<usize>> {
    let mut parts: Vec<Range<usize>> = Vec::new();
    let (mut first, mut spent) = (0, 0.0);
    for stage in stages {
        let whole: f64 = seconds[stage.clone()].iter().sum();
        if first < stage.start && spent + whole > limit {
            parts.push(first..stage.start);
            (first, spent) = (stage.start, 0.0);
        }
        for i in stage.clone() {
            if i > first && spent + seconds[i] > limit {
                parts.push(first..i);
                (first, spent) = (i, 0.0);
            }
            spent += seconds[i];
        }
    }
    if first < seconds.len() {
        parts.push(first..seconds.len());
    }
    parts
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // lists of ranges
mod tests {
    use super::*;

    #[test]
    fn lists_are_cut_by_time() {
        // Seconds, stages, parts at a limit of 1.
        type Row = (&'static [f64], &'static [Range<usize>], &'static [Range<usize>]);
        let table: &[Row] = &[
            (&[], &[], &[]),
            (&[0.1], &[0..1], &[0..1]),
            (&[0.5, 0.5], &[0..1, 1..2], &[0..2]),
            (&[0.5, 0.6], &[0..1, 1..2], &[0..1, 1..2]),
            // Between stages, not in the middle of one that fits.
            (&[0.5, 0.4, 0.4], &[0..1, 1..3], &[0..1, 1..3]),
            // In the middle of a stage that does not.
            (&[0.1, 0.6, 0.6, 0.1], &[0..1, 1..3, 3..4], &[0..1, 1..2, 2..4]),
            // One dispatch is never cut.
            (&[0.1, 5.0, 0.1, 0.1], &[0..1, 1..2, 2..3, 3..4], &[0..1, 1..2, 2..4]),
            (&[3.0, 3.0], &[0..2], &[0..1, 1..2]),
        ];
        for (seconds, stages, want) in table {
            assert_eq!(split(seconds, stages, 1.0), *want, "{seconds:?} {stages:?}");
        }
    }

    #[test]
    fn parts_are_the_list() {
        let mut x = 1u64;
        let mut random = || {
            x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (x >> 40) as f64 / (1u64 << 24) as f64
        };
        for _ in 0..200 {
            let seconds: Vec<f64> = (0..40).map(|_| random()).collect();
            let mut stages: Vec<Range<usize>> = Vec::new();
            while stages.last().map_or(0, |s| s.end) < seconds.len() {
                let start = stages.last().map_or(0, |s| s.end);
                stages.push(start..(start + 1 + (random() * 4.0) as usize).min(seconds.len()));
            }
            let parts = split(&seconds, &stages, 1.5);
            assert_eq!(
                parts.iter().cloned().flatten().collect::<Vec<_>>(),
                (0..40).collect::<Vec<_>>()
            );
            for part in parts {
                let sum: f64 = seconds[part.clone()].iter().sum();
                assert!(sum <= 1.5 || part.len() == 1, "{part:?} takes {sum}");
            }
        }
    }

    fn cost(pipeline: u32, traffic: u64, work: u64) -> Cost {
        Cost { pipeline, traffic, work }
    }

    #[test]
    fn a_kernel_alone_is_known_after_one_part() {
        let mut e = Estimator::new(100e9, 1e12);
        let costs = [cost(3, 1_000_000, 0), cost(3, 0, 20_000_000_000)];
        let seconds = |e: &Estimator| costs.iter().map(|c| e.seconds(c)).sum::<f64>();
        assert!((seconds(&e) - 0.020014).abs() < 1e-9);
        for measured in [0.2, 0.05] {
            let shares: Vec<_> = costs.iter().map(|c| (c.pipeline, e.seconds(c))).collect();
            // The same pipeline twice: its shares add up.
            e.learn(&shares, measured);
            assert!((seconds(&e) / measured - 1.0).abs() < 1e-9, "{}", seconds(&e));
        }
        assert_eq!(e.seconds(&cost(2, 0, 0)), LAUNCH_SECONDS, "others stay as they are");
    }

    #[test]
    fn mixed_parts_converge() {
        // True times are 8 and 1/4 of the guess; parts mix both in different shares.
        let mut e = Estimator::new(100e9, 1e12);
        let costs = [cost(0, 0, 10_000_000_000), cost(1, 8_000_000_000, 0)];
        let truth = [8.0, 0.25];
        let first = Estimator::new(100e9, 1e12);
        for round in 0..200 {
            let counts = if round % 2 == 0 { [3.0, 1.0] } else { [1.0, 6.0] };
            let part = |of: &dyn Fn(usize) -> f64| [0, 1].map(|i| counts[i] * of(i));
            let shares = part(&|i| e.seconds(&costs[i]));
            let measured: f64 = part(&|i| first.seconds(&costs[i]) * truth[i]).iter().sum();
            e.learn(&[(0, shares[0]), (1, shares[1])], measured);
        }
        for i in 0..2 {
            let ratio = e.seconds(&costs[i]) / (first.seconds(&costs[i]) * truth[i]);
            assert!((0.95..1.05).contains(&ratio), "{i}: {ratio}");
        }
    }

    #[test]
    fn nonsense_teaches_nothing() {
        let mut e = Estimator::new(0.0, 0.0);
        let before = e.seconds(&cost(0, 1, 1));
        for measured in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            e.learn(&[(0, 1.0)], measured);
        }
        e.learn(&[], 1.0);
        e.learn(&[(0, 0.0)], 1.0);
        assert_eq!(e.seconds(&cost(0, 1, 1)), before);
        e.learn(&[(0, 1.0)], 1e9);
        assert_eq!(e.seconds(&cost(0, 1, 1)), before * MOST_CORRECTION);
    }
}
