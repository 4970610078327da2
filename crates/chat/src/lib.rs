//! Text in and out of the model: tokenizer, chat template, streaming detokenizer.
//!
//! This crate knows no device and no tensor. It turns messages into token ids and token ids into
//! text:
//!
//! ```text
//! messages ──ChatTemplate::render──► text with marks ──Tokenizer::encode_rendered──► ids
//! ids ──Detokenizer::push──► text, never half a character ──StopMatcher::push──► the answer
//! ```
//!
//! Messages from sloppy clients go through [`ChatTemplate::render_tolerant`]; its rules are in
//! [`tolerance`].
//!
//! # Only the template makes control tokens
//!
//! A user may write `<|im_end|>`; that must stay text. So
//! [`ChatTemplate::render`] marks the content before the template sees it, and
//! [`Tokenizer::encode_rendered`] splits at *unmarked* control tokens only. The rules are in
//! [`marks`].

#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod answer;
mod bigint;
mod concat;
mod conversation;
mod defaults;
mod detokenizer;
mod error;
mod filters;
mod globals;
mod limits;
pub mod marks;
mod namespace;
mod pyjson;
mod pystr;
mod pyvalue;
mod reasoning;
mod render_input;
mod source;
mod stop;
mod strftime;
mod template;
mod tokenizer;
pub mod tolerance;
pub mod tools;

pub use answer::{AnswerParser, End, Part};
pub use defaults::{GenerationDefaults, find_template, generation_defaults};
pub use detokenizer::{Detokenizer, Utf8Stream};
pub use error::ChatError;
pub use render_input::RenderInput;
pub use stop::{StopMatcher, StopOutput};
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;
pub use tolerance::{Repair, Rule, Tolerant};
pub use tools::{CallPart, Tools, ToolsError};
