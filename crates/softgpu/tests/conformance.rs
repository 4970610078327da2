//! Every operation, every case, thread by thread on the host, against the scalar reference.

use std::collections::BTreeMap;

use lily_gpu::Tuning;
use lily_gpu::conformance::{check, compare, for_gpu};
use lily_gpu::evaluate::evaluate;
use lily_ops::Op;
use lily_softgpu::{Options, Sanitizer, SoftDriver};

#[test]
fn every_case_on_the_host() {
    let only = std::env::var("CASES").unwrap_or_default();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut failures = Vec::new();
    for case in Op::all_cases().iter().filter(|c| c.name.contains(&only)) {
        *counts.entry(case.op().name()).or_default() += 1;
        let mut driver = SoftDriver::new(Options::default());
        failures.extend(check(&mut driver, &Tuning::default(), case).err());
    }
    println!("cases: {counts:?}");
    assert!(
        failures.is_empty(),
        "{} failures:\n{}",
        failures.len(),
        failures[..failures.len().min(20)].join("\n")
    );
}

/// Kernel threads that a case under a sanitizer may take: some hundred thousand a second is what it runs at.
const SANITIZED_THREADS: u64 = 30_000;

/// Each case that is small enough, under each sanitizer: no race, nothing out of bounds, and the same results.
#[test]
#[ignore = "minutes: compiles the text for each shape and sanitizer; .ci/gpu-checks runs it"]
fn small_cases_under_sanitizers() {
    let only = std::env::var("CASES").unwrap_or_default();
    let mut ran: BTreeMap<&str, usize> = BTreeMap::new();
    let mut failures = Vec::new();
    for case in Op::all_cases().iter().filter(|c| c.name.contains(&only)) {
        let (case, tuning) = (for_gpu(case), Tuning::default());
        let name = case.op().name();
        let mut plain = SoftDriver::new(Options::default());
        let want = evaluate(&mut plain, &tuning, &case).expect("runs without a sanitizer").0;
        ran.entry(name).or_default();
        if plain.stats().threads > SANITIZED_THREADS {
            continue;
        }
        ran.entry(name).and_modify(|n| *n += 1);
        for sanitizer in [Sanitizer::Thread, Sanitizer::Address] {
            let options = Options { sanitizer: Some(sanitizer), ..Options::default() };
            match evaluate(&mut SoftDriver::new(options), &tuning, &case) {
                Err(e) => failures.push(format!("{}, {sanitizer:?}: {e}", case.name)),
                // Values alone: what a kernel leaves unwritten is NaN in both.
                Ok((got, _)) => failures.extend(compare(&case, &got, &want).err()),
            }
        }
    }
    println!("cases under sanitizers: {ran:?}");
    let missing: Vec<_> = ran.iter().filter(|(_, n)| **n == 0).collect();
    assert!(missing.is_empty(), "no case of {missing:?} is small enough");
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}
