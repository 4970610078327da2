//! Choices that are pure functions of shapes.

/// Context at which attention costs a prompt token as much as everything else. Counted, not measured: ten
/// attention layers of 16 heads of 256 elements are 164 kFLOP for each token of context, 3 G active
/// weights are 6 GFLOP a token, so the two meet near 36 Ki; rounded to a power of two.
const PARITY: usize = 32 * 1024;

/// Chunks are not made smaller than this by a long context: below it a matrix is fetched for too few rows.
pub const MIN_CHUNK: usize = 64;

/// A chunk that is made smaller has a multiple of this many tokens, which matrix units compute at once.
const GRAIN: usize = 32;

/// Tokens of the next prompt chunk after `context_so_far` tokens, where a step takes at most `max_rows`.
///
/// A chunk's time grows with `rows · (1 + context / PARITY)`; halving the rows whenever that factor doubles
/// bounds the time until the next step (and so until a cancellation is seen) and what attention needs at once.
pub fn chunk_rows(context_so_far: usize, max_rows: usize) -> usize {
    let halvings = (1 + context_so_far / PARITY).ilog2();
    let less = (max_rows >> halvings) / GRAIN * GRAIN;
    match halvings {
        0 => max_rows.max(1),
        _ => less.max(max_rows.min(MIN_CHUNK)).max(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_shrink_with_the_context() {
        const K: usize = 1024;
        let table = [
            // (context, most rows, chunk)
            (0, 512, 512),
            (1, 512, 512),
            (32 * K - 1, 512, 512),
            (32 * K, 512, 256),
            (96 * K - 1, 512, 256),
            (96 * K, 512, 128),
            (224 * K - 1, 512, 128),
            (224 * K, 512, 64),
            (480 * K, 512, 64),
            (1 << 40, 512, 64),
            (96 * K, 2048, 512),
            (96 * K, 100, 64),
            (32 * K, 500, 224),
            (32 * K, 500 * 2 + 1, 480),
            // Fewer rows than the smallest chunk are taken as they are.
            (0, 1, 1),
            (224 * K, 1, 1),
            (224 * K, 63, 63),
            (0, 0, 1),
        ];
        for (context, most, want) in table {
            assert_eq!(chunk_rows(context, most), want, "context {context}, at most {most}");
        }
    }
}
