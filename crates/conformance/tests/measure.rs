//! Steps whose operations are timed: the same results, and each operation accounted for. On the CPU and on the shared
//! GPU kernels; with LILY_GPU=cuda or LILY_GPU=metal on the GPU of this machine.

use lily_conformance::Fixture;
use lily_cpu::{CpuDevice, CpuOptions};
use lily_device::{
    Device, Input, Inside, Limits, Measure, OperationTime, OperationTimes, Output, Program,
    SegmentOut, SlotId, Step, StepError,
};
use lily_gpu::program::Recording;
use lily_gpu::{GpuDevice, Profile, Tuning};
use lily_model::Precision;
use lily_ops::sample::SampleParams;

const SLOT: SlotId = SlotId(0);

fn gpu() -> GpuDevice {
    lily_conformance::gpu::device(Tuning::default())
}

fn program(device: &dyn Device) -> (Fixture, Box<dyn Program>) {
    let fixture = Fixture::open("tiny-a");
    let model = lily_model::load(&fixture.checkpoint, Precision::Standard).expect("it loads");
    let limits = Limits { undo: true, ..Limits::new(1, 512, 64) };
    let program = device.prepare(model.plan, model.weights, limits).expect("it is prepared");
    (fixture, program)
}

fn sampled(program: &mut dyn Program, input: Input) -> u32 {
    let params = SampleParams { temperature: 0.8, presence_penalty: 0.5, ..SampleParams::GREEDY };
    let step = Step::one(SLOT, input, Output::Sample(params));
    match &program.run(step).expect("the step runs").segments[..] {
        [SegmentOut::Sampled(token)] => token.id,
        other => panic!("{other:?}"),
    }
}

/// A prompt in two chunks, then some tokens; the state after it.
fn answer(program: &mut dyn Program, tokens: &[u32]) -> (Vec<u32>, lily_device::Snapshot) {
    program.reset(SLOT).expect("the slot exists");
    program.begin_answer(SLOT, &[3, 4]).expect("the slot is empty");
    let head = Step::one(SLOT, Input::Tokens(tokens[..12].to_vec()), Output::None);
    program.run(head).expect("the step runs");
    let mut ids = vec![sampled(program, Input::Tokens(tokens[12..24].to_vec()))];
    ids.extend((0..2).map(|_| sampled(program, Input::LastSampled)));
    (ids, program.snapshot(SLOT).expect("the slot is usable"))
}

/// Each kind with the steps of which it is measured.
fn same_results(device: &dyn Device, kinds: &[(Measure, u64)]) {
    let (fixture, mut program) = program(device);
    let want = answer(&mut *program, &fixture.tokens);
    for (kind, steps) in kinds {
        program.measure(*kind).expect("it can be measured");
        let got = answer(&mut *program, &fixture.tokens);
        assert_eq!(got.0, want.0, "{kind:?}");
        assert!(got.1 == want.1, "{kind:?}: another state");
        let times = program.operation_times();
        assert_eq!((times.steps, times.trouble), (*steps, None));
    }
    program.measure(Measure::Nothing).expect("it can be ended");
    assert!(answer(&mut *program, &fixture.tokens) == want, "afterwards");
    assert_eq!(program.operation_times().steps, 0, "nothing is measured any more");
}

#[test]
fn measuring_changes_no_result_on_the_cpu() {
    let device = CpuDevice::new(CpuOptions { threads: Some(2), isa: None });
    same_results(&device, &[(Measure::Operations, 4)]);
    let (_, mut program) = program(&device);
    for what in [Measure::Twins, Measure::Cache] {
        let refused = program.measure(what);
        assert!(matches!(refused, Err(StepError::Refused(_))), "{refused:?}");
    }
}

#[test]
fn measuring_changes_no_result_on_the_gpu_kernels() {
    let kinds = [(Measure::Operations, 4), (Measure::Twins, 4), (Measure::Cache, 2)];
    same_results(&gpu(), &kinds);
}

#[test]
fn the_cpu_accounts_for_each_operation_of_a_plan() {
    let device = CpuDevice::new(CpuOptions { threads: Some(2), isa: None });
    let (fixture, mut program) = program(&device);
    program.measure(Measure::Operations).expect("it can be measured");
    let before = program.counters();
    let step = Step::one(
        SLOT,
        Input::Tokens(fixture.tokens[..8].to_vec()),
        Output::Sample(SampleParams::GREEDY),
    );
    program.run(step).expect("the step runs");
    let times = program.operation_times();
    let calls = |name: &str| {
        times.operations.iter().find(|t| t.operation == name).map_or(0, |t| t.calls as usize)
    };
    for node in program.plan().nodes() {
        let name = node.op.name();
        let want = program.plan().nodes().filter(|n| n.op.name() == name).count();
        assert_eq!(calls(name), want, "{name}");
    }
    assert_eq!(calls("sample and score"), 1);
    let sum: f64 = times.sum();
    assert!(times.operations.iter().all(|t| t.seconds > 0.0) && sum <= times.seconds, "{times:?}");
    let bytes: u64 = times.operations.iter().map(|t| t.bytes).sum();
    let counted: u64 = program
        .counters()
        .weight_bytes
        .iter()
        .zip(&before.weight_bytes)
        .map(|(after, before)| after - before)
        .sum();
    assert_eq!(bytes, counted);
}

#[test]
fn the_gpu_accounts_for_each_launch() {
    let device = gpu();
    let profile: Profile = device.profile().clone();
    let (fixture, mut program) = program(&device);
    let first = Input::Tokens(fixture.tokens[..8].to_vec());
    program
        .run(Step::one(SLOT, first, Output::Sample(SampleParams::GREEDY)))
        .expect("the step runs");
    program.measure(Measure::Twins).expect("it can be measured");
    let step = Step::one(SLOT, Input::LastSampled, Output::Sample(SampleParams::GREEDY));
    program.run(step).expect("the step runs");
    let times = program.operation_times();
    // The same step on a device that is not there: contexts are recorded for powers of two, here all there is.
    let recording = Recording::virtual_of(program.plan(), &Tuning::default(), &profile)
        .expect("it can be recorded");
    let want = lily_gpu::report::decode(&recording, 512).expect("it can be recorded");
    let launches: u64 = times.operations.iter().map(|t| t.calls).sum();
    assert_eq!(launches as usize, want.dispatches);
    for (name, (count, _)) in &want.operations {
        let of = times.operations.iter().filter(|t| t.operation == *name);
        assert_eq!(of.map(|t| t.calls as usize).sum::<usize>(), *count, "{name}");
    }
    assert!(times.operations.iter().all(|t| t.seconds > 0.0 && !t.kernel.is_empty()));
    assert!(
        times
            .operations
            .iter()
            .all(|t| { t.twins.is_some_and(|t| t.read_only > 0.0 && t.no_arithmetic > 0.0) })
    );
    inside_of_the_costliest(&times);
    assert!(times.read_rate.is_some_and(|rate| rate > 0.0) && times.seconds > 0.0);
}

/// Ten kernels of a step were left out in turn, but none that writes what others take for indices.
fn inside_of_the_costliest(times: &OperationTimes) {
    let mut sorted: Vec<&OperationTime> = times.operations.iter().collect();
    sorted.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    let (first, rest) = sorted.split_at(10);
    assert!(!rest.is_empty() && rest.iter().all(|t| t.inside == Inside::NotMeasured), "{times:?}");
    for time in first {
        let indices = ["router", "route_", "sample", "finish", "fill"];
        let writes_indices = indices.iter().any(|name| time.kernel.starts_with(name));
        match time.inside {
            Inside::Needed => assert!(writes_indices, "{time:?}"),
            Inside::Seconds(seconds) => assert!(!writes_indices && seconds.is_finite(), "{time:?}"),
            Inside::NotMeasured => panic!("{time:?}"),
        }
    }
}

#[test]
fn prompts_are_measured_inside_too() {
    let (fixture, mut program) = program(&gpu());
    program.measure(Measure::Twins).expect("it can be measured");
    let input = Input::Tokens(fixture.tokens[..12].to_vec());
    program
        .run(Step::one(SLOT, input, Output::Sample(SampleParams::GREEDY)))
        .expect("the step runs");
    inside_of_the_costliest(&program.operation_times());
}
