use super::rms_norm::rms_norm;
use super::{expect_f32, expect_weight};
use crate::case::{Case, CaseBuilder, NO_STATE, Tolerance};
use crate::op::Contract;
use crate::plan::{Plan, Rows, StateLayout, ValueId, WeightFormat, WeightId};
use crate::reference::Reference;
use crate::tensor::{ElementType, HostTensor};

/// Rotary embedding on the first `dims` elements of a head, in half-split pairs `(i, i + dims / 2)` with
/// the angle `position · theta^(−2i / dims)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Rotated elements of a head.
    pub dims: usize,
    /// Base of the frequencies.
    pub theta: f64,
}

impl Rope {
    /// Cosines and sines of the `dims / 2` angles at `position`, computed in f64.
    pub fn angles(&self, position: usize) -> (Vec<f32>, Vec<f32>) {
        (0..self.dims / 2)
            .map(|i| {
                let angle = position as f64 * self.theta.powf(-2.0 * i as f64 / self.dims as f64);
                (angle.cos() as f32, angle.sin() as f32)
            })
            .unzip()
    }

    fn rotate(&self, x: &mut [f32], position: usize) {
        let (cos, sin) = self.angles(position);
        let half = self.dims / 2;
        for i in 0..half {
            let (a, b) = (x[i], x[i + half]);
            x[i] = a * cos[i] - b * sin[i];
            x[i + half] = a * sin[i] + b * cos[i];
        }
    }
}

/// Normalizes q and k per head, rotates both, and writes K and V to the slot's cache.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionPrep {
    /// `Tokens × 2 · heads · head_dim`: in each head the query, then the output gate.
    pub qg: ValueId,
    /// `Tokens × kv_heads · head_dim`.
    pub k: ValueId,
    /// `Tokens × kv_heads · head_dim`.
    pub v: ValueId,
    /// `[1, head_dim]`.
    pub q_norm: WeightId,
    /// `[1, head_dim]`.
    pub k_norm: WeightId,
    /// Query heads.
    pub heads: usize,
    /// Added to the mean of squares.
    pub eps: f32,
    /// Rotary embedding.
    pub rope: Rope,
    /// Attention layer whose cache it writes.
    pub layer: usize,
    /// `Tokens × heads · head_dim`: the queries.
    pub out: ValueId,
}

impl Contract for AttentionPrep {
    const NAME: &'static str = "attention_prep";

    fn reads(&self) -> Vec<ValueId> {
        vec![self.qg, self.k, self.v]
    }
    fn writes(&self) -> Vec<ValueId> {
        vec![self.out]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![self.q_norm, self.k_norm]
    }
    fn check(&self, plan: &Plan) -> Result<(), String> {
        let s = &plan.state;
        expect_f32(plan, "qg", self.qg, Rows::Tokens, 2 * self.heads * s.head_dim)?;
        expect_f32(plan, "k", self.k, Rows::Tokens, s.kv_heads * s.head_dim)?;
        expect_f32(plan, "v", self.v, Rows::Tokens, s.kv_heads * s.head_dim)?;
        expect_f32(plan, "out", self.out, Rows::Tokens, self.heads * s.head_dim)?;
        expect_weight(plan, "q_norm", self.q_norm, [1, 1, s.head_dim])?;
        expect_weight(plan, "k_norm", self.k_norm, [1, 1, s.head_dim])?;
        let rope_fits = self.rope.dims <= s.head_dim && self.rope.dims.is_multiple_of(2);
        if self.layer >= s.kv_layers || !rope_fits {
            return Err(format!(
                "layer {} of {}, {} of {} elements rotated",
                self.layer, s.kv_layers, self.rope.dims, s.head_dim
            ));
        }
        Ok(())
    }
    fn reference(&self, run: &mut Reference) {
        let s = run.plan.state;
        let (q_norm, k_norm) = (run.vector(self.q_norm), run.vector(self.k_norm));
        let prepare = |x: &[f32], w: &[f32], position: usize| {
            let mut x = rms_norm(x, Some(w), self.eps);
            self.rope.rotate(&mut x, position);
            x
        };
        let mut out = Vec::new();
        for segment in run.segments {
            let mut kv = [Vec::new(), Vec::new()];
            for row in 0..segment.rows {
                let position = run.slots[segment.slot].position + row;
                let row = segment.first + row;
                for head in run.row(self.qg, row).chunks(2 * s.head_dim) {
                    out.extend(prepare(&head[..s.head_dim], &q_norm, position));
                }
                for k in run.row(self.k, row).chunks(s.head_dim) {
                    kv[0].extend(
                        prepare(k, &k_norm, position).into_iter().map(|x| s.cache_element.round(x)),
                    );
                }
                kv[1].extend(run.row(self.v, row).iter().map(|&x| s.cache_element.round(x)));
            }
            run.append_kv(self.layer, segment.slot, kv);
        }
        run.set(self.out, HostTensor::F32(out));
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance { absolute: 1e-6, relative: 4e-6 }
    }
    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        let runs: [(&str, &[(usize, usize)]); 5] = [
            ("1@0", &[(1, 0)]),
            ("3@255", &[(3, 255)]),
            ("65@0", &[(65, 0)]),
            ("1@1000+5@40", &[(1, 1000), (5, 40)]),
            ("1@200000", &[(1, 200_000)]),
        ];
        for (name, segments) in runs {
            for (heads, kv_heads, head_dim, dims) in [(4, 2, 64, 16), (2, 1, 256, 64)] {
                let cache_element =
                    if kv_heads == 2 { ElementType::F32 } else { ElementType::Bf16 };
                if segments[0].1 > 10_000 && head_dim > 64 {
                    continue;
                }
                let state =
                    StateLayout { kv_layers: 1, kv_heads, head_dim, cache_element, ..NO_STATE };
                let variant = format!("{name}/{heads}-{kv_heads}x{head_dim}");
                let mut b = CaseBuilder::new::<Self>(&variant, segments, state);
                let qg = b.input(Rows::Tokens, 2 * heads * head_dim, 1.0);
                let k = b.input(Rows::Tokens, kv_heads * head_dim, 1.0);
                let v = b.input(Rows::Tokens, kv_heads * head_dim, 1.0);
                let norm = WeightFormat::Dense(ElementType::Bf16);
                let q_norm = b.weight(norm, 1, 1, head_dim);
                let k_norm = b.weight(norm, 1, 1, head_dim);
                let out = b.output(Rows::Tokens, heads * head_dim, ElementType::F32);
                cases.push(b.build(Self {
                    qg,
                    k,
                    v,
                    q_norm,
                    k_norm,
                    heads,
                    eps: 1e-6,
                    rope: Rope { dims, theta: 1e7 },
                    layer: 0,
                    out,
                }));
            }
        }
        cases
    }
}
