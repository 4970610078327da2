//! The chat template, in an environment like that of Hugging Face's `apply_chat_template`.

use std::fmt;
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};

use crate::error::ChatError;
use crate::globals::{Raised, strftime_at};
use crate::limits::{
    FUEL, FUEL_LIMIT, LimitHit, MAX_FRAMES, MAX_OUTPUT, OUTPUT_LIMIT, on_deep_stack,
};
use crate::marks::{ControlSpellings, ESCAPE, MARK, THINK_CLOSE};
use crate::render_input::{RenderInput, to_value, variables};
use crate::tolerance::{Tolerant, render_tolerant};
use crate::{Tokenizer, filters, globals, pystr, pyvalue, source};

const NAME: &str = "chat_template";

/// A compiled chat template.
///
/// The environment is that of Hugging Face: `trim_blocks`, `lstrip_blocks`, Python's string
/// methods, `break` and `continue`, `{% generation %}`, `tojson` in the form of
/// `json.dumps(ensure_ascii=False)`, `raise_exception` and `strftime_now` (UTC). Steps, output and
/// nesting are limited.
///
/// # Where Python's jinja2 would render differently
///
/// Output equals jinja2's but for these, each checked by a test:
///
/// - Where Python raises a `TypeError`, minijinja is often lenient: comparing values of different
///   types, `in` with a number, iterating over `none`, sorting mixed lists, `<` with a missing value.
/// - The `%` operator on strings (use `format`), unary `+`, and bare tuples in `{{ 1, 2 }}`.
/// - Content is marked (see [`marks`](crate::marks)): a template that compares or counts off the
///   characters of content holding the first one of a control token (`<`) sees the marks. Lengths,
///   slices, searches and case changes do not.
/// - `str.format` knows neither `!r` nor `%`; `encode` and what would change a list are absent.
/// - Dictionary views print as lists, `range` as its numbers, and a dictionary's entry is found
///   before a method of the same name.
/// - Filters that no chat template uses are absent: `filesizeformat`, `random`, `striptags`,
///   `urlize`, `wordwrap`, `xmlattr`; `pprint` never breaks lines.
pub struct ChatTemplate {
    environment: Environment<'static>,
    control: ControlSpellings,
    splits_thinking: bool,
    knows_developer: bool,
    /// Brackets and filters of the source, for the stack.
    wraps: usize,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("splits_thinking", &self.splits_thinking)
            .finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles a template. The tokenizer tells which spellings content must not form.
    ///
    /// # Errors
    ///
    /// A template that does not compile, that uses the two private-use characters of
    /// [`marks`](crate::marks) itself, or that is large or nested beyond reason.
    pub fn new(source: &str, tokenizer: &Tokenizer) -> Result<Self, ChatError> {
        if source.contains([MARK, ESCAPE]) {
            return Err(ChatError::TemplateSyntax {
                problem: "it contains U+10FFF0 or U+10FFF1, which Lily needs for itself".into(),
            });
        }
        let prepared =
            source::prepare(source).map_err(|problem| ChatError::TemplateSyntax { problem })?;
        let wraps = prepared.wraps;
        let compiled = on_deep_stack(prepared.wraps, || compile(prepared.source));
        Ok(Self {
            environment: compiled.unwrap_or_else(|| Err(no_stack()))?,
            control: tokenizer.control().clone(),
            splits_thinking: source.contains(THINK_CLOSE),
            knows_developer: source.contains("developer"),
            wraps,
        })
    }

    /// Holds the clock of `strftime_now` at a moment (seconds since 1970, UTC), so that the same
    /// messages render to the same prompt on another day.
    #[must_use]
    pub fn at_time(mut self, unix_seconds: u64) -> Self {
        self.environment
            .add_function("strftime_now", move |format: &str| strftime_at(unix_seconds, format));
        self
    }

    /// Renders a prompt, content marked as [`marks`](crate::marks) describes. Tokenize it with
    /// [`Tokenizer::encode_rendered`]; show it with [`unmark`](crate::marks::unmark).
    ///
    /// The messages are taken as they are; [`render_tolerant`](Self::render_tolerant) bears with
    /// sloppy ones.
    ///
    /// # Errors
    ///
    /// [`ChatError::Message`] for a malformed message, [`ChatError::Refused`] when the template
    /// raises, [`ChatError::Limit`] when it runs too long, else [`ChatError::Render`].
    pub fn render(&self, input: &RenderInput) -> Result<String, ChatError> {
        let variables = variables(input, &self.control, self.splits_thinking)?;
        self.render_variables(to_value(&variables))
    }

    /// Renders with variables that are marked already.
    pub(crate) fn render_variables(&self, variables: Value) -> Result<String, ChatError> {
        on_deep_stack(self.wraps, || {
            let mut output = Limited { text: Vec::new(), overflowed: false };
            let rendered = self
                .environment
                .get_template(NAME)
                .and_then(|template| template.render_captured_to(variables, &mut output).map(drop));
            match rendered {
                Ok(()) => String::from_utf8(output.text)
                    .map_err(|error| ChatError::Render { problem: error.to_string() }),
                Err(_) if output.overflowed => Err(ChatError::Limit { limit: OUTPUT_LIMIT }),
                Err(error) => Err(explain(&error)),
            }
        })
        .unwrap_or_else(|| Err(no_stack()))
    }

    /// The variables of a conversation, marked.
    pub(crate) fn variables(
        &self,
        input: &RenderInput,
    ) -> Result<serde_json::Map<String, serde_json::Value>, ChatError> {
        variables(input, &self.control, self.splits_thinking)
    }

    /// Renders a prompt from what sloppy clients send, by the rules of
    /// [`tolerance`](crate::tolerance).
    ///
    /// # Errors
    ///
    /// As [`render`](Self::render), for what no rule covers.
    pub fn render_tolerant(&self, input: &RenderInput) -> Result<Tolerant, ChatError> {
        render_tolerant(self, input, self.knows_developer)
    }
}

fn compile(source: String) -> Result<Environment<'static>, ChatError> {
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .map_err(|error| syntax_error(&error))?;
    let mut environment = Environment::new();
    environment.set_syntax(syntax);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(pystr::method);
    environment.set_formatter(|out, _, value| {
        match value.as_str() {
            Some(text) => out.write_str(text),
            None => out.write_str(&pyvalue::str_of(value)?),
        }
        .map_err(Error::from)
    });
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(MAX_FRAMES);
    filters::install(&mut environment);
    globals::install(&mut environment);
    environment.add_template_owned(NAME, source).map_err(|error| syntax_error(&error))?;
    Ok(environment)
}

/// A buffer that refuses to grow beyond [`MAX_OUTPUT`].
struct Limited {
    text: Vec<u8>,
    overflowed: bool,
}

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.text.len() + bytes.len() > MAX_OUTPUT {
            self.overflowed = true;
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn syntax_error(error: &Error) -> ChatError {
    ChatError::TemplateSyntax { problem: error.to_string() }
}

fn no_stack() -> ChatError {
    ChatError::Limit { limit: "memory: the system grants no stack for the template" }
}

/// Tells a template's refusal and a spent limit from a failure.
fn explain(error: &Error) -> ChatError {
    match error.kind() {
        ErrorKind::OutOfFuel => return ChatError::Limit { limit: FUEL_LIMIT },
        // In Jinja2 these are errors of syntax; minijinja sees them only on the way.
        ErrorKind::UnknownFilter | ErrorKind::UnknownTest => return syntax_error(error),
        _ => {}
    }
    let mut source = Some(error as &(dyn std::error::Error + 'static));
    while let Some(cause) = source {
        if let Some(Raised(message)) = cause.downcast_ref() {
            return ChatError::Refused { message: message.clone() };
        }
        if let Some(LimitHit(limit)) = cause.downcast_ref() {
            return ChatError::Limit { limit };
        }
        source = cause.source();
    }
    ChatError::Render { problem: error.to_string() }
}
