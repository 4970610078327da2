use std::io;
use std::path::PathBuf;

use lily_checkpoint::write::WriteError;
use lily_model::ModelError;

/// Why a synthetic checkpoint was not written.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// The folder holds files already.
    #[error("{} is not empty; name a new folder, or empty this one first", path.display())]
    NotEmpty {
        /// The folder.
        path: PathBuf,
    },
    /// Something of that name is not a folder.
    #[error("{} is a file; name a new folder", path.display())]
    NotAFolder {
        /// The path.
        path: PathBuf,
    },
    /// The file is there.
    #[error("{} is there already; name another file, or delete it", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// The file system has too little room.
    #[error(
        "the checkpoint takes {need} bytes ({:.2} GB), {} has {free} free ({:.2} GB); write fewer layers, or to another disk",
        *need as f64 / 1e9,
        path.display(),
        *free as f64 / 1e9
    )]
    NoSpace {
        /// The folder.
        path: PathBuf,
        /// Bytes needed.
        need: u64,
        /// Bytes free.
        free: u64,
    },
    /// The system's limit on the size of a file is smaller than a file of the checkpoint: to write
    /// beyond it would end the program (`SIGXFSZ`).
    #[error(
        "a file of {need} bytes is needed, and files may have {limit} here; raise the limit (`ulimit -f unlimited`), or write fewer layers"
    )]
    FileLimit {
        /// Bytes of the largest file.
        need: u64,
        /// Bytes that a file may have.
        limit: u64,
    },
    /// The skew is not a number from 0 to 10.
    #[error("the router skew is {0}; it must lie between 0 (even) and 10")]
    Skew(f64),
    /// The shape is not one that Lily runs.
    #[error("this shape cannot be a model: {0}")]
    Shape(#[from] ModelError),
    /// The file system's answer.
    #[error("{}: could not be written: {source}; what is in the folder is incomplete, delete it", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A weight file could not be written.
    #[error("{}: could not be written: {source}; what is in the folder is incomplete, delete it", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        source: WriteError,
    },
}
