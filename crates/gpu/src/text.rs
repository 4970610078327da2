//! The kernel text: one for a model shape and a platform.

use lily_ops::Op;
use lily_ops::Plan;
use lily_ops::ops::{Attention, DeltaScan};

use crate::profile::Platform;

/// Sizes that are compiled into the text, because registers and unrolled loops depend on them. All other
/// sizes are arguments. A part that a plan does not have keeps its default.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Elements of a recurrent key head, a multiple of 32.
    pub key_dim: u32,
    /// Elements of a recurrent value head.
    pub value_dim: u32,
    /// Recurrent value heads that share a key head.
    pub value_heads_per_key: u32,
    /// Taps of the causal convolution.
    pub conv_taps: u32,
    /// Elements of an attention head, a multiple of 32.
    pub head_dim: u32,
    /// Query heads that share a KV head.
    pub heads_per_kv: u32,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            key_dim: 128,
            value_dim: 128,
            value_heads_per_key: 2,
            conv_taps: 4,
            head_dim: 256,
            heads_per_kv: 8,
        }
    }
}

impl Shape {
    /// The sizes of a plan.
    pub fn of(plan: &Plan) -> Self {
        let state = &plan.state;
        let mut shape = Self { conv_taps: state.conv_taps as u32, ..Self::default() };
        for node in plan.nodes() {
            match &node.op {
                Op::DeltaScan(DeltaScan { key_heads, .. }) => {
                    shape.key_dim = state.dk as u32;
                    shape.value_dim = state.dv as u32;
                    shape.value_heads_per_key = (state.heads / key_heads) as u32;
                }
                Op::QkL2Norm(op) => shape.key_dim = op.dk as u32,
                Op::GatedRmsNorm(_) => shape.value_dim = state.dv as u32,
                Op::AttentionPrep(_) | Op::AttentionGate(_) => {
                    shape.head_dim = state.head_dim as u32
                }
                Op::Attention(Attention { heads, .. }) => {
                    shape.head_dim = state.head_dim as u32;
                    shape.heads_per_kv = (heads / state.kv_heads) as u32;
                }
                _ => {}
            }
        }
        shape
    }

    fn defines(&self) -> String {
        [
            ("KEY_DIM", self.key_dim),
            ("VALUE_DIM", self.value_dim),
            ("VALUE_HEADS_PER_KEY", self.value_heads_per_key),
            ("CONV_TAPS", self.conv_taps),
            ("HEAD_DIM", self.head_dim),
            ("HEADS_PER_KV", self.heads_per_kv),
            ("PAGE_TOKENS", lily_ops::plan::PAGE_TOKENS as u32),
            ("GROUP", lily_ops::plan::GROUP as u32),
        ]
        .map(|(name, value)| format!("#define {name} {value}u\n"))
        .concat()
            + &LARGE_MEMORY.map(|(k, bytes)| format!("#define LARGE_{k} {}u\n", bytes / 4)).concat()
    }
}

/// A kernel text, ready for a compiler.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Text {
    /// The platform it is for.
    pub platform: Platform,
    /// The text.
    pub source: String,
}

macro_rules! kernel_file {
    ($name:literal) => {
        ($name, include_str!(concat!("../kernels/", $name)))
    };
}

/// The platform headers.
const PLATFORMS: [(&str, &str); 4] = [
    kernel_file!("platform_metal.h"),
    kernel_file!("platform_cuda.h"),
    kernel_file!("platform_cpu.h"),
    kernel_file!("platform_check.h"),
];

/// The kernel files, in the order they stand in a text.
pub const FILES: &[(&str, &str)] = &[
    kernel_file!("common.metal"),
    kernel_file!("gemv_dot.metal"),
    kernel_file!("gemv.metal"),
    kernel_file!("elementwise.metal"),
    kernel_file!("tile_load.metal"),
    kernel_file!("tile_simdgroup.h"),
    kernel_file!("tile_mpp.h"),
    kernel_file!("mma_slice.metal"),
    kernel_file!("gemv_mma.metal"),
    kernel_file!("tile_plain.h"),
    kernel_file!("gemm.metal"),
    kernel_file!("route.metal"),
    kernel_file!("moe.metal"),
    kernel_file!("gemm_mma.metal"),
    kernel_file!("gemm_wgmma.metal"),
    kernel_file!("moe_decode.metal"),
    kernel_file!("moe_mma.metal"),
    kernel_file!("attention_prep.metal"),
    kernel_file!("attention_decode.metal"),
    kernel_file!("attention_units.metal"),
    kernel_file!("attention_tile.metal"),
    kernel_file!("attention_tile_simdgroup.h"),
    kernel_file!("attention_tile_mma.h"),
    kernel_file!("attention_prefill.metal"),
    kernel_file!("delta.metal"),
    kernel_file!("delta_scan.metal"),
    kernel_file!("delta_chunk_parts.metal"),
    kernel_file!("delta_chunk.metal"),
    kernel_file!("sample.metal"),
    kernel_file!("sample_pick.metal"),
];

/// Kernels that only measurements use.
pub const MEASURING: (&str, &str) = kernel_file!("read.metal");

/// In front of a text that may use tensor operations.
const TENSOR_DEFINE: &str = "#define K_TENSOR 1\n";

/// Whether a kernel's inner loop is a matrix tile: what tensor operations change.
pub fn is_tile_kernel(kernel: &str) -> bool {
    ["gemm_", "experts_in_", "experts_out_"].iter().any(|family| kernel.starts_with(family))
}

/// Kernel files that are empty without `mma.sync`. Of chips without `wgmma` its kernels are empty.
const MMA_FILES: [&str; 8] = [
    "gemm_mma.metal",
    "gemm_wgmma.metal",
    "mma_slice.metal",
    "gemv_mma.metal",
    "moe_mma.metal",
    "attention_units.metal",
    "delta_chunk_parts.metal",
    "delta_chunk.metal",
];

/// The kernels of a platform's texts, in order.
pub fn kernels(platform: Platform) -> Vec<String> {
    let metal = matches!(platform, Platform::Metal | Platform::MetalTensor);
    // Macros that make a kernel: their names, and what stands in front of the kernel's name.
    let mut macros = vec![("KERNEL", "")];
    let mut names = Vec::new();
    for (_, text) in FILES.iter().filter(|(name, _)| !metal || !MMA_FILES.contains(name)) {
        // The macro that the lines belong to, and its first parameter.
        let mut defined: Option<(&str, &str)> = None;
        for line in text.lines() {
            let define = line.strip_prefix("#define ").and_then(|l| l.split_once('('));
            if let Some((name, rest)) = define {
                defined = rest.split([',', ')']).next().map(|parameter| (name, parameter.trim()));
            }
            if let Some((name, parameter)) = defined {
                let made = line.split_once("KERNEL(").and_then(|(_, l)| l.split(',').next());
                let before = made.and_then(|kernel| kernel.strip_suffix(parameter));
                macros.extend(before.map(|b| (name, b.trim_end_matches("##"))));
                defined = defined.filter(|_| line.trim_end().ends_with('\\'));
            } else if let Some((first, rest)) = line.split_once('(')
                && let Some((_, before)) = macros.iter().find(|(name, _)| *name == first)
            {
                let argument = rest.split([',', ')']).next().unwrap_or_default();
                names.push(format!("{before}{}", argument.trim()));
            }
        }
    }
    if matches!(platform, Platform::Cuda | Platform::HostUnits) {
        names.retain(|name| name != "flash_attention_8"); // matrices have 16 rows
    }
    if platform == Platform::Cuda {
        // Its tiles are those by `mma.sync`.
        names.retain(|name| !is_tile_kernel(name) || name.contains("mma_"));
    }
    names
}

/// The platform header of that file name, for checks that bring their own driver of the text.
pub fn platform_header(file: &str) -> Option<&'static str> {
    PLATFORMS.iter().find(|(name, _)| *name == file).map(|(_, text)| *text)
}

/// Kernels that wait for their inputs themselves (`inputs_ready()` in their text): a driver may start them while the
/// stage before theirs still runs. See docs/kernels.md, "Early starts".
pub const EARLY: &[&str] = &[
    "attention_combine",
    "attention_combine_gated",
    "attention_fixed",
    "attention_fixed_strided",
    "attention_fixed_units",
    "attention_fixed_unpacked",
    "attention_fixed_unpacked_strided",
    "attention_prep",
    "attention_split",
    "attention_split_strided",
    "attention_split_unpacked",
    "attention_split_unpacked_strided",
    "causal_conv",
    "conv_prep",
    "decode_experts",
    "decode_experts_mma",
    "decode_experts_mma_deep",
    "decode_experts_out",
    "decode_experts_out_mma",
    "gemv_1x2",
    "gemv_1x4",
    "gemv_2x2",
    "gemv_4x2",
    "gemv_8x2",
    "gemv_mma_1",
    "gemv_mma_1_deep",
    "gemv_mma_8",
    "gemv_mma_8_wide",
    "rms_norm",
    "router_1024",
    "router_256",
    "sample_bins",
    "sample_pick",
    "sample_scan",
    "scan_norm_4",
    "scan_norm_8",
];

/// Of these, those that let the stage behind them begin before their own inputs are there (`next_may_start()`).
pub const EARLIER: &[&str] = &["conv_prep"];

/// Of tiles by `wgmma`: four steps of 128 rows of activations.
const WIDE_MEMORY: u32 = 65_536;

/// Kernels with more threadgroup memory than a text may declare (CUDA: 48 KB), and its bytes: a driver that has them sets it aside at
/// each launch.
pub const LARGE_MEMORY: [(&str, u32); 11] = [
    ("decode_experts_mma", 46_032),
    ("decode_experts_mma_deep", 83_408),
    ("decode_experts_out_mma", 52_272),
    ("experts_in_wgmma_q4", WIDE_MEMORY),
    ("experts_out_wgmma_q4", WIDE_MEMORY),
    ("gemm_wgmma_q4_n256", WIDE_MEMORY),
    ("gemm_wgmma_q4_n64", WIDE_MEMORY),
    ("gemv_mma_1", 46_032),
    ("gemv_mma_1_deep", 83_408),
    ("gemv_mma_8", 75_456),
    ("gemv_mma_8_wide", 41_152),
];

/// Bytes of threadgroup memory that a launch of the kernel sets aside.
pub fn large_memory(kernel: &str) -> u32 {
    LARGE_MEMORY.iter().find(|(name, _)| *name == kernel).map_or(0, |(_, bytes)| *bytes)
}

impl Text {
    /// The text of all kernels for a shape.
    pub fn new(platform: Platform, shape: &Shape) -> Self {
        let header = match platform {
            Platform::Metal | Platform::MetalTensor => "platform_metal.h",
            Platform::Cuda => "platform_cuda.h",
            Platform::Host | Platform::HostUnits => "platform_cpu.h",
        };
        let mut source = shape.defines();
        source += match platform {
            Platform::MetalTensor => TENSOR_DEFINE,
            Platform::HostUnits => "#define ATTENTION_MMA 1\n",
            _ => "",
        };
        source += &format!("#line 1 \"{header}\"\n{}", platform_header(header).unwrap_or_default());
        source += &Self::body();
        Self { platform, source }
    }

    /// The text of all kernels for a shape, with those that only measurements use.
    pub fn measuring(platform: Platform, shape: &Shape) -> Self {
        let mut text = Self::new(platform, shape);
        let (name, kernels) = MEASURING;
        let arguments = crate::kernels::read::declarations();
        text.source += &format!("#line 1 \"arguments\"\n{arguments}#line 1 \"{name}\"\n{kernels}");
        text
    }

    /// The same text without tensor operations, if it has them: for a device or compiler that turns out not to.
    pub fn without_tensors(&self) -> Option<Self> {
        (self.platform == Platform::MetalTensor).then(|| Self {
            platform: Platform::Metal,
            source: self.source.replacen(TENSOR_DEFINE, "", 1),
        })
    }

    /// Argument structs and kernels, without defines and platform header.
    pub fn body() -> String {
        let mut source = String::from("#line 1 \"arguments\"\n");
        source += &crate::kernels::argument_structs();
        for (name, text) in FILES {
            source += &format!("#line 1 \"{name}\"\n{text}");
        }
        source
    }

    /// The defines of a shape, for checks that bring their own platform header.
    pub fn defines(shape: &Shape) -> String {
        shape.defines()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_one_line() {
        let shape = Shape { head_dim: 64, ..Shape::default() };
        let [plain, tensor] =
            [Platform::Metal, Platform::MetalTensor].map(|p| Text::new(p, &shape));
        assert_ne!(plain.source, tensor.source);
        assert_eq!(tensor.without_tensors(), Some(plain.clone()));
        assert_eq!(plain.without_tensors(), None);
    }

    #[test]
    fn kernels_are_listed() {
        let names = kernels(Platform::Metal);
        let more = |platform| -> Vec<String> {
            kernels(platform).into_iter().filter(|name| !names.contains(name)).collect()
        };
        let mma = [
            "gemv_mma_1",
            "gemv_mma_8",
            "gemv_mma_8_wide",
            "gemv_mma_1_deep",
            "gemm_mma_q4_n128",
            "gemm_mma_q4_n32",
            "gemm_mma_q8_n128",
            "gemm_mma_q8_n32",
            "gemm_mma_bf16_n128",
            "gemm_mma_bf16_n32",
            "gemm_mma_any_n32",
            "experts_in_mma_q4",
            "experts_in_mma_q8",
            "experts_in_mma_any",
            "experts_out_mma_q4",
            "experts_out_mma_q8",
            "experts_out_mma_any",
            "gemm_wgmma_q4_n256",
            "gemm_wgmma_q4_n64",
            "experts_in_wgmma_q4",
            "experts_out_wgmma_q4",
            "decode_experts_mma",
            "decode_experts_mma_deep",
            "decode_experts_out_mma",
            "attention_fixed_units",
            "delta_chunk_parts",
            "delta_chunk",
        ];
        assert_eq!(more(Platform::Host), mma);
        assert_eq!(
            (more(Platform::Cuda), kernels(Platform::Cuda).len()),
            (mma.map(String::from).into(), names.len() - 14 + 27)
        );
        for name in
            ["fill_words", "gemm_q4_n64", "delta_scan_8", "flash_attention_16", "sample_pick"]
        {
            assert_eq!(names.iter().filter(|n| **n == name).count(), 1, "{name}");
        }
        let tiles: Vec<_> = names.iter().filter(|n| is_tile_kernel(n)).collect();
        assert_eq!(tiles.len(), 7 + 3 + 3, "{tiles:?}");
        assert!(names.iter().all(|n| n.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')));
    }
}
