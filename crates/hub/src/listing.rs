//! What a repository holds.

use serde_json::Value;

use crate::client::{Again, Failed, Hub, escape};
use crate::error::HubError;
use crate::spec::{Spec, is_commit, is_hex};

/// Longest listing that is read.
const MAX_LISTING: u64 = 32 << 20;
/// Most files of a repository.
const MAX_FILES: usize = 50_000;
/// Longest file: larger than any disk that a checkpoint is put on.
const MAX_FILE: u64 = 1 << 44;

/// The sum that a file's bytes must have; it is also the name of its blob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Sum {
    /// SHA-256 of a large file (LFS).
    Sha256(String),
    /// What git calls a small file: SHA-1 of a header and its bytes.
    Git(String),
}

impl Sum {
    pub fn text(&self) -> &str {
        match self {
            Self::Sha256(text) | Self::Git(text) => text,
        }
    }
}

/// A file of a repository that a checkpoint needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RemoteFile {
    pub name: String,
    pub size: u64,
    pub sum: Sum,
}

/// The files of one commit that a checkpoint needs, by name.
#[derive(Debug)]
pub(crate) struct Listing {
    pub commit: String,
    pub files: Vec<RemoteFile>,
}

impl Hub {
    /// Asks what a revision of a repository holds.
    pub(crate) fn listing(&self, spec: &Spec) -> Result<Listing, Failed> {
        let (org, name) = (spec.repo.org(), spec.repo.name());
        let revision = escape(spec.revision());
        let url = self.url(&format!("/api/models/{org}/{name}/revision/{revision}?blobs=true"));
        let what = spec.to_string();
        let mut answer = self.get(&url, &what, &[])?.last;
        let bad =
            |problem: String| HubError::Answer { host: self.host(), what: what.clone(), problem };
        let body = answer.body_mut().with_config().limit(MAX_LISTING).read_to_vec();
        let body = body.map_err(|error| match error {
            ureq::Error::BodyExceedsLimit(_) => bad("the list of files is too long".into()).into(),
            error => Failed { error: bad(format!("it broke off: {error}")), again: Again::Soon },
        })?;
        Ok(parse(&body).map_err(bad)?)
    }
}

fn parse(body: &[u8]) -> Result<Listing, String> {
    let value: Value = serde_json::from_slice(body).map_err(|error| {
        match body.trim_ascii_start().starts_with(b"<") {
            true => "it is a web page".into(),
            false => format!("it is not JSON ({error})"),
        }
    })?;
    let commit = value["sha"].as_str().filter(|c| is_commit(c)).ok_or("it names no commit")?;
    let entries = value["siblings"].as_array().ok_or("it lists no files")?;
    if entries.len() > MAX_FILES {
        return Err("it lists too many files".into());
    }
    let mut files: Vec<RemoteFile> = Vec::new();
    for entry in entries {
        let name = entry["rfilename"].as_str().ok_or("a file has no name")?;
        if !is_safe(name) {
            let shown: String = name.escape_default().take(80).collect();
            return Err(format!("it names a file \"{shown}\", which leads out of the folder"));
        }
        if is_wanted(name) {
            files.push(file(name, entry)?);
        }
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some(pair) = files.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(format!("it lists {} twice", pair[0].name));
    }
    Ok(Listing { commit: commit.into(), files })
}

fn file(name: &str, entry: &Value) -> Result<RemoteFile, String> {
    let lfs = &entry["lfs"];
    let size = lfs["size"].as_u64().or(entry["size"].as_u64());
    let size = size.filter(|s| *s <= MAX_FILE).ok_or(format!("{name} has no possible size"))?;
    let sha256 = lfs["sha256"].as_str().or(lfs["oid"].as_str());
    let sha256 = sha256.map(|s| s.trim_start_matches("sha256:"));
    let git = entry["blobId"].as_str().or(entry["oid"].as_str());
    let sum = match (sha256, git) {
        (Some(sum), _) if is_hex(sum, 64) => Sum::Sha256(sum.into()),
        (None, Some(sum)) if is_hex(sum, 40) => Sum::Git(sum.into()),
        _ => return Err(format!("{name} has no checksum")),
    };
    Ok(RemoteFile { name: name.into(), size, sum })
}

/// Whether a path stays inside the folder on every system.
fn is_safe(path: &str) -> bool {
    let bad = |c: char| c.is_control() || c == '\\' || c == ':';
    let part = |p: &str| !p.is_empty() && p != "." && p != "..";
    path.len() <= 1000 && !path.contains(bad) && path.split('/').all(part)
}

/// Whether a checkpoint needs the file: those at the top with configuration, template, tokenizer or weights.
fn is_wanted(name: &str) -> bool {
    let ends = [".json", ".jinja", ".safetensors"];
    let names = ["merges.txt", "vocab.txt", "tokenizer.model"];
    !name.contains('/')
        && !name.starts_with('.')
        && (ends.iter().any(|end| name.ends_with(end)) || names.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(siblings: &str) -> Result<Listing, String> {
        parse(format!(r#"{{"sha":"{}","siblings":[{siblings}]}}"#, "0a".repeat(20)).as_bytes())
    }

    #[test]
    fn wanted_files() {
        let git = "1".repeat(40);
        let sha = "2".repeat(64);
        let entry = |name: &str| format!(r#"{{"rfilename":"{name}","size":3,"blobId":"{git}"}}"#);
        let lfs = format!(
            r#"{{"rfilename":"model.safetensors","size":9,"blobId":"{git}","lfs":{{"sha256":"{sha}","size":9}}}}"#
        );
        let oid =
            format!(r#"{{"rfilename":"b.safetensors","lfs":{{"oid":"sha256:{sha}","size":8}}}}"#);
        let others = [
            "README.md",
            "onnx/config.json",
            "a.gguf",
            ".gitattributes",
            ".x.json",
            "a.bin",
            "a.py",
        ];
        let names = ["config.json", "chat_template.jinja", "merges.txt"];
        let all: Vec<String> =
            names.iter().chain(&others).map(|n| entry(n)).chain([lfs, oid]).collect();
        let listing = listing(&all.join(",")).unwrap();
        let got: Vec<(&str, u64)> =
            listing.files.iter().map(|f| (f.name.as_str(), f.size)).collect();
        let want = [
            ("b.safetensors", 8),
            ("chat_template.jinja", 3),
            ("config.json", 3),
            ("merges.txt", 3),
            ("model.safetensors", 9),
        ];
        assert_eq!(got, want);
        assert_eq!(listing.files[0].sum, Sum::Sha256(sha.clone()));
        assert_eq!(listing.files[2].sum, Sum::Git(git));
    }

    #[test]
    fn hostile_listings() {
        for name in [
            "../x.json",
            "a/../../x.json",
            "/etc/x.json",
            "..\\\\x.json",
            "c:x.json",
            "",
            "a//x.json",
            "./x.json",
            "x\\u0000.json",
            "a/./x.json",
            "\\n.json",
        ] {
            let error = listing(&format!(r#"{{"rfilename":"{name}","size":1}}"#)).unwrap_err();
            assert!(error.contains("leads out of the folder"), "{name}: {error}");
        }
        let sum = format!(r#""blobId":"{}""#, "1".repeat(40));
        for (entry, says) in [
            (r#"{"size":1}"#.into(), "no name"),
            (r#"{"rfilename":"a.json","size":1}"#.into(), "no checksum"),
            (r#"{"rfilename":"a.json","size":1,"blobId":"../../x"}"#.into(), "no checksum"),
            (
                r#"{"rfilename":"a.json","size":1,"lfs":{"sha256":"../x","size":1}}"#.into(),
                "no checksum",
            ),
            (format!(r#"{{"rfilename":"a.json","size":-1,{sum}}}"#), "size"),
            (format!(r#"{{"rfilename":"a.json","size":18446744073709551615,{sum}}}"#), "size"),
            (format!(r#"{{"rfilename":"a.json",{sum}}}"#), "size"),
            (
                format!(
                    r#"{{"rfilename":"a.json","size":1,{sum}}},{{"rfilename":"a.json","size":1,{sum}}}"#
                ),
                "twice",
            ),
        ] {
            let error = listing(&entry).unwrap_err();
            assert!(error.contains(says), "{entry}: {error}");
        }
        for (body, says) in [
            ("", "not JSON"),
            ("  <!DOCTYPE html>", "web page"),
            ("[]", "commit"),
            (r#"{"sha":"../../x","siblings":[]}"#, "commit"),
            (r#"{"sha":"0000000000000000000000000000000000000000"}"#, "no files"),
        ] {
            let error = parse(body.as_bytes()).unwrap_err();
            assert!(error.contains(says), "{body}: {error}");
        }
    }
}
