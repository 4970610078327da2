//! Writing into the cache: nothing has its final name before it is whole.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::error::HubError;

/// The folder of one model, for writing. Other programs are kept out while it lives.
#[derive(Debug)]
pub(crate) struct Store {
    dir: PathBuf,
    _lock: File,
}

impl Store {
    /// Makes the folders and locks them. `None` if another program holds the lock.
    pub fn open(root: &Path, folder: &str) -> Result<Option<Self>, HubError> {
        let locks = root.join(".locks").join(folder);
        create_dir(&locks)?;
        let path = locks.join("lily-pull.lock");
        let lock = OpenOptions::new().create(true).append(true).open(&path);
        let lock = lock.map_err(|e| HubError::io(&path, e))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(e)) => return Err(HubError::io(&path, e)),
        }
        let dir = root.join(folder);
        create_dir(&dir.join("blobs"))?;
        Ok(Some(Self { dir, _lock: lock }))
    }

    /// Where a whole blob lies.
    pub fn blob(&self, sum: &str) -> PathBuf {
        self.dir.join("blobs").join(sum)
    }

    /// Where the part of a blob that has arrived lies.
    pub fn part(&self, sum: &str) -> PathBuf {
        self.dir.join("blobs").join(format!("{sum}.incomplete"))
    }

    /// The folder of a commit.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.dir.join("snapshots").join(commit)
    }

    /// Gives a whole blob its name in a snapshot, in one step.
    pub fn link(&self, commit: &str, name: &str, sum: &str) -> Result<(), HubError> {
        let dir = self.snapshot(commit);
        create_dir(&dir)?;
        let path = dir.join(name);
        let target = Path::new("..").join("..").join("blobs").join(sum);
        if fs::read_link(&path).is_ok_and(|t| t == target) {
            return Ok(());
        }
        let temporary = dir.join(format!(".{name}.lily"));
        let _ = fs::remove_file(&temporary);
        link_blob(&target, &self.blob(sum), &temporary)
            .and_then(|()| fs::rename(&temporary, &path))
            .map_err(|e| HubError::io(&path, e))
    }

    /// Lets a branch or tag mean a commit, in one step.
    pub fn point(&self, name: &str, commit: &str) -> Result<(), HubError> {
        let path = self.dir.join("refs").join(name);
        let dir = path.parent().unwrap_or(&self.dir);
        create_dir(dir)?;
        let temporary = dir.join(".lily");
        File::create(&temporary)
            .and_then(|mut file| file.write_all(commit.as_bytes()))
            .and_then(|()| fs::rename(&temporary, &path))
            .map_err(|e| HubError::io(&path, e))
    }
}

#[cfg(unix)]
fn link_blob(target: &Path, _blob: &Path, at: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, at)
}

/// Links need a privilege there; a second name of the same file does not.
#[cfg(not(unix))]
fn link_blob(_target: &Path, blob: &Path, at: &Path) -> io::Result<()> {
    fs::hard_link(blob, at).or_else(|_| fs::copy(blob, at).map(drop))
}

fn create_dir(path: &Path) -> Result<(), HubError> {
    fs::create_dir_all(path).map_err(|e| HubError::io(path, e))
}
