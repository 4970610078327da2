#!/usr/bin/env python3
"""Writes each fuzz target as a test that replays folders of inputs, into the copy of the source at the given path."""
import re
import sys
from pathlib import Path

# The package whose dependencies a target needs, and the crates that it may name there.
HOMES = {
    "template": ("chat", ["lily_chat"]),
    "tokenizer": ("chat", ["lily_chat"]),
    "detokenizer": ("chat", ["lily_chat"]),
    "stop": ("chat", ["lily_chat"]),
    "tools": ("chat", ["lily_chat"]),
    "reasoning": ("chat", ["lily_chat"]),
    "header": ("checkpoint", ["lily_checkpoint"]),
    "index": ("checkpoint", ["lily_checkpoint"]),
    "config": ("model", ["lily_model"]),
}

HEAD = """#![allow(unused, missing_docs, clippy::all)]
macro_rules! fuzz_target {
    (|$data:ident: &[u8]| $body:block) => { fn one($data: &[u8]) $body };
    (|$data:ident: &str| $body:block) => {
        fn one(bytes: &[u8]) { if let Ok(text) = std::str::from_utf8(bytes) { of_text(text) } }
        fn of_text($data: &str) $body
    };
}
#[test]
fn replay() {
    for folder in std::env::var("REPLAY").unwrap().split(':') {
        for entry in std::fs::read_dir(folder).unwrap() {
            one(&std::fs::read(entry.unwrap().path()).unwrap());
        }
    }
}
"""


def main():
    root = Path(sys.argv[1])
    targets = root / "fuzz/fuzz_targets"
    for target, (home, crates) in HOMES.items():
        body = []
        for line in (targets / f"{target}.rs").read_text().splitlines():
            foreign = set(re.findall(r"\blily_\w+(?=::)", line)) - set(crates)
            if not line.startswith(("//!", "#![", "use libfuzzer_sys")) and not foreign:
                body.append(line)
        text = "\n".join(body).replace("mod tiny;", f'#[path = "{targets}/tiny.rs"]\nmod tiny;')
        text = text.replace('include_str!("', f'include_str!("{targets}/')
        (root / f"crates/{home}/tests/replay_{target}.rs").write_text(HEAD + text + "\n")
    # The half of the target `config` that belongs to another crate.
    (root / "crates/chat/tests/replay_defaults.rs").write_text(HEAD + """
fuzz_target!(|data: &[u8]| {
    if let Ok(config) = serde_json::from_slice::<serde_json::Value>(data) {
        let text = std::str::from_utf8(data).ok();
        let _ = lily_chat::generation_defaults(text, &config);
        let _ = lily_chat::find_template(None, text);
    }
});
""")


main()
