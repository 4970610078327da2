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

/// Openings of all spellings together, see [`ControlSpellings`]: far more than any model has.
const MAX_OPENINGS: usize = 1 << 20;

/// Words in order, for finding those with which a text begins: of as many words as there may be,
/// in steps of the text's own bytes.
#[derive(Debug, Clone, Default)]
struct Words(Vec<(Box<str>, u32)>);

impl Words {
    fn new(mut words: Vec<(Box<str>, u32)>) -> Self {
        words.sort_unstable();
        words.dedup_by(|one, other| one.0 == other.0);
        Self(words)
    }

    /// The length and id of the longest word with which `text` begins, and whether `text` as a
    /// whole begins a word.
    fn longest_in(&self, text: &[u8]) -> (Option<(usize, u32)>, bool) {
        let (mut left, mut longest) = (self.0.as_slice(), None);
        for (at, byte) in text.iter().enumerate() {
            // All words left begin with what was read; the one that ends here is the first.
            let next = |word: &(Box<str>, u32)| word.0.as_bytes().get(at).copied();
            let start = left.partition_point(|word| next(word) < Some(*byte));
            let end = left.partition_point(|word| next(word) <= Some(*byte));
            left = &left[start..end];
            match left.first() {
                Some((word, id)) if word.len() == at + 1 => longest = Some((at + 1, *id)),
                Some(_) => {}
                None => return (longest, false),
            }
        }
        (longest, !left.is_empty())
    }
}

/// The spellings of a tokenizer's control tokens, ready for searching and marking.
#[derive(Debug, Clone, Default)]
pub(crate) struct ControlSpellings {
    words: Words,
    /// With which some spelling begins, in order.
    first_chars: Vec<char>,
    /// What is left of a spelling after its opening punctuation.
    remainders: Words,
}

impl ControlSpellings {
    pub(crate) fn new<'s>(
        tokens: impl IntoIterator<Item = (&'s str, u32)>,
    ) -> Result<Self, String> {
        let (mut words, mut first_chars, mut remainders) = (Vec::new(), Vec::new(), Vec::new());
        for (spelling, id) in tokens {
            words.push((Box::from(spelling), id));
            first_chars.extend(spelling.chars().next());
            let opening = spelling
                .char_indices()
                .take_while(|(_, c)| !c.is_alphanumeric())
                .map(|(at, c)| at + c.len_utf8());
            let rests = opening.map(|end| &spelling[end..]).filter(|rest| !rest.is_empty());
            remainders.extend(rests.map(|rest| (Box::from(rest), 0)));
            if remainders.len() > MAX_OPENINGS {
                return Err("its added tokens begin with too much punctuation".into());
            }
        }
        first_chars.sort_unstable();
        first_chars.dedup();
        Ok(Self { words: Words::new(words), first_chars, remainders: Words::new(remainders) })
    }

    /// Splits rendered text at its unmarked control tokens.
    pub(crate) fn split<'t>(&self, rendered: &'t str) -> Vec<Piece<'t>> {
        let bytes = rendered.as_bytes();
        let (mut pieces, mut start, mut at) = (Vec::new(), 0, 0);
        while at < bytes.len() {
            match self.words.longest_in(&bytes[at..]).0 {
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
            if self.first_chars.binary_search(&c).is_ok() && !spared {
                marked.push(MARK);
            }
        }
        marked
    }

    /// Whether `text` behind a template's own `<` (or the like) would make a control token,
    /// alone or with what the template appends.
    fn continues_a_token(&self, text: &str) -> bool {
        let (word, begins) = self.remainders.longest_in(text.as_bytes());
        !text.is_empty() && (word.is_some() || begins)
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
        .unwrap()
    }

    #[test]
    fn the_longest_spelling_wins() {
        assert_eq!(
            spellings().split("a<tool_call>b<tool"),
            [Piece::Text("a"), Piece::Control(5), Piece::Text("b"), Piece::Control(4)]
        );
    }

    #[test]
    fn words_are_found_as_by_looking_at_each() {
        let words = ["a", "ab", "abcd", "b", "é", "éa", "<", "<|", "<|x|>", "<|y|>"];
        let sorted = Words::new(words.iter().zip(0..).map(|(w, id)| (Box::from(*w), id)).collect());
        for text in ["", "a", "abc", "abcde", "b", "c", "é", "éab", "<|", "<|x", "<|y|>z", "\u{e8}"]
        {
            let longest = words
                .iter()
                .zip(0..)
                .filter(|(w, _)| text.starts_with(**w))
                .map(|(w, id)| (w.len(), id))
                .max();
            let begins = words.iter().any(|w| w.starts_with(text));
            assert_eq!(sorted.longest_in(text.as_bytes()), (longest, begins), "{text}");
        }
    }

    #[test]
    fn many_spellings_cost_no_more_than_few() {
        let spellings: Vec<String> = (0..100_000).map(|n| format!("<|reserved_{n}|>")).collect();
        let many = ControlSpellings::new(spellings.iter().map(String::as_str).zip(0..)).unwrap();
        let text = "<|reserved_99999|> < <| <|reserved_ ".repeat(1000);
        assert_eq!(many.split(&text).len(), 2000);
        assert_eq!(many.split(&many.mark(&text)).len(), 1);
        let punctuation = "<".repeat(256);
        let more: Vec<String> = (0..5000).map(|n| format!("{punctuation}{n}")).collect();
        assert!(ControlSpellings::new(more.iter().map(String::as_str).zip(0..)).is_err());
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
