//! Every operation, every case, every instruction set, against the scalar reference.

use std::collections::BTreeSet;

use lily_conformance::case_bits;
use lily_cpu::{CpuDevice, CpuOptions, Isa};
use lily_device::Device;
use lily_ops::Op;

fn devices() -> Vec<CpuDevice> {
    let with = |isa, threads| CpuDevice::new(CpuOptions { threads: Some(threads), isa: Some(isa) });
    let mut list: Vec<CpuDevice> = Isa::available().into_iter().map(|isa| with(isa, 2)).collect();
    list.push(with(Isa::detect(), 1));
    list.push(with(Isa::detect(), 3));
    list
}

#[test]
fn every_case_on_the_cpu() {
    let cases = Op::all_cases();
    let covered: BTreeSet<&str> = cases.iter().map(|c| c.op().name()).collect();
    let all: BTreeSet<&str> = Op::NAMES.iter().copied().collect();
    assert_eq!(covered, all, "each operation has cases");
    let names: BTreeSet<&str> = cases.iter().map(|c| c.name.as_str()).collect();
    assert_eq!(names.len(), cases.len(), "names of cases are unique");

    let devices = devices();
    let mut failures = Vec::new();
    for case in &cases {
        let want = case.reference();
        let mut first: Option<Vec<u32>> = None;
        for device in &devices {
            let got = device.evaluate(case).unwrap_or_else(|e| panic!("{}: {e}", case.name));
            if let Err(e) = case.compare(&got, &want) {
                failures.push(format!("{}: {e}", device.name()));
            }
            let bits = case_bits(&got);
            if first.get_or_insert_with(|| bits.clone()) != &bits {
                failures.push(format!("{}: {}: other bits", device.name(), case.name));
            }
        }
    }
    println!("{} cases on {} devices", cases.len(), devices.len());
    assert!(
        failures.is_empty(),
        "{} failures:\n{}",
        failures.len(),
        failures[..failures.len().min(20)].join("\n")
    );
}
