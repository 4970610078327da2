//! Gated DeltaNet kernels: against plain f64 references, and bit-equal for every instruction set, thread
//! count, chunking and batch.

mod kernels_common;

use kernels_common::{assert_bits, assert_close, bf16, dot16, everywhere, noise};
use lily_cpu::kernels::StoredElem;
use lily_cpu::kernels::gdn::{
    GateInput, GatedNorm, GdnShape, ScanInput, StateSegment, causal_conv, conv_weight_by_tap,
    gated_rms_norm, gates, qk_l2_norm, scan,
};
use lily_cpu::pool::Pool;
use lily_cpu::simd::Isa;

const SHAPES: [GdnShape; 4] = [
    GdnShape { key_heads: 4, value_heads: 8, dk: 32, dv: 64, taps: 4 },
    GdnShape { key_heads: 2, value_heads: 4, dk: 128, dv: 128, taps: 4 },
    GdnShape { key_heads: 1, value_heads: 3, dk: 64, dv: 32, taps: 2 },
    GdnShape { key_heads: 2, value_heads: 2, dk: 48, dv: 16, taps: 5 },
];

/// Chunks of odd sizes that add up to `rows`.
fn odd_chunks(rows: usize) -> Vec<usize> {
    let mut left = rows;
    let mut chunks = vec![];
    for n in [1, 2, 17, 3, 16, 1, 40].into_iter().cycle() {
        chunks.push(n.min(left));
        left -= n.min(left);
        if left == 0 {
            return chunks;
        }
    }
    chunks
}

/// Rows `[start, start + n)`.
fn rows(x: &[f32], width: usize, start: usize, n: usize) -> &[f32] {
    &x[start * width..][..n * width]
}

fn conv<T: StoredElem>(
    isa: Isa,
    pool: &Pool,
    shape: &GdnShape,
    (input, weight): (&[f32], &[f32]),
    chunks: &[usize],
) -> (Vec<f32>, Vec<T>) {
    let channels = shape.channels();
    let mut state = vec![T::default(); shape.conv_state_len()];
    let mut out = vec![0.0; input.len()];
    let mut done = 0;
    for &n in chunks {
        let mut segments = [StateSegment { first_row: 0, rows: n, state: &mut state[..] }];
        let to = &mut out[done * channels..][..n * channels];
        causal_conv(isa, pool, shape, &mut segments, rows(input, channels, done, n), weight, to);
        done += n;
    }
    (out, state)
}

#[test]
fn convolution_matches_its_formula_in_any_chunks() {
    for shape in SHAPES {
        let (n, channels, taps) = (37, shape.channels(), shape.taps);
        let input: Vec<f32> = noise(1, n * channels).iter().map(|x| x * 3.0).collect();
        let by_channel = noise(2, channels * taps);
        let weight = conv_weight_by_tap(&by_channel, taps);
        let want = |round: fn(f32) -> f32| {
            let (input, by_channel) = (input.clone(), by_channel.clone());
            (0..n * channels).map(move |i| {
                let (t, c) = (i / channels, i % channels);
                let sum: f64 = (0..taps)
                    .filter(|j| t + j + 1 >= taps)
                    .map(|j| {
                        let x = input[(t + j + 1 - taps) * channels + c];
                        f64::from(by_channel[c * taps + j]) * f64::from(round(x))
                    })
                    .sum();
                sum / (1.0 + (-sum).exp())
            })
        };
        let whole =
            everywhere(|isa, pool| conv::<u16>(isa, pool, &shape, (&input, &weight), &[n]).0);
        assert_close(&whole, want(bf16), 1e-6);
        let precise =
            everywhere(|isa, pool| conv::<f32>(isa, pool, &shape, (&input, &weight), &[n]).0);
        assert_close(&precise, want(|x| x), 1e-6);
        let (_, state) = conv::<f32>(Isa::detect(), &Pool::new(1), &shape, (&input, &weight), &[n]);
        assert_bits(&state, rows(&input, channels, n + 1 - taps, taps - 1));
        for chunks in [vec![1; n], odd_chunks(n)] {
            let run =
                |isa: Isa, pool: &Pool| conv::<u16>(isa, pool, &shape, (&input, &weight), &chunks);
            assert_bits(&everywhere(|isa, pool| run(isa, pool).0), &whole);
            let last = conv::<u16>(Isa::detect(), &Pool::new(1), &shape, (&input, &weight), &[n]).1;
            assert_bits(&everywhere(|isa, pool| run(isa, pool).1), &last);
        }
    }
}

#[test]
fn convolution_of_wide_layers_and_batches() {
    // More channels than a task takes, and three slots in one step.
    let shape = GdnShape { key_heads: 4, value_heads: 8, dk: 128, dv: 128, taps: 4 };
    let channels = shape.channels();
    let (input, weight) = (noise(1, 24 * channels), noise(2, 4 * channels));
    let pieces = [(0, 1), (1, 20), (21, 2)];
    let initial: Vec<u16> = (0..shape.conv_state_len()).map(|i| 0x3f00 + (i % 97) as u16).collect();
    let mut alone = vec![];
    for (first, n) in pieces {
        let mut state = initial.clone();
        let mut out = vec![0.0; n * channels];
        let mut segments = [StateSegment { first_row: 0, rows: n, state: &mut state[..] }];
        let input = rows(&input, channels, first, n);
        causal_conv(Isa::detect(), &Pool::new(1), &shape, &mut segments, input, &weight, &mut out);
        alone.extend(out);
    }
    let together = everywhere(|isa, pool| {
        let mut states = [initial.clone(), initial.clone(), initial.clone()];
        let mut segments: Vec<_> = states
            .iter_mut()
            .zip(pieces)
            .map(|(state, (first_row, rows))| StateSegment {
                first_row,
                rows,
                state: &mut state[..],
            })
            .collect();
        let mut out = vec![0.0; 23 * channels];
        let input = rows(&input, channels, 0, 23);
        causal_conv(isa, pool, &shape, &mut segments, input, &weight, &mut out);
        out
    });
    assert_bits(&together, &alone);
}

#[test]
fn qk_norm_leaves_unit_heads_and_v_alone() {
    for shape in SHAPES {
        let (n, channels) = (9, shape.channels());
        let mut input = noise(3, n * channels);
        input[..shape.dk].fill(0.0);
        let got = everywhere(|isa, pool| {
            let mut x = input.clone();
            qk_l2_norm(isa, pool, &shape, &mut x);
            x
        });
        let qk = shape.key_heads * shape.dk;
        let want = input.iter().enumerate().map(|(i, &x)| {
            let c = i % channels;
            if c >= 2 * qk {
                return f64::from(x);
            }
            let head = &input[i - c % shape.dk..][..shape.dk];
            let square: f64 = head.iter().map(|&x| f64::from(x).powi(2)).sum();
            let scale = if c < qk { (shape.dk as f64).powf(-0.5) } else { 1.0 };
            f64::from(x) / (square + 1e-6).sqrt() * scale
        });
        assert_close(&got, want, 1e-6);
    }
}

#[test]
fn gates_match_their_formulas_at_extremes() {
    for heads in [1, 8, 32, 50] {
        let n = 7;
        let scale = |x: Vec<f32>, s: f32| -> Vec<f32> { x.iter().map(|x| x * s).collect() };
        let (mut a, mut b) = (scale(noise(1, n * heads), 20.0), scale(noise(2, n * heads), 20.0));
        for (i, extreme) in [90.0, -90.0, 1e4, -1e4, 1e38, -1e38].into_iter().enumerate() {
            a[i * heads] = extreme;
            b[i * heads] = extreme;
        }
        let (a_log, dt_bias) = (scale(noise(3, heads), 3.0), noise(4, heads));
        let input = GateInput { a: &a, b: &b, a_log: &a_log, dt_bias: &dt_bias };
        let got = everywhere(|isa, _| {
            let (mut decay, mut beta) = (vec![0.0; a.len()], vec![0.0; a.len()]);
            gates(isa, &input, &mut decay, &mut beta);
            [decay, beta].concat()
        });
        assert!(got.iter().all(|g| (0.0..=1.0).contains(g)));
        let decay = (0..a.len()).map(|i| {
            let pre = f64::from(a[i]) + f64::from(dt_bias[i % heads]);
            let softplus = pre.max(0.0) + (-pre.abs()).exp().ln_1p();
            (-f64::from(a_log[i % heads]).exp() * softplus).exp()
        });
        let beta = b.iter().map(|&b| 1.0 / (1.0 + (-f64::from(b)).exp()));
        assert_close(&got, decay.chain(beta), 2e-6);
    }
}

struct ScanCase {
    shape: GdnShape,
    rows: usize,
    qkv: Vec<f32>,
    decay: Vec<f32>,
    beta: Vec<f32>,
    state: Vec<f32>,
}

impl ScanCase {
    fn new(shape: GdnShape, rows: usize, seed: u64) -> Self {
        let mut qkv = noise(seed, rows * shape.channels());
        qk_l2_norm(Isa::detect(), &Pool::new(1), &shape, &mut qkv);
        let unit =
            |seed| noise(seed, rows * shape.value_heads).iter().map(|x| 0.5 + 0.5 * x).collect();
        let (decay, beta) = (unit(seed + 1), unit(seed + 2));
        ScanCase { shape, rows, qkv, decay, beta, state: noise(seed + 3, shape.state_len()) }
    }

    /// Output, then the final state.
    fn run(&self, isa: Isa, pool: &Pool, chunks: &[usize]) -> Vec<f32> {
        let shape = &self.shape;
        let mut state = self.state.clone();
        let mut y = vec![f32::NAN; self.rows * shape.value_width()];
        let mut done = 0;
        for &n in chunks {
            let input = ScanInput {
                qkv: rows(&self.qkv, shape.channels(), done, n),
                decay: rows(&self.decay, shape.value_heads, done, n),
                beta: rows(&self.beta, shape.value_heads, done, n),
            };
            let mut segments = [StateSegment { first_row: 0, rows: n, state: &mut state[..] }];
            let to = &mut y[done * shape.value_width()..][..n * shape.value_width()];
            scan(isa, pool, shape, &mut segments, &input, to);
            done += n;
        }
        [y, state].concat()
    }

    fn reference(&self) -> Vec<f64> {
        let GdnShape { key_heads, value_heads, dk, dv, .. } = self.shape;
        let mut state: Vec<f64> = self.state.iter().map(|&x| f64::from(x)).collect();
        let mut y = vec![];
        for t in 0..self.rows {
            let row = rows(&self.qkv, self.shape.channels(), t, 1);
            for h in 0..value_heads {
                let kh = h / (value_heads / key_heads);
                let (q, k) = (&row[kh * dk..][..dk], &row[(key_heads + kh) * dk..][..dk]);
                let v = &row[2 * key_heads * dk + h * dv..][..dv];
                let g = f64::from(self.decay[t * value_heads + h]);
                let beta = f64::from(self.beta[t * value_heads + h]);
                for (r, &v) in v.iter().enumerate() {
                    let s = &mut state[(h * dv + r) * dk..][..dk];
                    s.iter_mut().for_each(|s| *s *= g);
                    let m: f64 = s.iter().zip(k).map(|(s, &k)| s * f64::from(k)).sum();
                    let d = (f64::from(v) - m) * beta;
                    s.iter_mut().zip(k).for_each(|(s, &k)| *s += d * f64::from(k));
                    y.push(s.iter().zip(q).map(|(s, &q)| s * f64::from(q)).sum::<f64>());
                }
            }
        }
        y.extend(state);
        y
    }
}

#[test]
fn scan_matches_its_formula_in_any_chunks() {
    for shape in SHAPES {
        for n in [1, 2, 16, 53] {
            let case = ScanCase::new(shape, n, 40);
            let whole = everywhere(|isa, pool| case.run(isa, pool, &[n]));
            assert_close(&whole, case.reference().into_iter(), 2e-6);
            for chunks in [vec![1; n], odd_chunks(n)] {
                assert_bits(&everywhere(|isa, pool| case.run(isa, pool, &chunks)), &whole);
            }
        }
    }
}

/// The fixed order of operations, spelled out one scalar at a time.
#[test]
fn scan_has_the_normative_bits() {
    for shape in SHAPES {
        let GdnShape { key_heads, value_heads, dk, dv, .. } = shape;
        let case = ScanCase::new(shape, 20, 80);
        let (mut state, mut y) = (case.state.clone(), vec![]);
        for t in 0..case.rows {
            let row = rows(&case.qkv, shape.channels(), t, 1);
            for h in 0..value_heads {
                let kh = h / (value_heads / key_heads);
                let (q, k) = (&row[kh * dk..][..dk], &row[(key_heads + kh) * dk..][..dk]);
                for r in 0..dv {
                    let s = &mut state[(h * dv + r) * dk..][..dk];
                    s.iter_mut().for_each(|s| *s *= case.decay[t * value_heads + h]);
                    let v = row[2 * key_heads * dk + h * dv + r];
                    let d = (v - dot16(s, k)) * case.beta[t * value_heads + h];
                    s.iter_mut().zip(k).for_each(|(s, k)| *s = d.mul_add(*k, *s));
                    y.push(dot16(s, q));
                }
            }
        }
        assert_bits(&case.run(Isa::detect(), &Pool::new(2), &[case.rows]), &[y, state].concat());
    }
}

#[test]
fn scan_splits_heads_for_many_threads() {
    let case = ScanCase::new(SHAPES[2], 20, 45);
    let one = case.run(Isa::detect(), &Pool::new(1), &[20]);
    for threads in [4, 7] {
        assert_bits(&case.run(Isa::detect(), &Pool::new(threads), &[20]), &one);
    }
}

#[test]
fn scan_of_a_batch_equals_each_alone() {
    for shape in SHAPES {
        let cases = [
            ScanCase::new(shape, 1, 50),
            ScanCase::new(shape, 35, 60),
            ScanCase::new(shape, 4, 70),
        ];
        let concat = |part: fn(&ScanCase) -> &Vec<f32>| -> Vec<f32> {
            cases.iter().flat_map(|c| part(c).iter().copied()).collect()
        };
        let (qkv, decay, beta) = (concat(|c| &c.qkv), concat(|c| &c.decay), concat(|c| &c.beta));
        let together = everywhere(|isa, pool| {
            let mut states = cases.each_ref().map(|c| c.state.clone());
            let mut first_row = 0;
            let mut segments = vec![];
            for (state, case) in states.iter_mut().zip(&cases) {
                segments.push(StateSegment { first_row, rows: case.rows, state: &mut state[..] });
                first_row += case.rows;
            }
            let mut y = vec![0.0; first_row * shape.value_width()];
            let input = ScanInput { qkv: &qkv, decay: &decay, beta: &beta };
            scan(isa, pool, &shape, &mut segments, &input, &mut y);
            y.extend(states.concat());
            y
        });
        let (mut y, mut states) = (vec![], vec![]);
        for case in &cases {
            let alone = case.run(Isa::detect(), &Pool::new(1), &[case.rows]);
            let (out, state) = alone.split_at(case.rows * shape.value_width());
            y.extend_from_slice(out);
            states.extend_from_slice(state);
        }
        assert_bits(&together, &[y, states].concat());
    }
}

#[test]
fn gated_norm_matches_its_formula() {
    for dv in [16, 64, 128] {
        let n = 300;
        let (y, z) = (noise(1, n * dv), noise(2, n * dv));
        let weight = noise(3, dv);
        let z: Vec<f32> = z.iter().map(|z| z * 20.0).collect();
        let norm = GatedNorm { weight: &weight, z: &z, eps: 1e-6 };
        let got = everywhere(|isa, pool| {
            let mut y = y.clone();
            gated_rms_norm(isa, pool, &norm, &mut y);
            y
        });
        let want = y.iter().enumerate().map(|(i, &x)| {
            let head = &y[i / dv * dv..][..dv];
            let mean = head.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / dv as f64;
            let z = f64::from(z[i]);
            f64::from(x) / (mean + 1e-6).sqrt() * f64::from(weight[i % dv]) * z / (1.0 + (-z).exp())
        });
        assert_close(&got, want, 1e-6);
    }
}

#[test]
fn unsupported_shapes_are_errors() {
    for shape in SHAPES {
        assert_eq!(shape.supported(), Ok(()));
    }
    let good = SHAPES[0];
    for bad in [
        GdnShape { value_heads: 7, ..good },
        GdnShape { dk: 40, ..good },
        GdnShape { dv: 0, ..good },
        GdnShape { dk: 512, ..good },
        GdnShape { taps: 1, ..good },
        GdnShape { taps: 9, ..good },
    ] {
        assert!(bad.supported().is_err(), "{bad:?}");
    }
}
