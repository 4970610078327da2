//! `a ~ b` as a call. minijinja's operator writes a list that doubles at each step without an end;
//! Lily's function stops at the limit for one value, and writes floats and lists as Python does.

use minijinja::value::Rest;
use minijinja::{Error, Value};

use crate::limits::{MAX_VALUE, long};
use crate::pyvalue::write_str;

/// Name of the function in rewritten templates.
pub(crate) const CONCAT: &str = "__lily_concat";

/// Joins texts as `~` does.
pub(crate) fn concat(values: Rest<Value>) -> Result<String, Error> {
    let mut text = String::new();
    for value in &*values {
        write_str(&mut text, value)?;
        if text.len() > MAX_VALUE {
            return Err(long());
        }
    }
    Ok(text)
}

/// Words that end an operand, unless they name a test or an attribute.
const KEYWORDS: [&str; 12] = [
    "and",
    "or",
    "not",
    "in",
    "if",
    "else",
    "recursive",
    "as",
    "import",
    "with",
    "without",
    "ignore",
];

/// What came last within a tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Last {
    /// Nothing, or an operator, after which `-` is a sign and a word an operand.
    Operator,
    /// A name, a literal or a closed bracket.
    Operand,
    /// `.` or `|`: a name follows, whatever its spelling.
    Selector,
    /// `is` or `is not`: the name of a test follows.
    Is,
}

/// One bracket: operands joined so far.
#[derive(Debug, Default)]
struct Level {
    /// Where the first operand of the chain begins.
    start: Option<usize>,
    tildes: Vec<usize>,
}

impl Level {
    /// Ends the chain before `end`.
    fn flush(&mut self, body: &str, end: usize, edits: &mut Vec<(usize, usize, String)>) {
        let tildes = std::mem::take(&mut self.tildes);
        if let (Some(start), false) = (self.start.take(), tildes.is_empty()) {
            let end = start + body[start..end].trim_end().len();
            edits.push((start, start, format!("{CONCAT}(")));
            edits.extend(tildes.into_iter().map(|at| (at, at + 1, ",".to_owned())));
            edits.push((end, end, ")".to_owned()));
        }
    }
}

/// The edits that make calls of all `~` in the body of a tag, as ranges of the body.
///
/// `~` binds closer than `+` and comparisons, and less than `*`, filters and tests, so an operand
/// reaches to the next of those or of `and`, `if`, a comma and their like at its own level.
pub(crate) fn edits(body: &str, block: bool) -> Vec<(usize, usize, String)> {
    let (mut edits, mut levels) = (Vec::new(), vec![Level::default()]);
    if !body.contains('~') {
        return edits;
    }
    let bytes = body.as_bytes();
    let (mut at, mut last, mut first) = (0, Last::Operator, block);
    while at < bytes.len() {
        let Some(level) = levels.last_mut() else { return Vec::new() };
        let (start, byte) = (at, bytes[at]);
        at += 1;
        match byte {
            byte if byte.is_ascii_whitespace() => {}
            b'"' | b'\'' => {
                while at < bytes.len() && bytes[at] != byte {
                    at += 1 + usize::from(bytes[at] == b'\\');
                }
                at = (at + 1).min(bytes.len());
                level.start.get_or_insert(start);
                last = Last::Operand;
            }
            b'(' | b'[' | b'{' => {
                level.start.get_or_insert(start);
                levels.push(Level::default());
                last = Last::Operator;
            }
            b')' | b']' | b'}' => {
                level.flush(body, start, &mut edits);
                levels.pop();
                last = Last::Operand;
            }
            b'~' => {
                level.tildes.push(start);
                last = Last::Operator;
            }
            b'.' | b'|' => last = Last::Selector,
            b'+' | b'-' if last == Last::Operand => {
                level.flush(body, start, &mut edits);
                last = Last::Operator;
            }
            b'+' | b'-' => {
                level.start.get_or_insert(start);
            }
            b'*' | b'/' | b'%' => last = Last::Operator,
            byte if byte.is_ascii_alphanumeric() || byte == b'_' || !byte.is_ascii() => {
                at = word_end(body, start);
                let word = &body[start..at];
                last = match (word, last) {
                    _ if std::mem::take(&mut first) => Last::Operator,
                    ("is", Last::Operand) => Last::Is,
                    ("not", Last::Is) => Last::Is,
                    (word, Last::Operator | Last::Operand) if KEYWORDS.contains(&word) => {
                        level.flush(body, start, &mut edits);
                        Last::Operator
                    }
                    _ => {
                        level.start.get_or_insert(start);
                        Last::Operand
                    }
                };
            }
            // Commas, colons, `=` and comparisons.
            _ => {
                level.flush(body, start, &mut edits);
                last = Last::Operator;
            }
        }
    }
    if let Some(level) = levels.last_mut() {
        level.flush(body, body.len(), &mut edits);
    }
    edits
}

/// The end of a name or number; `1e-5` is one.
fn word_end(body: &str, start: usize) -> usize {
    let rest = &body[start..];
    let len = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
    let word = &rest[..len.max(rest.chars().next().map_or(1, char::len_utf8))];
    let signed = word.starts_with(|c: char| c.is_ascii_digit())
        && word.ends_with(['e', 'E'])
        && rest[word.len()..].starts_with(['+', '-']);
    let more = match signed {
        true => {
            let digits = &rest[word.len() + 1..];
            1 + digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len())
        }
        false => 0,
    };
    start + word.len() + more
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(body: &str, block: bool) -> String {
        let mut edits = edits(body, block);
        edits.sort_by_key(|(start, end, _)| (*start, *end));
        let (mut out, mut done) = (String::new(), 0);
        for (start, end, text) in edits {
            out += &body[done..start];
            out += &text;
            done = end;
        }
        (out + &body[done..]).replace(CONCAT, "C")
    }

    #[test]
    fn chains_become_calls() {
        for (body, expected) in [
            ("a", "a"),
            ("a ~ b", "C(a , b)"),
            ("a~b ~c", "C(a,b ,c)"),
            ("a + b ~ c - d", "a + C(b , c) - d"),
            ("-a ~ -b * 2 ~ 1e-5 ~ x", "C(-a , -b * 2 , 1e-5 , x)"),
            ("a ~ b == c ~ d", "C(a , b) == C(c , d)"),
            ("a ~ b if not c ~ d else e ~ f", "C(a , b) if not C(c , d) else C(e , f)"),
            ("'~' ~ \"a\\\"~\" ~ b", "C('~' , \"a\\\"~\" , b)"),
            ("f(a ~ b, k=c ~ d) ~ e", "C(f(C(a , b), k=C(c , d)) , e)"),
            ("{'a' ~ b: c ~ d}", "{C('a' , b): C(c , d)}"),
            ("a is not in b ~ c | in(1) ~ d.if", "C(a is not in b , c | in(1) , d.if)"),
            ("a not in b ~ c and d ~ e", "a not in C(b , c) and C(d , e)"),
            ("[a ~ b][0] ~ (c ~ d) | e", "C([C(a , b)][0] , (C(c , d)) | e)"),
            ("a ~ (b", "a ~ (b"),
            ("a ~ b)", "C(a , b))"),
        ] {
            assert_eq!(rewritten(body, false), expected);
        }
        for (body, expected) in [
            ("set x = a ~ b", "set x = C(a , b)"),
            ("if a ~ b", "if C(a , b)"),
            ("for x in a ~ b if x ~ 1", "for x in C(a , b) if C(x , 1)"),
            ("set é = é ~ 'ü'", "set é = C(é , 'ü')"),
            ("endif", "endif"),
        ] {
            assert_eq!(rewritten(body, true), expected);
        }
    }
}
