//! Normalized and rotated q and k, and K and V in their pages.

use lily_ops::ops::AttentionPrep;

use super::AttentionPrepArgs;
use crate::kernels::common::{Context, DeviceWeight};
use crate::list::{Access, Binding, Operand, Recorder};

/// Operands of [`AttentionPrep`].
#[derive(Clone, Copy, Debug)]
pub struct Prep<'a> {
    /// bf16 `rows × 2 · heads · head_dim`: in each head the query, then its gate.
    pub qg: Operand,
    /// bf16 `rows × kv_heads · head_dim`.
    pub k: Operand,
    /// bf16 `rows × kv_heads · head_dim`.
    pub v: Operand,
    /// Weights of the queries' norm.
    pub q_norm: &'a DeviceWeight,
    /// Weights of the keys' norm.
    pub k_norm: &'a DeviceWeight,
    /// KV heads.
    pub kv_heads: u32,
    /// bf16 `rows × heads · head_dim`.
    pub out: Operand,
}

/// Heads of a threadgroup: one simdgroup each.
const HEADS_A_GROUP: u32 = 4;

/// Records the preparation: one dispatch, or the chain of its parts if [`fuse_qk_prep`] is off.
///
/// [`fuse_qk_prep`]: crate::Tuning::fuse_qk_prep
pub fn attention_prep(r: &mut Recorder, c: &Context, op: &AttentionPrep, x: &Prep) {
    let args = AttentionPrepArgs {
        heads: op.heads as u32,
        kv_heads: x.kv_heads,
        max_pages: c.tables.max_pages,
        rope_dims: op.rope.dims as u32,
        q_norm: x.q_norm.matrix.codes,
        k_norm: x.k_norm.matrix.codes,
        eps: op.eps,
    };
    let read = |operand| Binding::new(operand, Access::Read);
    let constant = |operand| Binding::new(operand, Access::Constant);
    let write = |operand| Binding::new(operand, Access::Write);
    let t = c.tables;
    let [keys, values] = t.kv[op.layer].map(write);
    let (q_norm, k_norm, rope) =
        (constant(x.q_norm.slab), constant(x.k_norm.slab), constant(t.rope));
    let place = [read(t.row_segments), read(t.segments), read(t.headers)];
    let pages = read(t.pages);
    let rows = u64::from(c.step.rows());
    let groups = |heads: u32| [heads.div_ceil(HEADS_A_GROUP), c.step.rows(), 1];
    let threads = 32 * HEADS_A_GROUP;
    // Distinct bytes: half of qg is gates, which nobody reads here.
    let head = u64::from(c.shape.head_dim) * 2;
    let (q, kv) = (rows * op.heads as u64 * head, rows * u64::from(x.kv_heads) * head);
    let (norm, turn) = (2 * head, rows * op.rope.dims as u64 * 4);
    if c.tuning.fuse_qk_prep {
        let bindings = [read(x.qg), read(x.k), read(x.v), q_norm, k_norm, rope]
            .into_iter()
            .chain(place)
            .chain([pages, write(x.out), keys, values])
            .collect();
        let all = groups(args.heads + 2 * args.kv_heads);
        let traffic = 2 * q + 4 * kv + 2 * norm + turn;
        r.dispatch("attention_prep", all, threads, bindings, &args, traffic);
        return;
    }
    let (q_groups, kv_groups) = (groups(args.heads), groups(args.kv_heads));
    let mut chain = |kernel, groups, first: Vec<Binding>, middle: &[Binding], last, traffic| {
        let bindings = first.into_iter().chain(middle.iter().cloned()).chain([last]).collect();
        r.dispatch(kernel, groups, threads, bindings, &args, traffic);
    };
    let paged = [place.as_slice(), &[pages]].concat();
    let out = write(x.out);
    chain("attention_norm_q", q_groups, vec![read(x.qg), q_norm], &[], out.clone(), 2 * q + norm);
    let k = vec![read(x.k), k_norm];
    chain("attention_norm_k", kv_groups, k, &paged, keys.clone(), 2 * kv + norm);
    let rotated = |all: u64| all * op.rope.dims as u64 / u64::from(c.shape.head_dim);
    let turned = 2 * rotated(q) + turn;
    chain("attention_rotate_q", q_groups, vec![rope.clone()], &place, out, turned);
    let turned = 2 * rotated(kv) + turn;
    chain("attention_rotate_k", kv_groups, vec![rope], &paged, keys, turned);
    chain("attention_write_v", kv_groups, vec![read(x.v)], &paged, values, 2 * kv);
}
