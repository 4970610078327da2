//! Which files of a folder are the weights.

use std::collections::{BTreeMap, BTreeSet};

use crate::checkpoint::MAX_TEXT_BYTES;
use crate::error::{CheckpointError, FolderProblem, ForeignWeights};
use crate::index::Index;
use crate::problem::ShardsProblem;
use crate::source::Source;
use crate::{INDEX_FILE, SINGLE_FILE};

/// The index, if there is one, and the names of the shards, sorted.
pub(crate) fn discover(source: &Source) -> Result<(Option<Index>, Vec<String>), CheckpointError> {
    if let Some(bytes) = source.read(INDEX_FILE, MAX_TEXT_BYTES)? {
        let index = Index::parse(&bytes).map_err(|problem| CheckpointError::Index {
            file: source.label(INDEX_FILE),
            problem,
        })?;
        let named: BTreeSet<&String> = index.weight_map.values().collect();
        let missing: Vec<String> =
            named.iter().filter(|name| !source.contains(name)).map(|&name| name.clone()).collect();
        if !missing.is_empty() {
            return Err(source.shards_error(ShardsProblem::Missing(missing)));
        }
        let names = named.into_iter().cloned().collect();
        return Ok((Some(index), names));
    }
    let files = source.list()?;
    let single = files.iter().any(|name| name == SINGLE_FILE);
    let names = match numbered(&files).map_err(|problem| source.shards_error(problem))? {
        Some(_) if single => return Err(source.shards_error(ShardsProblem::Ambiguous)),
        Some(names) => names,
        None if single => vec![SINGLE_FILE.to_owned()],
        None => {
            let found = foreign_weights(&files);
            return Err(source.folder_error(FolderProblem::NoWeights { found }));
        }
    };
    Ok((None, names))
}

/// The complete set `model-1-of-n` … `model-n-of-n` among the files, if there is any of it.
fn numbered(files: &[String]) -> Result<Option<Vec<String>>, ShardsProblem> {
    let mut shards: BTreeMap<u32, (u32, &String)> = BTreeMap::new();
    for file in files {
        let Some((i, n)) = shard_number(file) else {
            continue;
        };
        let other = shards
            .first_key_value()
            .filter(|(_, (other_n, _))| *other_n != n)
            .map(|(_, (_, other))| *other)
            .or_else(|| shards.get(&i).map(|(_, other)| *other));
        if let Some(other) = other {
            return Err(ShardsProblem::MixedSet { first: other.clone(), second: file.clone() });
        }
        shards.insert(i, (n, file));
    }
    let Some((_, &(n, _))) = shards.first_key_value() else {
        return Ok(None);
    };
    // A hostile name may ask for billions: a few of the missing ones are enough to say so.
    const NAMED: usize = 20;
    let missing: Vec<String> = (1..=n)
        .filter(|i| !shards.contains_key(i))
        .take(NAMED)
        .map(|i| format!("model-{i:05}-of-{n:05}.safetensors"))
        .collect();
    match missing.is_empty() {
        true => Ok(Some(shards.into_values().map(|(_, file)| file.clone()).collect())),
        false => Err(ShardsProblem::Missing(missing)),
    }
}

/// `i` and `n` of `model-i-of-n.safetensors` with 1 ≤ i ≤ n.
fn shard_number(name: &str) -> Option<(u32, u32)> {
    let digits = |text: &str| match text.bytes().all(|b| b.is_ascii_digit()) {
        true => text.parse::<u32>().ok(),
        false => None,
    };
    let (i, n) = name.strip_prefix("model-")?.strip_suffix(".safetensors")?.split_once("-of-")?;
    let (i, n) = (digits(i)?, digits(n)?);
    (1 <= i && i <= n).then_some((i, n))
}

fn foreign_weights(files: &[String]) -> Option<ForeignWeights> {
    let any = |endings: &[&str]| {
        files.iter().any(|file| endings.iter().any(|ending| file.ends_with(ending)))
    };
    if any(&[".safetensors"]) {
        Some(ForeignWeights::OtherSafetensors)
    } else if any(&[".gguf"]) {
        Some(ForeignWeights::Gguf)
    } else if any(&[".bin", ".pt", ".pth"]) {
        Some(ForeignWeights::PyTorch)
    } else if any(&[".npz"]) {
        Some(ForeignWeights::Npz)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_numbers() {
        assert_eq!(shard_number("model-00002-of-00010.safetensors"), Some((2, 10)));
        assert_eq!(shard_number("model-1-of-1.safetensors"), Some((1, 1)));
        for other in [
            "model.safetensors",
            "model-00000-of-00002.safetensors",
            "model-00003-of-00002.safetensors",
            "model-+1-of-00002.safetensors",
            "model--of-.safetensors",
            "model-00001-of-00002.safetensors.index.json",
            "model-99999999999-of-99999999999.safetensors",
        ] {
            assert_eq!(shard_number(other), None, "{other}");
        }
    }

    #[test]
    fn a_huge_count_in_a_name_is_cheap_to_refuse() {
        let files = ["model-1-of-4294967295.safetensors".to_owned()];
        let Err(ShardsProblem::Missing(missing)) = numbered(&files) else {
            panic!("one of four billion shards is not a set")
        };
        assert_eq!(missing.len(), 20);
    }
}
