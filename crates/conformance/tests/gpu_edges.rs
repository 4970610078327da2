//! Every boundary between two stages of a whole model's lists is needed: with the stage behind it run first, some result changes.

mod watch;

use std::collections::HashSet;

use lily_conformance::Fixture;
use lily_device::{Input, Limits, Output, Program, SegmentOut, SlotId, Step, StepError};
use lily_gpu::Tuning;
use lily_model::{Model, Precision};
use lily_ops::sample::SampleParams;
use watch::{Swap, prepare};

const SLOT: SlotId = SlotId(0);

fn output(program: &mut dyn Program, input: Input, output: Output) -> Result<Vec<u32>, StepError> {
    Ok(match &program.run(Step::one(SLOT, input, output))?.segments[..] {
        [SegmentOut::Logits(rows)] => rows.iter().map(|x| x.to_bits()).collect(),
        [SegmentOut::Sampled(sampled)] => {
            let chosen = sampled.logprobs.as_ref();
            let tops = chosen.iter().flat_map(|l| &l.top);
            let tops = tops.flat_map(|(id, p)| [*id, p.to_bits()]);
            [sampled.id].into_iter().chain(tops).collect()
        }
        other => panic!("{other:?}"),
    })
}

/// What the steps leave: a prompt, a token with its logits, one drawn, one greedy, and the slot. It ends where that is not
/// what is wanted, with an error too.
fn run(program: &mut dyn Program, tokens: &[u32], want: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let (prompt, next) = (tokens[..PROMPT].to_vec(), tokens[PROMPT]);
    let drawn = SampleParams {
        temperature: 0.9,
        top_k: 20,
        top_p: 0.95,
        presence_penalty: 0.3,
        seed: 7,
        logprobs: Some(4),
        ..SampleParams::GREEDY
    };
    let greedy = SampleParams { logprobs: Some(4), ..SampleParams::GREEDY };
    let steps = [
        (Input::Tokens(prompt), Output::Logits),
        (Input::Tokens(vec![next]), Output::Logits),
        (Input::Tokens(vec![next]), Output::Sample(drawn)),
        (Input::LastSampled, Output::Sample(greedy)),
    ];
    program.reset(SLOT).expect("the slot exists");
    let mut results = Vec::new();
    for (i, (input, wanted)) in steps.into_iter().enumerate() {
        match output(program, input, wanted) {
            Ok(result) => results.push(result),
            Err(_) => return results,
        }
        if want.get(i).is_some_and(|want| *want != results[i]) {
            return results;
        }
    }
    let slot = program.snapshot(SLOT).expect("the slot is usable");
    let bytes = [slot.recurrent, slot.conv, slot.kv].concat();
    results.push(bytes.iter().map(|b| u32::from(*b)).collect());
    results
}

/// Rows enough for matrix tiles.
const PROMPT: usize = 12;

/// `each`: every boundary, not only one of those between the same kernels.
fn check(name: &str, model: &Model, tokens: &[u32], each: bool) {
    let limits = Limits { outputs: 16, ..Limits::new(1, 256, 16) };
    // Values that share bytes make no boundary (see scratch.rs), but what is read too early would be anything.
    let tuning = Tuning::without("reuse_buffers").expect("a switch");
    let (mut program, log) = prepare(model, tuning, limits, None);
    let want = run(&mut *program, tokens, &[]);
    assert_eq!(want.len(), 5, "it runs");
    assert_eq!(run(&mut *program, tokens, &want), want, "nothing but swaps makes a difference");
    let lists = log.lock().expect("no test panics here").lists.clone();
    let lists = &lists[..lists.len() / 2];
    let (mut boundaries, mut missed) = (0, Vec::new());
    let mut tried = HashSet::new();
    for (list, listed) in lists.iter().enumerate() {
        for stage in 1..listed.stages.len() {
            let between = [listed.kernels(stage - 1), listed.kernels(stage)];
            if !tried.insert(between.clone()) && !each {
                continue;
            }
            let (mut program, _) = prepare(model, tuning, limits, Some(Swap { list, stage }));
            boundaries += 1;
            if run(&mut *program, tokens, &want) == want {
                missed.push(format!("list {list}, before stage {stage}: {between:?}"));
            }
        }
    }
    println!("{name}: {} lists, {boundaries} boundaries, {} not seen", lists.len(), missed.len());
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

#[test]
#[ignore = "minutes: a run for each of them; .ci/gpu-checks --all runs it"]
fn every_boundary_of_tiny_is_needed() {
    let fixture = Fixture::open("tiny-c");
    let model =
        lily_model::load(&fixture.checkpoint, Precision::Standard).expect("the model loads");
    check("tiny-c", &model, &fixture.tokens, true);
}

#[test]
#[ignore = "minutes: a run for each of them; .ci/gpu-checks --all runs it"]
fn boundaries_of_the_demo_model_are_needed() {
    let checkpoint = lily_demo::open().expect("the demo model opens");
    let model = lily_model::load(&checkpoint, Precision::Standard).expect("the model loads");
    let tokens: Vec<u32> = (0..=PROMPT as u32).map(|i| 100 + 37 * i).collect();
    check("the demo model", &model, &tokens, false);
}
