//! Faults of a Metal device in software: each ends as its error, nothing is left behind, nothing hangs.
#![cfg(all(metal_soft, not(target_os = "macos")))]

mod metal_common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use lily_conformance::Fixture;
use lily_conformance::metal::{open, open_with, options, profile, softgpu};
use lily_device::{Device, Input, Output, PrepareError, Step, StepError};
use lily_gpu::{
    Access, Binding, CommandList, Dispatch, DriverError, GpuDevice, Operand, Placement, Shape, Text,
};
use lily_ops::sample::SampleParams;
use lily_softmetal::{Caps, Fault};
use metal_common::*;

const COUNT: usize = 10;

fn prompt() -> Vec<u32> {
    (0..20).map(|i| (i * 7 + 3) % 100).collect()
}

fn tokens(program: &mut dyn Program) -> Result<Vec<u32>, StepError> {
    try_generate(program, &prompt(), &SampleParams::GREEDY, COUNT)
}

/// A command buffer is killed or finds no memory: the steps under way fail and say why; after a reset the slot answers as if
/// nothing had been, on a new queue.
#[test]
fn a_killed_command_buffer() {
    let (_dir, model) = micro();
    let (soft, open) = open(Caps::without_tensors());
    let mut reference = prepare(softgpu(&profile(&open)), model.clone(), limits(256, 64));
    let want = tokens(&mut *reference).expect("it runs");
    let mut program = prepare(open, model, limits(256, 64));
    assert_eq!(tokens(&mut *program), Ok(want.clone()));
    for (fault, after, reason) in [
        (Fault::Killed as fn(u64) -> Fault, 1, "Interactivity"),
        (Fault::Killed, 5, "Interactivity"),
        (Fault::OutOfMemory, 4, "Insufficient Memory"),
    ] {
        soft.inject(fault(soft.committed() + after));
        match tokens(&mut *program) {
            Err(StepError::Failed { slots, reason: why }) => {
                assert_eq!(slots, [SLOT]);
                assert!(why.contains(reason) && why.contains("kernel"), "{why}");
            }
            other => panic!("{reason}: {other:?}"),
        }
        soft.heal();
        // Nothing runs on the queue any more: what runs below runs on another.
        // What was under way is waited for before the slot is used again.
        soft.wait_idle();
        drain(&mut *program);
        assert_eq!(tokens(&mut *program), Ok(want.clone()), "after {reason}");
    }
    drop(program);
    nothing_is_left(&soft);
}

/// Waits for tickets that a failed run has left.
fn drain(program: &mut dyn Program) {
    for ticket in 0..200 {
        let _ = program.wait(lily_device::Ticket(ticket));
    }
}

#[test]
fn a_device_that_is_gone_or_silent() {
    for (fault, patience, reason) in [
        (Fault::Removed as fn(u64) -> Fault, 60, "removed"),
        (Fault::Revoked, 60, "start it again"),
        (Fault::Silent, 1, "has not answered"),
    ] {
        let (_dir, model) = micro();
        let options =
            lily_metal::Options { patience: Duration::from_secs(patience), ..options(|_| ()) };
        let (soft, open) = open_with(Caps::without_tensors(), options);
        let mut program = prepare(open, model, limits(256, 64));
        soft.inject(fault(soft.committed() + 3));
        match tokens(&mut *program) {
            Err(StepError::Lost(why)) => assert!(why.contains(reason), "{why}"),
            other => panic!("{reason}: {other:?}"),
        }
        // It stays lost.
        assert!(matches!(tokens(&mut *program), Err(StepError::Lost(_))));
        let before = soft.counts();
        drop(program);
        match fault(0) {
            // What never ended may still be at work: all that it uses is kept, the two libraries' objects are not.
            Fault::Silent(_) => {
                let after = soft.counts();
                assert_eq!((after.buffers, after.bytes), (before.buffers, before.bytes));
                assert_eq!(after.others, before.others - 1, "pipelines, queue, fence, set");
                assert!(soft.violations().is_empty());
            }
            _ => nothing_is_left(&soft),
        }
    }
}

/// So many command buffers that a silent device has no room for one more: the error comes all the same.
#[test]
fn a_device_that_falls_silent_in_a_long_list() {
    let fixture = Fixture::open("tiny-a");
    let short = lily_metal::Options {
        part_seconds: 1e-9,
        patience: Duration::from_secs(1),
        ..options(|_| ())
    };
    let (soft, open) = open_with(Caps::without_tensors(), short);
    let mut program = prepare(open, model(&fixture), limits(256, 64));
    soft.inject(Fault::Silent(soft.committed() + 3));
    let step = Step::one(SLOT, Input::Tokens(fixture.tokens.clone()), Output::None);
    match program.run(step) {
        Err(StepError::Lost(why)) => assert!(why.contains("has not answered"), "{why}"),
        other => panic!("{other:?}"),
    }
    assert!(soft.committed() >= 256, "{} command buffers filled no queue", soft.committed());
    drop(program);
    assert!(soft.violations().is_empty());
}

#[test]
fn what_does_not_compile_or_fit() {
    let cases = [
        (Caps::without_tensors(), Some(Fault::Compile), "a fault was injected"),
        (Caps::without_tensors(), Some(Fault::Pipeline), "exceeds available registers"),
        (Caps::without_tensors(), Some(Fault::FewThreads), "64 can run"),
        (Caps { memory: 32 << 20, ..Caps::without_tensors() }, None, "has no more"),
        (
            Caps { working_set: 300 << 20, ..Caps::without_tensors() },
            None,
            "sysctl iogpu.wired_limit_mb=",
        ),
    ];
    for (caps, fault, reason) in cases {
        let (_dir, model) = micro();
        let (soft, open) = open(caps);
        if let Some(fault) = fault {
            soft.inject(fault);
        }
        // Far more than the smallest working set above bears, far less than all others.
        let limits = limits(1 << 18, 64);
        let device = GpuDevice::new(profile(&open), Tuning::default(), open);
        match device.prepare(model.plan, model.weights, limits).map(|_| ()) {
            Err(PrepareError::Invalid(why) | PrepareError::OutOfMemory(why)) => {
                println!("{why}");
                assert!(why.contains(reason), "{why}");
            }
            other => panic!("{reason}: {other:?}"),
        }
        nothing_is_left(&soft);
    }
}

/// A program that goes while steps are under way waits for them: commands do not keep alive what they use.
#[test]
fn a_program_dropped_with_steps_under_way() {
    let (_dir, model) = micro();
    let (soft, open) = open(Caps::without_tensors());
    let mut program = prepare(open, model, limits(256, 64));
    tokens(&mut *program).expect("it runs");
    soft.delay(Duration::from_millis(200));
    let under_way: Vec<_> = (0..2)
        .map(|_| {
            let sample = Output::Sample(SampleParams::GREEDY);
            program.submit(Step::one(SLOT, Input::LastSampled, sample)).expect("submitted")
        })
        .collect();
    assert_eq!(under_way.len(), 2);
    drop(program);
    nothing_is_left(&soft);
}

/// What Metal would not check, or would end the program for, is refused before it is encoded; the device goes on.
#[test]
fn what_metal_would_not_take_is_refused() {
    let (soft, open) = open(Caps { max_buffer: 8 << 20, ..Caps::without_tensors() });
    let mut driver = open().expect("the device opens");
    let too_long = driver.allocate("weights", (8 << 20) + 1, Placement::Device);
    let error = too_long.expect_err("Metal makes none").to_string();
    assert!(error.contains("weights") && error.contains("at most 8388608 bytes"), "{error}");
    let buffer = driver.allocate("words", 1024, Placement::Device).expect("there is room");
    let element = lily_ops::ElementType::U32;
    let operand = Operand { buffer, offset: 0, bytes: 1024, element };
    let binding = Binding::new(operand, Access::Write);
    let right = Dispatch {
        kernel: "fill_words",
        op: "fill",
        layer: None,
        groups: [1; 3],
        threads: 256,
        bindings: vec![binding.clone()],
        args: [256u32, 7].iter().flat_map(|word| word.to_ne_bytes()).collect(),
        traffic: 1024,
        work: 0,
        cut: None,
    };
    let text = Arc::new(Text::new(driver.profile().platform, &Shape::default()));
    let pipelines = driver.pipelines(&text, &["fill_words", "rms_norm"]).expect("they compile");
    let list = |dispatch: Dispatch, pipeline: usize| {
        let pipelines = vec![pipelines[pipeline]];
        let list = CommandList {
            dispatches: vec![dispatch],
            pipelines,
            stages: vec![0],
            ..CommandList::default()
        };
        Arc::new(list)
    };
    let at = |offset: u64, bytes: u64| vec![Binding { offset, bytes, ..binding.clone() }];
    let wrong: [(Dispatch, usize, &str); 8] = [
        (right.clone(), 1, "not this kernel's pipeline"),
        (Dispatch { threads: 512, ..right.clone() }, 0, "it can have 256"),
        (Dispatch { threads: 0, ..right.clone() }, 0, "of 0 threads"),
        (Dispatch { groups: [1, 0, 1], ..right.clone() }, 0, "[1, 0, 1] threadgroups"),
        (Dispatch { args: vec![0; 4100], ..right.clone() }, 0, "Metal takes 30 and 4096"),
        (Dispatch { bindings: vec![binding.clone(); 31], ..right.clone() }, 0, "31 buffers"),
        (Dispatch { bindings: at(8, 16), ..right.clone() }, 0, "no multiple of 16"),
        (Dispatch { bindings: at(512, 1024), ..right.clone() }, 0, "which has 1024"),
    ];
    for (dispatch, pipeline, why) in wrong {
        match driver.submit(&list(dispatch, pipeline)) {
            Err(DriverError::Invalid(error)) => assert!(error.contains(why), "{error}"),
            other => panic!("{why}: {other:?}"),
        }
    }
    let submission = driver.submit(&list(right, 0)).expect("nothing is wrong with it");
    driver.wait(submission).expect("it ran");
    let mut bytes = vec![0; 1024];
    driver.read(buffer, 0, &mut bytes).expect("it can be read");
    assert!(bytes.as_chunks().0.iter().all(|word| u32::from_ne_bytes(*word) == 7));
    assert_eq!(soft.committed(), 1);
    drop(driver);
    nothing_is_left(&soft);
}

/// A virtual machine's device: no residency sets, no tensor operations, the same tokens.
#[test]
fn a_virtual_machines_device() {
    let (_dir, model) = micro();
    let log: Arc<Mutex<Vec<String>>> = Arc::default();
    let sink = log.clone();
    let options = options(move |line| sink.lock().expect("no panic").push(line.to_owned()));
    let (soft, open) = open_with(Caps::paravirtual(), options);
    let mut reference = prepare(softgpu(&profile(&open)), model.clone(), limits(256, 64));
    let mut program = prepare(open, model, limits(256, 64));
    assert_eq!(tokens(&mut *program), tokens(&mut *reference));
    drop(program);
    nothing_is_left(&soft);
    assert_eq!(*log.lock().expect("no panic"), Vec::<String>::new());
}
