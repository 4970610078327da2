//! Small checkpoints, well-formed and not.
#![allow(dead_code)] // each test program uses a part

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use lily_checkpoint::write::{HeaderStyle, SafetensorsWriter, TensorSpec, write_index};
use lily_checkpoint::{Checkpoint, CheckpointError, Dtype};
use tempfile::TempDir;

pub const SHARD_1: &str = "model-00001-of-00002.safetensors";
pub const SHARD_2: &str = "model-00002-of-00002.safetensors";

/// A file of this header text and data.
pub fn raw(header: impl AsRef<[u8]>, data: &[u8]) -> Vec<u8> {
    let header = header.as_ref();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.extend(data);
    bytes
}

/// The entry of a U8 vector.
pub fn entry(name: &str, begin: u64, end: u64) -> String {
    let len = end - begin;
    format!(r#""{name}":{{"dtype":"U8","shape":[{len}],"data_offsets":[{begin},{end}]}}"#)
}

/// A well-formed file; the bytes of each tensor count up from 0.
pub fn shard(tensors: &[(&str, Dtype, &[usize])]) -> Vec<u8> {
    let specs: Vec<TensorSpec> =
        tensors.iter().map(|&(name, dtype, shape)| TensorSpec::new(name, dtype, shape)).collect();
    let mut writer = SafetensorsWriter::new(Vec::new(), &specs, HeaderStyle::Mlx).unwrap();
    for spec in &specs {
        let len = spec.dtype.tensor_bytes(&spec.shape).unwrap();
        let bytes: Vec<u8> = (0..len).map(|i| i as u8).collect();
        writer.write(&spec.name, &bytes).unwrap();
    }
    writer.finish().unwrap()
}

/// A folder of these files.
pub fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

/// A folder of one shard with this content, and a config.
pub fn single(bytes: &[u8]) -> TempDir {
    folder(&[("config.json", b"{}"), ("model.safetensors", bytes)])
}

/// Two shards of 4 bytes each: `a` in the first, `b` in the second. No index.
pub fn sharded() -> TempDir {
    folder(&[
        ("config.json", b"{}"),
        (SHARD_1, &shard(&[("a", Dtype::U8, &[4])])),
        (SHARD_2, &shard(&[("b", Dtype::U8, &[4])])),
    ])
}

/// Adds an index.
pub fn index(dir: &TempDir, entries: &[(&str, &str)], total_size: u64) {
    let weight_map: BTreeMap<String, String> =
        entries.iter().map(|&(tensor, shard)| (tensor.to_owned(), shard.to_owned())).collect();
    write_index(dir.path(), &weight_map, total_size).unwrap();
}

/// Why the folder does not open. Every message names a place and ends with a hint.
pub fn refused(dir: impl AsRef<Path>) -> CheckpointError {
    let dir = dir.as_ref();
    let error = match Checkpoint::open(dir) {
        Ok(_) => panic!("{} was accepted", dir.display()),
        Err(error) => error,
    };
    let message = error.to_string();
    assert!(message.starts_with(&dir.display().to_string()), "{message}");
    assert!(message.ends_with(&format!("({})", error.hint())), "{message}");
    assert!(message.len() < 1000, "{message}");
    error
}
