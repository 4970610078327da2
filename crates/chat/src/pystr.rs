//! Methods of Python's strings, lists and dicts, where minijinja's own are absent or differ.

use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

use crate::filters::in_text;
use crate::marks::{ESCAPE, MARK, unmark};
use crate::source::{SET_METHOD, SLICE_METHOD};

/// What `value.method(args)` gives when minijinja itself knows no such method.
pub(crate) fn method(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if method == SLICE_METHOD {
        return slice(state, value, args);
    }
    if method == SET_METHOD {
        return Err(wrong("only a namespace has attributes that can be set"));
    }
    let known = match value.kind() {
        ValueKind::String => string(state, value.as_str().unwrap_or_default(), method, args)?,
        ValueKind::Seq => sequence(value, method, args)?,
        ValueKind::Map if method == "copy" => {
            from_args::<()>(args)?;
            Some(value.clone())
        }
        _ => None,
    };
    match known {
        Some(result) => Ok(result),
        None => {
            // `format` writes what it is given as minijinja does, without an end.
            if method == "format" {
                in_text(args)?;
            }
            pycompat::unknown_method_callback(state, value, method, args)
        }
    }
}

pub(crate) fn wrong(problem: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem)
}

/// `value[start:stop:step]`. In a text, marks belong to the character before them.
fn slice(state: &State, value: &Value, args: &[Value]) -> Result<Value, Error> {
    let (start, stop, step): (Option<i64>, Option<i64>, Option<i64>) = from_args(args)?;
    match value.kind() {
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            state.consume_fuel(text.len() as u64 / 64)?;
            let units = units(text);
            let picked = pick(units.len(), start, stop, step.unwrap_or(1))?;
            Ok(Value::from(picked.into_iter().map(|at| units[at]).collect::<String>()))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            // Before the items are there: `[1] * 1000000000` is none of them yet.
            state.consume_fuel(value.len().unwrap_or(0) as u64 / 4)?;
            let items: Vec<Value> = value.try_iter()?.collect();
            let picked = pick(items.len(), start, stop, step.unwrap_or(1))?;
            let picked: Vec<Value> = picked.into_iter().map(|at| items[at].clone()).collect();
            Ok(match value.is_tuple() {
                true => Value::from(Tuple::from(picked)),
                false => Value::from(picked),
            })
        }
        kind => Err(wrong(format!("a value of type {kind} cannot be sliced"))),
    }
}

/// A text by the characters that a person sees, each with the marks behind it.
fn units(text: &str) -> Vec<&str> {
    let mut units = Vec::new();
    let (mut start, mut complete, mut escaped) = (0, false, false);
    for (at, c) in text.char_indices() {
        let mark = !escaped && matches!(c, MARK | ESCAPE);
        if complete && !(mark && c == MARK) {
            units.push(&text[start..at]);
            (start, complete) = (at, false);
        }
        escaped = mark && c == ESCAPE;
        complete |= !mark;
    }
    if complete {
        units.push(&text[start..]);
    }
    units
}

/// The places that a slice of Python names, in its order.
fn pick(len: usize, start: Option<i64>, stop: Option<i64>, step: i64) -> Result<Vec<usize>, Error> {
    if step == 0 {
        return Err(wrong("slice step cannot be zero"));
    }
    let len = i64::try_from(len).unwrap_or(i64::MAX);
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let place = |at: i64| if at < 0 { at.saturating_add(len) } else { at }.clamp(low, high);
    let (first, end) = if step > 0 { (low, high) } else { (high, low) };
    let (mut at, stop) = (start.map_or(first, place), stop.map_or(end, place));
    let mut places = Vec::new();
    while if step > 0 { at < stop } else { at > stop } {
        places.push(usize::try_from(at).unwrap_or(0));
        at = at.saturating_add(step);
    }
    Ok(places)
}

fn sequence(value: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "copy" => {
            from_args::<()>(args)?;
            value.clone()
        }
        "index" => {
            let (what,): (&Value,) = from_args(args)?;
            let at = value.try_iter()?.position(|item| item == *what);
            Value::from(at.ok_or_else(|| wrong("the value is not in the list"))?)
        }
        _ => return Ok(None),
    }))
}

fn string(state: &State, s: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let letters = |text: &str, test: fn(char) -> bool| {
        let text = unmark(text);
        Value::from(!text.is_empty() && text.chars().all(test))
    };
    Ok(Some(match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            let set = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
            let start = if method == "rstrip" { s } else { s.trim_start_matches(set) };
            Value::from(if method == "lstrip" { start } else { start.trim_end_matches(set) })
        }
        "split" | "rsplit" => {
            let (separator, limit, named): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
            let separator = separator.map_or_else(|| named.get("sep"), |s| Ok(Some(s)))?;
            let limit = limit.map_or_else(|| named.get("maxsplit"), |n| Ok(Some(n)))?;
            named.assert_all_used()?;
            let limit = limit.and_then(|n: i64| usize::try_from(n).ok()).unwrap_or(usize::MAX);
            let separator = separator.filter(|s| !s.is_none());
            let parts = match &separator {
                None => split_blanks(s, limit, method == "rsplit"),
                Some(value) => match value.as_str() {
                    Some("") | None => return Err(wrong("an empty or non-text separator")),
                    Some(by) if method == "split" => {
                        s.splitn(limit.saturating_add(1), by).collect()
                    }
                    Some(by) => {
                        let mut parts: Vec<_> = s.rsplitn(limit.saturating_add(1), by).collect();
                        parts.reverse();
                        parts
                    }
                },
            };
            state.consume_fuel(parts.len() as u64 / 16)?;
            parts.into_iter().map(Value::from).collect()
        }
        "splitlines" => {
            let (keep, named): (Option<bool>, Kwargs) = from_args(args)?;
            let keep = keep.map_or_else(|| named.get("keepends"), |k| Ok(Some(k)))?;
            named.assert_all_used()?;
            split_lines(s, keep.unwrap_or(false)).into_iter().map(Value::from).collect()
        }
        "partition" | "rpartition" => {
            let (by,): (&str,) = from_args(args)?;
            if by.is_empty() {
                return Err(wrong("empty separator"));
            }
            let parts = match method {
                "partition" => s.split_once(by).map_or([s, "", ""], |(a, b)| [a, by, b]),
                _ => s.rsplit_once(by).map_or(["", "", s], |(a, b)| [a, by, b]),
            };
            Value::from(Tuple::from(parts.map(Value::from).to_vec()))
        }
        "startswith" | "endswith" => affix(s, method == "startswith", args)?,
        "removeprefix" | "removesuffix" => {
            let (affix,): (&str,) = from_args(args)?;
            let rest = match method {
                "removeprefix" => s.strip_prefix(affix),
                _ => s.strip_suffix(affix),
            };
            Value::from(rest.unwrap_or(s))
        }
        "find" | "rfind" | "index" | "rindex" | "count" => search(s, method, args)?,
        "title" => {
            from_args::<()>(args)?;
            Value::from(title(s))
        }
        "istitle" => Value::from(s.chars().any(char::is_alphabetic) && title(s) == s),
        "swapcase" => Value::from(
            s.chars()
                .flat_map(|c| {
                    let (lower, upper) = (c.is_lowercase(), c.is_uppercase());
                    let change: Vec<char> = match (lower, upper) {
                        (true, _) => c.to_uppercase().collect(),
                        (_, true) => c.to_lowercase().collect(),
                        _ => vec![c],
                    };
                    change
                })
                .collect::<String>(),
        ),
        "casefold" => Value::from(s.to_lowercase().replace('ß', "ss").replace('ς', "σ")),
        "center" | "ljust" | "rjust" | "zfill" => pad(state, s, method, args)?,
        "expandtabs" => {
            let (size,): (Option<usize>,) = from_args(args)?;
            Value::from(expand_tabs(state, s, size.unwrap_or(8))?)
        }
        "isdigit" => letters(s, |c| c.is_ascii_digit() || is_digit(c)),
        "isdecimal" => letters(s, |c| c.is_ascii_digit() || is_decimal(c)),
        "isspace" => letters(s, is_space),
        "isalpha" => letters(s, char::is_alphabetic),
        "isalnum" => letters(s, char::is_alphanumeric),
        "isnumeric" => letters(s, char::is_numeric),
        "isidentifier" => {
            let text = unmark(s);
            let first = text.chars().next().is_some_and(|c| c.is_alphabetic() || c == '_');
            Value::from(first && text.chars().all(|c| c.is_alphanumeric() || c == '_'))
        }
        "join" => {
            let (items,): (&Value,) = from_args(args)?;
            let mut out = String::new();
            for (index, item) in items.try_iter()?.enumerate() {
                let text = item.as_str().ok_or_else(|| wrong("join expects strings"))?;
                state.consume_fuel(1 + (s.len() + text.len()) as u64 / 64)?;
                if index > 0 {
                    out.push_str(s);
                }
                out.push_str(text);
            }
            Value::from(out)
        }
        _ => return Ok(None),
    }))
}

/// Python's `str.isspace`: Unicode's white space and the four separators of ASCII.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// Decimal digits of scripts other than Latin: each script's ten lie together.
fn is_decimal(c: char) -> bool {
    const ZEROS: [u32; 20] = [
        0x660, 0x6F0, 0x7C0, 0x966, 0x9E6, 0xA66, 0xAE6, 0xB66, 0xBE6, 0xC66, 0xCE6, 0xD66, 0xE50,
        0xED0, 0xF20, 0x1040, 0x17E0, 0x1810, 0xA620, 0xFF10,
    ];
    ZEROS.iter().any(|zero| (*zero..zero + 10).contains(&u32::from(c)))
}

/// `isdigit`: decimals, and digits raised, lowered or circled.
fn is_digit(c: char) -> bool {
    is_decimal(c) || matches!(c, '²' | '³' | '¹' | '⁰' | '⁴'..='⁹' | '₀'..='₉' | '①'..='⑨' | '⓪')
}

fn split_blanks(s: &str, limit: usize, from_right: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = s.trim_matches(is_space);
    while !rest.is_empty() {
        let cut = match from_right {
            _ if parts.len() >= limit => None,
            true => rest.rfind(is_space),
            false => rest.find(is_space),
        };
        let Some(at) = cut else {
            parts.push(rest);
            break;
        };
        let width = rest[at..].chars().next().map_or(1, char::len_utf8);
        let (before, after) = (&rest[..at], &rest[at + width..]);
        let (part, remaining) = if from_right { (after, before) } else { (before, after) };
        parts.push(part);
        rest = remaining.trim_matches(is_space);
    }
    // With a limit, the last part keeps the blanks of its far end.
    if parts.len() > limit {
        let last = parts[limit];
        let offset = last.as_ptr().addr() - s.as_ptr().addr();
        parts[limit] = if from_right { &s[..offset + last.len()] } else { &s[offset..] };
    }
    if from_right {
        parts.reverse();
    }
    parts
}

fn split_lines(s: &str, keep: bool) -> Vec<&str> {
    let ends = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let (mut lines, mut rest) = (Vec::new(), s);
    while !rest.is_empty() {
        let at = rest.find(ends).unwrap_or(rest.len());
        let end = match rest[at..].chars().next() {
            Some('\r') if rest[at..].starts_with("\r\n") => at + 2,
            Some(c) => at + c.len_utf8(),
            None => at,
        };
        lines.push(&rest[..if keep { end } else { at }]);
        rest = &rest[end..];
    }
    lines
}

/// The part of a string that Python's optional `start` and `end` name, and where it begins.
fn window(s: &str, start: Option<i64>, end: Option<i64>) -> (usize, String) {
    let text = unmark(s);
    let len = text.chars().count();
    let place = |at: i64| match usize::try_from(at) {
        Ok(at) => at.min(len),
        Err(_) => len.saturating_sub(usize::try_from(at.unsigned_abs()).unwrap_or(len)),
    };
    let (start, end) = (start.map_or(0, place), end.map_or(len, place));
    (start, text.chars().skip(start).take(end.saturating_sub(start)).collect())
}

fn search(s: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (what, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
    let what = unmark(what);
    let (offset, text) = window(s, start, end);
    if method == "count" {
        return Ok(Value::from(text.matches(&*what).count()));
    }
    let found = if method.starts_with('r') { text.rfind(&*what) } else { text.find(&*what) };
    match found {
        Some(at) => Ok(Value::from(offset + text[..at].chars().count())),
        None if method.ends_with("find") => Ok(Value::from(-1)),
        None => Err(wrong("substring not found")),
    }
}

fn affix(s: &str, prefix: bool, args: &[Value]) -> Result<Value, Error> {
    let (what, start, end): (&Value, Option<i64>, Option<i64>) = from_args(args)?;
    // Without a window the marks stay: a user's `<tool_response>` must not be taken for one.
    let part = match (start, end) {
        (None, None) => s.to_owned(),
        _ => window(s, start, end).1,
    };
    let test = |affix: &Value| match affix.as_str() {
        Some(affix) if prefix => Ok(part.starts_with(affix)),
        Some(affix) => Ok(part.ends_with(affix)),
        None => Err(wrong("startswith and endswith take a string or a tuple of strings")),
    };
    if !what.is_tuple() {
        return test(what).map(Value::from);
    }
    for affix in what.try_iter()? {
        if test(&affix)? {
            return Ok(Value::from(true));
        }
    }
    Ok(Value::from(false))
}

/// `str.title`: a letter behind a letter is lower, any other is upper. Marks are not there.
fn title(s: &str) -> String {
    let mut out = String::with_capacity(s.len());
    let mut in_word = false;
    for c in s.chars() {
        if matches!(c, MARK | ESCAPE) {
            out.push(c);
            continue;
        }
        match in_word {
            true => out.extend(c.to_lowercase()),
            false => out.extend(title_case(c)),
        }
        in_word = c.is_lowercase() || c.is_uppercase() || c.to_lowercase().next() != Some(c);
    }
    out
}

/// The title case of a character: upper, but for the four letters that are two in one.
fn title_case(c: char) -> Vec<char> {
    match c {
        'Ǆ'..='ǆ' => vec!['ǅ'],
        'Ǉ'..='ǉ' => vec!['ǈ'],
        'Ǌ'..='ǌ' => vec!['ǋ'],
        'Ǳ'..='ǳ' => vec!['ǲ'],
        'ß' => vec!['S', 's'],
        c => c.to_uppercase().collect(),
    }
}

/// How many characters a person sees: marks are none.
pub(crate) fn length(s: &str) -> usize {
    unmark(s).chars().count()
}

fn pad(state: &State, s: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill): (i64, Option<&str>) = from_args(args)?;
    let fill = match (method, fill.map(|fill| (fill, fill.chars().count()))) {
        ("zfill", None) => "0",
        (_, None) => " ",
        (_, Some((fill, 1))) => fill,
        _ => return Err(wrong("the fill must be one character")),
    };
    let len = length(s);
    let missing = usize::try_from(width).unwrap_or(0).saturating_sub(len);
    state.consume_fuel(missing as u64 / 16)?;
    let left = match method {
        "ljust" => 0,
        // CPython puts the odd one to the left if the width is odd.
        "center" => missing / 2 + (missing & usize::try_from(width).unwrap_or(0) & 1),
        _ => missing,
    };
    let (before, after) = (fill.repeat(left), fill.repeat(missing - left));
    let sign = s.chars().next().filter(|c| method == "zfill" && matches!(c, '+' | '-'));
    Ok(Value::from(match sign {
        Some(sign) => format!("{sign}{before}{}", &s[1..]),
        None => format!("{before}{s}{after}"),
    }))
}

fn expand_tabs(state: &State, s: &str, size: usize) -> Result<String, Error> {
    let (mut out, mut column) = (String::with_capacity(s.len()), 0_usize);
    for c in s.chars() {
        match c {
            '\t' if size == 0 => {}
            '\t' => {
                let blanks = size - column % size;
                state.consume_fuel(1 + blanks as u64 / 16)?;
                out.extend(std::iter::repeat_n(' ', blanks));
                column += blanks;
            }
            c => {
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
                out.push(c);
            }
        }
    }
    Ok(out)
}

/// Arguments of a filter: positional ones in the order of `names`, then by name.
pub(crate) fn arguments<const N: usize>(
    names: [&str; N],
    positional: Rest<Value>,
    named: &Kwargs,
) -> Result<[Option<Value>; N], Error> {
    let mut values = [const { None }; N];
    let mut positional = positional.0.into_iter();
    for (slot, name) in values.iter_mut().zip(names) {
        *slot = match (positional.next(), named.get::<Option<Value>>(name)?) {
            (Some(_), Some(_)) if named.has(name) => {
                return Err(Error::new(ErrorKind::TooManyArguments, format!("{name} twice")));
            }
            (value, by_name) => value.or(by_name),
        };
    }
    if positional.next().is_some() {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    named.assert_all_used()?;
    Ok(values)
}
