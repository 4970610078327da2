//! The chat template, in an environment like that of Hugging Face's `apply_chat_template`.

use std::fmt;
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use minijinja_contrib::pycompat::unknown_method_callback;

use crate::error::ChatError;
use crate::marks::{ControlSpellings, ESCAPE, MARK, THINK_CLOSE};
use crate::pyjson::{Style, dumps};
use crate::render_input::{RenderInput, variables};
use crate::{Tokenizer, strftime};

const NAME: &str = "chat_template";

/// Work that one rendering may do: a step or 64 bytes of text is one unit. A message takes some
/// 150 steps, so ten thousand messages of any context fit; memory stays under 320 MB.
const FUEL: u64 = 5_000_000;
const FUEL_LIMIT: &str = "5 million steps";
/// Bytes that one rendering may write: far above any context, far below memory.
const MAX_OUTPUT: usize = 64 << 20;
const OUTPUT_LIMIT: &str = "64 MiB of text";

/// A compiled chat template.
///
/// The environment is that of Hugging Face: `trim_blocks`, `lstrip_blocks`, Python's string
/// methods, `break` and `continue`, `tojson` in the form of `json.dumps(ensure_ascii=False)`,
/// `raise_exception` and `strftime_now` (UTC). Steps and output are limited.
pub struct ChatTemplate {
    environment: Environment<'static>,
    control: ControlSpellings,
    splits_thinking: bool,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("splits_thinking", &self.splits_thinking)
            .finish_non_exhaustive()
    }
}

/// What a template passed to `raise_exception`.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

impl ChatTemplate {
    /// Compiles a template. The tokenizer tells which spellings content must not form.
    ///
    /// # Errors
    ///
    /// A template that does not compile, or that uses the two private-use characters of
    /// [`marks`](crate::marks) itself.
    pub fn new(source: &str, tokenizer: &Tokenizer) -> Result<Self, ChatError> {
        if source.contains([MARK, ESCAPE]) {
            return Err(ChatError::TemplateSyntax {
                problem: "it contains U+10FFF0 or U+10FFF1, which Lily needs for itself".into(),
            });
        }
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|error| syntax_error(&error))?;
        let mut environment = Environment::new();
        environment.set_syntax(syntax);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.set_fuel(Some(FUEL));
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment
            .add_template_owned(NAME, source.to_owned())
            .map_err(|error| syntax_error(&error))?;
        Ok(Self {
            environment,
            control: tokenizer.control().clone(),
            splits_thinking: source.contains(THINK_CLOSE),
        })
    }

    /// Renders a prompt, content marked as [`marks`](crate::marks) describes. Tokenize it with
    /// [`Tokenizer::encode_rendered`]; show it with [`unmark`](crate::marks::unmark).
    ///
    /// # Errors
    ///
    /// [`ChatError::Message`] for a malformed message, [`ChatError::Refused`] when the template
    /// raises, [`ChatError::Limit`] when it runs too long, else [`ChatError::Render`].
    pub fn render(&self, input: &RenderInput) -> Result<String, ChatError> {
        let variables = variables(input, &self.control, self.splits_thinking)?;
        let mut output = Limited { text: Vec::new(), overflowed: false };
        let rendered = self.environment.get_template(NAME).and_then(|template| {
            template.render_captured_to(Serde(&variables), &mut output).map(drop)
        });
        match rendered {
            Ok(()) => String::from_utf8(output.text)
                .map_err(|error| ChatError::Render { problem: error.to_string() }),
            Err(_) if output.overflowed => Err(ChatError::Limit { limit: OUTPUT_LIMIT }),
            Err(error) => Err(explain(&error)),
        }
    }
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

/// Tells a template's refusal and a spent limit from a failure.
fn explain(error: &Error) -> ChatError {
    if error.kind() == ErrorKind::OutOfFuel {
        return ChatError::Limit { limit: FUEL_LIMIT };
    }
    let mut source = Some(error as &(dyn std::error::Error + 'static));
    while let Some(cause) = source {
        if let Some(Raised(message)) = cause.downcast_ref() {
            return ChatError::Refused { message: message.clone() };
        }
        source = cause.source();
    }
    ChatError::Render { problem: error.to_string() }
}

fn raise_exception(message: String) -> Result<Value, Error> {
    let message = crate::marks::unmark(&message).into_owned();
    Err(Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(message)))
}

fn strftime_now(format: &str) -> Result<String, Error> {
    strftime::now(format).map_err(|code| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now does not know %{code}"))
    })
}

fn to_json(value: &Value, indent: Option<usize>, arguments: Kwargs) -> Result<Value, Error> {
    let failed = |problem: String| Error::new(ErrorKind::BadSerialization, problem);
    if value.is_undefined() {
        return Err(failed("tojson of an undefined value".into()));
    }
    let indent = match indent {
        Some(indent) => Some(indent),
        None => arguments.get::<Option<usize>>("indent")?,
    };
    let mut style = Style::with_indent(indent);
    style.ensure_ascii = arguments.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    style.sort_keys = arguments.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    if let Some(separators) = arguments.get::<Option<Vec<String>>>("separators")? {
        let [item, key] = <[String; 2]>::try_from(separators)
            .map_err(|_| failed("tojson needs two separators".into()))?;
        (style.item_separator, style.key_separator) = (item, key);
    }
    arguments.assert_all_used()?;
    let value = serde_json::to_value(value).map_err(|error| failed(error.to_string()))?;
    Ok(Value::from_safe_string(dumps(&value, &style)))
}
