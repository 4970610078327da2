//! Dispatches that are cut do what they did whole, to the bit: every one that can be, into as many as there can be.

use std::sync::Arc;

use lily_conformance::Fixture;
use lily_device::{Device, Input, Limits, Output, SegmentOut, SlotId, Step};
use lily_gpu::device::Open;
use lily_gpu::{
    Buffer, CommandList, Driver, DriverError, GpuDevice, Pipeline, Placement, Platform, Profile,
    Submission, Text, Thresholds, Timing, Tuning,
};
use lily_model::Precision;
use lily_softgpu::{Options, SoftDriver};

/// Hands on lists in which dispatches are cut.
struct Cutting {
    inner: SoftDriver,
    cut: Arc<std::sync::Mutex<Vec<&'static str>>>,
}

impl Cutting {
    fn cut(&self, list: &CommandList) -> CommandList {
        let mut out = CommandList {
            inputs: list.inputs.clone(),
            outputs: list.outputs.clone(),
            ..CommandList::default()
        };
        for (i, (dispatch, pipeline)) in list.dispatches.iter().zip(&list.pipelines).enumerate() {
            if list.stages.contains(&i) {
                out.stages.push(out.dispatches.len());
            }
            let parts = dispatch.most_parts();
            if parts > 1 {
                self.cut.lock().expect("no panic").push(dispatch.kernel);
            }
            for part in 0..parts {
                let whole = dispatch.cut.is_none();
                out.dispatches.push(match whole {
                    true => dispatch.clone(),
                    false => dispatch.part(part..part + 1),
                });
                out.pipelines.push(*pipeline);
            }
        }
        out
    }
}

impl Driver for Cutting {
    fn profile(&self) -> &Profile {
        self.inner.profile()
    }

    fn allocate(&mut self, what: &str, bytes: u64, p: Placement) -> Result<Buffer, DriverError> {
        self.inner.allocate(what, bytes, p)
    }

    fn release(&mut self, buffer: Buffer) {
        self.inner.release(buffer);
    }

    fn write(&mut self, buffer: Buffer, offset: u64, bytes: &[u8]) -> Result<(), DriverError> {
        self.inner.write(buffer, offset, bytes)
    }

    fn read(&mut self, buffer: Buffer, offset: u64, bytes: &mut [u8]) -> Result<(), DriverError> {
        self.inner.read(buffer, offset, bytes)
    }

    fn pipelines(
        &mut self,
        text: &Arc<Text>,
        kernels: &[&'static str],
    ) -> Result<Vec<Pipeline>, DriverError> {
        self.inner.pipelines(text, kernels)
    }

    fn submit(&mut self, list: &Arc<CommandList>) -> Result<Submission, DriverError> {
        let cut = self.cut(list);
        self.inner.submit(&Arc::new(cut))
    }

    fn wait(&mut self, submission: Submission) -> Result<Timing, DriverError> {
        self.inner.wait(submission)
    }

    fn allocated(&self) -> u64 {
        self.inner.allocated()
    }
}

/// Logits of a prompt in two chunks.
fn logits(open: Open, profile: Profile, tuning: Tuning) -> Vec<f32> {
    let fixture = Fixture::open("tiny-c");
    let model = lily_model::load(&fixture.checkpoint, Precision::Standard).expect("it loads");
    let limits = Limits { outputs: 40, ..Limits::new(1, 256, 64) };
    let device = GpuDevice::new(profile, tuning, open);
    let mut program = device.prepare(model.plan, model.weights, limits).expect("it is prepared");
    let mut all = Vec::new();
    for chunk in fixture.tokens.chunks(23) {
        let step = Step::one(SlotId(0), Input::Tokens(chunk.to_vec()), Output::Logits);
        match &program.run(step).expect("it runs").segments[..] {
            [SegmentOut::Logits(rows)] => all.extend_from_slice(rows),
            other => panic!("{other:?}"),
        }
    }
    all
}

#[test]
fn cut_dispatches_leave_the_same_bits() {
    let options = Options::default();
    for (thresholds, tuning) in [
        (Thresholds::of(Platform::Host, ""), Tuning::default()),
        (Thresholds::of(Platform::Metal, ""), Tuning::without("adaptive_tiles").expect("known")),
    ] {
        let options = Options {
            profile: Profile { thresholds, ..options.profile.clone() },
            ..options.clone()
        };
        let profile = options.profile.clone();
        let cut = Arc::default();
        let (whole, seen) = (options.clone(), Arc::clone(&cut));
        let plain: Open = Box::new(move || Ok(Box::new(SoftDriver::new(whole.clone()))));
        let cutting: Open = Box::new(move || {
            let inner = SoftDriver::new(options.clone());
            Ok(Box::new(Cutting { inner, cut: Arc::clone(&seen) }))
        });
        let want = logits(plain, profile.clone(), tuning);
        assert!(logits(cutting, profile, tuning) == want, "other bits");
        let cut = cut.lock().expect("no panic").clone();
        for family in ["gemm_", "experts_in_", "experts_out_", "flash_attention_"] {
            assert!(cut.iter().any(|k| k.starts_with(family)), "{family} was not cut: {cut:?}");
        }
    }
}
