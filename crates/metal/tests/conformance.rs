//! On the Apple GPU of this machine: every kernel compiles, and every operation agrees with the scalar reference in every
//! case. Without one it says so; with LILY_NEEDS_METAL set it then fails.

use std::collections::BTreeMap;
use std::sync::Arc;

use lily_gpu::conformance::check;
use lily_gpu::{Driver, Shape, Text, Tuning, text};
use lily_ops::Op;

fn driver() -> Option<Box<dyn Driver>> {
    match lily_metal::open() {
        Ok(driver) => Some(driver),
        Err(why) => {
            assert!(std::env::var_os("LILY_NEEDS_METAL").is_none(), "{why}");
            println!("{why}");
            None
        }
    }
}

#[test]
fn every_kernel_compiles() {
    let Some(mut driver) = driver() else { return };
    let text = Arc::new(Text::new(driver.profile().platform, &Shape::default()));
    for kernel in text::kernels(driver.profile().platform) {
        let name: &'static str = kernel.leak();
        driver.pipelines(&text, &[name]).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

#[test]
fn every_case_on_the_gpu() {
    let Some(mut driver) = driver() else { return };
    let only = std::env::var("CASES").unwrap_or_default();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut failures = Vec::new();
    for case in Op::all_cases().iter().filter(|c| c.name.contains(&only)) {
        *counts.entry(case.op().name()).or_default() += 1;
        failures.extend(check(&mut *driver, &Tuning::default(), case).err());
    }
    println!("cases: {counts:?}");
    for failure in failures.iter().take(40) {
        println!("{failure}");
    }
    assert!(failures.is_empty(), "{} failures", failures.len());
}
