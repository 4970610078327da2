//! Declared functions, and what their parameters may be.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

/// How far references and alternatives of a schema are followed.
const MAX_DEPTH: usize = 16;

/// JSON types that a parameter may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kinds(u8);

impl Kinds {
    const NULL: u8 = 1;
    const INTEGER: u8 = 2;
    const NUMBER: u8 = 4;
    const BOOLEAN: u8 = 8;
    const OBJECT: u8 = 16;
    const ARRAY: u8 = 32;
    /// Text, and nothing else.
    pub const STRING: Self = Self(64);

    fn has(self, kind: u8) -> bool {
        self.0 & kind != 0
    }

    fn of_name(name: &str) -> u8 {
        match name {
            "null" => Self::NULL,
            "integer" => Self::INTEGER,
            "number" => Self::NUMBER,
            "boolean" => Self::BOOLEAN,
            "object" => Self::OBJECT,
            "array" => Self::ARRAY,
            "string" => Self::STRING.0,
            _ => 0,
        }
    }

    /// What a schema allows; a schema that names no type allows text.
    fn of(schema: &Value, root: &Value) -> Self {
        match Self::collect(schema, root, &mut HashSet::new(), 0) {
            0 => Self::STRING,
            kinds => Self(kinds),
        }
    }

    /// The kinds of a schema. Each reference is followed once, wherever it stands: what it allows is counted
    /// already, and alternatives of references to alternatives would otherwise multiply.
    fn collect<'s>(
        schema: &'s Value,
        root: &'s Value,
        seen: &mut HashSet<&'s str>,
        depth: usize,
    ) -> u8 {
        if depth > MAX_DEPTH {
            return Self::STRING.0;
        }
        if let Some(reference) = schema["$ref"].as_str() {
            if !seen.insert(reference) {
                return 0;
            }
            let target = reference.strip_prefix('#').and_then(|path| root.pointer(path));
            return target
                .map_or(Self::STRING.0, |target| Self::collect(target, root, seen, depth + 1));
        }
        let kinds = match &schema["type"] {
            Value::String(name) => Self::of_name(name),
            Value::Array(names) => {
                names.iter().filter_map(Value::as_str).map(Self::of_name).fold(0, |a, b| a | b)
            }
            _ => 0,
        };
        let branches = ["anyOf", "oneOf"].into_iter().filter_map(|key| schema[key].as_array());
        let branches: Vec<&Value> = branches.flatten().collect();
        match (kinds, branches.as_slice()) {
            (0, []) => Self::STRING.0,
            (0, branches) => branches
                .iter()
                .fold(0, |kinds, branch| kinds | Self::collect(branch, root, seen, depth + 1)),
            (kinds, _) => kinds,
        }
    }

    /// The JSON of a value that the model wrote as text: the types that are allowed are tried in the order
    /// null, integer, number, boolean, object, array; what fits none is a string.
    pub fn json(self, text: &str) -> String {
        let trimmed = text.trim_matches([' ', '\t', '\r', '\n']);
        // Where text is allowed too, white space is part of it.
        let scalar = if self.has(Self::STRING.0) { text } else { trimmed };
        let number = scalar.trim() == scalar
            && serde_json::from_str::<Value>(scalar).is_ok_and(|value| value.is_number());
        let whole = scalar.parse::<i64>().is_ok() || scalar.parse::<u64>().is_ok();
        let nullable = self.has(Self::NULL) || !self.has(Self::STRING.0);
        if nullable && scalar.eq_ignore_ascii_case("null") {
            return "null".into();
        }
        // Digits and nested values are passed on as they were written, so that none are lost.
        if self.has(Self::INTEGER) && whole && number {
            return scalar.into();
        }
        if self.has(Self::NUMBER) && number {
            return scalar.into();
        }
        if self.has(Self::BOOLEAN) {
            for word in ["true", "false"] {
                if scalar.eq_ignore_ascii_case(word) {
                    return word.into();
                }
            }
        }
        for (kind, opens) in [(Self::OBJECT, '{'), (Self::ARRAY, '[')] {
            let fits = self.has(kind) && trimmed.starts_with(opens);
            if fits && serde_json::from_str::<Value>(trimmed).is_ok() {
                return trimmed.into();
            }
        }
        Value::from(text).to_string()
    }
}

/// A tool definition that is not one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("tools{place}: {problem}; send {{\"type\": \"function\", \"function\": {{\"name\": …}}}}")]
pub struct ToolsError {
    /// Where, as a path from `tools`.
    pub place: String,
    /// What is wrong there.
    pub problem: String,
}

/// The functions that a request declares.
#[derive(Debug, Clone, Default)]
pub struct Tools {
    /// Parameter schemas by function.
    functions: HashMap<String, Value>,
}

impl Tools {
    /// Reads definitions in OpenAI's form.
    ///
    /// # Errors
    ///
    /// A definition of another form. Description, parameters and anything else may be missing.
    pub fn new(definitions: &[Value]) -> Result<Self, ToolsError> {
        let mut functions = HashMap::new();
        for (index, tool) in definitions.iter().enumerate() {
            let error = |place: &str, problem: &str| ToolsError {
                place: format!("[{index}]{place}"),
                problem: problem.to_owned(),
            };
            match tool["type"].as_str() {
                Some("function") => {}
                Some(other) => {
                    return Err(error(".type", &format!("tools of type {other:?} are not known")));
                }
                None => return Err(error("", "it is no object with a type")),
            }
            let function = &tool["function"];
            if !function.is_object() {
                return Err(error(".function", "it is not an object"));
            }
            let name = function["name"].as_str().filter(|name| !name.is_empty());
            let name = name.ok_or_else(|| error(".function.name", "it is not a name"))?;
            if !matches!(function["parameters"], Value::Null | Value::Object(_)) {
                return Err(error(".function.parameters", "it is not a schema object"));
            }
            functions.insert(name.to_owned(), function["parameters"].clone());
        }
        Ok(Self { functions })
    }

    /// Whether a function of this name is declared.
    pub fn declares(&self, function: &str) -> bool {
        self.functions.contains_key(function)
    }

    /// Whether none is declared.
    pub fn is_empty(&self) -> bool {
        self.functions.is_empty()
    }

    /// What a parameter may be; text for what no schema names.
    pub(crate) fn kinds(&self, function: &str, parameter: &str) -> Kinds {
        let Some(root) = self.functions.get(function) else { return Kinds::STRING };
        match root["properties"].get(parameter) {
            Some(schema) => Kinds::of(schema, root),
            None => Kinds::STRING,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn converted(schema: Value, text: &str) -> String {
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": {
            "properties": {"v": schema}, "$defs": {"N": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}}}}});
        Tools::new(&[tool]).unwrap().kinds("f", "v").json(text)
    }

    #[test]
    fn values_by_schema() {
        let table = [
            (json!({"type": "integer"}), "10", "10"),
            (json!({"type": "integer"}), " -7\n", "-7"),
            (json!({"type": "integer"}), "18446744073709551615", "18446744073709551615"),
            (json!({"type": "integer"}), "007", "\"007\""),
            (json!({"type": "integer"}), "+5", "\"+5\""),
            (json!({"type": "integer"}), "1.0", "\"1.0\""),
            (json!({"type": "integer"}), "null", "null"),
            (json!({"type": "number"}), "1e-3", "1e-3"),
            (json!({"type": "number"}), "1e999", "\"1e999\""),
            (json!({"type": "number"}), "NaN", "\"NaN\""),
            (json!({"type": "boolean"}), "TRUE", "true"),
            (json!({"type": "boolean"}), "yes", "\"yes\""),
            (json!({"type": "string"}), "null", "\"null\""),
            (json!({"type": ["string", "null"]}), "Null", "null"),
            (json!({"type": ["string", "integer"]}), "5", "5"),
            (json!({"type": ["string", "integer"]}), " 5", "\" 5\""),
            (json!({"type": ["string", "number"]}), "5\n", "\"5\\n\""),
            (json!({"type": "array"}), " [1,\n 2.50]\n", "[1,\n 2.50]"),
            (json!({"type": "array"}), "['a']", "\"['a']\""),
            (json!({"type": "object"}), "[1]", "\"[1]\""),
            (json!({"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}), "3", "3"),
            (json!({"$ref": "#/$defs/Loop"}), "3", "\"3\""),
            (json!({"$ref": "https://example.invalid/x"}), "3", "\"3\""),
            (json!({"enum": [1, 2]}), "1", "\"1\""),
            (json!(true), "1", "\"1\""),
        ];
        for (schema, text, json) in table {
            assert_eq!(converted(schema.clone(), text), json, "{schema} {text:?}");
        }
    }

    #[test]
    fn alternatives_of_alternatives_do_not_multiply() {
        let mut defs = serde_json::Map::new();
        for level in 0..7 {
            let next = json!({"$ref": format!("#/$defs/{}", level + 1)});
            defs.insert(level.to_string(), json!({"anyOf": vec![next; 200]}));
        }
        defs.insert("7".into(), json!({"type": ["integer", "null"]}));
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": {
            "properties": {"v": {"$ref": "#/$defs/0"}, "w": {"anyOf": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/7"}, true]}},
            "$defs": defs}}});
        let tools = Tools::new(&[tool]).unwrap();
        assert_eq!(tools.kinds("f", "v").json(" 3\n"), "3");
        // The third alternative allows text too: white space is part of it.
        assert_eq!(tools.kinds("f", "w").json(" 3\n"), "\" 3\\n\"");
    }

    #[test]
    fn definitions_of_another_form_are_refused() {
        for bad in [
            json!("read"),
            json!({"a": 1}),
            json!({"type": "function"}),
            json!({"type": "function", "function": {}}),
            json!({"type": "function", "function": {"name": 5}}),
            json!({"type": "function", "function": {"name": "x", "parameters": "none"}}),
            json!({"type": "web_search"}),
        ] {
            let error = Tools::new(std::slice::from_ref(&bad)).unwrap_err();
            assert!(error.to_string().starts_with("tools[0]"), "{error}");
        }
    }
}
