use super::{expect_f32, expect_weight, silu};
use crate::case::{Case, CaseBuilder, NO_STATE, SEGMENTS, Tolerance};
use crate::op::Contract;
use crate::plan::{Plan, Rows, StateLayout, ValueId, WeightFormat, WeightId};
use crate::reference::Reference;
use crate::tensor::{ElementType, HostTensor};

/// Causal depthwise convolution over the last taps, then silu:
/// `out_t[c] = silu(Σ_j w[c, j] · x_{t − taps + 1 + j}[c])`; the last tap multiplies the current token.
///
/// The inputs are rounded to the state's element type before use, so that it makes no difference whether
/// an earlier row comes from this step or from the state. The state keeps the last `taps − 1` inputs.
#[derive(Clone, Debug, PartialEq)]
pub struct CausalConv {
    /// `Tokens × channels`.
    pub x: ValueId,
    /// `[channels, taps]`.
    pub weight: WeightId,
    /// Recurrent layer whose state it uses.
    pub layer: usize,
    /// `Tokens × channels`.
    pub out: ValueId,
}

impl Contract for CausalConv {
    const NAME: &'static str = "causal_conv";

    fn reads(&self) -> Vec<ValueId> {
        vec![self.x]
    }
    fn writes(&self) -> Vec<ValueId> {
        vec![self.out]
    }
    fn weights(&self) -> Vec<WeightId> {
        vec![self.weight]
    }
    fn check(&self, plan: &Plan) -> Result<(), String> {
        let s = &plan.state;
        expect_f32(plan, "x", self.x, Rows::Tokens, s.conv_channels)?;
        expect_f32(plan, "out", self.out, Rows::Tokens, s.conv_channels)?;
        expect_weight(plan, "weight", self.weight, [1, s.conv_channels, s.conv_taps])?;
        match self.layer < s.recurrent_layers {
            true => Ok(()),
            false => Err(format!("recurrent layer {} does not exist", self.layer)),
        }
    }
    fn reference(&self, run: &mut Reference) {
        let s = run.plan.state;
        let (spec, w) = run.weight(self.weight);
        let taps: Vec<Vec<f32>> = (0..s.conv_channels).map(|c| w.row(spec, 0, c)).collect();
        let mut out = vec![0f32; run.rows() * s.conv_channels];
        for segment in run.segments {
            let at = self.layer * s.conv_len();
            let mut history = run.slots[segment.slot].conv[at..at + s.conv_len()].to_vec();
            for row in segment.first..segment.first + segment.rows {
                history.extend(run.row(self.x, row).iter().map(|&x| s.cache_element.round(x)));
                for c in 0..s.conv_channels {
                    let sum = (0..s.conv_taps)
                        .fold(0f32, |a, j| taps[c][j].mul_add(history[j * s.conv_channels + c], a));
                    out[row * s.conv_channels + c] = silu(sum);
                }
                history.drain(..s.conv_channels);
            }
            run.slots[segment.slot].conv[at..at + s.conv_len()].copy_from_slice(&history);
        }
        run.set(self.out, HostTensor::F32(out));
    }
    fn tolerance(&self) -> Tolerance {
        Tolerance::F32
    }
    fn cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for &(name, segments) in SEGMENTS {
            for cache_element in [ElementType::Bf16, ElementType::F32] {
                let state = StateLayout {
                    recurrent_layers: 2,
                    heads: 2,
                    conv_channels: 96,
                    cache_element,
                    ..NO_STATE
                };
                let mut b =
                    CaseBuilder::new::<Self>(&format!("{name}/{cache_element:?}"), segments, state);
                let x = b.input(Rows::Tokens, 96, 1.0);
                let weight = b.weight(WeightFormat::Dense(ElementType::Bf16), 1, 96, 4);
                let out = b.output(Rows::Tokens, 96, ElementType::F32);
                cases.push(b.build(Self { x, weight, layer: 1, out }));
            }
        }
        cases
    }
}
