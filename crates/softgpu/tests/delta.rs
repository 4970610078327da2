//! Gated DeltaNet: what the cases of single operations do not show. Where a chunk ends, how rows are spread over
//! simdgroups and which form runs must not change a bit of the state.

use std::sync::Arc;

use lily_gpu::kernels::common::{
    Context, DeviceWeight, Matrix, SegmentEntry, SlotHeader, StepShape, Tables,
};
use lily_gpu::kernels::delta::{
    Prep, ScanInputs, causal_conv, conv_prep, delta_gates, delta_scan, gated_rms_norm, qk_l2_norm,
    scan_norm, scan_norm_applies,
};
use lily_gpu::scratch::Scratch;
use lily_gpu::{
    Buffer, CommandList, Driver, Operand, Placement, Platform, Recorder, Shape, Text, Tuning,
};
use lily_ops::ElementType;
use lily_ops::case::Seeded;
use lily_softgpu::{Options, SoftDriver};

const KEY_HEADS: usize = 2;
const HEADS: usize = 4;
const DK: usize = 32;
const DV: usize = 64;
const CHANNELS: usize = 2 * KEY_HEADS * DK + HEADS * DV;
const TAPS: usize = 4;
const LAYERS: usize = 2;
const LAYER: usize = 1;
const SLOTS: usize = 3;
const TOKENS: usize = 80;
const CONV_AT: usize = LAYERS * HEADS * DV * DK;
const STATE_WORDS: usize = CONV_AT + LAYERS * (TAPS - 1) * CHANNELS / 2;
const EPS: f32 = 1e-6;

fn shape() -> Shape {
    Shape { key_dim: DK as u32, value_dim: DV as u32, ..Shape::default() }
}

/// How a step is run.
#[derive(Clone, Debug)]
struct Form {
    tuning: Tuning,
    /// Cores of the device, by which the policy chooses rows a simdgroup.
    cores: u32,
    /// Whether the device has `mma.sync`.
    mma: bool,
}

fn form(off: &[&str], cores: u32) -> Form {
    let mut tuning = Tuning::default();
    for (name, field) in Tuning::SWITCHES {
        *field(&mut tuning) = !off.contains(name);
    }
    Form { tuning, cores, mma: false }
}

/// One layer's inputs for each slot and token, as a projection would leave them.
struct Inputs {
    qkv: Vec<Vec<f32>>,
    a: Vec<Vec<f32>>,
    b: Vec<Vec<f32>>,
    z: Vec<Vec<f32>>,
}

struct World {
    driver: SoftDriver,
    form: Form,
    tables: Tables,
    weights: [DeviceWeight; 4],
    inputs: Inputs,
    /// Tokens that each slot has seen.
    seen: [usize; SLOTS],
    parity: [u32; SLOTS],
    /// Result rows of each slot so far.
    out: Vec<Vec<f32>>,
    kernels: Vec<&'static str>,
}

fn bf16_bytes(x: &[f32]) -> Vec<u8> {
    let bits = |x: &f32| (ElementType::Bf16.round(*x).to_bits() >> 16) as u16;
    x.iter().flat_map(|x| bits(x).to_le_bytes()).collect()
}

fn from_bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

fn f32_bytes(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_le_bytes()).collect()
}

impl World {
    fn new(form: &Form, parity: [u32; SLOTS]) -> Self {
        let mut options = Options::default();
        options.profile.cores = form.cores;
        options.profile.mma = form.mma;
        if form.mma {
            options.profile.threads_per_core = 2048; // as on such a device
        }
        let mut driver = SoftDriver::new(options);
        let mut rng = Seeded::new("delta");
        let mut take = |count: usize, element: ElementType| {
            let bytes = (count * element.size()).max(16) as u64;
            let buffer = driver.allocate("test", bytes, Placement::Device).unwrap();
            Operand { buffer, offset: 0, bytes, element }
        };
        let words = |n| (n, ElementType::U32);
        let mut table = |(n, e)| take(n, e);
        let tables = Tables {
            segments: table(words(4 * SLOTS)),
            row_segments: table(words(TOKENS * SLOTS)),
            tokens: table(words(4)),
            output_rows: table(words(4)),
            headers: table(words(4 * SLOTS)),
            pages: table(words(4)),
            max_pages: 1,
            states: table((SLOTS * 2 * STATE_WORDS, ElementType::F32)),
            state_words: STATE_WORDS as u32,
            conv_at: CONV_AT as u32,
            kv: Vec::new(),
            rope: table(words(4)),
        };
        // Weights lie behind one another; the first unit stays empty.
        let sizes = [(CHANNELS, TAPS), (1, HEADS), (1, HEADS), (1, DV)];
        let slab = table((4 + CHANNELS * TAPS + 2 * HEADS + DV, ElementType::F32));
        let mut at = 16u64;
        let weights = sizes.map(|(rows, cols)| {
            let bytes = (rows * cols * 4) as u64;
            let spread = if rows > 1 { 0.9 } else { 0.5 };
            let data: Vec<f32> = (0..rows * cols).map(|_| rng.unit() * spread + 0.2).collect();
            driver.write(slab.buffer, at, &f32_bytes(&data)).unwrap();
            let matrix = Matrix {
                codes: (at / 16) as u32,
                scales: 0,
                biases: 0,
                codes_stride: 0,
                scales_stride: 0,
                rows: rows as u32,
                cols: cols as u32,
                format: 3,
            };
            at += bytes;
            DeviceWeight { slab, matrix, matrices: 1, bytes }
        });
        let mut rows = |width: usize, spread: f32| {
            (0..SLOTS).map(|_| rng.activations(TOKENS * width, spread)).collect()
        };
        let inputs = Inputs {
            qkv: rows(CHANNELS, 1.0),
            a: rows(HEADS, 2.0),
            b: rows(HEADS, 2.0),
            z: rows(HEADS * DV, 1.5),
        };
        let mut world = Self {
            driver,
            form: form.clone(),
            tables,
            weights,
            inputs,
            seen: [0; SLOTS],
            parity,
            out: vec![Vec::new(); SLOTS],
            kernels: Vec::new(),
        };
        world.start();
        world
    }

    /// The current state of each slot: the same whatever its parity; the other half is NaN.
    fn start(&mut self) {
        let mut rng = Seeded::new("state");
        for slot in 0..SLOTS {
            let recurrent: Vec<f32> = (0..CONV_AT).map(|_| rng.unit() * 0.1).collect();
            let conv: Vec<f32> = (0..LAYERS * (TAPS - 1) * CHANNELS).map(|_| rng.unit()).collect();
            let state = [f32_bytes(&recurrent), bf16_bytes(&conv)].concat();
            let at = |parity: u32| ((slot * 2 + parity as usize) * STATE_WORDS * 4) as u64;
            let buffer = self.tables.states.buffer;
            self.driver.write(buffer, at(self.parity[slot]), &state).unwrap();
            self.driver.write(buffer, at(self.parity[slot] ^ 1), &vec![0xFF; state.len()]).unwrap();
        }
    }

    fn operand(&mut self, count: usize, element: ElementType, data: Option<Vec<u8>>) -> Operand {
        let bytes = (count * element.size()) as u64;
        let buffer = self.driver.allocate("value", bytes, Placement::Device).unwrap();
        let data = data.unwrap_or(vec![0xFF; bytes as usize]);
        self.driver.write(buffer, 0, &data).unwrap();
        Operand { buffer, offset: 0, bytes, element }
    }

    /// Rows of a step out of each slot's inputs.
    fn rows(&self, of: &[Vec<f32>], width: usize, segments: &[(usize, usize)]) -> Vec<f32> {
        let part =
            |&(slot, n): &(usize, usize)| of[slot][self.seen[slot] * width..][..n * width].to_vec();
        segments.iter().flat_map(part).collect()
    }

    /// Runs the next tokens of some slots and turns their states round.
    fn step(&mut self, segments: &[(usize, usize)]) -> CommandList {
        let (mut entries, mut first) = (Vec::new(), 0);
        for &(slot, rows) in segments {
            let entry =
                SegmentEntry { slot: slot as u32, first, rows: rows as u32, first_output: 0 };
            entries.push(entry);
            first += rows as u32;
        }
        let n = first as usize;
        let headers = self.parity.map(|parity| SlotHeader {
            position: 0,
            last_token: 0,
            generated: 0,
            parity,
        });
        let (at, headers_at) = (self.tables.segments.buffer, self.tables.headers.buffer);
        self.driver.write(at, 0, bytemuck::cast_slice(&entries)).unwrap();
        self.driver.write(headers_at, 0, bytemuck::cast_slice(&headers)).unwrap();
        let (recorder, scratch, out) = self.record(n, segments);
        let list = self.run(recorder, &scratch);
        let mut bytes = vec![0u8; out.bytes as usize];
        self.driver.read(out.buffer, 0, &mut bytes).unwrap();
        let values: Vec<f32> = bytes.as_chunks().0.iter().map(|b| from_bf16(*b)).collect();
        assert!(values.iter().all(|x| x.is_finite()), "an element was not written");
        for (&(slot, rows), entry) in segments.iter().zip(&entries) {
            let row = HEADS * DV;
            self.out[slot].extend(&values[entry.first as usize * row..][..rows * row]);
            self.seen[slot] += rows;
            self.parity[slot] ^= 1;
        }
        list
    }

    fn record(&mut self, n: usize, segments: &[(usize, usize)]) -> (Recorder, Scratch, Operand) {
        let (f, h) = (ElementType::F32, ElementType::Bf16);
        let inputs = [
            (bf16_bytes(&self.rows(&self.inputs.qkv, CHANNELS, segments)), CHANNELS, h),
            (f32_bytes(&self.rows(&self.inputs.a, HEADS, segments)), HEADS, f),
            (f32_bytes(&self.rows(&self.inputs.b, HEADS, segments)), HEADS, f),
            (bf16_bytes(&self.rows(&self.inputs.z, HEADS * DV, segments)), HEADS * DV, h),
        ];
        let [qkv, a, b, z] =
            inputs.map(|(data, width, element)| self.operand(n * width, element, Some(data)));
        let [conv, normed] = [(); 2].map(|()| self.operand(n * CHANNELS, h, None));
        let [decay, beta] = [(); 2].map(|()| self.operand(n * HEADS, f, None));
        let [y, out] = [(); 2].map(|()| self.operand(n * HEADS * DV, h, None));
        let profile = self.driver.profile().clone();
        let shape = shape();
        let step = StepShape {
            segments: segments.iter().map(|s| s.1 as u32).collect(),
            outputs: 0,
            context: 256,
        };
        let tuning = &self.form.tuning;
        let c = &Context { profile: &profile, tuning, shape: &shape, step, tables: &self.tables };
        let [taps, a_log, dt_bias, weight] = &self.weights;
        let (r, mut scratch) = (&mut Recorder::default(), Scratch::default());
        if tuning.fuse_conv {
            let key_heads = KEY_HEADS;
            let p = Prep { qkv, taps, a, b, a_log, dt_bias, key_heads, out: normed, decay, beta };
            conv_prep(r, c, &p, LAYER, LAYERS);
        } else {
            causal_conv(r, c, qkv, taps, LAYER, LAYERS, conv);
            qk_l2_norm(r, c, conv, KEY_HEADS, normed);
            delta_gates(r, c, a, b, a_log, dt_bias, decay, beta);
        }
        let inputs = ScanInputs { qkv: normed, decay, beta, key_heads: KEY_HEADS };
        if scan_norm_applies(c) {
            scan_norm(r, c, inputs, z, weight, EPS, LAYER, LAYERS, out);
        } else {
            delta_scan(r, c, &mut scratch, inputs, LAYER, LAYERS, y);
            gated_rms_norm(r, c, y, z, weight, EPS, out);
        }
        (std::mem::take(r), scratch, out)
    }

    fn run(&mut self, recorder: Recorder, scratch: &Scratch) -> CommandList {
        let mut list = recorder.finish(true);
        let bytes = scratch.place(&mut list.clone(), Buffer(0), true).max(16);
        let arena = self.driver.allocate("scratch", bytes, Placement::Device).unwrap();
        self.driver.write(arena, 0, &vec![0xFF; bytes as usize]).unwrap();
        scratch.place(&mut list, arena, true);
        let kernels: Vec<&'static str> = list.dispatches.iter().map(|d| d.kernel).collect();
        let text = Arc::new(Text::new(Platform::Host, &shape()));
        list.pipelines = self.driver.pipelines(&text, &kernels).unwrap();
        let list = Arc::new(list);
        let submission = self.driver.submit(&list).unwrap();
        self.driver.wait(submission).unwrap();
        self.kernels.extend(kernels);
        Arc::unwrap_or_clone(list)
    }

    /// A slot's state, all layers: the current one, or the other.
    fn state(&mut self, slot: usize, other: bool) -> Vec<u8> {
        let mut bytes = vec![0u8; STATE_WORDS * 4];
        let half = self.parity[slot] as usize ^ usize::from(other);
        let at = (slot * 2 + half) * STATE_WORDS * 4;
        self.driver.read(self.tables.states.buffer, at as u64, &mut bytes).unwrap();
        bytes
    }

    /// The layer's recurrent and convolution state of a slot.
    fn layer_state(&mut self, slot: usize) -> (Vec<u8>, Vec<u8>) {
        let state = self.state(slot, false);
        let (recurrent, conv) = (HEADS * DV * DK * 4, (TAPS - 1) * CHANNELS * 2);
        let part = |at: usize, n: usize| state[at..][..n].to_vec();
        (part(LAYER * recurrent, recurrent), part(CONV_AT * 4 + LAYER * conv, conv))
    }
}

/// All tokens of slot 0 in chunks; what they left.
fn chunked(form: &Form, chunks: &[usize]) -> (Vec<f32>, (Vec<u8>, Vec<u8>), World) {
    let mut world = World::new(form, [1, 0, 1]);
    for rows in chunks {
        // The layer that nothing writes follows its state, as an untouched one must not.
        world.step(&[(0, *rows)]);
    }
    let state = world.layer_state(0);
    (world.out[0].clone(), state, world)
}

#[test]
fn neither_chunks_nor_forms_change_a_bit() {
    // 4 cores: four rows a simdgroup.
    let plain = form(&["fuse_scan_norm"], 4);
    let (out, state, world) = chunked(&plain, &[70]);
    assert_eq!(world.kernels, ["conv_prep", "delta_scan_4", "gated_rms_norm"]);
    for chunks in [vec![1; 70], vec![3, 2, 1, 32, 32], vec![33, 37]] {
        let got = chunked(&plain, &chunks);
        assert!(got.0 == out && got.1 == state, "chunks of {chunks:?}");
    }
    // Rows a simdgroup: by the device's cores.
    for (cores, kernel) in [(1, "delta_scan_8"), (10, "delta_scan_2"), (20, "delta_scan_1")] {
        let got = chunked(&form(&["fuse_scan_norm"], cores), &[3, 2, 65]);
        assert!(got.2.kernels.contains(&kernel), "{:?}", got.2.kernels);
        assert!(got.0 == out && got.1 == state, "{kernel}");
    }
    // Blocks of 32 tokens through memory: three for 70 tokens.
    let got = chunked(&form(&["fuse_scan_norm", "register_scan"], 4), &[70]);
    assert_eq!(got.2.kernels.iter().filter(|k| **k == "delta_scan_4").count(), 3);
    assert!(got.0 == out && got.1 == state, "blocks");
    // The fused decode kernel: its state has the same bits, its result is one rounding nearer.
    let got = chunked(&form(&[], 4), &[vec![60], vec![1; 10]].concat());
    assert_eq!(got.2.kernels.iter().filter(|k| **k == "scan_norm_4").count(), 10);
    assert!(got.1 == state, "the fused kernel's state");
    near(&got.0, &out, 0.01);
    assert_ne!(got.0, out, "the fused kernel does not round y");
}

/// Compares as parts of the largest magnitude.
fn near(got: &[f32], want: &[f32], relative: f32) {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(0f32, |m, x| m.max(x.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= relative * largest, "element {i}: {g}, want {w}");
    }
}

#[test]
fn the_fused_chain_is_the_separate_kernels() {
    let (fused, fused_state, _) = chunked(&form(&[], 4), &[1, 2, 3, 30, 1, 1]);
    let off = form(&["fuse_conv", "fuse_scan_norm"], 4);
    let (apart, state, world) = chunked(&off, &[1, 2, 3, 30, 1, 1]);
    let first = ["causal_conv", "qk_l2_norm", "delta_gates", "delta_scan_4", "gated_rms_norm"];
    assert_eq!(world.kernels[..5], first);
    near(&fused, &apart, 0.02);
    assert!(fused_state.1 == state.1, "the convolution keeps what it was given");
    let numbers = |bytes: &[u8]| -> Vec<f32> {
        bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    near(&numbers(&fused_state.0), &numbers(&state.0), 0.02);
}

/// Few kernel threads, for sanitizers and barriers left out.
#[test]
fn small_decode() {
    let (fused, ..) = chunked(&form(&[], 8), &[1, 1]);
    let (apart, ..) = chunked(&form(&["fuse_scan_norm"], 8), &[1, 1]);
    near(&fused, &apart, 0.01);
}

#[test]
fn slots_of_either_parity_in_one_step() {
    let plain = form(&[], 4);
    // Each slot alone.
    let mut alone = Vec::new();
    for (slot, rows) in [[2, 3, 1], [1, 1, 1], [40, 2, 1]].iter().enumerate() {
        let mut world = World::new(&plain, [0, 0, 0]);
        rows.iter().for_each(|n| drop(world.step(&[(slot, *n)])));
        alone.push((world.out[slot].clone(), world.layer_state(slot)));
    }
    // Together, in an order of their own, with states of both parities.
    let mut world = World::new(&plain, [0, 1, 1]);
    let before = world.state(1, false);
    world.step(&[(2, 40), (0, 2)]);
    assert!(world.state(1, false) == before, "a slot that is not in the step");
    let kept = [world.state(2, true), world.state(0, true)];
    let mut again = World::new(&plain, [0, 1, 1]);
    assert!(kept == [again.state(2, false), again.state(0, false)], "a step keeps what it read");
    world.step(&[(1, 1), (2, 2), (0, 3)]);
    let list = world.step(&[(0, 1), (1, 1), (2, 1)]);
    assert_eq!(
        list.dispatches.iter().map(|d| d.kernel).collect::<Vec<_>>(),
        ["conv_prep", "scan_norm_4"]
    );
    world.step(&[(1, 1)]);
    for (slot, (out, state)) in alone.iter().enumerate() {
        assert!(world.layer_state(slot) == *state, "the state of slot {slot}");
        near(&world.out[slot], out, 0.01); // the fused kernel does not round y
    }
}

/// A decode step of more heads than cores: more rows of the state a simdgroup, the same bits.
#[test]
fn several_slots_of_a_device_with_large_cores() {
    let step = |cores| {
        let mut world = World::new(&Form { mma: true, ..form(&[], cores) }, [0, 1, 0]);
        let list = world.step(&[(2, 1), (0, 1), (1, 1)]);
        (list.dispatches[1].kernel, world.out.clone(), [0, 1, 2].map(|s| world.layer_state(s)))
    };
    let ((one, out, states), (several, other, after)) = (step(1000), step(1));
    assert_eq!((one, several), ("scan_norm_4", "scan_norm_8"));
    assert!(out == other && states == after);
}

/// By matrix units a chunk of tokens begins where a step does, so that sums differ with the steps, and from the sums token by
/// token: by little. A segment's bits are its own, whatever else is in the step.
#[test]
fn chunks_by_matrix_units() {
    let plain = form(&["fuse_scan_norm"], 4);
    let matrix = Form { mma: true, ..plain.clone() };
    let off = Form { mma: true, ..form(&["fuse_scan_norm", "chunked_scan"], 4) };
    let (out, state, _) = chunked(&plain, &[70]);
    let got = chunked(&off, &[70]);
    assert!(got.0 == out && got.1 == state, "chunked_scan is off");
    let numbers = |bytes: &[u8]| -> Vec<f32> {
        bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    for (chunks, kernels) in [
        (vec![70], vec!["delta_chunk"]),
        (vec![32, 38], vec!["delta_chunk", "delta_chunk"]),
        (vec![3, 31, 36], vec!["delta_scan_4", "delta_scan_4", "delta_chunk"]),
    ] {
        let got = chunked(&matrix, &chunks);
        let scans = got.2.kernels.iter().filter(|k| ["delta_scan_4", "delta_chunk"].contains(k));
        assert!(scans.eq(&kernels), "{chunks:?}: {:?}", got.2.kernels);
        assert!(got.1.0 != state.0, "{chunks:?}: not a bit differs");
        assert!(got.1.1 == state.1, "{chunks:?}: the convolution's state");
        near(&got.0, &out, 0.01); // a rounding to bf16
        near(&numbers(&got.1.0), &numbers(&state.0), 2e-5);
    }
    // Slots of both parities, two of them chunk by chunk, in an order of their own; the first row is no multiple of a chunk.
    let alone = |slot: usize, rows: usize| {
        let mut world = World::new(&matrix, [0, 0, 0]);
        world.step(&[(slot, rows)]);
        (world.out[slot].clone(), world.layer_state(slot))
    };
    let mut world = World::new(&matrix, [0, 1, 1]);
    let before = world.state(0, false);
    let list = world.step(&[(2, 40), (0, 5), (1, 33)]);
    let scans = ["conv_prep", "delta_chunk_parts", "delta_scan_4", "delta_chunk", "gated_rms_norm"];
    assert!(list.dispatches.iter().map(|d| d.kernel).eq(scans), "{:?}", world.kernels);
    assert_eq!(list.stages.len(), 4, "the scan runs beside the preparation");
    assert!(world.state(0, true) == before, "a step keeps what it read");
    for (slot, rows) in [(2, 40), (0, 5), (1, 33)] {
        let (out, state) = alone(slot, rows);
        assert!(world.out[slot] == out && world.layer_state(slot) == state, "slot {slot}");
    }
}

#[test]
fn layers_do_not_wait_for_each_other_and_a_layers_kernels_do() {
    let mut world = World::new(&form(&[], 4), [0, 0, 0]);
    let list = world.step(&[(0, 2), (1, 1)]);
    assert_eq!(list.stages.len(), 3, "a chain of three kernels");
    let share = |layer: usize| world.tables.recurrent(layer, LAYERS).hazard;
    assert!(share(0).end <= share(1).start);
    assert!(share(1).end <= world.tables.conv(0, LAYERS).hazard.start);
}

#[test]
fn traffic_counts_the_state_once_or_once_a_block() {
    let state = (HEADS * DV * DK * 4) as u64;
    let scan = |off: &[&str]| -> Vec<u64> {
        let mut world = World::new(&form(off, 8), [0, 0, 0]);
        let list = world.step(&[(0, 70), (1, 1)]);
        let scans = list.dispatches.iter().filter(|d| d.kernel.starts_with("delta_scan"));
        scans.map(|d| d.traffic).collect()
    };
    let (registers, blocks) = (scan(&[]), scan(&["register_scan"]));
    assert_eq!((registers.len(), blocks.len()), (1, 3));
    // Slot 1's one token is in the first block only.
    assert_eq!(blocks.iter().sum::<u64>() - registers[0], 2 * 2 * state + 2 * 64);
}
