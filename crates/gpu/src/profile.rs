//! What is known of a device before a kernel runs: the input of every policy.

use crate::thresholds::Thresholds;

/// Which platform header a kernel text begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Platform {
    /// Metal Shading Language 3.1: simdgroup matrices.
    Metal,
    /// Metal Shading Language 4.0: tensor operations beside simdgroup matrices.
    MetalTensor,
    /// CUDA through NVRTC.
    Cuda,
    /// The host, thread by thread.
    Host,
    /// The same with the tiles of attention that CUDA has, by `mma.sync`.
    HostUnits,
}

/// A device, as policies see it.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// Name for messages: `Apple M4 Max`, `NVIDIA H200`.
    pub name: String,
    /// Platform of its kernel texts.
    pub platform: Platform,
    /// Whether kernels by `mma.sync` may be taken (few rows, attention of long slots, the recurrence in chunks): the platform has it, or
    /// plays it.
    pub mma: bool,
    /// Whether kernels by `wgmma` may be taken (products of many rows): compute capability 9.0 has it, or the platform plays it.
    pub wgmma: bool,
    /// GPU cores (streaming multiprocessors).
    pub cores: u32,
    /// Bytes of threadgroup memory a threadgroup may have.
    pub threadgroup_memory: u32,
    /// Bytes that a launch may set aside for kernels of [`LARGE_MEMORY`](crate::text::LARGE_MEMORY).
    pub large_memory: u32,
    /// Threads of a core that run at once.
    pub threads_per_core: u32,
    /// Bytes of the largest buffer.
    pub max_buffer: u64,
    /// Bytes that may be allocated in sum.
    pub memory: u64,
    /// Bytes read from memory in a second, at best.
    pub bandwidth: f64,
    /// Multiply-adds of bf16 in a second by its matrix units, at best, where that was measured.
    pub macs: Option<f64>,
    /// Whether host and device share one memory.
    pub unified: bool,
    /// Where policies change from one form to another.
    pub thresholds: Thresholds,
}

impl Profile {
    /// Multiply-adds of bf16 in a second of a device of that name: 790 TFLOP/s of an H200 by cuBLAS.
    pub fn known_macs(name: &str) -> Option<f64> {
        name.contains("H200").then_some(395e12)
    }

    /// The profiles that are known by name, for plans made without the device.
    pub fn named(name: &str) -> Option<Self> {
        let gib = |n: u64| n << 30;
        let metal = |name: &str, cores, memory, bandwidth: f64, platform| Self {
            name: name.into(),
            platform,
            mma: false,
            wgmma: false,
            cores,
            threadgroup_memory: 32 << 10,
            large_memory: 0,
            threads_per_core: 1024,
            max_buffer: memory / 2,
            memory: memory / 4 * 3,
            bandwidth: bandwidth * 1e9,
            macs: None,
            unified: true,
            thresholds: Thresholds::of(platform, name),
        };
        Some(match name {
            "m1-max" => metal("Apple M1 Max", 32, gib(64), 400.0, Platform::Metal),
            "m2-max" => metal("Apple M2 Max", 38, gib(64), 400.0, Platform::Metal),
            "m3-max" => metal("Apple M3 Max", 40, gib(64), 400.0, Platform::Metal),
            "m4-max" => metal("Apple M4 Max", 40, gib(64), 546.0, Platform::Metal),
            "m5" => metal("Apple M5", 10, gib(32), 153.0, Platform::MetalTensor),
            "metal" | "m5-max" => metal("Apple M5 Max", 40, gib(64), 614.0, Platform::MetalTensor),
            "cuda" | "h200" => Self {
                name: "NVIDIA H200".into(),
                platform: Platform::Cuda,
                mma: true,
                wgmma: true,
                cores: 132,
                threadgroup_memory: 48 << 10,
                large_memory: 227 << 10,
                threads_per_core: 2048,
                max_buffer: gib(139),
                memory: gib(139),
                bandwidth: 4.65e12,
                macs: Self::known_macs("NVIDIA H200"),
                unified: false,
                thresholds: Thresholds::of(Platform::Cuda, "NVIDIA H200"),
            },
            "softgpu" => Self {
                name: "host, thread by thread".into(),
                platform: Platform::Host,
                mma: false,
                wgmma: false,
                cores: 8,
                threadgroup_memory: 32 << 10,
                large_memory: 227 << 10,
                threads_per_core: 1024,
                max_buffer: gib(4),
                memory: gib(16),
                bandwidth: 10e9,
                macs: None,
                unified: true,
                thresholds: Thresholds::of(Platform::Host, ""),
            },
            _ => return None,
        })
    }
}
