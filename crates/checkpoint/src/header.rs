//! The safetensors header: an untrusted map from tensor names to byte ranges.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::dtype::Dtype;
use crate::error::CheckpointError;
use crate::json;
use crate::problem::{HeaderProblem, TensorProblem};

/// Most bytes of a header; the reference implementation has the same limit.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Most bytes of a tensor's name.
pub const MAX_NAME_BYTES: usize = 1024;
/// The file begins with the header's length as a little-endian `u64`.
pub(crate) const LENGTH_BYTES: u64 = 8;

const METADATA: &str = "__metadata__";

/// A checked header: the tensors cover the rest of the file without gap or overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The tensors in the order of their bytes.
    pub tensors: Vec<HeaderTensor>,
    /// The writer's notes (`__metadata__`).
    pub metadata: BTreeMap<String, String>,
    /// Offset of the first byte after the header.
    pub data_start: u64,
}

/// One tensor of a [`Header`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeaderTensor {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Offset of the first byte from the start of the file.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// Parses and checks the header of a safetensors file.
///
/// `bytes` is the beginning of the file and holds at least the header; `file_len` is the length of
/// the whole file, against which every range is checked; `file` is its name for messages.
///
/// # Errors
/// [`CheckpointError::Header`] and [`CheckpointError::Tensor`].
pub fn parse_header(bytes: &[u8], file_len: u64, file: &str) -> Result<Header, CheckpointError> {
    let data_start = header_end(bytes, file_len, file)?;
    let json = usize::try_from(data_start)
        .ok()
        .and_then(|end| bytes.get(LENGTH_BYTES as usize..end))
        .ok_or_else(|| {
            let header_end = data_start;
            let file_len = bytes.len() as u64;
            CheckpointError::header(file, HeaderProblem::BeyondFile { header_end, file_len })
        })?;
    let mut object = json::parse_json_object(json)
        .map_err(|problem| CheckpointError::header(file, HeaderProblem::Json(problem)))?;
    let metadata = metadata(object.remove(METADATA))
        .ok_or_else(|| CheckpointError::header(file, HeaderProblem::Metadata))?;
    let mut tensors = Vec::with_capacity(object.len());
    for (name, entry) in object {
        match parse_tensor(&name, &entry, data_start) {
            Ok((dtype, shape, offset, len)) => {
                tensors.push(HeaderTensor { name, dtype, shape, offset, len })
            }
            Err(problem) => {
                return Err(CheckpointError::Tensor {
                    file: file.to_owned(),
                    tensor: name,
                    problem,
                });
            }
        }
    }
    // Empty tensors sort before the one that begins at the same byte.
    tensors.sort_by(|a, b| (a.offset, a.len, &a.name).cmp(&(b.offset, b.len, &b.name)));
    check_coverage(&tensors, data_start, file_len)
        .map_err(|problem| CheckpointError::header(file, problem))?;
    Ok(Header { tensors, metadata, data_start })
}

/// Where the header ends, from the first eight bytes of the file.
pub(crate) fn header_end(bytes: &[u8], file_len: u64, file: &str) -> Result<u64, CheckpointError> {
    let problem = match bytes.first_chunk() {
        None if file_len == 0 => HeaderProblem::Empty,
        None => HeaderProblem::TooShort { file_len },
        Some(b"version ") => HeaderProblem::LfsPointer,
        Some(&length) => {
            let header_len = u64::from_le_bytes(length);
            if header_len > MAX_HEADER_BYTES {
                HeaderProblem::AbsurdLength { header_len }
            } else if LENGTH_BYTES + header_len > file_len {
                HeaderProblem::BeyondFile { header_end: LENGTH_BYTES + header_len, file_len }
            } else {
                return Ok(LENGTH_BYTES + header_len);
            }
        }
    };
    Err(CheckpointError::header(file, problem))
}

fn metadata(value: Option<Value>) -> Option<BTreeMap<String, String>> {
    match value {
        None | Some(Value::Null) => Some(BTreeMap::new()),
        Some(Value::Object(entries)) => entries
            .into_iter()
            .map(|(key, value)| match value {
                Value::String(value) => Some((key, value)),
                _ => None,
            })
            .collect(),
        Some(_) => None,
    }
}

/// Element type, shape, absolute offset and length of one entry.
fn parse_tensor(
    name: &str,
    entry: &Value,
    data_start: u64,
) -> Result<(Dtype, Vec<usize>, u64, u64), TensorProblem> {
    if name.is_empty() {
        return Err(TensorProblem::EmptyName);
    }
    if name.len() > MAX_NAME_BYTES {
        return Err(TensorProblem::LongName { len: name.len() });
    }
    let fields = entry.as_object().ok_or(TensorProblem::NotAnObject)?;
    let wanted = |field, wanted| TensorProblem::Field { field, wanted };
    let dtype = fields.get("dtype").and_then(Value::as_str).ok_or(wanted("dtype", "a string"))?;
    let dtype = Dtype::parse(dtype).map_err(|error| TensorProblem::UnknownDtype(error.0))?;
    let shape: Vec<usize> =
        whole_numbers(fields, "shape").ok_or(wanted("shape", "a list of whole numbers"))?;
    let Some(&[begin, end]) = whole_numbers::<u64>(fields, "data_offsets").as_deref() else {
        return Err(wanted("data_offsets", "a pair of whole numbers"));
    };
    let found = end.checked_sub(begin).ok_or(TensorProblem::Reversed { begin, end })?;
    let (Some(wanted), Some(_)) = (dtype.tensor_bytes(&shape), data_start.checked_add(end)) else {
        return Err(TensorProblem::Overflow { dtype, shape });
    };
    if wanted != found {
        return Err(TensorProblem::WrongLength { dtype, shape, wanted, found });
    }
    Ok((dtype, shape, data_start + begin, found))
}

fn whole_numbers<T: TryFrom<u64>>(fields: &Map<String, Value>, field: &str) -> Option<Vec<T>> {
    let list = fields.get(field)?.as_array()?;
    list.iter().map(|item| T::try_from(item.as_u64()?).ok()).collect()
}

/// The tensors, in file order, must cover the data section exactly.
fn check_coverage(
    tensors: &[HeaderTensor],
    data_start: u64,
    file_len: u64,
) -> Result<(), HeaderProblem> {
    // Checked first: of a half-downloaded file this is the one thing worth saying.
    if let Some(last) = tensors.iter().max_by_key(|t| t.offset + t.len)
        && last.offset + last.len > file_len
    {
        return Err(HeaderProblem::Truncated {
            tensor: last.name.clone(),
            end: last.offset + last.len,
            file_len,
        });
    }
    let mut covered = data_start;
    let mut previous = "";
    for tensor in tensors {
        if tensor.offset < covered {
            return Err(HeaderProblem::Overlap {
                first: previous.to_owned(),
                second: tensor.name.clone(),
            });
        }
        if tensor.offset > covered {
            return Err(HeaderProblem::Gap {
                tensor: tensor.name.clone(),
                from: covered,
                to: tensor.offset,
            });
        }
        covered += tensor.len;
        previous = &tensor.name;
    }
    match covered == file_len {
        true => Ok(()),
        false => Err(HeaderProblem::TrailingBytes { end: covered, file_len }),
    }
}
