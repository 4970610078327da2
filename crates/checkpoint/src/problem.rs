//! What can be wrong with shards, their tensors and their index.

use thiserror::Error;

use crate::dtype::Dtype;
use crate::error::{AGAIN, JsonProblem, List, Quoted};

const WRITER: &str = "the program that wrote the file is at fault: convert the model again";

/// What is wrong with a shard's header.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum HeaderProblem {
    /// No bytes at all.
    #[error("the file is empty")]
    Empty,
    /// Not even the header's length.
    #[error("the file has {file_len} bytes, too few for a safetensors header")]
    TooShort {
        /// Length of the file.
        file_len: u64,
    },
    /// A Git LFS pointer in place of the file.
    #[error("this is a Git LFS pointer, not the weights")]
    LfsPointer,
    /// A header length that no writer produces: the file is of another kind.
    #[error("not a safetensors file: it gives a header of {header_len} bytes")]
    AbsurdLength {
        /// The header length that the first eight bytes give.
        header_len: u64,
    },
    /// The header reaches past the end of the file.
    #[error("the file is cut off: its header ends at byte {header_end} of {file_len}")]
    BeyondFile {
        /// Where the header would end.
        header_end: u64,
        /// Length of the file.
        file_len: u64,
    },
    /// The header is not the expected JSON.
    #[error("bad header: {0}")]
    Json(JsonProblem),
    /// `__metadata__` is not an object of strings.
    #[error("bad header: __metadata__ does not map strings to strings")]
    Metadata,
    /// A tensor reaches past the end of the file.
    #[error("the file is cut off: tensor {} ends at byte {end} of {file_len}", Quoted(tensor))]
    Truncated {
        /// The tensor that reaches furthest.
        tensor: String,
        /// Where it would end.
        end: u64,
        /// Length of the file.
        file_len: u64,
    },
    /// Bytes after the last tensor.
    #[error("the last tensor ends at byte {end}, but the file has {file_len}")]
    TrailingBytes {
        /// Where the last tensor ends.
        end: u64,
        /// Length of the file.
        file_len: u64,
    },
    /// Bytes that belong to no tensor.
    #[error("bytes {from} to {to}, before tensor {}, belong to no tensor", Quoted(tensor))]
    Gap {
        /// The tensor after the gap.
        tensor: String,
        /// First byte of the gap.
        from: u64,
        /// End of the gap.
        to: u64,
    },
    /// Bytes that belong to two tensors.
    #[error("tensors {} and {} overlap", Quoted(first), Quoted(second))]
    Overlap {
        /// The tensor that begins first.
        first: String,
        /// The other.
        second: String,
    },
}

impl HeaderProblem {
    /// What the reader can do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            HeaderProblem::LfsPointer => "fetch it with `git lfs pull`, or download it",
            HeaderProblem::Metadata
            | HeaderProblem::Gap { .. }
            | HeaderProblem::Overlap { .. }
            | HeaderProblem::Json(JsonProblem::DuplicateKey(_)) => WRITER,
            _ => AGAIN,
        }
    }
}

/// What is wrong with one tensor of a header.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TensorProblem {
    /// The name is the empty string.
    #[error("the name is empty")]
    EmptyName,
    /// The name is longer than any real one.
    #[error("the name has {len} bytes")]
    LongName {
        /// Its length.
        len: usize,
    },
    /// The entry is not a JSON object.
    #[error("the entry is not a JSON object")]
    NotAnObject,
    /// A field is missing or of the wrong JSON type.
    #[error("`{field}` is missing or is not {wanted}")]
    Field {
        /// The field.
        field: &'static str,
        /// What it should be.
        wanted: &'static str,
    },
    /// An element type that this crate does not read.
    #[error("unknown element type {}", Quoted(.0))]
    UnknownDtype(String),
    /// The end lies before the beginning.
    #[error("data_offsets are reversed: {begin} to {end}")]
    Reversed {
        /// First offset.
        begin: u64,
        /// Second offset.
        end: u64,
    },
    /// The byte count does not fit in 64 bits.
    #[error("{dtype} {shape:?} has more bytes than can be counted")]
    Overflow {
        /// Element type.
        dtype: Dtype,
        /// Shape.
        shape: Vec<usize>,
    },
    /// The offsets span another number of bytes than type and shape need.
    #[error("{dtype} {shape:?} needs {wanted} bytes, but data_offsets span {found}")]
    WrongLength {
        /// Element type.
        dtype: Dtype,
        /// Shape.
        shape: Vec<usize>,
        /// Bytes that type and shape need.
        wanted: u64,
        /// Bytes that the offsets span.
        found: u64,
    },
}

impl TensorProblem {
    /// What the reader can do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            TensorProblem::UnknownDtype(_) => {
                "the model is quantized in a way this version does not read"
            }
            _ => WRITER,
        }
    }
}

/// What is wrong with the shards as a set.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ShardsProblem {
    /// Files that the index or the numbering asks for are not there.
    #[error("missing weight files: {}", List(.0))]
    Missing(Vec<String>),
    /// Both `model.safetensors` and numbered shards, and no index to decide.
    #[error("it holds both model.safetensors and numbered shards, and no index says which count")]
    Ambiguous,
    /// File names that do not belong to one numbering.
    #[error("{first} and {second} do not belong to one set of shards")]
    MixedSet {
        /// One file.
        first: String,
        /// Another.
        second: String,
    },
    /// A tensor that two shards hold.
    #[error("tensor {} is in both {first} and {second}", Quoted(tensor))]
    DuplicateTensor {
        /// Name of the tensor.
        tensor: String,
        /// One shard.
        first: String,
        /// The other.
        second: String,
    },
    /// The shards hold no tensor.
    #[error("the weight files hold no tensor")]
    NoTensors,
}

impl ShardsProblem {
    /// What the reader can do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            ShardsProblem::Missing(_) => "download the missing files",
            ShardsProblem::Ambiguous => "remove one of the two, or add the index",
            ShardsProblem::MixedSet { .. } => "keep one model in one folder",
            ShardsProblem::DuplicateTensor { .. } | ShardsProblem::NoTensors => {
                "the files are not of one conversion: download or convert the model again"
            }
        }
    }
}

/// What is wrong with `model.safetensors.index.json`.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum IndexProblem {
    /// Not the expected JSON.
    #[error("{0}")]
    Json(JsonProblem),
    /// `weight_map` is missing, empty, or not an object.
    #[error("weight_map is missing, empty or not an object")]
    NoWeightMap,
    /// An entry of `weight_map` is not a string.
    #[error("weight_map gives no file name for tensor {}", Quoted(tensor))]
    Entry {
        /// The tensor.
        tensor: String,
    },
    /// A shard name that could leave the folder, or that is no safetensors file.
    #[error("weight_map names {}, which is no plain .safetensors file name", Quoted(shard))]
    ShardName {
        /// The name.
        shard: String,
    },
    /// The index names a tensor that its shard does not hold.
    #[error("{shard} does not hold tensor {}", Quoted(tensor))]
    MissingTensor {
        /// The tensor.
        tensor: String,
        /// The shard that the index gives.
        shard: String,
    },
    /// A shard holds a tensor that the index does not name.
    #[error("{shard} holds tensor {}, which weight_map does not name", Quoted(tensor))]
    UnlistedTensor {
        /// The tensor.
        tensor: String,
        /// The shard that holds it.
        shard: String,
    },
    /// A shard holds a tensor that the index assigns to another.
    #[error("tensor {} is in {actual}, but weight_map says {indexed}", Quoted(tensor))]
    WrongShard {
        /// The tensor.
        tensor: String,
        /// The shard that the index gives.
        indexed: String,
        /// The shard that holds it.
        actual: String,
    },
    /// `metadata` is not an object.
    #[error("metadata is not an object")]
    Metadata,
    /// `metadata.total_size` is not a byte count.
    #[error("metadata.total_size is not a whole number")]
    TotalSizeType,
    /// `metadata.total_size` contradicts the shards.
    #[error("metadata.total_size is {indexed}, but the tensors have {actual} bytes")]
    TotalSize {
        /// What the index says.
        indexed: u64,
        /// What the tensors sum up to.
        actual: u64,
    },
}

impl IndexProblem {
    /// What the reader can do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            IndexProblem::ShardName { .. } => {
                "shards must lie beside the index; do not trust this checkpoint"
            }
            _ => "index and shards must come from one conversion: download them again",
        }
    }
}
