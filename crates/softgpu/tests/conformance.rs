//! Every operation, every case, thread by thread on the host, against the scalar reference.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use lily_gpu::conformance::{check, compare, for_gpu};
use lily_gpu::evaluate::evaluate;
use lily_gpu::{Profile, Tuning};
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

/// Runs a case on a host of that profile under each sanitizer, if it is small enough: nothing found, and the same results. The kernels that
/// ran; none if it is too large.
fn sanitized(case: &Case, profile: &Profile, tuning: &Tuning) -> Result<Vec<String>, String> {
    let case = for_gpu(case);
    let options = || Options { profile: profile.clone(), ..Options::default() };
    let mut plain = SoftDriver::new(options());
    let want = evaluate(&mut plain, tuning, &case).map_err(|e| format!("{}: {e}", case.name))?.0;
    if plain.stats().threads > SANITIZED_THREADS {
        return Ok(Vec::new());
    }
    for sanitizer in [Sanitizer::Thread, Sanitizer::Address] {
        let options = Options { sanitizer: Some(sanitizer), ..options() };
        let (got, _) = evaluate(&mut SoftDriver::new(options), tuning, &case)
            .map_err(|e| format!("{}, {sanitizer:?}: {e}", case.name))?;
        // Values alone: what a kernel leaves unwritten is NaN in both.
        compare(&case, &got, &want)?;
    }
    Ok(plain.stats().launches.keys().map(|kernel| kernel.to_string()).collect())
}

/// A profile, switches, cases and the kernels that must have run in all.
type Pass<'a> = (&'a str, Profile, Tuning, &'a [&'a str], &'a [&'a str]);

/// Few cases under each sanitizer; CASES picks some of them.
fn pass((what, profile, tuning, cases, kernels): Pass) {
    let only = std::env::var("CASES").unwrap_or_default();
    let all = Op::all_cases();
    let mut ran = Vec::new();
    for name in cases.iter().filter(|name| name.contains(&only)) {
        let case = all.iter().find(|c| c.name == *name).unwrap_or_else(|| panic!("no case {name}"));
        let launched = sanitized(case, &profile, &tuning).unwrap_or_else(|e| panic!("{what}: {e}"));
        println!("{what}: {name}: {}", launched.join(", "));
        assert!(!launched.is_empty(), "{what}: {name} is too large");
        ran.extend(launched);
    }
    let missing = |kernel: &&&str| !ran.iter().any(|name| name.starts_with(**kernel));
    let missing: Vec<_> = kernels.iter().filter(missing).collect();
    assert!(!only.is_empty() || missing.is_empty(), "{what}: none of {missing:?} ran in {ran:?}");
}

/// The host, with splits that are pages from the second page on.
fn host() -> Profile {
    let mut profile = Options::default().profile;
    profile.thresholds.fixed_from = 256;
    profile
}

/// Kernels by matrix units.
#[test]
#[ignore = "minutes: compiles the text for each case and sanitizer; .ci/gpu-checks --all runs it"]
fn small_cases_by_units_under_sanitizers() {
    let units = Profile { mma: true, threadgroup_memory: 48 << 10, ..host() };
    let cases = [
        "linear/q4-f32/2x64->10",
        "linear/q4-f32/9x64->10",
        "experts_in/q4-f32/1/even",
        "experts_in/q4-f32/9/one",
        "experts_out/q4-f32/1/even",
        "experts_out/q4-f32/9/one",
        "delta_scan/33/1-2x128x128",
        "attention/1@300/8-1x256/Bf16",
    ];
    let kernels = [
        "gemv_mma_8",
        "gemm_mma",
        "experts_in_mma_q4",
        "experts_out_mma_q4",
        "delta_chunk",
        "delta_chunk_parts",
        "attention_fixed_units",
    ];
    pass(("units", units.clone(), Tuning::default(), &cases, &kernels));
    let wide = Profile { wgmma: true, cores: 1, ..units };
    let cases = ["linear/q4-f32/9x64->10", "experts_in/q4-f32/9/one", "experts_out/q4-f32/9/one"];
    let kernels = ["gemm_wgmma", "experts_in_wgmma_q4", "experts_out_wgmma_q4"];
    pass(("wide units", wide, Tuning::default(), &cases, &kernels));
}

/// What runs with every switch off.
#[test]
#[ignore = "minutes: compiles the text for each case and sanitizer; .ci/gpu-checks --all runs it"]
fn small_cases_without_switches_under_sanitizers() {
    let mut off = Tuning::default();
    Tuning::SWITCHES.iter().for_each(|(_, field)| *field(&mut off) = false);
    let cases = [
        "linear/q4-f32/9x64->10",
        "experts_out/q4-f32/1/even",
        "delta_scan/33/1-2x128x128",
        "attention_prep/1@0/2-1x256",
        "attention/1@63/8-2x64/Bf16",
    ];
    pass(("all off", host(), off, &cases, &["attention_split_unpacked_strided"]));
    // Their weights in a pass of its own are too many threads.
    let tiles = Tuning { dequantize_in_gemm: true, ..off };
    let cases = ["experts_in/q4-f32/9/one", "experts_out/q4-f32/9/one"];
    pass(("tiles of 16", host(), tiles, &cases, &["experts_in_q4", "experts_out_q4"]));
    let fixed = Tuning { fixed_block: true, ..off };
    let cases = ["attention/1@300/8-1x256/Bf16"];
    pass(("fixed blocks", host(), fixed, &cases, &["attention_fixed_unpacked_strided"]));
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
    let profile = Options::default().profile;
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let i = next.fetch_add(1, Ordering::Relaxed)
                    && let Some(case) = cases.get(i)
                {
                    let result = sanitized(case, &profile, &Tuning::default());
                    let result = result.map(|ran| !ran.is_empty());
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
