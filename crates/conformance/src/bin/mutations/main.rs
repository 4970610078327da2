//! Plants the classic mistakes of implementing this architecture in the shipping source, one after
//! another, and checks that a golden test fails for each.
//!
//! ```text
//! mutations               all of them
//! mutations --sample N    N of them, spread over the list
//! mutations NAME...       those whose name contains one of the words
//! ```
//!
//! The workspace is copied to `target/mutations`; the source itself is never touched. A mistake whose text
//! is no longer found in the source is an error: the list must follow the code.

mod list;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use list::{MUTATIONS, Mutation};

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let chosen = match choose(&words) {
        Ok(chosen) => chosen,
        Err(message) => {
            eprintln!("mutations: {message}");
            return ExitCode::from(2);
        }
    };
    match run(&chosen) {
        Ok(survivors) if survivors.is_empty() => {
            println!("{} of {} mistakes caught", chosen.len(), chosen.len());
            ExitCode::SUCCESS
        }
        Ok(survivors) => {
            println!("no golden test sees: {}", survivors.join("; "));
            ExitCode::FAILURE
        }
        Err(message) => {
            eprintln!("mutations: {message}");
            ExitCode::FAILURE
        }
    }
}

fn choose(words: &[String]) -> Result<Vec<&'static Mutation>, String> {
    match words {
        [] => Ok(MUTATIONS.iter().collect()),
        [flag, n] if flag == "--sample" => {
            let n: usize = n.parse().map_err(|_| format!("--sample takes a number, not {n}"))?;
            let n = n.clamp(1, MUTATIONS.len());
            Ok((0..n).map(|i| &MUTATIONS[i * MUTATIONS.len() / n]).collect())
        }
        words => {
            let named = |m: &&Mutation| words.iter().any(|w| m.name.contains(w.as_str()));
            let found: Vec<&Mutation> = MUTATIONS.iter().filter(named).collect();
            match found.is_empty() {
                true => Err(format!("no mistake is named like {words:?}")),
                false => Ok(found),
            }
        }
    }
}

fn run(chosen: &[&'static Mutation]) -> Result<Vec<&'static str>, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .ok_or("the workspace is not where it was built")?;
    let copy = root.join("target/mutations/source");
    copy_workspace(root, &copy)?;
    for mutation in MUTATIONS {
        for edit in mutation.edits {
            edited(&copy, edit)?;
        }
    }
    println!("baseline");
    if !golden_tests_pass(&copy)? {
        return Err("the golden tests fail without any mistake".into());
    }
    let mut survivors = Vec::new();
    for mutation in chosen {
        let start = Instant::now();
        let mut originals = Vec::new();
        for edit in mutation.edits {
            let path = copy.join(edit.file);
            let text = edited(&copy, edit)?;
            originals.push((path.clone(), read(&path)?));
            write(&path, &text)?;
        }
        let passes = golden_tests_pass(&copy)?;
        // In reverse: several edits of one file nest.
        for (path, text) in originals.into_iter().rev() {
            write(&path, &text)?;
        }
        let verdict = if passes { "NOT SEEN" } else { "caught" };
        println!("{verdict:>8}  {:5.1} s  {}", start.elapsed().as_secs_f32(), mutation.name);
        if passes {
            survivors.push(mutation.name);
        }
    }
    Ok(survivors)
}

/// The file's text with the edit made; its old text must be there exactly once.
fn edited(copy: &Path, edit: &list::Edit) -> Result<String, String> {
    let path = copy.join(edit.file);
    let text = read(&path)?;
    match text.matches(edit.from).count() {
        1 => Ok(text.replacen(edit.from, edit.to, 1)),
        n => Err(format!("{}: the text to change is there {n} times:\n{}", edit.file, edit.from)),
    }
}

/// Builds and runs the golden tests. A build that fails is an error: it says nothing of the tests.
fn golden_tests_pass(copy: &Path) -> Result<bool, String> {
    let cargo = |args: &[&str]| {
        Command::new(env!("CARGO"))
            .args(["test", "--quiet", "-p", "lily-conformance", "--test", "golden"])
            .args(args)
            .current_dir(copy)
            .env("CARGO_TARGET_DIR", copy.with_file_name("build"))
            .stdin(Stdio::null())
            .output()
            .map_err(|e| format!("cargo does not start: {e}"))
    };
    let build = cargo(&["--no-run"])?;
    if !build.status.success() {
        return Err(format!("the build fails:\n{}", String::from_utf8_lossy(&build.stderr)));
    }
    Ok(cargo(&[])?.status.success())
}

fn copy_workspace(root: &Path, copy: &Path) -> Result<(), String> {
    std::fs::create_dir_all(copy).map_err(|e| format!("{}: {e}", copy.display()))?;
    let keep = ["Cargo.toml", "Cargo.lock", "crates", "models"];
    for name in keep {
        copy_tree(&root.join(name), &copy.join(name))?;
    }
    Ok(())
}

/// Copies what differs, so that a build of an earlier run stays warm, and deletes what the source lacks: a
/// file of an earlier run would be compiled with the rest. `to` lies in the copy, never in the source.
fn copy_tree(from: &Path, to: &Path) -> Result<(), String> {
    let fail = |path: &Path| {
        let path = path.display().to_string();
        move |e: std::io::Error| format!("{path}: {e}")
    };
    if from.is_dir() {
        std::fs::create_dir_all(to).map_err(fail(to))?;
        let entries = std::fs::read_dir(from).map_err(fail(from))?;
        let paths: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
        for old in std::fs::read_dir(to).map_err(fail(to))?.filter_map(Result::ok) {
            if !from.join(old.file_name()).exists() {
                let old = old.path();
                match old.is_dir() {
                    true => std::fs::remove_dir_all(&old),
                    false => std::fs::remove_file(&old),
                }
                .map_err(fail(&old))?;
            }
        }
        for path in paths {
            if let Some(name) = path.file_name() {
                copy_tree(&path, &to.join(name))?;
            }
        }
        return Ok(());
    }
    let bytes = std::fs::read(from).map_err(fail(from))?;
    if std::fs::read(to).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    std::fs::write(to, bytes).map_err(fail(to))
}

fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_what_the_source_is() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        let files = |list: &[&str]| {
            for name in list {
                std::fs::create_dir_all(from.join(name).parent().expect("a folder")).expect("made");
                write(&from.join(name), name).expect("written");
            }
        };
        files(&["a.rs", "old.rs", "sub/b.rs", "gone/c.rs"]);
        copy_tree(&from, &to).expect("copied");
        write(&to.join("a.rs"), "a mistake").expect("written");
        std::fs::remove_file(from.join("old.rs")).expect("removed");
        std::fs::remove_dir_all(from.join("gone")).expect("removed");
        copy_tree(&from, &to).expect("copied");
        assert_eq!(read(&to.join("a.rs")), Ok("a.rs".into()));
        assert_eq!(read(&to.join("sub/b.rs")), Ok("sub/b.rs".into()));
        assert!(!to.join("old.rs").exists() && !to.join("gone").exists());
        assert!(from.join("sub/b.rs").exists());
    }
}
