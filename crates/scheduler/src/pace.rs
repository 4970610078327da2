//! How many prompt tokens fit into a step that others wait for.

use std::time::Duration;

/// What steps have taken lately.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    /// Seconds of a step without prompt tokens.
    base: f64,
    /// Seconds that each prompt token adds.
    row: Option<f64>,
}

/// Prompts are cut at multiples of this many tokens, counted from where the state was last kept: devices with
/// matrix units compute that many at once, and bits of the recurrence hang on where such a chunk begins.
pub(crate) const GRAIN: usize = 32;

/// Tokens of the next step of a prompt, of which `until` are to be computed before its state is kept, where there is
/// room for so many. What is left is no part of a chunk alone where that can be helped.
pub(crate) fn cut(until: usize, room: usize) -> usize {
    if until <= room || room < GRAIN {
        return until.min(room);
    }
    let rows = room - room % GRAIN;
    match until - rows < GRAIN && rows > GRAIN {
        true => rows - GRAIN,
        false => rows,
    }
}

/// Prompt tokens of the first step that others wait for, before anything was measured.
const FIRST: usize = 64;

impl Pace {
    /// Takes note of a step with `rows` prompt tokens. Slower than known counts at once, faster by and by:
    /// the next step must not be too long.
    pub fn learn(&mut self, rows: usize, seconds: f64) {
        let known = |old: f64, new: f64| if new > old { new } else { 0.8 * old + 0.2 * new };
        if rows == 0 {
            // A step of a few decoding rows can be disturbed: half of a jump is believed.
            self.base = if self.base == 0.0 { seconds } else { 0.5 * (self.base + seconds) };
            return;
        }
        let row = (seconds - self.base).max(seconds * 0.1) / rows as f64;
        self.row = Some(self.row.map_or(row, |old| known(old, row)));
    }

    /// Prompt tokens of a step that is to take `delay`: at least `min`, at most `max`.
    pub fn rows(&self, delay: Duration, min: usize, max: usize) -> usize {
        let rows = match self.row {
            None => FIRST,
            Some(row) if row > 0.0 => ((delay.as_secs_f64() - self.base).max(0.0) / row) as usize,
            Some(_) => max,
        };
        rows.max(min).min(max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DELAY: Duration = Duration::from_millis(200);

    #[test]
    fn chunks_follow_the_measured_time() {
        let mut pace = Pace::default();
        assert_eq!(pace.rows(DELAY, 16, 512), FIRST);
        assert_eq!(pace.rows(DELAY, 16, 40), 40);
        pace.learn(0, 0.05);
        // 1 ms a token above the 50 ms of the weights.
        pace.learn(64, 0.05 + 0.064);
        assert!((149..=150).contains(&pace.rows(DELAY, 16, 512)));
        // Four times as slow: believed at once.
        pace.learn(100, 0.05 + 0.4);
        assert_eq!(pace.rows(DELAY, 16, 512), 37);
        assert_eq!(pace.rows(DELAY, 64, 512), 64);
        // Fast again: by and by.
        pace.learn(37, 0.05 + 0.037);
        let next = pace.rows(DELAY, 16, 512);
        assert!((38..60).contains(&next), "{next}");
        for _ in 0..40 {
            pace.learn(100, 0.05 + 0.1);
        }
        assert!((145..=150).contains(&pace.rows(DELAY, 16, 512)));
        // Decoding alone takes as long as the bound: the least is still granted.
        for _ in 0..10 {
            pace.learn(0, 0.3);
        }
        assert_eq!(pace.rows(DELAY, 16, 512), 16);
    }

    #[test]
    fn prompts_are_cut_into_whole_chunks() {
        for (until, room, rows) in [
            (10, 0, 0),
            (10, 100, 10),
            (100, 100, 100),
            (1000, 100, 96),
            (1000, 64, 64),
            (1000, 63, 32),
            // Not 96 and a rest of 4.
            (100, 96, 64),
            (127, 96, 64),
            (128, 96, 96),
            // There is no other way.
            (40, 33, 32),
            (40, 31, 31),
            (1000, 16, 16),
        ] {
            assert_eq!(cut(until, room), rows, "{until} {room}");
        }
        // Whatever the rooms are, from 32 on: the same chunks.
        for total in 64..400 {
            for room in 64..130 {
                let mut left = total;
                while left > 0 {
                    let rows = cut(left, room);
                    assert!(rows > 0 && rows <= room);
                    assert!(rows == left || rows.is_multiple_of(GRAIN) && left - rows >= GRAIN);
                    left -= rows;
                }
            }
        }
    }

    #[test]
    fn immeasurably_fast_is_no_division_by_zero() {
        let mut pace = Pace::default();
        pace.learn(64, 0.0);
        assert_eq!(pace.rows(DELAY, 16, 512), 512);
    }
}
