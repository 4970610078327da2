//! Attention kernels: against a plain f64 reference, and bit-equal for every instruction set, thread count,
//! chunking, batch and page table.

mod kernels_common;

use kernels_common::{assert_bits, assert_close, bf16, dot16, everywhere, exp, noise, tree};
use lily_cpu::kernels::StoredElem;
use lily_cpu::kernels::attention::{
    AttentionInput, AttentionScratch, AttentionSegment, AttentionShape, KvPagesMut, PrepInput,
    RopeTable, attention, attention_prep,
};
use lily_cpu::pool::Pool;
use lily_cpu::simd::Isa;

const THETA: f64 = 1e7;
const EPS: f32 = 1e-6;

/// Projections of one sequence.
struct Sequence {
    shape: AttentionShape,
    len: usize,
    q_gate: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
}

impl Sequence {
    fn new(shape: AttentionShape, len: usize, seed: u64) -> Self {
        let AttentionShape { heads, kv_heads, head_dim, .. } = shape;
        let norm = |seed| noise(seed, head_dim).iter().map(|x| 1.5 + x).collect();
        Sequence {
            shape,
            len,
            q_gate: noise(seed, len * heads * 2 * head_dim),
            k: noise(seed + 1, len * kv_heads * head_dim),
            v: noise(seed + 2, len * kv_heads * head_dim),
            // The same weights for every sequence of a batch.
            q_norm: norm(101),
            k_norm: norm(102),
        }
    }

    fn widths(&self) -> (usize, usize) {
        (self.shape.heads * self.shape.head_dim, self.shape.kv_heads * self.shape.head_dim)
    }

    /// q, then the attention output, in f64 from the formulas.
    fn reference(&self, round: impl Fn(f64) -> f64) -> (Vec<f64>, Vec<f64>) {
        let AttentionShape { heads, kv_heads, head_dim, rot } = self.shape;
        let prepare = |x: &[f32], w: &[f32], position: usize| -> Vec<f64> {
            let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / head_dim as f64;
            let r = 1.0 / (mean + f64::from(EPS)).sqrt();
            let mut y: Vec<f64> =
                x.iter().zip(w).map(|(&x, &w)| f64::from(x) * r * f64::from(w)).collect();
            for i in 0..rot / 2 {
                let angle = position as f64 * THETA.powf(-2.0 * i as f64 / rot as f64);
                let (x1, x2) = (y[i], y[i + rot / 2]);
                y[i] = x1 * angle.cos() - x2 * angle.sin();
                y[i + rot / 2] = x1 * angle.sin() + x2 * angle.cos();
            }
            y
        };
        let head = |x: &[f32], i: usize| x[i * head_dim..][..head_dim].to_vec();
        let mut keys = vec![];
        let (mut all_q, mut all_out) = (vec![], vec![]);
        for t in 0..self.len {
            keys.extend((0..kv_heads).map(|h| {
                let k = prepare(&head(&self.k, t * kv_heads + h), &self.k_norm, t);
                k.into_iter().map(&round).collect::<Vec<f64>>()
            }));
            for h in 0..heads {
                let q = prepare(&head(&self.q_gate, (t * heads + h) * 2), &self.q_norm, t);
                let kv = h / (heads / kv_heads);
                let scores: Vec<f64> = (0..=t)
                    .map(|s| {
                        let k = &keys[s * kv_heads + kv];
                        k.iter().zip(&q).map(|(k, q)| k * q).sum::<f64>() / (head_dim as f64).sqrt()
                    })
                    .collect();
                let max = scores.iter().fold(f64::MIN, |a, &b| a.max(b));
                let p: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let sum: f64 = p.iter().sum();
                let mut out = vec![0.0; head_dim];
                for (s, p) in p.iter().enumerate() {
                    let v = &self.v[(s * kv_heads + kv) * head_dim..][..head_dim];
                    out.iter_mut().zip(v).for_each(|(o, &v)| *o += p / sum * round(f64::from(v)));
                }
                all_q.extend(q);
                all_out.extend(out);
            }
        }
        (all_q, all_out)
    }
}

/// Runs sequences together, chunk after chunk: `chunks[i]` are the rows of sequence `i` in each step.
/// Returns q and the output of each sequence.
fn run<T: StoredElem>(
    isa: Isa,
    pool: &Pool,
    sequences: &[&Sequence],
    chunks: &[Vec<usize>],
    first_page: u32,
) -> Vec<(Vec<f32>, Vec<f32>)> {
    let shape = sequences[0].shape;
    let (q_width, kv_width) = sequences[0].widths();
    // Descending and interleaved: no table is the identity.
    let n = sequences.len() as u32;
    let pages: Vec<Vec<u32>> = sequences
        .iter()
        .zip(0..)
        .map(|(s, i)| {
            (0..s.len.div_ceil(256) as u32).rev().map(|p| first_page + p * n + i).collect()
        })
        .collect();
    let count = pages.iter().flatten().max().unwrap() + 2;
    let mut k_pages = vec![T::default(); count as usize * shape.page_len()];
    let mut v_pages = k_pages.clone();
    let mut scratch = AttentionScratch::new(&shape, pool.threads());
    let rope = RopeTable::new(THETA, shape.rot);
    let mut done = vec![0; sequences.len()];
    let mut results = vec![(vec![], vec![]); sequences.len()];
    for step in 0..chunks.iter().map(Vec::len).max().unwrap() {
        let (mut q_gate, mut k, mut v) = (vec![], vec![], vec![]);
        let mut segments = vec![];
        let mut rows = 0;
        for (i, s) in sequences.iter().enumerate() {
            let Some(&n) = chunks[i].get(step) else { continue };
            let start = done[i];
            q_gate.extend(&s.q_gate[start * 2 * q_width..][..n * 2 * q_width]);
            k.extend(&s.k[start * kv_width..][..n * kv_width]);
            v.extend(&s.v[start * kv_width..][..n * kv_width]);
            segments
                .push((i, AttentionSegment { first_row: rows, rows: n, start, pages: &pages[i] }));
            rows += n;
            done[i] += n;
        }
        let (which, segments): (Vec<_>, Vec<_>) = segments.into_iter().unzip();
        let (mut cos, mut sin) = (vec![], vec![]);
        rope.fill_rows(rows, &segments, &mut cos, &mut sin);
        let input = PrepInput {
            q_gate: &q_gate,
            k: &k,
            v: &v,
            q_norm: &sequences[0].q_norm,
            k_norm: &sequences[0].k_norm,
            eps: EPS,
            cos: &cos,
            sin: &sin,
        };
        let mut q = vec![0.0; rows * q_width];
        let to = KvPagesMut { k: &mut k_pages[..], v: &mut v_pages[..] };
        attention_prep(isa, pool, &shape, &segments, &input, to, &mut q);
        let input = AttentionInput { q: &q, k_pages: &k_pages, v_pages: &v_pages };
        let mut out = vec![f32::NAN; q.len()];
        attention(isa, pool, &shape, &segments, &input, &mut scratch, &mut out);
        for (i, s) in which.into_iter().zip(&segments) {
            let range = s.first_row * q_width..(s.first_row + s.rows) * q_width;
            results[i].0.extend(&q[range.clone()]);
            results[i].1.extend(&out[range]);
        }
    }
    assert!(sequences.iter().zip(&done).all(|(s, &d)| s.len == d));
    results
}

const SHAPES: [AttentionShape; 4] = [
    AttentionShape { heads: 8, kv_heads: 2, head_dim: 64, rot: 16 },
    AttentionShape { heads: 16, kv_heads: 2, head_dim: 256, rot: 64 },
    // Groups of 3 and 1: tiles that mix rows. A panel that is not full.
    AttentionShape { heads: 6, kv_heads: 2, head_dim: 80, rot: 80 },
    AttentionShape { heads: 2, kv_heads: 2, head_dim: 16, rot: 4 },
];

#[test]
fn attention_matches_its_formula() {
    for shape in SHAPES {
        let len = 130;
        let s = Sequence::new(shape, len, 1);
        let whole = [vec![len]];
        let got = everywhere(|isa, pool| {
            let (q, out) = run::<f32>(isa, pool, &[&s], &whole, 0).remove(0);
            [q, out].concat()
        });
        let (q, out) = s.reference(|x| x);
        assert_close(&got[..q.len()], q.into_iter(), 2e-6);
        assert_close(&got[got.len() / 2..], out.into_iter(), 4e-6);

        let got = everywhere(|isa, pool| run::<u16>(isa, pool, &[&s], &whole, 0).remove(0).1);
        // A key within rounding of the middle between two bf16 may go the other way.
        assert_close(&got, s.reference(|x| f64::from(bf16(x as f32))).1.into_iter(), 2e-4);
    }
}

/// The fixed order of operations, spelled out one scalar at a time.
#[test]
fn attention_has_the_normative_bits() {
    let shape = AttentionShape { heads: 3, kv_heads: 1, head_dim: 32, rot: 0 };
    let (heads, dim, rows) = (shape.heads, shape.head_dim, 200);
    let q: Vec<f32> = noise(1, rows * heads * dim).iter().map(|x| x * 4.0).collect();
    let (k, v) = (noise(2, shape.page_len()), noise(3, shape.page_len()));
    let got = everywhere(|isa, pool| {
        let mut out = vec![0.0; q.len()];
        let mut scratch = AttentionScratch::new(&shape, pool.threads());
        let segments = [AttentionSegment { first_row: 0, rows, start: 0, pages: &[0] }];
        let input = AttentionInput { q: &q, k_pages: &k, v_pages: &v };
        attention(isa, pool, &shape, &segments, &input, &mut scratch, &mut out);
        out
    });
    let mut want = vec![];
    for (row, q) in q.chunks(dim).enumerate().map(|(i, q)| (i / heads, q)) {
        let mut running: Option<(f32, f32, Vec<f32>)> = None;
        for start in (0..=row).step_by(64) {
            let keys = start..(start + 64).min(row + 1);
            let scale = (1.0 / (dim as f64).sqrt()) as f32;
            let s: Vec<f32> =
                keys.clone().map(|t| dot16(q, &k[t * dim..][..dim]) * scale).collect();
            let max = s.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
            let (mut lanes, mut o) = ([0.0; 16], vec![0.0f32; dim]);
            for (j, (t, s)) in keys.zip(s).enumerate() {
                let p = exp(s - max);
                lanes[j % 16] += p;
                o.iter_mut().zip(&v[t * dim..]).for_each(|(o, v)| *o = p.mul_add(*v, *o));
            }
            let sum = tree(lanes);
            running = Some(match running {
                None => (max, sum, o),
                Some((old_max, old_sum, old)) => {
                    let new_max = old_max.max(max);
                    let (a, b) = (exp(old_max - new_max), exp(max - new_max));
                    let o = old.iter().zip(&o).map(|(old, o)| old.mul_add(a, o * b)).collect();
                    (new_max, old_sum.mul_add(a, sum * b), o)
                }
            });
        }
        let (_, sum, o) = running.unwrap();
        want.extend(o.iter().map(|o| o / sum));
    }
    assert_bits(&got, &want);
}

#[test]
fn chunking_changes_no_bit() {
    for (shape, len) in [(SHAPES[0], 330), (SHAPES[2], 270), (SHAPES[3], 200)] {
        let s = Sequence::new(shape, len, 7);
        let whole = run::<u16>(Isa::detect(), &Pool::new(2), &[&s], &[vec![len]], 0).remove(0);
        let mut odd = vec![];
        let mut left = len;
        for n in [1, 62, 3, 17, 64, 5, 100, 2, 13].into_iter().cycle() {
            odd.push(n.min(left));
            left -= n.min(left);
            if left == 0 {
                break;
            }
        }
        for chunks in [vec![1; len], odd] {
            for threads in [1, 3] {
                let pool = Pool::new(threads);
                for isa in Isa::available() {
                    let got =
                        run::<u16>(isa, &pool, &[&s], std::slice::from_ref(&chunks), 3).remove(0);
                    assert_bits(&got.0, &whole.0);
                    assert_bits(&got.1, &whole.1);
                }
            }
        }
    }
}

#[test]
fn long_context_crosses_pages() {
    let shape = SHAPES[0];
    let s = Sequence::new(shape, 1100, 11);
    let isa = Isa::detect();
    let pool = Pool::new(2);
    let whole = run::<f32>(isa, &pool, &[&s], &[vec![1100]], 0).remove(0).1;
    let (_, want) = s.reference(|x| x);
    assert_close(&whole, want.into_iter(), 4e-6);
    let chunked =
        run::<f32>(isa, &pool, &[&s], &[vec![255, 2, 400, 111, 255, 1, 1, 75]], 5).remove(0).1;
    assert_bits(&chunked, &whole);
}

#[test]
fn batch_mates_change_no_bit() {
    for shape in [SHAPES[0], SHAPES[2]] {
        let lens = [130, 1, 70, 257];
        let sequences: Vec<Sequence> =
            lens.iter().zip(0..).map(|(&n, i)| Sequence::new(shape, n, 20 + 3 * i)).collect();
        let together: Vec<&Sequence> = sequences.iter().collect();
        let chunks = [vec![64, 1, 65], vec![1], vec![1, 60, 1, 8], vec![200, 57]];
        for isa in Isa::available() {
            let got = run::<u16>(isa, &Pool::new(3), &together, &chunks, 1);
            for (s, got) in sequences.iter().zip(got) {
                let alone =
                    run::<u16>(Isa::detect(), &Pool::new(1), &[s], &[vec![s.len]], 0).remove(0);
                assert_bits(&got.0, &alone.0);
                assert_bits(&got.1, &alone.1);
            }
        }
    }
}

#[test]
fn later_rows_cannot_poison_earlier_ones() {
    let shape = SHAPES[2];
    let mut s = Sequence::new(shape, 70, 31);
    let (q_width, kv_width) = s.widths();
    let clean = run::<u16>(Isa::detect(), &Pool::new(1), &[&s], &[vec![70]], 0).remove(0).1;
    s.k[66 * kv_width] = f32::NAN;
    s.v[66 * kv_width..][..kv_width].fill(f32::NAN);
    for isa in Isa::available() {
        let got = run::<u16>(isa, &Pool::new(2), &[&s], &[vec![70]], 0).remove(0).1;
        assert_bits(&got[..66 * q_width], &clean[..66 * q_width]);
        assert!(got[66 * q_width..].iter().any(|x| x.is_nan()));
    }
}

#[test]
fn rope_depends_on_the_position_only() {
    let rope = RopeTable::new(THETA, 64);
    let (mut cos, mut sin) = (vec![], vec![]);
    let segments = [
        AttentionSegment { first_row: 0, rows: 3, start: 5, pages: &[] },
        AttentionSegment { first_row: 3, rows: 1, start: 262_143, pages: &[] },
    ];
    rope.fill_rows(4, &segments, &mut cos, &mut sin);
    let (mut c, mut s) = ([0.0; 32], [0.0; 32]);
    for (row, position) in [(0, 5), (2, 7), (3, 262_143)] {
        rope.fill(position, &mut c, &mut s);
        assert_bits(&c, &cos[row * 32..][..32]);
        assert_bits(&s, &sin[row * 32..][..32]);
    }
    assert_eq!((c[0], s[0]), (262_143f64.cos() as f32, 262_143f64.sin() as f32));
}

#[test]
#[should_panic(expected = "write to one page")]
fn two_segments_cannot_write_one_page() {
    let s = Sequence::new(SHAPES[3], 2, 1);
    let segments =
        [0, 1].map(|i| AttentionSegment { first_row: i, rows: 1, start: 0, pages: &[0] });
    let mut pages = vec![0.0f32; SHAPES[3].page_len()];
    let mut others = pages.clone();
    let (cos, sin) = ([0.0; 4], [0.0; 4]);
    let input = PrepInput {
        q_gate: &s.q_gate,
        k: &s.k,
        v: &s.v,
        q_norm: &s.q_norm,
        k_norm: &s.k_norm,
        eps: EPS,
        cos: &cos,
        sin: &sin,
    };
    let mut q = vec![0.0; 2 * s.widths().0];
    let pages = KvPagesMut { k: &mut pages[..], v: &mut others[..] };
    attention_prep(Isa::detect(), &Pool::new(1), &SHAPES[3], &segments, &input, pages, &mut q);
}

#[test]
fn unsupported_shapes_are_errors() {
    for shape in SHAPES {
        assert_eq!(shape.supported(), Ok(()));
    }
    let good = SHAPES[0];
    for bad in [
        AttentionShape { heads: 7, ..good },
        AttentionShape { kv_heads: 0, ..good },
        AttentionShape { head_dim: 72, ..good },
        AttentionShape { head_dim: 1024, ..good },
        AttentionShape { rot: 15, ..good },
        AttentionShape { rot: 66, ..good },
    ] {
        assert!(bad.supported().is_err(), "{bad:?}");
    }
}
