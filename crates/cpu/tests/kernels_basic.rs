//! Norm, element-wise, embedding, router and logit kernels: against plain references, and bit-equal for
//! every instruction set and thread count.

mod kernels_common;

use kernels_common::{assert_bits, assert_close, bf16, bf16_bits, everywhere, noise};
use lily_cpu::kernels::elementwise::{
    MoeCombine, add, all_finite, argmax, attn_gate, gather_rows, log_sum_exp, moe_combine, swiglu,
};
use lily_cpu::kernels::embed::{EmbedTable, embed};
use lily_cpu::kernels::norm::rms_norm;
use lily_cpu::kernels::router::{ExpertGroups, route};
use lily_cpu::pool::Pool;
use lily_cpu::simd::Isa;

fn sigmoid(x: f32) -> f64 {
    1.0 / (1.0 + (-f64::from(x)).exp())
}

#[test]
fn rms_norm_matches_its_formula() {
    for (rows, width) in [(1, 2048), (7, 100), (130, 128), (3, 5)] {
        let (x, w) = (noise(1, rows * width), noise(2, width));
        let got = everywhere(|isa, pool| {
            let mut out = vec![0.0; x.len()];
            rms_norm(isa, pool, &x, &w, 1e-6, &mut out);
            out
        });
        for row in 0..rows {
            let x = &x[row * width..][..width];
            let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / width as f64;
            let want =
                x.iter().zip(&w).map(|(&x, &w)| f64::from(x) / (mean + 1e-6).sqrt() * f64::from(w));
            assert_close(&got[row * width..][..width], want, 1e-6);
        }
    }
}

#[test]
fn elementwise_kernels_match_their_formulas() {
    for n in [1, 16, 100, 20_000] {
        let (x, y) = (noise(1, n), noise(2, n));
        let got = everywhere(|isa, pool| {
            let mut x = x.clone();
            add(isa, pool, &mut x, &y);
            x
        });
        assert_bits(&got, &x.iter().zip(&y).map(|(x, y)| x + y).collect::<Vec<_>>());
        let gate: Vec<f32> = x.iter().map(|x| x * 20.0).collect();
        let got = everywhere(|isa, pool| {
            let mut gate = gate.clone();
            swiglu(isa, pool, &mut gate, &y);
            gate
        });
        assert_close(
            &got,
            gate.iter().zip(&y).map(|(&g, &y)| f64::from(g) * sigmoid(g) * f64::from(y)),
            1e-6,
        );
    }
}

#[test]
fn attention_gate_follows_each_head() {
    let (rows, heads, dim) = (5, 3, 48);
    let (q_gate, o) = (noise(1, rows * heads * 2 * dim), noise(2, rows * heads * dim));
    let got = everywhere(|isa, pool| {
        let mut o = o.clone();
        attn_gate(isa, pool, dim, &q_gate, &mut o);
        o
    });
    let want = o
        .iter()
        .enumerate()
        .map(|(i, &o)| f64::from(o) * sigmoid(q_gate[(i / dim * 2 + 1) * dim + i % dim]));
    assert_close(&got, want, 1e-6);
}

#[test]
fn experts_combine_in_rank_order() {
    for (rows, k, width) in [(1, 8, 2048), (9, 3, 128), (4, 2, 21)] {
        let (residual, routed) = (noise(1, rows * width), noise(2, rows * k * width));
        let (weights, shared) = (noise(3, rows * k), noise(4, rows * width));
        let shared_gate = noise(5, rows);
        let input = MoeCombine {
            top_k: k,
            routed: &routed,
            weights: &weights,
            shared: &shared,
            shared_gate: &shared_gate,
        };
        let got = everywhere(|isa, pool| {
            let mut h = residual.clone();
            moe_combine(isa, pool, &input, &mut h);
            h
        });
        let want = (0..rows * width).map(|i| {
            let (row, c) = (i / width, i % width);
            let experts: f64 = (0..k)
                .map(|r| {
                    f64::from(weights[row * k + r]) * f64::from(routed[(row * k + r) * width + c])
                })
                .sum();
            f64::from(residual[i]) + experts + sigmoid(shared_gate[row]) * f64::from(shared[i])
        });
        assert_close(&got, want, 1e-6);
    }
}

#[test]
fn gathers_rows() {
    let x = noise(1, 10 * 37);
    let ids = [3, 3, 9, 0];
    let got = everywhere(|_, pool| {
        let mut out = vec![0.0; ids.len() * 37];
        gather_rows(pool, &x, 37, &ids, &mut out);
        out
    });
    assert_bits(
        &got,
        &ids.iter().flat_map(|&i| x[i as usize * 37..][..37].to_vec()).collect::<Vec<_>>(),
    );
}

#[test]
fn finds_what_is_not_finite() {
    for isa in Isa::available() {
        for n in [0, 1, 63, 64, 65, 10_000] {
            let mut x = noise(1, n);
            assert!(all_finite(isa, &x));
            x.iter_mut().for_each(|x| *x = f32::MAX);
            assert!(all_finite(isa, &x));
            for at in [0, n / 2, n.saturating_sub(1)] {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    if at < n {
                        let good = std::mem::replace(&mut x[at], bad);
                        assert!(!all_finite(isa, &x), "{isa} {n} {at} {bad}");
                        x[at] = good;
                    }
                }
            }
        }
    }
}

#[test]
fn argmax_takes_the_first_maximum() {
    for isa in Isa::available() {
        assert_eq!(argmax(isa, &[]), None);
        assert_eq!(argmax(isa, &[f32::NAN; 100]), None);
        assert_eq!(argmax(isa, &[f32::NEG_INFINITY; 100]), Some(0));
        let mut x = noise(1, 248_320);
        for at in [248_319, 100_000, 8192, 8191, 17, 0] {
            x[at] = 5.0;
            assert_eq!(argmax(isa, &x), Some(at));
        }
        x[..8192].fill(f32::NAN);
        assert_eq!(argmax(isa, &x), Some(8192));
    }
}

#[test]
fn log_sum_exp_matches_f64() {
    for n in [1, 15, 16, 1000, 248_320] {
        let x: Vec<f32> = noise(1, n).iter().map(|x| x * 12.0).collect();
        let want = x.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
        let got = everywhere(|isa, _| vec![log_sum_exp(isa, &x).to_bits()]);
        assert!((f64::from_bits(got[0]) - want).abs() < 2e-5, "{n}: {want}");
    }
    for isa in Isa::available() {
        assert!(log_sum_exp(isa, &[0.0, f32::NAN]).is_nan());
        assert_eq!(log_sum_exp(isa, &[-3.5]), -3.5);
        assert!((log_sum_exp(isa, &[1000.0, 1000.0]) - 1000.0 - 2f64.ln()).abs() < 1e-9);
    }
}

#[test]
fn embeds_every_table_type() {
    let (vocabulary, width) = (11, 192);
    let tokens = [10, 0, 3, 3];
    for bits in [4u32, 8] {
        // One byte of offset: the checkpoint's tensors have no alignment.
        let bytes = width * bits as usize / 8;
        let codes: Vec<u8> = (0..1 + vocabulary * bytes).map(|i| (i * 37 % 251) as u8).collect();
        let halves = |seed| {
            let values = noise(seed, vocabulary * width / 64);
            let bytes: Vec<u8> = values.iter().flat_map(|&x| bf16_bits(x).to_le_bytes()).collect();
            ([vec![0], bytes].concat(), values)
        };
        let ((scales, s), (biases, b)) = (halves(1), halves(2));
        let table = EmbedTable::Affine {
            bits,
            codes: &codes[1..],
            scales: &scales[1..],
            biases: &biases[1..],
        };
        let got = everywhere(|isa, pool| {
            let mut out = vec![0.0; tokens.len() * width];
            embed(isa, pool, &table, width, &tokens, &mut out);
            out
        });
        let want =
            tokens.iter().flat_map(|&t| (0..width).map(move |c| (t as usize, c))).map(|(t, c)| {
                let code = match bits {
                    4 => codes[1 + t * bytes + c / 2] >> (4 * (c % 2)) & 15,
                    _ => codes[1 + t * bytes + c],
                };
                let g = t * width / 64 + c / 64;
                bf16(s[g]).mul_add(f32::from(code), bf16(b[g]))
            });
        assert_bits(&got, &want.collect::<Vec<_>>());
    }
    let width = 37;
    let values = noise(3, vocabulary * width);
    let dense: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let half: Vec<u8> = values.iter().flat_map(|&x| bf16_bits(x).to_le_bytes()).collect();
    let (dense, half) = ([vec![0], dense].concat(), [vec![0], half].concat());
    for (table, rounded) in
        [(EmbedTable::F32(&dense[1..]), false), (EmbedTable::Bf16(&half[1..]), true)]
    {
        let got = everywhere(|isa, pool| {
            let mut out = vec![0.0; tokens.len() * width];
            embed(isa, pool, &table, width, &tokens, &mut out);
            out
        });
        let rows = tokens.iter().flat_map(|&t| values[t as usize * width..][..width].to_vec());
        assert_bits(&got, &rows.map(|x| if rounded { bf16(x) } else { x }).collect::<Vec<_>>());
    }
    assert!(
        EmbedTable::Affine { bits: 3, codes: &[], scales: &[], biases: &[] }.supported(64).is_err()
    );
    assert!(
        EmbedTable::Affine { bits: 4, codes: &[], scales: &[], biases: &[] }.supported(96).is_err()
    );
}

fn routed(experts: usize, k: usize, logits: &[f32]) -> (Vec<u32>, Vec<f32>) {
    let rows = logits.len() / experts;
    let out = everywhere(|isa, pool| {
        let (mut ids, mut weights) = (vec![0; rows * k], vec![0.0f32; rows * k]);
        route(isa, pool, experts, k, logits, &mut ids, &mut weights);
        ids.into_iter().chain(weights.into_iter().map(f32::to_bits)).collect::<Vec<u32>>()
    });
    let (ids, weights) = out.split_at(rows * k);
    (ids.to_vec(), weights.iter().map(|&w| f32::from_bits(w)).collect())
}

#[test]
fn router_selects_the_largest_probabilities() {
    for (experts, k) in [(10, 3), (256, 8), (16, 16), (17, 1)] {
        let rows = 40;
        let logits: Vec<f32> = noise(1, rows * experts).iter().map(|x| x * 5.0).collect();
        let (ids, weights) = routed(experts, k, &logits);
        for row in 0..rows {
            let x = &logits[row * experts..][..experts];
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|&a, &b| x[b].total_cmp(&x[a]));
            assert!(order.iter().zip(&ids[row * k..][..k]).all(|(&a, &b)| a == b as usize));
            let chosen: Vec<f64> = order[..k].iter().map(|&e| f64::from(x[e]).exp()).collect();
            let sum: f64 = chosen.iter().sum();
            assert_close(&weights[row * k..][..k], chosen.iter().map(|p| p / sum), 1e-6);
        }
    }
}

#[test]
fn router_breaks_ties_by_the_lower_id() {
    let (ids, weights) = routed(10, 3, &[1.0; 10]);
    assert_eq!(ids, [0, 1, 2]);
    assert_close(&weights, [1.0 / 3.0; 3].into_iter(), 1e-7);
    let (ids, _) = routed(10, 3, &[0.0, 2.0, 3.0, 2.0, 0.0, 3.0, 2.0, 2.0, 0.0, 0.0]);
    assert_eq!(ids, [2, 5, 1]);
}

#[test]
fn router_survives_what_is_not_finite() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut logits = noise(1, 256);
        logits[200] = bad;
        let (ids, weights) = routed(256, 8, &logits);
        let mut distinct = ids.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert!(distinct.len() == 8 && distinct.iter().all(|&id| id < 256));
        assert!(weights.iter().all(|w| w.is_nan()));
    }
    let (ids, weights) = routed(10, 3, &[f32::NEG_INFINITY; 10]);
    assert!(ids == [0, 1, 2] && weights.iter().all(|w| w.is_nan()));
}

#[test]
fn groups_hold_each_routed_row_once_in_order() {
    let mut groups = ExpertGroups::default();
    groups.build(&[2, 0, 2, 5, 0, 2], 7);
    assert_eq!(groups.offsets(), [0, 2, 2, 5, 5, 5, 6, 6]);
    assert_eq!(groups.routed(), [1, 4, 0, 2, 5, 3]);
    assert_eq!(groups.group(2), [0, 2, 5]);
    groups.build(&[], 3);
    assert_eq!(groups.offsets(), [0; 4]);
    assert!(groups.routed().is_empty());
    groups.build(&[0, 0], 1);
    assert_eq!(groups.group(0), [0, 1]);
}

#[test]
fn no_rows_are_no_work() {
    let (isa, pool) = (Isa::detect(), Pool::new(2));
    rms_norm(isa, &pool, &[], &[1.0; 8], 1e-6, &mut []);
    add(isa, &pool, &mut [], &[]);
    route(isa, &pool, 10, 3, &[], &mut [], &mut []);
}
