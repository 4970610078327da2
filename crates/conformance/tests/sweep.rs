//! The sweep of policy thresholds: on the shared GPU kernels thread by thread, or with LILY_GPU=cuda or LILY_GPU=metal on the GPU
//! of this machine.

use lily_conformance::gpu::{driver, is_emulated};
use lily_conformance::sweep::{check, open};
use lily_gpu::program::sweep::Measured;
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

/// A threshold that has no values on a device is not measured, and nothing is proposed for it; `tile_groups` changes nothing where
/// tiles are those of matrix units.
#[test]
fn a_threshold_without_values_is_left_as_it_is() {
    let mut sweep = open(soft(|p| (p.mma, p.threadgroup_memory) = (true, 48 << 10)));
    let nothing = |m: Measured| {
        let found = (m.cells.len(), m.operations.len(), m.values().len());
        assert_eq!(found, (0, 0, 0), "{m:?}");
        assert_eq!((m.best(), m.gain()), (None, 0.0), "{m:?}");
    };
    for name in ["tile_groups", "scan_tokens"] {
        let threshold = Threshold::named(name).expect("a threshold");
        let current = *(threshold.field)(&mut sweep.thresholds());
        let measured = sweep.threshold(threshold).expect("nothing to do");
        assert_eq!((measured.name, measured.current), (name, current));
        nothing(measured);
    }
    let tiles = Threshold::named("tile_groups").expect("a threshold");
    let points = [Point::Prompt { rows: 20, context: 40 }];
    nothing(sweep.measure(tiles, &[0, 1024], &points).expect("it can be measured"));
    // No value of a threshold that has some, and no point, are nothing to measure, too.
    let lanes = Threshold::named("gemv_lanes").expect("a threshold");
    let decode = [Point::Decode { slots: 1, context: 40 }];
    nothing(sweep.measure(lanes, &[], &decode).expect("nothing to do"));
    nothing(sweep.measure(lanes, &[2, 32], &[]).expect("nothing to do"));
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
