//! Every field of `config.json`: what is accepted, and the error for everything else.

mod common;

use common::{DIMENSIONS, config, expect_error, plan};
use lily_ops::LayerKind;
use serde_json::{Map, Value, json};

/// The config of tiny-a after `change` of its text part.
fn text(change: impl FnOnce(&mut Map<String, Value>)) -> Value {
    let mut config = config("tiny-a");
    change(config["text_config"].as_object_mut().expect("an object"));
    config
}

/// The config of tiny-a with one field of its text part set.
fn with(field: &str, value: Value) -> Value {
    text(|t| {
        t.insert(field.into(), value);
    })
}

fn fails(config: &Value, kind: &str, words: &[&str]) {
    expect_error(plan(config).map(|_| ()), kind, words);
}

#[test]
fn every_required_field_is_missed_by_name() {
    for field in DIMENSIONS.into_iter().chain(["model_type", "hidden_act", "rms_norm_eps"]) {
        let mut config = config("tiny-a");
        let text = config["text_config"].as_object_mut().expect("an object");
        text.remove(field).unwrap_or_else(|| panic!("tiny-a has {field}"));
        fails(&config, "MissingField", &[&format!("text_config.{field} is missing")]);
        config["text_config"][field] = Value::Null;
        fails(&config, "MissingField", &[&format!("text_config.{field} is missing")]);
    }
    let mut top = config("tiny-a");
    top.as_object_mut().expect("an object").remove("model_type");
    fails(&top, "MissingField", &["model_type is missing"]);
    let no_kinds = text(|t| {
        t.remove("layer_types");
        t.remove("full_attention_interval");
    });
    fails(&no_kinds, "MissingField", &["text_config.layer_types"]);
    for field in ["rope_theta", "partial_rotary_factor"] {
        let config = text(|t| {
            t.remove(field);
            t["rope_parameters"].as_object_mut().expect("an object").remove(field);
        });
        fails(&config, "MissingField", &[&format!("text_config.rope_parameters.{field}")]);
    }
}

#[test]
fn absurd_numbers_are_refused_by_name() {
    let absurd = [
        json!(0),
        json!(-1),
        json!(1.5),
        json!(1e300),
        json!(u64::MAX),
        json!(i64::MIN),
        json!((1u64 << 24) + 1),
        json!("64"),
        json!(true),
        json!([64]),
        json!({"a": 1}),
    ];
    for field in DIMENSIONS.into_iter().chain(["full_attention_interval"]) {
        for value in &absurd {
            fails(&with(field, value.clone()), "BadField", &[&format!("text_config.{field} is ")]);
        }
        // The largest number that one field may have, with any product that it enters.
        let _ = plan(&with(field, json!(1 << 24)));
    }
    for value in absurd.iter().filter(|v| **v != json!(1.5)) {
        fails(&with("rms_norm_eps", value.clone()), "BadField", &["text_config.rms_norm_eps"]);
    }
    fails(&with("rms_norm_eps", json!(1e-60)), "BadField", &["rms_norm_eps"]);
    let everything_large = text(|t| {
        for field in DIMENSIONS {
            if !matches!(field, "num_hidden_layers" | "linear_conv_kernel_dim") {
                t[field] = json!(1 << 24);
            }
        }
        t["rope_parameters"].as_object_mut().expect("an object").remove("mrope_section");
    });
    fails(&everything_large, "BadField", &["hidden_size is 16777216", "1048576"]);
}

#[test]
fn products_of_dimensions_are_bounded() {
    let cases: [(&[(&str, u64)], &str); 9] = [
        (&[("num_attention_heads", 1 << 15)], "2 × num_attention_heads × head_dim is 4194304"),
        (&[("linear_num_value_heads", 1 << 15)], "linear_num_value_heads × linear_value_head_dim"),
        (&[("vocab_size", 1 << 24), ("hidden_size", 1 << 17)], "vocab_size × hidden_size"),
        (
            &[("num_experts", 1 << 16), ("moe_intermediate_size", 1 << 20)],
            "num_experts × moe_intermediate_size × hidden_size is 8796093022208",
        ),
        (
            &[
                ("num_attention_heads", 1 << 13),
                ("num_key_value_heads", 1 << 13),
                ("head_dim", 256),
            ],
            "num_attention_heads",
        ),
        (&[("num_experts", 1 << 24)], "num_experts is 16777216"),
        (&[("num_experts", 2048), ("num_experts_per_tok", 1025)], "num_experts_per_tok is 1025"),
        (
            &[("num_experts", 1024), ("num_experts_per_tok", 1024), ("hidden_size", 1 << 15)],
            "num_experts_per_tok × hidden_size is 33554432",
        ),
        (
            &[
                ("num_experts", 512),
                ("num_experts_per_tok", 512),
                ("moe_intermediate_size", 1 << 16),
            ],
            "num_experts_per_tok × moe_intermediate_size is 33554432",
        ),
    ];
    for (fields, words) in cases {
        let config = text(|t| {
            for (field, value) in fields {
                t[*field] = json!(value);
            }
            t["rope_parameters"].as_object_mut().expect("an object").remove("mrope_section");
        });
        fails(&config, "BadField", &[words, "at most"]);
    }
}

#[test]
fn other_models_are_named() {
    for other in ["llama", "qwen3_moe", "qwen3_5", "qwen3_next", "qwen3_5_text", "gemma3"] {
        let mut nested = config("tiny-a");
        nested["model_type"] = json!(other);
        fails(&nested, "OtherModel", &[other, "qwen3_5_moe"]);
        let config = with("model_type", json!(other));
        fails(&config, "OtherModel", &["text_config.model_type", other]);
    }
    let llama = json!({"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32});
    fails(&llama, "OtherModel", &["llama"]);
    fails(&json!([1]), "BadField", &["config.json"]);
    fails(&json!({}), "MissingField", &["model_type"]);
    let mut nested = config("tiny-a");
    nested["text_config"] = json!("text");
    fails(&nested, "BadField", &["text_config is \"text\"", "object"]);
}

#[test]
fn variants_that_are_not_computed_are_refused() {
    let cases = [
        ("hidden_act", json!("gelu")),
        ("attn_output_gate", json!(false)),
        ("attention_bias", json!(true)),
        ("norm_topk_prob", json!(false)),
        ("decoder_sparse_step", json!(2)),
        ("mlp_only_layers", json!([0])),
        ("mamba_ssm_dtype", json!("bfloat16")),
        ("output_gate_type", json!("sigmoid")),
        ("use_sliding_window", json!(true)),
        ("tie_word_embeddings", json!(true)),
    ];
    for (field, value) in cases {
        let name = format!("text_config.{field}");
        fails(&with(field, value), "BadField", &[&name, "only "]);
    }
    let mut top = config("tiny-a");
    top["tie_word_embeddings"] = json!(true);
    fails(&top, "BadField", &["tie_word_embeddings"]);
    for (field, value) in [
        ("norm_topk_prob", json!(true)),
        ("decoder_sparse_step", json!(1)),
        ("mlp_only_layers", json!([])),
        ("output_gate_type", json!("swish")),
        ("unknown_field", json!({"of": "a newer exporter"})),
    ] {
        plan(&with(field, value)).unwrap_or_else(|e| panic!("{field}: {e}"));
    }
}

#[test]
fn contradictions_name_both_sides() {
    let mut kinds = vec!["linear_attention"; 8];
    let cases: [(Value, &[&str]); 9] = [
        (
            with("num_key_value_heads", json!(3)),
            &["num_attention_heads 8", "num_key_value_heads 3"],
        ),
        (
            with("linear_num_key_heads", json!(3)),
            &["linear_num_value_heads 8", "linear_num_key_heads 3"],
        ),
        (with("num_experts_per_tok", json!(11)), &["num_experts_per_tok 11", "num_experts 10"]),
        (with("num_hidden_layers", json!(7)), &["layer_types has 8", "num_hidden_layers is 7"]),
        (with("full_attention_interval", json!(3)), &["layer_types", "full_attention_interval"]),
        (with("layer_types", json!(kinds)), &["layer_types", "full_attention_interval"]),
        (with("rope_theta", json!(10000)), &["rope_theta", "10000000", "10000"]),
        (with("partial_rotary_factor", json!(0.5)), &["partial_rotary_factor", "0.25", "0.5"]),
        (with("head_dim", json!(60)), &["head_dim 60", "0.25"]),
    ];
    for (config, words) in cases {
        fails(&config, "Contradiction", words);
    }
    kinds[3] = "sliding_attention";
    fails(
        &with("layer_types", json!(kinds)),
        "BadField",
        &["text_config.layer_types[3]", "sliding_attention", "full_attention"],
    );
    fails(&with("layer_types", json!("all")), "BadField", &["layer_types", "a list"]);
    fails(&with("num_hidden_layers", json!(1025)), "BadField", &["num_hidden_layers", "1024"]);
    for taps in [1, 17] {
        let config = with("linear_conv_kernel_dim", json!(taps));
        fails(&config, "BadField", &["text_config.linear_conv_kernel_dim"]);
    }
}

#[test]
fn layer_kinds_come_from_either_field() {
    let (want, _) = plan(&config("tiny-a")).expect("tiny-a's config");
    for field in ["layer_types", "full_attention_interval"] {
        let config = text(|t| {
            t.remove(field);
        });
        assert_eq!(plan(&config).expect(field).0, want);
    }
    // Fewer layers than the interval: no attention at all.
    let short = text(|t| {
        t.remove("layer_types");
        t["num_hidden_layers"] = json!(3);
    });
    let mut short = short;
    short["quantization"] = json!({"group_size": 64, "bits": 4});
    short["quantization_config"] = Value::Null;
    assert_eq!(plan(&short).expect("three layers").0.layers, [LayerKind::Recurrent; 3]);
}

#[test]
fn a_flat_config_is_the_same_model() {
    for name in ["tiny-a", "tiny-c"] {
        let nested = config(name);
        let want = plan(&nested).expect("the fixture's config");
        let mut flat = nested["text_config"].clone();
        flat["quantization"] = nested["quantization"].clone();
        for model_type in ["qwen3_5_moe_text", "qwen3_5_moe"] {
            flat["model_type"] = json!(model_type);
            let (config, flat_plan) = plan(&flat).expect("a flat config");
            assert_eq!(config, want.0);
            assert_eq!(flat_plan.to_string(), want.1.to_string());
        }
        flat.as_object_mut().expect("an object").remove("num_experts");
        fails(&flat, "MissingField", &["config.json: num_experts is missing"]);
    }
}

#[test]
fn the_rotary_embedding_is_spelled_in_many_ways() {
    let want = plan(&config("tiny-a")).expect("tiny-a's config").0;
    assert_eq!((want.rope_theta, want.rope_dims), (1e7, 16));
    let set = |rope: Value, flat: &[(&str, Value)]| {
        text(|t| {
            for field in ["rope_parameters", "partial_rotary_factor"] {
                t.remove(field);
            }
            for (name, value) in rope.as_object().expect("an object") {
                t.insert(name.clone(), value.clone());
            }
            for (name, value) in flat {
                t.insert((*name).into(), value.clone());
            }
        })
    };
    let (theta, factor) = (("rope_theta", json!(1e7)), ("partial_rotary_factor", json!(0.25)));
    let both = json!({"rope_theta": 10_000_000, "partial_rotary_factor": 0.25});
    let kind = |spelling: &str, kind: &str| {
        let mut rope = both.clone();
        rope[spelling] = json!(kind);
        rope
    };
    let accepted = [
        set(json!({}), &[theta.clone(), factor.clone()]),
        set(json!({"rope_parameters": both}), &[]),
        set(json!({"rope_scaling": both}), &[]),
        set(json!({"rope_scaling": null}), &[theta.clone(), factor.clone()]),
        set(json!({"rope_parameters": {"rope_theta": 1e7}}), std::slice::from_ref(&factor)),
        set(json!({"rope_parameters": kind("type", "default")}), &[theta.clone(), factor.clone()]),
        set(json!({"rope_parameters": kind("rope_type", "default")}), &[]),
        set(json!({"rope_parameters": kind("rope_type", "mrope")}), &[]),
    ];
    for config in &accepted {
        assert_eq!(plan(config).unwrap_or_else(|e| panic!("{config}: {e}")).0, want);
    }
    for (object, spelling) in
        [("rope_parameters", "type"), ("rope_parameters", "rope_type"), ("rope_scaling", "type")]
    {
        let config = set(json!({object: kind(spelling, "yarn")}), &[]);
        let name = format!("text_config.{object}.{spelling}");
        fails(&config, "BadField", &[&name, "yarn", "without scaling"]);
    }
    // Scaling beside parameters that look harmless.
    let mut hidden = config("tiny-a");
    hidden["text_config"]["rope_scaling"] = json!({"type": "yarn", "factor": 4.0});
    fails(&hidden, "BadField", &["text_config.rope_scaling.type", "yarn"]);

    for (field, value) in [
        ("rope_theta", json!(0)),
        ("rope_theta", json!(-1e7)),
        ("rope_theta", json!("10000000")),
        ("partial_rotary_factor", json!(0)),
        ("partial_rotary_factor", json!(1.25)),
        ("mrope_section", json!([3, 3, 3])),
        ("mrope_section", json!([u64::MAX, 9])),
        ("mrope_section", json!("all")),
    ] {
        let mut config = config("tiny-a");
        config["text_config"]["rope_parameters"][field] = value;
        let kind = if field == "mrope_section" { "Contradiction" } else { "BadField" };
        fails(&config, kind, &[field]);
    }
}

#[test]
fn quantization_objects() {
    let set = |quantization: Value| {
        let mut config = config("tiny-a");
        config["quantization"] = quantization.clone();
        config["quantization_config"] = quantization;
        config
    };
    let module = "language_model.model.layers.0.mlp.gate";
    let own = |entry: Value| set(json!({"group_size": 64, "bits": 4, module: entry}));
    let cases: [(Value, &str, &[&str]); 16] = [
        (
            set(json!({"group_size": 32, "bits": 4, "mode": "mxfp4"})),
            "BadField",
            &["quantization.mode", "mxfp4", "affine"],
        ),
        (
            set(json!({"group_size": 16, "bits": 4, "mode": "nvfp4"})),
            "BadField",
            &["quantization.mode", "nvfp4", "affine"],
        ),
        (
            set(json!({"group_size": 64, "bits": 4, "mode": 7})),
            "BadField",
            &["quantization.mode", "7"],
        ),
        (
            set(json!({"group_size": 32, "bits": 4})),
            "BadField",
            &["quantization.group_size", "32", "64"],
        ),
        (
            set(json!({"group_size": 64, "bits": 6})),
            "BadField",
            &["quantization.bits", "6", "4 or 8"],
        ),
        (set(json!({"group_size": 64, "bits": "4"})), "BadField", &["quantization.bits"]),
        (set(json!({"group_size": 64})), "MissingField", &["quantization.bits"]),
        (set(json!({"bits": 4})), "MissingField", &["quantization.group_size"]),
        (set(json!("4bit")), "BadField", &["quantization", "4bit"]),
        (set(json!({"quant_method": "fp8"})), "BadField", &["quantization.quant_method", "fp8"]),
        (own(json!({"group_size": 64, "bits": 3})), "BadField", &[module, "bits", "3"]),
        (own(json!({"group_size": 128, "bits": 4})), "BadField", &[module, "group_size", "128"]),
        (own(json!({"bits": 4, "mode": "mxfp8"})), "BadField", &[module, "mode", "mxfp8"]),
        (own(json!(4)), "BadField", &[module, "false"]),
        (
            set(json!({"group_size": 64, "bits": 4, "model.layers.0.mlp.gaet": {"bits": 8}})),
            "UnknownModule",
            &["model.layers.0.mlp.gaet", "config.json"],
        ),
        (
            set(
                json!({"group_size": 64, "bits": 4, "model.layers.0.input_layernorm": {"bits": 8}}),
            ),
            "Contradiction",
            &["layers.0.input_layernorm", "never quantized"],
        ),
    ];
    for (config, kind, words) in cases {
        fails(&config, kind, words);
    }
    let twice = json!({"group_size": 64, "bits": 4, module: {"bits": 8}, "model.layers.0.mlp.gate": {"bits": 4}});
    fails(&set(twice), "Contradiction", &["two entries", "model.layers.0.mlp.gate"]);

    let mut differ = config("tiny-a");
    differ["quantization_config"]["bits"] = json!(8);
    fails(&differ, "Contradiction", &["quantization and quantization_config differ"]);

    let bits = |config: &Value, role: &str| {
        let (_, plan) = plan(config).unwrap_or_else(|e| panic!("{e}"));
        let found = plan.weights.iter().find(|w| w.role == role);
        format!("{:?}", found.expect("the role exists").format)
    };
    let gate = "layers.0.mlp.gate";
    assert_eq!(bits(&config("tiny-a"), gate), "Affine { bits: 8 }");
    assert_eq!(bits(&own(json!(false)), gate), "Dense(Bf16)");
    assert_eq!(bits(&own(json!(true)), gate), "Affine { bits: 4 }");
    assert_eq!(bits(&own(json!({"bits": 8})), gate), "Affine { bits: 8 }");
    assert_eq!(bits(&set(Value::Null), gate), "Dense(Bf16)");
    for one_sided in ["quantization", "quantization_config"] {
        let mut config = config("tiny-a");
        config[one_sided] = Value::Null;
        assert_eq!(bits(&config, gate), "Affine { bits: 8 }");
    }
    // Entries with other prefixes, and of parts that are skipped.
    for prefix in ["", "language_model.", "model.language_model."] {
        let name = match prefix {
            "model.language_model." => "model.language_model.layers.0.mlp.gate".to_owned(),
            _ => format!("{prefix}model.layers.0.mlp.gate"),
        };
        let entries = json!({"group_size": 64, "bits": 4, name: {"bits": 8}, "lm_head": false,
            "vision_tower.blocks.0.attn.qkv": false, "mtp.fc": {"group_size": 32, "bits": 6}});
        assert_eq!(bits(&set(entries.clone()), gate), "Affine { bits: 8 }");
        assert_eq!(bits(&set(entries), "lm_head"), "Dense(Bf16)");
    }
    // Converters leave inputs that do not fill groups as they are.
    let mut narrow = with("moe_intermediate_size", json!(96));
    assert_eq!(bits(&narrow, "layers.0.mlp.switch_mlp.down_proj"), "Dense(Bf16)");
    let down = "language_model.model.layers.0.mlp.switch_mlp.down_proj";
    for field in ["quantization", "quantization_config"] {
        narrow[field][down] = json!({"bits": 4});
    }
    fails(&narrow, "Contradiction", &[down, "96 inputs"]);
}
