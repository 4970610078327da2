//! Following text along a fixed structure, a character at a time.

/// A part of a structure.
#[derive(Debug)]
pub(crate) enum Element {
    /// These characters.
    Text(&'static str),
    /// Any amount of white space.
    Blank,
    /// One or more characters other than angle brackets and line ends, up to a `>`.
    Name,
}

/// What a character meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// The structure may still be completed.
    More,
    /// It is complete.
    Done,
    /// This is not the structure.
    Failed,
}

/// Where in a structure the text is.
#[derive(Debug, Clone)]
pub(crate) struct Follower {
    structure: &'static [Element],
    element: usize,
    /// Characters taken of the element.
    taken: usize,
}

/// White space that may be layout.
pub(crate) fn is_blank(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\r' | '\n')
}

impl Follower {
    pub fn new(structure: &'static [Element]) -> Self {
        Self { structure, element: 0, taken: 0 }
    }

    /// Takes a character. After `Done` or `Failed` there is nothing more to ask.
    pub fn step(&mut self, c: char) -> Step {
        loop {
            match self.structure.get(self.element) {
                None => return Step::Failed,
                Some(Element::Text(text)) => {
                    if text.as_bytes().get(self.taken).map(|byte| char::from(*byte)) != Some(c) {
                        return Step::Failed;
                    }
                    self.taken += 1;
                    if self.taken == text.len() {
                        (self.element, self.taken) = (self.element + 1, 0);
                    }
                    let done = self.element == self.structure.len();
                    return if done { Step::Done } else { Step::More };
                }
                Some(Element::Blank) if is_blank(c) => return Step::More,
                Some(Element::Blank) => self.element += 1,
                Some(Element::Name) => match c {
                    '>' if self.taken > 0 => (self.element, self.taken) = (self.element + 1, 0),
                    '<' | '>' | '\n' => return Step::Failed,
                    _ => {
                        self.taken += 1;
                        return Step::More;
                    }
                },
            }
        }
    }

    /// Whether at least a character beyond the first `elements` elements was taken.
    pub fn is_beyond(&self, elements: usize) -> bool {
        self.element > elements || (self.element == elements && self.taken > 0)
    }

    /// Whether the first `elements` elements are complete.
    pub fn has(&self, elements: usize) -> bool {
        self.element >= elements
    }
}
