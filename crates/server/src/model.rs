//! The one model that is served, as far as text goes.

use std::sync::Arc;

use lily_chat::{ChatTemplate, GenerationDefaults, Tokenizer};
use lily_ops::sample::TokenMask;

use crate::error::ApiError;
use crate::fields::Fields;

/// Tokenizer, template and defaults of the model, and its names.
#[derive(Debug)]
pub struct ServedModel {
    /// Its name: never a path.
    pub id: String,
    /// More names that requests may use.
    pub aliases: Vec<String>,
    /// Whether every name is accepted.
    pub any_name: bool,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
    /// Text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Messages to text.
    pub template: ChatTemplate,
    /// Sampling where a request says nothing, and the tokens that end an answer.
    pub defaults: GenerationDefaults,
    /// Tokens that may be sampled: those that the tokenizer names.
    pub mask: Option<Arc<TokenMask>>,
}

impl ServedModel {
    /// The name under which a request is answered. A name is only ever compared.
    pub fn name(&self, fields: &Fields<'_>) -> Result<String, ApiError> {
        match fields.string("model")? {
            None => Ok(self.id.clone()),
            Some(name) if self.is_called(name) => Ok(name.to_owned()),
            Some(_) if self.any_name => Ok(self.id.clone()),
            Some(name) => Err(ApiError::model(name, &self.id)),
        }
    }

    /// Whether this is one of its names.
    pub fn is_called(&self, name: &str) -> bool {
        name == self.id || self.aliases.iter().any(|alias| alias == name)
    }
}
