//! From tokens to the parts of an answer: text, limits, stops, calls, log-probabilities.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use lily_chat::{AnswerParser, CallPart, Detokenizer, End, Part, StopMatcher, Tokenizer, Tools};
use lily_scheduler::{Finish, Logprob, Token};

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The turn ended, or a stop sequence came.
    Stop,
    /// It was cut.
    Length,
    /// The turn ended with calls.
    ToolCalls,
}

impl FinishReason {
    /// As OpenAI spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}

/// A token of the answer's text, with its log-probabilities.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenInfo {
    pub id: u32,
    pub logprob: Logprob,
    /// Where its text begins in the answer's raw text.
    pub at: usize,
}

/// The next piece of an answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Delta {
    Reasoning(String),
    Content {
        text: String,
        tokens: Vec<TokenInfo>,
    },
    CallBegin {
        index: usize,
        name: String,
    },
    CallArguments {
        index: usize,
        text: String,
    },
    /// The call is complete.
    CallEnd,
}

/// How an answer is read.
#[derive(Debug, Clone)]
pub enum Reading {
    /// As that to a chat.
    Chat { thinking: bool, tools: Option<Arc<Tools>>, one_call: bool },
    /// All is text.
    Raw,
}

/// An answer under way.
#[derive(Debug)]
pub struct Answer {
    detokenizer: Detokenizer,
    /// `None`: all is text.
    parser: Option<AnswerParser>,
    stops: StopMatcher,
    stop_ids: Arc<[u32]>,
    one_call: bool,
    /// Bytes of raw text.
    raw: usize,
    /// Raw places of the text that the stop matcher holds.
    held: VecDeque<Range<usize>>,
    /// Tokens whose text was not given out yet.
    pending: VecDeque<(Range<usize>, TokenInfo)>,
    calls: usize,
    complete: usize,
    ended: Option<FinishReason>,
    /// Tokens, and those of the thoughts.
    pub generated: usize,
    pub reasoning: usize,
    /// Tokens before the first one that was sampled.
    pub led: usize,
    /// When the first token that was sampled and the last one came.
    pub first: Option<Instant>,
    pub last: Option<Instant>,
}

impl Answer {
    pub fn new(
        tokenizer: &Arc<Tokenizer>,
        reading: &Reading,
        stops: &[String],
        stop_ids: Arc<[u32]>,
    ) -> Self {
        let (parser, one_call) = match reading {
            Reading::Raw => (None, false),
            Reading::Chat { thinking, tools, one_call } => {
                (Some(AnswerParser::new(*thinking, tools.clone())), *one_call)
            }
        };
        Self {
            detokenizer: Detokenizer::new(Arc::clone(tokenizer), parser.is_some()),
            parser,
            stops: StopMatcher::new(stops.iter().cloned()),
            stop_ids,
            one_call,
            raw: 0,
            held: VecDeque::new(),
            pending: VecDeque::new(),
            calls: 0,
            complete: 0,
            ended: None,
            generated: 0,
            reasoning: 0,
            led: 0,
            first: None,
            last: None,
        }
    }

    /// Why it ended; `None` while it goes on. It may end before its tokens do: at a stop sequence, or behind
    /// the one call that was asked for.
    pub fn ended(&self) -> Option<FinishReason> {
        self.ended
    }

    /// Takes the next token.
    pub fn token(&mut self, token: Token) -> Vec<Delta> {
        if self.ended.is_some() {
            return Vec::new();
        }
        self.generated += 1;
        match token.sampled {
            true => _ = self.first.get_or_insert(token.at),
            false => self.led += usize::from(self.first.is_none()),
        }
        self.last = Some(token.at);
        if self.parser.as_ref().is_some_and(AnswerParser::is_thinking) {
            self.reasoning += 1;
        }
        if self.stop_ids.contains(&token.id) {
            return Vec::new();
        }
        let text = self.detokenizer.push(token.id).unwrap_or_default();
        if let Some(logprob) = token.logprob {
            let at = self.raw;
            // Part of a character counts where the character will be.
            let place = at..(at + text.len()).max(at + 1);
            self.pending.push_back((place, TokenInfo { id: token.id, logprob, at }));
        }
        self.text(&text)
    }

    /// The tokens ended.
    pub fn finish(&mut self, finish: Finish) -> Vec<Delta> {
        let mut deltas = Vec::new();
        if self.ended.is_some() {
            return deltas;
        }
        let turn = finish == Finish::Stop;
        if let Some(text) = self.detokenizer.finish().filter(|_| turn) {
            deltas = self.text(&text);
        }
        let end = if turn { End::Turn } else { End::Cut };
        let (parts, cut) = match &mut self.parser {
            Some(parser) => parser.finish(end),
            None => (Vec::new(), false),
        };
        self.parts(parts, &mut deltas);
        self.flush_stops(&mut deltas);
        self.ended.get_or_insert(match turn && !cut {
            false => FinishReason::Length,
            true if self.complete > 0 => FinishReason::ToolCalls,
            true => FinishReason::Stop,
        });
        deltas
    }

    fn text(&mut self, text: &str) -> Vec<Delta> {
        let at = self.raw;
        self.raw += text.len();
        let mut deltas = Vec::new();
        let parts = match &mut self.parser {
            Some(parser) => parser.push(text),
            None if text.is_empty() => Vec::new(),
            None => vec![Part::Content { text: text.to_owned(), at }],
        };
        self.parts(parts, &mut deltas);
        deltas
    }

    fn parts(&mut self, parts: Vec<Part>, deltas: &mut Vec<Delta>) {
        for part in parts {
            if self.ended.is_some() {
                return;
            }
            match part {
                Part::Reasoning(text) => deltas.push(Delta::Reasoning(text)),
                Part::Content { text, at } => {
                    self.held.push_back(at..at + text.len());
                    let output = self.stops.push(&text);
                    self.release(output.text, deltas);
                    if output.stopped_by.is_some() {
                        self.stop();
                    }
                }
                Part::Call(CallPart::Begin { name }) => {
                    self.flush_stops(deltas);
                    if self.ended.is_none() {
                        deltas.push(Delta::CallBegin { index: self.calls, name });
                        self.calls += 1;
                    }
                }
                Part::Call(CallPart::Arguments(text)) => {
                    deltas.push(Delta::CallArguments { index: self.calls.saturating_sub(1), text });
                }
                Part::Call(CallPart::End) => {
                    deltas.push(Delta::CallEnd);
                    self.complete += 1;
                    if self.one_call {
                        self.ended = Some(FinishReason::ToolCalls);
                    }
                }
            }
        }
    }

    /// No stop sequence reaches beyond this place.
    fn flush_stops(&mut self, deltas: &mut Vec<Delta>) {
        if self.ended.is_some() {
            return;
        }
        let output = self.stops.finish();
        self.release(output.text, deltas);
        if output.stopped_by.is_some() {
            self.stop();
        }
        self.held.clear();
    }

    fn stop(&mut self) {
        let calls = self.complete > 0;
        self.ended = Some(if calls { FinishReason::ToolCalls } else { FinishReason::Stop });
    }

    /// Gives out text that is certain, with the tokens that it came from.
    fn release(&mut self, text: String, deltas: &mut Vec<Delta>) {
        let mut tokens = Vec::new();
        let mut left = text.len();
        while let Some(place) = self.held.front_mut().filter(|_| left > 0) {
            let taken = left.min(place.len());
            let given = place.start..place.start + taken;
            left -= taken;
            place.start += taken;
            if place.start >= place.end {
                self.held.pop_front();
            }
            while let Some((place, _)) = self.pending.front() {
                if place.start >= given.end {
                    break;
                }
                let inside = place.end > given.start;
                tokens.extend(self.pending.pop_front().filter(|_| inside).map(|(_, info)| info));
            }
        }
        if !text.is_empty() {
            deltas.push(Delta::Content { text, tokens });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use proptest::prelude::*;

    use super::*;

    static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
        let file = |name: &str| {
            let (_, bytes) = lily_demo::FILES.iter().find(|(file, _)| *file == name).unwrap();
            std::str::from_utf8(bytes).unwrap()
        };
        let config = file("tokenizer_config.json");
        Arc::new(Tokenizer::from_json(file("tokenizer.json"), Some(config)).unwrap())
    });

    fn chat(thinking: bool) -> Reading {
        Reading::Chat { thinking, tools: None, one_call: false }
    }

    /// Text and tokens of an answer, and why it ended.
    fn read(reading: &Reading, stops: &[&str], text: &str) -> (String, Vec<u32>, FinishReason) {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let end = TOKENIZER.eos_id().unwrap();
        let mut answer = Answer::new(&TOKENIZER, reading, &stops, [end].into());
        let mut deltas = Vec::new();
        for id in TOKENIZER.encode_rendered(text).unwrap().into_iter().chain([end]) {
            let logprob = Some(Logprob::default());
            deltas.extend(answer.token(Token { id, logprob, at: Instant::now(), sampled: true }));
        }
        deltas.extend(answer.finish(Finish::Stop));
        let (mut content, mut ids) = (String::new(), Vec::new());
        for delta in deltas {
            if let Delta::Content { text, tokens } = delta {
                content += &text;
                ids.extend(tokens.into_iter().map(|token| token.id));
            }
        }
        (content, ids, answer.ended().unwrap())
    }

    fn spelled(ids: &[u32]) -> String {
        TOKENIZER.decode(ids, false)
    }

    #[test]
    fn tokens_of_thoughts_and_layout_have_no_place_in_the_text() {
        let (content, ids, _) = read(&chat(true), &[], "a b\n</think>\n\nc d 🙂");
        assert_eq!(content, "c d 🙂");
        assert_eq!(spelled(&ids), content);
    }

    #[test]
    fn tokens_behind_a_stop_are_not_told() {
        let (content, ids, ended) = read(&chat(false), &["gamma"], "alpha beta gamma delta");
        assert_eq!((content.as_str(), ended), ("alpha beta ", FinishReason::Stop));
        // The last token may reach into the stop.
        let told = spelled(&ids);
        assert!(told.starts_with(&content) && !told.contains("gamma"), "{told:?}");
    }

    #[test]
    fn stops_hold_in_the_answer_only() {
        let (content, ..) = read(&chat(true), &["x"], "x y</think>y x");
        assert_eq!(content, "y ");
        let (content, ..) = read(&Reading::Raw, &["x"], "y</think>x");
        assert_eq!(content, "y</think>");
    }

    proptest! {
        #[test]
        fn tokens_spell_the_text(text in "[a-c \\né🙂<>/]{0,40}") {
            for reading in [chat(false), Reading::Raw] {
                let (content, ids, _) = read(&reading, &[], &text);
                prop_assert_eq!(&content, &text);
                prop_assert_eq!(spelled(&ids), content);
            }
        }

        #[test]
        fn text_ends_before_the_first_stop(text in "[abc ]{0,30}", stops in prop::collection::vec("[abc ]{1,3}", 1..4)) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let (content, ids, _) = read(&chat(false), &stops, &text);
            let end = stops.iter().filter_map(|stop| text.find(stop)).min().unwrap_or(text.len());
            prop_assert_eq!(&content, &text[..end]);
            // The last token may reach into the stop.
            prop_assert!(spelled(&ids).starts_with(&content));
        }
    }
}
