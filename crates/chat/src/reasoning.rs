//! The think block, while it arrives.

use std::sync::Arc;

use crate::tools::{CallPart, CallReader, Element, Follower, Read, Step, Tools, is_blank};

const OPEN: &[Element] = &[Element::Text("<think>")];
const CLOSE: &[Element] = &[Element::Text("</think>")];

/// What a character meant.
#[derive(Debug)]
pub(crate) enum Thought {
    /// The think block goes on.
    Open,
    /// The think block goes on, and this has to be given again.
    Again(String),
    /// The think block is closed.
    Closed,
}

/// Reads a think block that the prompt has opened.
///
/// Newlines at its two ends are layout. A `<think>` at the very beginning, which some models repeat, is
/// dropped. A call counts only in its strict form: it begins a line, is complete, its function is declared,
/// and the end of the turn, `</think>` or another such call follows. All else is reasoning.
#[derive(Debug, Clone)]
pub(crate) struct ReasoningReader {
    tools: Option<Arc<Tools>>,
    /// Some reasoning was read.
    begun: bool,
    /// A repeated `<think>` was dropped.
    reopened: bool,
    line_start: bool,
    /// Newlines that are layout if nothing follows.
    gap: String,
    /// What was read of something that may not be reasoning, from its `<` on.
    held: String,
    open: Option<Follower>,
    close: Option<Follower>,
    chain: Option<Chain>,
}

impl ReasoningReader {
    pub fn new(tools: Option<Arc<Tools>>) -> Self {
        Self {
            tools,
            begun: false,
            reopened: false,
            line_start: true,
            gap: String::new(),
            held: String::new(),
            open: None,
            close: None,
            chain: None,
        }
    }

    pub fn push(&mut self, c: char, text: &mut String, calls: &mut Vec<CallPart>) -> Thought {
        if self.held.is_empty() {
            match c {
                '\n' => {
                    self.line_start = true;
                    if self.begun {
                        self.gap.push(c);
                    }
                    return Thought::Open;
                }
                '<' => {
                    self.close = Some(Follower::new(CLOSE));
                    self.open = (!self.begun && !self.reopened).then(|| Follower::new(OPEN));
                    let tools = self.tools.as_ref().filter(|_| self.line_start);
                    self.chain = tools.map(|tools| Chain::new(Arc::clone(tools)));
                }
                _ => {
                    self.give(c, text);
                    return Thought::Open;
                }
            }
        }
        self.held.push(c);
        match step(&mut self.close, c) {
            Some(Step::Done) => return Thought::Closed,
            Some(Step::Failed) => self.close = None,
            _ => {}
        }
        match step(&mut self.open, c) {
            Some(Step::Done) => {
                self.reopened = true;
                self.held.clear();
                return Thought::Open;
            }
            Some(Step::Failed) => self.open = None,
            _ => {}
        }
        match self.chain.as_mut().map(|chain| chain.push(c)) {
            Some(Link::Closed) => {
                calls.extend(self.chain.take().map(|chain| chain.calls).unwrap_or_default());
                return Thought::Closed;
            }
            Some(Link::Broken) => self.chain = None,
            _ => {}
        }
        match self.close.is_none() && self.open.is_none() && self.chain.is_none() {
            true => Thought::Again(self.give_held(text)),
            false => Thought::Open,
        }
    }

    /// Ends the think block without a closer. What comes back has to be given again before it is ended again.
    pub fn finish(
        &mut self,
        turn: bool,
        text: &mut String,
        calls: &mut Vec<CallPart>,
    ) -> Option<String> {
        if let Some(chain) = self.chain.take().filter(|chain| turn && chain.between) {
            calls.extend(chain.calls);
            self.held.clear();
        }
        (!self.held.is_empty()).then(|| self.give_held(text))
    }

    /// The first character held is reasoning; gives back the others.
    fn give_held(&mut self, text: &mut String) -> String {
        let held = std::mem::take(&mut self.held);
        (self.open, self.close, self.chain) = (None, None, None);
        self.give('<', text);
        held[1..].to_owned()
    }

    fn give(&mut self, c: char, text: &mut String) {
        text.push_str(&std::mem::take(&mut self.gap));
        text.push(c);
        self.begun = true;
        self.line_start = false;
    }
}

fn step(follower: &mut Option<Follower>, c: char) -> Option<Step> {
    follower.as_mut().map(|follower| follower.step(c))
}

enum Link {
    Whole,
    Broken,
    /// `</think>` was read behind a call.
    Closed,
}

/// Strict calls, one after another.
#[derive(Debug, Clone)]
struct Chain {
    tools: Arc<Tools>,
    calls: Vec<CallPart>,
    reader: Option<CallReader>,
    close: Option<Follower>,
    /// A call is complete and nothing but white space followed so far.
    between: bool,
}

impl Chain {
    fn new(tools: Arc<Tools>) -> Self {
        let reader = Some(CallReader::new(Arc::clone(&tools)));
        Self { tools, calls: Vec::new(), reader, close: None, between: false }
    }

    fn push(&mut self, c: char) -> Link {
        if self.between {
            if is_blank(c) {
                return Link::Whole;
            }
            self.between = false;
            self.reader = Some(CallReader::new(Arc::clone(&self.tools)));
        }
        if c == '<' {
            self.close = Some(Follower::new(CLOSE));
        }
        match step(&mut self.close, c) {
            // Inside a call it ends the thoughts and the call is none.
            Some(Step::Done) if self.reader.is_some() || self.calls.is_empty() => {
                return Link::Broken;
            }
            Some(Step::Done) => return Link::Closed,
            Some(Step::Failed) => self.close = None,
            _ => {}
        }
        let known = self.calls.len();
        match self.reader.as_mut().map(|reader| reader.push(c, &mut self.calls)) {
            Some(Read::Complete) => {
                self.between = true;
                self.reader = None;
            }
            Some(Read::Failed) => self.reader = None,
            _ => {}
        }
        let undeclared = |part: &CallPart| match part {
            CallPart::Begin { name } => !self.tools.declares(name),
            _ => false,
        };
        let stray = self.reader.is_none() && self.close.is_none() && !self.between;
        match stray || self.calls.iter().skip(known).any(undeclared) {
            true => Link::Broken,
            false => Link::Whole,
        }
    }
}
