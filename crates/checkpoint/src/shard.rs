//! One safetensors file and the byte ranges in it.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use crate::error::CheckpointError;

/// One safetensors file: mapped from disk, or embedded in the program.
pub struct Shard {
    name: String,
    len: u64,
    bytes: Bytes,
}

enum Bytes {
    Mapped { path: PathBuf, file: File, map: Mmap },
    Static(&'static [u8]),
}

impl Shard {
    /// Maps `file`, whose header was read and whose length was found to be `len`.
    ///
    /// Mapping reserves addresses only; pages are read when they are touched.
    pub(crate) fn map(
        name: &str,
        path: PathBuf,
        file: File,
        len: u64,
    ) -> Result<Self, CheckpointError> {
        let map = map_file(&file)
            .and_then(|map| match map.len() as u64 == len {
                true => Ok(map),
                false => Err(io::Error::other("its length changed while it was opened")),
            })
            .map_err(|source| CheckpointError::io(path.display(), "mapped", source))?;
        Ok(Shard { name: name.to_owned(), len, bytes: Bytes::Mapped { path, file, map } })
    }

    pub(crate) fn from_static(name: &str, bytes: &'static [u8]) -> Self {
        Shard { name: name.to_owned(), len: bytes.len() as u64, bytes: Bytes::Static(bytes) }
    }

    /// File name without its folder.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Length of the whole file in bytes, header included.
    #[allow(clippy::len_without_is_empty)] // an empty file is never a shard
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Path of the file; `None` for an embedded one.
    pub fn path(&self) -> Option<&Path> {
        match &self.bytes {
            Bytes::Mapped { path, .. } => Some(path),
            Bytes::Static(_) => None,
        }
    }

    /// Path or name, for messages.
    pub(crate) fn label(&self) -> String {
        match self.path() {
            Some(path) => path.display().to_string(),
            None => self.name.clone(),
        }
    }

    fn as_slice(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Mapped { map, .. } => map,
            Bytes::Static(bytes) => bytes,
        }
    }

    /// Reads through the file, not the map: the pages do not count as mapped memory, and a
    /// failing disk is an error here where it would be a signal in the map.
    pub(crate) fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), CheckpointError> {
        match &self.bytes {
            Bytes::Mapped { path, file, .. } => read_exact_at(file, out, offset)
                .map_err(|source| CheckpointError::io(path.display(), "read", source)),
            Bytes::Static(bytes) => {
                let start = offset as usize;
                out.copy_from_slice(&bytes[start..start + out.len()]);
                Ok(())
            }
        }
    }
}

impl fmt::Debug for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shard")
            .field("name", &self.name)
            .field("len", &self.len)
            .field("path", &self.path())
            .finish()
    }
}

#[allow(unsafe_code)]
fn map_file(file: &File) -> io::Result<Mmap> {
    // SAFETY: the map is read-only and its bytes are only ever read as `u8`, for which every bit
    // pattern is valid. Rust cannot rule out that another process changes or truncates the file
    // meanwhile; that is a documented condition of using a checkpoint (see the crate page).
    unsafe { Mmap::map(file) }
}

#[cfg(unix)]
fn read_exact_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut out: &mut [u8], mut offset: u64) -> io::Result<()> {
    use std::os::windows::fs::FileExt;
    while !out.is_empty() {
        match file.seek_read(out, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                out = &mut out[n..];
                offset += n as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A byte range of a [`Shard`]. Cheap to clone; keeps the shard alive.
///
/// The range lies inside the file, but starts at any byte offset: never cast its address to a
/// wider type.
#[derive(Clone)]
pub struct TensorRef {
    shard: Arc<Shard>,
    offset: u64,
    len: u64,
}

impl TensorRef {
    /// A range of `shard`, or `None` when it leaves the file.
    pub(crate) fn new(shard: Arc<Shard>, offset: u64, len: u64) -> Option<Self> {
        (offset.checked_add(len)? <= shard.len).then_some(TensorRef { shard, offset, len })
    }

    /// The bytes, without a copy. Pages are read from disk when they are first touched.
    pub fn map(&self) -> &[u8] {
        // The range was checked against the map's length, so both ends fit in `usize`.
        &self.shard.as_slice()[self.offset as usize..(self.offset + self.len) as usize]
    }

    /// Copies the bytes into `out`, which must be exactly [`len`](Self::len) bytes long.
    ///
    /// Reads the file itself, so that the copy does not leave the same pages mapped as well.
    pub fn read_into(&self, out: &mut [u8]) -> Result<(), CheckpointError> {
        if out.len() as u64 != self.len {
            return Err(CheckpointError::BufferLength {
                file: self.shard.label(),
                offset: self.offset,
                len: self.len,
                buffer: out.len(),
            });
        }
        self.shard.read_at(self.offset, out)
    }

    /// The sub-range that starts `offset` bytes into this one, or `None` when it leaves it.
    pub fn slice(&self, offset: u64, len: u64) -> Option<TensorRef> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        TensorRef::new(Arc::clone(&self.shard), self.offset + offset, len)
    }

    /// The file that holds the bytes.
    pub fn shard(&self) -> &Arc<Shard> {
        &self.shard
    }

    /// Offset of the first byte from the start of the file.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the range holds no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for TensorRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TensorRef({} @ {} + {})", self.shard.name, self.offset, self.len)
    }
}

/// Tensor bytes as a weight source: a range of a checkpoint, or bytes computed at load time.
#[derive(Clone)]
pub enum TensorBytes {
    /// A range of a shard.
    Mapped(TensorRef),
    /// Bytes made in memory, for example by repacking.
    Owned(Arc<[u8]>),
}

impl TensorBytes {
    /// The bytes, at any alignment.
    pub fn as_slice(&self) -> &[u8] {
        match self {
            TensorBytes::Mapped(range) => range.map(),
            TensorBytes::Owned(bytes) => bytes,
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        match self {
            TensorBytes::Mapped(range) => range.len as usize,
            TensorBytes::Owned(bytes) => bytes.len(),
        }
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl From<TensorRef> for TensorBytes {
    fn from(range: TensorRef) -> Self {
        TensorBytes::Mapped(range)
    }
}

impl From<Arc<[u8]>> for TensorBytes {
    fn from(bytes: Arc<[u8]>) -> Self {
        TensorBytes::Owned(bytes)
    }
}

impl From<Vec<u8>> for TensorBytes {
    fn from(bytes: Vec<u8>) -> Self {
        TensorBytes::Owned(bytes.into())
    }
}

impl fmt::Debug for TensorBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TensorBytes::Mapped(range) => range.fmt(f),
            TensorBytes::Owned(bytes) => write!(f, "Owned({} bytes)", bytes.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range() -> TensorRef {
        let shard = Shard::from_static("s", b"0123456789");
        TensorRef::new(Arc::new(shard), 2, 6).unwrap()
    }

    #[test]
    fn slices_stay_inside() {
        let range = range();
        assert_eq!(range.map(), b"234567");
        let part = range.slice(1, 5).unwrap();
        assert_eq!((part.offset(), part.len(), part.map()), (3, 5, &b"34567"[..]));
        assert!(range.slice(6, 0).unwrap().is_empty());
        assert!(range.slice(1, 6).is_none());
        assert!(range.slice(u64::MAX, 1).is_none());
        assert!(TensorRef::new(Arc::clone(range.shard()), 5, 6).is_none());
        assert!(TensorRef::new(Arc::clone(range.shard()), u64::MAX, 2).is_none());
    }

    #[test]
    fn read_into_wants_the_exact_length() {
        let mut out = [0; 6];
        range().read_into(&mut out).unwrap();
        assert_eq!(&out, b"234567");
        let error = range().read_into(&mut [0; 5]).unwrap_err();
        assert!(matches!(error, CheckpointError::BufferLength { buffer: 5, .. }));
    }

    #[test]
    fn tensor_bytes_from_either_side() {
        assert_eq!(TensorBytes::from(range()).as_slice(), b"234567");
        assert_eq!(TensorBytes::from(vec![1, 2]).len(), 2);
        assert!(TensorBytes::from(Vec::new()).is_empty());
    }
}
