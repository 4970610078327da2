//! Matrix tiles: each target's loop that the host can run against the plain one, and both ways through a product.

mod mma;
mod operands;

use lily_gpu::kernels::gemm::{Epilogue, Product, dense};
use lily_gpu::{Platform, Text, Tuning};
use lily_ops::{ElementType, WeightFormat};
use lily_softgpu::{Compiler, Options};
use operands::{Rig, TestWeight, close, text_of};

const FILES: &[&str] = &[
    "common.metal",
    "gemv_dot.metal",
    "tile_load.metal",
    "tile_simdgroup.h",
    "tile_mpp.h",
    "tile_plain.h",
    "gemm.metal",
];

const FORMATS: [WeightFormat; 4] = [
    WeightFormat::Affine { bits: 4 },
    WeightFormat::Affine { bits: 8 },
    WeightFormat::Dense(ElementType::Bf16),
    WeightFormat::Dense(ElementType::F32),
];

fn simdgroup() -> Rig {
    Rig::new(text_of("", "", FILES))
}

/// The product in f64, of rounded weights.
fn want(x: &[f32], weight: &TestWeight) -> Vec<f32> {
    let (rows, cols) = (weight.spec.rows, weight.spec.cols);
    let w: Vec<Vec<f32>> = (0..rows).map(|r| weight.row_bf16(0, r)).collect();
    x.chunks(cols)
        .flat_map(|x| {
            w.iter().map(move |w| {
                w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>() as f32
            })
        })
        .collect()
}

/// x, the weight, and the product in f32.
fn product(
    rig: &mut Rig,
    format: WeightFormat,
    rows: usize,
    width: usize,
    cols: usize,
) -> (Vec<f32>, Vec<f32>) {
    let x: Vec<f32> = rig.random(rows * cols).iter().map(|x| ElementType::Bf16.round(*x)).collect();
    let weight = rig.weight(format, 1, width, cols);
    let (xs, out) = (rig.bf16(&x), rig.empty(rows * width, ElementType::F32));
    rig.run(|r, c, scratch| {
        let product = Product {
            x: xs,
            rows: rows as u32,
            weight: &weight.device,
            out,
            epilogue: Epilogue::Store,
        };
        dense(r, c, scratch, &product);
    });
    (rig.read_f32(out), want(&x, &weight))
}

/// All formats at ragged sizes: tiles of 16 and 32 rows, of 32 and 64 columns, K below, at and beside a step.
fn shapes(mut rig: Rig, what: &str) {
    rig.profile.cores = 1; // narrow tiles only where they must be
    for format in FORMATS {
        for (rows, width, cols) in [
            (1, 10, 64),
            (15, 64, 64),
            (17, 100, 128),
            (33, 65, 192),
            (31, 40, 2048),
            (65, 130, 64),
            (100, 70, 64),
        ] {
            let (got, want) = product(&mut rig, format, rows, width, cols);
            close(&format!("{what}: {format:?}, {rows}x{cols}->{width}"), &got, &want, 1e-5);
        }
    }
    // Dense rows need not be whole steps.
    let dense = WeightFormat::Dense(ElementType::Bf16);
    let (got, want) = product(&mut rig, dense, 18, 33, 88);
    close(&format!("{what}: 88 columns"), &got, &want, 1e-5);
}

#[test]
fn simdgroup_matrices() {
    shapes(simdgroup(), "simdgroup");
}

#[test]
fn plain_loop() {
    shapes(Rig::new(text_of("#define K_PLAIN 1\n", "", FILES)), "plain");
}

#[test]
fn tensor_operations() {
    let text = text_of("#define K_TENSOR 1\n", include_str!("../emu/mpp_cpu.h"), FILES);
    let compiler = Compiler::default().with_flags(&["-std=c++20"]);
    shapes(Rig::with(text, Options { compiler, ..Options::default() }), "tensor");
}

/// Copies that are under way until they are waited for; ldmatrix and mma.sync as attention's tests have them.
const ASYNC_COPIES: &str = r#"
#include <vector>
struct Copy { void *to; const void *from; bool there; };
template <class T> static T *shared_address(T *p) { return p; }
static thread_local std::vector<Copy> *copies;
static std::vector<Copy> &own_copies() {
  if (!copies) copies = new std::vector<Copy>[1024];
  return copies[emu::simd() * 32 + emu::lane()];
}
static void copy_async(void *to, const void *from, bool there) { own_copies().push_back({to, from, there}); }
static void copy_wait() {
  for (const Copy &c : own_copies()) {
    if (c.there) memcpy(c.to, c.from, 16);
    else memset(c.to, 0, 16);
  }
  own_copies().clear();
}
template <class T> static void load_matrices(unsigned (&r)[4], const T *row) { flash_load(r, row); }
"#;

#[test]
fn mma_sync() {
    let prelude = [mma::PRELUDE, ASYNC_COPIES].concat();
    let files: Vec<&str> = FILES.iter().copied().chain(["tile_mma.h"]).collect();
    let mut rig = Rig::new(text_of("#define K_MMA 1\n", &prelude, &files));
    rig.profile.platform = Platform::Cuda;
    shapes(rig, "mma");
}

/// Bits of one product under a tuning, and the kernels that made it.
fn bits(text: Text, tuning: Tuning, format: WeightFormat) -> (Vec<f32>, Vec<&'static str>) {
    let mut rig = Rig::new(text);
    rig.tuning = tuning;
    let x = rig.random(49 * 128);
    let weight = rig.weight(format, 1, 70, 128);
    let (xs, out) = (rig.bf16(&x), rig.empty(49 * 70, ElementType::Bf16));
    let kernels = rig.run(|r, c, scratch| {
        let epilogue = Epilogue::Store;
        dense(r, c, scratch, &Product { x: xs, rows: 49, weight: &weight.device, out, epilogue });
    });
    (rig.read_f32(out), kernels)
}

#[test]
fn switches_change_the_way_and_not_the_bits() {
    for format in &FORMATS[..2] {
        let text = || text_of("", "", FILES);
        let (on, kernels) = bits(text(), Tuning::default(), *format);
        assert_eq!(kernels.len(), 1);
        let off = Tuning::without("dequantize_in_gemm").unwrap();
        let (expanded, kernels) = bits(text(), off, *format);
        assert_eq!(kernels, ["dequantize", "gemm_bf16_n32"]);
        assert_eq!(on, expanded, "{format:?}");
        let (small, _) = bits(text(), Tuning::without("adaptive_tiles").unwrap(), *format);
        assert_eq!(on, small, "{format:?}: a row's bits do not depend on its tile");
    }
}

#[test]
fn a_product_is_added_to_the_residual() {
    let mut rig = simdgroup();
    for width in [64, 70] {
        let x: Vec<f32> = rig.random(20 * 64).iter().map(|x| ElementType::Bf16.round(*x)).collect();
        let old = rig.random(20 * width);
        let weight = rig.weight(FORMATS[0], 1, width, 64);
        let (xs, residual) = (rig.bf16(&x), rig.f32(&old));
        let out = rig.empty(20 * width, ElementType::F32);
        for out in [out, residual] {
            rig.run(|r, c, scratch| {
                let epilogue = Epilogue::AddTo(residual);
                dense(
                    r,
                    c,
                    scratch,
                    &Product { x: xs, rows: 20, weight: &weight.device, out, epilogue },
                );
            });
            let want: Vec<f32> = want(&x, &weight).iter().zip(&old).map(|(a, b)| a + b).collect();
            close("residual", &rig.read_f32(out), &want, 1e-6);
        }
    }
}
