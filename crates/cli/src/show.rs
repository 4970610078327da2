//! Showing an answer while it arrives.

use std::io::{self, IsTerminal};
use std::sync::Arc;

use lily_chat::{Detokenizer, Tokenizer};

use crate::answer::{Part, Splitter};
use crate::output::{Stdout, note_text, note_text_dimmed, styles_wanted};

/// How tokens become text.
enum Reader {
    /// An answer to a rendered chat: thinking and answer apart.
    Chat(Splitter),
    /// Everything as it comes.
    Raw(Detokenizer),
    /// No tokenizer: ids.
    Ids,
}

/// Where thinking goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Thinking {
    Hidden,
    Stdout,
    Stderr,
}

/// An answer as people or programs see it.
pub struct Show {
    reader: Reader,
    thinking: Thinking,
    /// Whether text goes to stdout as it comes.
    streaming: bool,
    /// Whether thinking is told apart by lines instead of by being dimmed.
    headed: bool,
    last: Option<Part>,
    thought: String,
    text: String,
}

impl Show {
    fn new(reader: Reader) -> Self {
        Self {
            reader,
            thinking: Thinking::Hidden,
            streaming: false,
            headed: false,
            last: None,
            thought: String::new(),
            text: String::new(),
        }
    }

    /// The answer to a rendered prompt.
    pub fn chat(tokenizer: &Arc<Tokenizer>, prompt: &[u32]) -> Self {
        Self::new(Reader::Chat(Splitter::new(tokenizer, prompt)))
    }

    /// The continuation of token ids.
    pub fn raw(tokenizer: Option<&Arc<Tokenizer>>) -> Self {
        Self::new(match tokenizer {
            Some(tokenizer) => Reader::Raw(Detokenizer::new(Arc::clone(tokenizer), true)),
            None => Reader::Ids,
        })
    }

    /// Decides what is shown where.
    pub fn begin(&mut self, out: &Stdout, json: bool, quiet: bool) {
        self.streaming = !json;
        self.headed = !styles_wanted();
        self.thinking = match (json, out.terminal) {
            (true, _) => Thinking::Hidden,
            (false, true) => Thinking::Stdout,
            (false, false) if !quiet && io::stderr().is_terminal() => Thinking::Stderr,
            (false, false) => Thinking::Hidden,
        };
    }

    /// Takes the next token. One that ends the answer belongs to it but is not shown as an id.
    pub fn token(&mut self, out: &mut Stdout, id: u32, stops: bool) -> io::Result<()> {
        let piece = match &mut self.reader {
            Reader::Chat(splitter) => splitter.push(id),
            Reader::Raw(detokenizer) => detokenizer.push(id).map(|text| (Part::Answer, text)),
            Reader::Ids if stops => None,
            Reader::Ids => Some((Part::Answer, format!("{id} "))),
        };
        piece.map_or(Ok(()), |(part, text)| self.piece(out, part, &text))
    }

    /// Ends the answer.
    pub fn end(&mut self, out: &mut Stdout) -> io::Result<()> {
        let piece = match &mut self.reader {
            Reader::Chat(splitter) => splitter.finish(),
            Reader::Raw(detokenizer) => detokenizer.finish().map(|text| (Part::Answer, text)),
            Reader::Ids => None,
        };
        if let Some((part, text)) = piece {
            self.piece(out, part, &text)?;
        }
        let ends_line = |text: &str| text.is_empty() || text.ends_with('\n');
        match self.last {
            Some(Part::Thinking) if self.thinking == Thinking::Stderr => note_text("\n"),
            Some(Part::Thinking) if self.thinking == Thinking::Stdout => out.text("\n")?,
            _ if self.streaming && !ends_line(&self.text) => out.text("\n")?,
            _ => {}
        }
        out.flush()
    }

    /// The answer; `None` without a tokenizer.
    pub fn text(&self) -> Option<&str> {
        match self.reader {
            Reader::Ids => None,
            _ => Some(&self.text),
        }
    }

    /// What was thought before it; `None` where the two are not told apart.
    pub fn thinking(&self) -> Option<&str> {
        match self.reader {
            Reader::Chat(_) => Some(&self.thought),
            _ => None,
        }
    }

    /// Whether the model is still thinking.
    pub fn is_thinking(&self) -> bool {
        matches!(&self.reader, Reader::Chat(splitter) if splitter.part() == Part::Thinking)
    }

    fn piece(&mut self, out: &mut Stdout, part: Part, text: &str) -> io::Result<()> {
        let changed = self.last != Some(part);
        match part {
            Part::Thinking => {
                self.thought.push_str(text);
                if changed {
                    self.thinking_text(out, self.heading("thinking"))?;
                }
                self.thinking_text(out, text)?;
            }
            Part::Answer => {
                self.text.push_str(text);
                if self.last == Some(Part::Thinking) {
                    // On stderr nothing follows but the figures.
                    let gap = match self.thinking {
                        Thinking::Stderr => "\n".to_owned(),
                        _ => format!("\n\n{}", self.heading("answer")),
                    };
                    self.thinking_text(out, &gap)?;
                }
                if self.streaming {
                    out.text(text)?;
                    out.flush()?;
                }
            }
        }
        self.last = Some(part);
        Ok(())
    }

    fn heading(&self, part: &str) -> &'static str {
        match (self.headed, part) {
            (false, _) => "",
            (true, "thinking") => "[thinking]\n",
            (true, _) => "[answer]\n",
        }
    }

    fn thinking_text(&self, out: &mut Stdout, text: &str) -> io::Result<()> {
        match self.thinking {
            Thinking::Hidden => Ok(()),
            _ if text.is_empty() => Ok(()),
            Thinking::Stdout => {
                out.dimmed(text)?;
                out.flush()
            }
            Thinking::Stderr => {
                match self.headed {
                    true => note_text(text),
                    false => note_text_dimmed(text),
                }
                Ok(())
            }
        }
    }
}
