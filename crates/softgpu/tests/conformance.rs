//! Every operation, every case, thread by thread on the host, against the scalar reference.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use lily_gpu::Tuning;
use lily_gpu::conformance::{check, compare, for_gpu};
use lily_gpu::evaluate::evaluate;
use lily_ops::{Activation, Case, ElementType, Op};
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
        // Once more by matrix units, where some take few rows.
        let units = matches!(case.op(), Op::Linear(_) | Op::ExpertsIn(_) | Op::ExpertsOut(_));
        if units && !repeats(case) {
            let mut options = Options::default();
            options.profile.mma = true;
            let mut driver = SoftDriver::new(options.clone());
            failures.extend(check(&mut driver, &Tuning::default(), case).err());
            // And many: on one core, so that wide tiles are taken for all of them.
            (options.profile.wgmma, options.profile.cores) = (true, 1);
            let mut driver = SoftDriver::new(options);
            failures.extend(check(&mut driver, &Tuning::default(), case).err());
        }
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

/// Whether a GPU computes what another case has it compute, too: it neither quantizes activations nor has a cache of f32.
fn repeats(case: &Case) -> bool {
    match case.op() {
        Op::Linear(op) => op.activation != Activation::F32,
        Op::ExpertsIn(op) => op.activation != Activation::F32,
        Op::ExpertsOut(op) => op.activation != Activation::F32,
        Op::Attention(_) | Op::AttentionPrep(_) => {
            case.plan.state.cache_element == ElementType::F32
        }
        _ => false,
    }
}

/// Runs a case under each sanitizer, if it is small enough: nothing found, and the same results.
fn sanitized(case: &Case) -> Result<bool, String> {
    let (case, tuning) = (for_gpu(case), Tuning::default());
    let mut plain = SoftDriver::new(Options::default());
    let want = evaluate(&mut plain, &tuning, &case).map_err(|e| format!("{}: {e}", case.name))?.0;
    if plain.stats().threads > SANITIZED_THREADS {
        return Ok(false);
    }
    for sanitizer in [Sanitizer::Thread, Sanitizer::Address] {
        let options = Options { sanitizer: Some(sanitizer), ..Options::default() };
        let (got, _) = evaluate(&mut SoftDriver::new(options), &tuning, &case)
            .map_err(|e| format!("{}, {sanitizer:?}: {e}", case.name))?;
        // Values alone: what a kernel leaves unwritten is NaN in both.
        compare(&case, &got, &want)?;
    }
    Ok(true)
}

/// Each case that is small enough, under each sanitizer: no race, nothing out of bounds, and the same results.
#[test]
#[ignore = "minutes: compiles the text for each shape and sanitizer; .ci/gpu-checks --all runs it"]
fn small_cases_under_sanitizers() {
    let only = std::env::var("CASES").unwrap_or_default();
    let mut cases = Op::all_cases();
    cases.retain(|c| c.name.contains(&only) && !repeats(c));
    let results: Mutex<Vec<(usize, Result<bool, String>)>> = Mutex::default();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let i = next.fetch_add(1, Ordering::Relaxed)
                    && let Some(case) = cases.get(i)
                {
                    let result = sanitized(case);
                    if let Err(e) = &result {
                        println!("{e}"); // minutes before the end
                    }
                    results.lock().expect("no thread panics with it").push((i, result));
                }
            });
        }
    });
    let mut ran: BTreeMap<&str, [usize; 2]> = BTreeMap::new();
    let mut failures = Vec::new();
    for (i, result) in results.into_inner().expect("no thread panicked") {
        let [ran, all] = ran.entry(cases[i].op().name()).or_default();
        *all += 1;
        match result {
            Ok(small) => *ran += usize::from(small),
            Err(e) => failures.push(e),
        }
    }
    println!("cases under sanitizers, of all: {ran:?}");
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    let missing: Vec<_> = ran.iter().filter(|(_, [n, _])| *n == 0).collect();
    assert!(missing.is_empty(), "no case of {missing:?} is small enough");
}
