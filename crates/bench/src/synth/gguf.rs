//! The same shape as a GGUF file for llama.cpp: architecture `qwen35moe`, random weights, no tokenizer.
//!
//! Large matrices are Q4_K (144 bytes for 256 weights, 4.5 bits each, as MLX's 4 bits with a scale and a bias for
//! 64), what llama.cpp keeps in f32 is f32. Rows that do not divide into blocks of 256 are f32 too.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use half::f16;

use super::error::SynthError;
use super::fill::Stream;
use super::shape::Shape;
use super::write::{check_file_limit, check_space, file_limit};

const VERSION: u32 = 3;
const ALIGNMENT: u64 = 32;
/// Weights of a Q4_K block, and its bytes.
const BLOCK: u64 = 256;
const BLOCK_BYTES: u64 = 144;
/// Scale of the scales and scale of the minima of a block: weights of about ±0.06.
const SCALES: [f32; 2] = [1.5e-4, 1e-3];
/// Blocks or elements written at a time.
const CHUNK: u64 = 8192;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fill {
    Q4K,
    Normal {
        mean: f64,
        deviation: f64,
    },
    /// The logarithm's negative exponential of a decay: always below 0.
    Negative,
}

#[derive(Debug)]
struct Tensor {
    name: String,
    /// Outermost first, as its bytes lie.
    shape: Vec<usize>,
    fill: Fill,
}

impl Tensor {
    fn elements(&self) -> u64 {
        self.shape.iter().map(|n| *n as u64).product()
    }

    fn bytes(&self) -> u64 {
        match self.fill {
            Fill::Q4K => self.elements() / BLOCK * BLOCK_BYTES,
            _ => self.elements() * 4,
        }
    }

    /// GGML's number of the type.
    fn kind(&self) -> u32 {
        match self.fill {
            Fill::Q4K => 12,
            _ => 0,
        }
    }

    fn write(
        &self,
        stream: Stream,
        out: &mut impl Write,
        progress: &mut dyn FnMut(u64),
    ) -> io::Result<()> {
        let (units, unit_bytes) = match self.fill {
            Fill::Q4K => (self.elements() / BLOCK, BLOCK_BYTES),
            _ => (self.elements(), 4),
        };
        let mut buffer = Vec::new();
        let mut unit = 0;
        while unit < units {
            let count = CHUNK.min(units - unit);
            buffer.clear();
            for i in unit..unit + count {
                self.unit(stream, i, &mut buffer);
            }
            out.write_all(&buffer)?;
            progress(count * unit_bytes);
            unit += count;
        }
        Ok(())
    }

    fn unit(&self, stream: Stream, i: u64, out: &mut Vec<u8>) {
        match self.fill {
            Fill::Q4K => {
                for scale in SCALES {
                    out.extend_from_slice(&f16::from_f32(scale).to_le_bytes());
                }
                let words = (BLOCK_BYTES - 4).div_ceil(8);
                let noise = (0..words).flat_map(|w| stream.word(i * words + w).to_le_bytes());
                out.extend(noise.take(BLOCK_BYTES as usize - 4));
            }
            Fill::Normal { mean, deviation } => {
                let value = (mean + deviation * stream.normal(i)) as f32;
                out.extend_from_slice(&value.to_le_bytes());
            }
            Fill::Negative => {
                let value = -(stream.normal(i).abs() as f32) - 1e-3;
                out.extend_from_slice(&value.to_le_bytes());
            }
        }
    }
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrittenGguf {
    /// Tensors.
    pub tensors: usize,
    /// Bytes of the file.
    pub bytes: u64,
}

/// Writes a GGUF file of a shape. `progress` is told the bytes of tensors written and all of them.
///
/// # Errors
/// If the file is there already, there is no room for it, or it cannot be written.
pub fn write_gguf(
    shape: &Shape,
    seed: u64,
    path: &Path,
    mut progress: impl FnMut(u64, u64),
) -> Result<WrittenGguf, SynthError> {
    let failed = |source| SynthError::Io { path: path.to_path_buf(), source };
    if path.exists() {
        return Err(SynthError::Exists { path: path.to_path_buf() });
    }
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(failed)?;
    let tensors = tensors(shape);
    let header = header(shape, &tensors);
    let data: u64 = tensors.iter().map(|t| t.bytes().next_multiple_of(ALIGNMENT)).sum();
    let bytes = header.len() as u64 + data;
    check_space(folder, bytes)?;
    check_file_limit(bytes, file_limit())?;
    let mut out = BufWriter::new(File::create_new(path).map_err(failed)?);
    out.write_all(&header).map_err(failed)?;
    let mut done = 0;
    for tensor in &tensors {
        let stream = Stream::new(seed, &tensor.name);
        let mut told = |n: u64| {
            done += n;
            progress(done, data);
        };
        tensor.write(stream, &mut out, &mut told).map_err(failed)?;
        let padding = tensor.bytes().next_multiple_of(ALIGNMENT) - tensor.bytes();
        out.write_all(&[0u8; ALIGNMENT as usize][..padding as usize]).map_err(failed)?;
        done += padding;
    }
    out.flush().map_err(failed)?;
    Ok(WrittenGguf { tensors: tensors.len(), bytes })
}

/// The tensors by llama.cpp's names.
fn tensors(s: &Shape) -> Vec<Tensor> {
    let mut all = Vec::new();
    let mut add = |name: String, shape: &[usize], fill: Option<Fill>| {
        // A matrix, if nothing else is said.
        let blocks = (shape[shape.len() - 1] as u64).is_multiple_of(BLOCK);
        let dense = Fill::Normal { mean: 0.0, deviation: 0.02 };
        let fill = fill.unwrap_or(if blocks { Fill::Q4K } else { dense });
        all.push(Tensor { name, shape: shape.to_vec(), fill });
    };
    let norm = Some(Fill::Normal { mean: 1.0, deviation: 0.02 });
    let dense = Some(Fill::Normal { mean: 0.0, deviation: 0.02 });
    let hidden = s.hidden_size;
    add("token_embd.weight".into(), &[s.vocab_size, hidden], None);
    add("output_norm.weight".into(), &[hidden], norm);
    add("output.weight".into(), &[s.vocab_size, hidden], None);
    let (heads, values) = (s.linear_value_heads, s.linear_value_heads * s.linear_value_dim);
    let channels = 2 * s.linear_key_heads * s.linear_key_dim + values;
    let (queries, kv) = (s.attention_heads * s.head_dim, s.kv_heads * s.head_dim);
    for layer in 0..s.layers {
        let mut add =
            |name: &str, shape: &[usize], fill| add(format!("blk.{layer}.{name}"), shape, fill);
        add("attn_norm.weight", &[hidden], norm);
        add("post_attention_norm.weight", &[hidden], norm);
        if (layer + 1).is_multiple_of(s.full_attention_interval) {
            // Queries with their gates.
            add("attn_q.weight", &[2 * queries, hidden], None);
            add("attn_k.weight", &[kv, hidden], None);
            add("attn_v.weight", &[kv, hidden], None);
            add("attn_output.weight", &[hidden, queries], None);
            add("attn_q_norm.weight", &[s.head_dim], norm);
            add("attn_k_norm.weight", &[s.head_dim], norm);
        } else {
            add("attn_qkv.weight", &[channels, hidden], None);
            add("attn_gate.weight", &[values, hidden], None);
            add("ssm_conv1d.weight", &[channels, s.conv_taps], dense);
            add("ssm_dt.bias", &[heads], dense);
            add("ssm_a", &[heads], Some(Fill::Negative));
            add("ssm_beta.weight", &[heads, hidden], dense);
            add("ssm_alpha.weight", &[heads, hidden], dense);
            add("ssm_norm.weight", &[s.linear_value_dim], norm);
            add("ssm_out.weight", &[hidden, values], None);
        }
        let (experts, width, shared) = (s.experts, s.expert_width, s.shared_expert_width);
        add("ffn_gate_inp.weight", &[experts, hidden], dense);
        add("ffn_gate_exps.weight", &[experts, width, hidden], None);
        add("ffn_up_exps.weight", &[experts, width, hidden], None);
        add("ffn_down_exps.weight", &[experts, hidden, width], None);
        add("ffn_gate_inp_shexp.weight", &[hidden], dense);
        add("ffn_gate_shexp.weight", &[shared, hidden], None);
        add("ffn_up_shexp.weight", &[shared, hidden], None);
        add("ffn_down_shexp.weight", &[hidden, shared], None);
    }
    all
}

/// Everything before the tensors' bytes, padded.
fn header(s: &Shape, tensors: &[Tensor]) -> Vec<u8> {
    let metadata = metadata(s);
    let mut out = b"GGUF".to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in &metadata {
        string(&mut out, key);
        value.write(&mut out);
    }
    let mut offset = 0;
    for tensor in tensors {
        string(&mut out, &tensor.name);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        // Innermost first.
        for n in tensor.shape.iter().rev() {
            out.extend((*n as u64).to_le_bytes());
        }
        out.extend(tensor.kind().to_le_bytes());
        out.extend(u64::to_le_bytes(offset));
        offset += tensor.bytes().next_multiple_of(ALIGNMENT);
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT as usize), 0);
    out
}

enum Meta {
    U32(usize),
    F32(f32),
    Text(&'static str),
    I32s(Vec<usize>),
}

impl Meta {
    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::U32(n) => {
                out.extend(4u32.to_le_bytes());
                out.extend((*n as u32).to_le_bytes());
            }
            Self::F32(x) => {
                out.extend(6u32.to_le_bytes());
                out.extend(x.to_le_bytes());
            }
            Self::Text(text) => {
                out.extend(8u32.to_le_bytes());
                string(out, text);
            }
            Self::I32s(list) => {
                out.extend(9u32.to_le_bytes());
                out.extend(5u32.to_le_bytes());
                out.extend((list.len() as u64).to_le_bytes());
                for n in list {
                    out.extend((*n as i32).to_le_bytes());
                }
            }
        }
    }
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn metadata(s: &Shape) -> Vec<(String, Meta)> {
    let mut all = vec![
        ("general.architecture".to_owned(), Meta::Text("qwen35moe")),
        ("tokenizer.ggml.model".to_owned(), Meta::Text("none")),
    ];
    let mut add = |key: &str, value| all.push((format!("qwen35moe.{key}"), value));
    let [a, b, c] = s.mrope_section;
    let rotated = 2 * (a + b + c);
    for (key, n) in [
        ("block_count", s.layers),
        ("context_length", s.max_position_embeddings),
        ("embedding_length", s.hidden_size),
        ("feed_forward_length", s.experts_per_token * s.expert_width),
        ("attention.head_count", s.attention_heads),
        ("attention.head_count_kv", s.kv_heads),
        ("attention.key_length", s.head_dim),
        ("attention.value_length", s.head_dim),
        ("expert_count", s.experts),
        ("expert_used_count", s.experts_per_token),
        ("expert_feed_forward_length", s.expert_width),
        ("expert_shared_feed_forward_length", s.shared_expert_width),
        ("rope.dimension_count", rotated),
        ("ssm.conv_kernel", s.conv_taps),
        ("ssm.inner_size", s.linear_value_heads * s.linear_value_dim),
        ("ssm.state_size", s.linear_key_dim),
        ("ssm.time_step_rank", s.linear_value_heads),
        ("ssm.group_count", s.linear_key_heads),
        ("full_attention_interval", s.full_attention_interval),
        ("vocab_size", s.vocab_size),
    ] {
        add(key, Meta::U32(n));
    }
    add("attention.layer_norm_rms_epsilon", Meta::F32(1e-6));
    add("rope.freq_base", Meta::F32(1e7));
    add("rope.dimension_sections", Meta::I32s(vec![a, b, c, 0]));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Reader<'a>(&'a [u8], usize);

    impl Reader<'_> {
        fn bytes(&mut self, n: usize) -> &[u8] {
            self.1 += n;
            &self.0[self.1 - n..self.1]
        }
        fn u32(&mut self) -> u32 {
            u32::from_le_bytes(self.bytes(4).try_into().unwrap())
        }
        fn u64(&mut self) -> u64 {
            u64::from_le_bytes(self.bytes(8).try_into().unwrap())
        }
        fn text(&mut self) -> String {
            let n = self.u64() as usize;
            String::from_utf8(self.bytes(n).to_vec()).unwrap()
        }
        fn value(&mut self) -> String {
            match self.u32() {
                4 => self.u32().to_string(),
                6 => f32::from_bits(self.u32()).to_string(),
                8 => self.text(),
                9 => {
                    assert_eq!(self.u32(), 5);
                    let n = self.u64();
                    (0..n).map(|_| self.u32().to_string()).collect::<Vec<_>>().join(",")
                }
                kind => panic!("type {kind}"),
            }
        }
    }

    #[test]
    fn a_file_says_where_everything_lies() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/tiny.gguf");
        let shape = Shape { hidden_size: 256, ..Shape::tiny() };
        let mut last = (0, 0);
        let written = write_gguf(&shape, 0, &path, |done, all| last = (done, all)).unwrap();
        let file = std::fs::read(&path).unwrap();
        assert_eq!(written.bytes, file.len() as u64);
        assert!(last.0 <= last.1 && last.1 < written.bytes);
        let mut read = Reader(&file, 0);
        assert_eq!(read.bytes(4), b"GGUF");
        assert_eq!(read.u32(), 3);
        let (tensors, keys) = (read.u64(), read.u64());
        assert_eq!(tensors, written.tensors as u64);
        let meta: std::collections::HashMap<_, _> =
            (0..keys).map(|_| (read.text(), read.value())).collect();
        assert_eq!(meta["general.architecture"], "qwen35moe");
        assert_eq!(meta["qwen35moe.block_count"], "4");
        assert_eq!(meta["qwen35moe.rope.dimension_sections"], "3,3,2,0");
        let mut end = 0;
        let mut seen = Vec::new();
        for _ in 0..tensors {
            let name = read.text();
            let dims = read.u32();
            let dims: Vec<u64> = (0..dims).map(|_| read.u64()).collect();
            let (kind, offset) = (read.u32(), read.u64());
            let n: u64 = dims.iter().product();
            let bytes = if kind == 12 { n / 256 * 144 } else { n * 4 };
            assert_eq!(offset, end, "{name}");
            end = (offset + bytes).next_multiple_of(32);
            seen.push((name, dims, kind, offset));
        }
        let data = read.1.next_multiple_of(32);
        assert_eq!(data as u64 + end, file.len() as u64);
        let find = |name: &str| seen.iter().find(|s| s.0 == name).unwrap();
        // Innermost first; rows of 64 are no blocks of 256.
        assert_eq!(find("blk.0.ffn_gate_exps.weight").1, [256, 64, 16]);
        assert_eq!(find("blk.0.ffn_gate_exps.weight").2, 12);
        assert_eq!(find("blk.0.ffn_down_exps.weight").2, 0);
        assert_eq!(find("blk.3.attn_q.weight").1, [256, 2 * 4 * 64]);
        assert!(!seen.iter().any(|s| s.0 == "blk.3.ssm_a" || s.0 == "blk.0.attn_q.weight"));
        let a = data + find("blk.0.ssm_a").3 as usize;
        let values = file[a..a + 16].chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
        assert!(values.into_iter().all(|v| v < 0.0));
        let again = write_gguf(&shape, 0, &path, |_, _| ()).unwrap_err().to_string();
        assert!(again.contains("tiny.gguf is there already"), "{again}");
    }

    #[test]
    fn the_slice_of_four_layers_has_the_bytes_that_were_measured() {
        let tensors = tensors(&Shape::qwen3_6_35b_a3b(4));
        let bytes: u64 = tensors.iter().map(Tensor::bytes).sum();
        assert!((2.46e9..2.48e9).contains(&(bytes as f64)), "{bytes}");
        let layers = super::tensors(&Shape::qwen3_6_35b_a3b(40));
        let bytes: u64 = layers.iter().map(Tensor::bytes).sum();
        assert!((19.5e9..19.7e9).contains(&(bytes as f64)), "{bytes}");
        // An expert's down projection has rows of 512: blocks.
        assert!(tensors.iter().all(|t| t.fill == Fill::Q4K || t.elements() < 600_000));
    }
}
