//! The sweep of policy thresholds on a small model, on any driver: what every measurement of it must be.

use std::collections::BTreeSet;

use lily_gpu::Driver;
use lily_gpu::program::sweep::{Measured, Sizes, Sweep};
use lily_gpu::thresholds::{ALL, Point, Threshold};
use lily_model::Precision;

use crate::Fixture;

const fn prompt(rows: u32, context: u32) -> Point {
    Point::Prompt { rows, context }
}

const fn decode(slots: u32, context: u32) -> Point {
    Point::Decode { slots, context }
}

/// A threshold, values on both sides of something, points, and whether they must differ on a device of two cores without
/// `mma.sync`.
type Row = (&'static str, &'static [u32], &'static [Point], bool);

/// Values and points at which the small model's kernels differ.
const ROWS: &[Row] = &[
    ("vector_rows", &[2, 8], &[prompt(3, 20), prompt(1, 20), prompt(8, 20)], true),
    ("expert_rows", &[2, 8], &[prompt(3, 20)], true),
    ("gemv_lanes", &[2, 32], &[decode(1, 40), decode(3, 40)], true),
    ("gemv_simds", &[2, 8], &[decode(1, 40)], true),
    ("gemv_share", &[1, 16], &[decode(1, 40)], true),
    ("norm_rows", &[0, 2], &[decode(1, 40), decode(8, 40)], true),
    ("norm_groups", &[0, 512], &[decode(1, 40)], true),
    ("tile_groups", &[0, 1024], &[prompt(20, 40)], true),
    ("split_groups", &[1, 16], &[decode(1, 400)], true),
    ("fixed_from", &[256], &[decode(1, 400)], true),
    ("flash_rows", &[8, 16], &[prompt(20, 40)], true),
    ("conv_groups", &[1, 256], &[prompt(40, 64)], true),
    ("scan_groups", &[1, 256], &[prompt(20, 40)], true),
    ("scan_tokens", &[32, 4096], &[prompt(40, 64)], true),
    ("chunked_from", &[16, 64], &[prompt(40, 64)], false),
];

/// A sweep of the small model on a driver.
pub fn open(driver: Box<dyn Driver>) -> Sweep {
    let fixture = Fixture::open("tiny-c");
    let model = lily_model::load(&fixture.checkpoint, Precision::Standard).expect("it loads");
    let weights: Vec<_> = model.weights.iter().map(|w| w.as_ref()).collect();
    let sizes = Sizes { rows: 40, context: 512, layers: 4 };
    Sweep::new(driver, model.plan, &weights, sizes).expect("there is room")
}

/// Measures every threshold. `strict`: the device has two cores and no `mma.sync`.
pub fn check(driver: Box<dyn Driver>, strict: bool) {
    let mut sweep = open(driver);
    let named: BTreeSet<&str> = ROWS.iter().map(|r| r.0).collect();
    assert_eq!(named, ALL.iter().map(|t| t.name).collect(), "a threshold is not measured");
    let platform = sweep.driver().profile().platform;
    for (name, values, points, differs) in ROWS {
        // CUDA has one of the two kernels.
        if *name == "flash_rows" && platform == lily_gpu::Platform::Cuda {
            continue;
        }
        let threshold = Threshold::named(name).expect("a threshold");
        let measured = sweep.measure(threshold, values, points).expect("it can be measured");
        println!(
            "{name}: {:?} -> {:?}, {:?}",
            measured.current,
            measured.best(),
            measured.operations
        );
        assert!(!strict || *differs != measured.cells.is_empty(), "{name}: {measured:?}");
        structure(&measured, values, points);
    }
    // What there is no room for is left out.
    let threshold = Threshold::named("split_groups").expect("a threshold");
    for point in [decode(1, 1 << 20), decode(9, 40), prompt(41, 64), prompt(8, 4)] {
        assert!(!sweep.holds(point), "{point}");
        let none = sweep.measure(threshold, &[1, 16], &[point]).expect("nothing to do");
        assert_eq!((none.cells, none.operations), (Vec::new(), BTreeSet::new()), "{point}");
    }
}

/// All values at each point that was measured, and the best of them the one of least cost.
fn structure(measured: &Measured, values: &[u32], points: &[Point]) {
    let mut all: BTreeSet<u32> = values.iter().copied().collect();
    all.insert(measured.current);
    assert_eq!(measured.cells.is_empty(), measured.operations.is_empty());
    let mut costs = vec![0.0; all.len()];
    for cells in measured.cells.chunks(all.len()) {
        assert!(points.contains(&cells[0].point));
        assert!(cells.iter().all(|c| c.point == cells[0].point && c.seconds > 0.0), "{cells:?}");
        assert!(cells.iter().map(|c| c.value).eq(all.iter().copied()), "{cells:?}");
        let least = cells.iter().map(|c| c.seconds).fold(f64::INFINITY, f64::min);
        cells.iter().zip(&mut costs).for_each(|(c, cost)| *cost += c.seconds / least);
    }
    if measured.cells.is_empty() {
        return assert_eq!(measured.best(), None);
    }
    let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
    let best = measured.best().expect("something was measured");
    let at = all.iter().position(|v| *v == best).expect("one of the values");
    assert!(costs[at] <= least * (1.0 + 1e-12), "{best} of {all:?}: {costs:?}");
    assert!(measured.gain() >= 0.0);
}
