//! Whole numbers that no machine type holds, in tool arguments.
//!
//! Python's JSON keeps them; serde_json would make floats of them. In an argument string they are
//! put in quotes before parsing, with a sign in front that occurs nowhere else in the text, and
//! become [`BigInt`] values for the template.

use std::fmt;
use std::sync::Arc;

use minijinja::value::{Object, ObjectRepr};

/// Digits of a whole number beyond 64 bits. It prints, and turns into JSON, as it came.
#[derive(Debug)]
pub(crate) struct BigInt(pub(crate) String);

impl Object for BigInt {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Numbers with fewer digits fit 64 bits.
const LONG: usize = 19;

/// The text with its big numbers in quotes behind the sign, and the sign. `None` if it has none.
pub(crate) fn quote(text: &str) -> Option<(String, char)> {
    let bytes = text.as_bytes();
    let (mut out, mut done, mut at) = (String::new(), 0, 0);
    let sign = ('\u{F0000}'..='\u{F00FF}').find(|sign| !text.contains(*sign))?;
    while at < bytes.len() {
        match bytes[at] {
            b'"' => {
                at += 1;
                while at < bytes.len() && bytes[at] != b'"' {
                    at += 1 + usize::from(bytes[at] == b'\\');
                }
                at += 1;
            }
            b'-' | b'0'..=b'9' => {
                let start = at;
                at += 1;
                let in_number =
                    |b: u8| b.is_ascii_digit() || matches!(b, b'.' | b'e' | b'E' | b'+' | b'-');
                while at < bytes.len() && in_number(bytes[at]) {
                    at += 1;
                }
                let number = &text[start..at];
                let digits = number.strip_prefix('-').unwrap_or(number);
                let whole = digits.len() >= LONG
                    && digits.bytes().all(|b| b.is_ascii_digit())
                    && !digits.starts_with('0');
                if whole && number.parse::<i64>().is_err() && number.parse::<u64>().is_err() {
                    out.push_str(&text[done..start]);
                    out.extend(['"', sign]);
                    out.push_str(number);
                    out.push('"');
                    done = at;
                }
            }
            _ => at += 1,
        }
    }
    out.push_str(&text[done..]);
    (done > 0).then_some((out, sign))
}
