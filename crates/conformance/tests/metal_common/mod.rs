//! What the tests on the software Metal device share.
#![allow(dead_code)] // each test uses a part

use lily_bench::synth::{Shape, Synth};
use lily_checkpoint::Checkpoint;
use lily_conformance::Fixture;
use lily_conformance::metal::profile;
use lily_device::{Device, Input, Output, SegmentOut, SlotId, Step, StepError, Ticket};
use lily_gpu::GpuDevice;
use lily_gpu::device::Open;
use lily_model::Model;
use lily_ops::sample::SampleParams;
use lily_softmetal::{Counts, Soft};

pub use lily_device::{Limits, Program};
pub use lily_gpu::Tuning;
pub use lily_model::Precision;

pub const SLOT: SlotId = SlotId(0);

pub fn limits(context: usize, rows: usize) -> Limits {
    Limits { undo: true, ..Limits::new(1, context, rows) }
}

pub fn model(fixture: &Fixture) -> Model {
    lily_model::load(&fixture.checkpoint, Precision::Standard).expect("the model loads")
}

/// A model of two layers, for many steps.
pub fn micro() -> (tempfile::TempDir, Model) {
    let shape = Shape {
        vocab_size: 128,
        hidden_size: 64,
        layers: 2,
        full_attention_interval: 2,
        experts: 4,
        stop_ids: vec![127, 126],
        ..Shape::tiny()
    };
    let dir = tempfile::tempdir().expect("a temporary folder");
    let out = dir.path().join("micro");
    Synth::new(shape).write(&out, |_, _| {}).expect("written");
    let checkpoint = Checkpoint::open(&out).expect("it opens");
    let model = lily_model::load(&checkpoint, Precision::Standard).expect("it loads");
    (dir, model)
}

pub fn prepare(open: Open, model: Model, limits: Limits) -> Box<dyn Program> {
    let device = GpuDevice::new(profile(&open), Tuning::default(), open);
    device.prepare(model.plan, model.weights, limits).expect("the plan is prepared")
}

pub fn drawn() -> SampleParams {
    SampleParams {
        temperature: 0.9,
        top_k: 40,
        top_p: 0.95,
        repetition_penalty: 1.1,
        seed: 7,
        ..SampleParams::GREEDY
    }
}

/// The ids after a prompt in two chunks, with two steps under way.
pub fn try_generate(
    program: &mut dyn Program,
    tokens: &[u32],
    params: &SampleParams,
    count: usize,
) -> Result<Vec<u32>, StepError> {
    program.reset(SLOT)?;
    let (first, rest) = tokens.split_at(tokens.len() / 2);
    program.run(Step::one(SLOT, Input::Tokens(first.to_vec()), Output::None))?;
    let step = |input| Step::one(SLOT, input, Output::Sample(params.clone()));
    let mut flights: Vec<Ticket> = vec![program.submit(step(Input::Tokens(rest.to_vec())))?];
    let mut ids = Vec::new();
    for i in 0..count {
        // A step that cannot be submitted any more leaves the other under way.
        let next = (i + 1 < count).then(|| program.submit(step(Input::LastSampled)));
        let out = program.wait(flights.remove(0));
        let next = next.transpose();
        match &out?.segments[..] {
            [SegmentOut::Sampled(sampled)] => ids.push(sampled.id),
            other => panic!("{other:?}"),
        }
        flights.extend(next?);
    }
    Ok(ids)
}

pub fn generate(
    program: &mut dyn Program,
    tokens: &[u32],
    params: &SampleParams,
    count: usize,
) -> Vec<u32> {
    try_generate(program, tokens, params, count).expect("it runs")
}

/// All buffers and other objects are gone, and no rule was broken.
#[track_caller]
pub fn nothing_is_left(soft: &Soft) {
    soft.wait_idle();
    let violations = soft.violations();
    assert!(violations.is_empty(), "{violations:?}");
    let counts = soft.counts();
    assert_eq!(counts, Counts::default(), "also objects that no pool frees");
}
