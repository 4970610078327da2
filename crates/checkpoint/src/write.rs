//! Writing safetensors files, for synthetic checkpoints and tests.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use serde_json::{Map, Value, json};
use thiserror::Error;

use crate::dtype::Dtype;

/// Name, type and shape of a tensor to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// A specification from its parts.
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: impl Into<Vec<usize>>) -> Self {
        TensorSpec { name: name.into(), dtype, shape: shape.into() }
    }
}

/// How the header is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HeaderStyle {
    /// As MLX writes it: `__metadata__` is `{"format":"mlx"}`, keys in alphabetical order, no
    /// padding, so that the data begins at any byte.
    #[default]
    Mlx,
    /// As the reference implementation writes it: spaces after the JSON align the data to 8 bytes.
    Padded,
}

/// Why a file could not be written.
#[derive(Debug, Error)]
pub enum WriteError {
    /// The file system's answer.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// A name is empty, reserved or used twice, or the bytes cannot be counted.
    #[error("tensor `{0}` has a bad name or more bytes than can be counted")]
    BadTensor(String),
    /// Bytes for another tensor than the one whose turn it is.
    #[error("bytes for tensor `{given}`, but {} is next", .expected.as_deref().unwrap_or("none"))]
    OutOfOrder {
        /// The tensor that the bytes were given for.
        given: String,
        /// The tensor whose turn it is; `None` after the last.
        expected: Option<String>,
    },
    /// More bytes than the tensor has.
    #[error("tensor `{tensor}` has {wanted} bytes, but {given} were given")]
    TooLong {
        /// The tensor.
        tensor: String,
        /// Bytes that its type and shape need.
        wanted: u64,
        /// Bytes given with this call included.
        given: u64,
    },
    /// The end came before the last tensor was complete.
    #[error("tensor `{tensor}` has {wanted} bytes, but only {given} were given")]
    Incomplete {
        /// The first tensor that lacks bytes.
        tensor: String,
        /// Bytes that its type and shape need.
        wanted: u64,
        /// Bytes given.
        given: u64,
    },
}

/// Writes one safetensors file: the header first, then each tensor's bytes in the given order.
#[derive(Debug)]
pub struct SafetensorsWriter<W: Write> {
    out: W,
    /// Name and length of the tensors that lack bytes, in reverse order.
    pending: Vec<(String, u64)>,
    /// Bytes of the tensor whose turn it is.
    given: u64,
    data_bytes: u64,
}

impl SafetensorsWriter<BufWriter<File>> {
    /// Creates the file, replacing one of that name.
    pub fn create(
        path: &Path,
        tensors: &[TensorSpec],
        style: HeaderStyle,
    ) -> Result<Self, WriteError> {
        Self::new(BufWriter::new(File::create(path)?), tensors, style)
    }
}

impl<W: Write> SafetensorsWriter<W> {
    /// Writes the header. The bytes of the tensors follow in the order of `tensors`.
    pub fn new(mut out: W, tensors: &[TensorSpec], style: HeaderStyle) -> Result<Self, WriteError> {
        let (header, lengths) = header(tensors, style)?;
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        let data_bytes = lengths.iter().sum();
        // A tensor without bytes never has a turn.
        let pending = tensors
            .iter()
            .map(|tensor| tensor.name.clone())
            .zip(lengths)
            .filter(|(_, len)| *len > 0)
            .rev()
            .collect();
        Ok(SafetensorsWriter { out, pending, given: 0, data_bytes })
    }

    /// Sum of all tensors' bytes: what this file adds to the index's `total_size`.
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// Writes the next bytes of a tensor; a large one may come in any number of pieces.
    ///
    /// # Errors
    /// When it is not this tensor's turn, or it would get too many bytes. Nothing is written then.
    pub fn write(&mut self, tensor: &str, bytes: &[u8]) -> Result<(), WriteError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let wanted = match self.pending.last() {
            Some((name, wanted)) if name == tensor => *wanted,
            other => {
                return Err(WriteError::OutOfOrder {
                    given: tensor.to_owned(),
                    expected: other.map(|(name, _)| name.clone()),
                });
            }
        };
        let given = self.given + bytes.len() as u64;
        if given > wanted {
            return Err(WriteError::TooLong { tensor: tensor.to_owned(), wanted, given });
        }
        self.out.write_all(bytes)?;
        self.given = given;
        if given == wanted {
            self.pending.pop();
            self.given = 0;
        }
        Ok(())
    }

    /// Checks that every tensor is complete, flushes, and gives the output back.
    pub fn finish(mut self) -> Result<W, WriteError> {
        if let Some((tensor, wanted)) = self.pending.pop() {
            return Err(WriteError::Incomplete { tensor, wanted, given: self.given });
        }
        self.out.flush()?;
        Ok(self.out)
    }
}

/// The header's JSON, padded as the style asks, and each tensor's length.
fn header(tensors: &[TensorSpec], style: HeaderStyle) -> Result<(Vec<u8>, Vec<u64>), WriteError> {
    let mut entries = BTreeMap::new();
    let mut lengths = Vec::with_capacity(tensors.len());
    let mut begin = 0u64;
    for tensor in tensors {
        let bad = || WriteError::BadTensor(tensor.name.clone());
        let len = tensor.dtype.tensor_bytes(&tensor.shape).ok_or_else(bad)?;
        let end = begin.checked_add(len).ok_or_else(bad)?;
        let entry = json!({
            "data_offsets": [begin, end],
            "dtype": tensor.dtype.name(),
            "shape": tensor.shape,
        });
        let reserved = tensor.name.is_empty() || tensor.name == "__metadata__";
        if reserved || entries.insert(tensor.name.as_str(), entry).is_some() {
            return Err(bad());
        }
        lengths.push(len);
        begin = end;
    }
    let mut object = Map::new();
    if style == HeaderStyle::Mlx {
        object.insert("__metadata__".to_owned(), json!({ "format": "mlx" }));
    }
    object.extend(entries.into_iter().map(|(name, entry)| (name.to_owned(), entry)));
    let mut json = Value::Object(object).to_string().into_bytes();
    if style == HeaderStyle::Padded {
        json.resize(json.len().next_multiple_of(8), b' ');
    }
    Ok((json, lengths))
}

/// Writes `model.safetensors.index.json` into `dir`: tensor name to shard file name, and the sum of
/// all tensor bytes.
pub fn write_index(
    dir: &Path,
    weight_map: &BTreeMap<String, String>,
    total_size: u64,
) -> Result<(), WriteError> {
    let index = json!({
        "metadata": { "total_size": total_size },
        "weight_map": weight_map,
    });
    let text = serde_json::to_string_pretty(&index).map_err(io::Error::from)?;
    Ok(fs::write(dir.join(crate::INDEX_FILE), text)?)
}
