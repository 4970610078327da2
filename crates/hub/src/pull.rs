//! Downloading a model.

use std::path::PathBuf;
use std::time::Duration;

use crate::blob::Fetch;
use crate::cache::{Cache, index_shards};
use crate::client::Hub;
use crate::error::HubError;
use crate::listing::{Listing, RemoteFile};
use crate::spec::Spec;
use crate::store::Store;

const INDEX: &str = "model.safetensors.index.json";
/// Space that is left on the disk.
const SPARE: u64 = 64 << 20;

/// What a download tells while it runs.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The commit is known, and the files that are needed.
    Planned {
        /// The commit.
        commit: &'a str,
        /// Files.
        files: usize,
        /// Their bytes.
        bytes: u64,
        /// Bytes of them that are in the cache.
        present: u64,
    },
    /// A file begins.
    File {
        /// Its name.
        name: &'a str,
        /// Its bytes.
        size: u64,
        /// Bytes of it that are there.
        have: u64,
    },
    /// So many bytes of the file are there.
    At(u64),
    /// The file is whole and in its place.
    Done,
    /// Something failed and is tried again.
    Waiting {
        /// What failed.
        error: &'a HubError,
        /// Time until then.
        pause: Duration,
    },
}

/// A downloaded model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// The folder of the snapshot.
    pub path: PathBuf,
    /// The commit.
    pub commit: String,
    /// Files of the checkpoint.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes that were not in the cache before.
    pub downloaded: u64,
}

impl Hub {
    /// Downloads the files of a checkpoint into the cache: configuration, template, tokenizer and the shards that
    /// its index names. What is there already is not fetched again, what is there in part is continued.
    ///
    /// # Errors
    /// After any error the cache holds whole files and parts to continue from, and no ref to the commit.
    pub fn pull(
        &self,
        cache: &Cache,
        spec: &Spec,
        mut on: impl FnMut(Event<'_>),
    ) -> Result<Pulled, HubError> {
        if self.options.offline {
            return Err(HubError::Offline);
        }
        let listing = self.ask(spec, &mut on)?;
        let id = spec.to_string();
        let lacks = |what: &str| HubError::NoCheckpoint { id: id.clone(), what: what.into() };
        let weights = |f: &&RemoteFile| f.name.ends_with(".safetensors");
        if !listing.files.iter().any(|f| f.name == "config.json") {
            return Err(lacks("config.json"));
        }
        if !listing.files.iter().any(|f| weights(&f)) {
            return Err(lacks("*.safetensors files"));
        }
        let store = Store::open(cache.root(), &spec.repo.folder())?
            .ok_or_else(|| HubError::Busy { id: id.clone() })?;
        let job = Job { hub: self, spec, listing: &listing, store };
        let small: Vec<&RemoteFile> = listing.files.iter().filter(|f| !weights(f)).collect();
        let all: Vec<&RemoteFile> = listing.files.iter().filter(weights).collect();
        // Without the index it is not known which of the shards are needed; it is small itself.
        let mut downloaded =
            job.fetch(cache, small.iter().filter(|f| f.name == INDEX).copied(), &mut |_| {})?;
        let shards = job.needed(all)?;
        let files: Vec<&RemoteFile> = small.into_iter().chain(shards).collect();
        let bytes = files.iter().map(|f| f.size).sum();
        let present = files.iter().map(|f| job.one(f).present()).sum();
        let commit = listing.commit.as_str();
        on(Event::Planned { commit, files: files.len(), bytes, present });
        downloaded += job.fetch(cache, files.iter().copied(), &mut on)?;
        let revision = spec.revision();
        if revision.len() < 7 || !commit.starts_with(revision) {
            job.store.point(revision, commit)?;
        }
        let path = job.store.snapshot(commit);
        Ok(Pulled { path, commit: commit.into(), files: files.len(), bytes, downloaded })
    }

    /// The listing. A server that cannot be reached at all is not waited for.
    fn ask(&self, spec: &Spec, on: &mut dyn FnMut(Event<'_>)) -> Result<Listing, HubError> {
        self.persist(
            |error, pause| on(Event::Waiting { error, pause }),
            || {
                self.listing(spec).map_err(|failed| match failed.error {
                    error @ HubError::Unreachable { .. } => error.into(),
                    error => crate::client::Failed { error, again: failed.again },
                })
            },
            || false,
        )
    }
}

struct Job<'a> {
    hub: &'a Hub,
    spec: &'a Spec,
    listing: &'a Listing,
    store: Store,
}

impl<'a> Job<'a> {
    fn one(&'a self, file: &'a RemoteFile) -> Fetch<'a> {
        let Self { hub, spec, listing, store } = self;
        Fetch { hub, repo: &spec.repo, commit: &listing.commit, file, store }
    }

    /// The shards that the index names; all weights where there is no index.
    fn needed(&self, all: Vec<&'a RemoteFile>) -> Result<Vec<&'a RemoteFile>, HubError> {
        let Some(index) = self.listing.files.iter().find(|f| f.name == INDEX) else {
            return Ok(all);
        };
        let answer = |problem: &str| HubError::Answer {
            host: self.hub.host(),
            what: format!("{INDEX} of {}", self.spec),
            problem: problem.into(),
        };
        let shards = index_shards(&self.store.blob(index.sum.text()))
            .ok_or_else(|| answer("it is not the index of a checkpoint"))?;
        let find = |name: &String| {
            all.iter().find(|f| f.name == *name).copied().ok_or_else(|| HubError::NoCheckpoint {
                id: self.spec.to_string(),
                what: format!("{}, which its index names", name.escape_default()),
            })
        };
        shards.iter().map(find).collect()
    }

    /// Fetches files and gives them their places. Counts the bytes that were fetched.
    fn fetch(
        &self,
        cache: &Cache,
        files: impl Iterator<Item = &'a RemoteFile> + Clone,
        on: &mut dyn FnMut(Event<'_>),
    ) -> Result<u64, HubError> {
        let missing = |f: &RemoteFile| f.size - self.one(f).present();
        self.check_space(cache, files.clone().map(missing).sum())?;
        let mut fetched = 0;
        for file in files {
            let one = self.one(file);
            let have = one.present();
            on(Event::File { name: &file.name, size: file.size, have });
            if !one.is_whole() {
                one.run(on)?;
                fetched += file.size - have;
            }
            self.store.link(&self.listing.commit, &file.name, file.sum.text())?;
            on(Event::Done);
        }
        Ok(fetched)
    }

    fn check_space(&self, cache: &Cache, need: u64) -> Result<(), HubError> {
        let folder = cache.root();
        let free = fs4::available_space(folder).map_err(|e| HubError::io(folder, e))?;
        match need == 0 || need.saturating_add(SPARE) <= free {
            true => Ok(()),
            false => Err(HubError::Space { folder: folder.into(), need, free }),
        }
    }
}
