//! Arbitrary values in arbitrary fields of `config.json`.

mod common;

use common::{DIMENSIONS, config, plan};
use proptest::prelude::*;
use serde_json::Value;

/// Any JSON of a small size; numbers are of all magnitudes.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (0u64..300).prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (0u32..64).prop_map(|shift| Value::from(1u64 << shift)),
        any::<f64>().prop_map(Value::from),
        prop::sample::select(vec![
            "",
            "silu",
            "default",
            "yarn",
            "affine",
            "mxfp4",
            "full_attention",
            "linear_attention",
            "é∞",
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 12, 6, |inner| {
        let keys =
            prop::sample::select(vec!["bits", "group_size", "mode", "rope_theta", "type", "x"]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..9).prop_map(Value::from),
            prop::collection::vec((keys, inner), 0..6).prop_map(|pairs| {
                Value::Object(pairs.into_iter().map(|(k, v)| (k.to_owned(), v)).collect())
            }),
        ]
    })
}

/// Pointers to every value of a config.
fn pointers(value: &Value, at: &str, out: &mut Vec<String>) {
    if let Some(object) = value.as_object() {
        for (key, inner) in object {
            let pointer = format!("{at}/{key}");
            out.push(pointer.clone());
            pointers(inner, &pointer, out);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    /// A config with arbitrary values in arbitrary fields is refused, or gives a plan that holds together.
    #[test]
    fn mutated_configs_never_panic(
        name in prop::sample::select(vec!["tiny-a", "tiny-c"]),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any_json()), 1..4),
    ) {
        let original = config(name);
        let mut all = Vec::new();
        pointers(&original, "", &mut all);
        let mut changed = original.clone();
        let mut fields = Vec::new();
        for (index, value) in changes {
            let pointer = index.get(&all);
            if let Some(place) = changed.pointer_mut(pointer) {
                *place = value;
                fields.push(pointer.rsplit('/').next().unwrap_or_default().to_owned());
            }
        }
        match plan(&changed) {
            Err(error) => prop_assert!(error.to_string().starts_with("config.json"), "{error}"),
            Ok((parsed, plan)) => {
                plan.check().map_err(TestCaseError::fail)?;
                let total: u64 = plan.weights.iter().map(|w| w.bytes()).sum();
                prop_assert!(total < 1 << 58);
                // A field that the plan does not depend on leaves it as it was.
                let (was, before) = common::plan(&original).expect("the fixture's config");
                let steering = DIMENSIONS.into_iter().chain(["full_attention_interval", "layer_types",
                    "quantization", "quantization_config", "bits", "rope_parameters", "rms_norm_eps",
                    "rope_theta", "partial_rotary_factor", "text_config"]);
                let named = steering.collect::<Vec<_>>();
                if !fields.iter().any(|f| named.contains(&f.as_str()) || f.contains(".mlp.")) {
                    prop_assert_eq!(parsed, was);
                    prop_assert_eq!(format!("{plan:?}"), format!("{before:?}"));
                }
            }
        }
    }
}
