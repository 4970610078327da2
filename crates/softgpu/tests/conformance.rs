//! Every operation, every case, thread by thread on the host, against the scalar reference.

use std::collections::BTreeMap;

use lily_gpu::conformance::check;
use lily_gpu::{Driver, DriverError, Tuning};
use lily_ops::Op;
use lily_softgpu::{Options, SoftDriver};

fn run(mut open: impl FnMut() -> Result<Box<dyn Driver>, DriverError>) {
    let only = std::env::var("CASES").unwrap_or_default();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut failures = Vec::new();
    for case in Op::all_cases().iter().filter(|c| c.name.contains(&only)) {
        *counts.entry(case.op().name()).or_default() += 1;
        let mut driver = open().expect("the driver opens");
        failures.extend(check(&mut *driver, &Tuning::default(), case).err());
    }
    println!("cases: {counts:?}");
    assert!(
        failures.is_empty(),
        "{} failures:\n{}",
        failures.len(),
        failures[..failures.len().min(20)].join("\n")
    );
}

#[test]
fn every_case_on_the_host() {
    run(|| Ok(Box::new(SoftDriver::new(Options::default()))));
}
