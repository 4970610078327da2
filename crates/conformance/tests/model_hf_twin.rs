//! tiny-c dequantized, once as the original lays a checkpoint out and once as MLX does: the same bf16
//! values must give the same logits, to the bit.

use std::path::Path;
use std::sync::Arc;

use half::bf16;
use lily_checkpoint::write::{HeaderStyle, SafetensorsWriter, TensorSpec};
use lily_checkpoint::{Checkpoint, Dtype};
use lily_conformance::{Fixture, max_abs};
use lily_cpu::{CpuDevice, CpuOptions};
use lily_device::{Device, Input, Limits, Output, SegmentOut, SlotId, Step};
use lily_model::{Claim, Layout, Model, Precision};
use lily_ops::plan::GROUP;
use lily_ops::quant::bf16_at;
use serde_json::Value;

/// A tensor with its bytes.
#[derive(Clone)]
struct Entry {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Entry {
    fn of_bf16(name: &str, shape: &[usize], values: impl IntoIterator<Item = bf16>) -> Self {
        let bytes: Vec<u8> = values.into_iter().flat_map(bf16::to_le_bytes).collect();
        Self { name: name.into(), dtype: Dtype::BF16, shape: shape.into(), bytes }
    }

    fn bf16s(&self) -> Vec<f32> {
        (0..self.bytes.len() / 2).map(|i| bf16_at(&self.bytes, i)).collect()
    }
}

/// Every tensor of the text part, 4-bit matrices dequantized and rounded to bf16.
fn dequantized(checkpoint: &Checkpoint) -> Vec<Entry> {
    let bytes = |name: &str| checkpoint.get(name).expect("parts come together").data.map();
    let mut out = Vec::new();
    for tensor in checkpoint.tensors().filter(|t| t.name.starts_with("language_model.")) {
        if tensor.name.ends_with(".scales") || tensor.name.ends_with(".biases") {
            continue;
        }
        if tensor.dtype != Dtype::U32 {
            out.push(Entry {
                name: tensor.name.clone(),
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
                bytes: tensor.data.map().to_vec(),
            });
            continue;
        }
        let stem = tensor.name.strip_suffix(".weight").expect("codes are a weight");
        let (codes, scales, biases) =
            (tensor.data.map(), bytes(&format!("{stem}.scales")), bytes(&format!("{stem}.biases")));
        let mut shape = tensor.shape.clone();
        *shape.last_mut().expect("a matrix") *= 8;
        let value = |i: usize| {
            let code = (codes[i / 2] >> (4 * (i % 2))) & 15;
            let (s, b) = (bf16_at(scales, i / GROUP), bf16_at(biases, i / GROUP));
            bf16::from_f32(s * f32::from(code) + b)
        };
        out.push(Entry::of_bf16(&tensor.name, &shape, (0..codes.len() * 2).map(value)));
    }
    out
}

/// Whether the original stores the scale minus one.
fn is_centred_norm(name: &str) -> bool {
    ["layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight"]
        .iter()
        .any(|end| name.ends_with(end))
}

/// The original's tensors: its names, experts fused, taps last, norms zero-centred.
fn original(tensors: &[Entry]) -> Vec<Entry> {
    let name = |mlx: &str| {
        let rest = mlx.strip_prefix("language_model.").expect("the prefix");
        match rest.strip_prefix("model.") {
            Some(inner) => format!("model.language_model.{inner}"),
            None => rest.to_owned(),
        }
    };
    let mut out = Vec::new();
    for tensor in tensors {
        let mut entry = Entry { name: name(&tensor.name), ..tensor.clone() };
        if let Some(mlp) = entry.name.strip_suffix(".switch_mlp.gate_proj.weight") {
            let up_name = tensor.name.replace("gate_proj", "up_proj");
            let up = tensors.iter().find(|t| t.name == up_name).expect("the other half");
            let [experts, width, hidden] = tensor.shape[..] else { panic!("a stack has 3 axes") };
            let matrix = 2 * width * hidden;
            let halves = tensor.bytes.chunks(matrix).zip(up.bytes.chunks(matrix));
            let bytes = halves.flat_map(|(gate, up)| [gate, up].concat()).collect();
            let fused = format!("{mlp}.experts.gate_up_proj");
            let shape = vec![experts, 2 * width, hidden];
            out.push(Entry { name: fused, dtype: Dtype::BF16, shape, bytes });
            continue;
        }
        if entry.name.ends_with(".switch_mlp.up_proj.weight") {
            continue;
        }
        if let Some(mlp) = entry.name.strip_suffix(".switch_mlp.down_proj.weight") {
            entry.name = format!("{mlp}.experts.down_proj");
        }
        if entry.name.ends_with("conv1d.weight") {
            entry.shape.swap(1, 2);
        }
        if is_centred_norm(&tensor.name) {
            let centred = tensor.bf16s().into_iter().map(|w| bf16::from_f32(w - 1.0));
            entry = Entry::of_bf16(&entry.name, &tensor.shape, centred);
        }
        out.push(entry);
    }
    for skipped in ["mtp.fc.weight", "model.visual.pos_embed.weight"] {
        out.push(Entry::of_bf16(skipped, &[2, 3], [bf16::from_f32(0.5); 6]));
    }
    out
}

/// The twin's tensors: norms hold one plus what the original stores, in f32 where bf16 cannot.
fn twin(tensors: &[Entry]) -> Vec<Entry> {
    let norm = |tensor: &Entry| {
        let centred = tensor.bf16s().into_iter().map(|w| bf16::from_f32(w - 1.0).to_f32());
        let scales: Vec<f32> = centred.map(|w| 1.0 + w).collect();
        if scales.iter().all(|&s| bf16::from_f32(s).to_f32() == s) {
            return Entry::of_bf16(
                &tensor.name,
                &tensor.shape,
                scales.into_iter().map(bf16::from_f32),
            );
        }
        let bytes = scales.into_iter().flat_map(f32::to_le_bytes).collect();
        Entry { dtype: Dtype::F32, bytes, ..tensor.clone() }
    };
    let entry = |t: &Entry| if is_centred_norm(&t.name) { norm(t) } else { t.clone() };
    tensors.iter().map(entry).collect()
}

fn write(dir: &Path, config: &Value, tensors: &[Entry], style: HeaderStyle) -> Checkpoint {
    std::fs::write(dir.join("config.json"), config.to_string()).expect("writing the config");
    let spec = |t: &Entry| TensorSpec::new(t.name.clone(), t.dtype, t.shape.clone());
    let specs: Vec<TensorSpec> = tensors.iter().map(spec).collect();
    let path = dir.join(lily_checkpoint::SINGLE_FILE);
    let mut out = SafetensorsWriter::create(&path, &specs, style).expect("creating the file");
    for tensor in tensors {
        out.write(&tensor.name, &tensor.bytes).expect("writing a tensor");
    }
    out.finish().expect("every tensor is written");
    Checkpoint::open(dir).expect("the checkpoint opens")
}

/// Logits of every token on the CPU, in chunks.
fn logits(model: &Model, tokens: &[u32], chunks: &[usize]) -> Vec<f32> {
    let device = CpuDevice::new(CpuOptions::default());
    let limits = Limits { outputs: 16, ..Limits::new(1, 512, 64) };
    let program = device.prepare(Arc::clone(&model.plan), model.weights.clone(), limits);
    let mut program = program.expect("the plan is prepared");
    let (mut logits, mut rest) = (Vec::new(), tokens);
    for &n in chunks {
        let (chunk, after) = rest.split_at(n);
        let step = Step::one(SlotId(0), Input::Tokens(chunk.to_vec()), Output::Logits);
        match &program.run(step).expect("the step runs").segments[..] {
            [SegmentOut::Logits(rows)] => logits.extend_from_slice(rows),
            other => panic!("{other:?}"),
        }
        rest = after;
    }
    logits
}

#[test]
fn the_original_layout_gives_the_logits_of_its_mlx_twin() {
    let fixture = Fixture::open("tiny-c");
    let mut config = fixture.checkpoint.config().clone();
    for field in ["quantization", "quantization_config"] {
        config.as_object_mut().expect("an object").remove(field);
    }
    let tensors = dequantized(&fixture.checkpoint);
    let dirs = [(); 2].map(|()| tempfile::tempdir().expect("a temporary folder"));
    let original = write(dirs[0].path(), &config, &original(&tensors), HeaderStyle::Padded);
    let twin = write(dirs[1].path(), &config, &twin(&tensors), HeaderStyle::Mlx);
    for precision in [Precision::Precise, Precision::Standard] {
        let original = lily_model::load(&original, precision).expect("the original layout loads");
        let twin = lily_model::load(&twin, precision).expect("the twin loads");
        assert_eq!((original.layout, twin.layout), (Layout::HuggingFace, Layout::Mlx));
        let skipped = original.claims.iter().filter(|(_, c)| matches!(c, Claim::Skipped(_)));
        let names: Vec<&str> = skipped.map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["model.visual.pos_embed.weight", "mtp.fc.weight"]);

        let a = logits(&original, &fixture.tokens, &fixture.mixed_chunks);
        let b = logits(&twin, &fixture.tokens, &fixture.mixed_chunks);
        assert_eq!(a.len(), fixture.tokens.len() * original.config.vocab_size);
        assert!(a.iter().all(|x| x.is_finite()));
        let differ = a.iter().zip(&b).filter(|(x, y)| x.to_bits() != y.to_bits()).count();
        assert_eq!(differ, 0, "{precision:?}: logits differ");
        // Rounding to bf16 is all that separates them from the quantized checkpoint.
        let (_, golden) = fixture.golden("logits_f32_prefill");
        let error = max_abs(&a, golden);
        println!("{precision:?}: max abs {error:.3} from the quantized checkpoint");
        assert!(error < 0.3, "{precision:?}: {error}");
    }
}
