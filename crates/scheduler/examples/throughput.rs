//! Tokens per second of a model: the engine by itself, the scheduler with one request, with four and with eight at
//! once. `cargo run --release -p lily-scheduler --example throughput [FOLDER [TOKENS [ROUNDS]]]`; without a
//! folder it is the demo model.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lily_checkpoint::Checkpoint;
use lily_cpu::{CpuDevice, CpuOptions};
use lily_engine::{Cancel, Engine, EngineOptions, GenerateParams, Machine, SampleParams};
use lily_model::{Model, Precision};
use lily_scheduler::{Event, Factory, Generator, Request, Scheduler, SchedulerOptions};

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
fn alone(engine: &mut Engine, tokens: usize) -> f64 {
    let mut session = engine.open_session().expect("a slot");
    let cancel = Cancel::new();
    engine.sync(&mut session, &prompt(0), &cancel, |_, _| {}).expect("computed");
    let sample = SampleParams::GREEDY;
    let params = GenerateParams { sample, max_tokens: tokens, stop_ids: Vec::new() };
    let mut first = None;
    let mut count = 0;
    let _ = engine.generate(&mut session, &params, &cancel, |_| {
        first.get_or_insert_with(Instant::now);
        count += 1;
        ControlFlow::Continue(())
    });
    assert_eq!(count, tokens);
    first.map_or(0.0, |at| at.elapsed().as_secs_f64())
}

/// Seconds from the last first token to the first end, and tokens told meanwhile.
fn together(scheduler: &Scheduler, requests: u32, tokens: usize) -> (f64, usize) {
    let streams: Vec<_> = (0..requests)
        .map(|kind| {
            let request = Request {
                prompt: prompt(kind).into(),
                sample: SampleParams::GREEDY,
                max_tokens: tokens,
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
    let to = times.iter().map(|t| t[tokens - 1]).min().expect("requests");
    let told = times.iter().flatten().filter(|at| **at > from && **at <= to).count();
    ((to - from).as_secs_f64(), told)
}

fn main() {
    let mut args = std::env::args().skip(1);
    let checkpoint = match args.next() {
        Some(folder) => Checkpoint::open(folder.as_ref()).expect("the checkpoint opens"),
        None => lily_demo::open().expect("the demo model opens"),
    };
    let mut number =
        |default: usize| args.next().map_or(default, |text| text.parse().expect("a whole number"));
    let (tokens, rounds) = (number(256), number(5));
    let model = lily_model::load(&checkpoint, Precision::Standard).expect("it loads");
    let mut single = engine(&model, 1);
    let best = (0..rounds).map(|_| alone(&mut single, tokens)).fold(f64::INFINITY, f64::min);
    println!("engine, 1 request      {:8.1} tokens/s", (tokens - 1) as f64 / best);
    let factory: Factory = Box::new(move || Ok(engine(&model, 8)));
    let scheduler = Scheduler::new(factory, SchedulerOptions::default()).expect("it starts");
    for requests in [1, 2, 4, 8] {
        let rate = |_| {
            let (seconds, told) = together(&scheduler, requests, tokens);
            told as f64 / seconds
        };
        let best = (0..rounds).map(rate).fold(0.0, f64::max);
        println!("scheduler, {requests} requests  {best:8.1} tokens/s");
    }
}
