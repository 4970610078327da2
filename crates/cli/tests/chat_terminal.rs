//! `lily chat` in a terminal.

#![cfg(unix)]

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::isolate;
use rexpect::session::{PtySession, spawn_command};

/// Longest wait for anything: the machine may be busy.
const PATIENCE: u64 = 60_000;

fn start(home: &Path, args: &[&str]) -> PtySession {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lily"));
    command.arg("chat").args(args).env("TERM", "xterm");
    isolate(&mut command, home);
    spawn_command(command, Some(PATIENCE)).unwrap()
}

fn expect(session: &mut PtySession, text: &str) {
    if let Err(error) = session.exp_string(text) {
        panic!("{text:?} did not come: {error}");
    }
}

/// Waits for the prompt, and types.
fn say(session: &mut PtySession, line: &str) {
    expect(session, "> ");
    session.send_line(line).unwrap();
}

/// Types keys that end no line.
fn keys(session: &mut PtySession, keys: &str) {
    session.send(keys).unwrap();
    session.flush().unwrap();
}

const GREEDY: &[&str] = &["--temperature", "0", "--no-think"];

#[test]
fn a_conversation() {
    let home = tempfile::tempdir().unwrap();
    let mut session = start(home.path(), GREEDY);
    expect(&mut session, "not a general assistant");
    expect(&mut session, "/help lists the commands");
    say(&mut session, "What is the capital of France?");
    expect(&mut session, "The capital of France is Paris.");
    say(&mut session, "What is the capital \\");
    expect(&mut session, ". ");
    session.send_line("of France?").unwrap();
    expect(&mut session, "Paris");
    say(&mut session, "/stats");
    expect(&mut session, "reused");
    expect(&mut session, "tokens/s");
    say(&mut session, "/nonsense");
    expect(&mut session, "hint: /help lists");
    // Tab completes a command, the arrow recalls a message.
    expect(&mut session, "> ");
    keys(&mut session, "/thi\toff\r");
    expect(&mut session, "thinking is off");
    expect(&mut session, "> ");
    keys(&mut session, "\x1b[A\x1b[A\x1b[A\x1b[A\x1b[A\r");
    expect(&mut session, "Paris");
    expect(&mut session, "> ");
    session.send_control('d').unwrap();
    session.exp_eof().unwrap();
    let history = fs::read_to_string(home.path().join("state/lily/history")).unwrap();
    assert!(history.contains("of France?") && history.contains("/stats"), "{history}");
    // It is there at the next start, and stays as it is with --no-history.
    let mut session = start(home.path(), GREEDY);
    expect(&mut session, "> ");
    keys(&mut session, "\x1b[A\r");
    expect(&mut session, "Paris");
    say(&mut session, "/exit");
    session.exp_eof().unwrap();
    let mut session = start(home.path(), &[GREEDY, &["--no-history"]].concat());
    say(&mut session, "/system not to be remembered");
    say(&mut session, "/exit");
    session.exp_eof().unwrap();
    let history = fs::read_to_string(home.path().join("state/lily/history")).unwrap();
    assert!(!history.contains("remembered"), "{history}");
}

#[test]
fn thinking_is_dimmed_and_told_apart() {
    let home = tempfile::tempdir().unwrap();
    let mut session = start(home.path(), &["--temperature", "0"]);
    say(&mut session, "What is the capital of France?");
    expect(&mut session, "\x1b[2m");
    expect(&mut session, "\x1b[0m");
    expect(&mut session, "The capital of France is Paris.");
    say(&mut session, "/exit");
    session.exp_eof().unwrap();
}

#[test]
fn ctrl_c_stops_the_answer_and_not_the_program() {
    let home = tempfile::tempdir().unwrap();
    let wild = [
        "--temperature",
        "100",
        "--top-k",
        "0",
        "--top-p",
        "1",
        "--seed",
        "3",
        "--no-think",
        "--quiet",
    ];
    let mut session = start(home.path(), &wild);
    say(&mut session, "Go on.");
    // The echo, and then the answer.
    expect(&mut session, "\n");
    session.exp_regex("[a-z]{2}").unwrap();
    session.send_control('c').unwrap();
    expect(&mut session, "ended: interrupted");
    // What there is of it stays.
    say(&mut session, "/stats");
    expect(&mut session, "context");
    // At a prompt: a line is dropped, an empty one gets a hint, a second one leaves.
    expect(&mut session, "> ");
    keys(&mut session, "half a message");
    session.exp_regex("(?s)m.*g.*e").unwrap();
    session.send_control('c').unwrap();
    expect(&mut session, "> ");
    session.send_control('c').unwrap();
    expect(&mut session, "Ctrl-C once more leaves");
    say(&mut session, "/stats");
    expect(&mut session, "context");
    expect(&mut session, "> ");
    session.send_control('c').unwrap();
    expect(&mut session, "Ctrl-C once more leaves");
    expect(&mut session, "> ");
    session.send_control('c').unwrap();
    session.exp_eof().unwrap();
}
