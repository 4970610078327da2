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
    /// Multiply-adds.
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

    /// Seconds of a dispatch: those of its bytes and of its multiply-adds one after the other, at most twice the longer of them.
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

/// Threadgroups of a dispatch, along the dimension that it can be cut in.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// The dispatch.
    pub dispatch: usize,
    /// Its threadgroups; all of one that cannot be cut.
    pub groups: Range<u32>,
    /// What they are expected to take.
    pub seconds: f64,
}

/// The pieces of a dispatch of these `seconds`, of at most `limit` seconds each where its threadgroups (`most_parts` along the
/// dimension that it can be cut in) allow.
fn pieces(dispatch: usize, seconds: f64, most_parts: u32, limit: f64) -> Vec<Piece> {
    let fit = (f64::from(most_parts) * limit / seconds.max(1e-12)).floor();
    let each = if fit >= 1.0 { fit.min(f64::from(most_parts)) as u32 } else { 1 };
    let piece = |start: u32| {
        let end = (start + each).min(most_parts);
        let share = f64::from(end - start) / f64::from(most_parts);
        Piece { dispatch, groups: start..end, seconds: seconds * share }
    };
    (0..most_parts).step_by(each as usize).map(piece).collect()
}

/// Cuts a list of dispatches (seconds, most parts), in `stages`, into command buffers of at most `limit` seconds each, as far as they can be
/// cut: a dispatch that alone takes longer becomes several.
pub fn command_buffers(
    dispatches: &[(f64, u32)],
    stages: impl Iterator<Item = Range<usize>>,
    limit: f64,
) -> Vec<Vec<Piece>> {
    let mut all: Vec<Piece> = Vec::new();
    let mut stages_of_pieces = Vec::new();
    for stage in stages {
        let first = all.len();
        for i in stage {
            let (seconds, most_parts) = dispatches[i];
            all.extend(pieces(i, seconds, most_parts, limit));
        }
        stages_of_pieces.push(first..all.len());
    }
    let seconds: Vec<f64> = all.iter().map(|p| p.seconds).collect();
    let parts = split(&seconds, &stages_of_pieces, limit);
    parts.into_iter().map(|part| all[part].to_vec()).collect()
}

/// Cuts dispatches of these `seconds`, in `stages` (the first of each), into parts of at most `limit` seconds each: between
/// stages where that is possible, within a stage where the stage alone takes longer.
fn split(seconds: &[f64], stages: &[Range<usize>], limit: f64) -> Vec<Range<usize>> {
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
            // One that is longer alone is a part of its own.
            (&[0.1, 5.0, 0.1, 0.1], &[0..1, 1..2, 2..3, 3..4], &[0..1, 1..2, 2..4]),
            (&[3.0, 3.0], &[0..2], &[0..1, 1..2]),
        ];
        for (seconds, stages, want) in table {
            assert_eq!(split(seconds, stages, 1.0), *want, "{seconds:?} {stages:?}");
        }
    }

    #[test]
    fn a_dispatch_that_is_too_long_is_cut() {
        // Seconds and threadgroups of one dispatch, threadgroups of its pieces at a limit of 1.
        let table: &[(f64, u32, &[Range<u32>])] = &[
            (0.5, 8, &[0..8]),
            (1.0, 8, &[0..8]),
            (2.0, 8, &[0..4, 4..8]),
            (2.1, 8, &[0..3, 3..6, 6..8]),
            // No finer than its threadgroups.
            (9.0, 3, &[0..1, 1..2, 2..3]),
            (9.0, 1, &[0..1]),
            (0.0, 4, &[0..4]),
        ];
        for (seconds, groups, want) in table {
            let got = pieces(3, *seconds, *groups, 1.0);
            let ranges: Vec<_> = got.iter().map(|p| p.groups.clone()).collect();
            assert_eq!(ranges, *want, "{seconds} in {groups}");
            let sum: f64 = got.iter().map(|p| p.seconds).sum();
            assert!((sum - seconds).abs() < 1e-9);
        }
    }

    #[test]
    fn pieces_keep_to_their_stages() {
        let dispatches = [(0.2, 1), (2.5, 10), (0.1, 1), (0.3, 4)];
        let buffers = command_buffers(&dispatches, [0..1, 1..3, 3..4].into_iter(), 1.0);
        let text: Vec<Vec<(usize, Range<u32>)>> = buffers
            .iter()
            .map(|b| b.iter().map(|p| (p.dispatch, p.groups.clone())).collect())
            .collect();
        let want = [
            vec![(0, 0..1)],
            vec![(1, 0..4)],
            vec![(1, 4..8)],
            vec![(1, 8..10), (2, 0..1), (3, 0..4)],
        ];
        assert_eq!(text, want);
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
