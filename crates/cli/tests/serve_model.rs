//! `lily serve` with the built-in model, over HTTP.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::command;
use serde_json::{Value, json};

/// A server that ends with the test.
struct Server {
    child: Child,
    address: String,
    /// What it said before it began to serve.
    said: Vec<String>,
}

impl Server {
    fn start(args: &[&str]) -> Self {
        Self::run(command(&[&["serve", "--port", "0"], args].concat()))
    }

    fn run(mut command: Command) -> Self {
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut said = Vec::new();
        let address = loop {
            let line =
                lines.next().unwrap_or_else(|| panic!("it does not serve: {said:?}")).unwrap();
            let address = line.split("http://").nth(1).map(|rest| rest.replace("/v1", ""));
            match address {
                Some(address) => break address,
                None => said.push(line),
            }
        };
        // What it says later must not fill the pipe.
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, address, said }
    }

    /// Status and body.
    fn send(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut socket = TcpStream::connect(&self.address).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
        );
        socket.write_all(head.as_bytes()).and_then(|()| socket.write_all(body.as_bytes())).unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        match head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
            true => (status, unchunked(body)),
            false => (status, body.to_owned()),
        }
    }

    fn chat(&self, fields: &Value) -> Value {
        let mut body = json!({
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
        });
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let (status, answer) = self.send("POST", "/v1/chat/completions", &body.to_string());
        assert_eq!(status, 200, "{answer}");
        match fields["stream"] == true {
            true => assembled(&answer),
            false => serde_json::from_str(&answer).unwrap(),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn unchunked(mut body: &str) -> String {
    let mut out = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        out.push_str(&rest[..size]);
        body = &rest[size + 2..];
        if size == 0 {
            break;
        }
    }
    out
}

/// The answer that a stream's pieces make, in the form of a whole one.
fn assembled(stream: &str) -> Value {
    let (mut content, mut reasoning) = (String::new(), String::new());
    let (mut finish, mut usage) = (Value::Null, Value::Null);
    let events = stream.lines().filter_map(|line| line.strip_prefix("data: "));
    for event in events.filter(|event| *event != "[DONE]") {
        let event: Value = serde_json::from_str(event).unwrap();
        let choice = &event["choices"][0];
        content += choice["delta"]["content"].as_str().unwrap_or_default();
        reasoning += choice["delta"]["reasoning_content"].as_str().unwrap_or_default();
        if !choice["finish_reason"].is_null() {
            finish = choice["finish_reason"].clone();
        }
        if !event["usage"].is_null() {
            usage = event["usage"].clone();
        }
    }
    assert!(stream.ends_with("data: [DONE]\n\n"));
    let message = json!({"content": content, "reasoning_content": reasoning});
    json!({"choices": [{"message": message, "finish_reason": finish}], "usage": usage})
}

/// Thoughts, text, end, tokens of the thoughts, all tokens.
fn parts(answer: &Value) -> (String, String, String, u64, u64) {
    let choice = &answer["choices"][0];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let usage = &answer["usage"];
    (
        text(&choice["message"]["reasoning_content"]),
        text(&choice["message"]["content"]),
        text(&choice["finish_reason"]),
        usage["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap(),
        usage["completion_tokens"].as_u64().unwrap(),
    )
}

#[test]
fn a_thinking_budget_bounds_the_thoughts_of_the_model() {
    let server = Server::start(&["--ctx", "1024"]);
    let (thoughts, text, ..) = parts(&server.chat(&json!({})));
    assert!(thoughts.len() > 20 && text.contains("Paris"), "{thoughts:?} {text:?}");
    let unbound = parts(&server.chat(&json!({"thinking_budget": 100_000})));
    assert_eq!((&unbound.0, &unbound.1), (&thoughts, &text));
    for budget in [0, 1, 3, 5] {
        let whole = parts(&server.chat(&json!({"thinking_budget": budget})));
        let (bound, text, finish, reasoning, all) = whole.clone();
        assert!(
            thoughts.starts_with(&bound) && bound.len() < thoughts.len(),
            "{budget}: {bound:?}"
        );
        // The budget, a line end and the tag that closes the block.
        assert_eq!(reasoning, budget + 2, "{budget}");
        assert!(all > reasoning && !text.is_empty() && !text.contains("think>"), "{text:?}");
        assert_eq!(finish, "stop");
        let fields = json!({
            "thinking_budget": budget, "stream": true, "stream_options": {"include_usage": true},
        });
        assert_eq!(parts(&server.chat(&fields)), whole, "streamed, {budget}");
        // The limit of the whole answer holds inside the budget, and where the closing is put in.
        let cut = json!({"thinking_budget": budget, "max_tokens": budget + 1});
        let (_, text, finish, _, all) = parts(&server.chat(&cut));
        assert_eq!((text.as_str(), finish.as_str(), all), ("", "length", budget + 1), "{budget}");
    }
    // Without thoughts there is nothing to bound.
    let off = json!({"enable_thinking": false});
    let (_, text, ..) = parts(&server.chat(&off));
    let bound = json!({"enable_thinking": false, "thinking_budget": 0});
    assert_eq!(parts(&server.chat(&bound)).1, text);
    assert_eq!(
        server
            .send(
                "POST",
                "/v1/chat/completions",
                r#"{"messages": [{"role": "user", "content": "x"}], "thinking_budget": -1}"#
            )
            .0,
        400
    );
}

#[test]
fn what_the_server_was_prepared_for_is_told() {
    let server = Server::start(&["--ctx", "777", "--parallel", "3"]);
    assert_eq!(server.said, [""; 0]);
    let (status, models) = server.send("GET", "/v1/models", "");
    let models: Value = serde_json::from_str(&models).unwrap();
    assert_eq!((status, &models["data"][0]["context_length"]), (200, &json!(777)));
    let (_, metrics) = server.send("GET", "/metrics", "");
    assert!(metrics.contains("\nlily_parallel_limit 3\n"), "{metrics}");
}

/// A process whose data are bounded has less memory than the machine.
#[cfg(target_os = "linux")]
mod little_memory {
    use super::*;

    fn bounded(kib: u64, args: &str) -> Command {
        let lily = env!("CARGO_BIN_EXE_lily");
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("ulimit -d {kib}; exec '{lily}' serve --port 0 {args}"));
        command
    }

    #[test]
    fn what_nobody_asked_for_is_made_less() {
        let server = Server::run(bounded(300_000, ""));
        let [told] = &server.said[..] else { panic!("{:?}", server.said) };
        assert!(told.contains("instead of 32768") && told.contains("--ctx"), "{told}");
        let (_, models) = server.send("GET", "/v1/models", "");
        let models: Value = serde_json::from_str(&models).unwrap();
        let context = models["data"][0]["context_length"].as_u64().unwrap();
        assert!((4096..32768).contains(&context), "{context}");
        assert!(parts(&server.chat(&json!({"enable_thinking": false}))).1.contains("Paris"));
    }

    #[test]
    fn what_cannot_fit_is_refused_with_the_figures() {
        let output = bounded(300_000, "--ctx 32768 --parallel 64").output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        for part in ["KV cache", "available", "--ctx", "--parallel"] {
            assert!(text.contains(part), "{part} is missing: {text}");
        }
    }
}
