//! What a GPU promises of an operation, for tests on any driver.

use std::collections::HashSet;
use std::sync::Arc;

use lily_ops::{
    Activation, Case, CaseOutputs, CaseWeight, ElementType, HostTensor, Op, SlotState, Tolerance,
    WeightFormat,
};

use crate::driver::Driver;
use crate::evaluate::evaluate;
use crate::profile::Platform;
use crate::text::{Shape, Text};
use crate::tuning::Tuning;
use crate::values::elements;

/// The case as a GPU takes it: activations are never quantized, inputs and caches are bf16 where it
/// keeps them so.
pub fn for_gpu(case: &Case) -> Case {
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
pub fn compare(case: &Case, got: &CaseOutputs, want: &CaseOutputs) -> Result<(), String> {
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
pub fn as_multiplied(case: &Case) -> Case {
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
pub fn tolerance(case: &Case) -> Tolerance {
    match case.op() {
        // Probabilities are rounded to bf16 in the tiles of the matrix units.
        Op::Attention(_) => Tolerance { absolute: 1e-6, relative: 4e-3 },
        op => op.tolerance(),
    }
}

/// The texts of some cases, each once, for [`Driver::compile`].
pub fn texts(platform: Platform, cases: &[Case]) -> Vec<Arc<Text>> {
    let shapes: HashSet<Shape> = cases.iter().map(|case| Shape::of(&case.plan)).collect();
    shapes.iter().map(|shape| Arc::new(Text::new(platform, shape))).collect()
}

/// Runs a case on a driver and compares it with the scalar reference.
pub fn check(driver: &mut dyn Driver, tuning: &Tuning, case: &Case) -> Result<(), String> {
    let case = for_gpu(case);
    let (got, _) = evaluate(driver, tuning, &case).map_err(|e| format!("{}: {e}", case.name))?;
    compare(&case, &got, &as_multiplied(&case).reference())
}
