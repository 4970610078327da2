//! A slice of the real model: one recurrent layer and one with attention, at any position.

use std::sync::Arc;

use lily_bench::synth::Shape as Widths;
use lily_device::{
    Device, Input, Limits, Output, Program, SegmentOut, SlotId, Snapshot, Step, Weight,
};
use lily_gpu::{Driver, GpuDevice, Tuning};
use lily_model::{Precision, plan_of_config};
use lily_ops::case::Seeded;
use lily_ops::sample::TokenCounts;
use lily_ops::{ElementType, Plan, WeightFormat, WeightSpec};
use lily_softgpu::{Options, SoftDriver};

const SLOT: SlotId = SlotId(0);

/// Few experts and few words: nothing else is smaller than in the real model.
pub fn plan() -> Plan {
    let widths = Widths {
        experts: 16,
        vocab_size: 2048,
        full_attention_interval: 2,
        stop_ids: vec![2047, 2046],
        ..Widths::qwen3_6_35b_a3b(2)
    };
    plan_of_config("slice", &widths.config(), Precision::Standard).expect("a config").1
}

fn bf16(x: f32) -> [u8; 2] {
    ((x.to_bits() >> 16) as u16).to_le_bytes()
}

/// Random codes, and numbers of such a size that the model's stay small.
fn weight(spec: &WeightSpec, seed: u32) -> Weight {
    let count = spec.matrices * spec.rows;
    let mut word = seed.wrapping_mul(0x9E37_79B9) | 1;
    let mut codes = vec![0u8; count * spec.format.row_bytes(spec.cols)];
    let small = |word: u32| (word as f32 / u32::MAX as f32 - 0.5) * 0.1;
    for four in codes.chunks_mut(4) {
        word = word.wrapping_mul(0x0019_660D).wrapping_add(0x3C6E_F35F);
        let bytes = match spec.format {
            WeightFormat::Affine { .. } => word.to_le_bytes(),
            WeightFormat::Dense(ElementType::Bf16) => {
                let [a, b] = bf16(small(word));
                let [c, d] = bf16(small(!word));
                [a, b, c, d]
            }
            WeightFormat::Dense(_) => small(word).to_le_bytes(),
        };
        four.copy_from_slice(&bytes[..four.len()]);
    }
    let (largest, scale) = match spec.format {
        WeightFormat::Affine { bits } => (f32::from((1u16 << bits) - 1), 0.1),
        WeightFormat::Dense(_) => (1.0, 0.0),
    };
    let groups = count * spec.format.scale_bytes(spec.cols) / 2;
    let part = |x: f32| -> Arc<[u8]> { bf16(x).repeat(groups).into() };
    let scales = spec.rows * spec.format.scale_bytes(spec.cols);
    Weight {
        codes: Arc::<[u8]>::from(codes).into(),
        scales: (groups > 0).then(|| part(scale / largest).into()),
        biases: (groups > 0).then(|| part(-scale / 2.0).into()),
        strides: [spec.rows * spec.format.row_bytes(spec.cols), scales, scales],
    }
}

/// The slice with `position` tokens behind it, of which K and V are random.
pub fn program(options: Options, tuning: Tuning, position: usize) -> Box<dyn Program> {
    let plan = plan();
    let weights = plan.weights.iter().zip(1..).map(|(spec, seed)| weight(spec, seed)).collect();
    let profile = options.profile.clone();
    let open = move || Ok(Box::new(SoftDriver::new(options.clone())) as Box<dyn Driver>);
    let device = GpuDevice::new(profile, tuning, Box::new(open));
    let state = plan.state;
    let limits = Limits::new(1, position + 1, 1);
    let mut program = device.prepare(Arc::new(plan), weights, limits).expect("it is prepared");
    let kv = state.kv_layers * 2 * state.kv_heads * position * state.head_dim;
    let mut rng = Seeded::new("cache");
    let snapshot = Snapshot {
        position,
        last_sampled: Some(5),
        generated: 0,
        counts: TokenCounts::default(),
        recurrent: vec![0; state.recurrent_bytes()],
        conv: vec![0; state.recurrent_layers * state.conv_len() * 2],
        kv: (0..kv).flat_map(|_| bf16(rng.unit())).collect(),
    };
    program.restore(SLOT, &snapshot).expect("the snapshot fits");
    program
}

/// Logits of the next token.
pub fn step(program: &mut dyn Program) -> Vec<f32> {
    let step = Step::one(SLOT, Input::Tokens(vec![7]), Output::Logits);
    match program.run(step).expect("the step runs").segments.remove(0) {
        SegmentOut::Logits(logits) => logits,
        other => panic!("{other:?}"),
    }
}
