//! Filters and tests of Jinja2 where minijinja's own are absent or differ.

use std::fmt::{self, Write as _};

use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value};

use crate::limits::{MAX_VALUE, long};
use crate::marks::{ESCAPE, MARK, unmark};
use crate::pyjson::{Style, dumps};
use crate::pystr::{arguments, is_space, length, method, wrong};
use crate::pyvalue::{repr_of, str_of};

/// Installs all of them.
pub(crate) fn install(environment: &mut Environment<'_>) {
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", |value: &Value| str_of(value));
    environment.add_filter("length", count);
    environment.add_filter("count", count);
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("join", join);
    environment.add_filter("sort", sort);
    environment.add_filter("title", title);
    environment.add_filter("indent", indent);
    environment.add_filter("center", |state: &mut State, value: &Value, width: Option<i64>| {
        let text = Value::from(str_of(value)?);
        method(state, &text, "center", &[Value::from(width.unwrap_or(80))])
    });
    environment.add_filter("wordcount", |value: &Value| -> Result<usize, Error> {
        let text = str_of(value)?;
        let words = unmark(&text)
            .split(|c: char| !(c.is_alphanumeric() || c == '_'))
            .fold(0, |n, w| n + usize::from(!w.is_empty()));
        Ok(words)
    });
    environment.add_filter("truncate", truncate);
    for name in ["e", "escape", "forceescape"] {
        environment.add_filter(name, |value: &Value| str_of(value).map(|text| escape(&text)));
    }
    environment.add_filter("urlencode", url_encode);
    environment.add_filter("pprint", |value: &Value| repr_of(value));
    for (name, filter) in [
        ("upper", Value::from_function(minijinja::filters::upper)),
        ("lower", Value::from_function(minijinja::filters::lower)),
        ("capitalize", Value::from_function(minijinja::filters::capitalize)),
        ("trim", Value::from_function(minijinja::filters::trim)),
        ("safe", Value::from_function(minijinja::filters::safe)),
    ] {
        environment.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            filter.call(state, &in_text(&args.into_values())?)
        });
    }
    environment.add_filter("replace", replace);
    environment.add_filter("format", {
        let filter = Value::from_function(minijinja::filters::format);
        move |state: &mut State, args: Rest<ValueOrKwargs>| {
            // `%(name)s` needs a mapping as it is: they are only looked at.
            let args = args.into_values();
            in_text(&args)?;
            filter.call(state, &args)
        }
    });
    for (name, test) in [
        ("lower", Value::from_function(minijinja::tests::is_lower)),
        ("upper", Value::from_function(minijinja::tests::is_upper)),
    ] {
        environment.add_test(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            test.call(state, &in_text(&args.into_values())?)
        });
    }
    // Jinja2 has none of these.
    environment.remove_filter("chain");
    for name in ["startingwith", "endingwith"] {
        environment.remove_test(name);
    }
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
            || value.kind() == ValueKind::Iterable && value.len().is_some()
            || value.is_undefined()
    });
    environment.add_test("iterable", |value: &Value| {
        !value.is_none() && (value.is_undefined() || value.try_iter().is_ok())
    });
    environment.add_test("callable", |value: &Value| {
        // Of lists, every item would be looked at.
        value.kind() == ValueKind::Plain
            || value.kind() == ValueKind::Map && begins_with(value, "<macro ")
    });
}

/// Lists and mappings among the arguments as Python's `str()` gives them, up to the limit.
/// minijinja's own filters would write one that doubles at each step without an end.
pub(crate) fn in_text(args: &[Value]) -> Result<Vec<Value>, Error> {
    let text = |arg: &Value| match arg.kind() {
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map if !arg.is_kwargs() => {
            Ok(Value::from(str_of(arg)?))
        }
        _ => Ok(arg.clone()),
    };
    args.iter().map(text).collect()
}

/// `replace(old, new, count)`.
fn replace(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let [old, new, count] = arguments(["old", "new", "count"], positional, &named)?;
    let (Some(old), Some(new)) = (old, new) else {
        return Err(Error::from(minijinja::ErrorKind::MissingArgument));
    };
    let count = count.map_or(Ok(-1), i64::try_from)?;
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    let (text, old, new) = (str_of(value)?, str_of(&old)?, str_of(&new)?);
    let found = text.matches(&old).count().min(count);
    if text.len().saturating_add(found.saturating_mul(new.len())) > MAX_VALUE {
        return Err(long());
    }
    Ok(text.replacen(&old, &new, found))
}

/// Whether minijinja's form of a value begins with these words; no more of it is written.
fn begins_with(value: &Value, words: &'static str) -> bool {
    struct Expect(&'static str);
    impl fmt::Write for Expect {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            let len = text.len().min(self.0.len());
            let (now, later) = self.0.split_at_checked(len).ok_or(fmt::Error)?;
            self.0 = if text.starts_with(now) { later } else { return Err(fmt::Error) };
            if later.is_empty() { Err(fmt::Error) } else { Ok(()) }
        }
    }
    let mut expected = Expect(words);
    let _ = write!(expected, "{value}");
    expected.0.is_empty()
}

/// `tojson(ensure_ascii, indent, separators, sort_keys)`, in the order of Hugging Face's filter.
fn to_json(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [ascii, indent, separators, sort] = arguments(names, positional, &named)?;
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(text) if text.kind() == ValueKind::String => Some(str_of(&text)?),
        Some(width) => {
            let width = i64::try_from(width)?;
            Some(" ".repeat(usize::try_from(width).unwrap_or(0).min(1 << 16)))
        }
    };
    let mut style = Style::with_indent(indent);
    style.ensure_ascii = ascii.is_some_and(|ascii| ascii.is_true());
    style.sort_keys = sort.is_some_and(|sort| sort.is_true());
    if let Some(separators) = separators.filter(|separators| !separators.is_none()) {
        let pair: Vec<Value> = separators.try_iter()?.take(3).collect();
        let [item, key] =
            <[Value; 2]>::try_from(pair).map_err(|_| wrong("tojson needs two separators"))?;
        (style.item_separator, style.key_separator) = (str_of(&item)?, str_of(&key)?);
    }
    dumps(value, &style)
}

/// `length`: characters, items, or 0 for what is missing.
fn count(value: &Value) -> Result<usize, Error> {
    match value.as_str() {
        Some(text) => Ok(length(text)),
        None if value.is_undefined() => Ok(0),
        None => match value.len() {
            Some(len) => Ok(len),
            None if value.kind() == ValueKind::Iterable => Ok(value.try_iter()?.count()),
            None => Err(wrong(format!("a value of type {} has no length", value.kind()))),
        },
    }
}

fn default(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let [other, boolean] = arguments(["default_value", "boolean"], positional, &named)?;
    let missing = value.is_undefined()
        || boolean.is_some_and(|boolean| boolean.is_true()) && !value.is_true();
    Ok(if missing { other.unwrap_or_else(|| Value::from("")) } else { value.clone() })
}

fn known(value: &Value) -> Result<&Value, Error> {
    match value.is_undefined() {
        true => Err(Error::new(minijinja::ErrorKind::UndefinedError, "a number was expected")),
        false => Ok(value),
    }
}

/// `sort(reverse, case_sensitive, attribute)`: minijinja's takes names only.
fn sort(
    state: &mut State,
    value: Value,
    positional: Rest<Value>,
    named: Kwargs,
) -> Result<Value, Error> {
    let names = ["reverse", "case_sensitive", "attribute"];
    let given = arguments(names, positional, &named)?;
    let given = names.into_iter().zip(given).filter_map(|(name, value)| Some((name, value?)));
    minijinja::filters::sort(state, value, Kwargs::from_iter(given))
}

/// Python's `int(text)` accepts blanks around, a sign, and single `_` between digits.
fn digits(text: &str, base: u32) -> Option<i128> {
    let text = unmark(text);
    let text = text.trim_matches(is_space);
    let (negative, text) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let lower = text.to_ascii_lowercase();
    let prefix = match base {
        2 => "0b",
        8 => "0o",
        16 => "0x",
        _ => "",
    };
    let rest = lower.strip_prefix(prefix).filter(|_| !prefix.is_empty()).unwrap_or(&lower);
    if rest.starts_with(['_', '+', '-']) || rest.ends_with('_') || rest.contains("__") {
        return None;
    }
    let number = i128::from_str_radix(&rest.replace('_', ""), base).ok()?;
    Some(if negative { -number } else { number })
}

fn int(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let [other, base] = arguments(["default", "base"], positional, &named)?;
    let base = base.map_or(Ok(10), u32::try_from)?;
    if !(2..=36).contains(&base) {
        return Err(wrong("the base must be in 2 to 36"));
    }
    let whole = |float: f64| (float.is_finite() && float.abs() < 1e38).then_some(float as i128);
    let number = match value.kind() {
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            digits(text, base).or_else(|| parse_float(text).and_then(whole))
        }
        ValueKind::Number if !value.is_integer() => {
            f64::try_from(value.clone()).ok().and_then(whole)
        }
        ValueKind::Number | ValueKind::Bool => {
            return Ok(Value::from(i128::try_from(value.clone())?));
        }
        _ => {
            known(value)?;
            None
        }
    };
    Ok(number.map_or_else(|| other.unwrap_or_else(|| Value::from(0)), Value::from))
}

fn parse_float(text: &str) -> Option<f64> {
    let text = unmark(text);
    text.trim_matches(is_space).replace('_', "").parse().ok()
}

fn float(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let [other] = arguments(["default"], positional, &named)?;
    let number = match value.as_str() {
        Some(text) => parse_float(text),
        None => f64::try_from(known(value)?.clone()).ok(),
    };
    Ok(number.map_or_else(|| other.unwrap_or_else(|| Value::from(0.0)), Value::from))
}

fn join(
    state: &State,
    value: &Value,
    positional: Rest<Value>,
    named: Kwargs,
) -> Result<String, Error> {
    let [by, attribute] = arguments(["d", "attribute"], positional, &named)?;
    let by = by.map_or(Ok(String::new()), |by| str_of(&by))?;
    let mut out = String::new();
    for (index, mut item) in value.try_iter()?.enumerate() {
        if let Some(path) = &attribute {
            item = attribute_of(&item, path)?;
        }
        let text = str_of(&item)?;
        state.consume_fuel(1 + (text.len() + by.len()) as u64 / 64)?;
        if index > 0 {
            out.push_str(&by);
        }
        out.push_str(&text);
    }
    Ok(out)
}

/// `a.b.0` of a value, as the filters of Jinja2 take it.
fn attribute_of(value: &Value, path: &Value) -> Result<Value, Error> {
    let Some(path) = path.as_str() else {
        return value.get_item(path);
    };
    path.split('.').try_fold(value.clone(), |value, name| match name.parse::<usize>() {
        Ok(index) => value.get_item(&Value::from(index)),
        Err(_) => value.get_attr(name),
    })
}

/// `title` of Jinja2, which differs from `str.title`: a word begins after a blank, `-` or an
/// opening bracket. Marks are not there.
fn title(value: &Value) -> Result<String, Error> {
    let text = str_of(value)?;
    let mut out = String::with_capacity(text.len());
    let mut begins = true;
    for c in text.chars() {
        if matches!(c, MARK | ESCAPE) {
            out.push(c);
            continue;
        }
        match begins {
            true => out.extend(c.to_uppercase()),
            false => out.extend(c.to_lowercase()),
        }
        begins = is_space(c) || matches!(c, '-' | '(' | '{' | '[' | '<');
    }
    Ok(out)
}

fn indent(
    state: &State,
    value: &Value,
    positional: Rest<Value>,
    named: Kwargs,
) -> Result<String, Error> {
    let [width, first, blank] = arguments(["width", "first", "blank"], positional, &named)?;
    let margin = match width {
        Some(text) if text.kind() == ValueKind::String => str_of(&text)?,
        Some(width) => {
            let width = usize::try_from(i64::try_from(width)?).unwrap_or(0);
            state.consume_fuel(width as u64 / 64)?;
            " ".repeat(width)
        }
        None => " ".repeat(4),
    };
    let truth = |flag: Option<Value>| flag.is_some_and(|flag| flag.is_true());
    let (first, blank) = (truth(first), truth(blank));
    let text = str_of(value)?;
    let mut out = String::with_capacity(text.len() + 16);
    for (index, line) in text.split('\n').enumerate() {
        if index > 0 {
            out.push('\n');
        }
        if if index == 0 { first } else { blank || !line.is_empty() } {
            state.consume_fuel(1 + margin.len() as u64 / 64)?;
            out.push_str(&margin);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// `truncate(length=255, killwords=False, end='...', leeway=5)`.
fn truncate(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let names = ["length", "killwords", "end", "leeway"];
    let [limit, kill, end, leeway] = arguments(names, positional, &named)?;
    let number = |value: Option<Value>, or: usize| value.map_or(Ok(or), usize::try_from);
    let (limit, leeway) = (number(limit, 255)?, number(leeway, 5)?);
    let end = end.map_or(Ok("...".to_owned()), |end| str_of(&end))?;
    let text = str_of(value)?;
    if length(&text) <= limit.saturating_add(leeway) {
        return Ok(text);
    }
    let keep = limit
        .checked_sub(length(&end))
        .ok_or_else(|| wrong("truncate: the end is longer than the whole"))?;
    // Cut between characters that a person sees; the marks before the cut stay.
    let (mut seen, mut cut) = (0, 0);
    for (at, c) in text.char_indices() {
        if seen == keep && !matches!(c, MARK | ESCAPE) {
            break;
        }
        seen += usize::from(!matches!(c, MARK | ESCAPE));
        cut = at + c.len_utf8();
    }
    let kept = &text[..cut];
    let kept = match kill.is_some_and(|kill| kill.is_true()) {
        true => kept,
        false => kept.rsplit_once(' ').map_or(kept, |(words, _)| words),
    };
    Ok(format!("{kept}{end}"))
}

/// Markup's escapes.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    out
}

/// `urlencode` of a text (`/` stays), of a mapping, or of pairs (blanks become `+`).
fn url_encode(value: &Value) -> Result<String, Error> {
    let quote = |value: &Value, in_query: bool| -> Result<String, Error> {
        let text = str_of(value)?;
        let mut out = String::new();
        for byte in unmark(&text).bytes() {
            match byte {
                b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => {
                    out.push(char::from(byte));
                }
                b'/' if !in_query => out.push('/'),
                b' ' if in_query => out.push('+'),
                byte => out.push_str(&format!("%{byte:02X}")),
            }
        }
        Ok(out)
    };
    let of_pair = |item: Value| -> Result<(Value, Value), Error> {
        match value.kind() {
            ValueKind::Map => Ok((item.clone(), value.get_item(&item)?)),
            _ => Ok((item.get_item_by_index(0)?, item.get_item_by_index(1)?)),
        }
    };
    if !matches!(value.kind(), ValueKind::Map | ValueKind::Seq | ValueKind::Iterable) {
        return quote(value, false);
    }
    let mut out = String::new();
    for item in value.try_iter()? {
        let (key, value) = of_pair(item)?;
        if !out.is_empty() {
            out.push('&');
        }
        out.push_str(&format!("{}={}", quote(&key, true)?, quote(&value, true)?));
        if out.len() > MAX_VALUE {
            return Err(long());
        }
    }
    Ok(out)
}
