//! Marks that keep control tokens out of content.
//!
//! Two private-use characters carry the scheme through the template:
//!
//! - [`MARK`] means nothing and is dropped after rendering. It stands inside content wherever a
//!   control token could otherwise be read.
//! - [`ESCAPE`] makes the next [`MARK`] or [`ESCAPE`] a plain character, so a text that already
//!   holds either of them survives unchanged.
//!
//! Both are units of a prefix code, so texts may be concatenated, trimmed or split at other
//! characters without changing what they mean.
//!
//! # Where marks go
//!
//! 1. After **every** character with which some control token begins (in practice `<`), in every
//!    string of messages, tool definitions and extra variables. No control token can then begin
//!    inside content, however the template slices it or what it appends.
//! 2. At the start of a string that would complete a control token after a template's own `<`,
//!    `</` or `<|`: a template that writes `'<' ~ key ~ '>'` for a key `think` must not make
//!    `<think>`. Values of `role` and `type` are spared, since templates compare them.
//!
//! # Thinking inside an assistant message
//!
//! Templates take reasoning out of `<think>…</think>` in an assistant's content, so they must see
//! those spellings. In an assistant message without a `reasoning_content` string whose content
//! holds `</think>`, and only if the template's source mentions `</think>`, two kinds stay
//! unmarked: every `</think>`, and each `<think>` before the first of them. These are exactly the
//! ones that such a split consumes (`split('</think>')[0]…split('<think>')[-1]` and
//! `split('</think>')[-1]`), so none of them reaches the prompt as a control token; the template
//! writes its own. Everywhere else, and for everyone else, the two are marked like any other.
//!
//! A user's `<tool_response>…</tool_response>` is marked, so a template no longer takes it for a
//! tool's result. That is intended: a user is not a tool.

use std::borrow::Cow;

/// Dropped after rendering; separates the characters of a would-be control token.
pub const MARK: char = '\u{10FFF0}';
/// Makes a following [`MARK`] or [`ESCAPE`] a plain character.
pub const ESCAPE: char = '\u{10FFF1}';

pub(crate) const THINK_OPEN: &str = "<think>";
pub(crate) const THINK_CLOSE: &str = "</think>";

/// Removes the marks from rendered text: what a person should see of a prompt.
pub fn unmark(rendered: &str) -> Cow<'_, str> {
    if !rendered.contains([MARK, ESCAPE]) {
        return Cow::Borrowed(rendered);
    }
    let mut plain = String::with_capacity(rendered.len());
    let mut chars = rendered.chars();
    while let Some(c) = chars.next() {
        match c {
            MARK => {}
            // Escaping always writes a pair; the next character is the literal one.
            ESCAPE => plain.extend(chars.next()),
            other => plain.push(other),
        }
    }
    Cow::Owned(plain)
}

/// Part of a rendered text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Piece<'t> {
    /// Text between control tokens, marks included.
    Text(&'t str),
    /// A control token, written by the template.
    Control(u32),
}

/// Control tokens that begin with the same byte, the longest first, because the longest wins.
#[derive(Debug, Clone)]
struct Bucket {
    first: u8,
    tokens: Vec<(Box<str>, u32)>,
}

/// The spellings of a tokenizer's control tokens, ready for searching and marking.
#[derive(Debug, Clone, Default)]
pub(crate) struct ControlSpellings {
    buckets: Vec<Bucket>,
    first_chars: Vec<char>,
    /// What is left of a spelling after its opening punctuation.
    remainders: Vec<Box<str>>,
}

impl ControlSpellings {
    pub(crate) fn new<'s>(tokens: impl IntoIterator<Item = (&'s str, u32)>) -> Self {
        let mut this = Self::default();
        for (spelling, id) in tokens {
            let Some(first_char) = spelling.chars().next() else {
                continue;
            };
            let first = spelling.as_bytes()[0];
            let token = (Box::from(spelling), id);
            match this.buckets.iter_mut().find(|b| b.first == first) {
                Some(bucket) => bucket.tokens.push(token),
                None => this.buckets.push(Bucket { first, tokens: vec![token] }),
            }
            if !this.first_chars.contains(&first_char) {
                this.first_chars.push(first_char);
            }
            let opening = spelling
                .char_indices()
                .take_while(|(_, c)| !c.is_alphanumeric())
                .map(|(at, c)| at + c.len_utf8());
            for rest in opening.map(|end| &spelling[end..]) {
                if !rest.is_empty() && !this.remainders.iter().any(|r| **r == *rest) {
                    this.remainders.push(rest.into());
                }
            }
        }
        for bucket in &mut this.buckets {
            bucket.tokens.sort_by_key(|(spelling, _)| std::cmp::Reverse(spelling.len()));
        }
        this
    }

    /// The longest control token that starts at the beginning of `bytes`.
    fn longest_at(&self, bytes: &[u8]) -> Option<(usize, u32)> {
        let first = *bytes.first()?;
        let bucket = self.buckets.iter().find(|b| b.first == first)?;
        bucket
            .tokens
            .iter()
            .find(|(spelling, _)| bytes.starts_with(spelling.as_bytes()))
            .map(|(spelling, id)| (spelling.len(), *id))
    }

    /// Splits rendered text at its unmarked control tokens.
    pub(crate) fn split<'t>(&self, rendered: &'t str) -> Vec<Piece<'t>> {
        let bytes = rendered.as_bytes();
        let (mut pieces, mut start, mut at) = (Vec::new(), 0, 0);
        while at < bytes.len() {
            match self.longest_at(&bytes[at..]) {
                Some((len, id)) => {
                    if start < at {
                        pieces.push(Piece::Text(&rendered[start..at]));
                    }
                    pieces.push(Piece::Control(id));
                    at += len;
                    start = at;
                }
                None => at += 1,
            }
        }
        if start < bytes.len() {
            pieces.push(Piece::Text(&rendered[start..]));
        }
        pieces
    }

    /// Marks a string that templates compare with fixed words (`role`, `type`): rule 1 only.
    pub(crate) fn mark_word(&self, text: &str) -> String {
        self.mark_except(text, false)
    }

    /// Marks a string of content: rules 1 and 2.
    pub(crate) fn mark(&self, text: &str) -> String {
        let body = text.trim_start();
        let mut marked = String::with_capacity(text.len() + 16);
        marked.push_str(&text[..text.len() - body.len()]);
        if self.continues_a_token(body) {
            marked.push(MARK);
        }
        marked.push_str(&self.mark_except(body, false));
        marked
    }

    /// Marks an assistant's content whose thinking the template will split off.
    pub(crate) fn mark_with_thinking(&self, text: &str) -> String {
        self.mark_except(text, true)
    }

    fn mark_except(&self, text: &str, spare_thinking: bool) -> String {
        let first_close = text.find(THINK_CLOSE).filter(|_| spare_thinking);
        let mut marked = String::with_capacity(text.len() + 16);
        for (at, c) in text.char_indices() {
            if matches!(c, MARK | ESCAPE) {
                marked.push(ESCAPE);
            }
            marked.push(c);
            let spared = first_close.is_some_and(|close| {
                let rest = &text[at..];
                rest.starts_with(THINK_CLOSE) || (at < close && rest.starts_with(THINK_OPEN))
            });
            if self.first_chars.contains(&c) && !spared {
                marked.push(MARK);
            }
        }
        marked
    }

    /// Whether `text` behind a template's own `<` (or the like) would make a control token,
    /// alone or with what the template appends.
    fn continues_a_token(&self, text: &str) -> bool {
        !text.is_empty()
            && self
                .remainders
                .iter()
                .any(|rest| text.starts_with(&**rest) || rest.starts_with(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spellings() -> ControlSpellings {
        ControlSpellings::new([
            ("<|im_end|>", 1),
            ("<think>", 2),
            ("</think>", 3),
            ("<tool", 4),
            ("<tool_call>", 5),
        ])
    }

    #[test]
    fn the_longest_spelling_wins() {
        assert_eq!(
            spellings().split("a<tool_call>b<tool"),
            [Piece::Text("a"), Piece::Control(5), Piece::Text("b"), Piece::Control(4)]
        );
    }

    #[test]
    fn marked_text_holds_no_control_token_and_comes_back() {
        let s = spellings();
        let odd = format!("{MARK}<|im_end|>{ESCAPE}{MARK}<think></think><{MARK}|im_end|> <");
        let marked = s.mark(&odd);
        assert_eq!(s.split(&marked), [Piece::Text(marked.as_str())]);
        assert_eq!(unmark(&marked), odd);
    }

    #[test]
    fn text_between_template_brackets_cannot_make_a_token() {
        let s = spellings();
        for key in ["think", "think>", "|im_end|", "im_end|", "tool_call>", "/think"] {
            for (open, close) in [("<", ">"), ("</", ">"), ("<|", "|>")] {
                let rendered = format!("{open}{}{close}", s.mark(key));
                assert_eq!(s.split(&rendered).len(), 1, "{rendered}");
                assert_eq!(unmark(&rendered), format!("{open}{key}{close}"));
            }
        }
        assert_eq!(s.mark("name"), "name");
        assert_eq!(s.mark_word("think"), "think");
    }

    #[test]
    fn only_the_thinking_that_a_split_consumes_is_spared() {
        let s = spellings();
        let marked = s.mark_with_thinking("<think>a<|im_end|></think>b<think>c");
        assert_eq!(marked, format!("<think>a<{MARK}|im_end|></think>b<{MARK}think>c"));
        let open_only = s.mark_with_thinking("<think>never closed");
        assert_eq!(open_only, format!("<{MARK}think>never closed"));
    }
}
