//! JSON as Python's `json.dumps` writes it: templates were trained on that form.

use std::fmt::Write as _;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

use crate::bigint::BigInt;
use crate::limits::{MAX_DEPTH, MAX_VALUE, deep, long};
use crate::marks::{ESCAPE, MARK};
use crate::pyvalue::str_of;

/// The arguments of `json.dumps` that templates use.
#[derive(Debug, Clone)]
pub(crate) struct Style {
    pub(crate) ensure_ascii: bool,
    /// What one level is indented with; `None` keeps everything on one line.
    pub(crate) indent: Option<String>,
    pub(crate) item_separator: String,
    pub(crate) key_separator: String,
    pub(crate) sort_keys: bool,
}

impl Style {
    /// `json.dumps(value, ensure_ascii=False, indent=indent)`.
    pub(crate) fn with_indent(indent: Option<String>) -> Self {
        Self {
            ensure_ascii: false,
            item_separator: if indent.is_some() { "," } else { ", " }.into(),
            key_separator: ": ".into(),
            indent,
            sort_keys: false,
        }
    }
}

/// `json.dumps(value, …)`.
pub(crate) fn dumps(value: &Value, style: &Style) -> Result<String, Error> {
    let mut out = String::new();
    write_value(&mut out, value, style, 0)?;
    Ok(out)
}

fn not_json(what: &str) -> Error {
    Error::new(ErrorKind::BadSerialization, format!("{what} is not JSON serializable"))
}

fn write_value(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(deep());
    }
    if out.len() > MAX_VALUE {
        return Err(long());
    }
    if let Some(digits) = value.downcast_object_ref::<BigInt>() {
        out.push_str(&digits.0);
        return Ok(());
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => write_number(out, value),
        ValueKind::String => {
            write_string(out, value.as_str().unwrap_or_default(), style.ensure_ascii);
        }
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            let mut count = 0;
            for item in value.try_iter()? {
                next_item(out, count, style, depth + 1);
                count += 1;
                write_value(out, &item, style, depth + 1)?;
            }
            close(out, ']', count, style, depth);
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if style.sort_keys {
                sort(&mut keys)?;
            }
            out.push('{');
            for (count, key) in keys.iter().enumerate() {
                next_item(out, count, style, depth + 1);
                write_string(out, &key_text(key)?, style.ensure_ascii);
                out.push_str(&style.key_separator);
                write_value(out, &value.get_item(key)?, style, depth + 1)?;
            }
            close(out, '}', keys.len(), style, depth);
        }
        ValueKind::Invalid => {
            return Err(Error::new(ErrorKind::InvalidOperation, value.to_string()));
        }
        // Told apart from the error of a variable that is missing elsewhere, as in Python.
        ValueKind::Undefined => return Err(not_json("a missing value")),
        other => return Err(not_json(&format!("a value of type {other}"))),
    }
    Ok(())
}

fn write_number(out: &mut String, value: &Value) {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => write_float(out, float),
        _ => {
            let _ = write!(out, "{value}");
        }
    }
}

/// Keys of the kinds that Python accepts, as text.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => str_of(key),
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.into()),
        ValueKind::Number => {
            let mut text = String::new();
            write_number(&mut text, key);
            Ok(text)
        }
        other => Err(not_json(&format!("a key of type {other}"))),
    }
}

/// Sorts keys as Python does, which compares strings with strings and numbers with numbers only.
fn sort(keys: &mut [Value]) -> Result<(), Error> {
    let all = |kinds: &[ValueKind]| keys.iter().all(|key| kinds.contains(&key.kind()));
    if all(&[ValueKind::String]) || all(&[ValueKind::Number, ValueKind::Bool]) || keys.len() < 2 {
        keys.sort();
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidOperation, "keys of several types cannot be sorted"))
}

fn next_item(out: &mut String, count: usize, style: &Style, depth: usize) {
    if count > 0 {
        out.push_str(&style.item_separator);
    }
    new_line(out, style, depth);
}

fn close(out: &mut String, bracket: char, count: usize, style: &Style, depth: usize) {
    if count > 0 {
        new_line(out, style, depth);
    }
    out.push(bracket);
}

fn new_line(out: &mut String, style: &Style, depth: usize) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        out.extend(std::iter::repeat_n(indent.as_str(), depth));
    }
}

fn write_string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\0'..'\u{20}' => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            // Marks are not content: they go through as they are and vanish later.
            c if ensure_ascii && c > '\u{7e}' && c != MARK && c != ESCAPE => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// Python's `float.__repr__`: the shortest digits; an exponent below 1e-4 and from 1e16 on.
///
/// The digits are serde_json's, which like Python takes the even one of two equally near
/// candidates; the standard library does not.
pub(crate) fn write_float(out: &mut String, float: f64) {
    if !float.is_finite() {
        out.push_str(match (float.is_nan(), float > 0.0) {
            (true, _) => "NaN",
            (false, true) => "Infinity",
            (false, false) => "-Infinity",
        });
        return;
    }
    if float.is_sign_negative() {
        out.push('-');
    }
    let shortest = serde_json::Value::from(float.abs()).to_string();
    let (mantissa, exponent) = shortest.split_once('e').unwrap_or((&shortest, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let all_digits = format!("{whole}{fraction}");
    let significant = all_digits.trim_start_matches('0');
    // The value is 0.DIGITS times ten to the power of `point`.
    let point = exponent.parse::<i32>().unwrap_or(0) + whole.len() as i32
        - (all_digits.len() - significant.len()) as i32;
    let digits = significant.trim_end_matches('0');
    let _ = match (digits.split_at_checked(1), point) {
        (None, _) => write!(out, "0.0"),
        (Some(_), -3..=0) => write!(
            out,
            "0.{:0>width$}",
            digits,
            width = digits.len() + point.unsigned_abs() as usize
        ),
        (Some(_), 1..=16) => {
            let whole = point as usize;
            let padded = format!("{digits:0<width$}", width = whole + 1);
            let (before, after) = padded.split_at(whole);
            write!(out, "{before}.{after}")
        }
        (Some((first, rest)), _) => {
            let dot = if rest.is_empty() { "" } else { "." };
            let sign = if point < 1 { '-' } else { '+' };
            write!(out, "{first}{dot}{rest}e{sign}{:02}", (point - 1).unsigned_abs())
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::value::Serde;
    use serde_json::json;

    fn text(value: serde_json::Value, style: &Style) -> String {
        dumps(&Value::from(Serde(&value)), style).unwrap()
    }

    fn compact(value: serde_json::Value) -> String {
        text(value, &Style::with_indent(None))
    }

    #[test]
    fn equals_python() {
        // Expected texts are the output of json.dumps(..., ensure_ascii=False) in CPython 3.12.
        let value = json!({"b": [1, 2.0, -0.5, true, null], "a": {"ü": "x\u{7f}\"\\\n\u{1}<&>'"}, "e": [], "o": {}});
        assert_eq!(
            compact(value),
            "{\"b\": [1, 2.0, -0.5, true, null], \"a\": {\"ü\": \"x\u{7f}\\\"\\\\\\n\\u0001<&>'\"}, \"e\": [], \"o\": {}}"
        );
        assert_eq!(
            text(json!({"a": [1, {"b": 2}], "e": []}), &Style::with_indent(Some("  ".into()))),
            "{\n  \"a\": [\n    1,\n    {\n      \"b\": 2\n    }\n  ],\n  \"e\": []\n}"
        );
    }

    #[test]
    fn floats_equal_python_repr() {
        for (float, text) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.25e-7, "1.25e-07"),
            (123456.789, "123456.789"),
            (100.0, "100.0"),
            (0.0123, "0.0123"),
            (0.0, "0.0"),
            (9999999999999998.0, "9999999999999998.0"),
            (5e-324, "5e-324"),
            (f64::MAX, "1.7976931348623157e+308"),
            // Two candidates are equally near: Python takes the even one.
            (615_527_700_260_211.0 + 0.25, "615527700260211.2"),
        ] {
            assert_eq!(compact(json!(float)), text);
        }
    }

    #[test]
    fn ascii_and_sorted_on_request() {
        let style = Style { ensure_ascii: true, sort_keys: true, ..Style::with_indent(None) };
        assert_eq!(
            text(json!({"b": "é😀", "a": 1}), &style),
            "{\"a\": 1, \"b\": \"\\u00e9\\ud83d\\ude00\"}"
        );
    }
}
