//! The script keeps to the limits, order and failures of a device.

use std::sync::Arc;
use std::time::Duration;

use lily_chat::Tokenizer;
use lily_ops::sample::SampleParams;
use lily_scheduler::{
    Event, EventStream, Failure, Finish, Generator, Limits, Request, SubmitError,
};
use lily_server::replay::{Replay, Script};

const PATIENCE: Duration = Duration::from_secs(60);
const ENDLESS: &str = r#"{"match": "long", "text": "a b c d e f g h", "prefill_ms": 3600000}"#;

fn tokenizer() -> Tokenizer {
    let file = |name: &str| {
        let (_, bytes) = lily_demo::FILES.iter().find(|(file, _)| *file == name).unwrap();
        std::str::from_utf8(bytes).unwrap()
    };
    Tokenizer::from_json(file("tokenizer.json"), Some(file("tokenizer_config.json"))).unwrap()
}

fn replay(lines: &[&str], limits: Limits) -> (Tokenizer, Replay) {
    let tokenizer = tokenizer();
    let end = tokenizer.eos_id().unwrap();
    let script = Script::parse(&lines.join("\n"), &tokenizer, end).unwrap();
    (tokenizer, Replay::start(script, limits).unwrap())
}

const LIMITS: Limits = Limits { context: 64, parallel: 1, queue: 1 };

fn request(query: &str) -> Request {
    Request {
        prompt: [1, 2, 3].into(),
        sample: SampleParams::GREEDY,
        max_tokens: 1000,
        stop_ids: Vec::new(),
        logit_bias: Vec::new(),
        logprobs: None,
        boundaries: Vec::new(),
        thinking: None,
        query: Arc::from(query),
    }
}

/// Tokens of an answer and its last event.
fn read(mut stream: EventStream) -> (Vec<u32>, Event) {
    let mut ids = Vec::new();
    loop {
        match stream.next_timeout(PATIENCE).unwrap().expect("an answer ends with an event") {
            Event::Started { cached, .. } => assert_eq!(cached, 0),
            Event::Token(token) => ids.push(token.id),
            last => return (ids, last),
        }
    }
}

#[test]
fn the_first_line_that_fits_answers() {
    let lines =
        [r#"{"match": "x", "text": "one<tool_call>"}"#, "", r#"{"match": "", "text": "two"}"#];
    let (tokenizer, replay) = replay(&lines, LIMITS);
    let (ids, last) = read(replay.submit(request("a x")).unwrap());
    assert_eq!(tokenizer.decode(&ids, true), "one<tool_call>");
    assert_eq!(ids.last().copied(), tokenizer.eos_id());
    assert_eq!(ids[ids.len() - 2], tokenizer.id_of("<tool_call>").unwrap());
    assert_eq!(last, Event::Finished(Finish::Stop));
    let (ids, _) = read(replay.submit(request("other")).unwrap());
    assert_eq!(tokenizer.decode(&ids, true), "two");
}

#[test]
fn characters_become_tokens() {
    let (tokenizer, replay) =
        replay(&[r#"{"match": "", "text": "abc</think>de", "split": "char"}"#], LIMITS);
    let (ids, _) = read(replay.submit(request("")).unwrap());
    let spelled: Vec<String> = ids.iter().map(|id| tokenizer.decode(&[*id], false)).collect();
    assert_eq!(spelled, ["a", "b", "c", "</think>", "d", "e", "<|im_end|>"]);
}

#[test]
fn answers_end_at_their_limits() {
    let text = "a b c d e f g h ".repeat(20);
    let line = format!(r#"{{"match": "", "text": "{text}"}}"#);
    let (_, replay) = replay(&[&line], LIMITS);
    let (ids, last) = read(replay.submit(Request { max_tokens: 5, ..request("") }).unwrap());
    assert_eq!((ids.len(), last), (5, Event::Finished(Finish::Length)));
    let (ids, last) = read(replay.submit(request("")).unwrap());
    assert_eq!((ids.len(), last), (61, Event::Finished(Finish::Length)));
    let long = Request { prompt: vec![1; 64].into(), ..request("") };
    assert_eq!(
        replay.submit(long).unwrap_err(),
        SubmitError::ContextLength { limit: 64, prompt: 64 }
    );
}

#[test]
fn a_full_queue_refuses_and_a_cancelled_request_makes_room() {
    let (_, replay) = replay(&[ENDLESS, r#"{"match": "", "text": "short"}"#], LIMITS);
    let mut running = replay.submit(request("long")).unwrap();
    assert!(matches!(running.next_timeout(PATIENCE), Ok(Some(Event::Started { .. }))));
    let waiting = replay.submit(request("short")).unwrap();
    assert!(matches!(replay.submit(request("")), Err(SubmitError::Busy { .. })));
    let status = replay.status();
    assert_eq!((status.running, status.waiting), (1, 1));
    drop(running);
    assert_eq!(read(waiting).1, Event::Finished(Finish::Stop));
}

#[test]
fn a_fault_concerns_its_request_alone() {
    let lines =
        [r#"{"match": "x", "text": "a b c", "fail_after": 2}"#, r#"{"match": "", "text": "fine"}"#];
    let (_, replay) = replay(&lines, LIMITS);
    let (ids, last) = read(replay.submit(request("x")).unwrap());
    assert_eq!(ids.len(), 2);
    assert!(matches!(last, Event::Failed(Failure::Device(_))));
    assert_eq!(read(replay.submit(request("")).unwrap()).1, Event::Finished(Finish::Stop));
    assert_eq!(replay.status().faults, 1);
}

#[test]
fn the_end_comes_when_the_grace_is_over() {
    let (_, replay) = replay(&[ENDLESS], LIMITS);
    let running = replay.submit(request("long")).unwrap();
    replay.shutdown(Duration::ZERO);
    assert_eq!(replay.submit(request("long")).unwrap_err(), SubmitError::ShuttingDown);
    assert_eq!(read(running).1, Event::Failed(Failure::ShuttingDown));
    assert_eq!(replay.status().running, 0);
}
