//! The rotary embedding's fields, in all the ways they are spelled.

use serde_json::Value;

use crate::error::ModelError;
use crate::fields::{Fields, shortened};

/// The rotary embedding.
pub(crate) struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Rotated elements of a head.
    pub dims: usize,
}

impl RopeConfig {
    /// Reads `rope_parameters` (or `rope_scaling`, its older name) and the same fields beside them.
    pub fn read(text: &Fields, head_dim: usize) -> Result<Self, ModelError> {
        let mut objects = Vec::new();
        for name in ["rope_parameters", "rope_scaling"] {
            let Some(rope) = text.inner(name)? else { continue };
            for field in ["rope_type", "type"] {
                // Multimodal configs may say mrope: for text its three positions are equal.
                if let Some(kind) = rope.get(field)
                    && !["default", "mrope"].map(Value::from).contains(kind)
                {
                    return Err(rope.bad(
                        field,
                        kind,
                        "only the default rotary embedding is supported, without scaling",
                    ));
                }
            }
            objects.push(rope);
        }
        let places: Vec<Fields> = objects.iter().chain([text]).cloned().collect();
        let theta = agreed(&places, "rope_theta", |x| x > 1.0, "a number above 1 is needed")?;
        let factor = agreed(
            &places,
            "partial_rotary_factor",
            |x| x > 0.0 && x <= 1.0,
            "a number above 0 and up to 1 is needed",
        )?;
        let dims = head_dim as f64 * factor;
        if dims < 2.0 || dims % 2.0 != 0.0 {
            return Err(ModelError::Contradiction(format!(
                "partial_rotary_factor {factor} of head_dim {head_dim} is no even number of elements"
            )));
        }
        let dims = dims as usize;
        for section in objects.iter().filter_map(|o| o.get("mrope_section")) {
            if sum(section) != Some(dims as u64 / 2) {
                return Err(ModelError::Contradiction(format!(
                    "mrope_section {} does not sum to the {} rotary pairs of head_dim {head_dim} and \
                     partial_rotary_factor {factor}",
                    shortened(section),
                    dims / 2
                )));
            }
        }
        Ok(Self { theta, dims })
    }
}

/// A number that stands in one place, or in several with the same value.
fn agreed(
    places: &[Fields],
    field: &str,
    accept: impl Fn(f64) -> bool,
    want: &str,
) -> Result<f64, ModelError> {
    let mut found: Option<f64> = None;
    for fields in places.iter().filter(|f| f.get(field).is_some()) {
        let x = fields.number(field, &accept, want)?;
        if let Some(before) = found
            && before != x
        {
            return Err(ModelError::Contradiction(format!(
                "{field} has two values, {before} and {x}"
            )));
        }
        found = Some(x);
    }
    let text = places.last().expect("the text part is always among the places");
    found.ok_or_else(|| ModelError::MissingField {
        field: text.name(&format!("rope_parameters.{field}")),
    })
}

fn sum(list: &Value) -> Option<u64> {
    list.as_array()?.iter().try_fold(0u64, |sum, n| sum.checked_add(n.as_u64()?))
}
