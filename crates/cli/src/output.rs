//! Writing to the terminal, to files and to other programs.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use serde::Serialize;

/// Begins dimmed text on a terminal.
const DIM: &str = "\x1b[2m";
/// Ends it.
const PLAIN: &str = "\x1b[0m";

/// Whether colours and the like are wanted at all: see <https://no-color.org>.
pub fn styles_wanted() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && std::env::var_os("TERM").is_none_or(|value| value != "dumb")
}

/// Text dimmed for a terminal. Each piece is closed, so that an interrupted program leaves none open.
pub fn dimmed(text: &str) -> String {
    format!("{DIM}{}{PLAIN}", printable(text))
}

/// A line on stderr: an error may quote a checkpoint, so control characters are not passed on. A closed
/// stderr is no reason to fail.
pub fn note(line: &str) {
    write_stderr(&format!("{}\n", printable(line)));
}

/// A piece of a model's text on stderr, shown at once.
pub fn note_text(text: &str) {
    write_stderr(&printable(text));
}

/// As [`note_text`], dimmed.
pub fn note_text_dimmed(text: &str) {
    write_stderr(&dimmed(text));
}

fn write_stderr(text: &str) {
    let mut err = io::stderr();
    let _ = err.write_all(text.as_bytes()).and_then(|()| err.flush());
}

/// As [`note`], dimmed where stderr is a terminal.
pub fn note_dimmed(line: &str) {
    match io::stderr().is_terminal() && styles_wanted() {
        true => write_stderr(&format!("{}\n", dimmed(line))),
        false => note(line),
    }
}

/// stdout. Every failed write is an error of the command; a closed pipe ends it quietly.
pub struct Stdout {
    out: io::StdoutLock<'static>,
    /// Whether it is a terminal.
    pub terminal: bool,
}

impl Stdout {
    pub fn new() -> Self {
        let out = io::stdout();
        Self { terminal: out.is_terminal(), out: out.lock() }
    }

    pub fn text(&mut self, text: &str) -> io::Result<()> {
        match self.terminal {
            true => self.out.write_all(printable(text).as_bytes()),
            false => self.out.write_all(text.as_bytes()),
        }
    }

    /// Bytes of ours, as they are.
    pub fn bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)
    }

    /// Dimmed if it is a terminal and styles are wanted.
    pub fn dimmed(&mut self, text: &str) -> io::Result<()> {
        match self.terminal && styles_wanted() {
            true => self.out.write_all(dimmed(text).as_bytes()),
            false => self.text(text),
        }
    }

    pub fn line(&mut self, line: &str) -> io::Result<()> {
        self.text(line)?;
        self.text("\n")
    }

    /// One line of JSON.
    pub fn json(&mut self, value: &impl Serialize) -> io::Result<()> {
        serde_json::to_writer(&mut self.out, value)?;
        self.out.write_all(b"\n")?;
        self.flush()
    }

    pub fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Control characters would command the terminal: a model's text must not.
fn printable(text: &str) -> String {
    let shown = |c: char| match c {
        '\n' | '\t' => c,
        c if c.is_control() => char::REPLACEMENT_CHARACTER,
        c => c,
    };
    text.chars().map(shown).collect()
}

/// A line on stderr that counts up, where stderr is a terminal.
pub struct Progress {
    what: &'static str,
    shown: bool,
    next: Instant,
    enabled: bool,
}

impl Progress {
    const INTERVAL: Duration = Duration::from_millis(100);

    pub fn new(what: &'static str, quiet: bool) -> Self {
        let enabled = !quiet && io::stderr().is_terminal();
        // What ends within a moment needs no line.
        Self { what, shown: false, next: Instant::now() + 3 * Self::INTERVAL, enabled }
    }

    pub fn show(&mut self, done: impl FnOnce() -> String) {
        if self.enabled && Instant::now() >= self.next {
            write_stderr(&format!("\r\x1b[K{} {}", self.what, done()));
            self.shown = true;
            self.next = Instant::now() + Self::INTERVAL;
        }
    }

    /// As [`show`](Self::show), of bytes.
    pub fn bytes(&mut self, done: u64, total: u64) {
        let percent = done as f64 / total.max(1) as f64 * 100.0;
        self.show(|| format!("{percent:.0} % of {}", bytes(total)));
    }

    /// Takes the line away.
    pub fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            write_stderr("\r\x1b[K");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

/// A number with its digits in groups of three: `19,508,787,456`.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(c);
    }
    text
}

/// Bytes in a decimal unit: `19.51 GB`.
pub fn bytes(n: u64) -> String {
    let units = [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    match units.into_iter().find(|(unit, _)| n as f64 >= *unit) {
        Some((unit, name)) => format!("{:.2} {name}", n as f64 / unit),
        None => format!("{n} B"),
    }
}

/// A table: the first column to the left, the others to the right.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|t| t.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|c| width(c).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (c, cell) in row.iter().enumerate() {
            let _ = match c {
                0 => write!(line, "  {cell:<0$}", widths[c]),
                _ => write!(line, "  {cell:>0$}", widths[c]),
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures() {
        assert_eq!(
            [0, 999, 1000, 19_508_787_456].map(grouped),
            ["0", "999", "1,000", "19,508,787,456"]
        );
        assert_eq!(
            [0, 999, 1000, 19_508_787_456].map(bytes),
            ["0 B", "999 B", "1.00 kB", "19.51 GB"]
        );
    }

    #[test]
    fn columns() {
        let row = |cells: [&str; 3]| cells.map(String::from).to_vec();
        let text = table(&[row(["a", "1", "22"]), row(["long", "333", ""])]);
        assert_eq!(text, "  a       1  22\n  long  333\n");
    }

    #[test]
    fn a_model_cannot_command_the_terminal() {
        assert_eq!(printable("a\x1b[2Jb\n\tc\r"), "a\u{FFFD}[2Jb\n\tc\u{FFFD}");
    }
}
