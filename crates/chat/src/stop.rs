//! Stop strings, found in text that arrives in pieces.

/// What [`StopMatcher::push`] and [`StopMatcher::finish`] give back.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StopOutput {
    /// Text that is certain to belong to the answer.
    pub text: String,
    /// Index (in the list given to [`StopMatcher::new`]) of the stop string that ended the answer.
    pub stopped_by: Option<usize>,
}

/// Finds stop strings in a stream of text, across the pieces in which it comes.
///
/// The rule, whatever the pieces: the answer ends where the earliest occurrence of any stop string
/// begins; of several that begin there, the shortest is named, being complete first. The stop string
/// and all after it are not part of the text. Text is held back only as long as a stop string may
/// still begin in it.
///
/// An occurrence can only be named once no earlier one can still be completed, so after
/// `["abcd", "bc"]` and the text `abc`, everything waits; `x` makes it a stop at `bc`.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
    stopped_by: Option<usize>,
}

impl StopMatcher {
    /// A matcher for these stop strings. Empty ones are ignored: they would end every answer.
    pub fn new<S: Into<String>>(stops: impl IntoIterator<Item = S>) -> Self {
        let stops = stops.into_iter().map(Into::into).collect();
        Self { stops, held: String::new(), stopped_by: None }
    }

    /// Takes the next piece of text. After a stop, further pieces give nothing.
    pub fn push(&mut self, piece: &str) -> StopOutput {
        if self.stopped_by.is_some() {
            return StopOutput { text: String::new(), stopped_by: self.stopped_by };
        }
        self.held.push_str(piece);
        self.take(false)
    }

    /// Ends the stream and gives what was held back. The matcher can then be used for another.
    pub fn finish(&mut self) -> StopOutput {
        let output = match self.stopped_by {
            Some(_) => StopOutput { text: String::new(), stopped_by: self.stopped_by },
            None => self.take(true),
        };
        self.held.clear();
        self.stopped_by = None;
        output
    }

    /// The text held back at present.
    pub fn held(&self) -> &str {
        &self.held
    }

    fn take(&mut self, at_end: bool) -> StopOutput {
        let bytes = self.held.as_bytes();
        // Every stop string is whole characters, so a match begins and ends between characters.
        for (at, _) in self.held.char_indices() {
            let rest = &bytes[at..];
            let stops = self.stops.iter().enumerate().filter(|(_, stop)| !stop.is_empty());
            let complete = stops
                .clone()
                .filter(|(_, stop)| rest.starts_with(stop.as_bytes()))
                .min_by_key(|(_, stop)| stop.len());
            if let Some((index, _)) = complete {
                self.stopped_by = Some(index);
                self.held.truncate(at);
                let text = std::mem::take(&mut self.held);
                return StopOutput { text, stopped_by: self.stopped_by };
            }
            if !at_end && stops.clone().any(|(_, stop)| stop.as_bytes().starts_with(rest)) {
                let text = self.held.drain(..at).collect();
                return StopOutput { text, stopped_by: None };
            }
        }
        StopOutput { text: std::mem::take(&mut self.held), stopped_by: None }
    }
}
