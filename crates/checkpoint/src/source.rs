//! Where the files of a checkpoint come from: a folder, or the program itself.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::{CheckpointError, FileProblem, FolderProblem};
use crate::header::{self, Header, LENGTH_BYTES};
use crate::problem::{HeaderProblem, ShardsProblem};
use crate::shard::Shard;
use crate::verify::hex;

/// The files of one checkpoint, by name.
pub(crate) struct Source {
    name: String,
    files: Files,
}

enum Files {
    Folder(PathBuf),
    Embedded(BTreeMap<String, &'static [u8]>),
}

impl Source {
    pub(crate) fn folder(dir: &Path) -> Result<Self, CheckpointError> {
        let problem = match fs::metadata(dir) {
            Ok(metadata) if metadata.is_dir() => None,
            Ok(_) => Some(FolderProblem::NotAFolder),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Some(FolderProblem::Missing),
            Err(error) => Some(FolderProblem::Unreadable(error)),
        };
        match problem {
            None => {
                Ok(Source { name: dir.display().to_string(), files: Files::Folder(dir.to_owned()) })
            }
            Some(problem) => Err(CheckpointError::Folder { path: dir.to_owned(), problem }),
        }
    }

    pub(crate) fn embedded(name: &str, files: &[(&str, &'static [u8])]) -> Self {
        let files = files.iter().map(|&(name, bytes)| (name.to_owned(), bytes)).collect();
        Source { name: name.to_owned(), files: Files::Embedded(files) }
    }

    /// Folder or name, for messages.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Path of a file, for messages.
    pub(crate) fn label(&self, file: &str) -> String {
        match &self.files {
            Files::Folder(dir) => dir.join(file).display().to_string(),
            Files::Embedded(_) => format!("{}/{file}", self.name),
        }
    }

    pub(crate) fn file_error(&self, file: &str, problem: FileProblem) -> CheckpointError {
        CheckpointError::File { file: self.label(file), problem }
    }

    pub(crate) fn shards_error(&self, problem: ShardsProblem) -> CheckpointError {
        CheckpointError::Shards { checkpoint: self.name.clone(), problem }
    }

    pub(crate) fn folder_error(&self, problem: FolderProblem) -> CheckpointError {
        CheckpointError::Folder { path: PathBuf::from(&self.name), problem }
    }

    /// Names of all files, sorted. A name that is not UTF-8 cannot be one of a checkpoint's.
    pub(crate) fn list(&self) -> Result<Vec<String>, CheckpointError> {
        let dir = match &self.files {
            Files::Embedded(files) => return Ok(files.keys().cloned().collect()),
            Files::Folder(dir) => dir,
        };
        let unreadable = |error| self.folder_error(FolderProblem::Unreadable(error));
        let mut names = Vec::new();
        for entry in fs::read_dir(dir).map_err(unreadable)? {
            names.extend(entry.map_err(unreadable)?.file_name().into_string());
        }
        names.sort();
        Ok(names)
    }

    /// Whether there is a file of this name; a dangling symlink does not count.
    pub(crate) fn contains(&self, name: &str) -> bool {
        match &self.files {
            Files::Folder(dir) => dir.join(name).exists(),
            Files::Embedded(files) => files.contains_key(name),
        }
    }

    /// The bytes of a small file, or `None` when there is none of that name.
    pub(crate) fn read(
        &self,
        name: &str,
        cap: u64,
    ) -> Result<Option<Cow<'_, [u8]>>, CheckpointError> {
        if !is_plain_name(name) {
            return Err(CheckpointError::File {
                file: name.escape_debug().to_string(),
                problem: FileProblem::BadName,
            });
        }
        let bytes: Cow<'_, [u8]> = match &self.files {
            Files::Embedded(files) => match files.get(name) {
                Some(&bytes) => Cow::Borrowed(bytes),
                None => return Ok(None),
            },
            Files::Folder(dir) => {
                let path = dir.join(name);
                let Some((file, _)) = self.open_file(name, &path)? else {
                    return self.absent(name, &path).map(|()| None);
                };
                // One byte more than allowed, so that a file over the cap shows.
                let mut bytes = Vec::new();
                file.take(cap + 1)
                    .read_to_end(&mut bytes)
                    .map_err(|error| CheckpointError::io(self.label(name), "read", error))?;
                Cow::Owned(bytes)
            }
        };
        match bytes.len() as u64 > cap {
            true => Err(self.file_error(name, FileProblem::TooLarge { cap })),
            false => Ok(Some(bytes)),
        }
    }

    /// An error if a file that cannot be found is a link to nothing: taken for absent, it could
    /// change what the folder means.
    fn absent(&self, name: &str, path: &Path) -> Result<(), CheckpointError> {
        match fs::read_link(path) {
            Ok(target) => {
                let target = target.display().to_string().escape_debug().to_string();
                Err(self.file_error(name, FileProblem::Dangling { target }))
            }
            Err(_) => Ok(()),
        }
    }

    /// SHA-256 of a file of any size, or `None` when there is none of that name.
    pub(crate) fn sha256(&self, name: &str) -> Result<Option<String>, CheckpointError> {
        let mut sha256 = Sha256::new();
        match &self.files {
            Files::Embedded(files) => match files.get(name) {
                Some(bytes) => sha256.update(bytes),
                None => return Ok(None),
            },
            Files::Folder(dir) => {
                let Some((mut file, _)) = self.open_file(name, &dir.join(name))? else {
                    return Ok(None);
                };
                io::copy(&mut file, &mut sha256)
                    .map_err(|error| CheckpointError::io(self.label(name), "read", error))?;
            }
        }
        Ok(Some(hex(&sha256.finalize())))
    }

    /// Opens a shard and reads its header. The file is mapped only after the header was checked
    /// against its length.
    pub(crate) fn open_shard(&self, name: &str) -> Result<(Shard, Header), CheckpointError> {
        let label = self.label(name);
        let missing = || self.shards_error(ShardsProblem::Missing(vec![name.to_owned()]));
        match &self.files {
            Files::Embedded(files) => {
                let bytes = *files.get(name).ok_or_else(missing)?;
                let header = header::parse_header(bytes, bytes.len() as u64, &label)?;
                Ok((Shard::from_static(name, bytes), header))
            }
            Files::Folder(dir) => {
                let path = dir.join(name);
                let (mut file, len) = self.open_file(name, &path)?.ok_or_else(missing)?;
                let bytes = read_header(&mut file, len, &label)?;
                let header = header::parse_header(&bytes, len, &label)?;
                Ok((Shard::map(name, path, file, len)?, header))
            }
        }
    }

    /// Opens a regular file, following symlinks as the Hugging Face cache needs.
    fn open_file(&self, name: &str, path: &Path) -> Result<Option<(File, u64)>, CheckpointError> {
        let failed = |error| CheckpointError::io(path.display(), "opened", error);
        // Asked before opening: to open a named pipe would wait for a writer.
        match fs::metadata(path) {
            Ok(metadata) if !metadata.is_file() => {
                return Err(self.file_error(name, FileProblem::NotAFile));
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        }
        let file = File::open(path).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();
        Ok(Some((file, len)))
    }
}

/// The first `8 + N` bytes of a shard: its header and no more.
fn read_header(file: &mut File, file_len: u64, label: &str) -> Result<Vec<u8>, CheckpointError> {
    let failed = |error| CheckpointError::io(label, "read", error);
    let mut bytes = Vec::new();
    file.take(LENGTH_BYTES).read_to_end(&mut bytes).map_err(failed)?;
    let end = header::header_end(&bytes, file_len, label)?;
    file.take(end - LENGTH_BYTES).read_to_end(&mut bytes).map_err(failed)?;
    match bytes.len() as u64 == end {
        true => Ok(bytes),
        false => Err(CheckpointError::header(
            label,
            HeaderProblem::BeyondFile { header_end: end, file_len: bytes.len() as u64 },
        )),
    }
}

/// A file name that cannot leave its folder on any system.
pub(crate) fn is_plain_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..")
        && name.len() <= 255
        && !name.contains(|c: char| matches!(c, '/' | '\\' | ':') || c.is_control())
}
