//! Answers of an engine that keeps two steps in flight on the shared GPU kernels: whatever a request asks for, the ids are those of
//! one step at a time, alone and in company. With LILY_GPU=cuda or LILY_GPU=metal on the GPU of this machine.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use lily_conformance::Fixture;
use lily_conformance::gpu::device;
use lily_engine::{
    Cancel, Engine, EngineOptions, GenerateParams, Generated, LogitBias, Logprobs, Machine,
    SampleParams,
};
use lily_gpu::Tuning;
use lily_model::{Model, Precision};
use lily_ops::sample::TokenMask;
use lily_scheduler::{
    Event, EventStream, Factory, Generator, Request, Scheduler, SchedulerOptions,
};

const ONE: EngineOptions = EngineOptions::new(256, 1, PROMPT);
/// Tokens of a prompt, which fill a chunk, and of an answer.
const PROMPT: usize = 8;
const TOKENS: usize = 4;

fn model() -> (Model, Vec<u32>) {
    let fixture = Fixture::open("tiny-c");
    let model = lily_model::load(&fixture.checkpoint, Precision::Standard).expect("it loads");
    (model, fixture.tokens)
}

fn engine(model: &Model, tuning: Tuning, options: EngineOptions) -> Engine {
    let (plan, weights) = (Arc::clone(&model.plan), model.weights.clone());
    Engine::on_machine(&device(tuning), plan, weights, options, &Machine::UNKNOWN)
        .expect("the plan is prepared")
}

/// All but each third token, from the `first` on.
fn mask(vocab: usize, first: usize) -> Option<Arc<TokenMask>> {
    let allowed: Vec<bool> = (0..vocab).map(|id| id % 3 != first % 3 && id != first).collect();
    Some(Arc::new(TokenMask::new(&allowed)))
}

fn bias(count: u32) -> Option<Arc<LogitBias>> {
    let entries = (0..count).map(|id| (id, (id % 7) as f32 - 3.0));
    Some(Arc::new(LogitBias::new(entries).expect("in range")))
}

/// What a request may ask for; log-probabilities on top.
fn kinds(vocab: usize) -> Vec<SampleParams> {
    let drawn = SampleParams { temperature: 0.9, top_k: 40, seed: 7, ..SampleParams::GREEDY };
    vec![
        SampleParams::GREEDY,
        drawn.clone(),
        SampleParams {
            repetition_penalty: 1.3,
            presence_penalty: 0.4,
            frequency_penalty: 0.2,
            ..drawn.clone()
        },
        SampleParams { logit_bias: bias(9), ..drawn.clone() },
        SampleParams { logit_bias: bias(vocab as u32), ..SampleParams::GREEDY },
        SampleParams { mask: mask(vocab, 5), choice: 2, ..drawn },
    ]
}

fn generate(
    engine: &mut Engine,
    prompt: &[u32],
    sample: &SampleParams,
    stop: Option<u32>,
) -> Generated {
    let mut session = engine.open_session().expect("a slot");
    let cancel = Cancel::new();
    engine.sync(&mut session, prompt, &cancel, |_, _| {}).expect("the prompt fits");
    let params = GenerateParams {
        sample: sample.clone(),
        max_tokens: TOKENS,
        stop_ids: stop.into_iter().collect(),
    };
    let done = engine.generate(&mut session, &params, &cancel, |_| ControlFlow::Continue(()));
    engine.close(session).expect("closed");
    done.unwrap_or_else(|e| panic!("{sample:?}: {e}"))
}

#[test]
fn answers_with_two_steps_in_flight() {
    let (model, prompt) = model();
    let mut one = engine(&model, Tuning::default(), ONE);
    let host = Tuning::without("token_handoff").expect("a switch");
    let undo = EngineOptions { undo: true, ..ONE };
    let mut others = [(Tuning::default(), "on the device"), (host, "through the host")]
        .map(|(tuning, how)| (engine(&model, tuning, undo), how));
    assert_eq!((one.depth(), others[0].0.depth()), (1, 2));
    for (i, kind) in kinds(model.plan.vocab).into_iter().enumerate() {
        let all = generate(&mut one, &prompt[i..][..PROMPT + 2], &kind, None);
        for (logprobs, stop) in [(None, true), (Some(0), false), (Some(5), true)] {
            let kind = SampleParams { logprobs, ..kind.clone() };
            let stop = stop.then_some(all.ids[1]);
            for (engine, how) in &mut others {
                let got = generate(engine, &prompt[i..][..PROMPT + 2], &kind, stop);
                let end = all.ids.iter().position(|id| Some(*id) == stop);
                let want = &all.ids[..end.map_or(TOKENS, |at| at + 1)];
                assert_eq!(got.ids, want, "{how}: {kind:?}");
                assert_eq!(got.logprobs.len(), logprobs.map_or(0, |_| want.len()));
                let top = |l: &Logprobs| Some(l.top.len() as u8) == logprobs;
                assert!(got.logprobs.iter().all(top), "{how}: {:?}", got.logprobs);
            }
        }
    }
}

fn request(prompt: &[u32], sample: SampleParams, logprobs: Option<u32>) -> Request {
    Request {
        prompt: prompt.into(),
        sample,
        max_tokens: TOKENS,
        stop_ids: Vec::new(),
        logit_bias: Vec::new(),
        logprobs,
        boundaries: Vec::new(),
        thinking: None,
        query: "".into(),
    }
}

fn scheduler(model: &Model, slots: usize) -> Scheduler {
    let options = EngineOptions { slots, undo: true, ..ONE };
    let (plan, weights) = (Arc::clone(&model.plan), model.weights.clone());
    let factory: Factory = Box::new(move || {
        let (plan, weights) = (Arc::clone(&plan), weights.clone());
        let device = device(Tuning::default());
        Engine::on_machine(&device, plan, weights, options, &Machine::UNKNOWN)
    });
    // As `lily serve` does on a GPU.
    let none = SchedulerOptions { cache_bytes: 0, ..SchedulerOptions::default() };
    Scheduler::new(factory, SchedulerOptions { mixed: false, ..none }).expect("it starts")
}

/// The ids told, at most `most` of them: then the client leaves.
fn told(mut stream: EventStream, request: &Request, most: usize) -> Vec<u32> {
    let mut ids = Vec::new();
    while ids.len() < most {
        match stream.next_timeout(Duration::from_secs(300)).expect("in time") {
            Some(Event::Token(token)) => {
                assert_eq!(token.logprob.is_some(), request.logprobs.is_some());
                ids.push(token.id);
            }
            Some(Event::Failed(failure)) => panic!("{:?}: {failure}", request.sample),
            Some(_) => {}
            None => break,
        }
    }
    ids
}

/// Eight slots, all kinds at once: some with log-probabilities, some without, and some who leave after their first token.
/// A prompt fills a step, as where it is alone.
#[test]
fn answers_in_company() {
    let (model, prompt) = model();
    let mut requests = Vec::new();
    for (i, kind) in kinds(model.plan.vocab).into_iter().enumerate() {
        for (choice, logprobs) in [None, Some(i as u32 % 2 * 5)].into_iter().enumerate() {
            let sample = SampleParams { choice: choice as u32, ..kind.clone() };
            requests.push(request(&prompt[4 * i..][..PROMPT], sample, logprobs));
        }
    }
    let mut one = engine(&model, Tuning::default(), ONE);
    let want: Vec<Vec<u32>> =
        requests.iter().map(|r| generate(&mut one, &r.prompt, &r.sample, None).ids).collect();
    let scheduler = scheduler(&model, 8);
    let streams: Vec<EventStream> =
        requests.iter().map(|r| scheduler.submit(r.clone()).expect("taken")).collect();
    for (i, stream) in streams.into_iter().enumerate() {
        let most = if i % 5 == 3 { 1 } else { TOKENS };
        let ids = told(stream, &requests[i], most);
        assert_eq!(ids, want[i][..most], "{i}, {:?}", requests[i].sample);
    }
    assert_eq!(scheduler.status().faults, 0);
}

/// More masks than the device keeps for one step.
#[test]
fn a_mask_for_each_slot() {
    let (model, prompt) = model();
    let scheduler = scheduler(&model, 9);
    let requests: Vec<Request> = (0..10)
        .map(|i| {
            let sample = SampleParams { mask: mask(model.plan.vocab, i), ..SampleParams::GREEDY };
            request(&prompt[i..][..PROMPT], sample, (i == 5).then_some(1))
        })
        .collect();
    let streams: Vec<EventStream> =
        requests.iter().map(|r| scheduler.submit(r.clone()).expect("taken")).collect();
    for (request, stream) in requests.iter().zip(streams) {
        let ids = told(stream, request, TOKENS);
        let mask = request.sample.mask.as_ref().expect("each has one");
        assert!(ids.len() == TOKENS && ids.iter().all(|id| mask.contains(*id)), "{ids:?}");
    }
    assert_eq!(scheduler.status().faults, 0);
}
