//! Expert routing: softmax, top-k, renormalization, and the grouping of routed rows by expert.

use super::common::{SharedMut, blocks, load_n, store_n};
use crate::pool::Pool;
use crate::simd::{Isa, Simd, math};
use crate::simd_entry;

/// Chooses `top_k` experts for each row of `logits` (`[rows][experts]`).
///
/// `ids` and `weights` are `[rows][top_k]`, by descending probability, of equal ones the lower id first.
/// A weight is the softmax probability over all experts divided by the sum of the chosen ones. A row with
/// a NaN or +inf logit gets valid ids and NaN weights.
pub fn route(
    isa: Isa,
    pool: &Pool,
    experts: usize,
    top_k: usize,
    logits: &[f32],
    ids: &mut [u32],
    weights: &mut [f32],
) {
    assert!(0 < top_k && top_k <= experts && logits.len().is_multiple_of(experts));
    let rows = logits.len() / experts;
    assert!(ids.len() == rows * top_k && weights.len() == rows * top_k);
    let blocks = blocks(rows, experts * 4);
    let (ids, weights) = (SharedMut::new(ids), SharedMut::new(weights));
    pool.run(blocks.count, &|task, _| {
        let mut probabilities = vec![0.0; experts];
        for row in blocks.range(task) {
            // SAFETY: each task has its own rows.
            let ids = unsafe { ids.slice(row * top_k, top_k) };
            // SAFETY: each task has its own rows.
            let weights = unsafe { weights.slice(row * top_k, top_k) };
            softmax(isa, &logits[row * experts..][..experts], &mut probabilities);
            select(&probabilities, ids, weights);
        }
    });
}

simd_entry! {
    /// Softmax of one row.
    fn softmax(x: &[f32], p: &mut [f32]) = softmax_kernel;
}

#[inline(always)]
unsafe fn softmax_kernel<S: Simd>(x: &[f32], p: &mut [f32]) {
    // SAFETY: only the instruction set is at stake, and the partial accesses stay inside the slices.
    unsafe {
        let lowest = S::splat(f32::NEG_INFINITY);
        let mut max = lowest;
        let whole = x.len() / 16 * 16;
        for x in x[..whole].chunks_exact(16) {
            max = S::max(S::load(x.as_ptr()), max);
        }
        let tail = x[whole..].iter().fold(f32::NEG_INFINITY, |m, &v| m.max(v));
        let max = S::splat(S::reduce_max(max).max(tail));
        let mut sum = S::splat(0.0);
        for (x, p) in x.chunks(16).zip(p.chunks_mut(16)) {
            store_n::<S>(p, math::exp::<S>(S::sub(load_n::<S>(x), max)));
            // The lanes past a short tail count as 0.
            sum = S::add(sum, load_n::<S>(p));
        }
        let sum = S::splat(S::reduce_add(sum));
        for p in p.chunks_mut(16) {
            store_n::<S>(p, S::div(load_n::<S>(p), sum));
        }
    }
}

/// The `ids.len()` largest probabilities in descending order, renormalized.
fn select(p: &[f32], ids: &mut [u32], weights: &mut [f32]) {
    let k = ids.len();
    let mut chosen = 0;
    for (id, &p) in p.iter().enumerate() {
        // NaN sorts below every probability, so that k ids are always found.
        let key = if p.is_nan() { -1.0 } else { p };
        if chosen == k && key <= weights[k - 1] {
            continue;
        }
        let mut at = if chosen < k { chosen } else { k - 1 };
        while at > 0 && weights[at - 1] < key {
            weights[at] = weights[at - 1];
            ids[at] = ids[at - 1];
            at -= 1;
        }
        weights[at] = key;
        ids[at] = id as u32;
        chosen = (chosen + 1).min(k);
    }
    let mut sum = 0.0;
    for (&id, w) in ids.iter().zip(&mut *weights) {
        *w = p[id as usize];
        sum += *w;
    }
    weights.iter_mut().for_each(|w| *w /= sum);
}

/// Routed rows grouped by expert, for the grouped linear.
#[derive(Clone, Debug, Default)]
pub struct ExpertGroups {
    offsets: Vec<u32>,
    routed: Vec<u32>,
}

impl ExpertGroups {
    /// Regroups `ids` (`[rows][top_k]`, each below `experts`) by a stable counting sort; keeps its memory.
    pub fn build(&mut self, ids: &[u32], experts: usize) {
        self.offsets.clear();
        self.offsets.resize(experts + 1, 0);
        for &id in ids {
            self.offsets[id as usize + 1] += 1;
        }
        for e in 0..experts {
            self.offsets[e + 1] += self.offsets[e];
        }
        self.routed.clear();
        self.routed.resize(ids.len(), 0);
        // Each offset serves as its group's cursor, ends at the group's end, and is shifted back after.
        for (i, &id) in ids.iter().enumerate() {
            let cursor = &mut self.offsets[id as usize];
            self.routed[*cursor as usize] = i as u32;
            *cursor += 1;
        }
        self.offsets.copy_within(0..experts, 1);
        self.offsets[0] = 0;
    }

    /// Makes room for `routed` rows of `experts` experts.
    pub fn reserve(&mut self, routed: usize, experts: usize) {
        self.offsets.reserve_exact(experts + 1);
        self.routed.reserve_exact(routed);
    }

    /// Bytes that the lists have taken.
    pub fn allocated(&self) -> usize {
        (self.offsets.capacity() + self.routed.capacity()) * size_of::<u32>()
    }

    /// Start of each expert's group in [`routed`](Self::routed), then the total: `experts + 1` entries.
    pub fn offsets(&self) -> &[u32] {
        &self.offsets
    }

    /// Routed rows (`row * top_k + rank`) by expert, ascending in each group.
    pub fn routed(&self) -> &[u32] {
        &self.routed
    }

    /// Routed rows of one expert.
    pub fn group(&self, expert: usize) -> &[u32] {
        &self.routed[self.offsets[expert] as usize..self.offsets[expert + 1] as usize]
    }
}
