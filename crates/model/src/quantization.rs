//! The `quantization` object of an MLX config.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::config::{bad, object};
use crate::error::ModelError;

/// What the config says of one module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModuleQuantization {
    /// Affine codes of so many bits in groups of 64.
    Affine {
        /// 4 or 8.
        bits: u8,
    },
    /// Not quantized.
    Dense,
}

/// What the config says of all modules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quantization {
    global: Option<ModuleQuantization>,
    modules: BTreeMap<String, ModuleQuantization>,
}

impl Quantization {
    /// Reads `quantization` and `quantization_config`, which must agree if both are there.
    pub fn read(config: &Value) -> Result<Self, ModelError> {
        let mut found: Option<Self> = None;
        for field in ["quantization", "quantization_config"] {
            let Some(value) = config.get(field).filter(|v| !v.is_null()) else { continue };
            let this = Self::read_object(field, value)?;
            if found.as_ref().is_some_and(|before| *before != this) {
                return Err(ModelError::Contradiction(
                    "quantization and quantization_config differ".into(),
                ));
            }
            found = Some(this);
        }
        Ok(found.unwrap_or_default())
    }

    fn read_object(field: &str, value: &Value) -> Result<Self, ModelError> {
        let map = object(value, field)?;
        if let Some(method) = map.get("quant_method") {
            return Err(bad(
                &format!("{field}.quant_method"),
                method,
                "only MLX affine quantization (4 or 8 bits, groups of 64) and bf16 are supported",
            ));
        }
        let global = Some(read_module(field, value, None)?);
        let mut modules = BTreeMap::new();
        for (name, entry) in map {
            if matches!(name.as_str(), "group_size" | "bits" | "mode") {
                continue;
            }
            let path = format!("{field}.{name}");
            let module = match entry {
                Value::Bool(false) => ModuleQuantization::Dense,
                Value::Object(_) => read_module(&path, entry, global)?,
                _ => return Err(bad(&path, entry, "an object or false is needed")),
            };
            modules.insert(name.clone(), module);
        }
        Ok(Self { global, modules })
    }

    /// What the config says of the module `stem` (a tensor's name without `.weight`): its own entry, and
    /// whether there is one, else the global values.
    pub fn of(&self, stem: &str) -> (Option<ModuleQuantization>, bool) {
        // Converters write the entries with or without the prefix of the text part.
        let short = stem.strip_prefix("language_model.").unwrap_or(stem);
        let own = [stem, short, &format!("language_model.{short}")]
            .into_iter()
            .find_map(|name| self.modules.get(name).copied());
        match own {
            Some(module) => (Some(module), true),
            None => (self.global, false),
        }
    }
}

fn read_module(
    path: &str,
    value: &Value,
    global: Option<ModuleQuantization>,
) -> Result<ModuleQuantization, ModelError> {
    let field = |name: &str| value.get(name).filter(|v| !v.is_null());
    let at = |name: &str| format!("{path}.{name}");
    if let Some(mode) = field("mode")
        && mode.as_str() != Some("affine")
    {
        return Err(bad(&at("mode"), mode, "only affine is supported"));
    }
    match field("group_size") {
        Some(g) if g.as_u64() != Some(64) => {
            return Err(bad(&at("group_size"), g, "only 64 is supported"));
        }
        None if global.is_none() => {
            return Err(ModelError::MissingField { field: at("group_size") });
        }
        _ => {}
    }
    match (field("bits"), global) {
        (Some(b), _) => match b.as_u64() {
            Some(bits @ (4 | 8)) => Ok(ModuleQuantization::Affine { bits: bits as u8 }),
            _ => Err(bad(&at("bits"), b, "only 4 and 8 are supported")),
        },
        (None, Some(global)) => Ok(global),
        (None, None) => Err(ModelError::MissingField { field: at("bits") }),
    }
}
