//! Reference checkpoints with something changed: each is accepted as it should be, or refused by name.

mod common;

use common::{Draft, is_centred_norm, map_bf16};
use lily_checkpoint::Dtype;
use lily_model::{Claim, Layout};
use lily_ops::{ElementType, WeightFormat};
use serde_json::json;

const AT: &str = "language_model.model.layers.0";

#[test]
fn reference_checkpoints_load() {
    for name in ["tiny-a", "tiny-c"] {
        let model = Draft::of(name).load().expect(name);
        assert_eq!(model.layout, Layout::Mlx);
        let bits = |role: &str| {
            let weight = model.plan.weights.iter().find(|w| w.role == role);
            weight.expect(role).format
        };
        let router = if name == "tiny-a" { 8 } else { 4 };
        assert_eq!(bits("layers.0.mlp.gate"), WeightFormat::Affine { bits: router });
        assert_eq!(bits("layers.0.mlp.shared_expert_gate"), WeightFormat::Affine { bits: router });
        assert_eq!(bits("lm_head"), WeightFormat::Affine { bits: 4 });
        let a_log = if name == "tiny-a" { ElementType::Bf16 } else { ElementType::F32 };
        assert_eq!(bits("layers.0.linear_attn.A_log"), WeightFormat::Dense(a_log));
        let skipped =
            |rule| model.claims.iter().filter(|(_, c)| *c == Claim::Skipped(rule)).count();
        assert_eq!(skipped("vision tower"), if name == "tiny-a" { 0 } else { 4 });
    }
}

#[test]
fn the_demo_model_loads() {
    let checkpoint = lily_demo::open().expect("the embedded checkpoint");
    let model = lily_model::load(&checkpoint, lily_model::Precision::Standard).expect("the demo");
    assert_eq!(model.claims.len(), checkpoint.tensors().count());
}

#[test]
fn prefixes() {
    let draft = Draft::of("tiny-a");
    let want = draft.load().expect("tiny-a").plan.to_string();
    let rest = |name: &str| name.strip_prefix("language_model.").expect("the prefix").to_owned();
    let body = |plan: &str| plan.lines().skip(1).map(String::from).collect::<Vec<_>>();

    let mut bare = draft.clone();
    bare.rename(rest);
    let hf_names = |name: &str| match rest(name).strip_prefix("model.") {
        Some(inner) => format!("model.language_model.{inner}"),
        None => rest(name),
    };
    let mut original = draft.clone();
    original.rename(hf_names);
    for draft in [bare.clone(), original] {
        let plan = draft.load().expect("another prefix").plan.to_string();
        assert_eq!(body(&plan), body(&want));
    }
    bare.add("language_model.model.embed_tokens.weight", Dtype::BF16, &[1]);
    bare.fails("UnknownLayout", &["two prefixes"]);
    let mut other = draft;
    other.rename(|name| format!("transformer.{name}"));
    other.fails("UnknownLayout", &["embed_tokens.weight", "model.language_model."]);
}

#[test]
fn every_tensor_is_needed() {
    let whole = Draft::of("tiny-a");
    let names: Vec<String> = whole.tensors.iter().map(|t| t.name.clone()).collect();
    // One layer of each kind and what lies outside the layers.
    let examined = names
        .iter()
        .filter(|n| !n.contains("layers.") || n.contains("layers.2.") || n.contains("layers.3."));
    for name in examined {
        let mut draft = whole.clone();
        draft.drop_tensor(name);
        let error = draft.load().map(|_| ()).expect_err(name).to_string();
        let stem = name.trim_end_matches(".scales").trim_end_matches(".weight");
        assert!(error.contains(stem) || name.contains("embed_tokens"), "{name}: {error}");
        assert!(error.contains("download it again") || error.contains("take "), "{name}: {error}");
    }
}

#[test]
fn every_shape_and_type_counts() {
    let whole = Draft::of("tiny-c");
    let examined = whole.tensors.iter().filter(|t| {
        !t.name.contains("layers.") && !t.name.starts_with("vision")
            || t.name.contains("layers.2.")
            || t.name.contains("layers.3.")
    });
    for original in examined {
        let check = |change: &str, shape: Vec<usize>, dtype: Dtype| {
            let mut draft = whole.clone();
            draft.drop_tensor(&original.name);
            draft.add(&original.name, dtype, &shape);
            // The values of norms are zero then; shape and type are looked at before.
            let error = draft.load().map(|_| ()).expect_err(&original.name).to_string();
            let stem = original.name.rsplit_once('.').expect("names have dots").0;
            assert!(error.contains(stem), "{} with {change}: {error}", original.name);
        };
        for axis in 0..original.shape.len() {
            for by in [0, 1, 2 * original.shape[axis], original.shape[axis] + 1] {
                let mut shape = original.shape.clone();
                shape[axis] = by;
                if shape != original.shape {
                    check(&format!("axis {axis} of length {by}"), shape, original.dtype);
                }
            }
        }
        check("another axis", [original.shape.clone(), vec![1]].concat(), original.dtype);
        check("no axes", Vec::new(), original.dtype);
        check("one axis less", original.shape[1..].to_vec(), original.dtype);
        for dtype in [Dtype::F16, Dtype::I32, Dtype::U8, Dtype::F64] {
            check(dtype.name(), original.shape.clone(), dtype);
        }
        if original.dtype == Dtype::U32 {
            check("F32", original.shape.clone(), Dtype::F32);
        }
    }
}

#[test]
fn bits_and_shapes_must_agree() {
    let mut draft = Draft::of("tiny-a");
    draft.config["quantization"]["bits"] = json!(8);
    draft.config["quantization_config"]["bits"] = json!(8);
    draft.fails("BadTensor", &["embed_tokens.weight", "4 bits", "config.json says 8"]);

    let gate = format!("{AT}.mlp.gate");
    let both = |value: serde_json::Value| {
        let mut draft = Draft::of("tiny-a");
        for field in ["quantization", "quantization_config"] {
            draft.config[field][&gate] = value.clone();
        }
        draft
    };
    both(json!({"group_size": 64, "bits": 4}))
        .fails("BadTensor", &["layers.0.mlp.gate.weight", "8 bits", "config.json says 4"]);
    both(json!(false)).fails("BadTensor", &["layers.0.mlp.gate.weight", "not quantized"]);
    both(json!(true)).fails("BadTensor", &["layers.0.mlp.gate.weight", "says 4"]);
    both(json!({"group_size": 64, "bits": 8})).load().expect("an entry without mode");
    let mut misspelled = both(json!({"bits": 8}));
    for field in ["quantization", "quantization_config"] {
        misspelled.config[field][format!("{AT}.mlp.gaet")] = json!({"bits": 8});
    }
    misspelled.fails("UnknownModule", &["layers.0.mlp.gaet"]);

    let mut silent = Draft::of("tiny-a");
    for field in ["quantization", "quantization_config"] {
        silent.config.as_object_mut().expect("an object").remove(field);
    }
    silent.fails("BadTensor", &["4 bits", "no quantization object"]);

    // Groups of 32 and microscaled formats, as their files look.
    let mut narrow = Draft::of("tiny-a");
    for part in ["scales", "biases"] {
        let name = format!("{AT}.mlp.gate.{part}");
        let mut shape = narrow.drop_tensor(&name).shape;
        shape[1] *= 2;
        narrow.add(&name, Dtype::BF16, &shape);
    }
    narrow.fails("BadTensor", &["mlp.gate.scales", "groups of 64"]);
    let mut mx = Draft::of("tiny-a");
    let name = format!("{AT}.mlp.gate.scales");
    let shape = mx.drop_tensor(&name).shape;
    mx.add(&name, Dtype::U8, &shape);
    mx.fails("BadTensor", &["mlp.gate.scales", "U8", "BF16", "affine"]);
    let mut three = Draft::of("tiny-a");
    let name = format!("{AT}.mlp.gate.weight");
    let mut shape = three.drop_tensor(&name).shape;
    shape[1] = 12;
    three.add(&name, Dtype::U32, &shape);
    three.fails("BadTensor", &["mlp.gate.weight", "12", "4 and 8 bits"]);
}

#[test]
fn dense_matrices_stand_beside_quantized_ones() {
    let dense = |dtype| {
        let mut draft = Draft::of("tiny-a");
        let stem = format!("{AT}.mlp.gate");
        for part in ["weight", "scales", "biases"] {
            draft.drop_tensor(&format!("{stem}.{part}"));
        }
        draft.add(&format!("{stem}.weight"), dtype, &[10, 128]);
        draft
    };
    for (dtype, element) in [(Dtype::BF16, ElementType::Bf16), (Dtype::F32, ElementType::F32)] {
        dense(dtype).fails("BadTensor", &["layers.0.mlp.gate.weight", "8 bits", "scales"]);
        let mut said = dense(dtype);
        for field in ["quantization", "quantization_config"] {
            said.config[field][format!("{AT}.mlp.gate")] = json!(false);
        }
        let model = said.load().expect("a dense router that the config names");
        let gate = model.plan.weights.iter().find(|w| w.role == "layers.0.mlp.gate");
        assert_eq!(gate.expect("the router").format, WeightFormat::Dense(element));
    }
    let mut half_precision = dense(Dtype::F16);
    for field in ["quantization", "quantization_config"] {
        half_precision.config[field][format!("{AT}.mlp.gate")] = json!(false);
    }
    half_precision.fails("BadTensor", &["mlp.gate.weight", "F16", "BF16 or F32"]);
}

#[test]
fn other_tensors_are_skipped_by_rule_or_refused() {
    let mut draft = Draft::of("tiny-a");
    let skipped = [
        ("mtp.fc.weight", "multi-token prediction"),
        ("language_model.mtp.norm.weight", "multi-token prediction"),
        ("vision_tower.merger.norm.weight", "vision tower"),
        ("model.visual.pos_embed.weight", "vision tower"),
        ("visual.pos_embed.weight", "vision tower"),
    ];
    for (name, _) in skipped {
        draft.add(name, Dtype::F16, &[3]);
    }
    let model = draft.load().expect("all of these are skipped");
    for (name, rule) in skipped {
        assert!(model.claims.contains(&(name.into(), Claim::Skipped(rule))), "{name}");
    }
    for extra in
        ["lora_a.weight", "language_model.model.layers.8.mlp.gate.weight", "mtpx.weight", "bias"]
    {
        let mut draft = draft.clone();
        draft.add(extra, Dtype::BF16, &[3]);
        draft.fails("UnclaimedTensors", &["1 tensor", extra]);
    }
    let mut biased = draft;
    biased.add(&format!("{AT}.mlp.gate.bias"), Dtype::BF16, &[10]);
    biased.fails("UnclaimedTensors", &["layers.0.mlp.gate.bias"]);
}

fn shift_norms(draft: &mut Draft, by: f32) {
    for tensor in draft.tensors.iter_mut().filter(|t| is_centred_norm(&t.name)) {
        map_bf16(&mut tensor.bytes, |x| x + by);
    }
}

/// The same checkpoint as the original lays it out, as far as names and shapes go.
fn original_layout(mut draft: Draft) -> Draft {
    let config = &draft.config["text_config"];
    let number = |field: &str| config[field].as_u64().expect("a number") as usize;
    let (experts, width, hidden) =
        (number("num_experts"), number("moe_intermediate_size"), number("hidden_size"));
    let names: Vec<String> = draft.tensors.iter().map(|t| t.name.clone()).collect();
    for name in names.iter().filter(|n| n.ends_with("conv1d.weight")) {
        draft.tensor(name).shape.swap(1, 2);
    }
    for mlp in names.iter().filter_map(|n| n.strip_suffix(".switch_mlp.gate_proj.weight")) {
        for proj in ["gate_proj", "up_proj", "down_proj"] {
            for part in ["weight", "scales", "biases"] {
                draft.drop_tensor(&format!("{mlp}.switch_mlp.{proj}.{part}"));
            }
        }
        draft.add(
            &format!("{mlp}.experts.gate_up_proj"),
            Dtype::BF16,
            &[experts, 2 * width, hidden],
        );
        draft.add(&format!("{mlp}.experts.down_proj"), Dtype::BF16, &[experts, hidden, width]);
    }
    draft.rename(|name| {
        let rest = name.strip_prefix("language_model.").unwrap_or(name);
        match rest.strip_prefix("model.") {
            Some(inner) => format!("model.language_model.{inner}"),
            None => rest.into(),
        }
    });
    shift_norms(&mut draft, -1.0);
    draft
}

#[test]
fn norms_are_shifted_once() {
    for name in ["tiny-a", "tiny-c"] {
        for (layout, draft) in
            [("MLX", Draft::of(name)), ("original", original_layout(Draft::of(name)))]
        {
            draft.load().unwrap_or_else(|e| panic!("{name} {layout}: {e}"));
            for (by, words) in [(1.0, "twice"), (-1.0, "never"), (-10.0, "never"), (1e9, "twice")] {
                let mut wrong = draft.clone();
                shift_norms(&mut wrong, by);
                wrong.fails("Norms", &[words, layout, "convert"]);
            }
            let mut broken = draft.clone();
            let norm = broken.tensors.iter_mut().find(|t| t.name.ends_with("q_norm.weight"));
            norm.expect("a norm").bytes[..2].copy_from_slice(&[0xC0, 0x7F]);
            broken.fails("Norms", &["self_attn.q_norm", "NaN"]);
        }
    }
    let demo = lily_demo::open().expect("the embedded checkpoint");
    let tensors = demo.tensors().map(|t| common::Entry {
        name: t.name.clone(),
        dtype: t.dtype,
        shape: t.shape.clone(),
        bytes: t.data.map().to_vec(),
    });
    let demo = Draft { config: demo.config().clone(), tensors: tensors.collect() };
    for (by, words) in [(1.0, "twice"), (-1.0, "never")] {
        let mut wrong = demo.clone();
        shift_norms(&mut wrong, by);
        wrong.fails("Norms", &[words]);
    }
}

#[test]
fn the_original_layout() {
    let draft = original_layout(Draft::of("tiny-c"));
    let model = draft.load().expect("the original layout");
    assert_eq!(model.layout, Layout::HuggingFace);
    let at = |role: &str| {
        let found = model.plan.weights.iter().position(|w| w.role == role);
        found.unwrap_or_else(|| panic!("no {role}"))
    };
    let [gate, up] = ["gate_proj", "up_proj"].map(|p| at(&format!("layers.0.mlp.experts.{p}")));
    let size = 64 * 192 * 2;
    let fused = model.weights[gate].codes.as_slice();
    assert_eq!(fused.len(), 32 * 2 * size);
    assert_eq!(model.weights[up].codes.as_slice().as_ptr(), fused[size..].as_ptr());
    assert_eq!(model.weights[gate].strides[0], 2 * size);
    let role = "layers.0.mlp.experts.gate_up_proj".to_owned();
    let name = "model.language_model.layers.0.mlp.experts.gate_up_proj".to_owned();
    assert!(model.claims.contains(&(name, Claim::Role(role))));

    let mut mixed = draft.clone();
    mixed.tensor("model.language_model.layers.1.linear_attn.conv1d.weight").shape.swap(1, 2);
    mixed.fails("BadTensor", &["layers.1.linear_attn.conv1d.weight", "another order"]);
    let mut moved = Draft::of("tiny-c");
    for tensor in moved.tensors.iter_mut().filter(|t| t.name.ends_with("conv1d.weight")) {
        tensor.shape.swap(1, 2);
    }
    moved.fails("UnknownLayout", &["experts.gate_up_proj is missing", "the original"]);
    let mut fused_in_mlx = draft.clone();
    for tensor in fused_in_mlx.tensors.iter_mut().filter(|t| t.name.ends_with("conv1d.weight")) {
        tensor.shape.swap(1, 2);
    }
    fused_in_mlx.fails("UnknownLayout", &["experts.gate_up_proj is there", "MLX"]);
    let mut square = draft;
    let conv = "model.language_model.layers.0.linear_attn.conv1d.weight";
    square.drop_tensor(conv);
    square.add(conv, Dtype::BF16, &[1024, 2, 2]);
    square.fails("BadTensor", &[conv, "three axes"]);
}

#[test]
fn a_stack_of_one_expert_keeps_its_axis() {
    let mut draft = Draft::of("tiny-a");
    draft.text()["num_experts"] = json!(1);
    draft.text()["num_experts_per_tok"] = json!(1);
    let cut = |draft: &mut Draft, axes: usize| {
        for t in &mut draft.tensors {
            if t.name.contains("switch_mlp") || t.name.contains("mlp.gate.") {
                let len = t.bytes.len() / t.shape[0];
                t.bytes.truncate(len);
                t.shape[0] = 1;
                if axes == 2 && t.name.contains("switch_mlp") {
                    t.shape.remove(0);
                }
            }
        }
    };
    let mut flat = draft.clone();
    cut(&mut flat, 2);
    flat.fails("BadTensor", &["switch_mlp", "[1, 64, "]);
    cut(&mut draft, 3);
    let model = draft.load().expect("one expert");
    assert_eq!(model.config.experts, 1);
}

#[test]
fn inputs_that_do_not_fill_groups() {
    let mut draft = Draft::of("tiny-a");
    draft.text()["moe_intermediate_size"] = json!(96);
    draft.fails("BadTensor", &["switch_mlp.gate_proj", "96"]);
    let mut draft = Draft::of("tiny-a");
    draft.text()["hidden_size"] = json!(96);
    draft.fails("BadTensor", &["embed_tokens.scales", "96 inputs", "groups of 64"]);
}

#[test]
fn mixed_bits_in_the_experts_share_one_activation() {
    let mut draft = Draft::of("tiny-a");
    let up = format!("{AT}.mlp.switch_mlp.up_proj");
    let mut shape = draft.drop_tensor(&format!("{up}.weight")).shape;
    shape[2] *= 2;
    draft.add(&format!("{up}.weight"), Dtype::U32, &shape);
    for field in ["quantization", "quantization_config"] {
        draft.config[field][&up] = json!({"group_size": 64, "bits": 8});
    }
    draft.load().expect("4-bit gate and 8-bit up projections");
}
