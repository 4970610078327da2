//! Where messages come from: a terminal with an editor, or lines of stdin.

use std::cell::Cell;
use std::fs;
use std::io::{self, BufRead};
use std::path::PathBuf;

use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::Validator;
use rustyline::{Config, Context, Editor, Helper};

use super::command::COMMANDS;
use super::lines::{Lines, Whole};
use crate::failure::Failure;
use crate::output::note_dimmed;

const PROMPT: &str = "> ";
const CONTINUED: &str = ". ";
/// Messages that the history keeps.
const HISTORY: usize = 1000;
/// Longest line that is read from a file or pipe.
const MAX_LINE: u64 = 64 << 20;

/// What the user entered.
#[derive(Debug, PartialEq, Eq)]
pub enum Entry {
    Message(String),
    /// A line that begins with `/`.
    Command(String),
    /// There is no more.
    Left,
}

/// A source of entries.
pub enum Input {
    Terminal(Box<Terminal>),
    Lines(Lines),
}

/// An editor, and whether Ctrl-C was pressed last.
pub struct Terminal {
    editor: Editor<Assist, FileHistory>,
    history: Option<PathBuf>,
    lines: Lines,
    warned: bool,
}

impl Input {
    /// Lines of stdin.
    pub fn lines() -> Self {
        Self::Lines(Lines::default())
    }

    /// The terminal; `history` tells whether messages are kept from one start to the next.
    pub fn terminal(history: bool) -> anyhow::Result<Self> {
        let failed = |error: ReadlineError| {
            Failure::new(
                format!("the terminal cannot be used: {error}"),
                "lily run answers a single question without one",
            )
        };
        let config = Config::builder().auto_add_history(false).max_history_size(HISTORY);
        let config = config.map_err(failed)?.build();
        let mut editor = Editor::with_config(config).map_err(failed)?;
        editor.set_helper(Some(Assist::default()));
        let history = history.then(history_file).flatten();
        if let Some(file) = &history {
            // There is none at the first start.
            let _ = editor.load_history(file);
        }
        let lines = Lines::default();
        Ok(Self::Terminal(Box::new(Terminal { editor, history, lines, warned: false })))
    }

    /// The next entry that is not empty.
    pub fn next(&mut self) -> anyhow::Result<Entry> {
        loop {
            let whole = match self {
                Self::Terminal(terminal) => terminal.next()?,
                Self::Lines(lines) => next_of_stdin(lines)?,
            };
            let Some(Whole { text, plain }) = whole else { return Ok(Entry::Left) };
            if text.trim().is_empty() {
                continue;
            }
            return Ok(match text.trim_start().strip_prefix('/').filter(|_| plain) {
                Some(doubled) if doubled.starts_with('/') => Entry::Message(doubled.to_owned()),
                Some(_) => Entry::Command(text),
                None => Entry::Message(text),
            });
        }
    }
}

fn next_of_stdin(lines: &mut Lines) -> anyhow::Result<Option<Whole>> {
    let failed = |error: io::Error| {
        let hint = "messages must be UTF-8 text, one a line";
        Failure::new(format!("stdin cannot be read: {error}"), hint)
    };
    loop {
        let mut line = String::new();
        let mut stdin = io::Read::take(io::stdin().lock(), MAX_LINE);
        if stdin.read_line(&mut line).map_err(failed)? == 0 {
            return Ok(lines.rest());
        }
        let line = line.strip_suffix('\n').unwrap_or(&line);
        if let Some(whole) = lines.push(line.strip_suffix('\r').unwrap_or(line)) {
            return Ok(Some(whole));
        }
    }
}

impl Terminal {
    fn next(&mut self) -> anyhow::Result<Option<Whole>> {
        loop {
            let prompt = if self.lines.is_open() { CONTINUED } else { PROMPT };
            match self.editor.readline(prompt) {
                Ok(line) => {
                    self.warned = false;
                    if let Some(whole) = self.lines.push(&line) {
                        self.remember(&whole.text);
                        return Ok(Some(whole));
                    }
                }
                Err(ReadlineError::Interrupted) => {
                    let empty = !self.lines.is_open()
                        && self.editor.helper().is_none_or(|assist| assist.empty.get());
                    if empty && self.warned {
                        return Ok(None);
                    }
                    if empty {
                        note_dimmed("Ctrl-C once more leaves, as Ctrl-D does");
                    }
                    self.warned = empty;
                    self.lines.clear();
                }
                Err(ReadlineError::Eof) => return Ok(None),
                Err(error) => {
                    let what = format!("the terminal cannot be read: {error}");
                    return Err(Failure::new(what, "start again in another terminal").into());
                }
            }
        }
    }

    fn remember(&mut self, text: &str) {
        let added = self.editor.add_history_entry(text).unwrap_or(false);
        if let Some(file) = self.history.as_ref().filter(|_| added)
            && let Err(error) = self.editor.append_history(file)
        {
            let file = file.display();
            note_dimmed(&format!("the history {file} cannot be written: {error}"));
            self.history = None;
        }
    }
}

/// The file of the history, its folder made if need be. `None` where there is no home.
fn history_file() -> Option<PathBuf> {
    let path = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let state = path("XDG_STATE_HOME").filter(|p| p.is_absolute()).or_else(|| {
        let home = path("HOME").map(|home| home.join(".local").join("state"));
        home.or_else(|| path("LOCALAPPDATA"))
    });
    let dir = state?.join("lily");
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    let _ = builder.create(&dir);
    Some(dir.join("history"))
}

/// Completes commands, and remembers whether the line is empty.
#[derive(Default)]
struct Assist {
    empty: Cell<bool>,
}

impl Completer for Assist {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        pos: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        let typed = &line[..pos];
        // With the space that its argument follows after.
        let name = |usage: &str| usage.split_inclusive(' ').next().map(str::to_owned);
        let names = COMMANDS.iter().filter_map(|c| name(c.usage));
        let fits = |name: &String| typed.starts_with('/') && name.starts_with(typed);
        Ok((0, names.filter(fits).collect()))
    }
}

impl Hinter for Assist {
    type Hint = String;

    fn hint(&self, line: &str, _: usize, _: &Context<'_>) -> Option<String> {
        self.empty.set(line.is_empty());
        None
    }
}

impl Highlighter for Assist {}
impl Validator for Assist {}
impl Helper for Assist {}
