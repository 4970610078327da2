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
        cases.extend(LONG.map(|(gates, segments, shape)| long_case(gates, segments, shape)));
        cases
    }
}

/// Gates of the long cases.
#[derive(Clone, Copy, Debug)]
enum Gates {
    /// Decays near 1: what is remembered lasts.
    Mild,
    /// Decays of every size, down to 0, and learning rates of 0 and 1 among them.
    Any,
    /// Neither decay nor much that is new: all keys are alike and each token corrects what the one before it wrote.
    Alike,
}

type Long = (Gates, &'static [(usize, usize)], [usize; 4]);

/// Gates, segments, and shape (key heads, heads, dv, dk): longer than any chunk of tokens that a device may take at once, and ragged.
const LONG: [Long; 5] = [
    (Gates::Mild, &[(200, 5)], [2, 4, 64, 32]),
    (Gates::Any, &[(200, 0)], [2, 4, 64, 32]),
    (Gates::Any, &[(70, 3), (20, 1), (45, 9)], [1, 2, 64, 64]),
    (Gates::Any, &[(75, 0)], [1, 2, 128, 128]),
    (Gates::Alike, &[(100, 2)], [1, 2, 32, 64]),
];

fn long_case(gates: Gates, segments: &[(usize, usize)], shape: [usize; 4]) -> Case {
    let [key_heads, heads, dv, dk] = shape;
    let channels = 2 * key_heads * dk + heads * dv;
    let state =
        StateLayout { recurrent_layers: 2, heads, dv, dk, conv_channels: channels, ..NO_STATE };
    let rows: usize = segments.iter().map(|s| s.0).sum();
    let variant = format!("{gates:?}/{rows}/{key_heads}-{heads}x{dv}x{dk}");
    let mut b = CaseBuilder::new::<DeltaScan>(&variant, segments, state);
    let common: Vec<f32> = (0..dk).map(|_| b.rng().unit()).collect();
    let mut qkv = Vec::new();
    for _ in 0..rows {
        for head in 0..2 * key_heads {
            let own = if matches!(gates, Gates::Alike) { 0.1 } else { 1.0 };
            let x: Vec<f32> =
                common.iter().map(|c| (1.0 - own) * c + own * b.rng().unit()).collect();
            let scale = if head < key_heads { (dk as f32).sqrt().recip() } else { 1.0 };
            let norm = x.iter().map(|x| x * x).sum::<f32>().sqrt();
            qkv.extend(x.iter().map(|x| x / norm * scale));
        }
        qkv.extend(b.rng().activations(heads * dv, 0.5));
    }
    let qkv = b.input_with(Rows::Tokens, channels, HostTensor::F32(qkv));
    let mut draw = |kind: fn(Gates, u32, f32) -> f32| {
        let rng = b.rng();
        let data = (0..rows * heads)
            .map(|_| kind(gates, rng.bits() % 8, rng.unit() * 0.5 + 0.5))
            .collect();
        b.input_with(Rows::Tokens, heads, HostTensor::F32(data))
    };
    let decay = draw(|gates, kind, x| match (gates, kind) {
        (Gates::Mild, _) => 1.0 - 0.05 * x,
        (Gates::Alike, _) => 1.0 - 1e-4 * x,
        (Gates::Any, 0) => 0.0,
        (Gates::Any, 1) => (-80.0 * x).exp(),
        (Gates::Any, 2) => 1.0,
        (Gates::Any, 3 | 4) => x,
        (Gates::Any, _) => 1.0 - 0.01 * x,
    });
    let beta = draw(|gates, kind, x| match (gates, kind) {
        (Gates::Alike, _) => 1.0 - 0.01 * x,
        (Gates::Any, 0) => 0.0,
        (Gates::Any, 1) => 1.0,
        (Gates::Any, 2) => 1e-6 * x,
        _ => x,
    });
    let out = b.output(Rows::Tokens, heads * dv, ElementType::F32);
    b.build(DeltaScan { qkv, decay, beta, key_heads, layer: 1, out })
}
