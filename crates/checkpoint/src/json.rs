//! JSON objects without duplicate keys.

use std::cell::RefCell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::error::JsonProblem;

/// Parses one JSON object, refusing a key that occurs twice in any object inside it:
/// `serde_json` keeps the last of the two, which could be a wrong number.
///
/// # Errors
///
/// Bytes that are not UTF-8, bad syntax, nesting too deep, another type, a key that is there twice.
pub fn parse_json_object(bytes: &[u8]) -> Result<Map<String, Value>, JsonProblem> {
    let text = std::str::from_utf8(bytes)
        .map_err(|error| JsonProblem::NotUtf8 { at: error.valid_up_to() })?;
    let duplicate = RefCell::new(None);
    let mut parser = serde_json::Deserializer::from_str(text);
    let parsed = UniqueKeys { duplicate: &duplicate }
        .deserialize(&mut parser)
        .and_then(|value| parser.end().map(|()| value));
    match (parsed, duplicate.into_inner()) {
        (_, Some(key)) => Err(JsonProblem::DuplicateKey(key)),
        (Ok(Value::Object(object)), None) => Ok(object),
        (Ok(_), None) => Err(JsonProblem::NotAnObject),
        (Err(error), None) => Err(JsonProblem::Syntax(error.to_string())),
    }
}

/// Builds a [`Value`]; the first duplicate key is left in `duplicate`.
#[derive(Clone, Copy)]
struct UniqueKeys<'a> {
    duplicate: &'a RefCell<Option<String>>,
}

impl<'de> DeserializeSeed<'de> for UniqueKeys<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for UniqueKeys<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if object.contains_key(&key) {
                self.duplicate.replace(Some(key));
                return Err(A::Error::custom("duplicate key"));
            }
            object.insert(key, entries.next_value_seed(self)?);
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_as_serde_json_on_good_input() {
        let text =
            r#" {"a":[1,-2,3.5,1e400,18446744073709551615],"b":{"c":null,"d":true,"é":"\u00e9"}} "#;
        let text = text.replace("1e400", "1e40");
        let expected: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(Value::Object(parse_json_object(text.as_bytes()).unwrap()), expected);
    }

    #[test]
    fn duplicate_keys_at_any_depth() {
        for text in [
            r#"{"k":1,"k":1}"#,
            r#"{"a":[{"k":1,"b":2,"k":3}]}"#,
            // Equal only after the escape is decoded.
            "{\"k\":1,\"\\u006b\":2}",
        ] {
            let problem = parse_json_object(text.as_bytes()).unwrap_err();
            assert_eq!(problem, JsonProblem::DuplicateKey("k".into()), "{text}");
        }
        assert!(parse_json_object(br#"{"k":{"k":1}}"#).is_ok(), "other objects may reuse a key");
    }

    #[test]
    fn not_an_object() {
        for text in ["1", "[]", "null", "\"x\""] {
            assert_eq!(parse_json_object(text.as_bytes()), Err(JsonProblem::NotAnObject));
        }
    }

    #[test]
    fn bad_syntax_and_deep_nesting_are_errors() {
        let deep = format!("{}{}", "{\"a\":".repeat(100_000), "[".repeat(100_000));
        for text in ["", "{", "{}x", "{\"a\":NaN}", deep.as_str()] {
            assert!(matches!(parse_json_object(text.as_bytes()), Err(JsonProblem::Syntax(_))));
        }
        let Err(JsonProblem::Syntax(message)) = parse_json_object(deep.as_bytes()) else {
            unreachable!()
        };
        assert!(message.contains("recursion limit"), "{message}");
        assert_eq!(parse_json_object(b"{\"\xff\":1}"), Err(JsonProblem::NotUtf8 { at: 2 }));
    }
}
