//! Reading everything: checksums of the files, and floats that are not finite.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::checkpoint::{Checkpoint, Tensor};
use crate::dtype::Dtype;
use crate::error::{CheckpointError, Quoted};
use crate::shard::Shard;
use crate::source::is_plain_name;

/// Bytes read at a time: a multiple of every element size.
const CHUNK: usize = 4 << 20;

/// What [`Checkpoint::verify`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifyReport {
    /// Folder or name of the checkpoint.
    pub source: String,
    /// Number of tensors read.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// One entry a shard, sorted by name.
    pub shards: Vec<ShardChecksum>,
    /// What the checksum lists name beside the shards, sorted by name.
    pub listed: Vec<ListedFile>,
    /// Tensors that hold NaN or infinity, sorted by name.
    pub non_finite: Vec<NonFinite>,
}

/// SHA-256 of one shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardChecksum {
    /// File name.
    pub file: String,
    /// Length of the file.
    pub bytes: u64,
    /// SHA-256 of the file, as 64 lower-case hex digits.
    pub sha256: String,
    /// Comparison with a list in the folder.
    pub status: ChecksumStatus,
}

/// A shard's checksum against `<shard>.sha256`, `SHA256SUMS` or `SHA256SUMS.txt`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChecksumStatus {
    /// No list names the shard.
    Unlisted,
    /// The list agrees.
    Match {
        /// Name of the list.
        list: String,
    },
    /// The list disagrees.
    Mismatch {
        /// Name of the list.
        list: String,
        /// What it gives, in lower case.
        expected: String,
    },
}

/// A file that is no shard, and that a checksum list names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedFile {
    /// The name in the list.
    pub file: String,
    /// Name of the list.
    pub list: String,
    /// What became of it.
    pub status: ListedStatus,
}

/// What became of a [`ListedFile`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListedStatus {
    /// The list agrees.
    Match,
    /// The list disagrees.
    Mismatch {
        /// SHA-256 of the file.
        sha256: String,
        /// What the list gives.
        expected: String,
    },
    /// There is no such file in the folder.
    Missing,
    /// The name leads out of the folder, so it was not looked at.
    Elsewhere,
}

/// NaN or infinity in a BF16, F16, F32 or F64 tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NonFinite {
    /// Name of the tensor.
    pub tensor: String,
    /// File name of its shard.
    pub file: String,
    /// Number of such elements.
    pub count: u64,
    /// Index of the first, in row-major order.
    pub first_index: u64,
}

impl VerifyReport {
    /// Whether every value is finite and no checksum contradicts a list. A list may name files that
    /// a checkpoint does not need, so one that is missing is no damage.
    pub fn is_clean(&self) -> bool {
        self.non_finite.is_empty()
            && !self
                .listed
                .iter()
                .any(|listed| matches!(listed.status, ListedStatus::Mismatch { .. }))
            && !self
                .shards
                .iter()
                .any(|shard| matches!(shard.status, ChecksumStatus::Mismatch { .. }))
    }
}

impl fmt::Display for VerifyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} tensors, {} bytes", self.source, self.tensors, self.bytes)?;
        for shard in &self.shards {
            write!(f, "{}  {}  ", shard.sha256, shard.file)?;
            match &shard.status {
                ChecksumStatus::Unlisted => writeln!(f, "(not in a checksum list)")?,
                ChecksumStatus::Match { list } => writeln!(f, "(as in {list})")?,
                ChecksumStatus::Mismatch { list, expected } => {
                    writeln!(f, "(DIFFERS: {list} says {expected}; download the file again)")?;
                }
            }
        }
        for ListedFile { file, list, status } in &self.listed {
            let file = Quoted(file);
            match status {
                ListedStatus::Match => writeln!(f, "{file} (no weights; as in {list})")?,
                ListedStatus::Mismatch { sha256, expected } => writeln!(
                    f,
                    "{sha256}  {file}  (DIFFERS: {list} says {expected}; download the file again)"
                )?,
                ListedStatus::Missing => writeln!(
                    f,
                    "{file} is in {list} and not in the folder; the checkpoint is complete without it"
                )?,
                ListedStatus::Elsewhere => {
                    writeln!(f, "{file} is in {list}, but not of this folder; it was not read")?;
                }
            }
        }
        for found in &self.non_finite {
            writeln!(
                f,
                "{}: tensor `{}` holds {} values that are not finite, the first at element {}",
                found.file,
                found.tensor.escape_debug(),
                found.count,
                found.first_index
            )?;
        }
        write!(f, "{}", if self.is_clean() { "clean" } else { "NOT clean" })
    }
}

impl Checkpoint {
    /// Reads every byte of every shard once: checksums the files and looks for floats that are
    /// not finite.
    ///
    /// `progress` is called with the tensor bytes done so far; the last call gives
    /// [`total_bytes`](Self::total_bytes).
    ///
    /// # Errors
    /// A failed read, or a malformed checksum list. What the bytes show is in the report.
    pub fn verify(&self, mut progress: impl FnMut(u64)) -> Result<VerifyReport, CheckpointError> {
        let mut report = VerifyReport {
            source: self.source().to_owned(),
            tensors: 0,
            bytes: 0,
            shards: Vec::new(),
            listed: Vec::new(),
            non_finite: Vec::new(),
        };
        let lists = self.checksum_lists()?;
        let mut buffer = vec![0; CHUNK];
        for shard in self.shards() {
            let mut tensors: Vec<&Tensor> =
                self.tensors().filter(|tensor| Arc::ptr_eq(tensor.data.shard(), shard)).collect();
            tensors.sort_by_key(|tensor| (tensor.data.offset(), tensor.data.len()));
            // Tensors cover the file up to its end, so header + tensors is the whole file.
            let header = tensors.first().map_or(shard.len(), |tensor| tensor.data.offset());
            let mut sha256 = Sha256::new();
            read_chunks(shard, 0, header, &mut buffer, |bytes| sha256.update(bytes))?;
            for tensor in tensors {
                let mut scan = Scan::new(tensor.dtype);
                let data = &tensor.data;
                read_chunks(shard, data.offset(), data.len(), &mut buffer, |bytes| {
                    sha256.update(bytes);
                    scan.update(bytes);
                    report.bytes += bytes.len() as u64;
                    progress(report.bytes);
                })?;
                report.tensors += 1;
                report.non_finite.extend(scan.finish(tensor));
            }
            report.shards.push(compare(shard, &hex(&sha256.finalize()), &lists));
        }
        report.non_finite.sort_by(|a, b| a.tensor.cmp(&b.tensor));
        for (file, (list, expected)) in lists {
            if self.shards().iter().all(|shard| shard.name() != file) {
                let status = self.listed_status(&file, expected)?;
                report.listed.push(ListedFile { file, list, status });
            }
        }
        Ok(report)
    }

    fn listed_status(&self, file: &str, expected: String) -> Result<ListedStatus, CheckpointError> {
        if !is_plain_name(file) {
            return Ok(ListedStatus::Elsewhere);
        }
        let Some(sha256) = self.files().sha256(file)? else {
            return Ok(ListedStatus::Missing);
        };
        Ok(match sha256 == expected {
            true => ListedStatus::Match,
            false => ListedStatus::Mismatch { sha256, expected },
        })
    }

    /// Expected checksums: file name to list name and digest. A shard's own list comes last and
    /// so wins.
    fn checksum_lists(&self) -> Result<BTreeMap<String, (String, String)>, CheckpointError> {
        let mut expected = BTreeMap::new();
        let own = self.shards().iter().map(|shard| format!("{}.sha256", shard.name()));
        let shared = ["SHA256SUMS.txt", "SHA256SUMS"].map(str::to_owned);
        for list in shared.into_iter().chain(own) {
            if !self.files().contains(&list) {
                continue;
            }
            let text = self.text_file(&list)?.unwrap_or_default();
            let entries = parse_checksums(&text, &list).map_err(|line| {
                CheckpointError::ChecksumList { file: self.files().label(&list), line }
            })?;
            for (file, digest) in entries {
                expected.insert(file, (list.clone(), digest));
            }
        }
        Ok(expected)
    }
}

fn read_chunks(
    shard: &Shard,
    offset: u64,
    len: u64,
    buffer: &mut [u8],
    mut each: impl FnMut(&[u8]),
) -> Result<(), CheckpointError> {
    let mut done = 0;
    while done < len {
        let count = (len - done).min(buffer.len() as u64);
        let chunk = &mut buffer[..count as usize];
        shard.read_at(offset + done, chunk)?;
        each(chunk);
        done += count;
    }
    Ok(())
}

fn compare(
    shard: &Shard,
    sha256: &str,
    lists: &BTreeMap<String, (String, String)>,
) -> ShardChecksum {
    let status = match lists.get(shard.name()).cloned() {
        None => ChecksumStatus::Unlisted,
        Some((list, expected)) if expected == sha256 => ChecksumStatus::Match { list },
        Some((list, expected)) => ChecksumStatus::Mismatch { list, expected },
    };
    ShardChecksum {
        file: shard.name().to_owned(),
        bytes: shard.len(),
        sha256: sha256.to_owned(),
        status,
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Lines of `sha256sum`; a `<file>.sha256` may also hold the digest alone. The error is the number
/// of the bad line.
fn parse_checksums(text: &str, list: &str) -> Result<Vec<(String, String)>, usize> {
    let mut entries = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (digest, file) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        // `*` marks binary mode.
        let file = file.trim_start();
        let file = file.strip_prefix('*').unwrap_or(file);
        let file = file.strip_prefix("./").unwrap_or(file);
        let file = match (file, list.strip_suffix(".sha256")) {
            ("", Some(own)) => own,
            ("", None) => return Err(number + 1),
            (file, _) => file,
        };
        if digest.len() != 64 || !digest.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(number + 1);
        }
        entries.push((file.to_owned(), digest.to_ascii_lowercase()));
    }
    Ok(entries)
}

/// Counts the elements of one tensor whose exponent bits are all ones.
struct Scan {
    dtype: Dtype,
    elements: u64,
    count: u64,
    first: u64,
}

impl Scan {
    fn new(dtype: Dtype) -> Self {
        Scan { dtype, elements: 0, count: 0, first: 0 }
    }

    /// Takes the next bytes, a whole number of elements.
    fn update(&mut self, bytes: &[u8]) {
        match self.dtype {
            Dtype::BF16 => self.scan(bytes, |b| u16::from_le_bytes(b) & 0x7f80 == 0x7f80),
            Dtype::F16 => self.scan(bytes, |b| u16::from_le_bytes(b) & 0x7c00 == 0x7c00),
            Dtype::F32 => self.scan(bytes, |b| !f32::from_le_bytes(b).is_finite()),
            Dtype::F64 => self.scan(bytes, |b| !f64::from_le_bytes(b).is_finite()),
            _ => {}
        }
    }

    fn scan<const N: usize>(&mut self, bytes: &[u8], is_bad: impl Fn([u8; N]) -> bool) {
        let (elements, _) = bytes.as_chunks::<N>();
        let bad = elements.iter().filter(|&&element| is_bad(element)).count();
        if bad > 0 && self.count == 0 {
            let first = elements.iter().position(|&element| is_bad(element));
            self.first = self.elements + first.unwrap_or(0) as u64;
        }
        self.count += bad as u64;
        self.elements += elements.len() as u64;
    }

    fn finish(self, tensor: &Tensor) -> Option<NonFinite> {
        (self.count > 0).then(|| NonFinite {
            tensor: tensor.name.clone(),
            file: tensor.data.shard().name().to_owned(),
            count: self.count,
            first_index: self.first,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_lines() {
        let digest = "AB".repeat(32);
        let text = format!("# made by hand\n\n{digest}  a b.safetensors\n{digest} *./c\n");
        let lower = digest.to_lowercase();
        assert_eq!(
            parse_checksums(&text, "SHA256SUMS"),
            Ok(vec![("a b.safetensors".into(), lower.clone()), ("c".into(), lower.clone())])
        );
        assert_eq!(
            parse_checksums(&digest, "m.safetensors.sha256"),
            Ok(vec![("m.safetensors".into(), lower)])
        );
        assert_eq!(parse_checksums(&digest, "SHA256SUMS"), Err(1));
        assert_eq!(parse_checksums("\nabc  file", "SHA256SUMS"), Err(2));
    }
}
