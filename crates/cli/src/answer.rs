//! Splitting an answer into thinking and answer while it arrives.

use std::sync::Arc;

use lily_chat::{Detokenizer, Tokenizer};

/// What a piece of text belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Between the think markers.
    Thinking,
    /// The rest.
    Answer,
}

/// Turns token ids into text by part. Markers leave no text, and neither does white space at the ends of
/// a part.
pub struct Splitter {
    detokenizer: Detokenizer,
    open: Option<u32>,
    close: Option<u32>,
    part: Part,
    /// Whether the part has had text.
    begun: bool,
    /// White space that is kept if more text follows.
    held: String,
}

impl Splitter {
    /// For the answer to a prompt, which may end inside a think block.
    pub fn new(tokenizer: &Arc<Tokenizer>, prompt: &[u32]) -> Self {
        let (open, close) = (tokenizer.id_of("<think>"), tokenizer.id_of("</think>"));
        let last = |id: Option<u32>| prompt.iter().rposition(|p| Some(*p) == id);
        let part = match open.is_some() && last(open) > last(close) {
            true => Part::Thinking,
            false => Part::Answer,
        };
        Self {
            detokenizer: Detokenizer::new(Arc::clone(tokenizer), true),
            open,
            close,
            part,
            begun: false,
            held: String::new(),
        }
    }

    /// What the next token belongs to.
    pub fn part(&self) -> Part {
        self.part
    }

    /// Takes a token and gives the text that it completes.
    pub fn push(&mut self, id: u32) -> Option<(Part, String)> {
        if Some(id) == self.open || Some(id) == self.close {
            let rest = self.finish();
            self.part = if Some(id) == self.open { Part::Thinking } else { Part::Answer };
            self.begun = false;
            return rest;
        }
        let text = self.detokenizer.push(id)?;
        self.take(&text)
    }

    /// Ends the answer and gives what was waiting for the rest of a character.
    pub fn finish(&mut self) -> Option<(Part, String)> {
        let text = self.detokenizer.finish();
        let rest = text.and_then(|text| self.take(&text));
        self.held.clear();
        rest
    }

    fn take(&mut self, text: &str) -> Option<(Part, String)> {
        let mut all = std::mem::take(&mut self.held);
        all.push_str(text);
        let start = match self.begun {
            true => 0,
            false => all.len() - all.trim_start().len(),
        };
        let end = all.trim_end().len();
        if start >= end {
            self.held = all;
            return None;
        }
        self.begun = true;
        self.held = all[end..].to_owned();
        Some((self.part, all[start..end].to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer() -> Arc<Tokenizer> {
        let file = lily_demo::open().unwrap();
        let json = file.text_file("tokenizer.json").unwrap().unwrap();
        Arc::new(Tokenizer::from_json(&json, None).unwrap())
    }

    /// The two parts of an answer given as rendered text.
    fn split(prompt: &str, answer: &str) -> (String, String) {
        let tokenizer = tokenizer();
        let prompt = tokenizer.encode_rendered(prompt).unwrap();
        let mut splitter = Splitter::new(&tokenizer, &prompt);
        let (mut thinking, mut text) = (String::new(), String::new());
        let ids = tokenizer.encode_rendered(answer).unwrap();
        let mut pieces: Vec<_> = ids.iter().filter_map(|&id| splitter.push(id)).collect();
        pieces.extend(splitter.finish());
        for (part, piece) in pieces {
            match part {
                Part::Thinking => thinking.push_str(&piece),
                Part::Answer => text.push_str(&piece),
            }
        }
        (thinking, text)
    }

    #[test]
    fn parts() {
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        let inside = "<|im_start|>assistant\n<think>\n";
        let outside = "<|im_start|>assistant\n<think>\n\n</think>\n\n";
        let answer = "so 2  +\n\n2.\n</think>\n\nIt is\n\n4 — é.<|im_end|>";
        assert_eq!(split(inside, answer), pair("so 2  +\n\n2.", "It is\n\n4 — é."));
        assert_eq!(split(outside, "Paris. <|im_end|>"), pair("", "Paris."));
        assert_eq!(split(inside, "never ends"), pair("never ends", ""));
        assert_eq!(split(inside, "</think>\n\n"), pair("", ""));
        assert_eq!(split(outside, "a<think>b</think>c"), pair("b", "ac"));
        assert_eq!(split("no markers", " x "), pair("", "x"));
    }
}
