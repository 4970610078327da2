//! The demo model on the CPU: answers with seeds are the same alone and in company, cold and warm, preempted
//! or not, with their log-probabilities to the last bit.

mod common;

use std::sync::Arc;

use common::{PATIENCE, request};
use lily_cpu::{CpuDevice, CpuOptions};
use lily_engine::{Engine, EngineOptions, Machine, SampleParams};
use lily_model::Precision;
use lily_scheduler::*;

fn scheduler(engine: EngineOptions, options: SchedulerOptions) -> Scheduler {
    let checkpoint = lily_demo::open().expect("the demo model opens");
    let model = lily_model::load(&checkpoint, Precision::Standard).expect("it loads");
    let device = CpuDevice::new(CpuOptions { threads: Some(2), isa: None });
    let factory: Factory = Box::new(move || {
        let (plan, weights) = (Arc::clone(&model.plan), model.weights.clone());
        Engine::on_machine(&device, plan, weights, engine, &Machine::UNKNOWN)
    });
    Scheduler::new(factory, options).expect("it starts")
}

/// Token ids and the log-probabilities told with them, and how much of the prompt was kept.
type Answer = (Vec<(u32, Option<Logprob>)>, usize);

fn answer(mut stream: EventStream) -> Answer {
    let (mut tokens, mut reused) = (Vec::new(), 0);
    while let Some(event) = stream.next_timeout(PATIENCE).expect("an event comes") {
        match event {
            Event::Started { cached, .. } => reused = cached,
            Event::Token(token) => tokens.push((token.id, token.logprob)),
            Event::Finished(_) => {}
            Event::Failed(failure) => panic!("{failure}"),
        }
    }
    (tokens, reused)
}

fn requests() -> Vec<Request> {
    let kinds = [
        SampleParams { temperature: 0.9, top_k: 20, top_p: 0.95, ..SampleParams::GREEDY },
        SampleParams { temperature: 1.3, presence_penalty: 1.0, ..SampleParams::GREEDY },
        SampleParams { repetition_penalty: 1.2, frequency_penalty: 0.3, ..SampleParams::GREEDY },
        SampleParams { temperature: 0.7, min_p: 0.02, ..SampleParams::GREEDY },
    ];
    (0..8usize)
        .map(|i| {
            // Some share a beginning; most cross a page while they answer.
            let tokens = (0..225 + 7 * i).map(|t| {
                let kind = if t < 100 { i % 2 } else { i };
                ((t * 31 + kind * 577) % 4000) as u32
            });
            let mut r = request(tokens.collect(), 48);
            r.sample = SampleParams { seed: 100 + i as u64, ..kinds[i % 4].clone() };
            r.logprobs = (i % 3 != 0).then_some(i as u32 % 3 * 2);
            r.logit_bias = if i == 5 { vec![(7, 3.0), (300, -100.0)] } else { Vec::new() };
            r.boundaries = vec![100];
            r
        })
        .collect()
}

#[test]
fn alone_and_in_company() {
    let none = SchedulerOptions { cache_bytes: 0, ..SchedulerOptions::default() };
    let alone = scheduler(EngineOptions::new(1024, 1, 512), none);
    let requests = requests();
    let want: Vec<Answer> =
        requests.iter().map(|r| answer(alone.submit(r.clone()).expect("taken"))).collect();
    assert!(want.iter().all(|(tokens, reused)| tokens.len() == 48 && *reused == 0));
    let engine = EngineOptions::new(1024, 4, 40);
    let engine = EngineOptions { pages: Some(5), snapshot_bytes: 1 << 30, ..engine };
    let company = scheduler(engine, SchedulerOptions::default());
    for round in ["cold", "warm"] {
        let streams: Vec<EventStream> =
            requests.iter().map(|r| company.submit(r.clone()).expect("taken")).collect();
        for (i, stream) in streams.into_iter().enumerate() {
            let (tokens, reused) = answer(stream);
            assert!(tokens == want[i].0, "{round}: {i}");
            let prompt = requests[i].prompt.len();
            assert!(reused < prompt && (round == "cold" || reused == prompt - 1), "{reused}");
        }
    }
    let status = company.status();
    assert!(status.preemptions > 0 && status.faults == 0, "{status:?}");
    assert!(
        status.prompt_tokens_cached as usize > requests.iter().map(|r| r.prompt.len() - 1).sum()
    );
}
