//! Conversations of an order that a template refuses.
//!
//! Qwen's templates raise an exception where a system message comes late, and where no user's message is left.
//! Both happen to honest clients (hooks, compaction), and a refusal makes them retry for ever. So where the
//! template raises for one of these reasons, the exception is answered instead: a late system message becomes
//! a system turn in its place, which keeps what came before it as it was, and a missing question is passed over.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::value::{Object, ObjectRepr};
use minijinja::{State, Value as TemplateValue};
use serde_json::Value;

use crate::error::ChatError;
use crate::render_input::{RenderInput, to_value};
use crate::template::ChatTemplate;

/// A variable that templates do not know.
const EXCUSES: &str = "__lily_excuses";
const TURN: &str = "<|im_start|>";

/// Answers to exceptions.
#[derive(Debug)]
struct Excuses {
    /// Late system messages as turns.
    late: Vec<String>,
    next: AtomicUsize,
    without_user: bool,
}

impl Object for Excuses {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }
}

/// What an exception with this message gives instead, if it is excused.
pub(crate) fn excuse(state: &State<'_, '_>, message: &str) -> Option<TemplateValue> {
    let excuses = state.lookup(EXCUSES)?;
    let excuses = excuses.downcast_object_ref::<Excuses>()?;
    let words = message.to_lowercase();
    let says = |word: &str| words.contains(word);
    if says("system") && (says("beginning") || says("first") || says("start")) {
        let at = excuses.next.fetch_add(1, Ordering::Relaxed);
        return excuses.late.get(at).map(TemplateValue::from);
    }
    (says("no user") && excuses.without_user).then(|| TemplateValue::from(""))
}

impl ChatTemplate {
    /// Renders a conversation whatever its order: as [`render`](Self::render) does if the template takes it, else
    /// with late system messages as system turns in their place and without a question if there is none, else
    /// as [`render_tolerant`](Self::render_tolerant). Without a user's message, every answer counts as one
    /// behind the last question: its reasoning is rendered.
    ///
    /// # Errors
    ///
    /// As [`render`](Self::render), for what none of these covers.
    pub fn render_conversation(&self, input: &RenderInput) -> Result<String, ChatError> {
        match self.render(input) {
            Err(ChatError::Refused { .. }) => {}
            other => return other,
        }
        match self.render_excused(input)? {
            Some(text) => Ok(text),
            None => self.render_tolerant(input).map(|tolerant| tolerant.text),
        }
    }

    /// `None` if the exceptions are others, or the turns are not of the form that is known.
    fn render_excused(&self, input: &RenderInput) -> Result<Option<String>, ChatError> {
        let mut variables = self.variables(input)?;
        let messages = variables["messages"].as_array().map_or(&[][..], Vec::as_slice);
        let is = |message: &Value, role: &str| message["role"] == role;
        let late = messages.iter().skip(1).filter(|message| is(message, "system"));
        let late: Vec<String> = late
            .map(|message| {
                let text = message["content"].as_str().unwrap_or_default().trim();
                format!("{TURN}system\n{text}<|im_end|>\n")
            })
            .collect();
        let without_user = !messages.iter().any(|message| is(message, "user"));
        if without_user {
            variables.insert("preserve_thinking".into(), true.into());
        }
        let count = late.len();
        let excuses = Arc::new(Excuses { late, next: AtomicUsize::new(0), without_user });
        let answered = TemplateValue::from_dyn_object(Arc::clone(&excuses));
        let base = to_value(&variables);
        let rendered =
            self.render_variables(minijinja::context! { __lily_excuses => answered, ..base });
        match rendered {
            // Among turns of another form one of ours would be noise.
            Ok(text)
                if excuses.next.load(Ordering::Relaxed) == count
                    && text.matches(TURN).count() > count =>
            {
                Ok(Some(text))
            }
            Ok(_) | Err(ChatError::Refused { .. } | ChatError::Render { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
