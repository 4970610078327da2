//! Memory that no cache holds, and reading it.

use std::hint::black_box;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lily_cpu::pool::Pool;

/// Noise, handed out piece by piece from its beginning to its end and over again. At even places it is also bf16 of
/// about 0.01: numbers that are none, or almost none, can be slower.
#[derive(Clone)]
pub struct Cold {
    bytes: Arc<Vec<u8>>,
    next: usize,
}

impl Cold {
    pub fn new(bytes: usize) -> Self {
        let mut state = 1u64;
        let words = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            ((state >> 8) & 0x80FF_80FF_80FF_80FF | 0x3C00_3C00_3C00_3C00).to_le_bytes()
        });
        let noise = words.take(bytes.div_ceil(8)).flatten().collect();
        Self { bytes: Arc::new(noise), next: 0 }
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The next so many bytes, an even number.
    pub fn piece(&mut self, bytes: usize) -> Range<usize> {
        if self.next + bytes > self.len() {
            self.next = 0;
        }
        let piece = self.next..self.next + bytes;
        self.next = piece.end;
        piece
    }
}

/// Reads each stream in `tasks` equal parts, side by side: task i the i-th part of each.
pub fn read(pool: &Pool, streams: &[&[u8]], tasks: usize) {
    let total = AtomicU64::new(0);
    pool.run(tasks, &|task, _| {
        let parts: Vec<&[u8]> = streams.iter().map(|s| &s[part(s.len(), task, tasks)]).collect();
        total.fetch_add(sums(&parts), Ordering::Relaxed);
    });
    black_box(total.into_inner());
}

/// The sum of all words of some streams.
pub fn sums(streams: &[&[u8]]) -> u64 {
    streams.iter().map(|s| sum(s)).fold(0, u64::wrapping_add)
}

/// The task-th of equal parts of a length, all of which together are the whole.
pub fn part(len: usize, task: usize, tasks: usize) -> Range<usize> {
    len * task / tasks..len * (task + 1) / tasks
}

/// The sum of all words, and of the bytes behind them.
fn sum(bytes: &[u8]) -> u64 {
    let (blocks, rest) = bytes.as_chunks::<128>();
    let mut sums = [0u64; 16];
    for block in blocks {
        for (sum, word) in sums.iter_mut().zip(block.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
        }
    }
    let rest = rest.iter().map(|b| u64::from(*b));
    sums.into_iter().chain(rest).fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_the_whole() {
        for (len, tasks) in [(0, 3), (10, 3), (3, 10), (1000, 16)] {
            let parts: Vec<usize> = (0..tasks).flat_map(|t| part(len, t, tasks)).collect();
            assert_eq!(parts, (0..len).collect::<Vec<_>>());
        }
    }

    #[test]
    fn every_byte_is_read() {
        let mut bytes = vec![0u8; 1000];
        for at in 0..1000 {
            bytes[at] = 1;
            assert_ne!(sum(&bytes), 0, "byte {at}");
            bytes[at] = 0;
        }
    }

    #[test]
    fn pieces_go_round() {
        let mut cold = Cold::new(100);
        assert_eq!(cold.len(), 104);
        let pieces: Vec<usize> = (0..4).map(|_| cold.piece(40).start).collect();
        assert_eq!(pieces, [0, 40, 0, 40]);
        assert!(cold.bytes().iter().any(|b| *b != 0));
    }
}
