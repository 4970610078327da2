//! Typed access to the fields of a JSON object, with errors that name them.

use serde_json::{Map, Value};

use crate::error::ModelError;

/// Largest value of any whole number in a config.
pub(crate) const MAX_DIMENSION: u64 = 1 << 24;

/// One object of the config, with its path for messages.
#[derive(Clone)]
pub(crate) struct Fields<'a> {
    object: &'a Map<String, Value>,
    path: String,
}

impl<'a> Fields<'a> {
    /// The fields of the whole config.
    pub fn top(config: &'a Value) -> Result<Self, ModelError> {
        Ok(Self { object: object(config, "config.json")?, path: String::new() })
    }

    /// The fields of the object in `field`, if it is there.
    pub fn inner(&self, field: &str) -> Result<Option<Self>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let name = self.name(field);
        Ok(Some(Self { object: object(value, &name)?, path: format!("{name}.") }))
    }

    /// A field with the path to it.
    pub fn name(&self, field: &str) -> String {
        format!("{}{field}", self.path)
    }

    /// The field unless it is absent or null.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|v| !v.is_null())
    }

    /// The field; an error if it is absent or null.
    pub fn need(&self, field: &str) -> Result<&'a Value, ModelError> {
        self.get(field).ok_or_else(|| ModelError::MissingField { field: self.name(field) })
    }

    /// The error that the field has a wrong value.
    pub fn bad(&self, field: &str, found: &Value, want: &str) -> ModelError {
        bad(&self.name(field), found, want)
    }

    /// A whole number from 1 to [`MAX_DIMENSION`].
    pub fn dimension(&self, field: &str) -> Result<usize, ModelError> {
        let value = self.need(field)?;
        match value.as_u64() {
            Some(n) if (1..=MAX_DIMENSION).contains(&n) => Ok(n as usize),
            _ => Err(self.bad(field, value, "a whole number from 1 to 16777216 is needed")),
        }
    }

    /// A finite number that `accept` accepts.
    pub fn number(
        &self,
        field: &str,
        accept: impl Fn(f64) -> bool,
        want: &str,
    ) -> Result<f64, ModelError> {
        let value = self.need(field)?;
        value
            .as_f64()
            .filter(|x| x.is_finite() && accept(*x))
            .ok_or_else(|| self.bad(field, value, want))
    }

    /// Refuses a field that is there with another value than those accepted.
    pub fn only(&self, field: &str, accepted: &[Value]) -> Result<(), ModelError> {
        match self.get(field) {
            Some(v) if !accepted.contains(v) => {
                Err(self.bad(field, v, &format!("only {} is supported", accepted[0])))
            }
            _ => Ok(()),
        }
    }
}

/// The object that `value` must be.
pub(crate) fn object<'a>(
    value: &'a Value,
    field: &str,
) -> Result<&'a Map<String, Value>, ModelError> {
    value.as_object().ok_or_else(|| bad(field, value, "an object is needed"))
}

/// The error that `field` has a wrong value.
pub(crate) fn bad(field: &str, found: &Value, want: &str) -> ModelError {
    ModelError::BadField { field: field.into(), found: shortened(found), want: want.into() }
}

/// A value for messages.
pub(crate) fn shortened(value: &Value) -> String {
    const MOST: usize = 60;
    let text = value.to_string();
    if text.chars().count() <= MOST {
        return text;
    }
    text.chars().take(MOST).chain("…".chars()).collect()
}
