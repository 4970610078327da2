//! Lines to messages.

const FENCE: &str = "\"\"\"";

/// Puts the lines of a message together: `\` at the end of a line continues it, `"""` begins and ends a block.
#[derive(Debug, Default)]
pub struct Lines {
    text: String,
    /// Whether lines have been taken and more are needed.
    open: bool,
    block: bool,
}

/// A whole entry.
#[derive(Debug, PartialEq, Eq)]
pub struct Whole {
    pub text: String,
    /// Whether it was one plain line, which may be a command.
    pub plain: bool,
}

impl Lines {
    /// Whether an entry has begun.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Takes a line. `None` if the entry goes on.
    pub fn push(&mut self, line: &str) -> Option<Whole> {
        if self.block {
            return match line.trim_end().strip_suffix(FENCE) {
                Some(last) => self.end(last),
                None => self.more(line),
            };
        }
        if let Some(first) = line.trim_start().strip_prefix(FENCE).filter(|_| !self.open) {
            self.block = true;
            return match first.trim_end().strip_suffix(FENCE) {
                Some(only) => self.end(only),
                // A fence alone on its line is no line of the message.
                None if first.trim().is_empty() => {
                    self.open = true;
                    None
                }
                None => self.more(first),
            };
        }
        let slashes = line.len() - line.trim_end_matches('\\').len();
        if slashes % 2 == 1 {
            return self.more(&line[..line.len() - 1]);
        }
        let plain = !self.open;
        self.text.push_str(line);
        self.take(plain)
    }

    /// What has been taken of an entry that never ended.
    pub fn rest(&mut self) -> Option<Whole> {
        self.open.then(|| self.take(false)).flatten()
    }

    /// Forgets the entry that has begun.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    fn more(&mut self, line: &str) -> Option<Whole> {
        self.open = true;
        self.text.push_str(line);
        self.text.push('\n');
        None
    }

    fn end(&mut self, last: &str) -> Option<Whole> {
        self.text.push_str(last);
        self.take(false)
    }

    fn take(&mut self, plain: bool) -> Option<Whole> {
        let mut text = std::mem::take(self).text;
        if text.ends_with('\n') {
            text.pop();
        }
        Some(Whole { text, plain })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The entries of a text.
    fn entries(text: &str) -> Vec<(String, bool)> {
        let mut lines = Lines::default();
        let mut all: Vec<Whole> = text.lines().filter_map(|line| lines.push(line)).collect();
        all.extend(lines.rest());
        all.into_iter().map(|w| (w.text, w.plain)).collect()
    }

    #[test]
    fn messages_of_several_lines() {
        for (text, want) in [
            ("a\nb", vec![("a", true), ("b", true)]),
            ("", vec![]),
            ("a\\\nb\\\nc\nd", vec![("a\nb\nc", false), ("d", true)]),
            ("a\\\\\nb", vec![("a\\\\", true), ("b", true)]),
            ("\"\"\"\na\n  b\\\n\n/c\n\"\"\"\nd", vec![("a\n  b\\\n\n/c", false), ("d", true)]),
            ("\"\"\"a\nb\"\"\"", vec![("a\nb", false)]),
            ("\"\"\"a\"\"\"\nb", vec![("a", false), ("b", true)]),
            ("\"\"\"\"\"\"", vec![("", false)]),
            ("\"\"\"\nnever ended", vec![("never ended", false)]),
            ("never ended\\", vec![("never ended", false)]),
            ("say \"\"\" twice", vec![("say \"\"\" twice", true)]),
            ("a\\\n\"\"\"b", vec![("a\n\"\"\"b", false)]),
        ] {
            let want: Vec<_> = want.into_iter().map(|(t, p)| (t.to_owned(), p)).collect();
            assert_eq!(entries(text), want, "{text:?}");
        }
    }
}
