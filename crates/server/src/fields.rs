//! Strict reading of request bodies: null is absent, types are never bent, errors name the field.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::error::ApiError;

/// The fields of an object of a request.
#[derive(Debug, Clone)]
pub struct Fields<'a> {
    object: &'a Map<String, Value>,
    /// What stands before a field's name in errors.
    prefix: String,
}

impl<'a> Fields<'a> {
    /// The fields of a request.
    pub fn root(body: &'a Value) -> Result<Self, ApiError> {
        let object = body.as_object();
        let object = object.ok_or_else(|| {
            ApiError::invalid("the request body is not a JSON object; send {\"model\": …, …}")
        })?;
        Ok(Self { object, prefix: String::new() })
    }

    fn of(object: &'a Map<String, Value>, prefix: String) -> Self {
        Self { object, prefix }
    }

    /// The path of a field.
    pub fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// A field that is there and not null.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    /// An error about a field.
    pub fn error(&self, name: &str, needed: &str) -> ApiError {
        let path = self.path(name);
        let got = self.get(name).map_or_else(|| "nothing".into(), shown);
        ApiError::field(&path, format!("{path} must be {needed}, but is {got}"))
    }

    fn typed<T>(
        &self,
        name: &str,
        needed: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| self.error(name, needed)),
        }
    }

    pub fn bool(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", Value::as_bool)
    }

    pub fn string(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.typed(name, "a string", Value::as_str)
    }

    pub fn array(&self, name: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        self.typed(name, "an array", Value::as_array)
    }

    pub fn object(&self, name: &str) -> Result<Option<Fields<'a>>, ApiError> {
        let object = self.typed(name, "an object", Value::as_object)?;
        Ok(object.map(|object| Fields::of(object, format!("{}.", self.path(name)))))
    }

    /// A number within a range.
    pub fn number(&self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let needed = format!("a number from {} to {}", range.start(), range.end());
        self.typed(name, &needed, |value| value.as_f64().filter(|x| range.contains(x)))
    }

    /// A whole number within a range.
    pub fn integer(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let needed = format!("a whole number from {} to {}", range.start(), range.end());
        self.typed(name, &needed, |value| value.as_i64().filter(|n| range.contains(n)))
    }

    /// The object itself.
    pub fn map(&self) -> &'a Map<String, Value> {
        self.object
    }
}

/// A value in an error, not too long.
fn shown(value: &Value) -> String {
    let text = match value {
        Value::Array(_) => return "an array".into(),
        Value::Object(_) => return "an object".into(),
        other => other.to_string(),
    };
    match text.char_indices().nth(60) {
        None => text,
        Some((at, _)) => format!("{}…", &text[..at]),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn types_are_strict_and_null_is_absent() {
        let body = json!({"n": 1, "x": 1.5, "f": 1.0, "s": "1", "b": true, "z": null, "big": 1e30, "o": {"n": "x"}});
        let fields = Fields::root(&body).unwrap();
        assert_eq!(fields.integer("n", 0..=5).unwrap(), Some(1));
        assert_eq!(fields.number("n", 0.0..=5.0).unwrap(), Some(1.0));
        for name in ["x", "f", "s", "b", "big"] {
            assert!(fields.integer(name, i64::MIN..=i64::MAX).is_err(), "{name}");
        }
        for name in ["s", "b"] {
            assert!(fields.number(name, f64::MIN..=f64::MAX).is_err(), "{name}");
        }
        assert!(fields.bool("n").is_err());
        assert!(fields.integer("n", 2..=5).is_err());
        assert_eq!(fields.bool("z").unwrap(), None);
        assert_eq!(fields.string("none").unwrap(), None);
        let inner = fields.object("o").unwrap().unwrap();
        let error = inner.integer("n", 0..=1).unwrap_err().body();
        assert_eq!(error["error"]["param"], "o.n");
        assert!(Fields::root(&json!([])).is_err());
    }
}
