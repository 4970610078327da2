//! Where a step's kernels change with its rows, whether they should change elsewhere on this device, and how many rows a prompt's
//! steps should have.

use std::sync::Arc;

use lily_bench::{Clock, SystemClock, timed};
use lily_device::{Device, Input, Limits, Output, PrepareError, Program, SlotId, Step};
use lily_model::{Model, Precision};
use serde_json::{Value, json};

use super::measure::Measure;
use super::{Outcome, Part, Progress};
use crate::model::open_checkpoint;
use crate::options::ComputeArgs;

const SLOT: SlotId = SlotId(0);

/// Both sides of each change: vectors of up to 8 rows, tiles of 16 rows and of 32, whole blocks and tails.
const ROWS: &[usize] = &[1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64];

/// Rows of a prompt's steps, as `--chunk` sets them.
const CHUNKS: &[usize] = &[128, 256, 512, 1024, 2048, 4096];

/// Timed runs of each; the median counts.
const ROUNDS: usize = 7;
const CHUNK_ROUNDS: usize = 3;

/// Less than this much faster is noise.
pub const NOISE: f64 = 0.03;

/// Median seconds of a step of `rows` tokens from an empty slot on.
fn step(
    program: &mut dyn Program,
    rows: usize,
    rounds: usize,
    clock: &dyn Clock,
) -> anyhow::Result<f64> {
    let vocab = program.plan().vocab;
    let ids: Vec<u32> = (0..rows).map(|i| ((i * 7 + 3) % vocab) as u32).collect();
    let mut times = Vec::new();
    // Recorded in the first, warm after the second.
    for round in 0..rounds + 2 {
        program.reset(SLOT)?;
        let step = Step::one(SLOT, Input::Tokens(ids.clone()), Output::None);
        let (ran, seconds) = timed(clock, || program.run(step));
        ran?;
        if round >= 2 {
            times.push(seconds);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[rounds / 2])
}

/// Pairs of neighbouring row counts of which the larger takes less time.
fn inversions(times: &[(usize, f64)]) -> Vec<(usize, usize, f64)> {
    let pairs = times.windows(2).map(|pair| (pair[0].0, pair[1].0, pair[1].1 / pair[0].1 - 1.0));
    pairs.filter(|(_, _, gain)| *gain < -NOISE).collect()
}

/// The fewest rows that take hardly more time a row than the best do.
fn best_chunk(times: &[(usize, f64)]) -> Option<usize> {
    let per_row = |(rows, seconds): &(usize, f64)| seconds / *rows as f64;
    let least = times.iter().map(per_row).min_by(f64::total_cmp)?;
    let good = times.iter().find(|t| per_row(t) <= least * (1.0 + NOISE));
    good.map(|(rows, _)| *rows)
}

fn prepare(
    device: &dyn Device,
    model: &Model,
    rows: usize,
) -> Result<Box<dyn Program>, PrepareError> {
    let limits = Limits::new(1, rows.max(256), rows);
    device.prepare(Arc::clone(&model.plan), model.weights.clone(), limits)
}

fn figures(few: &[(usize, f64)], chunks: &[(usize, f64)]) -> Value {
    let table = |times: &[(usize, f64)]| -> Vec<Value> {
        times.iter().map(|(r, s)| json!({ "rows": r, "seconds": s })).collect()
    };
    json!({ "steps": table(few), "chunks": table(chunks), "best_chunk": best_chunk(chunks) })
}

fn lines(few: &[(usize, f64)], chunks: &[(usize, f64)]) -> Vec<String> {
    let mut lines: Vec<String> =
        few.iter().map(|(rows, s)| format!("{rows:>4} rows {:>9.3} ms", 1e3 * s)).collect();
    let inversions = inversions(few);
    lines.extend(inversions.iter().map(|(fewer, more, gain)| {
        format!(
            "{more} rows take {:.1} % less than {fewer}: what begins at {more} should begin earlier here",
            -100.0 * gain
        )
    }));
    if inversions.is_empty() {
        lines.push("more rows never take less time: no change of kernels comes too late".into());
    }
    lines.extend(chunks.iter().map(|(rows, s)| {
        format!("{rows:>4} rows {:>9.3} ms, {:.0} tokens/s", 1e3 * s, *rows as f64 / s)
    }));
    lines.extend(
        best_chunk(chunks).map(|n| format!("a prompt's steps should have {n} rows: --chunk {n}")),
    );
    lines
}

/// Times steps of few to many rows. It proposes; what it finds is no failure.
pub fn rows(
    compute: &ComputeArgs,
    measure: &Measure,
    progress: &mut Progress,
) -> anyhow::Result<Part> {
    if let Some(part) = measure.missing() {
        return Ok(part);
    }
    let deadline = measure.deadline();
    let model = lily_model::load(&open_checkpoint(Some(measure.folder()))?, Precision::Standard)?;
    let (device, clock) = (compute.device()?, SystemClock::new());
    let (mut few, mut chunks, mut cut) = (Vec::new(), Vec::new(), Vec::new());
    let mut program = prepare(&*device, &model, 64)?;
    for &rows in ROWS {
        match deadline.is_over() {
            true => cut.push(deadline.cut(&format!("{rows} rows"))),
            false => few.push((rows, step(&mut *program, rows, ROUNDS, &clock)?)),
        }
    }
    progress.found(figures(&few, &chunks))?;
    drop(program);
    for &rows in CHUNKS.iter().filter(|n| **n <= measure.longest()) {
        if deadline.is_over() {
            cut.push(deadline.cut(&format!("{rows} rows")));
            continue;
        }
        let mut program = match prepare(&*device, &model, rows) {
            Ok(program) => program,
            Err(PrepareError::OutOfMemory(why)) => {
                cut.push(format!("{rows} rows: not measured: {why}"));
                break;
            }
            Err(e) => return Err(e.into()),
        };
        chunks.push((rows, step(&mut *program, rows, CHUNK_ROUNDS, &clock)?));
        progress.found(figures(&few, &chunks))?;
    }
    let outcome = if cut.is_empty() { Outcome::Passed } else { Outcome::Unfinished };
    let mut lines = lines(&few, &chunks);
    lines.extend(cut);
    Ok(Part { outcome, lines, figures: figures(&few, &chunks) })
}

#[cfg(test)]
mod tests {
    use super::{best_chunk, inversions};

    #[test]
    fn a_change_that_comes_too_late_is_seen() {
        assert_eq!(inversions(&[(1, 1.0), (8, 2.0), (9, 2.0), (16, 1.99)]), []);
        let found = inversions(&[(1, 1.0), (8, 2.0), (9, 1.5), (16, 1.6)]);
        assert_eq!(found, [(8, 9, -0.25)]);
    }

    #[test]
    fn steps_are_no_longer_than_they_must_be() {
        assert_eq!(best_chunk(&[(128, 2.0), (256, 2.0), (512, 3.98), (1024, 7.9)]), Some(256));
        assert_eq!(best_chunk(&[(128, 2.0), (256, 2.0), (512, 3.0)]), Some(512));
        assert_eq!(best_chunk(&[]), None);
    }
}
