//! A template's source, made fit for minijinja: what only Jinja2 knows is rewritten, what could
//! exhaust a stack is refused.
//!
//! - `\r\n` and `\r` become `\n`, as Jinja2 reads them.
//! - `{% generation %}` becomes `{% with %}`: it only marks the assistant's text, for training.
//! - After `{% raw %}`, Jinja2 keeps the line break that `trim_blocks` removes elsewhere.
//! - A macro that reads `varargs` or `kwargs` gets them as parameters, and its name is bound to a
//!   function that sorts the arguments of a call.
//! - A macro parameter whose default names an earlier parameter gets it inside the macro.
//! - A slice `x[a:b:c]` becomes a call of [`pystr`](crate::pystr)'s own, which copies as Python does
//!   and does not count marks.
//! - `~` becomes a call, and the operands of `+` go through one: see [`concat`](crate::concat).
//! - `{% set ns.x = … %}` becomes a call of [`namespace`](crate::namespace)'s own setter, which
//!   limits how deep values nest. Compiling and dropping are recursive in minijinja too, hence
//!   the limits on the source below.

use crate::concat;

/// Bytes of a template; published ones take up to 30 KB.
const MAX_SOURCE: usize = 1 << 20;
/// Words and operators within one tag.
const MAX_TAG_WORDS: usize = 4096;
/// Brackets and filters of all tags: each may wrap a value in one more list.
const MAX_WRAPS: usize = 4096;
/// How deep brackets nest.
const MAX_NESTING: usize = 24;
/// Branches of all `if`s: each is nested in the one before.
const MAX_BRANCHES: usize = 1024;

/// Name of the setter in rewritten templates. Jinja2's sandbox forbids such names to templates.
pub(crate) const SET_METHOD: &str = "__lily_set";
/// Name of the method that slices.
pub(crate) const SLICE_METHOD: &str = "__lily_slice";
/// Name of the function that wraps a macro with `varargs` or `kwargs`.
pub(crate) const VARIADIC: &str = "__lily_variadic";
const SCRATCH: &str = "__lily_scratch";

/// A `{% … %}` or `{{ … }}`.
#[derive(Debug)]
struct Tag<'s> {
    start: usize,
    end: usize,
    /// Between the delimiters, whitespace control excluded.
    body: &'s str,
    /// Where `body` starts.
    at: usize,
    /// Where the closing delimiter (with its whitespace control) starts.
    close: usize,
    block: bool,
    brackets: Vec<Bracket>,
    /// How many `|` it has.
    filters: usize,
}

impl<'s> Tag<'s> {
    fn word(&self) -> &'s str {
        let end = self.body.find(|c: char| !is_name(c)).unwrap_or(self.body.len());
        &self.body[..end]
    }

    fn is_raw(&self) -> bool {
        self.block && self.body == "raw"
    }
}

/// A pair of brackets, and the colons directly within.
#[derive(Debug)]
struct Bracket {
    open: usize,
    close: usize,
    square: bool,
    colons: Vec<usize>,
}

impl Bracket {
    /// The edits that make a call of a slice: a colon directly in square brackets makes one.
    fn slice(&self, source: &str) -> Vec<Edit> {
        if !self.square || self.colons.is_empty() || self.colons.len() > 2 {
            return Vec::new();
        }
        let mut edits = vec![(self.open, self.open + 1, format!(".{SLICE_METHOD}("))];
        let mut start = self.open + 1;
        for (index, end) in self.colons.iter().copied().chain([self.close]).enumerate() {
            if source[start..end].trim().is_empty() {
                edits.push((start, end, "none".into()));
            }
            let last = index == self.colons.len();
            edits.push((end, end + 1, if last { ")" } else { ", " }.into()));
            start = end + 1;
        }
        edits
    }
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// A source that minijinja can take.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) source: String,
    /// How many brackets and filters it has: by each, one call of a macro may nest a value deeper.
    pub(crate) wraps: usize,
}

/// The rewritten source, or why it is refused.
pub(crate) fn prepare(source: &str) -> Result<Prepared, String> {
    if source.len() > MAX_SOURCE {
        return Err(format!("it has {} bytes, more than {MAX_SOURCE}", source.len()));
    }
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let found = tags(&source)?;
    let wraps: usize = found.iter().map(|tag| tag.brackets.len() + tag.filters).sum();
    let branches = found.iter().filter(|tag| tag.block && tag.word() == "elif").count();
    if wraps > MAX_WRAPS || branches > MAX_BRANCHES {
        return Err(format!(
            "it has {wraps} brackets and filters and {branches} branches; {MAX_WRAPS} and {MAX_BRANCHES} are accepted"
        ));
    }
    let slices = found.iter().flat_map(|tag| &tag.brackets).flat_map(|b| b.slice(&source));
    let source = apply(&source, slices.collect());
    let joins = tags(&source)?.into_iter().flat_map(|tag| {
        let edits = concat::edits(&source[tag.at..tag.close], tag.block).into_iter();
        edits.map(move |(start, end, text)| (tag.at + start, tag.at + end, text))
    });
    let source = apply(&source, joins.collect());

    let mut rewriter = Rewriter { source: &source, edits: Vec::new(), open: Vec::new() };
    for tag in tags(&source)?.iter().filter(|tag| tag.block) {
        rewriter.block(tag);
    }
    let edits = rewriter.edits;
    Ok(Prepared { source: apply(&source, edits), wraps })
}

/// A range of the source and what takes its place.
type Edit = (usize, usize, String);

fn apply(source: &str, mut edits: Vec<Edit>) -> String {
    edits.sort_by_key(|(start, end, _)| (*start, *end));
    let (mut out, mut done) = (String::with_capacity(source.len() + 64), 0);
    for (start, end, text) in edits {
        // Edits never overlap; should a strange template make them, the first one stands.
        if start >= done {
            out.push_str(&source[done..start]);
            out.push_str(&text);
            done = end;
        }
    }
    out.push_str(&source[done..]);
    out
}

/// All tags outside of comments and raw blocks, up to one that never ends.
fn tags(source: &str) -> Result<Vec<Tag<'_>>, String> {
    let (mut found, mut at) = (Vec::new(), 0);
    while let Some(start) = source[at..].find('{').map(|offset| at + offset) {
        let rest = &source[start..];
        if rest.starts_with("{#") {
            let Some(end) = rest.find("#}") else { break };
            at = start + end + 2;
        } else if rest.starts_with("{%") || rest.starts_with("{{") {
            let Some(tag) = scan(source, start)? else { break };
            at = if tag.is_raw() { raw_end(source, tag.end) } else { tag.end };
            found.push(tag);
        } else {
            at = start + 1;
        }
    }
    Ok(found)
}

/// Where the `endraw` of a raw block begins.
fn raw_end(source: &str, mut at: usize) -> usize {
    while let Some(found) = source[at..].find("{%") {
        let inside = at + found + 2;
        let rest = source[inside..].trim_start_matches(['-', '+']).trim_start();
        if rest.starts_with("endraw") {
            return at + found;
        }
        at = inside;
    }
    source.len()
}

/// Reads one tag. `None` if it never ends, which minijinja will say better.
fn scan(source: &str, start: usize) -> Result<Option<Tag<'_>>, String> {
    let bytes = source.as_bytes();
    let block = bytes[start + 1] == b'%';
    let ending: &[u8] = if block { b"%}" } else { b"}}" };
    let body_start = start + 2 + usize::from(matches!(bytes.get(start + 2), Some(b'-' | b'+')));
    let (mut at, mut words, mut filters) = (body_start, 0, 0);
    let (mut open, mut brackets): (Vec<Bracket>, Vec<Bracket>) = (Vec::new(), Vec::new());
    while at < bytes.len() {
        if open.is_empty() && bytes[at..].starts_with(ending) {
            let control = at > body_start && matches!(bytes[at - 1], b'-' | b'+');
            let close = at - usize::from(control);
            let text = &source[body_start..close];
            return Ok(Some(Tag {
                start,
                end: at + 2,
                body: text.trim(),
                at: body_start + (text.len() - text.trim_start().len()),
                close,
                block,
                brackets,
                filters,
            }));
        }
        match bytes[at] {
            quote @ (b'"' | b'\'') => {
                words += 1;
                at += 1;
                while at < bytes.len() && bytes[at] != quote {
                    at += 1 + usize::from(bytes[at] == b'\\');
                }
            }
            byte @ (b'(' | b'[' | b'{') => {
                open.push(Bracket { open: at, close: at, square: byte == b'[', colons: vec![] });
            }
            b')' | b']' | b'}' => {
                if let Some(bracket) = open.pop() {
                    brackets.push(Bracket { close: at, ..bracket });
                }
            }
            b':' => {
                if let Some(bracket) = open.last_mut() {
                    bracket.colons.push(at);
                }
                words += 1;
            }
            b'|' => {
                filters += 1;
                words += 1;
            }
            byte if byte.is_ascii_whitespace() => {}
            byte if is_name(char::from(byte)) => {
                let before = bytes[at - 1];
                words += usize::from(!(before.is_ascii_alphanumeric() || before == b'_'));
            }
            _ => words += 1,
        }
        if open.len() > MAX_NESTING || words > MAX_TAG_WORDS {
            let line = source[..start].matches('\n').count() + 1;
            return Err(format!(
                "the tag in line {line} has more than {MAX_NESTING} nested brackets or {MAX_TAG_WORDS} words"
            ));
        }
        at += 1;
    }
    Ok(None)
}

/// Name, and parameters with their defaults.
type Macro = (String, Vec<(String, Option<String>)>);

/// A block whose end needs an edit.
struct Open {
    end: &'static str,
    append: Option<String>,
    /// A macro, and where its body starts.
    body: Option<(Places, Macro)>,
}

/// The places of a macro's tag that an edit needs.
#[derive(Debug, Clone, Copy)]
struct Places {
    at: usize,
    close: usize,
    end: usize,
}

struct Rewriter<'s> {
    source: &'s str,
    edits: Vec<Edit>,
    open: Vec<Open>,
}

impl Rewriter<'_> {
    fn block(&mut self, tag: &Tag<'_>) {
        let word = tag.word();
        match word {
            "generation" if tag.body == word => self.replace(tag, "with"),
            "endgeneration" if tag.body == word => self.replace(tag, "endwith"),
            "raw" if tag.is_raw() => self.raw(tag),
            "set" => self.set(tag),
            "macro" => {
                let body = parameters(tag.body).map(|(name, parameters)| {
                    (Places { at: tag.at, close: tag.close, end: tag.end }, (name, parameters))
                });
                self.open.push(Open { end: "endmacro", append: None, body });
            }
            "endset" | "endmacro" => {
                if self.open.last().is_some_and(|open| open.end == word)
                    && let Some(open) = self.open.pop()
                {
                    self.close(tag, open);
                }
            }
            _ => {}
        }
    }

    fn replace(&mut self, tag: &Tag<'_>, word: &str) {
        self.edits.push((tag.at, tag.at + tag.body.len(), word.to_owned()));
    }

    /// Puts blocks behind a tag; the last of them ends as the tag does, so whitespace is as before.
    fn append(&mut self, close: usize, end: usize, blocks: &str) {
        let ending = &self.source[close..end];
        let blocks = blocks.strip_suffix("%}").unwrap_or(blocks);
        self.edits.push((close, end, format!("%}}{blocks}{ending}")));
    }

    fn set(&mut self, tag: &Tag<'_>) {
        let rest = tag.body["set".len()..].trim_start();
        let name_end = rest.find(|c: char| !is_name(c)).unwrap_or(rest.len());
        let (object, after) = rest.split_at(name_end);
        let attribute = after.trim_start().strip_prefix('.').map(str::trim_start).map(|after| {
            let end = after.find(|c: char| !is_name(c)).unwrap_or(after.len());
            (&after[..end], after[end..].trim_start())
        });
        let value = match attribute {
            Some((_, after)) => after.strip_prefix('='),
            None => after.trim_start().strip_prefix('='),
        };
        // `{% set a, b = … %}` is no block either; its `=` comes later.
        let is_block =
            value.is_none() && !rest.contains('=') || rest.contains('|') && value.is_none();
        let mut append = None;
        if let Some((attribute, after)) = attribute.filter(|(name, _)| !name.is_empty()) {
            let call = |value: &str| {
                format!("set {SCRATCH} = {object}.{SET_METHOD}('{attribute}', ({value}))")
            };
            if let Some(value) = value {
                self.replace(tag, &call(value));
            } else if is_block {
                self.replace(tag, &format!("set {SCRATCH} {after}"));
                append = Some(format!("{{% {} %}}", call(SCRATCH)));
            }
        }
        if is_block {
            self.open.push(Open { end: "endset", append, body: None });
        }
    }

    fn close(&mut self, tag: &Tag<'_>, open: Open) {
        if let Some(blocks) = open.append {
            self.append(tag.close, tag.end, &blocks);
        }
        let Some((start, (name, mut parameters))) = open.body else {
            return;
        };
        let body = &self.source[start.end..tag.start];
        let plain = parameters.len();
        if body.contains("varargs") || body.contains("kwargs") {
            let names: Vec<_> = parameters.iter().map(|(name, _)| format!(", '{name}'")).collect();
            parameters.push(("varargs".into(), Some("()".into())));
            parameters.push(("kwargs".into(), Some("{}".into())));
            let wrap = format!("{{% set {name} = {VARIADIC}({name}{}) %}}", names.concat());
            self.append(tag.close, tag.end, &wrap);
        }
        let mut late = String::new();
        let known: Vec<String> = parameters.iter().map(|(name, _)| name.clone()).collect();
        for (index, (name, default)) in parameters.iter_mut().enumerate().take(plain) {
            if let Some(value) = default
                && known[..index].iter().any(|earlier| mentions(value, earlier))
            {
                let value = std::mem::replace(value, SCRATCH.to_owned());
                late += &format!(
                    "{{% if {name} is undefined %}}{{% set {name} = ({value}) %}}{{% endif %}}"
                );
            }
        }
        if !late.is_empty() || parameters.len() > plain {
            let list: Vec<String> = parameters
                .into_iter()
                .map(|(name, default)| {
                    default.map_or(name.clone(), |value| format!("{name}={value}"))
                })
                .collect();
            let body_end = start.at + self.source[start.at..start.close].trim_end().len();
            self.edits.push((start.at, body_end, format!("macro {name}({})", list.join(", "))));
            if !late.is_empty() {
                self.append(start.close, start.end, &late);
            }
        }
    }

    /// The first line break of a raw block is doubled: minijinja takes one away.
    fn raw(&mut self, tag: &Tag<'_>) {
        if self.source[tag.close..].starts_with("%}") && self.source[tag.end..].starts_with('\n') {
            self.edits.push((tag.end, tag.end, "\n".into()));
        }
    }
}

fn mentions(expression: &str, name: &str) -> bool {
    expression.split(|c: char| !is_name(c)).any(|word| word == name)
}

/// `macro name(a, b=1)` as its name and parameters with their defaults.
fn parameters(body: &str) -> Option<Macro> {
    let rest = body.strip_prefix("macro")?.trim_start();
    let (name, list) = rest.split_once('(')?;
    let list = list.trim_end().strip_suffix(')')?;
    let mut parameters = Vec::new();
    let (mut depth, mut quote, mut start) = (0_usize, None, 0);
    let mut escaped = false;
    for (at, c) in list.char_indices().chain([(list.len(), ',')]) {
        match (quote, c) {
            _ if std::mem::take(&mut escaped) => {}
            (Some(_), '\\') => escaped = true,
            (Some(open), c) if open == c => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(c),
            (None, '(' | '[' | '{') => depth += 1,
            (None, ')' | ']' | '}') => depth = depth.saturating_sub(1),
            (None, ',') if depth == 0 => {
                let parameter = list[start..at].trim();
                start = at + 1;
                let (name, default) = match parameter.split_once('=') {
                    Some((name, value)) => (name.trim(), Some(value.trim().to_owned())),
                    None => (parameter, None),
                };
                if !name.is_empty() {
                    parameters.push((name.to_owned(), default));
                }
            }
            (None, _) => {}
        }
    }
    let named = |name: &str| !name.is_empty() && name.chars().all(is_name);
    let all = named(name.trim()) && parameters.iter().all(|(name, _)| named(name));
    all.then(|| (name.trim().to_owned(), parameters))
}
