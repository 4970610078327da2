//! The real model's config: its bytes by class, and a checkpoint of its size whose tensors are never read.

mod common;

use std::collections::BTreeMap;

use lily_model::{ModelConfig, Precision, plan_of_config};
use lily_ops::plan::PAGE_TOKENS;
use lily_ops::{LayerKind, Plan};
use serde_json::{Value, json};

/// The values of the published config, with the quantization that current converters write.
fn config(router_bits: u8) -> Value {
    let mut config: Value =
        serde_json::from_str(include_str!("qwen36-35b-a3b.json")).expect("the fixture is JSON");
    let mut quantization = json!({"group_size": 64, "bits": 4, "mode": "affine"});
    if router_bits != 4 {
        for layer in 0..40 {
            for gate in ["gate", "shared_expert_gate"] {
                let module = format!("language_model.model.layers.{layer}.mlp.{gate}");
                quantization[module] = json!({"group_size": 64, "bits": router_bits});
            }
        }
    }
    config["quantization"] = quantization.clone();
    config["quantization_config"] = quantization;
    config
}

fn plan(router_bits: u8, precision: Precision) -> (ModelConfig, Plan) {
    plan_of_config("real", &config(router_bits), precision).expect("the real config")
}

fn per_token(plan: &Plan) -> u64 {
    plan.bytes_per_token().iter().map(|(_, bytes)| bytes).sum()
}

#[test]
fn bytes_by_class() {
    let (_, plan) = plan(8, Precision::Standard);
    let mut total: BTreeMap<&str, u64> = BTreeMap::new();
    for weight in &plan.weights {
        *total.entry(weight.class).or_default() += weight.bytes();
    }
    let read: BTreeMap<&str, u64> = plan.bytes_per_token().into_iter().collect();
    // Class, bytes in the checkpoint, bytes that a token reads.
    let want = [
        ("embed_tokens", 286_064_640, 1_152),
        ("lm_head", 286_064_640, 286_064_640),
        ("routed experts", 18_119_393_280, 566_231_040),
        ("shared expert", 70_778_880, 70_778_880),
        ("router", 22_282_240, 22_282_240),
        ("shared expert gate", 87_040, 87_040),
        ("GDN in_proj_qkv", 283_115_520, 283_115_520),
        ("GDN in_proj_z", 141_557_760, 141_557_760),
        ("GDN in_proj_a + b", 2_211_840, 2_211_840),
        ("GDN out_proj", 141_557_760, 141_557_760),
        ("GDN conv1d", 1_966_080, 1_966_080),
        ("GDN A_log, dt_bias, norm", 11_520, 11_520),
        ("attention q_proj", 94_371_840, 94_371_840),
        ("attention k_proj + v_proj", 11_796_480, 11_796_480),
        ("attention o_proj", 47_185_920, 47_185_920),
        ("q_norm, k_norm", 10_240, 10_240),
        ("layer norms", 331_776, 331_776),
    ];
    for (class, bytes, a_token) in want {
        assert_eq!(total.get(class), Some(&bytes), "{class}");
        assert_eq!(read.get(class), Some(&a_token), "{class}, a token");
    }
    assert_eq!((total.len(), read.len()), (want.len(), want.len()));
    assert_eq!(total.values().sum::<u64>(), 19_508_787_456);
    assert_eq!(per_token(&plan), 1_669_561_728);
}

#[test]
fn shape_and_state() {
    let (config, standard) = plan(8, Precision::Standard);
    assert_eq!((config.count(LayerKind::Recurrent), config.count(LayerKind::Attention)), (30, 10));
    assert_eq!((config.conv_channels(), config.value_width(), config.rope_dims), (8192, 4096, 64));
    let full: Vec<usize> = (0..40).filter(|&i| config.layers[i] == LayerKind::Attention).collect();
    assert_eq!(full, [3, 7, 11, 15, 19, 23, 27, 31, 35, 39]);
    let state = standard.state;
    assert_eq!((state.recurrent_bytes(), state.conv_bytes()), (62_914_560, 1_474_560));
    assert_eq!(state.page_bytes() / PAGE_TOKENS, 20_480);
    let precise = plan(8, Precision::Precise).1.state;
    assert_eq!((precise.recurrent_bytes(), precise.conv_bytes()), (62_914_560, 2 * 1_474_560));
    assert_eq!(precise.page_bytes() / PAGE_TOKENS, 2 * 20_480);
    // 4-bit routers: the published upload also holds A_log in f32, which no config says: 1,920 bytes more.
    assert_eq!(per_token(&plan(4, Precision::Standard).1), 1_659_036_928 - 1_920);
}

/// A file of the full size of which only headers and norms are written; the rest is a hole.
#[cfg(target_os = "linux")]
mod sparse {
    use std::fs::{self, File};
    use std::io::Write;
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    use lily_checkpoint::{Checkpoint, Dtype};
    use lily_ops::{ElementType, WeightFormat, WeightSpec};
    use serde_json::Map;

    use super::*;

    fn tensors(spec: &WeightSpec, a_log: Dtype) -> Vec<(String, Dtype, Vec<usize>)> {
        let stem = match spec.role.as_str() {
            "lm_head" => "language_model.lm_head".to_owned(),
            role => format!("language_model.model.{role}"),
        };
        let dense =
            |dtype, shape: &[usize]| vec![(format!("{stem}.weight"), dtype, shape.to_vec())];
        match spec.format {
            WeightFormat::Affine { bits } => {
                let parts = [
                    ("weight", Dtype::U32, spec.cols * usize::from(bits) / 32),
                    ("scales", Dtype::BF16, spec.cols / 64),
                    ("biases", Dtype::BF16, spec.cols / 64),
                ];
                let stack = (spec.class == "routed experts").then_some(spec.matrices);
                parts
                    .map(|(part, dtype, cols)| {
                        let shape = stack.into_iter().chain([spec.rows, cols]).collect();
                        (format!("{stem}.{part}"), dtype, shape)
                    })
                    .into()
            }
            WeightFormat::Dense(ElementType::Bf16) if spec.role.ends_with("conv1d") => {
                dense(Dtype::BF16, &[spec.rows, spec.cols, 1])
            }
            _ if spec.role.ends_with("A_log") => vec![(stem, a_log, vec![spec.cols])],
            _ if spec.role.ends_with("dt_bias") => vec![(stem, Dtype::BF16, vec![spec.cols])],
            _ => dense(Dtype::BF16, &[spec.cols]),
        }
    }

    fn write(dir: &Path, router_bits: u8, a_log: Dtype) {
        let config = config(router_bits);
        fs::write(dir.join("config.json"), config.to_string()).expect("writing the config");
        let (mut header, mut end, mut norms) = (Map::new(), 0u64, Vec::new());
        for spec in &plan(router_bits, Precision::Standard).1.weights {
            for (name, dtype, shape) in tensors(spec, a_log) {
                let begin = end;
                end += dtype.tensor_bytes(&shape).expect("it can be counted");
                if name.contains("norm") {
                    norms.push((begin, (end - begin) as usize));
                }
                let entry =
                    json!({"dtype": dtype.name(), "shape": shape, "data_offsets": [begin, end]});
                header.insert(name, entry);
            }
        }
        let header = Value::Object(header).to_string();
        let mut file = File::create(dir.join("model.safetensors")).expect("creating the file");
        file.write_all(&(header.len() as u64).to_le_bytes()).expect("writing");
        file.write_all(header.as_bytes()).expect("writing");
        let data = 8 + header.len() as u64;
        file.set_len(data + end).expect("a sparse file");
        for (at, len) in norms {
            let ones = [0x80, 0x3F].repeat(len / 2);
            file.write_all_at(&ones, data + at).expect("writing a norm");
        }
    }

    /// Resident bytes of this process.
    fn resident() -> u64 {
        let status = fs::read_to_string("/proc/self/status").expect("Linux has it");
        let line = status.lines().find(|l| l.starts_with("VmRSS:")).expect("a line");
        let kib = line.split_whitespace().nth(1).expect("a number");
        kib.parse::<u64>().expect("a number") * 1024
    }

    #[test]
    fn loading_reads_headers_and_norms_only() {
        for (router_bits, a_log, total, a_token) in [
            (8, Dtype::BF16, 19_508_787_456, 1_669_561_728u64),
            (4, Dtype::F32, 20_391_405_152 - 893_142_496, 1_659_036_928),
        ] {
            let dir = tempfile::tempdir().expect("a temporary folder");
            write(dir.path(), router_bits, a_log);
            let before = resident();
            let checkpoint = Checkpoint::open(dir.path()).expect("the container is well formed");
            let model = lily_model::load(&checkpoint, Precision::Standard).expect("it loads");
            let grown = resident().saturating_sub(before);
            assert!(grown < 48 << 20, "loading made {grown} bytes resident");
            assert_eq!(checkpoint.total_bytes(), total);
            assert_eq!(model.claims.len(), 1757);
            assert_eq!(per_token(&model.plan), a_token);
        }
    }
}
