//! Tests only: what they share. The tests themselves lie in `tests/`.
#![deny(missing_docs)]
#![forbid(unsafe_code)]

pub mod gpu;
#[cfg(all(metal_soft, not(target_os = "macos")))]
pub mod metal;
pub mod sweep;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use lily_checkpoint::{Checkpoint, parse_header};
use lily_ops::{CaseOutputs, HostTensor};
use serde_json::Value;

/// A reference checkpoint with its goldens.
pub struct Fixture {
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    /// The prompt.
    pub tokens: Vec<u32>,
    /// Chunk sizes of the mixed run.
    pub mixed_chunks: Vec<usize>,
    /// Greedy continuation of the prompt.
    pub greedy: Vec<u32>,
    arrays: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

/// The folder of a fixture.
pub fn fixture_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

impl Fixture {
    /// Opens `tiny-a` or `tiny-c`.
    pub fn open(name: &str) -> Self {
        let dir = fixture_path(name);
        let tokens = read_json(&dir.join("tokens.json"));
        let list = |field: &str| -> Vec<u32> {
            let items = tokens[field].as_array().expect("a list of numbers");
            items.iter().map(|x| x.as_u64().expect("a number") as u32).collect()
        };
        Self {
            checkpoint: Checkpoint::open(&dir.join("mlx")).expect("the fixture opens"),
            tokens: list("tokens"),
            mixed_chunks: list("mixed_chunks").iter().map(|&n| n as usize).collect(),
            greedy: list("greedy_f32"),
            arrays: read_arrays(&dir.join("golden.safetensors")),
        }
    }

    /// A golden array and its shape.
    pub fn golden(&self, name: &str) -> (&[usize], &[f32]) {
        let (shape, data) = self.arrays.get(name).unwrap_or_else(|| panic!("no golden {name}"));
        (shape, data)
    }
}

/// Reads a JSON file.
pub fn read_json(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn read_arrays(path: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let size = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let header = parse_header(&bytes[..8 + size], bytes.len() as u64, "golden.safetensors")
        .expect("the goldens are well formed");
    let array = |offset: u64, len: u64| {
        let data = &bytes[offset as usize..(offset + len) as usize];
        data.chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
    };
    header.tensors.into_iter().map(|t| (t.name, (t.shape, array(t.offset, t.len)))).collect()
}

/// Bits of everything a case leaves behind.
pub fn case_bits(outputs: &CaseOutputs) -> Vec<u32> {
    let mut all = Vec::new();
    for (_, tensor) in &outputs.values {
        match tensor {
            HostTensor::F32(x) => all.extend(x.iter().map(|x| x.to_bits())),
            HostTensor::U32(x) => all.extend(x),
        }
    }
    for s in &outputs.slots {
        let parts = [&s.recurrent, &s.conv, &s.k, &s.v];
        all.extend(parts.into_iter().flatten().map(|x| x.to_bits()));
    }
    all
}

/// Largest absolute difference; infinite if the lengths differ or a value is NaN.
pub fn max_abs(a: &[f32], b: &[f32]) -> f32 {
    if a.len() != b.len() || a.iter().chain(b).any(|x| x.is_nan()) {
        return f32::INFINITY;
    }
    a.iter().zip(b).fold(0.0, |m, (x, y)| m.max((x - y).abs()))
}

/// How many of the rows of `width` have their largest element in the same place.
pub fn argmax_equal(a: &[f32], b: &[f32], width: usize) -> usize {
    let top = |row: &[f32]| lily_ops::sample::argmax(row);
    a.chunks(width).zip(b.chunks(width)).filter(|(x, y)| top(x) == top(y)).count()
}
