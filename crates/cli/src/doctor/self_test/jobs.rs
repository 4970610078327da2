//! A part in pieces, within the time that it has: what is done when time is out stays.

use std::io::Read;
use std::process::{Child, Command, Output, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::Value;

/// The time that a part has.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    end: Instant,
    seconds: usize,
}

impl Deadline {
    /// So many seconds from now.
    pub fn after(seconds: usize) -> Self {
        Self { end: Instant::now() + Duration::from_secs(seconds as u64), seconds }
    }

    /// What is left.
    pub fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    pub fn is_over(&self) -> bool {
        self.left().is_zero()
    }

    /// What is said of what it cut off.
    pub fn cut(&self, what: &str) -> String {
        format!(
            "{what}: not measured, the part's {} seconds were over (--part-seconds)",
            self.seconds
        )
    }
}

/// How often a running program is looked at.
const LOOK: Duration = Duration::from_millis(20);

fn reader(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // What was written before an error is all there is.
            let _ = pipe.read_to_end(&mut bytes);
        }
        bytes
    })
}

fn wait(child: &mut Child, left: Duration) -> std::io::Result<Option<std::process::ExitStatus>> {
    let end = Instant::now() + left;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= end {
            return Ok(None);
        }
        std::thread::sleep(LOOK);
    }
}

/// Runs a program to its end, or to that of the time; `None`: it was ended.
pub fn run(command: &mut Command, left: Duration) -> anyhow::Result<Option<Output>> {
    let name = command.get_program().to_string_lossy().into_owned();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("{name} does not start"))?;
    let readers = (reader(child.stdout.take()), reader(child.stderr.take()));
    let ended = wait(&mut child, left);
    if !matches!(ended, Ok(Some(_))) {
        // It may have ended by itself meanwhile.
        let _ = child.kill();
        let _ = child.wait();
    }
    let Some(status) = ended.with_context(|| format!("{name} cannot be waited for"))? else {
        return Ok(None);
    };
    let text = |reader: JoinHandle<Vec<u8>>| reader.join().unwrap_or_default();
    Ok(Some(Output { status, stdout: text(readers.0), stderr: text(readers.1) }))
}

/// As [`run`], for a program that prints JSON.
pub fn run_json(command: &mut Command, left: Duration) -> anyhow::Result<Option<Value>> {
    let Some(output) = run(command, left)? else { return Ok(None) };
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(Some(serde_json::from_slice(&output.stdout)?))
}

/// What pieces came to.
#[derive(Debug, Default)]
pub struct Pieces {
    /// What each that was done has found.
    pub done: Vec<Value>,
    /// What went wrong with others.
    pub failures: Vec<String>,
    /// What time did not suffice for.
    pub cut: Vec<String>,
}

impl Pieces {
    /// Does one piece after another until time is out; one that fails does not keep the next from being done. `do_one` returns
    /// `None` if time was out before it had ended; `told` sees what there is after each.
    pub fn run<T>(
        deadline: Deadline,
        pieces: Vec<(String, T)>,
        mut do_one: impl FnMut(&T, Duration) -> anyhow::Result<Option<Value>>,
        mut told: impl FnMut(&Self) -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        let mut all = Self::default();
        for (name, piece) in pieces {
            if deadline.is_over() {
                all.cut.push(deadline.cut(&name));
                continue;
            }
            match do_one(&piece, deadline.left()) {
                Ok(Some(found)) => all.done.push(found),
                Ok(None) => all.cut.push(deadline.cut(&name)),
                Err(e) => all.failures.push(format!("{name}: {e:#}")),
            }
            told(&all)?;
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(unix)]
    fn a_program_that_takes_too_long_is_ended() {
        let shell = |script: &str, left| {
            run(Command::new("sh").args(["-c", script]), Duration::from_millis(left)).unwrap()
        };
        // Without an end this would take an hour.
        assert!(shell("exec sleep 3600", 100).is_none());
        let output = shell("echo out; echo err >&2; exit 3", 60_000).expect("it ends by itself");
        assert_eq!((&output.stdout[..], &output.stderr[..]), (&b"out\n"[..], &b"err\n"[..]));
        assert_eq!(output.status.code(), Some(3));
        // More than a pipe holds.
        let output = shell("head -c 300000 /dev/zero", 60_000).expect("it ends by itself");
        assert_eq!(output.stdout.len(), 300_000);
        assert!(run(&mut Command::new("/no/such/program"), Duration::ZERO).is_err());
    }

    #[test]
    fn what_was_found_in_time_stays() {
        let pieces = || ["a", "b", "c", "d"].map(|n| (n.to_owned(), n)).to_vec();
        let mut seen = Vec::new();
        let all = Pieces::run(
            Deadline::after(3600),
            pieces(),
            |name, _| match *name {
                "b" => bail!("broken"),
                "c" => Ok(None),
                name => Ok(Some(name.into())),
            },
            |so_far| {
                seen.push((so_far.done.len(), so_far.failures.len(), so_far.cut.len()));
                Ok(())
            },
        )
        .unwrap();
        assert_eq!(all.done, ["a", "d"]);
        assert_eq!(all.failures, ["b: broken"]);
        assert!(all.cut.len() == 1 && all.cut[0].starts_with("c: not measured"), "{:?}", all.cut);
        assert_eq!(seen, [(1, 0, 0), (1, 1, 0), (1, 1, 1), (2, 1, 1)]);
        let none = |_: &&str, _| -> anyhow::Result<Option<Value>> { panic!("time is over") };
        let all = Pieces::run(Deadline::after(0), pieces(), none, |_| Ok(())).unwrap();
        assert_eq!((all.done.len(), all.cut.len()), (0, 4));
    }
}
