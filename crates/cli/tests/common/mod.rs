//! Running the built program.

#![allow(dead_code)]

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

/// A finished run.
#[derive(Debug)]
pub struct Run {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

pub fn command<S: AsRef<OsStr>>(args: &[S]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lily"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    isolate(&mut command, Path::new("/no/such/folder"));
    command
}

/// Keeps the cache, the history and the settings of the user out of a test.
pub fn isolate(command: &mut Command, home: &Path) {
    for name in ["HF_HOME", "HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "NO_COLOR", "LILY_API_KEY"]
    {
        command.env_remove(name);
    }
    command.env("HF_HUB_CACHE", home.join("hub")).env("XDG_STATE_HOME", home.join("state"));
    command.env("COLUMNS", "100");
}

/// A run with the cache, the history and the home in `home`.
pub fn lily_at<S: AsRef<OsStr>>(home: &Path, args: &[S]) -> Run {
    let mut command = command(args);
    isolate(&mut command, home);
    finish(command.output().unwrap())
}

/// What a value looks like without its contents.
pub fn shape(value: &Value) -> Value {
    match value {
        Value::Null => "null".into(),
        Value::Bool(_) => "bool".into(),
        Value::Number(_) => "number".into(),
        Value::String(_) => "string".into(),
        Value::Array(items) => items.iter().take(1).map(shape).collect(),
        Value::Object(map) => map.iter().map(|(key, item)| (key.clone(), shape(item))).collect(),
    }
}

fn finish(output: std::process::Output) -> Run {
    let text = |bytes| String::from_utf8(bytes).expect("the program writes UTF-8");
    let run = Run {
        code: output.status.code(),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    };
    assert!(!run.stderr.contains("panicked"), "{run:?}");
    run
}

pub fn lily<S: AsRef<OsStr>>(args: &[S]) -> Run {
    finish(command(args).output().unwrap())
}

pub fn lily_with_stdin<S: AsRef<OsStr>>(args: &[S], stdin: &str) -> Run {
    feed(command(args), stdin)
}

/// Runs a command with text on stdin.
pub fn feed(mut command: Command, stdin: &str) -> Run {
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(stdin.as_bytes()).unwrap();
    finish(child.wait_with_output().unwrap())
}

/// The JSON that a successful run prints.
pub fn json<S: AsRef<OsStr>>(args: &[S]) -> Value {
    let run = lily(args);
    assert_eq!(run.code, Some(0), "{run:?}");
    serde_json::from_str(&run.stdout).unwrap_or_else(|e| panic!("{e}: {run:?}"))
}

/// A run that fails with this exit code, and says all of these.
pub fn fails<S: AsRef<OsStr>>(args: &[S], code: i32, says: &[&str]) {
    let run = lily(args);
    assert_eq!(run.code, Some(code), "{run:?}");
    assert!(run.stdout.is_empty(), "{run:?}");
    assert!(run.stderr.contains("error: "), "{run:?}");
    for part in says {
        assert!(run.stderr.contains(part), "{part:?} is missing: {run:?}");
    }
}

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub fn golden(name: &str) -> Value {
    let path = repository().join("models/demo/golden").join(name);
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

pub fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// A file that holds `text`, and its path.
pub fn file(dir: &tempfile::TempDir, name: &str, text: &str) -> String {
    let path = dir.path().join(name);
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// A copy of a fixture's checkpoint without some of its files.
pub fn fixture_without(dir: &tempfile::TempDir, fixture: &str, without: &[&str]) -> String {
    let source = repository().join("crates/conformance/fixtures").join(fixture);
    let copy = dir.path().join("checkpoint");
    fs::create_dir(&copy).unwrap();
    for entry in fs::read_dir(source.join("mlx")).unwrap() {
        let entry = entry.unwrap();
        if !without.iter().any(|w| entry.file_name() == OsStr::new(w)) {
            fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
        }
    }
    copy.to_str().unwrap().to_owned()
}
