//! Attention's kernels beyond the cases of the operations: switches that must not change a bit, thresholds, context buckets
//! larger than the context, several slots, and pages full of NaN wherever nothing was written.

use std::collections::HashMap;
use std::sync::Arc;

use half::bf16;
use lily_gpu::conformance::for_gpu;
use lily_gpu::evaluate::evaluate;
use lily_gpu::kernels::attention::{
    Attend, CacheRead, attention_decode, attention_prefill, attention_scratch_bytes, read_cache,
    supported,
};
use lily_gpu::kernels::common::{Context, SegmentEntry, SlotHeader, StepShape, Tables};
use lily_gpu::{
    Buffer, Driver, Operand, Placement, Platform, Profile, Recorder, Shape, Text, Thresholds,
    Tuning,
};
use lily_ops::plan::PAGE_TOKENS;
use lily_ops::{ElementType, Op};
use lily_softgpu::{Options, SoftDriver};

mod mma;

/// A step of attention alone.
#[derive(Clone)]
struct Scene {
    heads_per_kv: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Rows and position before them of each segment.
    segments: Vec<(usize, usize)>,
    /// The context bucket.
    context: usize,
    fixed_from: u32,
    tuning: Tuning,
    /// GPU cores of the device.
    cores: u32,
    gated: bool,
    /// Whether the device has `mma.sync`.
    mma: bool,
    platform: Platform,
    /// Kernel text to put in front.
    prelude: &'static str,
}

fn scene(
    heads_per_kv: usize,
    kv_heads: usize,
    head_dim: usize,
    segments: &[(usize, usize)],
) -> Scene {
    let context = segments.iter().map(|(rows, at)| rows + at).max().unwrap();
    Scene {
        heads_per_kv,
        kv_heads,
        head_dim,
        segments: segments.to_vec(),
        context,
        fixed_from: 1 << 20,
        tuning: Tuning::default(),
        cores: 8,
        gated: false,
        mma: false,
        platform: Platform::Host,
        prelude: "",
    }
}

/// Numbers of a segment: they depend on its position and on nothing else of the scene, so that a slot can be put in
/// another company.
fn numbers(what: &str, position: usize, count: usize) -> Vec<bf16> {
    let mut rng = lily_ops::case::Seeded::new(&format!("{what} {position}"));
    (0..count).map(|_| bf16::from_f32(rng.unit() * 2.0)).collect()
}

/// What a run left.
struct Ran {
    bits: Vec<bf16>,
    launches: HashMap<&'static str, u64>,
    /// Splits of each segment's first head that were written.
    splits: Vec<usize>,
}

struct Data {
    q: Vec<bf16>,
    gate: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
}

impl Scene {
    fn heads(&self) -> usize {
        self.heads_per_kv * self.kv_heads
    }

    /// What the slot of a segment has: q and gate `[row][head][dim]`, K and V `[token][kv head][dim]`.
    fn data(&self, segment: usize) -> Data {
        let (rows, position) = self.segments[segment];
        // The cache of a slot that has `position` tokens and gets `rows` is the beginning of a longer one.
        let tokens = position + rows;
        let id = tokens;
        let cache = tokens * self.kv_heads * self.head_dim;
        // Rows at the end of one sequence keep their numbers however many come in one step.
        let all = numbers("q", id, tokens.min(600) * self.heads() * self.head_dim);
        let gates = numbers("gate", id, tokens.min(600) * self.heads() * self.head_dim);
        let last = |x: Vec<bf16>| x[x.len() - rows * self.heads() * self.head_dim..].to_vec();
        Data {
            q: last(all),
            gate: last(gates),
            k: numbers("k", id, cache),
            v: numbers("v", id, cache),
        }
    }

    /// softmax(q·Kᵀ / sqrt(d)) · V in f64, and the gate.
    fn reference(&self) -> Vec<f32> {
        let (d, kv) = (self.head_dim, self.kv_heads);
        let mut out = Vec::new();
        for (i, &(rows, position)) in self.segments.iter().enumerate() {
            let x = self.data(i);
            let f = |x: &[bf16]| -> Vec<f64> { x.iter().map(|x| f64::from(x.to_f32())).collect() };
            let (q, k, v, gate) = (f(&x.q), f(&x.k), f(&x.v), f(&x.gate));
            for row in 0..rows {
                for h in 0..self.heads() {
                    let q = &q[(row * self.heads() + h) * d..][..d];
                    let at = |t: usize| (t * kv + h / self.heads_per_kv) * d;
                    let scores: Vec<f64> = (0..=position + row)
                        .map(|t| q.iter().zip(&k[at(t)..]).map(|(a, b)| a * b).sum::<f64>())
                        .map(|s| s / (d as f64).sqrt())
                        .collect();
                    let max = scores.iter().copied().fold(f64::MIN, f64::max);
                    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                    for e in 0..d {
                        let y: f64 = (scores.iter().enumerate())
                            .map(|(t, s)| (s - max).exp() / sum * v[at(t) + e])
                            .sum();
                        let g = gate[(row * self.heads() + h) * d + e];
                        let g = if self.gated { 1.0 / (1.0 + (-g).exp()) } else { 1.0 };
                        out.push((y * g) as f32);
                    }
                }
            }
        }
        out
    }

    fn profile(&self) -> Profile {
        Profile {
            cores: self.cores,
            mma: self.mma,
            wgmma: false,
            threadgroup_memory: if self.mma { 48 << 10 } else { 32 << 10 },
            platform: self.platform,
            thresholds: Thresholds {
                fixed_from: self.fixed_from,
                ..Thresholds::of(self.platform, "")
            },
            ..Profile::named("softgpu").unwrap()
        }
    }

    fn shape(&self) -> Shape {
        Shape {
            head_dim: self.head_dim as u32,
            heads_per_kv: self.heads_per_kv as u32,
            ..Shape::default()
        }
    }

    fn step(&self) -> StepShape {
        StepShape {
            segments: self.segments.iter().map(|s| s.0 as u32).collect(),
            outputs: 0,
            context: self.context as u32,
        }
    }

    /// What reading K or V alone leaves, summed up, and the bytes that it says it moves.
    fn read(&self, options: Options, keys: bool, coalesced: bool) -> (u32, u64) {
        let (profile, shape) = (self.profile(), self.shape());
        let mut driver = SoftDriver::new(Options { profile: profile.clone(), ..options });
        let (tables, ..) = self.upload(&mut driver);
        let tuning = &self.tuning;
        let c = Context {
            profile: &profile,
            tuning,
            shape: &shape,
            step: self.step(),
            tables: &tables,
        };
        let read = CacheRead { heads: self.heads() as u32, layer: 1, keys, coalesced };
        let mut out = vec![0xFFu8; read.sums(&c) as usize * 4];
        let sums = put(&mut driver, &out, ElementType::U32);
        let mut r = Recorder::default();
        read_cache(&mut r, &c, &read, sums);
        let traffic = r.dispatches[0].traffic;
        let mut list = r.finish(true);
        let mut text = Text::measuring(Platform::Host, &shape);
        text.source = attention_only(&text.source);
        list.pipelines = driver.pipelines(&Arc::new(text), &[read.kernel()]).unwrap();
        let submission = driver.submit(&Arc::new(list)).unwrap();
        driver.wait(submission).unwrap();
        driver.read(sums.buffer, 0, &mut out).unwrap();
        let words = out.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word));
        (words.fold(0, u32::wrapping_add), traffic)
    }

    /// The sum of the words of K or V of all slots, of those that each lane has: two elements each, the last one alone where their number is odd.
    fn words(&self, keys: bool) -> u32 {
        let each = self.head_dim / 32;
        let lane = |x: &[bf16]| {
            let word = |two: &[bf16]| {
                let high = two.get(1).map_or(0, |x| u32::from(x.to_bits()) << 16);
                u32::from(two[0].to_bits()) | high
            };
            x.chunks(2).map(word).fold(0, u32::wrapping_add)
        };
        let slots = (0..self.segments.len()).map(|i| self.data(i));
        let slot = |data: Data| {
            let cache = if keys { data.k } else { data.v };
            cache.chunks(each).map(lane).fold(0, u32::wrapping_add)
        };
        slots.map(slot).fold(0, u32::wrapping_add)
    }

    /// What the kernels make of it.
    fn run(&self) -> Ran {
        let profile = self.profile();
        let mut driver =
            SoftDriver::new(Options { profile: profile.clone(), ..Options::default() });
        let shape = self.shape();
        let (tables, q, qg) = self.upload(&mut driver);
        let step = self.step();
        let c = Context {
            profile: &profile,
            tuning: &self.tuning,
            shape: &shape,
            step,
            tables: &tables,
        };
        let out = put(&mut driver, &vec![0xFFu8; q.bytes as usize], ElementType::Bf16);
        let heads = self.heads() as u32;
        let attend = Attend { q, heads, layer: 1, out };
        let mut r = Recorder::default();
        let mut partial = None;
        if c.step.is_decode() {
            let bytes = attention_scratch_bytes(&c, heads);
            let scratch = put(&mut driver, &vec![0xFFu8; bytes as usize], ElementType::F32);
            partial = Some(scratch);
            let gate = self.gated.then_some(qg);
            attention_decode(&mut r, &c, &attend, scratch, gate);
        } else {
            attention_prefill(&mut r, &c, &attend);
        }
        let mut list = r.finish(true);
        let mut text = Text::new(Platform::Host, &shape);
        text.source = attention_only(&text.source);
        text.source.insert_str(0, self.prelude);
        let kernels: Vec<&'static str> = list.dispatches.iter().map(|d| d.kernel).collect();
        list.pipelines = driver.pipelines(&Arc::new(text), &kernels).unwrap();
        let submission = driver.submit(&Arc::new(list)).unwrap();
        driver.wait(submission).unwrap();
        let mut bytes = vec![0u8; q.bytes as usize];
        driver.read(out.buffer, 0, &mut bytes).unwrap();
        let bits = bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b)).collect();
        let splits = match partial {
            Some(scratch) => self.written_splits(&mut driver, scratch),
            None => Vec::new(),
        };
        Ran { bits, launches: driver.stats().launches.clone(), splits }
    }

    /// The scratch was NaN: what is a number has been written.
    fn written_splits(&self, driver: &mut SoftDriver, scratch: Operand) -> Vec<usize> {
        let mut bytes = vec![0u8; scratch.bytes as usize];
        driver.read(scratch.buffer, 0, &mut bytes).unwrap();
        let words: &[f32] = bytemuck::cast_slice(&bytes);
        let each = words.len() / (self.segments.len() * self.heads() * (self.head_dim + 2));
        let sums = &words[words.len() * self.head_dim / (self.head_dim + 2)..];
        sums.chunks(each * 2 * self.heads())
            .map(|segment| segment[..each * 2].chunks(2).filter(|ml| !ml[0].is_nan()).count())
            .collect()
    }

    /// Tables, queries, and queries with their gates. Pages lie in a shuffled order; whatever holds no token is NaN, as
    /// is a page that the unused entries of the page table name.
    fn upload(&self, driver: &mut SoftDriver) -> (Tables, Operand, Operand) {
        let (d, kv, slots) = (self.head_dim, self.kv_heads, self.segments.len());
        let max_pages = self.context.div_ceil(PAGE_TOKENS) + 1;
        let pages_of = |(rows, at): &(usize, usize)| (rows + at).div_ceil(PAGE_TOKENS);
        let total: usize = self.segments.iter().map(pages_of).sum::<usize>() + 1;
        let mut cache = [(); 2].map(|()| vec![bf16::NAN; total * kv * PAGE_TOKENS * d]);
        let mut table = vec![0u32; slots * max_pages];
        let mut free: Vec<usize> = (1..total).rev().collect();
        let mut headers = vec![[0u32; 4]; slots];
        let (mut entries, mut rows_of, mut q, mut qg) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (i, segment) in self.segments.iter().enumerate() {
            let slot = slots - 1 - i; // not the order of the segments
            let data = self.data(i);
            for (t, (k, v)) in data.k.chunks(kv * d).zip(data.v.chunks(kv * d)).enumerate() {
                if t % PAGE_TOKENS == 0 {
                    let page = free.remove(free.len() * 2 / 3);
                    table[slot * max_pages + t / PAGE_TOKENS] = page as u32;
                }
                let page = table[slot * max_pages + t / PAGE_TOKENS] as usize;
                for h in 0..kv {
                    let at = ((page * kv + h) * PAGE_TOKENS + t % PAGE_TOKENS) * d;
                    cache[0][at..at + d].copy_from_slice(&k[h * d..(h + 1) * d]);
                    cache[1][at..at + d].copy_from_slice(&v[h * d..(h + 1) * d]);
                }
            }
            headers[slot] = [segment.1 as u32, 0, 0, 0];
            let first = rows_of.len() as u32;
            entries.push(SegmentEntry {
                slot: slot as u32,
                first,
                rows: segment.0 as u32,
                first_output: 0,
            });
            rows_of.extend(std::iter::repeat_n(i as u32, segment.0));
            for (q, gate) in data.q.chunks(d).zip(data.gate.chunks(d)) {
                qg.extend([q, gate].concat());
            }
            q.extend(data.q);
        }
        let headers: Vec<SlotHeader> = bytemuck::cast_slice(&headers).to_vec();
        let u32s = |driver: &mut SoftDriver, x: &[u32]| {
            put(driver, bytemuck::cast_slice(x), ElementType::U32)
        };
        let none = u32s(driver, &[0; 4]);
        let nothing = put(driver, &[0xFF; 16], ElementType::Bf16);
        let [k, v] = cache.map(|x| put_bf16(driver, &x));
        let tables = Tables {
            segments: put(driver, bytemuck::cast_slice(&entries), ElementType::U32),
            row_segments: u32s(driver, &rows_of),
            tokens: none,
            output_rows: none,
            headers: put(driver, bytemuck::cast_slice(&headers), ElementType::U32),
            pages: u32s(driver, &table),
            max_pages: max_pages as u32,
            states: none,
            state_words: 0,
            conv_at: 0,
            kv: vec![[nothing; 2], [k, v]],
            rope: none,
        };
        (tables, put_bf16(driver, &q), put_bf16(driver, &qg))
    }

    /// Runs and compares with the reference.
    fn check(&self) -> Ran {
        let ran = self.run();
        let want = self.reference();
        // Decode rounds the result; flash attention and matrix units also the probabilities.
        let rounds = self.mma || self.segments.iter().any(|s| s.0 > 1);
        let relative = if rounds { 8e-3 } else { 4e-3 };
        let largest = want.iter().fold(0f32, |m, x| m.max(x.abs()));
        for (i, (g, w)) in ran.bits.iter().zip(&want).enumerate() {
            let g = g.to_f32();
            assert!(
                (g - w).abs() <= relative * largest,
                "{:?}: element {i} is {g}, want {w}",
                self.segments
            );
        }
        ran
    }

    fn without(&self, switches: &[&str]) -> Self {
        let mut tuning = self.tuning;
        for (name, field) in Tuning::SWITCHES {
            if switches.contains(name) {
                *field(&mut tuning) = false;
            }
        }
        Self { tuning, ..self.clone() }
    }
}

/// The text without the other families' kernels, which cost a compiler's time.
fn attention_only(source: &str) -> String {
    let mark = "#line 1 \"";
    let mut parts = source.split(mark);
    let mut text = parts.next().unwrap_or_default().to_string();
    for part in parts {
        if ["platform", "arguments", "common", "attention", "read"]
            .iter()
            .any(|name| part.starts_with(name))
        {
            text += mark;
            text += part;
        }
    }
    text
}

fn put(driver: &mut SoftDriver, data: &[u8], element: ElementType) -> Operand {
    let bytes = (data.len() as u64).max(16);
    let buffer: Buffer = driver.allocate("operand", bytes, Placement::Device).unwrap();
    driver.write(buffer, 0, data).unwrap();
    Operand { buffer, offset: 0, bytes, element }
}

fn put_bf16(driver: &mut SoftDriver, data: &[bf16]) -> Operand {
    let bytes: Vec<u8> = data.iter().flat_map(|x| x.to_le_bytes()).collect();
    put(driver, &bytes, ElementType::Bf16)
}

fn ones(positions: &[usize]) -> Vec<(usize, usize)> {
    positions.iter().map(|p| (1, *p)).collect()
}

/// Shapes: the real one in small, fewer heads a KV head, a head of no power of two, one head a KV head.
const SHAPES: [(usize, usize, usize); 5] =
    [(8, 1, 256), (4, 2, 64), (3, 2, 96), (1, 3, 32), (2, 1, 128)];

#[test]
fn decode_agrees_with_the_reference() {
    for (heads_per_kv, kv_heads, head_dim) in SHAPES {
        let all: [&[usize]; 5] =
            [&[0], &[7], &[8], &[62, 63, 64], &[255, 600, 256, 31, 32, 33, 0, 127]];
        for positions in all {
            for gated in [false, true] {
                let scene =
                    Scene { gated, ..scene(heads_per_kv, kv_heads, head_dim, &ones(positions)) };
                let Ran { launches, .. } = scene.check();
                assert_eq!(launches["attention_split"], 1);
                assert!(launches.contains_key(
                    ["attention_combine", "attention_combine_gated"][gated as usize]
                ));
            }
        }
    }
}

/// Few kernel threads, for sanitizers and barriers left out.
#[test]
fn small_decode_in_every_form() {
    let base = Scene { gated: true, ..scene(4, 1, 64, &ones(&[70])) };
    for off in [&[][..], &["pack_heads"], &["coalesced_kv"], &["pack_heads", "coalesced_kv"]] {
        base.without(off).check();
    }
}

#[test]
fn small_prompts_in_every_form() {
    scene(2, 1, 64, &[(9, 30)]).check();
    scene(12, 1, 32, &[(11, 3)]).check();
}

#[test]
fn small_prompts_by_mma() {
    let base = scene(2, 1, 64, &[(18, 20)]);
    Scene { platform: Platform::Cuda, prelude: mma::PRELUDE, ..base }.check();
}

#[test]
fn small_pages_by_mma() {
    let base = scene(8, 1, 256, &[(1, 20)]);
    assert!(
        Scene { mma: true, fixed_from: 16, ..base }
            .check()
            .launches
            .contains_key("attention_fixed_units")
    );
}

#[test]
fn packing_and_reading_order_change_no_bit() {
    for (heads_per_kv, kv_heads, head_dim) in SHAPES {
        // With the fixed blocks too, where the shape has them.
        for fixed_from in [1 << 20, 300] {
            let base = Scene {
                fixed_from,
                ..scene(heads_per_kv, kv_heads, head_dim, &ones(&[299, 301, 77, 9]))
            };
            let fixed = fixed_from == 300 && (heads_per_kv, head_dim) == (8, 256);
            let Ran { bits, launches, .. } = base.check();
            let kernel = |suffix: &str| {
                format!("attention_{}{suffix}", if fixed { "fixed" } else { "split" })
            };
            assert!(launches.contains_key(kernel("").as_str()), "{launches:?}");
            for (switches, suffix) in VARIANTS {
                let Ran { bits: other, launches, .. } = base.without(switches).run();
                assert!(launches.contains_key(kernel(suffix).as_str()), "{launches:?}");
                assert!(
                    bits == other,
                    "{heads_per_kv} {kv_heads} {head_dim} {fixed_from} {suffix}"
                );
            }
        }
    }
    // Beside matrix units, too, which take the pages whatever these switches say.
    let base = Scene { mma: true, fixed_from: 300, ..scene(8, 1, 256, &ones(&[299, 301, 77, 9])) };
    let Ran { bits, .. } = base.check();
    for (switches, suffix) in VARIANTS {
        let Ran { bits: other, launches, .. } = base.without(switches).run();
        assert_eq!(launches.get("attention_fixed_units"), Some(&1), "{suffix}");
        assert!(launches.contains_key(format!("attention_split{suffix}").as_str()), "{launches:?}");
        assert!(bits == other, "matrix units, {suffix}");
    }
}

/// What the lane-by-lane form does without, and how its kernels' names end then.
const VARIANTS: [(&[&str], &str); 3] = [
    (&["pack_heads"], "_unpacked"),
    (&["coalesced_kv"], "_strided"),
    (&["pack_heads", "coalesced_kv"], "_unpacked_strided"),
];

#[test]
fn a_slots_bits_do_not_hang_on_its_company_or_the_bucket() {
    for fixed_from in [1 << 20, 512] {
        let positions = [40, 511, 700, 130, 512];
        let together = Scene { fixed_from, ..scene(8, 1, 256, &ones(&positions)) };
        let Ran { bits, .. } = together.check();
        let larger = Scene { context: 3000, ..together.clone() };
        assert!(larger.run().bits == bits, "a larger bucket, {fixed_from}");
        for (i, own) in bits.chunks(8 * 256).enumerate() {
            let alone = Scene { fixed_from, ..scene(8, 1, 256, &ones(&positions[i..=i])) };
            assert!(alone.run().bits == own, "position {} alone, {fixed_from}", positions[i]);
        }
    }
}

#[test]
fn fixed_blocks_begin_at_their_threshold() {
    // 512 tokens with the new one are enough, 511 are not. 3 cores make at most 3 splits of the general path.
    for (position, general, fixed) in
        [(510, 3, None), (511, 3, Some(2)), (512, 3, Some(3)), (1100, 3, Some(5))]
    {
        let base = Scene { fixed_from: 512, cores: 3, ..scene(8, 1, 256, &ones(&[position])) };
        let ran = base.check();
        assert_eq!(ran.launches.contains_key("attention_fixed"), fixed.is_some());
        assert_eq!(ran.splits, [fixed.unwrap_or(general)]);
        let ran = base.without(&["fixed_block"]).check();
        assert!(ran.launches.contains_key("attention_split"));
        assert_eq!(ran.splits, [general]);
    }
    // Both kinds in one step.
    let mixed = Scene { fixed_from: 512, cores: 3, ..scene(8, 1, 256, &ones(&[600, 300])) };
    assert_eq!(mixed.check().splits, [3, 3]);
    assert_eq!(Scene { cores: 1, ..mixed }.check().splits, [3, 1]);
}

#[test]
fn more_cores_make_more_splits() {
    for cores in [1, 3, 40, 132] {
        let scene = Scene { cores, ..scene(8, 1, 256, &ones(&[1000, 5])) };
        // 16 blocks of 64 tokens: one split, 3 of 6 blocks at most, 16 of one block.
        let splits = [1, 3, 16][(cores > 1) as usize + (cores > 3) as usize];
        assert_eq!(scene.check().splits, [splits, 1]);
    }
}

#[test]
fn prompts_agree_with_the_reference() {
    for (heads_per_kv, kv_heads, head_dim) in SHAPES {
        let all: [&[(usize, usize)]; 4] =
            [&[(2, 0)], &[(9, 30)], &[(3, 255), (33, 0), (1, 64)], &[(70, 250)]];
        for segments in all {
            let base = scene(heads_per_kv, kv_heads, head_dim, segments);
            let Ran { bits, launches, .. } = base.check();
            let long = segments.iter().any(|s| s.0 > 8);
            assert!(
                launches.contains_key(["flash_attention_8", "flash_attention_16"][long as usize])
            );
            let Ran { bits: other, launches, .. } =
                Scene { platform: Platform::Metal, ..base.clone() }.run();
            assert!(launches.contains_key("flash_attention_8"));
            assert!(other == bits, "16 rows and 8: {segments:?}");
        }
    }
    // Two threadgroups for the heads of one KV head, the second not full.
    scene(12, 1, 64, &[(11, 3), (2, 40)]).check();
}

/// The largest head that eight simdgroups of a prompt and 32 KiB of threadgroup memory have room for, and the next one.
#[test]
fn the_largest_head_is_right() {
    let shape = |head_dim| Shape { head_dim, ..Shape::default() };
    let host = Profile::named("softgpu").unwrap();
    assert!(supported(&shape(320), &host).is_ok() && supported(&shape(352), &host).is_err());
    scene(8, 1, 320, &[(9, 3)]).check();
    scene(8, 1, 320, &[(1, 70)]).check();
    scene(3, 1, 416, &[(9, 3)]).check();
}

#[test]
#[should_panic = "more than 32 KiB of threadgroup memory"]
fn a_larger_head_has_no_room() {
    scene(8, 1, 352, &[(9, 3)]).run();
}

#[test]
fn chunks_of_a_prompt_change_no_bit() {
    let whole = scene(8, 1, 256, &[(45, 0)]);
    let Ran { bits, .. } = whole.check();
    let row = 8 * 256;
    let part = |rows: usize, position: usize| {
        let mut part = scene(8, 1, 256, &[(rows, position)]);
        part.context = 600;
        part
    };
    // The last rows of the same slot.
    assert!(part(13, 32).run().bits == bits[32 * row..]);
    assert!(part(4, 41).run().bits == bits[41 * row..]);
}

#[test]
fn prompts_by_mma_agree_with_the_reference() {
    for (heads_per_kv, kv_heads, head_dim) in [(8, 1, 256), (4, 2, 64), (3, 1, 96)] {
        let all: [&[(usize, usize)]; 2] = [&[(3, 30), (17, 0)], &[(18, 40)]];
        for segments in all {
            let base = scene(heads_per_kv, kv_heads, head_dim, segments);
            let scene = Scene { platform: Platform::Cuda, prelude: mma::PRELUDE, ..base };
            let Ran { launches, .. } = scene.check();
            assert!(launches.contains_key("flash_attention_16"));
        }
    }
}

/// The chain of kernels rounds to bf16 between norm and rotation; V it only copies.
#[test]
fn preparation_in_parts_is_the_same_to_bf16() {
    let near = |got: &[f32], want: &[f32]| {
        let largest = want.iter().fold(0f32, |m, x| m.max(x.abs()));
        got.len() == want.len()
            && got.iter().zip(want).all(|(g, w)| (g - w).abs() <= 8e-3 * largest)
    };
    let apart = Tuning::without("fuse_qk_prep").unwrap();
    for case in Op::all_cases().iter().filter(|c| c.op().name() == "attention_prep") {
        let case = for_gpu(case);
        let run = |tuning| {
            let mut driver = SoftDriver::new(Options::default());
            evaluate(&mut driver, tuning, &case).unwrap()
        };
        let ((one, whole), (parts, list)) = (run(&Tuning::default()), run(&apart));
        assert_eq!((whole.dispatches.len(), list.dispatches.len()), (1, 5), "{}", case.name);
        // q, k and v go side by side, each in its own order.
        assert_eq!(list.stages.len(), 2, "{}", case.name);
        assert!(near(parts.values[0].1.f32(), one.values[0].1.f32()), "{}: q", case.name);
        for (parts, one) in parts.slots.iter().zip(&one.slots) {
            assert!(near(&parts.k, &one.k), "{}: K", case.name);
            assert!(parts.v == one.v, "{}: V", case.name);
        }
    }
}

/// Slots whose splits are pages, all heads of a KV head at once, beside slots of the general path; each has the bits it has alone.
#[test]
fn matrix_units_take_pages_for_all_heads_at_once() {
    for (cores, gated) in [(3, true), (132, false)] {
        let lengths = [(1, 767), (1, 511), (1, 512), (1, 513), (1, 30), (1, 600), (1, 510)];
        let mut all = scene(8, 2, 256, &lengths);
        (all.mma, all.gated, all.fixed_from, all.cores) = (true, gated, 512, cores);
        let ran = all.check();
        assert_eq!(
            (ran.launches["attention_fixed_units"], ran.launches["attention_split"]),
            (1, 1)
        );
        assert_eq!([0, 1, 2, 3, 5].map(|i| ran.splits[i]), [3, 2, 3, 3, 3]);
        let row = 16 * 256;
        for (i, segment) in lengths.into_iter().enumerate() {
            let alone = Scene { segments: vec![segment], ..all.clone() }.run();
            assert!(alone.bits == ran.bits[i * row..][..row], "{segment:?} alone");
        }
        // Without them the same splits, another rounding.
        let other = all.without(&["matrix_attention"]).check();
        assert!(other.launches.contains_key("attention_fixed") && other.bits != ran.bits);
    }
}

/// Heads that share a read where they are packed.
fn packed(scene: &Scene) -> usize {
    match scene.heads_per_kv {
        4.. => 4,
        2.. => 2,
        _ => 1,
    }
}

#[test]
fn k_and_v_are_read_alone_as_attention_reads_them() {
    for (heads_per_kv, kv_heads, head_dim) in SHAPES {
        for (positions, fixed_from) in [
            (&[0][..], 1 << 20),
            (&[299, 301, 77, 9], 1 << 20),
            (&[299, 301, 77, 9], 300),
            (&[700], 1 << 20),
        ] {
            let exact = scene(heads_per_kv, kv_heads, head_dim, &ones(positions));
            let base = Scene { fixed_from, ..exact };
            let packs = heads_per_kv.div_ceil(packed(&base));
            for (keys, coalesced) in [(true, true), (false, true), (true, false), (false, false)] {
                let (sum, traffic) = base.read(Options::default(), keys, coalesced);
                // Each pack of heads reads everything, rows of K by as many lanes as share a tile of eight tokens.
                let readers = packs * if keys && !coalesced { 4 } else { 1 };
                let want = base.words(keys).wrapping_mul(readers as u32);
                let at = format!(
                    "{heads_per_kv} {head_dim} {positions:?} {fixed_from} {keys} {coalesced}"
                );
                assert_eq!(sum, want, "{at}");
                let longest = positions.iter().max().unwrap() + 1;
                let cache = (positions.len() * longest * kv_heads * head_dim * 2) as u64;
                assert!(traffic > cache && traffic < cache + (1 << 16), "{at}: {traffic}, {cache}");
            }
        }
    }
}

/// Distinct bytes, times each is loaded, lines: those of the kernels that the read stands for.
#[test]
#[ignore = "needs clang++-22; .ci/gpu-checks runs it"]
fn traced_reads_are_of_k_alone_or_of_v_alone() {
    use lily_softgpu::{Class, Compiler, Trace};
    let base = scene(8, 2, 256, &ones(&[1000]));
    for (keys, coalesced) in [(true, true), (false, true), (true, false), (false, false)] {
        let trace = Trace::default();
        let options = Options {
            compiler: Compiler::tracing(),
            trace: Some(trace.clone()),
            ..Options::default()
        };
        trace.start(Vec::new());
        let (_, traffic) = base.read(options, keys, coalesced);
        let traced = trace.stop();
        let [launch] = traced.launches[..] else { panic!("{:?}", traced.launches) };
        assert_eq!(launch.claimed, traffic);
        // K or V of 1,001 tokens; headers, segments and pages, of which nothing is claimed, are a few words.
        let [loaded, stored] = launch.unique;
        assert_eq!(loaded / 1024, 1001, "{launch:?}");
        assert!(loaded + stored - traffic < 64, "{launch:?}: {traffic}");
        let all = traced.total(Class::Activations).loads;
        let times = all.bytes as f64 / loaded as f64;
        assert!((1.9..2.3).contains(&times), "{keys} {coalesced}: loaded {times} times");
        let lines = all.lines_ratio();
        println!("keys {keys}, coalesced {coalesced}: {times} times, {lines} of the fewest lines");
        assert_eq!(lines > 3.0, !coalesced, "{keys}: {lines} of the fewest lines");
    }
}
