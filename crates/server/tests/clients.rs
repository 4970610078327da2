//! Clients that do not behave, on real sockets.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::model;
use lily_scheduler::{
    Event, EventSender, EventStream, Finish, Generator, Logprob, Request, Status, SubmitError,
    Token, events,
};
use lily_server::{Options, serve};

const PATIENCE: Duration = Duration::from_secs(60);
/// Most likely tokens that each token comes with: a stream with them soon fills every buffer.
const TOP: usize = 20;

/// Makes tokens without end, and says how many requests were given up.
#[derive(Default)]
struct Endless {
    running: AtomicUsize,
    cancelled: Mutex<usize>,
    changed: Condvar,
}

struct Handle(Arc<Endless>);

impl Endless {
    fn answer(&self, request: &Request, sender: &EventSender) {
        let at = Instant::now();
        sender.send(Event::Started { cached: 0, at });
        // Requests with a limit end; the others go on until nobody listens.
        for n in 0..request.max_tokens {
            let top = (0..TOP as u32).map(|id| (300 + id, -1.0)).collect();
            let logprob = request.logprobs.map(|_| Logprob { chosen: -0.5, top });
            let token =
                Token { id: 300 + n as u32 % 50, logprob, at: Instant::now(), sampled: true };
            if !sender.send(Event::Token(token)) {
                *self.cancelled.lock().unwrap() += 1;
                self.changed.notify_all();
                return;
            }
            thread::sleep(Duration::from_micros(50));
        }
        sender.send(Event::Finished(Finish::Length));
    }

    /// Waits until so many requests were given up.
    fn wait_cancelled(&self, count: usize) {
        let end = Instant::now() + PATIENCE;
        let mut cancelled = self.cancelled.lock().unwrap();
        while *cancelled < count {
            let left = end.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "the request of a client that does not read still runs");
            cancelled = self.changed.wait_timeout(cancelled, left).unwrap().0;
        }
    }
}

impl Generator for Handle {
    fn submit(&self, request: Request) -> Result<EventStream, SubmitError> {
        let (sender, stream) = events();
        let endless = Arc::clone(&self.0);
        thread::spawn(move || {
            endless.running.fetch_add(1, Ordering::SeqCst);
            endless.answer(&request, &sender);
            endless.running.fetch_sub(1, Ordering::SeqCst);
        });
        Ok(stream)
    }

    fn status(&self) -> Status {
        common::well(self.0.running.load(Ordering::SeqCst))
    }

    fn shutdown(&self, _: Duration) {}
}

/// A server with a patience of its own for clients that do not read.
fn server(write_timeout: Duration) -> (SocketAddr, Arc<Endless>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let endless = Arc::new(Endless::default());
    let handle = Arc::new(Handle(Arc::clone(&endless)));
    let options = Options { write_timeout, ..Options::new(address.ip()) };
    thread::spawn(move || serve(listener, options, model(), handle));
    (address, endless)
}

fn post(address: SocketAddr, body: &str) -> TcpStream {
    let mut socket = TcpStream::connect(address).unwrap();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all(head.as_bytes()).and_then(|()| socket.write_all(body.as_bytes())).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

fn endless_stream(address: SocketAddr) -> TcpStream {
    let body = r#"{"messages": [{"role": "user", "content": "x"}], "stream": true, "enable_thinking": false, "logprobs": true, "top_logprobs": 20}"#;
    post(address, body)
}

fn short_answer(address: SocketAddr, stream: bool) -> String {
    let body = format!(
        r#"{{"messages": [{{"role": "user", "content": "x"}}], "max_tokens": 20, "stream": {stream}, "enable_thinking": false}}"#
    );
    let mut text = String::new();
    post(address, &body).read_to_string(&mut text).unwrap();
    text
}

#[test]
fn a_client_that_never_reads_is_given_up() {
    let (address, endless) = server(Duration::from_millis(300));
    let sockets: Vec<TcpStream> = (0..3).map(|_| endless_stream(address)).collect();
    endless.wait_cancelled(sockets.len());
    // And the connection is closed: what was under way arrives, then the end.
    for mut socket in sockets {
        let mut rest = Vec::new();
        let end = socket.read_to_end(&mut rest);
        assert!(rest.starts_with(b"HTTP/1.1 200"));
        assert!(!rest.ends_with(b"0\r\n\r\n"), "a broken answer looks whole");
        drop(end);
    }
    assert!(short_answer(address, false).contains("\"finish_reason\":\"length\""));
}

#[test]
fn a_client_that_reads_slowly_is_served_and_slows_nobody() {
    let (address, endless) = server(Duration::from_secs(600));
    let mut slow = endless_stream(address);
    let mut some = [0; 1000];
    for round in 0..5 {
        for stream in [true, false] {
            let text = short_answer(address, stream);
            assert!(text.contains("\"finish_reason\":\"length\""), "{text}");
        }
        // Far less than comes, but something.
        slow.read_exact(&mut some).unwrap();
        assert_eq!(*endless.cancelled.lock().unwrap(), 0, "given up in round {round}");
    }
    drop(slow);
    endless.wait_cancelled(1);
}
