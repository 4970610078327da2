//! What can be wrong with a checkpoint: where, what, and what to do about it.

use std::fmt;
use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::problem::{HeaderProblem, IndexProblem, ShardsProblem, TensorProblem};

pub(crate) const AGAIN: &str = "download the file again";
const LAYOUT: &str = "a checkpoint is config.json with model.safetensors, or with \
                      model-0000i-of-0000n.safetensors and model.safetensors.index.json";

/// Why a checkpoint was refused.
///
/// The message of every variant holds the place, the problem and the [hint](Self::hint).
#[derive(Debug, Error)]
pub enum CheckpointError {
    /// The folder itself, or what it holds as a whole.
    #[error("{}: {problem} ({})", path.display(), problem.hint())]
    Folder {
        /// The folder that was asked for.
        path: PathBuf,
        /// What is wrong.
        problem: FolderProblem,
    },
    /// A JSON or text file.
    #[error("{file}: {problem} ({})", problem.hint())]
    File {
        /// Path or name of the file.
        file: String,
        /// What is wrong.
        problem: FileProblem,
    },
    /// The header of a shard, or the way its tensors cover the file.
    #[error("{file}: {problem} ({})", problem.hint())]
    Header {
        /// Path or name of the shard.
        file: String,
        /// What is wrong.
        problem: HeaderProblem,
    },
    /// One tensor's entry in the header of a shard.
    #[error("{file}: tensor {}: {problem} ({})", Quoted(tensor), problem.hint())]
    Tensor {
        /// Path or name of the shard.
        file: String,
        /// Name of the tensor.
        tensor: String,
        /// What is wrong.
        problem: TensorProblem,
    },
    /// The shards as a set.
    #[error("{checkpoint}: {problem} ({})", problem.hint())]
    Shards {
        /// Folder or name of the checkpoint.
        checkpoint: String,
        /// What is wrong.
        problem: ShardsProblem,
    },
    /// `model.safetensors.index.json` against itself or against the shards.
    #[error("{file}: {problem} ({})", problem.hint())]
    Index {
        /// Path or name of the index.
        file: String,
        /// What is wrong.
        problem: IndexProblem,
    },
    /// A line of a checksum list that is not `hex  filename`.
    #[error("{file}: line {line} is no `sha-256  file name` pair (correct or remove the list)")]
    ChecksumList {
        /// Path or name of the list.
        file: String,
        /// Line number, from 1.
        line: usize,
    },
    /// The operating system could not open, map or read a file.
    #[error("{file}: could not be {action}: {source} (check the disk and the file's permissions)")]
    Io {
        /// Path of the file.
        file: String,
        /// What was tried: "opened", "mapped", "read".
        action: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// [`TensorRef::read_into`](crate::TensorRef::read_into) was given a buffer of the wrong size.
    #[error(
        "{file}: {len} bytes at {offset} were to be read into a buffer of {buffer} \
         (this is a bug in the caller)"
    )]
    BufferLength {
        /// Path or name of the shard.
        file: String,
        /// Offset of the range in the file.
        offset: u64,
        /// Length of the range.
        len: u64,
        /// Length of the buffer.
        buffer: usize,
    },
}

impl CheckpointError {
    pub(crate) fn io(file: impl ToString, action: &'static str, source: io::Error) -> Self {
        CheckpointError::Io { file: file.to_string(), action, source }
    }

    pub(crate) fn header(file: &str, problem: HeaderProblem) -> Self {
        CheckpointError::Header { file: file.to_owned(), problem }
    }

    /// What the reader can do about it. The message already ends with it.
    pub fn hint(&self) -> &'static str {
        match self {
            CheckpointError::Folder { problem, .. } => problem.hint(),
            CheckpointError::File { problem, .. } => problem.hint(),
            CheckpointError::Header { problem, .. } => problem.hint(),
            CheckpointError::Tensor { problem, .. } => problem.hint(),
            CheckpointError::Shards { problem, .. } => problem.hint(),
            CheckpointError::Index { problem, .. } => problem.hint(),
            CheckpointError::ChecksumList { .. } => "correct or remove the list",
            CheckpointError::Io { .. } => "check the disk and the file's permissions",
            CheckpointError::BufferLength { .. } => "this is a bug in the caller",
        }
    }
}

/// What is wrong with a folder.
#[derive(Debug, Error)]
pub enum FolderProblem {
    /// There is nothing of that name.
    #[error("there is no such folder")]
    Missing,
    /// The path names a file.
    #[error("this is a file, not a folder")]
    NotAFolder,
    /// The folder cannot be listed.
    #[error("the folder cannot be read: {0}")]
    Unreadable(io::Error),
    /// No safetensors file with a name of the expected form.
    #[error("the folder holds no weights that can be read")]
    NoWeights {
        /// The foreign weight format that was found instead.
        found: Option<ForeignWeights>,
    },
}

/// Weight files of a kind this crate does not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForeignWeights {
    /// llama.cpp's format.
    Gguf,
    /// PyTorch pickles (`.bin`, `.pt`, `.pth`).
    PyTorch,
    /// NumPy archives, of early MLX conversions.
    Npz,
    /// Safetensors files, but not named `model…`.
    OtherSafetensors,
}

impl FolderProblem {
    /// What the reader can do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            FolderProblem::Missing => "check the spelling, or download the model first",
            FolderProblem::NotAFolder => "give the folder that holds config.json and the weights",
            FolderProblem::Unreadable(_) => "check the path and its permissions",
            FolderProblem::NoWeights { found } => match found {
                None => LAYOUT,
                Some(ForeignWeights::Gguf) => {
                    "it holds .gguf weights, which are not read: get the MLX safetensors version"
                }
                Some(ForeignWeights::PyTorch) => {
                    "it holds PyTorch weights, which are not read: get the safetensors version"
                }
                Some(ForeignWeights::Npz) => {
                    "it holds .npz weights, which are not read: convert with a current mlx_lm"
                }
                Some(ForeignWeights::OtherSafetensors) => {
                    "its safetensors files have other names: expected are model.safetensors, \
                     model-0000i-of-0000n.safetensors, or an index that names them"
                }
            },
        }
    }
}

/// What is wrong with a JSON or text file.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FileProblem {
    /// A file that every checkpoint has is not there.
    #[error("the file is missing")]
    Missing,
    /// A symbolic link to nothing.
    #[error("this is a link to {target}, which is not there")]
    Dangling {
        /// Where it points.
        target: String,
    },
    /// A folder, pipe or device of that name.
    #[error("this is not a regular file")]
    NotAFile,
    /// The name has a folder in it, or is no file name at all.
    #[error("the name is not a plain file name")]
    BadName,
    /// Larger than any sensible file of its kind.
    #[error("the file is larger than {cap} bytes")]
    TooLarge {
        /// The most that is accepted.
        cap: u64,
    },
    /// Not text.
    #[error("byte {at} is not UTF-8 text")]
    NotUtf8 {
        /// Offset of the first bad byte.
        at: usize,
    },
    /// Text, but not the JSON object that was expected.
    #[error("{0}")]
    Json(JsonProblem),
}

impl FileProblem {
    /// What the reader can do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            FileProblem::Missing => LAYOUT,
            FileProblem::BadName => "give a file name without folders",
            FileProblem::Dangling { .. } => "mend or delete the link, or download the file again",
            FileProblem::Json(JsonProblem::DuplicateKey(_)) => "keep one of the two",
            _ => AGAIN,
        }
    }
}

/// Why bytes are not the JSON object that was expected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum JsonProblem {
    /// Not text.
    #[error("byte {at} of the JSON is not UTF-8")]
    NotUtf8 {
        /// Offset of the first bad byte.
        at: usize,
    },
    /// The JSON parser's message: syntax, or nesting too deep.
    #[error("not valid JSON: {0}")]
    Syntax(String),
    /// Valid JSON of another type.
    #[error("the JSON is not an object")]
    NotAnObject,
    /// A key occurs twice in one object; most parsers keep one of the two without a word.
    #[error("the JSON key {} occurs twice", Quoted(.0))]
    DuplicateKey(String),
}

/// A name from a file: escaped for the terminal, and cut when it is absurdly long.
pub(crate) struct Quoted<'a>(pub(crate) &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 160;
        write!(f, "`")?;
        for c in self.0.chars().take(SHOWN) {
            write!(f, "{}", c.escape_debug())?;
        }
        match self.0.chars().nth(SHOWN) {
            Some(_) => write!(f, "…`"),
            None => write!(f, "`"),
        }
    }
}

/// File names; only the first few when there are many.
pub(crate) struct List<'a>(pub(crate) &'a [String]);

impl fmt::Display for List<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        let (shown, more) = self.0.split_at(self.0.len().min(SHOWN));
        f.write_str(&shown.join(", "))?;
        match more.len() {
            0 => Ok(()),
            count => write!(f, " and {count} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_names_cannot_flood_or_drive_the_terminal() {
        assert_eq!(Quoted("a\x1b[2Jb").to_string(), "`a\\u{1b}[2Jb`");
        assert!(Quoted(&"x".repeat(100_000)).to_string().len() < 200);
    }

    #[test]
    fn every_message_ends_with_its_hint() {
        let error = CheckpointError::header("m.safetensors", HeaderProblem::Empty);
        assert_eq!(error.to_string(), "m.safetensors: the file is empty (download the file again)");
        for error in [
            error,
            CheckpointError::io("f", "read", io::ErrorKind::UnexpectedEof.into()),
            CheckpointError::ChecksumList { file: "f".into(), line: 1 },
            CheckpointError::BufferLength { file: "f".into(), offset: 0, len: 1, buffer: 2 },
        ] {
            assert!(error.to_string().ends_with(&format!("({})", error.hint())));
        }
    }
}
