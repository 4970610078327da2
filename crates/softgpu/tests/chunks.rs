//! The recurrence in chunks of tokens by matrix units: the cases of the operation, and what they do not show.

use lily_gpu::conformance::{check, compare, for_gpu};
use lily_gpu::evaluate::evaluate;
use lily_gpu::{CommandList, Profile, Tuning};
use lily_ops::{Case, CaseOutputs, Op};
use lily_softgpu::{Options, SoftDriver};

/// A device with `mma.sync` and a CUDA device's threadgroup memory.
fn driver() -> SoftDriver {
    let host = Profile::named("softgpu").expect("a known profile");
    let profile = Profile { mma: true, threadgroup_memory: 48 << 10, ..host };
    SoftDriver::new(Options { profile, ..Options::default() })
}

fn cases() -> Vec<Case> {
    let mut cases = Op::all_cases();
    cases.retain(|c| c.op().name() == "delta_scan");
    cases
}

fn run(case: &Case, tuning: &Tuning) -> (CaseOutputs, CommandList) {
    evaluate(&mut driver(), tuning, case).unwrap_or_else(|e| panic!("{}: {e}", case.name))
}

fn kernels(list: &CommandList) -> Vec<&'static str> {
    list.dispatches.iter().map(|d| d.kernel).collect()
}

/// Largest difference, and the root of the mean of squares, as parts of the largest magnitude.
fn errors(got: &[f32], want: &[f32]) -> [String; 2] {
    let largest = want.iter().fold(0f64, |m, x| m.max(f64::from(x.abs())));
    let differences = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - f64::from(*w)).abs());
    let squares: f64 = differences.clone().map(|d| d * d).sum();
    [differences.fold(0.0, f64::max), (squares / want.len() as f64).sqrt()]
        .map(|e| format!("{:.1e}", e / largest))
}

/// Every case, within the operation's tolerance; segments of a chunk or more take the matrix units.
#[test]
fn every_case_by_matrix_units() {
    let mut chunked = 0;
    for case in cases() {
        check(&mut driver(), &Tuning::default(), &case).unwrap_or_else(|e| panic!("{e}"));
        let case = for_gpu(&case);
        let (got, list) = run(&case, &Tuning::default());
        let (scan, plain) = run(&case, &Tuning::without("chunked_scan").expect("a switch"));
        let long = case.segments.iter().filter(|s| s.rows >= 32).count();
        let mut want = vec![];
        want.extend((long > 0).then_some("delta_chunk_parts"));
        want.extend((long < case.segments.len()).then_some(kernels(&plain)[0]));
        want.extend((long > 0).then_some("delta_chunk"));
        // The scan of few segments may spread its rows otherwise.
        let family = |k: &&'static str| k.trim_end_matches(|c: char| c.is_ascii_digit());
        let families = |k: &[&'static str]| k.iter().map(family).collect::<Vec<_>>();
        assert_eq!(families(&kernels(&list)), families(&want), "{}", case.name);
        assert!(!kernels(&plain).contains(&"delta_chunk"), "{}", case.name);
        // The scan beside the preparation: no stage is added for it.
        assert_eq!(list.stages.len(), if long > 0 { 2 } else { 1 }, "{}", case.name);
        if long > 0 {
            chunked += 1;
            let exact = case.reference();
            for (slot, want) in exact.slots.iter().enumerate() {
                let [chunk, token] =
                    [&got, &scan].map(|o| errors(&o.slots[slot].recurrent, &want.recurrent));
                println!("{}: state {slot}: {chunk:?}, token by token {token:?}", case.name);
            }
        }
    }
    assert!(chunked >= 9, "{chunked} cases have a chunk");
}

/// A case with the gates, rows and the segments of another: the shape of `name` otherwise.
fn named(name: &str) -> Case {
    let cases = cases();
    let found = cases.iter().find(|c| c.name == name);
    for_gpu(found.unwrap_or_else(|| panic!("no case {name}")))
}

/// Few kernel threads, for sanitizers and barriers left out.
#[test]
fn small_chunks() {
    let mut case = named("delta_scan/Alike/100/1-2x32x64");
    case.segments[0].rows = 70;
    case.tokens.truncate(70);
    for (id, tensor) in &mut case.inputs {
        let width = case.plan.value(*id).width;
        if let lily_ops::HostTensor::F32(x) = tensor {
            x.truncate(70 * width);
        }
    }
    let (got, list) = run(&case, &Tuning::default());
    assert_eq!(kernels(&list), ["delta_chunk_parts", "delta_chunk"]);
    compare(&case, &got, &case.reference()).unwrap_or_else(|e| panic!("{e}"));
}
