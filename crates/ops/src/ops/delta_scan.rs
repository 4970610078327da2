use super::expect_f32;
use crate::case::{Case, CaseBuilder, NO_STATE, SEGMENTS, Tolerance};
use crate::op::Contract;
use crate::plan::{Plan, Rows, StateLayout, ValueId};
use crate::reference::Reference;
use crate::tensor::{ElementType, HostTensor};

/// The gated delta rule. Per value head, with the state `S` `[dv, dk]`, for each token in order:
///
/// ```text
/// S = g·S            decay
/// m = S·k            recall
/// d = (v − m)·β
/// S = S + d·kᵀ       update
/// y = S·q            read
/// ```
///
/// Value head `h` uses key head `h / (heads / key_heads)`. (Yang et al., Gated Delta Networks, 2024.)
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaScan {
    /// `Tokens × 2 · key_heads · dk + heads · dv`: normalized q and k, then v.
    pub qkv: ValueId,
    /// `Tokens × heads`: g.
    pub decay: ValueId,
    /// `Tokens × heads`: β.
    pub beta: ValueId,
    /// Key heads.
    pub key_heads: usize,
    /// Recurrent layer whose state it uses.
    pub layer: usize,
    /// `Tokens × heads · dv`: y.
    pub out: ValueId,
}

impl Contract for DeltaScan {
    const NAME: &'static str = "delta_scan";

    fn reads(&self) -> Vec<ValueId> {
        vec![self.qkv, self.decay, self.beta]
    }
    fn writes(&self) -> Vec<ValueId> {
        vec![self.out]
    }
    fn check(&self, plan: &Plan) -> Result<(), String> {
        let s = &plan.state;
        let width = 2 * self.key_heads * s.dk + s.heads * s.dv;
        expect_f32(plan, "qkv", self.qkv, Rows::Tokens, width)?;
        expect_f32(plan, "decay", self.decay, Rows::Tokens, s.heads)?;
        expect_f32(plan, "beta", self.beta, Rows::Tokens, s.heads)?;
        expect_f32(plan, "out", self.out, Rows::Tokens, s.heads * s.dv)?;
        if width != s.conv_channels {
            return Err(format!("{width} elements of q, k and v, {} channels", s.conv_channels));
        }
        if self.layer >= s.recurrent_layers || !s.heads.is_multiple_of(self.key_heads) {
            return Err(format!(
                "layer {} of {}, {} value heads on {} key heads",
                self.layer, s.recurrent_layers, s.heads, self.key_heads
            ));
        }
        Ok(())
    }
    fn reference(&self, run: &mut Reference) {
        let s = run.plan.state;
        let mut out = vec![0f32; run.rows() * s.heads * s.dv];
        for segment in run.segments {
            let at = self.layer * s.recurrent_len();
            let mut state = run.slots[segment.slot].recurrent[at..at + s.recurrent_len()].to_vec();
            for row in segment.first..segment.first + segment.rows {
                let qkv = run.row(self.qkv, row);
                let (decay, beta) = (run.row(self.decay, row), run.row(self.beta, row));
                let v = &qkv[2 * self.key_heads * s.dk..];
                for h in 0..s.heads {
                    let key_head = h / (s.heads / self.key_heads);
                    let q = &qkv[key_head * s.dk..][..s.dk];
                    let k = &qkv[(self.key_heads + key_head) * s.dk..][..s.dk];
                    for i in 0..s.dv {
                        let line = &mut state[(h * s.dv + i) * s.dk..][..s.dk];
                        line.iter_mut().for_each(|x| *x *= decay[h]);
                        let dot = |line: &[f32], x: &[f32]| -> f32 {
                            line.iter()
                                .zip(x)
                                .map(|(a, b)| f64::from(*a) * f64::from(*b))
                                .sum::<f64>() as f32
                        };
                        let recalled = dot(line, k);
                        let delta = (v[h * s.dv + i] - recalled) * beta[h];
                        line.iter_mut().zip(k).for_each(|(x, k)| *x = delta.mul_add(*k, *x));
                        out[(row * s.heads + h) * s.dv + i] = dot(line, q);
                    }
                }
            }
            run.slots[segment.slot].recurrent[at..at + s.recurrent_len()].copy_from_slice(&state);
        }
        run.set(self.out, HostTensor::F32(out));
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::F32_SUM
    }
    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for &(name, segments) in SEGMENTS {
            for (key_heads, heads, dv, dk) in [(2, 4, 64, 32), (1, 2, 128, 128)] {
                let channels = 2 * key_heads * dk + heads * dv;
                let state = StateLayout {
                    recurrent_layers: 2,
                    heads,
                    dv,
                    dk,
                    conv_channels: channels,
                    ..NO_STATE
                };
                let variant = format!("{name}/{key_heads}-{heads}x{dv}x{dk}");
                let mut b = CaseBuilder::new::<Self>(&variant, segments, state);
                let rows = b.rows();
                let qkv = b.input(Rows::Tokens, channels, 0.2);
                let gates = |b: &mut CaseBuilder, lo: f32| {
                    let data = (0..rows * heads)
                        .map(|_| lo + (1.0 - lo) * (b.rng().unit() * 0.5 + 0.5))
                        .collect();
                    b.input_with(Rows::Tokens, heads, HostTensor::F32(data))
                };
                let decay = gates(&mut b, 0.6);
                let beta = gates(&mut b, 0.0);
                let out = b.output(Rows::Tokens, heads * dv, ElementType::F32);
                cases.push(b.build(Self { qkv, decay, beta, key_heads, layer: 1, out }));
            }
        }
        cases
    }
}
