//! What a server tells of an answer's times.

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use common::model;
use lily_scheduler::{
    Event, EventStream, Finish, Generator, Request, Status, SubmitError, Token, events,
};
use lily_server::{Options, serve};
use serde_json::Value;

/// Seconds after the start at which each token came, and whether it was sampled.
struct Scripted(&'static [(u64, bool)]);

impl Generator for Scripted {
    fn submit(&self, _: Request) -> Result<EventStream, SubmitError> {
        let (sender, stream) = events();
        let start = Instant::now();
        sender.send(Event::Started { cached: 0, at: start });
        for (i, (seconds, sampled)) in self.0.iter().enumerate() {
            let at = start + Duration::from_secs(*seconds);
            let token = Token { id: 300 + i as u32, logprob: None, at, sampled: *sampled };
            sender.send(Event::Token(token));
        }
        sender.send(Event::Finished(Finish::Length));
        Ok(stream)
    }

    fn status(&self) -> Status {
        common::well(0)
    }

    fn shutdown(&self, _: Duration) {}
}

/// The body of an answer.
fn ask(address: std::net::SocketAddr, head: &str, body: &str) -> String {
    let mut socket = TcpStream::connect(address).unwrap();
    let length = body.len();
    let rest = format!("Host: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
    socket.write_all(format!("{head} HTTP/1.1\r\n{rest}{body}").as_bytes()).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).unwrap();
    text.split_once("\r\n\r\n").unwrap().1.to_owned()
}

/// Prompt and answer of a script: milliseconds of both, tokens a second of the answer, and the sum of the first tokens' times in
/// the metrics.
fn times(script: &'static [(u64, bool)]) -> (f64, f64, f64, f64) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let options = Options::new(address.ip());
    thread::spawn(move || serve(listener, options, model(), Arc::new(Scripted(script))));
    let body = r#"{"messages": [{"role": "user", "content": "x"}]}"#;
    let text = ask(address, "POST /v1/chat/completions", body);
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["usage"]["completion_tokens"], script.len());
    let number = |name: &str| answer["timings"][name].as_f64().unwrap();
    let metrics = ask(address, "GET /metrics", "");
    let sum =
        metrics.lines().find_map(|line| line.strip_prefix("lily_time_to_first_token_seconds_sum "));
    let first: f64 = sum.unwrap().parse().unwrap();
    (number("prompt_ms"), number("predicted_ms"), number("predicted_per_second"), first)
}

#[test]
fn the_prompt_ends_with_the_first_token_that_is_sampled() {
    let (prompt, answer, rate, first) = times(&[(2, true), (3, true), (4, true)]);
    assert_eq!((prompt, answer, rate), (2000.0, 2000.0, 1.0));
    assert!((2.0..60.0).contains(&first), "{first}");
    // A thinking budget of nothing: what closes the thinking is told before the prompt is computed.
    let (prompt, answer, rate, first) =
        times(&[(0, false), (0, false), (2, true), (3, true), (4, true)]);
    assert_eq!((prompt, answer, rate), (2000.0, 2000.0, 1.0));
    assert!((2.0..60.0).contains(&first), "{first}");
    // In the middle of an answer they are a part of it.
    let (prompt, answer, rate, _) = times(&[(2, true), (2, false), (2, false), (4, true)]);
    assert_eq!((prompt, answer, rate), (2000.0, 2000.0, 1.5));
    // Nothing was computed.
    assert_eq!(times(&[(0, false)]), (0.0, 0.0, 0.0, 0.0));
}
