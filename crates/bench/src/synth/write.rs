//! Writing: the folder, the shards, the index.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use lily_checkpoint::SINGLE_FILE;
use lily_checkpoint::write::{HeaderStyle, SafetensorsWriter, TensorSpec, WriteError, write_index};
use lily_model::{Precision, plan_of_config};
use lily_ops::Plan;
use serde_json::Value;

use super::error::SynthError;
use super::shape::Shape;
use super::tensors::{Tensor, tensors};

/// Most bytes of one weight file, as MLX splits them.
pub const SHARD_BYTES: u64 = 5 << 30;

/// Bytes generated and written at a time.
const CHUNK: usize = 4 << 20;

/// Room asked for beside the tensors: headers, index, config files, the file system's own.
const SPARE_BYTES: u64 = 16 << 20;

/// A synthetic checkpoint.
#[derive(Clone, Debug)]
pub struct Synth {
    /// Its dimensions.
    pub shape: Shape,
    /// Seed of all its values.
    pub seed: u64,
    /// How uneven the experts' loads are: see [`expert_shares`](super::expert_shares). 0 is even.
    pub router_skew: f64,
    /// Most bytes of one weight file.
    pub shard_bytes: u64,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Weight files, in order.
    pub files: Vec<String>,
    /// Tensors.
    pub tensors: usize,
    /// Bytes of all tensors: the index's `total_size`.
    pub bytes: u64,
}

impl Synth {
    /// A checkpoint of this shape: seed 0, even experts, shards of at most [`SHARD_BYTES`].
    pub fn new(shape: Shape) -> Self {
        Self { shape, seed: 0, router_skew: 0.0, shard_bytes: SHARD_BYTES }
    }

    /// The plan of the model that the checkpoint will be.
    ///
    /// # Errors
    /// [`SynthError::Shape`] if the shape contradicts itself.
    pub fn plan(&self) -> Result<Plan, SynthError> {
        Ok(plan_of_config("synthetic", &self.shape.config(), Precision::Standard)?.1)
    }

    /// Writes `config.json` and `generation_config.json` only: enough for budgets.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn write_config(&self, out: &Path) -> Result<(), SynthError> {
        self.plan()?;
        self.check_skew()?;
        prepare_folder(out)?;
        self.write_config_files(out)
    }

    /// Writes the checkpoint into a new or empty folder. `progress` is told the tensor bytes written and all
    /// of them, after each chunk.
    ///
    /// # Errors
    /// A folder that holds something, too little room on the disk (found before anything is written), or what
    /// the file system answers.
    pub fn write(
        &self,
        out: &Path,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<Written, SynthError> {
        self.check_skew()?;
        let tensors = tensors(&self.plan()?, self);
        let total: u64 = tensors.iter().map(|t| t.bytes).sum();
        prepare_folder(out)?;
        check_space(out, total + SPARE_BYTES)?;
        let shards = split(&tensors, self.shard_bytes);
        let largest = shards.iter().map(|shard| shard.iter().map(|t| t.bytes).sum()).max();
        check_file_limit(largest.unwrap_or(0) + SPARE_BYTES, file_limit())?;
        self.write_config_files(out)?;

        let mut written = Written { files: Vec::new(), tensors: tensors.len(), bytes: total };
        let mut weight_map = BTreeMap::new();
        let mut done = 0;
        let mut buffer = vec![0u8; CHUNK];
        for (i, shard) in shards.iter().enumerate() {
            let file = match shards.len() {
                1 => SINGLE_FILE.to_owned(),
                n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
            };
            let path = out.join(&file);
            write_shard(&path, shard, &mut buffer, |bytes| {
                done += bytes;
                progress(done, total);
            })
            .map_err(|source| SynthError::Write { path, source })?;
            weight_map.extend(shard.iter().map(|t| (t.spec.name.clone(), file.clone())));
            written.files.push(file);
        }
        // Last, so that a folder left incomplete is not taken for a checkpoint.
        write_index(out, &weight_map, total).map_err(|source| SynthError::Write {
            path: out.join(lily_checkpoint::INDEX_FILE),
            source,
        })?;
        Ok(written)
    }

    fn write_config_files(&self, out: &Path) -> Result<(), SynthError> {
        write_json(&out.join("config.json"), &self.shape.config())?;
        write_json(&out.join("generation_config.json"), &self.shape.generation_config())
    }

    fn check_skew(&self) -> Result<(), SynthError> {
        match (0.0..=10.0).contains(&self.router_skew) {
            true => Ok(()),
            false => Err(SynthError::Skew(self.router_skew)),
        }
    }
}

fn write_shard(
    path: &Path,
    tensors: &[Tensor],
    buffer: &mut [u8],
    mut progress: impl FnMut(u64),
) -> Result<(), WriteError> {
    let specs: Vec<TensorSpec> = tensors.iter().map(|t| t.spec.clone()).collect();
    let mut writer = SafetensorsWriter::create(path, &specs, HeaderStyle::Mlx)?;
    for tensor in tensors {
        let mut offset = 0;
        while offset < tensor.bytes {
            let count = (tensor.bytes - offset).min(buffer.len() as u64);
            let chunk = &mut buffer[..count as usize];
            tensor.fill.fill(tensor.stream, offset, chunk);
            writer.write(&tensor.spec.name, chunk)?;
            offset += count;
            progress(count);
        }
    }
    writer.finish().map(drop)
}

/// Cuts the tensors into runs of at most `limit` bytes, or of one tensor that is larger.
fn split(tensors: &[Tensor], limit: u64) -> Vec<&[Tensor]> {
    let mut shards = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (i, tensor) in tensors.iter().enumerate() {
        if i > start && bytes + tensor.bytes > limit {
            shards.push(&tensors[start..i]);
            (start, bytes) = (i, 0);
        }
        bytes += tensor.bytes;
    }
    shards.push(&tensors[start..]);
    shards
}

fn prepare_folder(out: &Path) -> Result<(), SynthError> {
    let path = out.to_path_buf();
    if out.exists() && !out.is_dir() {
        return Err(SynthError::NotAFolder { path });
    }
    match fs::create_dir_all(out).and_then(|()| Ok(fs::read_dir(out)?.next().is_none())) {
        Ok(true) => Ok(()),
        Ok(false) => Err(SynthError::NotEmpty { path }),
        Err(source) => Err(SynthError::Io { path, source }),
    }
}

#[cfg(unix)]
pub(super) fn check_space(out: &Path, need: u64) -> Result<(), SynthError> {
    // A file system that does not tell is taken at its word when it refuses a write.
    let Ok(stat) = rustix::fs::statvfs(out) else { return Ok(()) };
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    match need <= free {
        true => Ok(()),
        false => Err(SynthError::NoSpace { path: out.to_path_buf(), need, free }),
    }
}

#[cfg(not(unix))]
pub(super) fn check_space(_: &Path, _: u64) -> Result<(), SynthError> {
    Ok(())
}

/// Most bytes of a file that the system lets this process write.
#[cfg(unix)]
pub(super) fn file_limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Fsize).current
}

#[cfg(not(unix))]
pub(super) fn file_limit() -> Option<u64> {
    None
}

pub(super) fn check_file_limit(need: u64, limit: Option<u64>) -> Result<(), SynthError> {
    match limit {
        Some(limit) if limit < need => Err(SynthError::FileLimit { need, limit }),
        _ => Ok(()),
    }
}

fn write_json(path: &Path, value: &Value) -> Result<(), SynthError> {
    let text = format!("{value:#}\n");
    fs::write(path, text).map_err(|source| SynthError::Io { path: path.to_path_buf(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_keep_to_the_limit() {
        let tensors =
            tensors(&Synth::new(Shape::tiny()).plan().unwrap(), &Synth::new(Shape::tiny()));
        let all: u64 = tensors.iter().map(|t| t.bytes).sum();
        assert_eq!(split(&tensors, all).len(), 1);
        let shards = split(&tensors, 100_000);
        assert!(shards.len() > 2);
        assert_eq!(shards.iter().map(|s| s.len()).sum::<usize>(), tensors.len());
        for shard in shards {
            assert!(shard.len() == 1 || shard.iter().map(|t| t.bytes).sum::<u64>() <= 100_000);
        }
    }

    #[test]
    fn the_real_checkpoint_has_four_shards_of_at_most_five_gib() {
        let synth = Synth::new(Shape::qwen3_6_35b_a3b(Shape::REAL_LAYERS));
        let tensors = tensors(&synth.plan().unwrap(), &synth);
        assert_eq!(tensors.len(), 1757);
        assert_eq!(tensors.iter().map(|t| t.bytes).sum::<u64>(), 19_508_787_456);
        assert_eq!(split(&tensors, SHARD_BYTES).len(), 4);
    }

    #[test]
    fn a_limit_on_the_size_of_files_is_told() {
        assert!(check_file_limit(100, None).is_ok() && check_file_limit(100, Some(100)).is_ok());
        let text = check_file_limit(100, Some(99)).unwrap_err().to_string();
        assert!(text.contains("100 bytes") && text.contains("ulimit -f"), "{text}");
    }

    #[test]
    #[cfg(unix)]
    fn too_little_room_is_told_with_figures() {
        let dir = tempfile::tempdir().unwrap();
        let text = check_space(dir.path(), 1 << 60).unwrap_err().to_string();
        assert!(text.contains("1152921504606846976 bytes"), "{text}");
        assert!(text.contains("fewer layers"), "{text}");
    }
}
