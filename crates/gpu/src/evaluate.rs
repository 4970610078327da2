//! Runs one operation alone, as conformance tests do.

use std::sync::Arc;

use half::bf16;
use lily_device::Limits;
use lily_ops::plan::PAGE_TOKENS;
use lily_ops::{Case, CaseOutputs, ElementType, HostTensor, Plan, SlotState, ValueId};

use crate::driver::{Driver, DriverError, Placement};
use crate::encode::{self, Bound};
use crate::kernels::common::{Context, SegmentEntry, SlotHeader, StepShape, Tables};
use crate::kernels::supported;
use crate::list::{CommandList, Operand, Recorder};
use crate::memory::Memory;
use crate::parts::Parts;
use crate::scratch::Scratch;
use crate::text::{Shape, Text};
use crate::tuning::Tuning;
use crate::upload::SlabLayout;
use crate::values::elements;

/// Why a case was not run.
#[derive(Debug, thiserror::Error)]
pub enum EvaluateError {
    /// There is no kernel for it.
    #[error("{0}")]
    Unsupported(String),
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Most operations leave the header's parity to the end of a step: alone they read one state and write the other.
const PARITY: u32 = 1;

/// Runs the operation of `case` and returns what it left behind. Inputs are rounded to the element types
/// that a GPU keeps them in. Slots use pages in a shuffled order, and the state of odd parity.
pub fn evaluate(
    driver: &mut dyn Driver,
    tuning: &Tuning,
    case: &Case,
) -> Result<(CaseOutputs, CommandList), EvaluateError> {
    let plan = &case.plan;
    let state = &plan.state;
    let appends = case.op().name() == "attention_prep";
    let row = state.kv_heads * state.head_dim * state.kv_layers.max(1);
    let rows_of = |slot: usize| case.segments.iter().find(|s| s.slot == slot).map_or(0, |s| s.rows);
    let cached: Vec<usize> = case.slots.iter().map(|s| s.k.len() / row).collect();
    let after: Vec<usize> =
        (0..cached.len()).map(|s| cached[s] + if appends { rows_of(s) } else { 0 }).collect();
    let pages_each = after.iter().map(|n| n.div_ceil(PAGE_TOKENS)).max().unwrap_or(0).max(1);
    let limits = Limits {
        slots: case.slots.len().max(1),
        context: pages_each * PAGE_TOKENS,
        rows: case.tokens.len().max(1),
        outputs: case.output_rows.len().max(1),
        pages: pages_each * case.slots.len().max(1),
        undo: false,
    };
    let memory = Memory::new(driver, plan, &limits, 1, 0)?;
    let tables = &memory.tables[0];

    // Pages of the slots interleave, last ones first.
    let slots = case.slots.len();
    let pages: Vec<Vec<u32>> = (0..slots)
        .map(|s| (0..pages_each).rev().map(|p| (p * slots + s) as u32).collect())
        .collect();
    for (s, start) in case.slots.iter().enumerate() {
        memory.write_pages(driver, s, 0, &pages[s])?;
        memory.import(driver, s, PARITY, &pages[s], start)?;
        let position = start.position as u32;
        let header = SlotHeader { position, last_token: 0, generated: 0, parity: PARITY };
        memory.write_header(driver, s, header)?;
    }
    write_step(driver, tables, case)?;

    let layout =
        SlabLayout::new(plan, driver.profile().max_buffer).map_err(EvaluateError::Unsupported)?;
    let refs: Vec<_> = case.weights.iter().map(lily_ops::CaseWeight::as_ref).collect();
    let weights = layout.upload(driver, plan, &refs)?;
    let values = allocate_values(driver, case)?;

    let shape = Shape::of(plan);
    let profile = driver.profile().clone();
    supported(&shape, &profile).map_err(EvaluateError::Unsupported)?;
    let step = StepShape {
        segments: case.segments.iter().map(|s| s.rows as u32).collect(),
        outputs: case.output_rows.len() as u32,
        context: (0..slots)
            .map(|s| (case.slots[s].position + rows_of(s)) as u32)
            .max()
            .unwrap_or(0)
            .max(1)
            .next_power_of_two(),
    };
    let context = Context { profile: &profile, tuning, shape: &shape, step, tables };
    let mut recorder = Recorder { op: case.op().name(), ..Recorder::default() };
    let mut scratch = Scratch::default();
    let mut bound =
        Bound { plan, values: &values, weights: &weights, scratch: &mut scratch, routes: None };
    encode::op(&mut recorder, &context, &mut bound, case.op())
        .map_err(EvaluateError::Unsupported)?;
    let mut list = recorder.finish(tuning.concurrent);
    let probe = scratch.place(&mut list.clone(), crate::Buffer(0), tuning.reuse_buffers);
    let arena = driver.allocate("scratch", probe.max(16), Placement::Device)?;
    scratch.place(&mut list, arena, tuning.reuse_buffers);
    let text = Arc::new(Text::new(profile.platform, &shape));
    let kernels: Vec<&'static str> = list.dispatches.iter().map(|d| d.kernel).collect();
    list.pipelines = driver.pipelines(&text, &kernels)?;
    list.inputs = vec![memory.inputs(0)];
    let submission = Parts::new(list.clone()).submit(driver)?;
    driver.wait(submission)?;

    let mut outputs = Vec::new();
    for id in case.op().writes() {
        outputs.push((id, read_value(driver, plan, case, id, &values)?));
    }
    let mut states = Vec::new();
    for (s, before) in case.slots.iter().enumerate() {
        // An operation changes the parts of the state that it writes; the others stay where they were.
        let [recurrent, conv] = written(case.op().name(), rows_of(s) > 0);
        let parity = |written: bool| if written { PARITY ^ 1 } else { PARITY };
        let r = memory.export(driver, s, parity(recurrent), &pages[s], after[s])?;
        let c = memory.export(driver, s, parity(conv), &pages[s], after[s])?;
        let layers = merge(plan, case, &r, &c, before);
        states.push(SlotState { position: before.position, k: r.k, v: r.v, ..layers });
    }
    let outputs = CaseOutputs { values: outputs, slots: states };
    Ok((outputs, list))
}

/// Whether an operation writes the recurrent and the convolution's state.
fn written(op: &str, has_rows: bool) -> [bool; 2] {
    [op == "delta_scan" && has_rows, op == "causal_conv" && has_rows]
}

/// Recurrent and convolution state after a case. One operation writes one layer of the other state; the
/// layers it does not write are those from before.
fn merge(
    plan: &Plan,
    case: &Case,
    recurrent: &SlotState,
    conv: &SlotState,
    before: &SlotState,
) -> SlotState {
    let layer = match case.op() {
        lily_ops::Op::DeltaScan(op) => Some(op.layer),
        lily_ops::Op::CausalConv(op) => Some(op.layer),
        _ => None,
    };
    let pick = |after: &[f32], before: &[f32], len: usize| -> Vec<f32> {
        let mut all = before.to_vec();
        if let Some(layer) = layer {
            let range = layer * len..(layer + 1) * len;
            if range.end <= all.len() {
                all[range.clone()].copy_from_slice(&after[range]);
            }
        }
        all
    };
    let (r, c) = (plan.state.recurrent_len(), plan.state.conv_len());
    SlotState {
        recurrent: pick(&recurrent.recurrent, &before.recurrent, r),
        conv: pick(&conv.conv, &before.conv, c),
        ..SlotState::default()
    }
}

fn write_step(driver: &mut dyn Driver, tables: &Tables, case: &Case) -> Result<(), DriverError> {
    let mut rows = Vec::new();
    let mut segments = Vec::new();
    for (i, s) in case.segments.iter().enumerate() {
        let outputs = case.output_rows.iter().filter(|r| **r < s.first).count();
        segments.push(SegmentEntry {
            slot: s.slot as u32,
            first: s.first as u32,
            rows: s.rows as u32,
            first_output: outputs as u32,
        });
        rows.extend(std::iter::repeat_n(i as u32, s.rows));
    }
    let output_rows: Vec<u32> = case.output_rows.iter().map(|r| *r as u32).collect();
    driver.write(
        tables.segments.buffer,
        tables.segments.offset,
        bytemuck::cast_slice(&segments),
    )?;
    driver.write(
        tables.row_segments.buffer,
        tables.row_segments.offset,
        bytemuck::cast_slice(&rows),
    )?;
    driver.write(tables.tokens.buffer, tables.tokens.offset, bytemuck::cast_slice(&case.tokens))?;
    driver.write(
        tables.output_rows.buffer,
        tables.output_rows.offset,
        bytemuck::cast_slice(&output_rows),
    )
}

/// A buffer for each value, inputs filled; the rest NaN, so that an element that no kernel writes shows.
fn allocate_values(driver: &mut dyn Driver, case: &Case) -> Result<Vec<Operand>, DriverError> {
    let mut values = Vec::new();
    let types = elements(&case.plan);
    for (i, (value, element)) in case.plan.values.iter().zip(types).enumerate() {
        let rows = value.rows.count(case.tokens.len(), case.output_rows.len());
        let count = rows * value.width;
        let bytes = ((count * element.size()) as u64).max(16);
        let buffer = driver.allocate(value.name, bytes, Placement::Device)?;
        let input = case.inputs.iter().find(|(id, _)| id.0 as usize == i).map(|(_, t)| t);
        let data: Vec<u8> = match (input, element) {
            (Some(HostTensor::F32(x)), ElementType::Bf16) => {
                x.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect()
            }
            (Some(HostTensor::F32(x)), _) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
            (Some(HostTensor::U32(x)), _) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
            (None, _) => vec![0xFF; bytes as usize],
        };
        driver.write(buffer, 0, &data)?;
        values.push(Operand { buffer, offset: 0, bytes, element });
    }
    Ok(values)
}

fn read_value(
    driver: &mut dyn Driver,
    plan: &Plan,
    case: &Case,
    id: ValueId,
    values: &[Operand],
) -> Result<HostTensor, DriverError> {
    let value = plan.value(id);
    let operand = values[id.0 as usize];
    let count = value.rows.count(case.tokens.len(), case.output_rows.len()) * value.width;
    let mut bytes = vec![0u8; count * operand.element.size()];
    driver.read(operand.buffer, operand.offset, &mut bytes)?;
    Ok(match operand.element {
        ElementType::U32 => {
            HostTensor::U32(bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect())
        }
        ElementType::F32 => {
            HostTensor::F32(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
        }
        ElementType::Bf16 => HostTensor::F32(
            bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        ),
    })
}
