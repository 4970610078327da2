//! A checkpoint: config, manifest and bytes.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use crate::dtype::Dtype;
use crate::error::{CheckpointError, FileProblem};
use crate::index::Index;
use crate::json;
use crate::problem::{IndexProblem, ShardsProblem};
use crate::shard::{Shard, TensorRef};
use crate::shard_set;
use crate::source::Source;

/// Most bytes of `config.json`.
pub const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Most bytes of any other text file, such as `tokenizer.json`.
pub const MAX_TEXT_BYTES: u64 = 64 << 20;

/// One tensor of the manifest.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// Name in the header.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
    /// Row-major little-endian elements, at any alignment.
    pub data: TensorRef,
}

/// An opened checkpoint: every header read and checked, no tensor byte read yet.
pub struct Checkpoint {
    source: Source,
    config: Value,
    tensors: BTreeMap<String, Tensor>,
    shards: Vec<Arc<Shard>>,
    total_bytes: u64,
}

impl Checkpoint {
    /// Opens the checkpoint in a folder. Reads its config, index and shard headers only.
    ///
    /// # Errors
    /// Whatever is missing, contradictory or malformed, by file and tensor.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        Self::load(Source::folder(dir)?)
    }

    /// The `config.json` of a folder, of which nothing else is looked at.
    ///
    /// # Errors
    /// As [`open`](Self::open), of this file.
    pub fn read_config(dir: &Path) -> Result<Value, CheckpointError> {
        read_config(&Source::folder(dir)?)
    }

    /// Opens a checkpoint embedded in the program: the files of a folder by name.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_static(
        name: &str,
        files: &[(&str, &'static [u8])],
    ) -> Result<Self, CheckpointError> {
        Self::load(Source::embedded(name, files))
    }

    fn load(source: Source) -> Result<Self, CheckpointError> {
        let (index, names) = shard_set::discover(&source)?;
        let config = read_config(&source)?;
        let mut shards = Vec::with_capacity(names.len());
        let mut tensors = BTreeMap::new();
        for name in &names {
            let (shard, header) = source.open_shard(name)?;
            let shard = Arc::new(shard);
            for entry in header.tensors {
                let data = TensorRef::new(Arc::clone(&shard), entry.offset, entry.len)
                    .expect("parse_header keeps every tensor inside the file");
                let tensor =
                    Tensor { name: entry.name, dtype: entry.dtype, shape: entry.shape, data };
                add(&mut tensors, tensor, &source)?;
            }
            shards.push(shard);
        }
        if tensors.is_empty() {
            return Err(source.shards_error(ShardsProblem::NoTensors));
        }
        // Ranges of distinct files on disk: the sum cannot pass 2^64.
        let total_bytes = tensors.values().map(|tensor| tensor.data.len()).sum();
        if let Some(index) = &index {
            check_index(index, &tensors, total_bytes).map_err(|problem| {
                CheckpointError::Index { file: source.label(crate::INDEX_FILE), problem }
            })?;
        }
        Ok(Checkpoint { source, config, tensors, shards, total_bytes })
    }

    /// The folder, or the name of an embedded checkpoint, for messages.
    pub fn source(&self) -> &str {
        self.source.name()
    }

    /// `config.json`: always a JSON object.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// The text of another file of the checkpoint, such as `tokenizer.json`; `None` when there is
    /// none of that name.
    ///
    /// # Errors
    /// A name with a folder in it, a file over [`MAX_TEXT_BYTES`], bytes that are not UTF-8, or a
    /// failed read.
    pub fn text_file(&self, name: &str) -> Result<Option<Cow<'_, str>>, CheckpointError> {
        let Some(bytes) = self.source.read(name, MAX_TEXT_BYTES)? else {
            return Ok(None);
        };
        let not_utf8 = |at| self.source.file_error(name, FileProblem::NotUtf8 { at });
        let text = match bytes {
            Cow::Borrowed(bytes) => Cow::Borrowed(
                std::str::from_utf8(bytes).map_err(|error| not_utf8(error.valid_up_to()))?,
            ),
            Cow::Owned(bytes) => Cow::Owned(
                String::from_utf8(bytes)
                    .map_err(|error| not_utf8(error.utf8_error().valid_up_to()))?,
            ),
        };
        Ok(Some(text))
    }

    /// Every tensor, sorted by name.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.tensors.values()
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// The weight files, sorted by name.
    pub fn shards(&self) -> &[Arc<Shard>] {
        &self.shards
    }

    /// Bytes of all tensors, headers not counted.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    pub(crate) fn files(&self) -> &Source {
        &self.source
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint")
            .field("source", &self.source())
            .field("tensors", &self.tensors.len())
            .field("shards", &self.shards)
            .field("total_bytes", &self.total_bytes)
            .finish_non_exhaustive()
    }
}

fn read_config(source: &Source) -> Result<Value, CheckpointError> {
    const NAME: &str = "config.json";
    let bytes = source
        .read(NAME, MAX_CONFIG_BYTES)?
        .ok_or_else(|| source.file_error(NAME, FileProblem::Missing))?;
    json::parse_json_object(&bytes)
        .map(Value::Object)
        .map_err(|problem| source.file_error(NAME, FileProblem::Json(problem)))
}

fn add(
    tensors: &mut BTreeMap<String, Tensor>,
    tensor: Tensor,
    source: &Source,
) -> Result<(), CheckpointError> {
    let second = tensor.data.shard().name().to_owned();
    match tensors.insert(tensor.name.clone(), tensor) {
        None => Ok(()),
        Some(other) => Err(source.shards_error(ShardsProblem::DuplicateTensor {
            first: other.data.shard().name().to_owned(),
            second,
            tensor: other.name,
        })),
    }
}

/// The index and the shards must tell the same story.
fn check_index(
    index: &Index,
    tensors: &BTreeMap<String, Tensor>,
    total_bytes: u64,
) -> Result<(), IndexProblem> {
    for tensor in tensors.values() {
        let actual = tensor.data.shard().name();
        match index.weight_map.get(&tensor.name) {
            Some(indexed) if indexed == actual => {}
            Some(indexed) => {
                return Err(IndexProblem::WrongShard {
                    tensor: tensor.name.clone(),
                    indexed: indexed.clone(),
                    actual: actual.to_owned(),
                });
            }
            None => {
                return Err(IndexProblem::UnlistedTensor {
                    tensor: tensor.name.clone(),
                    shard: actual.to_owned(),
                });
            }
        }
    }
    if let Some((tensor, shard)) =
        index.weight_map.iter().find(|(tensor, _)| !tensors.contains_key(*tensor))
    {
        return Err(IndexProblem::MissingTensor { tensor: tensor.clone(), shard: shard.clone() });
    }
    match index.total_size {
        Some(indexed) if indexed != total_bytes => {
            Err(IndexProblem::TotalSize { indexed, actual: total_bytes })
        }
        _ => Ok(()),
    }
}
