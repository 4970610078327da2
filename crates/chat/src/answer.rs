//! An answer, told apart while it arrives: reasoning, text, calls.

use std::sync::Arc;

use crate::marks::THINK_OPEN;
use crate::reasoning::{ReasoningReader, Thought};
use crate::tools::{CallPart, ContentReader, Tools};

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// What the model thinks.
    Reasoning(String),
    /// What it says.
    Content {
        /// The text.
        text: String,
        /// Where its first byte was in all that was pushed.
        at: usize,
    },
    /// What it calls.
    Call(CallPart),
}

/// How an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The model ended its turn.
    Turn,
    /// It was cut: by a limit, or by whoever asked.
    Cut,
}

/// Tells the parts of an answer apart. However the text is cut into pieces, the parts, joined, are the same.
///
/// Reasoning loses the newlines at its two ends, text those directly behind `</think>`; white space between
/// text and calls belongs to neither. Nothing else is lost, but for a call that is cut.
#[derive(Debug, Clone)]
pub struct AnswerParser {
    reasoning: Option<ReasoningReader>,
    content: ContentReader,
    /// Bytes taken.
    at: usize,
}

impl AnswerParser {
    /// For an answer to a prompt that has opened the think block (`thinking`) or has not. Without tools,
    /// calls are text.
    pub fn new(thinking: bool, tools: Option<Arc<Tools>>) -> Self {
        Self {
            reasoning: thinking.then(|| ReasoningReader::new(tools.clone())),
            content: ContentReader::new(tools, thinking),
            at: 0,
        }
    }

    /// Whether a rendered prompt leaves the think block open.
    pub fn is_opened_by(rendered: &str) -> bool {
        rendered.trim_end().ends_with(THINK_OPEN)
    }

    /// Whether the think block is open.
    pub fn is_thinking(&self) -> bool {
        self.reasoning.is_some()
    }

    /// Whether a call is open.
    pub fn is_in_call(&self) -> bool {
        self.reasoning.is_none() && self.content.is_in_call()
    }

    /// Takes the next piece of text and gives the parts that it makes certain.
    pub fn push(&mut self, piece: &str) -> Vec<Part> {
        let mut parts = Vec::new();
        self.run(piece, &mut parts);
        parts
    }

    /// Ends the answer. `true`: a call was cut.
    pub fn finish(&mut self, end: End) -> (Vec<Part>, bool) {
        let mut parts = Vec::new();
        let turn = end == End::Turn;
        while let Some(reasoning) = &mut self.reasoning {
            let (mut text, mut calls) = (String::new(), Vec::new());
            let again = reasoning.finish(turn, &mut text, &mut calls);
            give(&mut parts, Part::Reasoning(text));
            calls.into_iter().for_each(|call| give(&mut parts, Part::Call(call)));
            let Some(again) = again else { return (parts, false) };
            self.at -= again.len();
            self.run(&again, &mut parts);
        }
        let (mut text, mut calls) = (String::new(), Vec::new());
        let cut = self.content.finish(turn, &mut text, &mut calls);
        self.give_content(text, self.at, &mut parts);
        calls.into_iter().for_each(|call| give(&mut parts, Part::Call(call)));
        (parts, cut)
    }

    fn run(&mut self, piece: &str, parts: &mut Vec<Part>) {
        let mut stack: Vec<char> = piece.chars().rev().collect();
        let (mut text, mut calls) = (String::new(), Vec::new());
        while let Some(c) = stack.pop() {
            self.at += c.len_utf8();
            let again = match &mut self.reasoning {
                Some(reasoning) => match reasoning.push(c, &mut text, &mut calls) {
                    Thought::Open => None,
                    Thought::Again(again) => Some(again),
                    Thought::Closed => {
                        self.reasoning = None;
                        give(parts, Part::Reasoning(std::mem::take(&mut text)));
                        None
                    }
                },
                None => self.content.push(c, &mut text, &mut calls),
            };
            let again = again.unwrap_or_default();
            self.at -= again.len();
            stack.extend(again.chars().rev());
            if !text.is_empty() {
                let text = std::mem::take(&mut text);
                match self.reasoning.is_some() {
                    true => give(parts, Part::Reasoning(text)),
                    false => self.give_content(text, self.at, parts),
                }
            }
            for call in calls.drain(..) {
                give(parts, Part::Call(call));
            }
        }
    }

    /// Text that ends at a byte of the input.
    fn give_content(&self, text: String, end: usize, parts: &mut Vec<Part>) {
        let at = end - text.len();
        give(parts, Part::Content { text, at });
    }
}

/// Appends a part, joined to the one before it if it continues that.
fn give(parts: &mut Vec<Part>, part: Part) {
    match (parts.last_mut(), part) {
        (_, Part::Reasoning(text)) if text.is_empty() => {}
        (_, Part::Content { text, .. }) if text.is_empty() => {}
        (_, Part::Call(CallPart::Arguments(text))) if text.is_empty() => {}
        (Some(Part::Reasoning(before)), Part::Reasoning(text)) => before.push_str(&text),
        (Some(Part::Content { text: before, at }), Part::Content { text, at: next })
            if *at + before.len() == next =>
        {
            before.push_str(&text);
        }
        (Some(Part::Call(CallPart::Arguments(before))), Part::Call(CallPart::Arguments(text))) => {
            before.push_str(&text)
        }
        (_, part) => parts.push(part),
    }
}
