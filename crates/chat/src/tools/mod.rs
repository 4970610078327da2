//! Calls in Qwen's format: `<tool_call>`, `<function=NAME>`, `<parameter=KEY>` VALUE `</parameter>` …,
//! `</function>`, `</tool_call>`, with white space between these as layout.
//!
//! - From a value exactly one newline is taken on each side; nothing else is touched.
//! - A closer counts only if legal structure follows it, so values may quote the tags.
//! - Values take the types that the function's schema allows; text is streamed as it comes.

mod call;
mod content;
mod follow;
mod schema;

pub use call::CallPart;
pub(crate) use call::{CallReader, Read};
pub(crate) use content::ContentReader;
pub(crate) use follow::{Element, Follower, Step, is_blank};
pub use schema::{Tools, ToolsError};
