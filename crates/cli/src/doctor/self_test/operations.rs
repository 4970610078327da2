//! Kernels compile; operations agree with their scalar reference.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use lily_cpu::{CpuDevice, CpuOptions};
use lily_device::Device;
use lily_gpu::conformance::{check, texts};
use lily_gpu::{Shape, Text, Tuning, text};
use lily_ops::{Case, Op};
use serde_json::{Value, json};

use super::{Outcome, Part, driver};
use crate::options::DeviceName;

/// Failures that are printed; the report has all.
const SHOWN: usize = 10;

/// Compiles every kernel for the real model's shape, one by one.
pub fn kernels(device: DeviceName) -> anyhow::Result<Part> {
    let Some(mut driver) = driver(device)? else {
        return Ok(Part::left_out("the CPU's kernels are compiled with the program"));
    };
    let text = Arc::new(Text::new(driver.profile().platform, &Shape::default()));
    let (mut failures, mut seconds) = (Vec::new(), BTreeMap::new());
    for kernel in text::kernels(driver.profile().platform) {
        let start = Instant::now();
        // Names live as long as the program, as those of the encoders do.
        let name: &'static str = kernel.leak();
        failures.extend(driver.pipelines(&text, &[name]).err().map(|e| e.to_string()));
        seconds.insert(name, start.elapsed().as_secs_f64());
    }
    let all: f64 = seconds.values().sum();
    let mut lines = vec![format!("{} kernels in {all:.2} s", seconds.len())];
    lines.extend(driver.notes());
    lines.extend(failures.iter().take(SHOWN).cloned());
    Ok(Part {
        outcome: Outcome::of(failures.is_empty()),
        lines,
        figures: json!({ "seconds": seconds, "failures": failures, "notes": driver.notes() }),
    })
}

/// Runs every case of every operation.
pub fn cases(device: DeviceName) -> anyhow::Result<Part> {
    let mut gpu = driver(device)?;
    let cases = Op::all_cases();
    if let Some(driver) = &mut gpu {
        driver.compile(&texts(driver.profile().platform, &cases));
    }
    let cpu = CpuDevice::new(CpuOptions::default());
    let mut run = |case: &Case| match &mut gpu {
        Some(driver) => check(&mut **driver, &Tuning::default(), case),
        None => {
            let got = cpu.evaluate(case).map_err(|e| format!("{}: {e}", case.name))?;
            case.compare(&got, &case.reference())
        }
    };
    let mut counts: BTreeMap<&str, [usize; 2]> = BTreeMap::new();
    let mut failures = Vec::new();
    for case in &cases {
        let failure = run(case).err();
        let count = counts.entry(case.op().name()).or_default();
        count[0] += 1;
        count[1] += usize::from(failure.is_some());
        failures.extend(failure);
    }
    let sum = counts.values().map(|c| c[0]).sum::<usize>();
    let mut lines = vec![format!("{sum} cases of {} operations", counts.len())];
    let wrong = counts.iter().filter(|(_, c)| c[1] > 0);
    lines.extend(wrong.map(|(name, [all, bad])| format!("{name}: {bad} of {all} are wrong")));
    lines.extend(failures.iter().take(SHOWN).cloned());
    let table: Vec<Value> = counts
        .iter()
        .map(|(name, [all, bad])| json!({ "operation": name, "cases": all, "failed": bad }))
        .collect();
    Ok(Part {
        outcome: Outcome::of(failures.is_empty()),
        lines,
        figures: json!({ "operations": table, "failures": failures }),
    })
}
