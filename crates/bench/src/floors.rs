//! Floors: the least time that a machine needs for a point, from the plan's bytes and multiplications.

use lily_ops::plan::PAGE_TOKENS;
use lily_ops::{Op, Plan};

use crate::engine::Point;

/// What the machine can do at best.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Bytes read from memory in a second.
    pub bytes_per_second: f64,
    /// Multiply-adds in a second.
    pub macs_per_second: f64,
    /// How the two are known.
    pub how: String,
}

/// What a point cannot do without.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Bytes moved: weights used, recurrent state read and written, K and V.
    pub bytes: f64,
    /// Multiply-adds.
    pub macs: f64,
}

impl Work {
    /// Of a point of a plan: each weight that is used once a step, for prefill one step for the whole prompt.
    pub fn of(plan: &Plan, point: Point) -> Self {
        match point {
            Point::Prefill { tokens } => step(plan, tokens, tokens),
            Point::Decode { context, tokens } => (1..=tokens).fold(Self::default(), |sum, i| {
                let one = step(plan, 1, context + i);
                Self { bytes: sum.bytes + one.bytes, macs: sum.macs + one.macs }
            }),
        }
    }

    /// The least time it takes: that of the bytes or that of the multiplications, whichever is longer.
    pub fn seconds(&self, limits: &Limits) -> f64 {
        (self.bytes / limits.bytes_per_second).max(self.macs / limits.macs_per_second)
    }
}

/// A step of `rows` tokens of one slot that makes it `context` tokens long, with logits for the last one.
fn step(plan: &Plan, rows: usize, context: usize) -> Work {
    let mut work = Work::default();
    let nodes = plan.body.iter().map(|n| (n, rows)).chain(plan.head.iter().map(|n| (n, 1)));
    for (node, rows) in nodes {
        for (w, bytes) in node.op.weight_bytes_per_token(plan) {
            let weight = plan.weight(w);
            let embed = matches!(node.op, Op::Embed(_));
            // Rows of an embedding and experts of a stack: each token may use others.
            let per_row = weight.matrices > 1 || embed;
            let rows = rows as f64;
            work.bytes += match per_row {
                true => (bytes as f64 * rows).min(weight.bytes() as f64),
                false => bytes as f64,
            };
            if !embed {
                let elements = (weight.matrices * weight.rows * weight.cols) as f64;
                work.macs += rows * elements * (bytes as f64 / weight.bytes() as f64);
            }
        }
        let s = &plan.state;
        match &node.op {
            // Keys seen by each row, summed; scores and values.
            Op::Attention(a) => {
                let first = (context - rows) as f64;
                let keys = rows as f64 * first + (rows * (rows + 1)) as f64 / 2.0;
                work.macs += 2.0 * keys * (a.heads * s.head_dim) as f64;
            }
            // Recall, update, read.
            Op::DeltaScan(_) => work.macs += 3.0 * (rows * s.recurrent_len()) as f64,
            _ => {}
        }
    }
    let s = &plan.state;
    let kv_token = (s.page_bytes() / PAGE_TOKENS) as f64;
    work.bytes += 2.0 * (s.recurrent_bytes() + s.conv_bytes()) as f64;
    work.bytes += kv_token * (context + rows - 1) as f64;
    work
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::{Shape, Synth};

    fn plan() -> Plan {
        Synth::new(Shape::qwen3_6_35b_a3b(40)).plan().unwrap()
    }

    #[test]
    fn a_decoded_token_of_the_real_model() {
        let plan = plan();
        let work = Work::of(&plan, Point::Decode { context: 4096, tokens: 1 });
        // Weights; state of 30 layers of 32 × 128 × 128 f32 and 3 × 8192 bf16, twice; 20,480 bytes of K and V a
        // token, 4,096 read and one written.
        let state = 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2);
        let want = 1_669_561_728u64 + 2 * state + 20_480 * 4097;
        assert_eq!(work.bytes, want as f64);
        // Matrices of 2.96 G weights, attention over 4,097 keys, three passes over the state.
        let attention = 10.0 * 2.0 * 4097.0 * 16.0 * 256.0;
        let scan = 30.0 * 3.0 * 32.0 * 128.0 * 128.0;
        let matrices = work.macs - attention - scan;
        assert!((2.9e9..3.1e9).contains(&matrices), "{matrices}");
        let two = Work::of(&plan, Point::Decode { context: 4096, tokens: 2 });
        assert_eq!(two.bytes, 2.0 * work.bytes + 20_480.0);
    }

    #[test]
    fn a_prompt_reads_each_weight_once_and_multiplies_for_each_token() {
        let plan = plan();
        let work = |tokens| Work::of(&plan, Point::Prefill { tokens });
        // All experts are used; the embedding's rows are not all.
        let all: u64 = plan.weights.iter().map(|w| w.bytes()).sum();
        let short = work(2048);
        assert!(short.bytes > 0.95 * all as f64 && short.bytes < 1.02 * all as f64);
        assert!(work(4096).macs > 2.0 * short.macs);
        // 4.9 GFLOP a token without lm_head, attention aside.
        let token = (short.macs - 10.0 * 2.0 * 16.0 * 256.0 * 2048.0 * 2049.0 / 2.0) / 2048.0;
        assert!((2.4e9..2.6e9).contains(&token), "{token}");
    }

    #[test]
    fn the_longer_of_the_two_is_the_floor() {
        let limits = Limits { bytes_per_second: 10.0, macs_per_second: 100.0, how: String::new() };
        assert_eq!(Work { bytes: 20.0, macs: 100.0 }.seconds(&limits), 2.0);
        assert_eq!(Work { bytes: 20.0, macs: 400.0 }.seconds(&limits), 4.0);
    }
}
