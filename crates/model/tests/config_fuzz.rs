//! Arbitrary values in arbitrary fields of `config.json`.

mod common;

use common::{DIMENSIONS, config, plan};
use lily_device::{Limits, MemoryNeed, ScratchLayout};
use lily_ops::Plan;
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

/// Numbers of slots, tokens of context and rows of a step, sensible ones and absurd ones.
fn any_count() -> impl Strategy<Value = usize> {
    prop_oneof![0usize..5000, (0u32..usize::BITS).prop_map(|shift| 1 << shift), Just(usize::MAX)]
}

/// What every device takes for a plan at least. The tests run with overflow checks.
fn budget(plan: &Plan, limits: &Limits) -> MemoryNeed {
    let first = |op: &lily_ops::Op| op.reads().first().copied();
    let slots = limits.slots as u64;
    let state = (plan.state.recurrent_bytes() + plan.state.conv_bytes()) as u64;
    MemoryNeed {
        kv: (limits.pages as u64).saturating_mul(plan.state.page_bytes() as u64),
        state: slots.saturating_mul(state),
        scratch: ScratchLayout::new(plan, limits.rows, limits.outputs, first).bytes(),
        weights: plan.weights.iter().map(|w| w.bytes()).sum(),
    }
}

/// With sensible limits no budget of an accepted config reaches 64 bits; with absurd ones it stays there.
fn check_budget(plan: &Plan, [slots, context, rows]: [usize; 3]) -> Result<(), TestCaseError> {
    let usual = budget(plan, &Limits::new(8, 1 << 18, 4096)).total();
    prop_assert!(usual < 1 << 62, "{usual}");
    let need = budget(plan, &Limits::new(slots, context, rows));
    let parts = [need.kv, need.state, need.scratch, need.weights];
    prop_assert!(parts.iter().all(|part| need.total() >= *part));
    // The residual stream alone: what is absurd is not small after all.
    let hidden = plan.value(plan.hidden).width as u128 * 4;
    prop_assert!(u128::from(need.scratch) >= (rows as u128 * hidden).min(u64::MAX.into()));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    /// A config with arbitrary values in arbitrary fields is refused, or gives a plan that holds together.
    #[test]
    fn mutated_configs_never_panic(
        name in prop::sample::select(vec!["tiny-a", "tiny-c"]),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any_json()), 1..4),
        counts in [any_count(), any_count(), any_count()],
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
                check_budget(&plan, counts)?;
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

/// Configs at the bounds: as large as they are accepted.
#[test]
fn the_largest_configs_have_budgets() {
    let largest: [&[(&str, u64)]; 5] = [
        &[("hidden_size", 1 << 20), ("num_experts_per_tok", 8), ("vocab_size", 1 << 20)],
        &[("vocab_size", 1 << 24), ("hidden_size", 1 << 16)],
        &[
            ("num_experts", 1024),
            ("num_experts_per_tok", 1024),
            ("moe_intermediate_size", 1 << 14),
            ("hidden_size", 1 << 14),
        ],
        &[("num_attention_heads", 1 << 13), ("num_key_value_heads", 1 << 13), ("head_dim", 64)],
        &[
            ("linear_num_key_heads", 1),
            ("linear_num_value_heads", 1),
            ("linear_key_head_dim", 1 << 18),
            ("linear_value_head_dim", 1 << 18),
        ],
    ];
    for fields in largest {
        let mut config = config("tiny-a");
        let text = config["text_config"].as_object_mut().expect("an object");
        for (field, value) in fields {
            text[*field] = (*value).into();
        }
        text["rope_parameters"].as_object_mut().expect("an object").remove("mrope_section");
        let (_, plan) = plan(&config).unwrap_or_else(|e| panic!("{fields:?}: {e}"));
        for counts in [[1, 1, 1], [usize::MAX; 3], [1 << 40, 1 << 30, 1 << 50]] {
            check_budget(&plan, counts).unwrap_or_else(|e| panic!("{fields:?}: {e}"));
        }
    }
}
