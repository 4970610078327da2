//! Every operation, every case, on the NVIDIA GPU of this machine, against the scalar reference. Without one it says so;
//! with LILY_NEEDS_CUDA set it then fails.

use std::collections::BTreeMap;

use lily_cuda::{CudaDriver, Options, unavailable};
use lily_gpu::Driver as _;
use lily_gpu::Tuning;
use lily_gpu::conformance::{check, texts};
use lily_ops::{Case, Op};

#[test]
fn every_case_on_the_gpu() {
    if let Some(why) = unavailable() {
        assert!(std::env::var_os("LILY_NEEDS_CUDA").is_none(), "{why}");
        println!("no device: {why}");
        return;
    }
    let only = std::env::var("CASES").unwrap_or_default();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut failures = Vec::new();
    let mut driver = CudaDriver::open(Options::default()).expect("the device opens");
    let cases: Vec<Case> = Op::all_cases().into_iter().filter(|c| c.name.contains(&only)).collect();
    driver.compile(&texts(driver.profile().platform, &cases));
    for case in &cases {
        *counts.entry(case.op().name()).or_default() += 1;
        failures.extend(check(&mut driver, &Tuning::default(), case).err());
    }
    println!("cases: {counts:?}");
    for failure in failures.iter().take(40) {
        println!("{failure}");
    }
    assert!(failures.is_empty(), "{} failures", failures.len());
}
