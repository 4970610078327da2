//! Routing and experts beside the plan's operations: tables, switches, the fused chain.

mod operands;

use lily_gpu::kernels::gemm::RowBlocks;
use lily_gpu::kernels::moe::{self, Combine, ExpertsIn, ExpertsOut, ExpertsSum};
use lily_gpu::kernels::route::{self, Routes, Selection};
use lily_gpu::{Operand, Tuning};
use lily_ops::{ElementType, WeightFormat};
use operands::{EXPERT_FILES, Rig, TestWeight, close, text_of};

const Q4: WeightFormat = WeightFormat::Affine { bits: 4 };

fn rig() -> Rig {
    Rig::new(text_of("", "", EXPERT_FILES))
}

/// Few rows by matrix units, if `mma`.
fn rig_with(mma: bool) -> Rig {
    let mut rig = rig();
    rig.profile.mma = mma;
    rig
}

/// The tables that the device makes, and those of the host.
fn check_routes(rig: &mut Rig, what: &str, ids: &[u32], experts: u32) {
    let cut = RowBlocks::of(&rig.profile, &rig.tuning);
    let entries = ids.len() as u32;
    let ids_operand = rig.u32(ids);
    let most = route::most_blocks(entries, experts, cut) as usize;
    let (order, blocks) =
        (rig.empty(ids.len(), ElementType::U32), rig.empty(4 + 4 * most, ElementType::U32));
    let kernels = rig.run(|r, c, scratch| {
        let routes = route::route(r, c, scratch, ids_operand, entries, experts);
        assert_eq!(routes.most_blocks as usize, most);
        // What lies in scratch is read through operands of the test.
        for dispatch in &mut r.dispatches {
            for binding in &mut dispatch.bindings {
                for (from, to) in [(routes.order, order), (routes.blocks, blocks)] {
                    if binding.buffer == from.buffer {
                        binding.buffer = to.buffer;
                    }
                }
            }
        }
    });
    assert_eq!(kernels, ["route_count", "route_scatter"]);
    let host = route::host_tables(ids, experts, cut);
    assert_eq!(rig.read_u32(order), host.order, "{what}");
    assert_eq!(rig.read_u32(blocks)[..host.blocks.len()], host.blocks, "{what}");
}

#[test]
fn device_and_host_make_the_same_tables() {
    let mut rig = rig();
    for (adaptive, mma) in [(true, false), (true, true), (false, false)] {
        (rig.tuning.adaptive_tiles, rig.profile.mma) = (adaptive, mma);
        // Experts with no row, one, around a block of 16 and of 32, and many.
        let mut ids = Vec::new();
        for (expert, rows) in [0, 1, 15, 16, 17, 31, 32, 33, 48, 49, 100].into_iter().enumerate() {
            ids.extend(std::iter::repeat_n(expert as u32, rows));
        }
        // In an order that mixes them.
        let n = ids.len();
        let mixed: Vec<u32> = (0..n).map(|i| ids[i * 101 % n]).collect();
        check_routes(&mut rig, "sizes", &mixed, 12);
        check_routes(&mut rig, "all on one", &[3; 90], 4);
        check_routes(&mut rig, "one", &[2], 3);
        // More than one threadgroup has entries; more than one simdgroup has experts.
        let random: Vec<u32> =
            rig.random(1100).iter().map(|x| ((x + 1.0) * 128.0) as u32 % 256).collect();
        check_routes(&mut rig, "256 experts", &random, 256);
        // More than one expert a thread.
        let wide: Vec<u32> = random.iter().map(|x| x * 4 % 1023).collect();
        check_routes(&mut rig, "1023 experts", &wide, 1023);
    }
}

#[test]
fn equal_logits_go_to_the_lower_id() {
    let mut rig = rig();
    let mut logits = vec![0.0f32; 2 * 40];
    logits[7] = -0.0;
    logits[33] = 1.0;
    logits[40..].fill(-1.5);
    logits[79] = f32::NEG_INFINITY;
    logits[41] = 2.0;
    logits[75] = 2.0;
    let (x, ids, weights) =
        (rig.f32(&logits), rig.empty(8, ElementType::U32), rig.empty(8, ElementType::F32));
    rig.run(|r, c, _| {
        route::router(r, c, &Selection { logits: x, rows: 2, experts: 40, k: 4, ids, weights });
    });
    assert_eq!(rig.read_u32(ids), [33, 0, 1, 2, 1, 35, 0, 2]);
    let e = 1f32.exp();
    let want: Vec<f32> = [e, 1.0, 1.0, 1.0].iter().map(|x| x / (e + 3.0)).collect();
    close("weights", &rig.read_f32(weights)[..4], &want, 1e-6);
}

const WIDTH: usize = 64;
const COLS: usize = 128;
const EXPERTS: usize = 6;
const K: usize = 2;

struct Layer {
    x: Operand,
    ids: Operand,
    gate: TestWeight,
    up: TestWeight,
    down: TestWeight,
}

/// A small layer of experts and `rows` rows of input, on which no expert, one, or all rows fall.
fn layer(rig: &mut Rig, rows: usize) -> Layer {
    const MOST: usize = 64;
    let x = rig.random(MOST * COLS)[..rows * COLS].to_vec();
    let ids: Vec<u32> =
        (0..rows as u32).flat_map(|r| [5, if r == 3 { 1 } else { r % 2 * 2 }]).collect();
    Layer {
        x: rig.bf16(&x),
        ids: rig.u32(&ids),
        gate: rig.weight(Q4, EXPERTS, WIDTH, COLS),
        up: rig.weight(Q4, EXPERTS, WIDTH, COLS),
        down: rig.weight(Q4, EXPERTS, 100, WIDTH),
    }
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

fn dot(w: &[f32], x: &[f32]) -> f32 {
    w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>() as f32
}

/// Experts with no row, one, and around a block of 16 and of 32; widths that are no whole tile.
fn sizes(rig: &mut Rig, format: WeightFormat, cols: usize, width: usize, out_width: usize) {
    let mut ids = Vec::new();
    for (expert, rows) in [0, 1, 15, 16, 17, 31, 32, 33].into_iter().enumerate() {
        ids.extend(std::iter::repeat_n(expert as u32, rows));
    }
    let rows = ids.len();
    let ids: Vec<u32> = (0..rows).map(|i| ids[i * 7 % rows]).collect();
    let x: Vec<f32> = rig.random(rows * cols).iter().map(|x| ElementType::Bf16.round(*x)).collect();
    let [gate, up] = [(); 2].map(|()| rig.weight(format, 8, width, cols));
    let down = rig.weight(format, 8, out_width, width);
    let (x_operand, ids_operand) = (rig.bf16(&x), rig.u32(&ids));
    let inner = rig.empty(rows * width, ElementType::Bf16);
    let out = rig.empty(rows * out_width, ElementType::Bf16);
    let (n, k) = (rows as u32, 1);
    rig.run(|r, c, scratch| {
        let routes = Some(route::route(r, c, scratch, ids_operand, n, 8));
        let (gate, up, down) = (&gate.device, &up.device, &down.device);
        let first = ExpertsIn { x: x_operand, ids: ids_operand, rows: n, k, gate, up, out: inner };
        moe::experts_in(r, c, scratch, routes.as_ref(), &first);
        let second = ExpertsOut { x: inner, ids: ids_operand, rows: n, k, down, out };
        moe::experts_out(r, c, scratch, routes.as_ref(), &second);
    });
    let (got, last) = (rig.read_f32(inner), rig.read_f32(out));
    let (mut want, mut want_last) = (Vec::new(), Vec::new());
    for (row, expert) in ids.iter().enumerate() {
        let (e, x) = (*expert as usize, &x[row * cols..][..cols]);
        let product = |c| silu(dot(&gate.row_bf16(e, c), x)) * dot(&up.row_bf16(e, c), x);
        want.extend((0..width).map(product));
        // From what the first projection stored.
        let x = &got[row * width..][..width];
        want_last.extend((0..out_width).map(|c| dot(&down.row_bf16(e, c), x)));
    }
    close(&format!("{format:?}: in"), &got, &want, 4e-3);
    close(&format!("{format:?}: out"), &last, &want_last, 4e-3);
}

#[test]
fn experts_of_all_sizes() {
    let mut rig = rig();
    sizes(&mut rig, Q4, 64, 64, 100);
    sizes(&mut rig, Q4, 2048, 64, 10);
    sizes(&mut rig, WeightFormat::Affine { bits: 8 }, 128, 64, 65);
    sizes(&mut rig, WeightFormat::Dense(ElementType::F32), 64, 40, 33);
}

/// Both projections of a layer; the results and the kernels.
fn both(tuning: Tuning, rows: usize, host_tables: bool) -> ([Vec<f32>; 2], Vec<&'static str>) {
    both_on(rig(), tuning, rows, host_tables)
}

fn both_on(
    mut rig: Rig,
    tuning: Tuning,
    rows: usize,
    host_tables: bool,
) -> ([Vec<f32>; 2], Vec<&'static str>) {
    rig.tuning = tuning;
    let l = layer(&mut rig, rows);
    let inner = rig.empty(rows * K * WIDTH, ElementType::Bf16);
    let out = rig.empty(rows * K * 100, ElementType::Bf16);
    let (n, k) = (rows as u32, K as u32);
    let (entries, experts) = (n * k, EXPERTS as u32);
    let ids = rig.read_u32(l.ids);
    let cut = RowBlocks::of(&rig.profile, &tuning);
    let host = route::host_tables(&ids, experts, cut);
    let made = Routes {
        order: rig.u32(&host.order),
        blocks: rig.u32(&host.blocks),
        most_blocks: route::most_blocks(entries, experts, cut),
    };
    let kernels = rig.run(|r, c, scratch| {
        let routes = match (moe::few(n), host_tables) {
            (true, _) => None,
            (_, true) => Some(made),
            _ => Some(route::route(r, c, scratch, l.ids, entries, experts)),
        };
        let (gate, up, down) = (&l.gate.device, &l.up.device, &l.down.device);
        let first = ExpertsIn { x: l.x, ids: l.ids, rows: n, k, gate, up, out: inner };
        moe::experts_in(r, c, scratch, routes.as_ref(), &first);
        let second = ExpertsOut { x: inner, ids: l.ids, rows: n, k, down, out };
        moe::experts_out(r, c, scratch, routes.as_ref(), &second);
    });
    ([rig.read_f32(inner), rig.read_f32(out)], kernels)
}

#[test]
fn switches_of_grouped_experts_change_the_way_and_not_the_bits() {
    for (mma, wgmma, grouped) in [
        (false, false, ["experts_in_q4", "experts_out_q4"]),
        (true, false, ["experts_in_mma_q4", "experts_out_mma_q4"]),
        (true, true, ["experts_in_wgmma_q4", "experts_out_wgmma_q4"]),
    ] {
        let both = |tuning, hosts| {
            let mut rig = rig_with(mma);
            rig.profile.wgmma = wgmma;
            both_on(rig, tuning, 37, hosts)
        };
        let (on, kernels) = both(Tuning::default(), false);
        assert_eq!(kernels[..2], ["route_count", "route_scatter"]);
        assert_eq!(kernels[2..], grouped);
        assert!(on.iter().flatten().all(|x| x.is_finite()));
        let off = Tuning::without("dequantize_in_gemm").unwrap();
        let (expanded, kernels) = both(off, false);
        assert_eq!(kernels.iter().filter(|k| **k == "dequantize").count(), 3);
        // wgmma takes 4-bit weights alone, and adds in another order.
        match wgmma {
            false => assert_eq!(on, expanded),
            true => (0..2).for_each(|i| close("expanded", &on[i], &expanded[i], 0.01)),
        }
        let (small, _) = both(Tuning::without("adaptive_tiles").unwrap(), false);
        assert_eq!(on, small);
        let (hosts, kernels) = both(Tuning::default(), true);
        assert_eq!(kernels, grouped);
        assert_eq!(on, hosts);
    }
}

#[test]
fn a_rows_bits_do_not_depend_on_the_number_of_rows() {
    let exact = both(Tuning::default(), 8, false).0;
    for (mma, kernel) in [(false, "decode_experts"), (true, "decode_experts_mma")] {
        let of = |tuning, rows| both_on(rig_with(mma), tuning, rows, false);
        let ([inner, out], kernels) = of(Tuning::default(), 8);
        assert_eq!(kernels, [kernel; 2]);
        close("kernels", &inner, &exact[0], 0.02);
        close("kernels", &out, &exact[1], 0.02);
        for rows in [1, 3, 5] {
            let ([i, o], _) = of(Tuning::default(), rows);
            assert_eq!(i[..], inner[..rows * K * WIDTH], "{rows} rows");
            assert_eq!(o[..], out[..rows * K * 100], "{rows} rows");
        }
        let (separate, kernels) = of(Tuning::without("fuse_experts_in").unwrap(), 8);
        assert_eq!(kernels[..3], [kernel, kernel, "swiglu"]);
        close("separate", &separate[0], &inner, 0.02);
        close("separate", &separate[1], &out, 0.02);
    }
}

/// Threadgroups that take several blocks one after another make the bits of many that take one each.
#[test]
fn one_threadgroup_takes_all_blocks() {
    let of = |cores, large_memory| {
        let mut rig = rig_with(true);
        (rig.profile.cores, rig.profile.large_memory) = (cores, large_memory);
        both_on(rig, Tuning::default(), 5, false)
    };
    let (each, kernels) = of(1000, 227 << 10);
    assert_eq!(kernels, ["decode_experts_mma"; 2]);
    // Where threadgroups have no room for two slices of a simdgroup.
    let (one, kernels) = of(1, 80 << 10);
    assert_eq!(kernels, ["decode_experts_mma"; 2]);
    assert_eq!(one, each);
    let (deep, kernels) = of(1, 227 << 10);
    assert_eq!(kernels, ["decode_experts_mma_deep"; 2]);
    assert_eq!(deep, each);
}

/// The same with simdgroups that share a tile, one of them without a slice, blocks that are not full, and tasks of several entries and rows.
#[test]
fn deep_tasks_change_no_bit() {
    let (rows, k, width, cols) = (3, 2, 40, 1088);
    let of = |cores| {
        let mut rig = rig_with(true);
        rig.profile.cores = cores;
        let x = rig.random(rows * cols);
        let x = rig.bf16(&x);
        let ids = rig.u32(&[3, 0, 0, 2, 1, 3]);
        let [gate, up] = [(); 2].map(|()| rig.weight(Q4, 4, width, cols));
        let out = rig.empty(rows * k * width, ElementType::Bf16);
        let kernels = rig.run(|r, c, scratch| {
            let (gate, up) = (&gate.device, &up.device);
            let op = ExpertsIn { x, ids, rows: rows as u32, k: k as u32, gate, up, out };
            moe::experts_in(r, c, scratch, None, &op);
        });
        (rig.read_f32(out), kernels)
    };
    let ((each, one), (deep, many)) = (of(1000), of(1));
    assert_eq!((one, many), (vec!["decode_experts_mma"], vec!["decode_experts_mma_deep"]));
    assert!(each.iter().all(|x| x.is_finite()) && each.iter().any(|x| *x != 0.0));
    assert_eq!(each, deep);
}

struct Chain {
    rows: usize,
    format: WeightFormat,
    cols: usize,
    shared_cols: usize,
}

/// The fused chain of the first `rows` rows, and the same operations one by one.
fn chain(rig: &mut Rig, c: &Chain) -> [Vec<f32>; 2] {
    const OUT: usize = 70;
    let Chain { rows, format, cols, shared_cols } = *c;
    let k = 3;
    let down = rig.weight(format, EXPERTS, OUT, cols);
    let shared_down = rig.weight(format, 1, OUT, shared_cols);
    let x = rig.random(8 * k * cols);
    let shared_x = rig.random(8 * shared_cols);
    let old = rig.random(8 * OUT);
    let ids: Vec<u32> = (0..8).flat_map(|r| [5, r % 3, 3]).collect();
    let scores: Vec<f32> = (0..8 * k).map(|i| 0.5 / (1 + i) as f32).collect();
    let gates = rig.random(8);
    let x = rig.bf16(&x[..rows * k * cols]);
    let ids = rig.u32(&ids[..rows * k]);
    let weights = rig.f32(&scores[..rows * k]);
    let shared_operand = rig.bf16(&shared_x[..rows * shared_cols]);
    let shared_gate = rig.f32(&gates[..rows]);
    let residual = rig.f32(&old[..rows * OUT]);
    let out = rig.empty(rows * OUT, ElementType::F32);
    let (n, k) = (rows as u32, k as u32);
    assert!(moe::fits_sum(&down.device, &shared_down.device, n, k));
    let sum = ExpertsSum {
        x,
        ids,
        weights,
        rows: n,
        k,
        down: &down.device,
        shared_x: shared_operand,
        shared_down: &shared_down.device,
        shared_gate,
        residual,
        out,
    };
    let units = rig.profile.mma && format == Q4 && cols.max(shared_cols) <= 512;
    let kernels = rig.run(|r, c, _| moe::decode_experts_out(r, c, &sum));
    assert_eq!(kernels, [if units { "decode_experts_out_mma" } else { "decode_experts_out" }]);
    let fused = rig.read_f32(out);

    let routed = rig.empty(rows * k as usize * OUT, ElementType::Bf16);
    let shared: Vec<f32> = (0..rows)
        .flat_map(|row| {
            let x = &shared_x[row * shared_cols..][..shared_cols];
            let dot = |r| {
                let w: Vec<f32> = shared_down.row(0, r);
                w.iter().zip(x).map(|(w, x)| w * ElementType::Bf16.round(*x)).sum()
            };
            (0..OUT).map(dot).collect::<Vec<f32>>()
        })
        .collect();
    let shared = rig.bf16(&shared);
    rig.run(|r, c, scratch| {
        let experts = ExpertsOut { x, ids, rows: n, k, down: &down.device, out: routed };
        moe::experts_out(r, c, scratch, None, &experts);
        let combine = Combine {
            residual,
            routed,
            weights,
            shared,
            shared_gate,
            out,
            rows: n,
            k,
            width: OUT as u32,
        };
        moe::combine(r, c, &combine);
    });
    [fused, rig.read_f32(out)]
}

#[test]
fn the_fused_chain_is_the_operations_one_by_one() {
    for (mma, format, cols, shared_cols) in [
        (false, Q4, 64, 64),
        (false, Q4, 192, 128),
        (false, Q4, 512, 512),
        (true, Q4, 64, 64),
        (true, Q4, 192, 128),
        (true, Q4, 512, 512),
        (true, Q4, 576, 512),
        (false, WeightFormat::Affine { bits: 8 }, 128, 64),
        (true, WeightFormat::Dense(ElementType::Bf16), 64, 128),
        (false, WeightFormat::Dense(ElementType::F32), 64, 64),
    ] {
        let mut rig = rig_with(mma);
        for rows in [1, 5] {
            let [fused, apart] = chain(&mut rig, &Chain { rows, format, cols, shared_cols });
            // The operations round each expert's result to bf16.
            close(&format!("{format:?}, {rows}x{cols}"), &fused, &apart, 3e-3);
        }
    }
}

/// Few kernel threads, for sanitizers and barriers left out.
#[test]
fn small_fused_chain() {
    let sizes = Chain { rows: 1, format: Q4, cols: 64, shared_cols: 64 };
    let [fused, apart] = chain(&mut rig(), &sizes);
    close("small", &fused, &apart, 3e-3);
}

/// The same by matrix units, and the first projection.
#[test]
fn small_experts_by_mma() {
    let sizes = Chain { rows: 1, format: Q4, cols: 64, shared_cols: 64 };
    for cores in [1, 8] {
        let mut rig = rig_with(true);
        rig.profile.cores = cores;
        let [fused, apart] = chain(&mut rig, &sizes);
        close("small", &fused, &apart, 3e-3);
    }
    let [units, lanes] =
        [true, false].map(|mma| both_on(rig_with(mma), Tuning::default(), 1, false).0);
    close("small, in", &units[0], &lanes[0], 0.02);
}

#[test]
fn a_fused_rows_bits_do_not_depend_on_the_number_of_rows() {
    for mma in [false, true] {
        let of = |rows| {
            let sizes = Chain { rows, format: Q4, cols: 64, shared_cols: 128 };
            chain(&mut rig_with(mma), &sizes)[0].clone()
        };
        let eight = of(8);
        for rows in [1, 2, 3, 7] {
            assert_eq!(of(rows)[..], eight[..rows * 70], "{rows} rows");
        }
    }
}
