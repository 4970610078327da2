//! What a step would dispatch on a device that need not be there.

use std::collections::BTreeMap;

use lily_device::Limits;
use lily_ops::plan::PAGE_TOKENS;
use lily_ops::{ElementType, Op, Plan};

use crate::kernels::common::StepShape;
use crate::program::{Head, Kind, Recording, bucket};

/// A recorded step in numbers: launches, stages and scratch of the list that a real step runs, which is recorded for its context's bucket, a power
/// of two; bytes of the context itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepReport {
    /// Kernel launches.
    pub dispatches: usize,
    /// Stages, each waiting for the one before it.
    pub stages: usize,
    /// Distinct bytes that each dispatch reads and writes, summed.
    pub bytes: u64,
    /// Weights, state, and K/V, each once.
    pub bytes_floor: u64,
    /// Bytes of scratch.
    pub scratch: u64,
    /// Launches and bytes of each operation or fused chain.
    pub operations: BTreeMap<&'static str, (usize, u64)>,
}

/// The decode step of one token that makes a slot `context` tokens long.
pub fn decode(recording: &Recording, context: usize) -> Result<StepReport, String> {
    report(recording, 1, context)
}

/// The last chunk of `rows` tokens of a prompt of `context`.
pub fn prefill(recording: &Recording, rows: usize, context: usize) -> Result<StepReport, String> {
    report(recording, rows, context)
}

fn report(recording: &Recording, rows: usize, context: usize) -> Result<StepReport, String> {
    let record = |context: usize| {
        let pages = context.div_ceil(PAGE_TOKENS).max(1);
        let limits = Limits { pages, ..Limits::new(1, context, rows) };
        let shape = StepShape { segments: vec![rows as u32], outputs: 1, context: context as u32 };
        let kind = Kind { shape, tables: 0, head: Head::Sample { greedy: true } };
        recording.record_virtual(&limits, &kind)
    };
    let (list, scratch) = record(bucket(context))?;
    let (exact, _) = record(context)?;
    let mut report = StepReport {
        dispatches: list.dispatches.len(),
        stages: list.stages.len(),
        bytes_floor: floor(recording.plan(), rows, context),
        scratch,
        ..StepReport::default()
    };
    for dispatch in &list.dispatches {
        report.operations.entry(dispatch.op).or_default().0 += 1;
    }
    for dispatch in &exact.dispatches {
        report.bytes += dispatch.traffic;
        report.operations.entry(dispatch.op).or_default().1 += dispatch.traffic;
    }
    Ok(report)
}

/// Bytes that a step of `rows` tokens must move: each weight that it uses, once; the state, read and
/// written; K and V of all tokens but its own read, its own written.
fn floor(plan: &Plan, rows: usize, context: usize) -> u64 {
    let mut weights = 0;
    for node in plan.nodes() {
        for (w, bytes) in node.op.weight_bytes_per_token(plan) {
            let per_row = plan.weight(w).matrices > 1 || matches!(node.op, Op::Embed(_));
            weights += match per_row {
                true => plan.weight(w).bytes().min(bytes * rows as u64),
                false => bytes,
            };
        }
    }
    let s = &plan.state;
    let conv = s.recurrent_layers * s.conv_len() * ElementType::Bf16.size();
    let state = 2 * (s.recurrent_bytes() + conv) as u64;
    let kv = (s.kv_layers * 2 * s.kv_heads * s.head_dim * ElementType::Bf16.size()) as u64;
    weights + state + kv * (context as u64 + 1)
}
