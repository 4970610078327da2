//! Programs that answer within a time, or are ended.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use lily_engine::Cancel;

use crate::engine::Trouble;

/// Most bytes of a program's output that are kept.
const MAX_OUTPUT: u64 = 16 << 20;
/// Last bytes of its errors that are told.
const TAIL: usize = 600;
/// Between two looks at the clock and the cancel flag.
const LOOK: Duration = Duration::from_millis(50);

/// How long to wait, and who may end it.
#[derive(Clone, Debug)]
pub struct Patience {
    pub timeout: Duration,
    pub cancel: Cancel,
}

impl Patience {
    /// Waits for a message until it comes, no sender is left, the time is up or someone ends it.
    fn receive<T>(&self, from: &Receiver<T>) -> Result<Option<T>, Trouble> {
        let end = Instant::now() + self.timeout;
        loop {
            if self.cancel.is_cancelled() {
                return Err(Trouble::Interrupted);
            }
            match from.recv_timeout(LOOK) {
                Ok(message) => return Ok(Some(message)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) if Instant::now() >= end => {
                    return Err(Trouble::TimedOut { seconds: self.timeout.as_secs() });
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

/// Runs a program to its end and returns what it wrote to stdout.
pub fn output(mut command: Command, patience: &Patience) -> Result<String, Trouble> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Guard(start(&mut command)?);
    let errors = child.0.stderr.take().map(tail);
    let (sender, receiver) = channel();
    if let Some(out) = child.0.stdout.take() {
        thread::spawn(move || read(out, &sender));
    }
    let text = patience.receive(&receiver)?.unwrap_or_default();
    let status = child.0.wait().map_err(|e| Trouble::Failed(format!("it was lost: {e}")))?;
    match status.success() {
        true => Ok(text),
        false => Err(ended(&status.to_string(), errors)),
    }
}

fn read(out: impl Read, sender: &Sender<String>) {
    let mut bytes = Vec::new();
    let mut out = out;
    let _ = out.by_ref().take(MAX_OUTPUT).read_to_end(&mut bytes);
    // What is beyond is passed over, so that the program can end.
    let _ = std::io::copy(&mut out, &mut std::io::sink());
    let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
}

fn start(command: &mut Command) -> Result<Child, Trouble> {
    command.spawn().map_err(|error| {
        let program = command.get_program().to_string_lossy().into_owned();
        Trouble::Missing(format!("{program} cannot be started: {error}; check its path"))
    })
}

fn ended(status: &str, errors: Option<JoinHandle<String>>) -> Trouble {
    let said = errors.and_then(|e| e.join().ok()).unwrap_or_default();
    match said.trim() {
        "" => Trouble::Failed(format!("it ended with {status} and said nothing")),
        said => Trouble::Failed(format!("it ended with {status}: {said}")),
    }
}

/// The last lines of a stream, in one.
fn tail(stream: impl Read + Send + 'static) -> JoinHandle<String> {
    thread::spawn(move || {
        let (mut kept, mut block) = (Vec::new(), [0u8; 4096]);
        let mut stream = stream;
        while let Ok(n) = stream.read(&mut block) {
            if n == 0 {
                break;
            }
            kept.extend_from_slice(&block[..n]);
            let surplus = kept.len().saturating_sub(TAIL);
            kept.drain(..surplus);
        }
        let text = String::from_utf8_lossy(&kept).into_owned();
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
        lines.join(" / ")
    })
}

/// A program that is ended with whoever started it.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        // An error means that it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A program that answers lines with lines.
pub struct Lines {
    child: Guard,
    lines: Receiver<String>,
    errors: Option<JoinHandle<String>>,
}

impl Lines {
    pub fn start(mut command: Command) -> Result<Self, Trouble> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = Guard(start(&mut command)?);
        let errors = child.0.stderr.take().map(tail);
        let (sender, lines) = channel();
        if let Some(out) = child.0.stdout.take() {
            thread::spawn(move || {
                for line in BufReader::new(out).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        break;
                    }
                }
            });
        }
        Ok(Self { child, lines, errors })
    }

    /// Its next line.
    pub fn receive(&mut self, patience: &Patience) -> Result<String, Trouble> {
        match patience.receive(&self.lines)? {
            Some(line) => Ok(line),
            None => Err(self.end()),
        }
    }

    /// Sends a line and waits for the answer.
    pub fn ask(&mut self, line: &str, patience: &Patience) -> Result<String, Trouble> {
        let sent = match self.child.0.stdin.as_mut() {
            Some(input) => writeln!(input, "{line}").and_then(|()| input.flush()),
            None => return Err(Trouble::Failed("it takes no input".into())),
        };
        match sent {
            Ok(()) => self.receive(patience),
            Err(_) => Err(self.end()),
        }
    }

    fn end(&mut self) -> Trouble {
        let _ = self.child.0.kill();
        match self.child.0.wait() {
            Ok(status) => ended(&status.to_string(), self.errors.take()),
            Err(error) => Trouble::Failed(format!("it was lost: {error}")),
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn patience(millis: u64) -> Patience {
        Patience { timeout: Duration::from_millis(millis), cancel: Cancel::new() }
    }

    #[test]
    fn outputs_and_failures() {
        let patience = patience(60_000);
        assert_eq!(output(shell("echo a; echo b >&2"), &patience), Ok("a\nb\n"[..2].into()));
        let failed = output(shell("echo lost; echo bad news >&2; exit 3"), &patience).unwrap_err();
        let text = failed.to_string();
        assert!(text.contains("exit status: 3") && text.contains("bad news"), "{text}");
        let missing = output(Command::new("/no/such/program"), &patience).unwrap_err();
        assert!(matches!(&missing, Trouble::Missing(t) if t.contains("/no/such/program")));
    }

    #[test]
    fn who_takes_too_long_is_ended() {
        let slow = output(shell("exec sleep 1000"), &patience(1)).unwrap_err();
        assert_eq!(slow, Trouble::TimedOut { seconds: 0 });
        let cancelled = patience(1_000_000);
        cancelled.cancel.cancel();
        let ended = output(shell("exec sleep 1000"), &cancelled).unwrap_err();
        assert_eq!(ended, Trouble::Interrupted);
    }

    #[test]
    fn lines_are_answered_until_the_program_ends() {
        let patience = patience(60_000);
        let script =
            "while read x; do case $x in end) echo so be it >&2; exit 7;; esac; echo got $x; done";
        let mut lines = Lines::start(shell(script)).unwrap();
        assert_eq!(lines.ask("one", &patience), Ok("got one".into()));
        assert_eq!(lines.ask("two", &patience), Ok("got two".into()));
        let text = lines.ask("end", &patience).unwrap_err().to_string();
        assert!(text.contains("so be it"), "{text}");
        assert!(matches!(lines.ask("more", &patience), Err(Trouble::Failed(_))));
    }
}
