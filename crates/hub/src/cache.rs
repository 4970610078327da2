//! What is in the cache.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::HubError;
use crate::spec::{Repo, Spec, is_commit};

const INDEX: &str = "model.safetensors.index.json";
/// Longest index that is read.
const MAX_INDEX: u64 = 64 << 20;

/// A cache folder in the layout of `huggingface_hub`.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
}

/// One snapshot of a model in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedModel {
    /// `ORG/NAME`.
    pub id: String,
    /// Branches and tags that name this snapshot.
    pub revisions: Vec<String>,
    /// The commit.
    pub commit: String,
    /// Its folder.
    pub path: PathBuf,
    /// Bytes of the files that are there.
    pub bytes: u64,
    /// Files that a checkpoint needs and that are not there; empty if it is complete.
    pub missing: Vec<String>,
}

impl Cache {
    /// The cache in a folder, which need not exist.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The cache that the environment names, as `huggingface_hub` would choose it: `HF_HUB_CACHE`,
    /// `HF_HOME/hub`, `XDG_CACHE_HOME/huggingface/hub` or `~/.cache/huggingface/hub`.
    pub fn from_env(var: impl Fn(&str) -> Option<OsString>) -> Result<Self, HubError> {
        let path = |name: &str| var(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let home = || path("HOME").or_else(|| path("USERPROFILE"));
        let shared = || path("XDG_CACHE_HOME").or_else(|| home().map(|h| h.join(".cache")));
        path("HF_HUB_CACHE")
            .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| path("HF_HOME").map(|h| h.join("hub")))
            .or_else(|| shared().map(|c| c.join("huggingface").join("hub")))
            .map(Self::new)
            .ok_or(HubError::NoCacheFolder)
    }

    /// Its folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Bytes free where it lies, or where it would be made.
    pub fn free_space(&self) -> Option<u64> {
        let existing = self.root.ancestors().find(|dir| dir.is_dir())?;
        fs4::available_space(existing).ok()
    }

    /// The folder of a model.
    pub(crate) fn repo(&self, repo: &Repo) -> PathBuf {
        self.root.join(repo.folder())
    }

    /// The folder of a complete snapshot.
    ///
    /// # Errors
    /// [`NotCached`](HubError::NotCached) and [`Incomplete`](HubError::Incomplete).
    pub fn find(&self, spec: &Spec) -> Result<PathBuf, HubError> {
        let repo = self.repo(&spec.repo);
        let commit = commit(&repo, spec).ok_or_else(|| HubError::NotCached {
            id: spec.to_string(),
            cache: self.root.clone(),
        })?;
        let path = repo.join("snapshots").join(commit);
        match missing_files(&path).as_slice() {
            [] => Ok(path),
            missing => {
                Err(HubError::Incomplete { id: spec.to_string(), missing: in_words(missing) })
            }
        }
    }

    /// All snapshots of all models, by name. A folder that does not exist holds none.
    pub fn models(&self) -> Result<Vec<CachedModel>, HubError> {
        let mut models = Vec::new();
        for (name, path) in entries(&self.root)? {
            let Some(id) = name.strip_prefix("models--") else { continue };
            let id = id.replacen("--", "/", 1);
            let refs = refs(&path);
            for (commit, snapshot) in entries(&path.join("snapshots"))? {
                let named = refs.iter().filter(|(_, c)| *c == commit);
                models.push(CachedModel {
                    id: id.clone(),
                    revisions: named.map(|(name, _)| name.clone()).collect(),
                    bytes: bytes(&snapshot),
                    missing: missing_files(&snapshot),
                    commit,
                    path: snapshot,
                });
            }
        }
        Ok(models)
    }
}

/// What a checkpoint folder lacks: config.json, and the shards that its index or their own numbers name.
pub fn missing_files(dir: &Path) -> Vec<String> {
    let mut missing = Vec::new();
    let mut need = |name: String| {
        if !dir.join(&name).is_file() && !missing.contains(&name) {
            missing.push(name);
        }
    };
    need("config.json".into());
    let names: Vec<String> = match fs::read_dir(dir) {
        Ok(entries) => entries.flatten().filter_map(|e| e.file_name().into_string().ok()).collect(),
        Err(_) => Vec::new(),
    };
    let weights: Vec<&String> = names.iter().filter(|n| n.ends_with(".safetensors")).collect();
    if let Some(shards) = index_shards(&dir.join(INDEX)) {
        shards.into_iter().for_each(need);
    } else if weights.is_empty() {
        missing.push("*.safetensors".into());
    } else {
        weights.iter().for_each(|n| need((*n).clone()));
        weights.iter().flat_map(|n| siblings(n)).for_each(need);
    }
    missing
}

/// The files that an index names, sorted; `None` without a usable index.
pub(crate) fn index_shards(path: &Path) -> Option<Vec<String>> {
    if fs::metadata(path).ok()?.len() > MAX_INDEX {
        return None;
    }
    let index: Value = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    let map = index["weight_map"].as_object().filter(|map| !map.is_empty())?;
    let mut shards: Vec<String> =
        map.values().map(|v| v.as_str().map(str::to_owned)).collect::<Option<_>>()?;
    shards.sort();
    shards.dedup();
    Some(shards)
}

/// All names of a numbered series: `model-00002-of-00003.safetensors` is one of three.
fn siblings(name: &str) -> Vec<String> {
    let parse = || {
        let (head, total) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
        let (head, _) = head.rsplit_once('-')?;
        let digits = total.len();
        let count: usize = total.parse().ok().filter(|n| (1..=9999).contains(n))?;
        Some((1..=count).map(|i| format!("{head}-{i:0digits$}-of-{total}.safetensors")).collect())
    };
    parse().unwrap_or_default()
}

fn in_words(missing: &[String]) -> String {
    match missing {
        [one] => format!("{one} is"),
        [one, two] => format!("{one} and {two} are"),
        [one, rest @ ..] => format!("{one} and {} other files are", rest.len()),
        [] => "nothing is".into(),
    }
}

/// The commit that a spec means in this cache.
fn commit(repo: &Path, spec: &Spec) -> Option<String> {
    let snapshots = entries(&repo.join("snapshots")).ok()?;
    let has = |commit: &str| snapshots.iter().any(|(name, _)| name == commit);
    let named = fs::read_to_string(repo.join("refs").join(spec.revision())).ok();
    if let Some(commit) = named.map(|c| c.trim().to_owned()).filter(|c| is_commit(c) && has(c)) {
        return Some(commit);
    }
    let one = |found: Vec<&(String, PathBuf)>| match found.as_slice() {
        [(name, _)] => Some(name.clone()),
        _ => None,
    };
    match &spec.revision {
        // The first download has not come to an end: there is one snapshot and no ref.
        None => one(snapshots.iter().collect()),
        Some(r) if r.len() >= 7 => {
            one(snapshots.iter().filter(|(n, _)| n.starts_with(r)).collect())
        }
        Some(_) => None,
    }
}

/// Names and commits of the refs of a model, at any depth (`refs/pr/1`).
fn refs(repo: &Path) -> Vec<(String, String)> {
    fn collect(dir: &Path, prefix: &str, depth: usize, out: &mut Vec<(String, String)>) {
        for (name, path) in entries(dir).unwrap_or_default() {
            let name = format!("{prefix}{name}");
            if path.is_dir() && depth < 4 {
                collect(&path, &format!("{name}/"), depth + 1, out);
            } else if let Ok(commit) = fs::read_to_string(&path) {
                out.push((name, commit.trim().to_owned()));
            }
        }
    }
    let mut refs = Vec::new();
    collect(&repo.join("refs"), "", 0, &mut refs);
    refs
}

/// The entries of a folder, sorted; none if there is no such folder.
fn entries(dir: &Path) -> Result<Vec<(String, PathBuf)>, HubError> {
    let read = match fs::read_dir(dir) {
        Err(e) if [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory].contains(&e.kind()) => {
            return Ok(Vec::new());
        }
        read => read.map_err(|e| HubError::io(dir, e))?,
    };
    let mut entries: Vec<(String, PathBuf)> = read
        .flatten()
        .filter_map(|e| Some((e.file_name().into_string().ok()?, e.path())))
        .filter(|(name, _)| !name.starts_with('.'))
        .collect();
    entries.sort();
    Ok(entries)
}

fn bytes(dir: &Path) -> u64 {
    let size = |(_, path): &(String, PathBuf)| match fs::metadata(path) {
        Ok(meta) if meta.is_dir() => bytes(path),
        Ok(meta) => meta.len(),
        Err(_) => 0,
    };
    entries(dir).unwrap_or_default().iter().map(size).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    #[test]
    fn what_a_checkpoint_lacks() {
        let index =
            r#"{"weight_map":{"x":"b.safetensors","y":"a.safetensors","z":"a.safetensors"}}"#;
        let (config, one) = (("config.json", "{}"), ("model.safetensors", ""));
        for (files, want) in [
            (vec![], vec!["config.json", "*.safetensors"]),
            (vec![config, one], vec![]),
            (vec![config], vec!["*.safetensors"]),
            (vec![one], vec!["config.json"]),
            (vec![config, (INDEX, index)], vec!["a.safetensors", "b.safetensors"]),
            (vec![config, (INDEX, index), ("a.safetensors", ""), ("b.safetensors", "")], vec![]),
            (vec![config, (INDEX, "damaged"), one], vec![]),
            (
                vec![config, ("m-00002-of-00003.safetensors", "")],
                vec!["m-00001-of-00003.safetensors", "m-00003-of-00003.safetensors"],
            ),
            (vec![config, ("m-1-of-99999999999.safetensors", "")], vec![]),
        ] {
            assert_eq!(missing_files(folder(&files).path()), want, "{files:?}");
        }
        assert_eq!(missing_files(Path::new("/no/such")).len(), 2);
    }

    #[test]
    fn folders_of_the_environment() {
        let root = |vars: &[(&str, &str)]| {
            let find = |name: &str| vars.iter().find(|(k, _)| *k == name).map(|(_, v)| v.into());
            Cache::from_env(find).map(|c| c.root().to_str().unwrap().to_owned()).ok()
        };
        let all =
            [("HF_HUB_CACHE", "/a"), ("HF_HOME", "/b"), ("XDG_CACHE_HOME", "/c"), ("HOME", "/d")];
        let want = ["/a", "/b/hub", "/c/huggingface/hub", "/d/.cache/huggingface/hub"];
        for (i, want) in want.iter().enumerate() {
            assert_eq!(root(&all[i..]).as_deref(), Some(*want));
        }
        assert_eq!(root(&[("HF_HOME", ""), ("HOME", "/d")]).as_deref(), Some(want[3]));
        assert_eq!(root(&[]), None);
    }

    #[test]
    fn a_cache_with_all_sorts_of_things() {
        let (a, b) = ("a".repeat(40), "b".repeat(40));
        let files = [
            (format!("models--O--M/snapshots/{a}/config.json"), "{}"),
            (format!("models--O--M/snapshots/{a}/model.safetensors"), "1234"),
            (format!("models--O--M/snapshots/{b}/config.json"), "{}"),
            ("models--O--M/refs/main".into(), a.as_str()),
            ("models--O--M/refs/evil".into(), "../../../etc"),
            ("models--gpt2/refs/main".into(), "x"),
            (format!("models--gpt2/snapshots/{b}/x/y.bin"), "12"),
            ("datasets--O--D/refs/main".into(), "x"),
            (".locks/models--O--M/x".into(), ""),
            ("models--file".into(), ""),
        ];
        let files: Vec<(&str, &str)> = files.iter().map(|(n, t)| (n.as_str(), *t)).collect();
        let dir = folder(&files);
        let cache = Cache::new(dir.path());
        let models = cache.models().unwrap();
        let shown: Vec<_> = models
            .iter()
            .map(|m| (m.id.as_str(), m.bytes, m.missing.len(), m.revisions.len()))
            .collect();
        assert_eq!(shown, [("O/M", 6, 0, 1), ("O/M", 2, 1, 0), ("gpt2", 2, 2, 0)]);
        let find = |spec: &str| cache.find(&spec.parse().unwrap());
        assert!(find("O/M").unwrap().ends_with(&a) && find("O/M@aaaaaaa").unwrap().ends_with(&a));
        assert!(matches!(find("O/M@bbbbbbb"), Err(HubError::Incomplete { .. })));
        for none in ["O/M@aaaaaa", "O/M@evil", "O/N", "O/M@v1"] {
            assert!(matches!(find(none), Err(HubError::NotCached { .. })), "{none}");
        }
        assert!(Cache::new("/no/such").models().unwrap().is_empty());
        assert!(Cache::new("/no/such").free_space() > Some(0));
    }
}
