//! Tokens per second of the demo model: the engine by itself, the scheduler with one request, with four and
//! with eight at once. `cargo run --release -p lily-scheduler --example throughput`.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lily_cpu::{CpuDevice, CpuOptions};
use lily_engine::{Cancel, Engine, EngineOptions, GenerateParams, Machine, SampleParams};
use lily_model::{Model, Precision};
use lily_scheduler::{Event, Factory, Generator, Request, Scheduler, SchedulerOptions};

const TOKENS: usize = 256;
const ROUNDS: usize = 5;

fn prompt(kind: u32) -> Vec<u32> {
    (0..32).map(|i| (i * 31 + kind * 577) % 4000).collect()
}

fn engine(model: &Model, slots: usize) -> Engine {
    let device = CpuDevice::new(CpuOptions::default());
    let (plan, weights) = (Arc::clone(&model.plan), model.weights.clone());
    let options = EngineOptions::new(1024, slots, 256);
    Engine::on_machine(&device, plan, weights, options, &Machine::UNKNOWN).expect("prepared")
}

/// Seconds for the tokens after the first.
fn alone(engine: &mut Engine) -> f64 {
    let mut session = engine.open_session().expect("a slot");
    let cancel = Cancel::new();
    engine.sync(&mut session, &prompt(0), &cancel, |_, _| {}).expect("computed");
    let sample = SampleParams::GREEDY;
    let params = GenerateParams { sample, max_tokens: TOKENS, stop_ids: Vec::new() };
    let mut first = None;
    let mut count = 0;
    let _ = engine.generate(&mut session, &params, &cancel, |_| {
        first.get_or_insert_with(Instant::now);
        count += 1;
        ControlFlow::Continue(())
    });
    assert_eq!(count, TOKENS);
    first.map_or(0.0, |at| at.elapsed().as_secs_f64())
}

/// Seconds from the last first token to the first end, and tokens told meanwhile.
fn together(scheduler: &Scheduler, requests: u32) -> (f64, usize) {
    let streams: Vec<_> = (0..requests)
        .map(|kind| {
            let request = Request {
                prompt: prompt(kind).into(),
                sample: SampleParams::GREEDY,
                max_tokens: TOKENS,
                stop_ids: Vec::new(),
                logit_bias: Vec::new(),
                logprobs: None,
                boundaries: Vec::new(),
                thinking: None,
                query: "".into(),
            };
            scheduler.submit(request).expect("taken")
        })
        .collect();
    let mut times: Vec<Vec<Instant>> = Vec::new();
    for mut stream in streams {
        let mut list = Vec::new();
        while let Ok(Some(event)) = stream.next_timeout(Duration::from_secs(600)) {
            if let Event::Token(token) = event {
                list.push(token.at);
            }
        }
        times.push(list);
    }
    let from = times.iter().map(|t| t[0]).max().expect("requests");
    let to = times.iter().map(|t| t[TOKENS - 1]).min().expect("requests");
    let tokens = times.iter().flatten().filter(|at| **at > from && **at <= to).count();
    ((to - from).as_secs_f64(), tokens)
}

fn main() {
    let checkpoint = lily_demo::open().expect("the demo model opens");
    let model = lily_model::load(&checkpoint, Precision::Standard).expect("it loads");
    let mut single = engine(&model, 1);
    let best = (0..ROUNDS).map(|_| alone(&mut single)).fold(f64::INFINITY, f64::min);
    println!("engine, 1 request      {:8.1} tokens/s", (TOKENS - 1) as f64 / best);
    let factory: Factory = Box::new(move || Ok(engine(&model, 8)));
    let scheduler = Scheduler::new(factory, SchedulerOptions::default()).expect("it starts");
    for requests in [1, 2, 4, 8] {
        let rate = |_| {
            let (seconds, tokens) = together(&scheduler, requests);
            tokens as f64 / seconds
        };
        let best = (0..ROUNDS).map(rate).fold(0.0, f64::max);
        println!("scheduler, {requests} requests  {best:8.1} tokens/s");
    }
}
