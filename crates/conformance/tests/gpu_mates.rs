//! What shares a step changes nobody's bits on the shared GPU kernels, however many there are: decode steps have eight rows at most, ends of
//! prompts go with them, pieces of prompts apart. With LILY_GPU=cuda or LILY_GPU=metal on the GPU of this machine.

use std::sync::Arc;
use std::time::Duration;

use lily_conformance::Fixture;
use lily_conformance::gpu::device;
use lily_engine::{Engine, EngineOptions, Machine, SampleParams};
use lily_gpu::Tuning;
use lily_model::Precision;
use lily_scheduler::{
    Event, EventStream, Factory, Generator, Request, Scheduler, SchedulerOptions,
};

const TOKENS: usize = 4;

fn request(tokens: &[u32], nth: usize) -> Request {
    // The first one's log-probabilities show its logits' bits.
    let first = nth == 0;
    let prompt: Vec<u32> = match first {
        true => tokens[..20].to_vec(),
        false => tokens.iter().cycle().skip(2 * nth).take(11 + nth).copied().collect(),
    };
    Request {
        prompt: prompt.into(),
        sample: SampleParams { temperature: 0.9, seed: nth as u64, ..SampleParams::GREEDY },
        max_tokens: if first { TOKENS } else { TOKENS + 1 },
        stop_ids: Vec::new(),
        logit_bias: Vec::new(),
        logprobs: first.then_some(8),
        // A piece of four tokens, less than tiles are for.
        boundaries: if first { vec![15] } else { Vec::new() },
        thinking: None,
        query: "".into(),
    }
}

/// Ids and bits of the log-probabilities told with them.
fn told(mut stream: EventStream) -> Vec<(u32, Vec<u32>)> {
    let mut all = Vec::new();
    while let Some(event) = stream.next_timeout(Duration::from_secs(300)).expect("in time") {
        match event {
            Event::Token(token) => {
                let logprobs = token.logprob.iter();
                let bits = logprobs
                    .flat_map(|l| std::iter::once(l.chosen).chain(l.top.iter().map(|t| t.1)));
                all.push((token.id, bits.map(f32::to_bits).collect()));
            }
            Event::Failed(failure) => panic!("{failure}"),
            _ => {}
        }
    }
    all
}

/// One request's answer beside none, seven, eight and fifteen others, which come before it or behind it.
#[test]
fn an_answer_is_its_own_in_any_company() {
    let fixture = Fixture::open("tiny-c");
    let model = lily_model::load(&fixture.checkpoint, Precision::Standard).expect("it loads");
    let options =
        EngineOptions { undo: true, snapshot_bytes: 64 << 20, ..EngineOptions::new(256, 16, 64) };
    let run = |mates: usize, before: usize| {
        let (plan, weights) = (Arc::clone(&model.plan), model.weights.clone());
        let factory: Factory = Box::new(move || {
            let (plan, weights) = (Arc::clone(&plan), weights.clone());
            let device = device(Tuning::default());
            Engine::on_machine(&device, plan, weights, options, &Machine::UNKNOWN)
        });
        // As `lily serve` does on a GPU: a prompt's pieces are never cut below 32 tokens for their time's sake.
        let scheduling =
            SchedulerOptions { mixed: false, min_chunk: 32, ..SchedulerOptions::default() };
        let scheduler = Scheduler::new(factory, scheduling).expect("it starts");
        let submit = |nth| scheduler.submit(request(&fixture.tokens, nth)).expect("taken");
        let early: Vec<EventStream> = (1..=before).map(submit).collect();
        let first = submit(0);
        let late: Vec<EventStream> = (before + 1..=mates).map(submit).collect();
        let got = told(first);
        assert!(early.into_iter().chain(late).all(|mate| told(mate).len() == TOKENS + 1));
        assert_eq!(scheduler.status().faults, 0);
        got
    };
    let want = run(0, 0);
    assert_eq!(want.len(), TOKENS);
    assert!(want.iter().all(|(_, bits)| bits.len() == 9));
    for (mates, before) in [(7, 3), (8, 8), (15, 7)] {
        assert_eq!(run(mates, before), want, "{mates} mates, {before} of them before it");
    }
}
