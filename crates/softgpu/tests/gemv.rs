//! Products of a few rows: several matrices in one launch, epilogues, the norm in front, and bits that do not depend
//! on who shares the launch.

mod rig;

use lily_gpu::kernels::common::{LAST_SAMPLED, SlotHeader};
use lily_gpu::kernels::elementwise::{add, embed, rms_norm, swiglu};
use lily_gpu::kernels::gemv::{Epilogue, GemvInput, GemvOutput, can_pair, gemv};
use lily_gpu::{DeviceWeight, Operand};
use lily_ops::case::Seeded;
use lily_ops::{CaseWeight, ElementType, WeightFormat, WeightSpec};
use rig::{Rig, decode, weight};

const Q4: WeightFormat = WeightFormat::Affine { bits: 4 };
const Q8: WeightFormat = WeightFormat::Affine { bits: 8 };
const BF16: WeightFormat = WeightFormat::Dense(ElementType::Bf16);
const F32: WeightFormat = WeightFormat::Dense(ElementType::F32);

fn bf16(x: f32) -> f32 {
    ElementType::Bf16.round(x)
}

/// The product in f64.
fn product(spec: &WeightSpec, w: &CaseWeight, x: &[f32]) -> Vec<f64> {
    let row = |r| w.as_ref().row(spec, 0, r);
    let dot =
        |w: Vec<f32>, x: &[f32]| w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum();
    x.chunks(spec.cols)
        .flat_map(|x| (0..spec.rows).map(|r| dot(row(r), x)).collect::<Vec<f64>>())
        .collect()
}

fn close(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    let largest = want.iter().fold(0f64, |m, x| m.max(x.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(
            (f64::from(*g) - w).abs() <= tolerance * largest,
            "{what}: element {i} is {g}, want {w}"
        );
    }
    assert_eq!(got.len(), want.len());
}

fn store<'a>(weight: &'a DeviceWeight, out: Operand) -> GemvOutput<'a> {
    GemvOutput { weight, out, epilogue: Epilogue::Store }
}

/// Bits of each row, alone and together with others, with every number of rows; matrices of all formats and odd sizes in
/// one launch against each in its own.
#[test]
fn bits_depend_on_the_row_and_the_matrix_alone() {
    for (cols, profile) in [
        (64, "softgpu"),
        (320, "softgpu"),
        (1088, "m4-max"),
        (2048, "m4-max"),
        (4160, "softgpu"),
        (64, "h200"),
        (320, "h200"),
        (2048, "h200"),
        (4096, "h200"),
        (4352, "h200"),
    ] {
        let mut rng = Seeded::new(&format!("bits {cols}"));
        let specs: Vec<_> = [(Q4, 70), (Q8, 9), (BF16, 33), (F32, 3), (Q4, 1), (Q8, 40)]
            .into_iter()
            .map(|(format, rows)| weight(&mut rng, format, rows + 1, cols))
            .collect();
        let x: Vec<f32> = rng.activations(8 * cols, 1.5).into_iter().map(bf16).collect();
        let run = |first: usize, rows: usize, only: Option<usize>| -> Vec<Vec<f32>> {
            let mut rig = Rig::new(5, profile);
            let weights = rig.weights(&specs);
            let input = rig.bf16(&x[first * cols..][..rows * cols]);
            let outs: Vec<Operand> =
                specs.iter().map(|(s, _)| rig.room(ElementType::F32, rows * s.rows)).collect();
            let outputs: Vec<GemvOutput> =
                weights.iter().zip(&outs).map(|(w, o)| store(w, *o)).collect();
            let outputs = only.map_or(outputs.clone(), |i| vec![outputs[i]]);
            let input = GemvInput { x: input, norm: None, keep: None, rows: rows as u32 };
            let (kernels, _) = rig.run(decode(rows as u32), |r, c, _| gemv(r, c, input, &outputs));
            // Matrix units take no f32: it goes lane by lane, apart from the others.
            let by_units = profile == "h200" && cols <= 4096;
            let units: Vec<bool> = kernels.iter().map(|k| k.starts_with("gemv_mma")).collect();
            match (by_units, only) {
                (true, None) => assert_eq!(units, [true, false, true]),
                (_, only) => assert_eq!(units, [by_units && only != Some(3)]),
            }
            outs.iter().zip(&specs).map(|(o, (s, _))| rig.get_f32(*o, rows * s.rows)).collect()
        };
        let all = run(0, 8, None);
        for (i, (spec, w)) in specs.iter().enumerate() {
            close(&format!("{cols} columns, matrix {i}"), &all[i], &product(spec, w, &x), 2e-5);
        }
        for (first, rows) in [(0, 1), (7, 1), (3, 2), (1, 3), (4, 4), (2, 5), (1, 7)] {
            for (i, got) in run(first, rows, None).iter().enumerate() {
                let width = specs[i].0.rows;
                assert_eq!(
                    got[..],
                    all[i][first * width..][..rows * width],
                    "{cols} columns, {rows} rows from {first}, matrix {i}"
                );
            }
        }
        for i in [0, 2, 3, 5] {
            assert_eq!(run(0, 8, Some(i))[i], all[i], "{cols} columns, matrix {i} alone");
        }
    }
}

/// Threadgroups that take many blocks of rows, with x staged once and in tiles.
#[test]
fn many_blocks_of_rows() {
    for (cols, rows, mma) in [
        (1024, 1, false),
        (1024, 8, false),
        (2112, 5, false),
        (1024, 1, true),
        (1088, 7, true),
        (2112, 8, true),
    ] {
        blocks(cols, rows, mma, 1, &[(Q4, 1001), (Q8, 300), (BF16, 130), (F32, 30)]);
    }
}

/// Simdgroups with two slices, some of them with none; the same bits.
#[test]
fn deep_blocks_change_no_bit() {
    for cols in [64, 1088] {
        let of = |cores| blocks(cols, 1, true, cores, &[(Q4, 1611)]);
        let (one, many) = (of(1), of(1000));
        assert_eq!((one.0, many.0), ("gemv_mma_1_deep", "gemv_mma_1"));
        assert_eq!(one.1, many.1, "{cols} columns");
    }
}

/// On few cores everything is one wave of them. The kernel, and what it made of the matrices.
fn blocks(
    cols: usize,
    rows: usize,
    mma: bool,
    cores: u32,
    matrices: &[(WeightFormat, usize)],
) -> (&'static str, Vec<Vec<f32>>) {
    let mut rng = Seeded::new(&format!("many {cols} {rows}"));
    let specs: Vec<_> = matrices.iter().map(|(f, n)| weight(&mut rng, *f, *n, cols)).collect();
    let x: Vec<f32> = rng.activations(rows * cols, 1.5).into_iter().map(bf16).collect();
    let mut rig = Rig::new(7, "softgpu");
    rig.driver = lily_softgpu::SoftDriver::new(lily_softgpu::Options {
        profile: lily_gpu::Profile { cores, mma, ..lily_gpu::Profile::named("softgpu").unwrap() },
        ..lily_softgpu::Options::default()
    });
    let weights = rig.weights(&specs);
    let input = GemvInput { x: rig.bf16(&x), norm: None, keep: None, rows: rows as u32 };
    let outs: Vec<Operand> =
        specs.iter().map(|(s, _)| rig.room(ElementType::F32, rows * s.rows)).collect();
    let outputs: Vec<GemvOutput> = weights.iter().zip(&outs).map(|(w, o)| store(w, *o)).collect();
    let (kernels, _) = rig.run(decode(rows as u32), |r, c, _| gemv(r, c, input, &outputs));
    assert_eq!(kernels[0].starts_with("gemv_mma"), mma);
    let mut all = Vec::new();
    for ((spec, w), out) in specs.iter().zip(&outs) {
        let got = rig.get_f32(*out, rows * spec.rows);
        close(&format!("{cols} columns, {} rows", spec.rows), &got, &product(spec, w, &x), 2e-5);
        all.push(got);
    }
    (kernels[0], all)
}

/// The norm in front, the sum behind and the gated pair have the bits of the kernels that they replace.
#[test]
fn fused_forms_have_the_bits_of_the_chain() {
    fused_forms(&[
        (64, 1, "softgpu"),
        (192, 2, "softgpu"),
        (1088, 3, "softgpu"),
        (1088, 2, "h200"),
        (2048, 8, "softgpu"),
        (2048, 1, "m4-max"),
        (64, 1, "h200"),
        (2048, 2, "h200"),
        (4096, 1, "h200"),
    ]);
}

/// Few kernel threads, for sanitizers and barriers left out.
#[test]
fn small_fused_forms() {
    fused_forms(&[(64, 2, "softgpu")]);
}

/// Likewise by matrix units, with simdgroups that share a tile and threadgroups that take several blocks.
#[test]
fn small_products_by_mma() {
    fused_forms(&[(64, 2, "h200")]);
    blocks(64, 2, true, 1, &[(Q4, 900)]);
    blocks(64, 1, true, 1, &[(Q4, 1600)]);
}

fn fused_forms(sizes: &[(usize, usize, &str)]) {
    for &(cols, rows, profile) in sizes {
        let mut rng = Seeded::new(&format!("fused {cols} {rows}"));
        let specs: Vec<_> = [(Q4, 50), (Q4, 50), (Q8, 7), (F32, 1), (Q4, 21)]
            .into_iter()
            .map(|(format, rows)| weight(&mut rng, format, rows, cols))
            .collect();
        let mut rig = Rig::new(6, profile);
        let weights = rig.weights(&specs);
        let (gate, up, router, norm, down) =
            (&weights[0], &weights[1], &weights[2], &weights[3], &weights[4]);
        assert!(can_pair(gate, up) && !can_pair(gate, down));
        let x = rng.activations(rows * cols, 3.0);
        let stream = rig.f32(&x);
        let step = decode(rows as u32);
        let normed = rig.room(ElementType::Bf16, rows * cols);
        let kept = rig.room(ElementType::Bf16, rows * cols);
        let outs: Vec<Operand> = (0..7).map(|_| rig.room(ElementType::Bf16, rows * 50)).collect();
        let logits = [(); 2].map(|()| rig.room(ElementType::F32, rows * 7));
        let base: Vec<f32> = rng.activations(rows * 21, 1.0);
        let residual = rig.f32(&base);
        let sums = [(); 2].map(|()| rig.room(ElementType::F32, rows * 21));
        // The chain: each a kernel of its own.
        let plain = GemvInput { x: normed, norm: None, keep: None, rows: rows as u32 };
        let down_out = Operand { bytes: (rows * 21 * 2) as u64, ..outs[3] };
        let product_out = Operand { bytes: (rows * 50 * 2) as u64, ..outs[2] };
        rig.run(step.clone(), |r, c, _| {
            rms_norm(r, c, stream, norm, 1e-6, normed, rows as u32);
            gemv(r, c, plain, &[store(gate, outs[0]), store(up, outs[1])]);
            gemv(r, c, plain, &[store(router, logits[0])]);
            swiglu(r, c, outs[0], outs[1], product_out);
            gemv(r, c, plain, &[store(down, down_out)]);
            add(r, c, residual, down_out, sums[0]);
        });
        // Fused: one launch, and one for the sum.
        let fused =
            GemvInput { x: stream, norm: Some((norm, 1e-6)), keep: None, rows: rows as u32 };
        let (kernels, stages) = rig.run(step, |r, c, _| {
            let pair = GemvOutput { weight: gate, out: outs[4], epilogue: Epilogue::Gated(up) };
            let keeping = GemvInput { keep: Some(kept), ..fused };
            gemv(r, c, keeping, &[store(router, logits[1]), pair]);
            let sum =
                GemvOutput { weight: down, out: sums[1], epilogue: Epilogue::AddTo(residual) };
            gemv(r, c, fused, &[sum]);
        });
        assert_eq!((kernels.len(), stages), (2, 1));
        let name = format!("{cols} columns, {rows} rows");
        let want: Vec<f32> = rig.get_f32(product_out, rows * 50);
        assert!(want.iter().all(|x| x.is_finite()));
        assert_eq!(rig.get_f32(outs[4], rows * 50), want, "{name}: gated");
        let want: Vec<u16> = rig.get(normed, rows * cols);
        assert_eq!(rig.get::<u16>(kept, rows * cols), want, "{name}: normalized rows");
        let want: Vec<f32> = rig.get(logits[0], rows * 7);
        assert_eq!(rig.get::<f32>(logits[1], rows * 7), want, "{name}: router");
        let want: Vec<f32> = rig.get(sums[0], rows * 21);
        assert!(want.iter().zip(&base).any(|(a, b)| a != b));
        assert_eq!(rig.get::<f32>(sums[1], rows * 21), want, "{name}: sum");
        // The norm is right, too.
        let w = specs[3].1.as_ref().row(&specs[3].0, 0, 0);
        let want: Vec<f64> = x
            .chunks(cols)
            .flat_map(|x| {
                let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / cols as f64;
                let scale = (mean + 1e-6).sqrt().recip();
                x.iter()
                    .zip(&w)
                    .map(|(x, w)| f64::from(*x) * scale * f64::from(*w))
                    .collect::<Vec<_>>()
            })
            .collect();
        close(&name, &rig.get_f32(normed, rows * cols), &want, 4e-3);
    }
}

/// The token that a slot sampled last stands in for the host's.
#[test]
fn embedding_of_the_token_sampled_last() {
    let mut rng = Seeded::new("handoff");
    let mut rig = Rig::new(2, "softgpu");
    let specs = [weight(&mut rng, Q4, 30, 128)];
    let weights = rig.weights(&specs);
    rig.decode_segments(3);
    let header = |last_token| SlotHeader { position: 1, last_token, generated: 1, parity: 0 };
    rig.tables.headers = rig.put(ElementType::U32, &[header(4), header(29), header(11)]);
    rig.tables.row_segments = rig.u32(&[0, 1, 2]);
    rig.tables.tokens = rig.u32(&[7, LAST_SAMPLED, LAST_SAMPLED]);
    let out = rig.room(ElementType::F32, 3 * 128);
    rig.run(decode(3), |r, c, _| embed(r, c, &weights[0], out));
    let got: Vec<f32> = rig.get(out, 3 * 128);
    let want: Vec<f32> =
        [7, 29, 11].into_iter().flat_map(|t| specs[0].1.as_ref().row(&specs[0].0, 0, t)).collect();
    assert_eq!(got, want);
}
