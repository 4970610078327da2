//! `model.safetensors.index.json`: which shard holds which tensor.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::json;
use crate::problem::IndexProblem;
use crate::source::is_plain_name;

/// The parsed index, not yet compared with the shards.
#[derive(Debug)]
pub(crate) struct Index {
    /// Tensor name to shard file name.
    pub(crate) weight_map: BTreeMap<String, String>,
    /// `metadata.total_size`: the sum of all tensor bytes.
    pub(crate) total_size: Option<u64>,
}

impl Index {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, IndexProblem> {
        let mut object = json::parse_json_object(bytes).map_err(IndexProblem::Json)?;
        let total_size = total_size(object.get("metadata"))?;
        let entries = match object.remove("weight_map") {
            Some(Value::Object(entries)) if !entries.is_empty() => entries,
            _ => return Err(IndexProblem::NoWeightMap),
        };
        let mut weight_map = BTreeMap::new();
        for (tensor, shard) in entries {
            match shard {
                Value::String(shard) if is_shard_name(&shard) => weight_map.insert(tensor, shard),
                Value::String(shard) => return Err(IndexProblem::ShardName { shard }),
                _ => return Err(IndexProblem::Entry { tensor }),
            };
        }
        Ok(Index { weight_map, total_size })
    }
}

fn is_shard_name(name: &str) -> bool {
    is_plain_name(name) && name.ends_with(".safetensors")
}

fn total_size(metadata: Option<&Value>) -> Result<Option<u64>, IndexProblem> {
    let value = match metadata {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Object(metadata)) => metadata.get("total_size"),
        Some(_) => return Err(IndexProblem::Metadata),
    };
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(value) => whole_number(value).map(Some).ok_or(IndexProblem::TotalSizeType),
    }
}

/// Some writers of the index wrote the sum as a float.
fn whole_number(value: &Value) -> Option<u64> {
    const EXACT: f64 = (1u64 << 53) as f64;
    value.as_u64().or_else(|| {
        value
            .as_f64()
            .filter(|size| (0.0..EXACT).contains(size) && size.fract() == 0.0)
            .map(|size| size as u64)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn total_size_is_optional_and_whole() {
        let size = |metadata: &str| {
            let text = format!(r#"{{"metadata":{metadata},"weight_map":{{"a":"m.safetensors"}}}}"#);
            Index::parse(text.as_bytes()).map(|index| index.total_size)
        };
        assert_eq!(size("{}"), Ok(None));
        assert_eq!(size("null"), Ok(None));
        assert_eq!(size(r#"{"total_size":null}"#), Ok(None));
        assert_eq!(size(r#"{"total_size":7}"#), Ok(Some(7)));
        assert_eq!(size(r#"{"total_size":7.0}"#), Ok(Some(7)));
        for bad in ["7.5", "-1", "\"7\"", "1e300", "[]"] {
            let metadata = format!(r#"{{"total_size":{bad}}}"#);
            assert_eq!(size(&metadata), Err(IndexProblem::TotalSizeType), "{bad}");
        }
        assert!(matches!(size("7"), Err(IndexProblem::Metadata)));
    }
}
