//! Every operation, every case, thread by thread on the host, against the scalar reference.

use std::collections::BTreeMap;

use lily_gpu::Tuning;
use lily_gpu::evaluate::evaluate;
use lily_gpu::values::elements;
use lily_ops::{
    Activation, Case, CaseOutputs, CaseWeight, ElementType, HostTensor, Op, SlotState, Tolerance,
    WeightFormat,
};
use lily_softgpu::{Options, Sanitizer, SoftDriver};

/// The case as a GPU takes it: activations are never quantized, inputs and caches are bf16 where it
/// keeps them so.
fn for_gpu(case: &Case) -> Case {
    let mut case = case.clone();
    for node in case.plan.body.iter_mut().chain(&mut case.plan.head) {
        match &mut node.op {
            Op::Linear(op) => op.activation = Activation::F32,
            Op::ExpertsIn(op) => op.activation = Activation::F32,
            Op::ExpertsOut(op) => op.activation = Activation::F32,
            _ => {}
        }
    }
    let types = elements(&case.plan);
    for (id, tensor) in &mut case.inputs {
        if let HostTensor::F32(x) = tensor {
            x.iter_mut().for_each(|x| *x = types[id.0 as usize].round(*x));
        }
    }
    case.plan.state.cache_element = ElementType::Bf16;
    let round = |x: &mut Vec<f32>| x.iter_mut().for_each(|x| *x = ElementType::Bf16.round(*x));
    for slot in &mut case.slots {
        let SlotState { conv, k, v, .. } = slot;
        [conv, k, v].into_iter().for_each(round);
    }
    case
}

/// Compares what a GPU left with the reference: values kept in bf16 may be rounded to the neighbour where the result
/// lies near the middle of two.
fn compare(case: &Case, got: &CaseOutputs, want: &CaseOutputs) -> Result<(), String> {
    let types = elements(&case.plan);
    let tolerance = tolerance(case);
    let error = |what: String, e: String| format!("{}: {what}: {e}", case.name);
    for ((id, g), (_, w)) in got.values.iter().zip(&want.values) {
        let what = || format!("value {}", id.0);
        match (g, w, types[id.0 as usize]) {
            (HostTensor::U32(g), HostTensor::U32(w), _) if g == w => {}
            (HostTensor::U32(g), HostTensor::U32(w), _) => {
                return Err(error(what(), format!("ids {g:?}, want {w:?}")));
            }
            (_, _, ElementType::Bf16) => {
                let w: Vec<f32> = w.f32().iter().map(|x| ElementType::Bf16.round(*x)).collect();
                tolerance.compare_bf16(g.f32(), &w).map_err(|e| error(what(), e))?;
            }
            _ => tolerance.compare(g.f32(), w.f32()).map_err(|e| error(what(), e))?,
        }
    }
    for (s, (g, w)) in got.slots.iter().zip(&want.slots).enumerate() {
        let part = |name: &str| format!("slot {s}: {name}");
        tolerance
            .compare(&g.recurrent, &w.recurrent)
            .map_err(|e| error(part("recurrent state"), e))?;
        for (name, g, w) in
            [("convolution", &g.conv, &w.conv), ("K", &g.k, &w.k), ("V", &g.v, &w.v)]
        {
            tolerance.compare_bf16(g, w).map_err(|e| error(part(name), e))?;
        }
    }
    match got.slots.len() == want.slots.len() && got.values.len() == want.values.len() {
        true => Ok(()),
        false => Err(error("outputs".into(), "some are missing".into())),
    }
}

/// Rows from which on matrix tiles multiply; they round weights to bf16.
const TILE_ROWS: usize = 9;

/// The case with its weights as the kernels multiply them: rounded to bf16 in matrix tiles.
fn as_multiplied(case: &Case) -> Case {
    let mut case = case.clone();
    let product = matches!(case.op(), Op::Linear(_) | Op::ExpertsIn(_) | Op::ExpertsOut(_));
    if !product || case.tokens.len() < TILE_ROWS {
        return case;
    }
    for (spec, weight) in case.plan.weights.iter_mut().zip(&mut case.weights) {
        let rows = (0..spec.matrices).flat_map(|m| (0..spec.rows).map(move |r| (m, r)));
        let codes: Vec<u8> = rows
            .flat_map(|(m, r)| weight.as_ref().row(spec, m, r))
            .flat_map(|x| ((ElementType::Bf16.round(x).to_bits() >> 16) as u16).to_le_bytes())
            .collect();
        let strides = [spec.rows * spec.cols * 2, 0, 0];
        *weight = CaseWeight { codes, strides, ..CaseWeight::default() };
        spec.format = WeightFormat::Dense(ElementType::Bf16);
    }
    case
}

/// Where a kernel rounds on the way what the reference does not.
fn tolerance(case: &Case) -> Tolerance {
    match case.op() {
        // Probabilities are rounded to bf16 in the tiles of the matrix units.
        Op::Attention(_) => Tolerance { absolute: 1e-6, relative: 4e-3 },
        op => op.tolerance(),
    }
}

fn check(case: &Case, tuning: &Tuning) -> Result<(), String> {
    let case = for_gpu(case);
    let mut driver = SoftDriver::new(Options::default());
    let (got, _) =
        evaluate(&mut driver, tuning, &case).map_err(|e| format!("{}: {e}", case.name))?;
    compare(&case, &got, &as_multiplied(&case).reference())
}

#[test]
fn every_case_on_the_host() {
    let only = std::env::var("CASES").unwrap_or_default();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut failures = Vec::new();
    for case in Op::all_cases().iter().filter(|c| c.name.contains(&only)) {
        let name = case.op().name();
        *counts.entry(name).or_default() += 1;
        failures.extend(check(case, &Tuning::default()).err());
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
