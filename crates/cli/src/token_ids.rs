//! Reading token ids and texts from files.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde_json::Value;

use crate::failure::Failure;

/// Longest file that is read: a context of millions of ids or a very long text.
const MAX_BYTES: u64 = 64 << 20;

const IDS_HINT: &str = "the file must hold a JSON array of token ids, such as [1, 2, 3]";

/// The text of a file, or of stdin for `-`.
pub fn read_text(path: &Path) -> Result<String, Failure> {
    let (name, read) = match path.as_os_str() == "-" {
        true => ("stdin".to_owned(), read_all(io::stdin().lock())),
        false => (path.display().to_string(), File::open(path).and_then(read_all)),
    };
    let bytes = read.map_err(|error| {
        Failure::new(
            format!("{name} cannot be read: {error}"),
            "check the path and its permissions; - stands for stdin",
        )
    })?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(Failure::new(
            format!("{name} is longer than {} MiB", MAX_BYTES >> 20),
            "give a shorter file",
        ));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::new(
            format!("{name} is not UTF-8 text (byte {at})"),
            "convert it to UTF-8, or check that it is the right file",
        )
    })
}

fn read_all(file: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The token ids of a file (or of stdin for `-`), all below `vocab`.
pub fn read_ids(path: &Path, vocab: usize) -> Result<Vec<u32>, Failure> {
    let text = read_text(path)?;
    let name = path.display();
    let bad = |what: String| Failure::new(format!("{name}: {what}"), IDS_HINT);
    let value: Value =
        serde_json::from_str(&text).map_err(|error| bad(format!("not JSON: {error}")))?;
    let Value::Array(entries) = value else {
        return Err(bad("it holds JSON, but not an array".into()));
    };
    if entries.is_empty() {
        return Err(bad("the array is empty".into()));
    }
    let mut ids = Vec::with_capacity(entries.len());
    for (position, entry) in entries.iter().enumerate() {
        match entry.as_u64().map(|id| (id, u32::try_from(id))) {
            Some((id, Ok(narrow))) if id < vocab as u64 => ids.push(narrow),
            Some((id, _)) => {
                return Err(Failure::new(
                    format!(
                        "{name}: token {id} at position {position} is outside the model's vocabulary of {vocab}"
                    ),
                    "check that the ids were made for this model",
                ));
            }
            None => {
                let mut shown = entry.to_string();
                if shown.chars().count() > 40 {
                    shown = shown.chars().take(40).chain("…".chars()).collect();
                }
                return Err(bad(format!("position {position} holds {shown}, not a token id")));
            }
        }
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_what_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ids.json");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            read_ids(&path, 10).map_err(|e| e.to_string())
        };
        assert_eq!(read(" [1,2, 9]\n"), Ok(vec![1, 2, 9]));
        for (text, want) in [
            ("", "not JSON"),
            ("[1,2", "not JSON"),
            ("{}", "not an array"),
            ("[]", "empty"),
            ("[1, -2]", "position 1 holds -2"),
            ("[1.5]", "position 0 holds 1.5"),
            ("[\"7\"]", "position 0 holds \"7\""),
            ("[3, 10]", "token 10 at position 1 is outside the model's vocabulary of 10"),
            ("[99999999999999]", "token 99999999999999"),
            ("[1e30]", "position 0"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(want) && error.contains("hint: "), "{text}: {error}");
        }
        let error = read_ids(&dir.path().join("none"), 10).unwrap_err().to_string();
        assert!(error.contains("cannot be read") && error.contains("hint: "), "{error}");
        std::fs::write(&path, [b'a', 0xFF]).unwrap();
        let error = read_text(&path).unwrap_err().to_string();
        assert!(error.contains("byte 1") && error.contains("hint: "), "{error}");
    }
}
