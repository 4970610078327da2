//! The `quantization` object of an MLX config.

use std::collections::{BTreeMap, BTreeSet};

use lily_ops::plan::GROUP;
use serde_json::Value;

use crate::error::ModelError;
use crate::fields::{bad, object};
use crate::names::skip_rule;

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
    /// Entries of single modules, by the name without the prefix of the text part.
    modules: BTreeMap<String, ModuleQuantization>,
}

/// A module's name in the text part alone: converters write entries with and without its prefix.
fn canonical(name: &str) -> String {
    let name = name.strip_prefix("language_model.").unwrap_or(name);
    match name.strip_prefix("model.language_model.") {
        Some(rest) => format!("model.{rest}"),
        None => name.into(),
    }
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
            return Err(bad(&format!("{field}.quant_method"), method, SUPPORTED));
        }
        let global = read_module(field, value, None)?;
        let mut modules = BTreeMap::new();
        for (name, entry) in map {
            // Entries of the parts that are skipped may ask for anything.
            let own = matches!(name.as_str(), "group_size" | "bits" | "mode");
            if own || skip_rule(&format!("{name}.")).is_some() {
                continue;
            }
            let path = format!("{field}.{name}");
            let module = match entry {
                Value::Bool(false) => ModuleQuantization::Dense,
                Value::Bool(true) => global,
                Value::Object(_) => read_module(&path, entry, Some(global))?,
                _ => return Err(bad(&path, entry, "an object or false is needed")),
            };
            if modules.insert(canonical(name), module).is_some_and(|before| before != module) {
                return Err(ModelError::Contradiction(format!(
                    "{field} has two entries for {}",
                    canonical(name)
                )));
            }
        }
        Ok(Self { global: Some(global), modules })
    }

    /// What the config says of the module `stem` (a tensor's name without `.weight`): its own entry, and
    /// whether there is one, else the global values.
    pub fn of(&self, stem: &str) -> (Option<ModuleQuantization>, bool) {
        match self.modules.get(&canonical(stem)) {
            Some(module) => (Some(*module), true),
            None => (self.global, false),
        }
    }

    /// Refuses entries for modules that are not among `stems`: they say something of another model, or are
    /// misspelled and leave the module they mean to the global values.
    pub(crate) fn check_modules(&self, stems: &BTreeSet<String>) -> Result<(), ModelError> {
        let known: BTreeSet<String> = stems.iter().map(|stem| canonical(stem)).collect();
        match self.modules.keys().find(|name| !known.contains(*name)) {
            Some(name) => Err(ModelError::UnknownModule { name: name.clone() }),
            None => Ok(()),
        }
    }
}

const SUPPORTED: &str =
    "only MLX affine quantization (4 or 8 bits, groups of 64) and bf16 are supported";

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
        return Err(bad(&at("mode"), mode, SUPPORTED));
    }
    match field("group_size") {
        Some(g) if g.as_u64() != Some(GROUP as u64) => {
            return Err(bad(&at("group_size"), g, SUPPORTED));
        }
        None if global.is_none() => {
            return Err(ModelError::MissingField { field: at("group_size") });
        }
        _ => {}
    }
    match (field("bits"), global) {
        (Some(b), _) => match b.as_u64() {
            Some(bits @ (4 | 8)) => Ok(ModuleQuantization::Affine { bits: bits as u8 }),
            _ => Err(bad(&at("bits"), b, SUPPORTED)),
        },
        (None, Some(global)) => Ok(global),
        (None, None) => Err(ModelError::MissingField { field: at("bits") }),
    }
}
