//! Where a step's kernels change with its rows, and whether they should change elsewhere on this device.

use std::path::Path;
use std::sync::Arc;

use lily_bench::{Clock, SystemClock, timed};
use lily_device::{Input, Limits, Output, Program, SlotId, Step};
use lily_model::Precision;
use serde_json::json;

use super::{Outcome, Part};
use crate::model::open_checkpoint;
use crate::options::ComputeArgs;

const SLOT: SlotId = SlotId(0);

/// Both sides of each change: vectors of up to 8 rows, tiles of 16 rows and of 32, whole blocks and tails.
const ROWS: &[usize] = &[1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64];

/// Timed runs of each; the median counts.
const ROUNDS: usize = 7;

/// Less than this much faster is noise.
const NOISE: f64 = 0.03;

/// Median seconds of a step of `rows` tokens from an empty slot on.
fn step(program: &mut dyn Program, rows: usize, clock: &dyn Clock) -> anyhow::Result<f64> {
    let vocab = program.plan().vocab;
    let ids: Vec<u32> = (0..rows).map(|i| ((i * 7 + 3) % vocab) as u32).collect();
    let mut times = Vec::new();
    // Recorded in the first, warm after the second.
    for round in 0..ROUNDS + 2 {
        program.reset(SLOT)?;
        let step = Step::one(SLOT, Input::Tokens(ids.clone()), Output::None);
        let (ran, seconds) = timed(clock, || program.run(step));
        ran?;
        if round >= 2 {
            times.push(seconds);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[ROUNDS / 2])
}

/// Pairs of neighbouring row counts of which the larger takes less time.
fn inversions(times: &[(usize, f64)]) -> Vec<(usize, usize, f64)> {
    let pairs = times.windows(2).map(|pair| (pair[0].0, pair[1].0, pair[1].1 / pair[0].1 - 1.0));
    pairs.filter(|(_, _, gain)| *gain < -NOISE).collect()
}

/// Times steps of few to many rows. Nothing here can fail: it proposes.
pub fn rows(compute: &ComputeArgs, folder: &Path) -> anyhow::Result<Part> {
    if !folder.join("config.json").exists() {
        return Ok(Part::left_out("there is no checkpoint to measure with"));
    }
    let model = lily_model::load(&open_checkpoint(Some(folder))?, Precision::Standard)?;
    let limits = Limits::new(1, 256, 64);
    let mut program = compute.device()?.prepare(Arc::clone(&model.plan), model.weights, limits)?;
    let clock = SystemClock::new();
    let mut times = Vec::new();
    for &rows in ROWS {
        times.push((rows, step(&mut *program, rows, &clock)?));
    }
    let mut lines: Vec<String> =
        times.iter().map(|(rows, s)| format!("{rows:>3} rows {:>9.3} ms", 1e3 * s)).collect();
    let inversions = inversions(&times);
    lines.extend(inversions.iter().map(|(fewer, more, gain)| {
        format!(
            "{more} rows take {:.1} % less than {fewer}: what begins at {more} should begin earlier here",
            -100.0 * gain
        )
    }));
    if inversions.is_empty() {
        lines.push("more rows never take less time: no change of kernels comes too late".into());
    }
    let seconds: Vec<_> = times.iter().map(|(r, s)| json!({ "rows": r, "seconds": s })).collect();
    Ok(Part { outcome: Outcome::Passed, lines, figures: json!({ "steps": seconds }) })
}

#[cfg(test)]
mod tests {
    use super::inversions;

    #[test]
    fn a_change_that_comes_too_late_is_seen() {
        assert_eq!(inversions(&[(1, 1.0), (8, 2.0), (9, 2.0), (16, 1.99)]), []);
        let found = inversions(&[(1, 1.0), (8, 2.0), (9, 1.5), (16, 1.6)]);
        assert_eq!(found, [(8, 9, -0.25)]);
    }
}
