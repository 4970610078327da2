//! What each kernel of a step of the real shape takes on an NVIDIA GPU.
//!
//! usage: decode_profile [CONTEXT [ROWS]] [--prompt] [--serial] [--without SWITCH]... [--summary]
//!
//! A decode step of ROWS slots, or with --prompt the last ROWS tokens of a prompt. --serial: no kernel starts before the one before it has
//! ended. --summary: the step alone.
//!
//! All launches of one kernel for one operation, of all layers one after another, as a CUDA graph: each layer's weights are
//! others, so that none comes from the cache. The whole step beside them. Weights are zero, for times do not depend on them, but those by which
//! each row chooses experts of its own: embeddings, routers, and the norms before these.

use std::collections::BTreeMap;
use std::sync::Arc;

use lily_bench::synth::Shape as ModelShape;
use lily_cuda::{CudaDriver, Options};
use lily_device::Limits;
use lily_gpu::DeviceWeight;
use lily_gpu::kernels::common::{SegmentEntry, SlotHeader};
use lily_gpu::kernels::sample::SamplerEntry;
use lily_gpu::program::{Head, Kind, Recording};
use lily_gpu::upload::SlabLayout;
use lily_gpu::{
    CommandList, Dispatch, Driver, Pipeline, Placement, Shape, StepShape, Text, Tuning,
};
use lily_model::{Precision, plan_of_config};
use lily_ops::sample::SampleParams;
use lily_ops::{Op, Plan, ValueId};

const ROUNDS: usize = 20;

/// Median seconds of a list, from the third run on, when it is a graph.
fn time(driver: &mut CudaDriver, list: CommandList, place: &dyn Fn(&mut CudaDriver)) -> f64 {
    let list = Arc::new(list);
    let mut times: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            place(driver);
            let submission = driver.submit(&list).expect("submitted");
            driver.wait(submission).expect("ran").seconds
        })
        .skip(3)
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Tokens whose embeddings are numbers.
const TOKENS: u32 = 16;

/// Gives some rows of a quantized weight numbers around zero.
fn fill(driver: &mut CudaDriver, weight: &DeviceWeight, rows: u32) {
    let m = weight.matrix;
    let (row, middle) = if m.format == 0 { (m.cols / 2, 7.5) } else { (m.cols, 127.5) };
    let mut seed = m.codes;
    let codes: Vec<u8> = (0..rows * row)
        .map(|_| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 24) as u8
        })
        .collect();
    let bf16 = |x: f32| vec![(x.to_bits() >> 16) as u16; (rows * m.cols / 64) as usize];
    let (scales, biases) = (bf16(1.0 / middle), bf16(-1.0));
    let parts = [
        (m.codes, &codes[..]),
        (m.scales, bytemuck::cast_slice(&scales)),
        (m.biases, bytemuck::cast_slice(&biases)),
    ];
    for (unit, bytes) in parts {
        driver.write(weight.slab.buffer, u64::from(unit) * 16, bytes).expect("weights");
    }
}

/// Lets the rows choose experts of their own.
fn spread_experts(driver: &mut CudaDriver, plan: &Plan, weights: &[DeviceWeight]) {
    let made_by = |value: ValueId| {
        plan.nodes().find_map(|n| match &n.op {
            Op::Linear(op) if op.out == value => Some((op.weight, op.x)),
            Op::RmsNorm(op) if op.out == value => Some((op.weight, op.x)),
            _ => None,
        })
    };
    for node in plan.nodes() {
        match &node.op {
            Op::Embed(op) => fill(driver, &weights[op.table.0 as usize], TOKENS),
            Op::Router(op) => {
                let (router, x) = made_by(op.logits).expect("a router's projection");
                let (norm, _) = made_by(x).expect("a norm before the router");
                let router = &weights[router.0 as usize];
                fill(driver, router, router.matrix.rows);
                let norm = &weights[norm.0 as usize];
                let ones = vec![1f32; norm.matrix.cols as usize];
                let at = u64::from(norm.matrix.codes) * 16;
                driver.write(norm.slab.buffer, at, bytemuck::cast_slice(&ones)).expect("weights");
            }
            _ => {}
        }
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let has = |name: &str| args.iter().any(|a| a == name);
    let numbers: Vec<u32> = args.iter().filter_map(|a| a.parse().ok()).collect();
    let (context, rows) = (numbers.first().map_or(4096, |n| *n), numbers.get(1).map_or(1, |n| *n));
    let prompt = has("--prompt");
    let (slots, slot_rows) = if prompt { (1, rows) } else { (rows, 1) };
    let mut tuning = Tuning::default();
    for pair in args.windows(2).filter(|p| p[0] == "--without") {
        let switch = Tuning::SWITCHES.iter().find(|(name, _)| *name == pair[1]);
        *switch.expect("the name of a switch").1(&mut tuning) = false;
    }
    let config = ModelShape::qwen3_6_35b_a3b(ModelShape::REAL_LAYERS).config();
    let (_, plan) = plan_of_config("real", &config, Precision::Standard).expect("the real config");
    let mut driver =
        CudaDriver::open(Options { early_starts: !has("--serial"), ..Options::default() })
            .expect("an NVIDIA GPU");
    let profile = driver.profile().clone();
    let layout = SlabLayout::new(&plan, profile.max_buffer).expect("slabs");
    let slabs: Vec<_> = layout
        .slabs
        .iter()
        .map(|bytes| driver.allocate("weights", *bytes, Placement::Device).expect("memory"))
        .collect();
    let weights = layout.weights(&plan, &slabs);
    let shape = Shape::of(&plan);
    spread_experts(&mut driver, &plan, &weights);
    // A kernel alone finds what it reads where the whole step left it.
    tuning.reuse_buffers = false;
    let recording = Recording::new(Arc::new(plan), weights, shape, tuning, profile.clone());
    let limits = Limits::new(slots as usize, context as usize, rows as usize);
    let segments = vec![slot_rows; slots as usize];
    let step = StepShape { segments, outputs: slots, context };
    let kind = Kind { shape: step, tables: 0, head: Head::Sample { greedy: true } };
    let (mut list, _, memory) =
        recording.record_on(&mut driver, &limits, &kind, true).expect("recorded");
    let pages = context.div_ceil(256);
    for slot in 0..slots {
        let table: Vec<u32> = (0..pages).map(|p| slot * pages + p).collect();
        memory.write_pages(&mut driver, slot as usize, 0, &table).expect("pages");
    }
    let entries: Vec<SegmentEntry> = (0..slots)
        .map(|slot| SegmentEntry {
            slot,
            first: slot,
            rows: slot_rows,
            first_output: slot_rows - 1,
        })
        .collect();
    let tables = &memory.tables[0];
    let at = tables.segments;
    driver.write(at.buffer, at.offset, bytemuck::cast_slice(&entries)).expect("segments");
    let tokens: Vec<u32> = (0..rows).map(|row| row % TOKENS).collect();
    let at = tables.tokens;
    driver.write(at.buffer, at.offset, bytemuck::cast_slice(&tokens)).expect("tokens");
    let entries: Vec<SamplerEntry> =
        (0..slots).map(|row| SamplerEntry::new(&SampleParams::GREEDY, row, true, None)).collect();
    let extra = memory.extra[0];
    driver.write(extra.buffer, extra.offset, bytemuck::cast_slice(&entries)).expect("sampler");
    list.inputs = vec![memory.inputs(0)];
    let text = Arc::new(Text::new(profile.platform, &shape));
    let kernels: Vec<&'static str> = list.dispatches.iter().map(|d| d.kernel).collect();
    list.pipelines = driver.pipelines(&text, &kernels).expect("the text compiles");
    // The step's last kernel moves the slots on: before each measurement they go back.
    let place = |driver: &mut CudaDriver| {
        // Room for the runs of a decode step, none behind a prompt's.
        let position = context - if prompt { rows } else { 32 };
        for slot in 0..slots {
            let header = SlotHeader { position, last_token: 1, generated: 0, parity: 0 };
            memory.write_header(driver, slot as usize, header).expect("headers");
        }
    };
    place(&mut driver);
    let whole = time(&mut driver, list.clone(), &place);
    if has("--summary") {
        println!("{}\t{:.1} us", args.join(" "), whole * 1e6);
        return;
    }
    let mut groups: BTreeMap<(&str, &str), Vec<(Dispatch, Pipeline)>> = BTreeMap::new();
    for (dispatch, pipeline) in list.dispatches.iter().zip(&list.pipelines) {
        let group = groups.entry((dispatch.op, dispatch.kernel)).or_default();
        group.push((dispatch.clone(), *pipeline));
    }
    let mut lines = Vec::new();
    for ((op, kernel), launches) in groups {
        let traffic: u64 = launches.iter().map(|(d, _)| d.traffic).sum();
        let (dispatches, pipelines): (Vec<_>, Vec<_>) = launches.into_iter().unzip();
        let stages = (0..dispatches.len()).collect();
        let count = dispatches.len();
        let grid = dispatches[0].groups;
        let threads = dispatches[0].threads;
        let inputs = list.inputs.clone();
        let own = CommandList { dispatches, pipelines, stages, inputs, ..CommandList::default() };
        lines.push((time(&mut driver, own, &place), op, kernel, count, traffic, grid, threads));
    }
    lines.sort_by(|a, b| b.0.total_cmp(&a.0));
    println!("context {context}, {rows} rows, whole step {:.1} us", whole * 1e6);
    println!("operation\tkernel\tlaunches\tus\tus each\tGB/s\tgrid\tthreads");
    for (seconds, op, kernel, count, traffic, grid, threads) in &lines {
        println!(
            "{op}\t{kernel}\t{count}\t{:.1}\t{:.2}\t{:.0}\t{grid:?}\t{threads}",
            seconds * 1e6,
            seconds * 1e6 / *count as f64,
            *traffic as f64 / seconds / 1e9
        );
    }
    let sum: f64 = lines.iter().map(|l| l.0).sum();
    println!("sum of all\t\t\t{:.1}", sum * 1e6);
}
