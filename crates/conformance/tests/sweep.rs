//! The sweep of policy thresholds: on the shared GPU kernels thread by thread, or with LILY_GPU=cuda or LILY_GPU=metal on the GPU
//! of this machine.

use lily_conformance::gpu::{driver, is_emulated};
use lily_conformance::sweep::{check, open};
use lily_gpu::thresholds::{Point, Threshold};
use lily_gpu::{Driver, Profile};
use lily_softgpu::{Options, SoftDriver};

fn soft(change: impl Fn(&mut Profile)) -> Box<dyn Driver> {
    let mut options = Options::default();
    change(&mut options.profile);
    Box::new(SoftDriver::new(options))
}

#[test]
fn every_threshold_is_measured_and_the_best_value_is_the_fastest() {
    match is_emulated() {
        true => check(soft(|p| p.cores = 2), true),
        false => check(driver(), false),
    }
}

#[test]
fn chunks_of_the_recurrence_are_a_choice_with_mma() {
    let mut sweep = open(soft(|p| (p.mma, p.threadgroup_memory) = (true, 48 << 10)));
    let threshold = Threshold::named("chunked_from").expect("a threshold");
    let points = [Point::Prompt { rows: 40, context: 64 }];
    let measured = sweep.measure(threshold, &[32, 64], &points).expect("it can be measured");
    assert_eq!(measured.values(), [32, 64]);
    assert!(measured.operations.contains("delta_scan"), "{:?}", measured.operations);
}
