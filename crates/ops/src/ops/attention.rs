use super::expect_f32;
use crate::case::{Case, CaseBuilder, NO_STATE, Tolerance};
use crate::op::Contract;
use crate::plan::{Plan, Rows, StateLayout, ValueId};
use crate::reference::Reference;
use crate::tensor::{ElementType, HostTensor};

/// Keys of one block of the blockwise softmax; blocks lie at absolute positions.
pub const BLOCK_TOKENS: usize = 64;

/// Causal attention: `out = softmax(q·Kᵀ / sqrt(head_dim)) · V` over the slot's cache up to the row's own
/// position. Query head `h` uses KV head `h / (heads / kv_heads)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// `Tokens × heads · head_dim`.
    pub q: ValueId,
    /// Query heads.
    pub heads: usize,
    /// Attention layer whose cache it reads.
    pub layer: usize,
    /// `Tokens × heads · head_dim`.
    pub out: ValueId,
}

impl Contract for Attention {
    const NAME: &'static str = "attention";

    fn reads(&self) -> Vec<ValueId> {
        vec![self.q]
    }
    fn writes(&self) -> Vec<ValueId> {
        vec![self.out]
    }
    fn check(&self, plan: &Plan) -> Result<(), String> {
        let s = &plan.state;
        expect_f32(plan, "q", self.q, Rows::Tokens, self.heads * s.head_dim)?;
        expect_f32(plan, "out", self.out, Rows::Tokens, self.heads * s.head_dim)?;
        if self.layer >= s.kv_layers || !self.heads.is_multiple_of(s.kv_heads) {
            return Err(format!(
                "layer {} of {}, {} heads on {} KV heads",
                self.layer, s.kv_layers, self.heads, s.kv_heads
            ));
        }
        Ok(())
    }
    fn reference(&self, run: &mut Reference) {
        let s = run.plan.state;
        let scale = (s.head_dim as f64).powf(-0.5);
        let mut out = Vec::new();
        for segment in run.segments {
            let [k, v] = run.kv(self.layer, segment.slot);
            for row in 0..segment.rows {
                let visible = run.slots[segment.slot].position + row + 1;
                let q = run.row(self.q, segment.first + row);
                for h in 0..self.heads {
                    let kv_head = h / (self.heads / s.kv_heads);
                    let q = &q[h * s.head_dim..][..s.head_dim];
                    let at = |t: usize| (t * s.kv_heads + kv_head) * s.head_dim;
                    let scores: Vec<f64> = (0..visible)
                        .map(|t| {
                            let dot: f64 = k[at(t)..][..s.head_dim]
                                .iter()
                                .zip(q)
                                .map(|(k, q)| f64::from(*k) * f64::from(*q))
                                .sum();
                            dot * scale
                        })
                        .collect();
                    let max = scores.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x));
                    let sum: f64 = scores.iter().map(|x| (x - max).exp()).sum();
                    let mut o = vec![0f64; s.head_dim];
                    for (t, score) in scores.iter().enumerate() {
                        let p = (score - max).exp() / sum;
                        o.iter_mut().zip(&v[at(t)..]).for_each(|(o, v)| *o += p * f64::from(*v));
                    }
                    out.extend(o.iter().map(|&x| x as f32));
                }
            }
        }
        run.set(self.out, HostTensor::F32(out));
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::F32_SUM
    }
    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        let runs: [(&str, &[(usize, usize)]); 7] = [
            ("1@0", &[(1, 0)]),
            ("1@63", &[(1, 63)]),
            ("1@300", &[(1, 300)]),
            ("5@62", &[(5, 62)]),
            ("65@0", &[(65, 0)]),
            ("70@250", &[(70, 250)]),
            ("1@520+3@7+1@0", &[(1, 520), (3, 7), (1, 0)]),
        ];
        for (name, segments) in runs {
            for (heads, kv_heads, head_dim) in [(8, 2, 64), (8, 1, 256)] {
                for cache_element in [ElementType::F32, ElementType::Bf16] {
                    let state =
                        StateLayout { kv_layers: 2, kv_heads, head_dim, cache_element, ..NO_STATE };
                    let variant = format!("{name}/{heads}-{kv_heads}x{head_dim}/{cache_element:?}");
                    // The cache of a case already holds the rows' own K and V.
                    let cached: Vec<(usize, usize)> =
                        segments.iter().map(|&(rows, start)| (rows, start + rows)).collect();
                    let mut b = CaseBuilder::new::<Self>(&variant, &cached, state);
                    let q = b.input(Rows::Tokens, heads * head_dim, 1.0);
                    let out = b.output(Rows::Tokens, heads * head_dim, ElementType::F32);
                    let mut case = b.build(Self { q, heads, layer: 1, out });
                    for (slot, &(_, start)) in case.slots.iter_mut().zip(segments) {
                        slot.position = start;
                    }
                    cases.push(case);
                }
            }
        }
        cases
    }
}
