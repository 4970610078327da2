//! Every boundary between two stages of a whole model's lists is needed: with the stage behind it run first, some result changes.

mod watch;

use std::collections::HashSet;

use lily_conformance::Fixture;
use lily_conformance::gpu::units;
use lily_device::{Input, Limits, Output, Program, SegmentOut, SlotId, Snapshot, Step, StepError};
use lily_gpu::Tuning;
use lily_model::{Model, Precision};
use lily_ops::sample::SampleParams;
use lily_softgpu::Options;
use watch::{Swap, prepare_on};

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

/// What is run: which model on which host, what its slot has seen, how many tokens the prompt has.
struct Scene<'a> {
    name: &'a str,
    model: &'a Model,
    options: Options,
    before: Option<Snapshot>,
    tokens: &'a [u32],
    prompt: usize,
}

impl Scene<'_> {
    /// What the steps leave: a prompt, a token with its logits, one drawn, one greedy, and the slot. It ends where that is not
    /// what is wanted, with an error too.
    fn run(&self, program: &mut dyn Program, want: &[Vec<u32>]) -> Vec<Vec<u32>> {
        let (prompt, next) = (self.tokens[..self.prompt].to_vec(), self.tokens[self.prompt]);
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
        if let Some(before) = &self.before {
            program.restore(SLOT, before).expect("the snapshot fits");
        }
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

    /// `each`: every boundary, not only one of those between the same kernels. Those of which `only` says so; `idle` are kernels in one pair that may
    /// come in either order.
    fn check(&self, each: bool, only: &[&str], idle: &[[&str; 2]]) {
        let limits = Limits { outputs: 48, ..Limits::new(1, 512, 48) };
        // Values that share bytes make no boundary (see scratch.rs), but what is read too early would be anything.
        let tuning = Tuning::without("reuse_buffers").expect("a switch");
        let prepare = |swap| prepare_on(self.model, tuning, limits, swap, self.options.clone());
        let (mut program, log) = prepare(None);
        let want = self.run(&mut *program, &[]);
        assert_eq!(want.len(), 5, "it runs");
        let lists = log.lock().expect("no test panics here").lists.clone();
        assert_eq!(self.run(&mut *program, &want), want, "nothing but swaps makes a difference");
        let (mut boundaries, mut missed) = (0, Vec::new());
        let mut tried = HashSet::new();
        for (list, listed) in lists.iter().enumerate() {
            for stage in 1..listed.stages.len() {
                let between = [listed.kernels(stage - 1), listed.kernels(stage)];
                let named = |part: &str| between.iter().flatten().any(|k| k.contains(part));
                let wanted = only.is_empty() || only.iter().any(|part| named(part));
                let free =
                    idle.iter().any(|pair| between.iter().zip(pair).all(|(k, p)| *k == [*p]));
                if !wanted || free || !tried.insert(between.clone()) && !each {
                    continue;
                }
                let (mut program, _) = prepare(Some(Swap { list, stage }));
                boundaries += 1;
                if self.run(&mut *program, &want) == want {
                    missed.push(format!("list {list}, before stage {stage}: {between:?}"));
                }
            }
        }
        let name = self.name;
        println!(
            "{name}: {} lists, {boundaries} boundaries, {} not seen",
            lists.len(),
            missed.len()
        );
        for part in only {
            let tried = tried.iter().flatten().flatten().any(|kernel| kernel.contains(part));
            assert!(tried, "{name}: no boundary of {part}");
        }
        assert!(missed.is_empty(), "{}", missed.join("\n"));
    }
}

fn tiny() -> (Model, Vec<u32>) {
    let fixture = Fixture::open("tiny-c");
    let model = lily_model::load(&fixture.checkpoint, Precision::Standard);
    (model.expect("the model loads"), fixture.tokens.clone())
}

fn demo() -> (Model, Vec<u32>) {
    let checkpoint = lily_demo::open().expect("the demo model opens");
    let model = lily_model::load(&checkpoint, Precision::Standard).expect("the model loads");
    (model, (0..48).map(|i| 100 + 37 * i).collect())
}

/// Rows enough for matrix tiles, and for a chunk of the recurrence by matrix units.
const PROMPT: usize = 12;
const CHUNKED: usize = 33;

#[test]
#[ignore = "minutes: a run for each of them; .ci/gpu-checks --all runs it"]
fn every_boundary_of_tiny_is_needed() {
    let (model, tokens) = tiny();
    let (model, tokens) = (&model, &tokens[..]);
    let options = Options { seed: None, ..Options::default() };
    let scene = Scene { name: "tiny-c", model, options, before: None, tokens, prompt: PROMPT };
    scene.check(true, &[], &[]);
}

#[test]
#[ignore = "minutes: a run for each of them; .ci/gpu-checks --all runs it"]
fn boundaries_of_the_demo_model_are_needed() {
    let (model, tokens) = demo();
    let (model, tokens) = (&model, &tokens[..]);
    let options = Options { seed: None, ..Options::default() };
    let scene =
        Scene { name: "the demo model", model, options, before: None, tokens, prompt: PROMPT };
    scene.check(false, &[], &[]);
}

/// By matrix units: one boundary of each kind.
#[test]
#[ignore = "minutes: a run for each of them; .ci/gpu-checks --all runs it"]
fn boundaries_by_units_are_needed() {
    let (model, tokens) = tiny();
    let (model, tokens) = (&model, &tokens[..]);
    let options = Options { seed: None, ..units() };
    let scene =
        Scene { name: "tiny-c by units", model, options, before: None, tokens, prompt: CHUNKED };
    scene.check(false, &["delta_chunk_parts", "gemm_wgmma", "gemv_mma", "experts_in_wgmma"], &[]);
}

/// A cache whose splits are pages, which matrix units take.
#[test]
#[ignore = "minutes: a run for each of them; .ci/gpu-checks --all runs it"]
fn boundaries_of_pages_by_units_are_needed() {
    let (model, tokens) = demo();
    let mut options = Options { seed: None, ..units() };
    options.profile.thresholds.fixed_from = 256;
    let state = model.plan.state;
    let position = 300;
    let count = state.kv_layers * 2 * state.kv_heads * position * state.head_dim;
    let before = Snapshot {
        position,
        last_sampled: Some(5),
        generated: 0,
        counts: Default::default(),
        recurrent: vec![0; state.recurrent_bytes()],
        conv: vec![0; state.recurrent_layers * state.conv_len() * 2],
        // Numbers between 0.5 and 1, of either sign.
        kv: (0..count).flat_map(|i| [(i * 37 % 251) as u8, [0x3F, 0xBF][i % 5 % 2]]).collect(),
    };
    let scene = Scene {
        name: "pages by units",
        model: &model,
        options,
        before: Some(before),
        tokens: &tokens,
        prompt: PROMPT,
    };
    // The two that fill the partial sums do so for different slots: for one slot either may come first.
    let idle = [["attention_split", "attention_fixed_units"]];
    scene.check(false, &["attention_fixed_units"], &idle);
}
