//! One call, from its `<tool_call>` to its end.

use std::sync::Arc;

use serde_json::Value;

use super::follow::{Element, Follower, Step};
use super::schema::{Kinds, Tools};

use Element::{Blank, Name, Text};

/// `<tool_call>`, white space, `<function=NAME>`.
macro_rules! header {
    ($($rest:expr),*) => {
        &[Text("<tool_call>"), Blank, Text("<function="), Name, Text(">"), Blank, $($rest),*]
    };
}
const HEADER_PARAMETER: &[Element] = header![Text("<parameter=")];
const HEADER_END: &[Element] = header![Text("</function>"), Blank, Text("</tool_call>")];
const VALUE_PARAMETER: &[Element] = &[Text("</parameter>"), Blank, Text("<parameter=")];
const VALUE_END: &[Element] =
    &[Text("</parameter>"), Blank, Text("</function>"), Blank, Text("</tool_call>")];

/// A part of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallPart {
    /// A call begins.
    Begin {
        /// The function that is called.
        name: String,
    },
    /// The next piece of its arguments: JSON, once all pieces are joined.
    Arguments(String),
    /// The call is complete.
    End,
}

/// What a character meant to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Read {
    /// The call goes on.
    More,
    /// This is no call.
    Failed,
    /// The call is complete.
    Complete,
}

/// Two ways on, of which at most one is right.
#[derive(Debug, Clone)]
struct Fork {
    parameter: Option<Follower>,
    end: Option<Follower>,
}

enum Way {
    Parameter,
    End,
    Open,
    Neither,
}

impl Fork {
    fn new(parameter: &'static [Element], end: &'static [Element]) -> Self {
        Self { parameter: Some(Follower::new(parameter)), end: Some(Follower::new(end)) }
    }

    fn step(&mut self, c: char) -> Way {
        for (follower, way) in [(&mut self.parameter, Way::Parameter), (&mut self.end, Way::End)] {
            match follower.as_mut().map(|f| f.step(c)) {
                Some(Step::Done) => return way,
                Some(Step::Failed) => *follower = None,
                _ => {}
            }
        }
        match self.parameter.is_none() && self.end.is_none() {
            true => Way::Neither,
            false => Way::Open,
        }
    }

    /// Whether nothing but the last element is missing.
    fn lacks_the_closer(&self, structure: &[Element]) -> bool {
        self.end.as_ref().is_some_and(|end| end.has(structure.len() - 2))
    }
}

#[derive(Debug, Clone)]
struct Parameter {
    kinds: Kinds,
    /// Of a value that is no plain text: what was written so far.
    raw: String,
    /// Nothing was read yet: a newline here is layout.
    first: bool,
    /// A newline was read that may be layout.
    newline: bool,
    /// What was read of a possible closer.
    held: String,
    closing: Fork,
}

impl Parameter {
    fn new(kinds: Kinds) -> Self {
        let closing = Fork::new(VALUE_PARAMETER, VALUE_END);
        Self {
            kinds,
            raw: String::new(),
            first: true,
            newline: false,
            held: String::new(),
            closing,
        }
    }
}

#[derive(Debug, Clone)]
enum State {
    Header { text: String, fork: Fork },
    Key(String),
    Value(Parameter),
    Complete,
}

/// Reads one call.
#[derive(Debug, Clone)]
pub(crate) struct CallReader {
    tools: Arc<Tools>,
    name: String,
    parameters: usize,
    state: State,
}

impl CallReader {
    pub fn new(tools: Arc<Tools>) -> Self {
        let fork = Fork::new(HEADER_PARAMETER, HEADER_END);
        let state = State::Header { text: String::new(), fork };
        Self { tools, name: String::new(), parameters: 0, state }
    }

    /// Takes a character; the first is the `<` of `<tool_call>`. It can only fail before it has begun.
    pub fn push(&mut self, c: char, parts: &mut Vec<CallPart>) -> Read {
        match &mut self.state {
            State::Header { text, fork } => {
                text.push(c);
                match fork.step(c) {
                    Way::Open => return Read::More,
                    Way::Neither => return Read::Failed,
                    Way::Parameter => {
                        self.begin(parts);
                        self.state = State::Key(String::new());
                    }
                    Way::End => {
                        self.begin(parts);
                        return self.complete(parts);
                    }
                }
            }
            State::Key(key) => match c {
                '>' => {
                    let key = std::mem::take(key);
                    self.open_value(&key, parts);
                }
                _ => key.push(c),
            },
            State::Value(_) => return self.value(c, parts),
            State::Complete => return Read::Failed,
        }
        Read::More
    }

    /// Whether the call has begun: it is one, though perhaps not complete.
    pub fn has_begun(&self) -> bool {
        !matches!(self.state, State::Header { .. })
    }

    /// Whether at least `<tool_call>` was read.
    pub fn is_opened(&self) -> bool {
        self.header().is_none_or(|header| header.has(1))
    }

    /// Whether something of `<function=` was read.
    pub fn is_named(&self) -> bool {
        self.header().is_none_or(|header| header.is_beyond(2))
    }

    fn header(&self) -> Option<&Follower> {
        match &self.state {
            State::Header { fork, .. } => fork.parameter.as_ref().or(fork.end.as_ref()),
            _ => None,
        }
    }

    /// The turn has ended: completes a call of which only `</tool_call>` is missing.
    pub fn end_turn(&mut self, parts: &mut Vec<CallPart>) -> bool {
        match &self.state {
            State::Header { fork, .. } if fork.lacks_the_closer(HEADER_END) => {
                self.begin(parts);
                self.complete(parts);
                true
            }
            State::Value(parameter) if parameter.closing.lacks_the_closer(VALUE_END) => {
                self.close_value(parts);
                self.complete(parts);
                true
            }
            _ => false,
        }
    }

    fn begin(&mut self, parts: &mut Vec<CallPart>) {
        if let State::Header { text, .. } = &self.state {
            let name = text.split_once("<function=").and_then(|(_, rest)| rest.split_once('>'));
            self.name = name.map(|(name, _)| name.to_owned()).unwrap_or_default();
        }
        parts.push(CallPart::Begin { name: self.name.clone() });
    }

    fn complete(&mut self, parts: &mut Vec<CallPart>) -> Read {
        arguments(parts, if self.parameters == 0 { "{}" } else { "}" });
        parts.push(CallPart::End);
        self.state = State::Complete;
        Read::Complete
    }

    fn open_value(&mut self, key: &str, parts: &mut Vec<CallPart>) {
        let kinds = self.tools.kinds(&self.name, key);
        arguments(parts, if self.parameters == 0 { "{" } else { ", " });
        arguments(parts, &Value::from(key).to_string());
        arguments(parts, if kinds == Kinds::STRING { ": \"" } else { ": " });
        self.parameters += 1;
        self.state = State::Value(Parameter::new(kinds));
    }

    fn close_value(&mut self, parts: &mut Vec<CallPart>) {
        if let State::Value(parameter) = &self.state {
            match parameter.kinds == Kinds::STRING {
                true => arguments(parts, "\""),
                false => arguments(parts, &parameter.kinds.json(&parameter.raw)),
            }
        }
    }

    /// A character of a value, or of what may be its closer.
    fn value(&mut self, c: char, parts: &mut Vec<CallPart>) -> Read {
        let mut stack = vec![c];
        while let Some(c) = stack.pop() {
            let State::Value(value) = &mut self.state else { return Read::Failed };
            if value.held.is_empty() {
                let first = std::mem::take(&mut value.first);
                match c {
                    '\n' if first => continue,
                    '<' => value.closing = Fork::new(VALUE_PARAMETER, VALUE_END),
                    _ => {
                        if std::mem::replace(&mut value.newline, c == '\n') {
                            value.data('\n', parts);
                        }
                        if c != '\n' {
                            value.data(c, parts);
                        }
                        continue;
                    }
                }
            }
            value.held.push(c);
            match value.closing.step(c) {
                Way::Open => {}
                Way::Parameter => {
                    self.close_value(parts);
                    self.state = State::Key(String::new());
                    return Read::More;
                }
                Way::End => {
                    self.close_value(parts);
                    return self.complete(parts);
                }
                Way::Neither => {
                    // No closer: its `<` is data, and what follows is looked at anew.
                    let held = std::mem::take(&mut value.held);
                    value.closing = Fork::new(VALUE_PARAMETER, VALUE_END);
                    if std::mem::take(&mut value.newline) {
                        value.data('\n', parts);
                    }
                    value.data('<', parts);
                    stack.extend(held.chars().skip(1).collect::<Vec<_>>().into_iter().rev());
                }
            }
        }
        Read::More
    }
}

impl Parameter {
    fn data(&mut self, c: char, parts: &mut Vec<CallPart>) {
        match self.kinds == Kinds::STRING {
            false => self.raw.push(c),
            true => {
                let text = Value::from(c.to_string()).to_string();
                arguments(parts, &text[1..text.len() - 1]);
            }
        }
    }
}

fn arguments(parts: &mut Vec<CallPart>, piece: &str) {
    match parts.last_mut() {
        Some(CallPart::Arguments(text)) => text.push_str(piece),
        _ => parts.push(CallPart::Arguments(piece.to_owned())),
    }
}
