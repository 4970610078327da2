//! Synthetic checkpoints: the real shape by arithmetic, a tiny one by running it.

use std::collections::HashMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use lily_bench::synth::{Shape, Synth, SynthError, expert_shares};
use lily_checkpoint::Checkpoint;
use lily_cpu::{CpuDevice, CpuOptions};
use lily_engine::{Cancel, Engine, EngineOptions, GenerateParams, SampleParams};
use lily_model::{Claim, Layout, Model, Precision, load};

/// The spec's table: bytes in the checkpoint and bytes read for a token, by class.
const TABLE: [(&str, u64, u64); 17] = [
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

#[test]
fn the_real_shape_has_the_real_bytes() {
    let plan = Synth::new(Shape::qwen3_6_35b_a3b(40)).plan().unwrap();
    let read: HashMap<&str, u64> = plan.bytes_per_token().into_iter().collect();
    let mut held: HashMap<&str, u64> = HashMap::new();
    for weight in &plan.weights {
        *held.entry(weight.class).or_default() += weight.bytes();
    }
    for (class, checkpoint, token) in TABLE {
        assert_eq!(held.remove(class), Some(checkpoint), "{class} in the checkpoint");
        assert_eq!(read.get(class), Some(&token), "{class} read for a token");
    }
    assert!(held.is_empty(), "{held:?}");
    assert_eq!(TABLE.iter().map(|t| t.1).sum::<u64>(), 19_508_787_456);
    assert_eq!(read.values().sum::<u64>(), 1_669_561_728);
}

fn write(dir: &Path, synth: &Synth) -> Model {
    let mut last = (0, 0);
    let written = synth.write(dir, |done, total| last = (done, total)).unwrap();
    assert_eq!(last, (written.bytes, written.bytes));
    let checkpoint = Checkpoint::open(dir).unwrap();
    assert_eq!(checkpoint.total_bytes(), written.bytes);
    assert_eq!(checkpoint.tensors().count(), written.tensors);
    assert!(checkpoint.verify(|_| ()).unwrap().is_clean());
    let model = load(&checkpoint, Precision::Standard).unwrap();
    assert_eq!(model.layout, Layout::Mlx);
    assert!(model.claims.iter().all(|(_, c)| matches!(c, Claim::Role(_))));
    model
}

fn engine(model: &Model) -> Engine {
    let device = CpuDevice::new(CpuOptions { threads: Some(1), isa: None });
    let options = EngineOptions::new(256, 1, 64);
    let (plan, weights) = (model.plan.clone(), model.weights.clone());
    Engine::new(&device, plan, weights, options).unwrap()
}

fn answer(model: &Model, prompt: &[u32]) -> Vec<u32> {
    let mut engine = engine(model);
    let mut session = engine.open_session().unwrap();
    let cancel = Cancel::new();
    engine.sync(&mut session, prompt, &cancel, |_, _| ()).unwrap();
    let params =
        GenerateParams { sample: SampleParams::GREEDY, max_tokens: 8, stop_ids: Vec::new() };
    // A step whose activations are not finite fails.
    engine.generate(&mut session, &params, &cancel, |_| ControlFlow::Continue(())).unwrap().ids
}

#[test]
fn a_tiny_one_loads_and_runs() {
    let dir = tempfile::tempdir().unwrap();
    let sharded = Synth { shard_bytes: 200_000, ..Synth::new(Shape::tiny()) };
    let model = write(&dir.path().join("a"), &sharded);
    assert!(fs::exists(dir.path().join("a/model.safetensors.index.json")).unwrap());
    assert!(!fs::exists(dir.path().join("a/model.safetensors")).unwrap());
    let whole = write(&dir.path().join("b"), &Synth::new(Shape::tiny()));
    let prompt: Vec<u32> = (0..70).map(|i| i * 7 % 512).collect();
    let ids = answer(&model, &prompt);
    assert_eq!(ids.len(), 8);
    assert_eq!(ids, answer(&whole, &prompt), "the shards do not change the values");
    let other = Synth { seed: 1, ..Synth::new(Shape::tiny()) };
    assert_ne!(ids, answer(&write(&dir.path().join("c"), &other), &prompt));
}

#[test]
fn one_seed_gives_one_file_and_layers_do_not_depend_on_their_number() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).join("model.safetensors");
    let synth = Synth::new(Shape::tiny());
    let four = write(&dir.path().join("a"), &synth);
    write(&dir.path().join("b"), &synth);
    assert_eq!(fs::read(file("a")).unwrap(), fs::read(file("b")).unwrap());
    let two = Synth::new(Shape { layers: 2, ..Shape::tiny() });
    let two = write(&dir.path().join("c"), &two);
    for (spec, weight) in two.plan.weights.iter().zip(&two.weights) {
        let i = four.plan.weights.iter().position(|s| s.role == spec.role).unwrap();
        assert_eq!(weight.codes.as_slice(), four.weights[i].codes.as_slice(), "{}", spec.role);
    }
}

/// How often each expert of layer 0 is among the chosen of 4,000 random inputs, busiest first.
fn shares(model: &Model, k: usize) -> Vec<f64> {
    let i = model.plan.weights.iter().position(|w| w.role == "layers.0.mlp.gate").unwrap();
    let (spec, weight) = (&model.plan.weights[i], model.weights[i].as_ref());
    let rows: Vec<Vec<f32>> = (0..spec.rows).map(|r| weight.row(spec, 0, r)).collect();
    let mut state = 1u64;
    let mut uniform = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    let n = 4000;
    let mut counts = vec![0f64; spec.rows];
    for _ in 0..n {
        let x: Vec<f32> =
            (0..spec.cols).map(|_| (0..4).map(|_| uniform()).sum::<f32>() - 2.0).collect();
        let logit = |row: &Vec<f32>| row.iter().zip(&x).map(|(w, x)| w * x).sum::<f32>();
        let mut logits: Vec<(f32, usize)> =
            rows.iter().enumerate().map(|(e, row)| (logit(row), e)).collect();
        logits.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (_, e) in &logits[..k] {
            counts[*e] += 1.0 / f64::from(n);
        }
    }
    counts.sort_by(|a, b| b.total_cmp(a));
    counts
}

#[test]
fn the_skew_is_the_load_of_the_experts() {
    let dir = tempfile::tempdir().unwrap();
    let shape = Shape { hidden_size: 1024, experts: 64, layers: 1, ..Shape::tiny() };
    let shape = Shape { experts_per_token: 4, ..shape };
    for skew in [0.0, 0.5, 1.0] {
        let synth = Synth { router_skew: skew, ..Synth::new(shape.clone()) };
        let got = shares(&write(&dir.path().join(skew.to_string()), &synth), 4);
        let want = expert_shares(64, 4, skew);
        for part in [0..4, 4..16, 16..64] {
            let sum = |s: &[f64]| s[part.clone()].iter().sum::<f64>();
            let (got, want) = (sum(&got), sum(&want));
            println!("skew {skew}, ranks {part:?}: {got:.3} experts a token, {want:.3} wanted");
            assert!((got / want - 1.0).abs() < 0.35, "{got} {want}");
        }
    }
}

/// Experts that a step of 64 tokens reads in each layer, as the device counts them.
fn experts_read(model: &Model) -> f64 {
    let mut engine = engine(model);
    let mut session = engine.open_session().unwrap();
    let tokens: Vec<u32> = (0..65).map(|i| i * 29 % 512).collect();
    engine.score(&mut session, &tokens, &Cancel::new(), |_, _| ()).unwrap();
    let counters = engine.program().counters();
    let downs = model
        .plan
        .weights
        .iter()
        .enumerate()
        .filter(|(_, w)| w.class == "routed experts" && w.role.ends_with("down_proj"));
    let read: Vec<f64> =
        downs.map(|(i, w)| counters.weight_bytes[i] as f64 / w.matrix_bytes() as f64).collect();
    read.iter().sum::<f64>() / read.len() as f64
}

#[test]
fn a_skewed_model_reads_fewer_experts() {
    let dir = tempfile::tempdir().unwrap();
    let shape = Shape { experts: 128, experts_per_token: 4, ..Shape::tiny() };
    let read = [0.0, 1.0, 2.0].map(|skew| {
        let synth = Synth { router_skew: skew, ..Synth::new(shape.clone()) };
        let read = experts_read(&write(&dir.path().join(skew.to_string()), &synth));
        let missed = |share: f64| (1.0 - share).powi(64);
        let want: f64 = expert_shares(128, 4, skew).iter().map(|s| 1.0 - missed(*s)).sum();
        println!("skew {skew}: 64 tokens read {read:.1} of 128 experts, {want:.1} expected");
        assert!((read / want - 1.0).abs() < 0.25, "skew {skew}: {read} experts, not {want}");
        read
    });
    assert!(read[0] > 1.2 * read[1] && read[1] > 1.2 * read[2], "{read:?}");
}

#[test]
fn refusals() {
    let dir = tempfile::tempdir().unwrap();
    let synth = Synth::new(Shape::tiny());
    synth.write_config(&dir.path().join("config")).unwrap();
    assert_eq!(fs::read_dir(dir.path().join("config")).unwrap().count(), 2);
    let again = synth.write(&dir.path().join("config"), |_, _| ()).unwrap_err();
    assert!(matches!(again, SynthError::NotEmpty { .. }), "{again}");
    assert!(again.to_string().contains("empty this one first"));

    let file = synth.write(&dir.path().join("config/config.json"), |_, _| ()).unwrap_err();
    assert!(matches!(file, SynthError::NotAFolder { .. }), "{file}");

    let skewed = Synth { router_skew: f64::NAN, ..synth.clone() };
    let error = skewed.write(&dir.path().join("x"), |_, _| ()).unwrap_err();
    assert!(matches!(error, SynthError::Skew(_)), "{error}");

    let mut shape = Shape::tiny();
    shape.kv_heads = 3;
    let error = Synth::new(shape).write(&dir.path().join("x"), |_, _| ()).unwrap_err();
    assert!(error.to_string().contains("this shape cannot be a model"), "{error}");
    assert!(!dir.path().join("x").exists());
}
