//! Text and calls behind the think block.

use std::sync::Arc;

use super::call::{CallPart, CallReader, Read};
use super::follow::is_blank;
use super::schema::Tools;

/// Tells calls from text. Without tools all is text.
#[derive(Debug, Clone)]
pub(crate) struct ContentReader {
    tools: Option<Arc<Tools>>,
    /// White space that is layout if a call follows.
    gap: String,
    /// A call, or what may become one.
    call: Option<CallReader>,
    /// What was read of a call that has not begun.
    held: String,
    /// Nothing but white space was read since a call ended.
    after_call: bool,
    /// Newlines at the beginning belong to the closer of the think block.
    skip_newlines: bool,
}

impl ContentReader {
    pub fn new(tools: Option<Arc<Tools>>, skip_newlines: bool) -> Self {
        Self {
            tools,
            gap: String::new(),
            call: None,
            held: String::new(),
            after_call: false,
            skip_newlines,
        }
    }

    pub fn is_in_call(&self) -> bool {
        self.call.as_ref().is_some_and(CallReader::has_begun)
    }

    /// Takes a character. What comes back has to be given again.
    pub fn push(
        &mut self,
        c: char,
        text: &mut String,
        calls: &mut Vec<CallPart>,
    ) -> Option<String> {
        if self.skip_newlines {
            if c == '\n' {
                return None;
            }
            self.skip_newlines = false;
        }
        let Some(tools) = &self.tools else {
            text.push(c);
            return None;
        };
        if self.call.is_none() {
            match c {
                '<' => self.call = Some(CallReader::new(Arc::clone(tools))),
                _ if is_blank(c) => {
                    self.gap.push(c);
                    return None;
                }
                _ => {
                    self.give_gap(text);
                    text.push(c);
                    return None;
                }
            }
        }
        let call = self.call.as_mut()?;
        if !call.has_begun() {
            self.held.push(c);
        }
        match call.push(c, calls) {
            Read::More if call.has_begun() => {
                self.held.clear();
                self.gap.clear();
            }
            Read::More => {}
            Read::Failed => {
                self.call = None;
                let held = std::mem::take(&mut self.held);
                self.give_gap(text);
                text.push('<');
                return Some(held[1..].to_owned());
            }
            Read::Complete => {
                self.call = None;
                self.held.clear();
                self.gap.clear();
                self.after_call = true;
            }
        }
        None
    }

    /// Ends the text, at the end of the turn or in mid-sentence. `true`: a call was cut.
    pub fn finish(&mut self, turn: bool, text: &mut String, calls: &mut Vec<CallPart>) -> bool {
        let held = std::mem::take(&mut self.held);
        if let Some(mut call) = self.call.take() {
            if turn && call.end_turn(calls) {
                return false;
            }
            // A bare tag at the end of a turn is a word about calls; before a cut it is the beginning of one.
            if if turn { call.is_named() } else { call.is_opened() } {
                return true;
            }
            self.give_gap(text);
            text.push_str(&held);
        } else if !self.after_call {
            self.give_gap(text);
        }
        false
    }

    fn give_gap(&mut self, text: &mut String) {
        let gap = std::mem::take(&mut self.gap);
        if !std::mem::take(&mut self.after_call) {
            text.push_str(&gap);
        }
    }
}
