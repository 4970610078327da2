//! The built-in model on the device: near mlx-lm's figures, and the same tokens however steps overlap.

use std::sync::Arc;

use anyhow::{Context, bail};
use lily_cpu::{CpuDevice, CpuOptions};
use lily_device::{
    Device, Input, Limits, Output, Program, Score, SegmentOut, SlotId, Step, Ticket,
};
use lily_model::Precision;
use lily_ops::sample::SampleParams;
use serde_json::{Value, json};

use super::{Outcome, Part};
use crate::options::ComputeArgs;

const SLOT: SlotId = SlotId(0);
const CHUNK: usize = 64;

/// How far perplexity may be from mlx-lm's on any device, and how often the most probable token must be that of the precise mode.
const RATIO: f64 = lily_demo::PERPLEXITY_BOUND_ANY_ORDER;
const AGREEMENT: f64 = 0.97;

fn program(
    device: &dyn Device,
    precision: Precision,
    limits: Limits,
) -> anyhow::Result<Box<dyn Program>> {
    let model = lily_model::load(&lily_demo::open()?, precision)?;
    Ok(device.prepare(Arc::clone(&model.plan), model.weights, limits)?)
}

/// Scores of every token from the second on.
fn scores(program: &mut dyn Program, ids: &[u32]) -> anyhow::Result<Vec<Score>> {
    program.reset(SLOT)?;
    let mut all = Vec::new();
    for (input, targets) in ids[..ids.len() - 1].chunks(CHUNK).zip(ids[1..].chunks(CHUNK)) {
        let step = Step::one(SLOT, Input::Tokens(input.to_vec()), Output::Scores(targets.to_vec()));
        match &program.run(step)?.segments[..] {
            [SegmentOut::Scores(list)] => all.extend_from_slice(list),
            other => bail!("a step that was asked for scores gave {other:?}"),
        }
    }
    Ok(all)
}

/// A passage of the golden file: its ids, and mlx-lm's log-probabilities.
fn passages() -> anyhow::Result<Vec<(Vec<u32>, Vec<f64>)>> {
    let golden: Value = serde_json::from_str(lily_demo::PERPLEXITY)?;
    let numbers =
        |list: &Value| -> Option<Vec<f64>> { list.as_array()?.iter().map(Value::as_f64).collect() };
    let passage = |p: &Value| {
        let ids = numbers(&p["ids"])?.into_iter().map(|id| id as u32).collect();
        Some((ids, numbers(&p["logprob"])?))
    };
    let all = golden["passages"].as_array().map(|list| list.iter().map(passage).collect());
    all.flatten().context("the built-in golden figures are damaged")
}

/// Perplexity beside mlx-lm's, most probable tokens beside those of the CPU's precise mode, which is near mlx-lm's to four digits.
pub fn perplexity(compute: &ComputeArgs) -> anyhow::Result<Part> {
    let limits = Limits::new(1, 256, CHUNK);
    let mut here = program(&*compute.device()?, Precision::Standard, limits)?;
    let cpu = CpuDevice::new(CpuOptions::default());
    let mut precise = program(&cpu, Precision::Precise, limits)?;
    let (mut nll, mut want_nll, mut equal, mut count) = (0f64, 0f64, 0, 0);
    for (ids, want) in passages()? {
        let (got, exact) = (scores(&mut *here, &ids)?, scores(&mut *precise, &ids)?);
        nll -= got.iter().map(|s| f64::from(s.logprob)).sum::<f64>();
        want_nll -= want.iter().sum::<f64>();
        count += got.len();
        equal += got.iter().zip(&exact).filter(|(a, b)| a.top1 == b.top1).count();
    }
    let ratio = ((nll - want_nll) / count as f64).exp();
    let agreement = equal as f64 / count as f64;
    let near = (ratio - 1.0).abs() <= RATIO && agreement >= AGREEMENT;
    let lines = vec![format!(
        "{count} positions: perplexity {:+.3} % of mlx-lm's (allowed {:.1} %), most probable token equal at {:.2} % (needed {:.0} %)",
        100.0 * (ratio - 1.0),
        100.0 * RATIO,
        100.0 * agreement,
        100.0 * AGREEMENT
    )];
    let figures =
        json!({ "positions": count, "perplexity_ratio": ratio, "top1_agreement": agreement });
    Ok(Part { outcome: Outcome::of(near), lines, figures })
}

/// Tokens of the overlap test.
const TOKENS: usize = 128;

/// Tokens after a prompt, `ahead` steps in flight.
fn generate(
    program: &mut dyn Program,
    prompt: &[u32],
    params: &SampleParams,
    ahead: usize,
) -> anyhow::Result<Vec<u32>> {
    program.reset(SLOT)?;
    program.begin_answer(SLOT, &[])?;
    let sample = || Output::Sample(params.clone());
    let mut flights: Vec<Ticket> =
        vec![program.submit(Step::one(SLOT, Input::Tokens(prompt.to_vec()), sample()))?];
    let (mut ids, mut submitted) = (Vec::new(), 1);
    while ids.len() < TOKENS {
        while submitted < TOKENS && flights.len() < ahead {
            flights.push(program.submit(Step::one(SLOT, Input::LastSampled, sample()))?);
            submitted += 1;
        }
        match &program.wait(flights.remove(0))?.segments[..] {
            [SegmentOut::Sampled(sampled)] => ids.push(sampled.id),
            other => bail!("a step that was asked for a token gave {other:?}"),
        }
        if flights.is_empty() && submitted < TOKENS {
            flights.push(program.submit(Step::one(SLOT, Input::LastSampled, sample()))?);
            submitted += 1;
        }
    }
    Ok(ids)
}

/// The same tokens with one step in flight and with two, greedy and drawn.
pub fn overlap(compute: &ComputeArgs) -> anyhow::Result<Part> {
    let device = compute.device()?;
    if !device.overlaps() {
        return Ok(Part::left_out("this device runs one step at a time"));
    }
    let limits = Limits { undo: true, ..Limits::new(1, 512, CHUNK) };
    let mut program = program(&*device, Precision::Standard, limits)?;
    let (ids, _) = passages()?.into_iter().next().context("the golden figures hold no passage")?;
    let prompt = &ids[..ids.len().min(48)];
    let drawn = SampleParams {
        temperature: 0.9,
        top_k: 40,
        top_p: 0.95,
        repetition_penalty: 1.1,
        seed: 7,
        ..SampleParams::GREEDY
    };
    let (mut lines, mut all) = (Vec::new(), true);
    for (name, params) in [("greedy", SampleParams::GREEDY), ("drawn", drawn)] {
        let one = generate(&mut *program, prompt, &params, 1)?;
        let two = generate(&mut *program, prompt, &params, 2)?;
        let same = one.iter().zip(&two).take_while(|(a, b)| a == b).count();
        all &= same == TOKENS;
        lines.push(match same == TOKENS {
            true => {
                format!("{name}: {TOKENS} tokens, the same with one step in flight and with two")
            }
            false => format!("{name}: with two steps in flight token {same} is another"),
        });
    }
    Ok(Part { outcome: Outcome::of(all), lines, figures: Value::Null })
}
