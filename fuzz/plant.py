#!/usr/bin/env python3
"""Plants a panic behind the last branch of each fuzzed parser, in the copy of the source at the given path."""
import sys
from pathlib import Path

# File, the text of the branch (once in the file), and what takes its place.
PLANTS = {
    "template": ("crates/chat/src/source.rs", "self.append(start.close, start.end, &late);", "panic!(\"planted: template\");"),
    "tokenizer": ("crates/chat/src/tokenizer.rs", "return Err(contradiction(TOKENIZER_FILE, token.id, &token.content));", "panic!(\"planted: tokenizer\");"),
    "detokenizer": ("crates/chat/src/detokenizer.rs", "        if !self.waiting.is_empty() {", "        assert!(self.waiting.len() != 3, \"planted: detokenizer\");\n        if !self.waiting.is_empty() {"),
    "stop": ("crates/chat/src/stop.rs", "self.stopped_by = Some(index);", "assert!(index != 3, \"planted: stop\");\n                self.stopped_by = Some(index);"),
    "tools": ("crates/chat/src/tools/call.rs", "            State::Value(parameter) if parameter.closing.lacks_the_closer(VALUE_END) => {", "            State::Value(parameter) if parameter.closing.lacks_the_closer(VALUE_END) => {\n                panic!(\"planted: tools\");"),
    "reasoning": ("crates/chat/src/reasoning.rs", "            Some(Step::Done) => return Link::Closed,", "            Some(Step::Done) => panic!(\"planted: reasoning\"),"),
    "header": ("crates/checkpoint/src/header.rs", "false => Err(HeaderProblem::TrailingBytes { end: covered, file_len }),", "false => panic!(\"planted: header\"),"),
    "config": ("crates/model/src/rope.rs", "if sum(section) != Some(dims as u64 / 2) {", "if sum(section) != Some(dims as u64 / 2) {\n                panic!(\"planted: config\");"),
    "index": ("crates/checkpoint/src/checkpoint.rs", "Err(IndexProblem::TotalSize { indexed, actual: total_bytes })", "panic!(\"planted: index {indexed}\")"),
}

root = Path(sys.argv[1])
for target, (name, branch, planted) in PLANTS.items():
    path = root / name
    source = path.read_text()
    if source.count(branch) != 1:
        sys.exit(f"{name}: the branch for {target} is there {source.count(branch)} times and not once: {branch}")
    # Lints that a panic wakes are not the subject.
    head = "" if name.endswith("lib.rs") else "#![allow(unused, unreachable_code, clippy::all)]\n"
    lines = source.splitlines(keepends=True)
    documented = next((i for i, line in enumerate(lines) if not line.startswith("//!")), 0)
    path.write_text("".join(lines[:documented]) + head + "".join(lines[documented:]).replace(branch, planted))
