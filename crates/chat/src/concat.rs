//! `~` and `+` within limits. minijinja's `~` writes a list of any size as text, and its `+` copies
//! a list that doubled many times.
//!
//! So `a ~ b` becomes a call, which stops at the limit for one value and writes floats and lists as
//! Python does; the operands of `+` go through a call that refuses lists beyond reason.

use minijinja::value::{Rest, ValueKind};
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

/// Name of the function around operands of `+`.
pub(crate) const ADDEND: &str = "__lily_addend";
/// Items of a list that can be added to another one.
const MAX_ADDEND: usize = 1 << 18;

/// An operand of `+`.
pub(crate) fn addend(value: Value) -> Result<Value, Error> {
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
        return Ok(value);
    }
    match value.len() {
        Some(len) if len > MAX_ADDEND => Err(long()),
        // Sums of empty lists keep what they are sums of, so these could double unseen.
        Some(0) if !value.is_tuple() => Ok(Value::from(Vec::<Value>::new())),
        _ => Ok(value),
    }
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

/// One bracket: the operand of `+` that is being read, which `~` may join of several.
#[derive(Debug, Default)]
struct Level {
    /// Where it begins.
    start: Option<usize>,
    tildes: Vec<usize>,
    /// Whether `+` stands before it.
    added: bool,
}

impl Level {
    /// Ends the operand before `end`; `operator` stands there.
    fn flush(&mut self, body: &str, end: usize, operator: u8, edits: &mut Vec<Edit>) {
        let tildes = std::mem::take(&mut self.tildes);
        let added = std::mem::replace(&mut self.added, operator == b'+') || operator == b'+';
        let Some(start) = self.start.take() else { return };
        let text = body[start..end].trim_end();
        let end = start + text.len();
        let added = added && !is_literal(text);
        if tildes.is_empty() && !added {
            return;
        }
        let join = if tildes.is_empty() { String::new() } else { format!("{CONCAT}(") };
        let add = if added { format!("{ADDEND}(") } else { String::new() };
        let closed = ")".repeat(usize::from(!tildes.is_empty()) + usize::from(added));
        edits.push((start, start, add + &join));
        edits.extend(tildes.into_iter().map(|at| (at, at + 1, ",".to_owned())));
        edits.push((end, end, closed));
    }
}

/// Whether an operand is nothing but a text or a number.
fn is_literal(text: &str) -> bool {
    let quoted = |quote: char| {
        text.strip_prefix(quote)
            .and_then(|rest| rest.strip_suffix(quote))
            .is_some_and(|inside| !inside.contains([quote, '\\']))
    };
    quoted('"') || quoted('\'') || text.bytes().all(|byte| byte.is_ascii_digit())
}

/// A range of a tag's body and what takes its place.
type Edit = (usize, usize, String);

/// The edits that make calls of all `~` and `+` in the body of a tag, as ranges of the body.
///
/// `~` binds closer than `+` and comparisons, and less than `*`, filters and tests, so an operand
/// reaches to the next of those or of `and`, `if`, a comma and their like at its own level.
pub(crate) fn edits(body: &str, block: bool) -> Vec<Edit> {
    let (mut edits, mut levels) = (Vec::new(), vec![Level::default()]);
    if !body.contains(['~', '+']) {
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
                level.flush(body, start, byte, &mut edits);
                levels.pop();
                last = Last::Operand;
            }
            b'~' => {
                level.tildes.push(start);
                last = Last::Operator;
            }
            b'.' | b'|' => last = Last::Selector,
            b'+' | b'-' if last == Last::Operand => {
                level.flush(body, start, byte, &mut edits);
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
                        level.flush(body, start, byte, &mut edits);
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
                level.flush(body, start, byte, &mut edits);
                last = Last::Operator;
            }
        }
    }
    if let Some(level) = levels.last_mut() {
        level.flush(body, body.len(), 0, &mut edits);
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
        (out + &body[done..]).replace(CONCAT, "C").replace(ADDEND, "A")
    }

    #[test]
    fn chains_become_calls() {
        for (body, expected) in [
            ("a", "a"),
            ("a ~ b", "C(a , b)"),
            ("a~b ~c", "C(a,b ,c)"),
            ("a + b ~ c - d", "A(a) + A(C(b , c)) - d"),
            ("-a ~ -b * 2 ~ 1e-5 ~ x", "C(-a , -b * 2 , 1e-5 , x)"),
            ("a - b + c - d", "a - A(b) + A(c) - d"),
            ("'a' + 1 + b | c + \"d\" + [e + 2]", "'a' + 1 + A(b | c) + \"d\" + A([A(e) + 2])"),
            ("x == a + b and c", "x == A(a) + A(b) and c"),
            ("f(a + +b, k=-c) + 'a'.b", "A(f(A(a) + A(+b), k=-c)) + A('a'.b)"),
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
