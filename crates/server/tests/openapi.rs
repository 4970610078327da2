//! docs/openapi.json and docs/api.md say what the code does.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value;

fn file(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn openapi() -> Value {
    serde_json::from_str(&file("../../docs/openapi.json")).unwrap()
}

/// The names of the fields that a source reads.
fn fields_read(source: &str) -> BTreeSet<String> {
    let source = file(source);
    let source = source.split("#[cfg(test)]").next().unwrap();
    let dense: String = source.chars().filter(|c| !c.is_whitespace()).collect();
    let kinds = ["get", "bool", "string", "array", "object", "integer", "number"];
    let calls = kinds.map(|kind| format!("fields.{kind}(\""));
    let helpers = ["number(\"".to_owned(), "read(\"".to_owned()];
    let mut names = BTreeSet::new();
    for call in calls.iter().chain(&helpers) {
        for (at, _) in dense.match_indices(call.as_str()) {
            let rest = &dense[at + call.len()..];
            names.insert(rest[..rest.find('"').unwrap()].to_owned());
        }
    }
    names
}

fn documented(schema: &str) -> BTreeSet<String> {
    let openapi = openapi();
    let properties = &openapi["components"]["schemas"][schema]["properties"];
    properties.as_object().unwrap().keys().cloned().collect()
}

#[test]
fn routes() {
    let mut described = BTreeSet::new();
    for (path, operations) in openapi()["paths"].as_object().unwrap() {
        for method in operations.as_object().unwrap().keys() {
            described.insert(format!("{} {path}", method.to_uppercase()));
        }
    }
    let routes: BTreeSet<String> =
        lily_server::ROUTES.iter().map(|(method, path)| format!("{method} {path}")).collect();
    assert_eq!(described, routes);
    let text = file("../../docs/api.md");
    for route in routes {
        assert!(text.contains(&format!("| `{route}` |")), "docs/api.md lacks {route}");
    }
}

#[test]
fn parameters() {
    let shared: BTreeSet<String> =
        ["src/sampling.rs", "src/model.rs"].into_iter().flat_map(fields_read).collect();
    assert!(shared.len() > 12, "{shared:?}");
    let text = file("../../docs/api.md");
    for (source, schema) in
        [("src/chat/request.rs", "ChatRequest"), ("src/completions.rs", "CompletionRequest")]
    {
        let read: BTreeSet<String> = fields_read(source).union(&shared).cloned().collect();
        assert_eq!(documented(schema), read, "{schema}");
        for name in read {
            assert!(text.contains(&format!("`{name}")), "docs/api.md lacks {name}");
        }
    }
}
