//! What `--model` means.

use std::path::{Path, PathBuf};

use lily_hub::{Cache, HubError, Spec};

use crate::failure::Failure;

/// Name that stands for the built-in model.
const DEMO: &str = "demo";

/// Where a model comes from.
#[derive(Debug, PartialEq, Eq)]
pub enum Source {
    /// The built-in model.
    Demo,
    /// A checkpoint folder, which need not exist.
    Folder(PathBuf),
}

/// A folder, `demo`, or an id in the cache. Nothing is ever downloaded.
pub fn resolve(name: Option<&Path>) -> anyhow::Result<Source> {
    let Some(name) = name else { return Ok(Source::Demo) };
    if name.is_dir() {
        return Ok(Source::Folder(name.to_owned()));
    }
    // `demo/` is a folder, which is not there.
    if name.as_os_str() == DEMO {
        return Ok(Source::Demo);
    }
    // What exists, and what is no id, is for the checkpoint to judge.
    let spec = name.to_str().filter(|_| !name.exists()).and_then(|n| n.parse::<Spec>().ok());
    let Some(spec) = spec else { return Ok(Source::Folder(name.to_owned())) };
    match cache()?.find(&spec) {
        Ok(folder) => Ok(Source::Folder(folder)),
        Err(error @ HubError::NotCached { .. }) => {
            Err(Failure::new(format!("there is no folder {spec}, and {error}"), error.hint())
                .into())
        }
        Err(error) => Err(hub_failure(&error).into()),
    }
}

/// The cache that the environment names.
pub fn cache() -> Result<Cache, Failure> {
    Cache::from_env(|name| std::env::var_os(name)).map_err(|error| hub_failure(&error))
}

/// An error of the hub with its hint.
pub fn hub_failure(error: &HubError) -> Failure {
    Failure::new(error.to_string(), error.hint())
}
