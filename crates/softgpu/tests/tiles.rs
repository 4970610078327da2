//! Matrix tiles: each target's loop that the host can run against the plain one, and both ways through a product.

mod operands;

use lily_gpu::Tuning;
use lily_gpu::kernels::gemm::{Epilogue, Product, dense};
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

/// All formats at ragged sizes: tiles of 16 and 32 rows, of all widths, K below, at and beside a step.
fn shapes(mut rig: Rig, what: &str) {
    rig.profile.cores = 1; // narrow tiles only where they must be
    let sizes = [
        (1, 10, 64),
        (15, 64, 64),
        (17, 100, 128),
        (33, 65, 192),
        (31, 40, 2048),
        (65, 130, 64),
        (100, 70, 64),
    ];
    for format in FORMATS {
        products(&mut rig, what, format, &sizes);
    }
    // Dense rows need not be whole steps.
    let dense = WeightFormat::Dense(ElementType::Bf16);
    let (got, want) = product(&mut rig, dense, 18, 33, 88);
    close(&format!("{what}: 88 columns"), &got, &want, 1e-5);
}

fn products(rig: &mut Rig, what: &str, format: WeightFormat, sizes: &[(usize, usize, usize)]) {
    for &(rows, width, cols) in sizes {
        let (got, want) = product(rig, format, rows, width, cols);
        close(&format!("{what}: {format:?}, {rows}x{cols}->{width}"), &got, &want, 1e-5);
    }
}

/// Few kernel threads, for sanitizers and barriers left out.
const SMALL: [(usize, usize, usize); 1] = [(17, 40, 192)];

#[test]
fn small_simdgroup_matrices() {
    products(&mut simdgroup(), "simdgroup", FORMATS[0], &SMALL);
}

#[test]
fn small_plain_loop() {
    products(&mut plain(), "plain", FORMATS[0], &SMALL);
}

#[test]
fn small_tensor_operations() {
    products(&mut tensor(), "tensor", FORMATS[0], &SMALL);
}

#[test]
fn small_mma_sync() {
    products(&mut mma_rig(), "mma", FORMATS[0], &[(40, 40, 192)]);
}

#[test]
fn simdgroup_matrices() {
    shapes(simdgroup(), "simdgroup");
}

fn plain() -> Rig {
    Rig::new(text_of("#define K_PLAIN 1\n", "", FILES))
}

#[test]
fn plain_loop() {
    shapes(plain(), "plain");
}

#[test]
fn tensor_operations() {
    shapes(tensor(), "tensor");
}

fn tensor() -> Rig {
    let text = text_of("#define K_TENSOR 1\n", include_str!("../emu/mpp_cpu.h"), FILES);
    let compiler = Compiler::default().with_flags(&["-std=c++20"]);
    Rig::with(text, Options { compiler, ..Options::default() })
}

#[test]
fn mma_sync() {
    let mut rig = mma_rig();
    // Tiles of 128 and 32 columns, and more than one block of rows.
    let sizes = [(130, 300, 128), (128, 256, 64), (40, 200, 128), (200, 129, 64)];
    for format in FORMATS {
        products(&mut rig, "mma", format, &sizes);
    }
    shapes(rig, "mma");
}

#[test]
fn wgmma() {
    let mut rig = wgmma_rig();
    for sizes in [(130, 300, 128), (128, 256, 64), (33, 10, 192), (17, 100, 64), (9, 513, 512)] {
        products(&mut rig, "wgmma", FORMATS[0], &[sizes]);
    }
    let (mut kernels, mut results) = (Vec::new(), Vec::new());
    let (x, weight) = (rig.random(40 * 192), rig.weight(FORMATS[0], 1, 300, 192));
    for cores in [1, 132] {
        rig.profile.cores = cores;
        let (x, out) = (rig.bf16(&x), rig.empty(40 * 300, ElementType::F32));
        let epilogue = Epilogue::Store;
        let product = Product { x, rows: 40, weight: &weight.device, out, epilogue };
        kernels.extend(rig.run(|r, c, scratch| dense(r, c, scratch, &product)));
        results.push(rig.read_f32(out));
    }
    // A few threadgroups are spread over more cores, which changes no bit.
    assert_eq!(kernels, ["gemm_wgmma_q4_n256", "gemm_wgmma_q4_n64"]);
    assert_eq!(results[0], results[1]);
}

#[test]
fn small_wgmma() {
    products(&mut wgmma_rig(), "wgmma", FORMATS[0], &[(40, 40, 192)]);
}

fn wgmma_rig() -> Rig {
    let mut rig = mma_rig();
    rig.profile.wgmma = true;
    rig
}

fn mma_rig() -> Rig {
    let mut rig = Rig::new(text_of("", "", operands::EXPERT_FILES));
    (rig.profile.mma, rig.profile.cores) = (true, 1);
    rig
}

/// Bits of one product under a tuning, and the kernels that made it.
fn bits(mut rig: Rig, tuning: Tuning, format: WeightFormat) -> (Vec<f32>, Vec<&'static str>) {
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
    for (mma, of_bf16) in [(false, "gemm_bf16_n32"), (true, "gemm_mma_bf16_n32")] {
        let rig = || if mma { mma_rig() } else { simdgroup() };
        for format in &FORMATS[..2] {
            let (on, kernels) = bits(rig(), Tuning::default(), *format);
            assert_eq!(kernels.len(), 1);
            let off = Tuning::without("dequantize_in_gemm").unwrap();
            let (expanded, kernels) = bits(rig(), off, *format);
            assert_eq!(kernels, ["dequantize", of_bf16]);
            assert_eq!(on, expanded, "{format:?}");
            let (small, _) = bits(rig(), Tuning::without("adaptive_tiles").unwrap(), *format);
            assert_eq!(on, small, "{format:?}: a row's bits do not depend on its tile");
        }
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
