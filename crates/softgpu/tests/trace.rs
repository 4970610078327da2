//! What a decode step of the real widths loads and stores, counted access by access: weights once, K and V as often as heads that are
//! not packed together need them, whole lines.

use std::sync::Arc;

use lily_bench::synth::Shape as Widths;
use lily_device::{Device, Input, Limits, Output, SlotId, Snapshot, Step, Weight};
use lily_gpu::args::KernelArgs;
use lily_gpu::text::platform_header;
use lily_gpu::upload::SlabLayout;
use lily_gpu::{
    Access, Binding, Buffer, Driver, GpuDevice, Operand, Placement, Platform, Profile, Recorder,
    Text, Tuning, kernel_args,
};
use lily_model::{Precision, plan_of_config};
use lily_ops::case::Seeded;
use lily_ops::sample::TokenCounts;
use lily_ops::{Op, Plan, WeightFormat, WeightSpec};
use lily_softgpu::{Class, Compiler, Counts, Options, SoftDriver, Trace, Traced};

/// One recurrent layer and one with attention, of few experts and few words: nothing else is smaller than in the real model.
fn slice() -> Plan {
    let widths = Widths {
        experts: 16,
        vocab_size: 2048,
        full_attention_interval: 2,
        stop_ids: vec![2047, 2046],
        ..Widths::qwen3_6_35b_a3b(2)
    };
    plan_of_config("slice", &widths.config(), Precision::Standard).expect("a config").1
}

fn bf16(x: f32) -> [u8; 2] {
    ((x.to_bits() >> 16) as u16).to_le_bytes()
}

/// Random codes, and numbers of such a size that the model's stay small.
fn weight(spec: &WeightSpec, seed: u32) -> Weight {
    let count = spec.matrices * spec.rows;
    let mut word = seed.wrapping_mul(0x9E37_79B9) | 1;
    let mut codes = vec![0u8; count * spec.format.row_bytes(spec.cols)];
    let small = |word: u32| (word as f32 / u32::MAX as f32 - 0.5) * 0.1;
    for four in codes.chunks_mut(4) {
        word = word.wrapping_mul(0x0019_660D).wrapping_add(0x3C6E_F35F);
        let bytes = match spec.format {
            WeightFormat::Affine { .. } => word.to_le_bytes(),
            WeightFormat::Dense(lily_ops::ElementType::Bf16) => {
                let [a, b] = bf16(small(word));
                let [c, d] = bf16(small(!word));
                [a, b, c, d]
            }
            WeightFormat::Dense(_) => small(word).to_le_bytes(),
        };
        four.copy_from_slice(&bytes[..four.len()]);
    }
    let (largest, scale) = match spec.format {
        WeightFormat::Affine { bits } => (f32::from((1u16 << bits) - 1), 0.1),
        WeightFormat::Dense(_) => (1.0, 0.0),
    };
    let groups = count * spec.format.scale_bytes(spec.cols) / 2;
    let part = |x: f32| -> Arc<[u8]> { bf16(x).repeat(groups).into() };
    let scales = spec.rows * spec.format.scale_bytes(spec.cols);
    Weight {
        codes: Arc::<[u8]>::from(codes).into(),
        scales: (groups > 0).then(|| part(scale / largest).into()),
        biases: (groups > 0).then(|| part(-scale / 2.0).into()),
        strides: [spec.rows * spec.format.row_bytes(spec.cols), scales, scales],
    }
}

/// Tokens before the traced one: not a whole number of pages, nor of splits.
const POSITION: usize = 1000;

fn trace(profile: &str, tuning: Tuning, position: usize) -> Traced {
    let plan = slice();
    let profile = Profile { platform: Platform::Host, ..Profile::named(profile).expect("known") };
    let trace = Trace::default();
    let options = Options {
        profile: profile.clone(),
        compiler: Compiler::tracing(),
        trace: Some(trace.clone()),
        ..Options::default()
    };
    let weights = plan.weights.iter().zip(1..).map(|(spec, seed)| weight(spec, seed)).collect();
    let vectors = vectors(&plan, profile.max_buffer);
    let open = move || Ok(Box::new(SoftDriver::new(options.clone())) as Box<dyn Driver>);
    let device = GpuDevice::new(profile, tuning, Box::new(open));
    let limits = Limits::new(1, position + 1, 1);
    let state = plan.state;
    let mut program = device.prepare(Arc::new(plan), weights, limits).expect("it is prepared");
    let kv = state.kv_layers * 2 * state.kv_heads * position * state.head_dim;
    let mut rng = Seeded::new("cache");
    let snapshot = Snapshot {
        position,
        last_sampled: Some(5),
        generated: 0,
        counts: TokenCounts::default(),
        recurrent: vec![0; state.recurrent_bytes()],
        conv: vec![0; state.recurrent_layers * state.conv_len() * 2],
        kv: (0..kv).flat_map(|_| bf16(rng.unit())).collect(),
    };
    let slot = SlotId(0);
    program.restore(slot, &snapshot).expect("the snapshot fits");
    trace.start(vectors);
    let step = Step::one(slot, Input::Tokens(vec![7]), Output::Logits);
    program.run(step).expect("the step runs");
    trace.stop()
}

/// Where norms' weights, taps and the constants of gates lie in the slab.
fn vectors(plan: &Plan, max_buffer: u64) -> Vec<std::ops::Range<u64>> {
    let layout = SlabLayout::new(plan, max_buffer).expect("a layout");
    assert_eq!(layout.slabs.len(), 1, "one slab");
    let taps: Vec<_> = plan
        .nodes()
        .filter_map(|n| match &n.op {
            Op::CausalConv(op) => Some(op.weight.0 as usize),
            _ => None,
        })
        .collect();
    let mut ranges: Vec<_> = layout
        .weights(plan, &[Buffer(0)])
        .iter()
        .zip(&plan.weights)
        .enumerate()
        .filter(|(i, (_, spec))| {
            matches!(spec.format, WeightFormat::Dense(_)) && (spec.rows == 1 || taps.contains(i))
        })
        .map(|(_, (weight, spec))| {
            let start = u64::from(weight.matrix.codes) * 16;
            start..start + (spec.matrices * spec.rows * spec.cols * 4) as u64
        })
        .collect();
    ranges.sort_by_key(|r| r.start);
    ranges
}

/// A line of the table in docs/kernels.md for each class.
fn print(what: &str, traced: &Traced) {
    for (class, [loaded, stored]) in &traced.unique {
        let t = traced.total(*class);
        println!(
            "| {what} | {class:?} | {:.2} MB | {:.3} | {:.3} | {:.2} MB | {:.3} |",
            *loaded as f64 / 1e6,
            traced.times_loaded(*class),
            t.loads.lines_ratio(),
            *stored as f64 / 1e6,
            t.stores.lines_ratio(),
        );
    }
}

/// What holds of every decode step, however heads and reads are cut.
fn check(what: &str, traced: &Traced) {
    print(what, traced);
    let weights = traced.times_loaded(Class::Weights);
    assert!((1.0..=1.01).contains(&weights), "{what}: weights are loaded {weights} times");
    let state = traced.times_loaded(Class::State);
    assert!((1.0..=1.01).contains(&state), "{what}: the state is loaded {state} times");
    for class in [Class::Weights, Class::State] {
        let lines = traced.total(class).loads.lines_ratio();
        assert!(lines <= 1.1, "{what}: {class:?} in {lines} of the fewest lines");
    }
    assert!(traced.total(Class::State).stores.lines_ratio() <= 1.1, "{what}: state stored");
    assert_eq!(traced.total(Class::Weights).stores.accesses, 0, "{what}: weights are written");
}

fn check_cache(what: &str, traced: &Traced, position: usize, times: f64, coalesced: bool) {
    // K and V of two KV heads of 256 elements, of every token and the step's own.
    let [loaded, stored] = traced.unique[&Class::Cache];
    assert_eq!((loaded, stored), ((position as u64 + 1) * 2048, 2048), "{what}");
    let got = traced.times_loaded(Class::Cache);
    assert!((got - times).abs() < 0.005, "{what}: K and V are loaded {got} times");
    let lines = traced.total(Class::Cache).loads.lines_ratio();
    assert!(if coalesced { lines <= 1.1 } else { lines >= 4.0 }, "{what}: {lines} lines");
}

#[test]
#[ignore = "needs clang++-22; .ci/gpu-checks runs it"]
fn a_decode_step_loads_what_it_must() {
    for profile in ["h200", "m4-max"] {
        for (off, kernel, times, coalesced) in [
            ("nothing", "attention_split", 2.0, true),
            ("pack_heads", "attention_split_unpacked", 8.0, true),
            ("coalesced_kv", "attention_split_strided", 2.0, false),
        ] {
            let what = format!("{profile} without {off}");
            let traced = trace(profile, Tuning::without(off).unwrap_or_default(), POSITION);
            assert!(traced.kernels.contains_key(&(kernel, Class::Cache)), "{what}");
            check(&what, &traced);
            check_cache(&what, &traced, POSITION, times, coalesced);
        }
    }
}

/// Where splits are whole pages.
#[test]
#[ignore = "needs clang++-22; .ci/gpu-checks runs it"]
fn a_long_context_too() {
    let traced = trace("h200", Tuning::default(), 32_800);
    assert!(traced.kernels.contains_key(&("attention_fixed", Class::Cache)));
    check("h200 at 32,800 tokens", &traced);
    check_cache("h200 at 32,800 tokens", &traced, 32_800, 2.0, true);
}

kernel_args! {
    /// Of the planted kernels.
    pub struct PlantArgs { stride: u32, times: u32 }
}

/// Each lane reads four words `times` times, `stride` words from the next lane's; the last lane reads one more and writes one.
const PLANTED: &str = "
KERNEL(planted, 64, IN(0, uint, x), OUT(1, uint, y), ARGS(2, PlantArgs, p)) {
  SHARED(uint, t, 64);
  uint sum = 0;
  for (uint i = 0; i < p.times; i++) {
    const uint4 q = load4(x + k_thread.x * p.stride);
    t[k_thread.x] = q.x + q.w;
    tg_barrier();
    sum += t[63 - k_thread.x];
    tg_barrier();
  }
  if (k_thread.x == 63) y[0] = sum + x[5];
}
";

/// What the trace says of accesses that are known.
#[test]
#[ignore = "needs clang++-22; .ci/gpu-checks runs it"]
fn planted_accesses_are_counted() {
    let header = platform_header("platform_cpu.h").expect("the host's header");
    let source = format!("{header}\n{}\n{PLANTED}", PlantArgs::declaration());
    let text = Arc::new(Text { platform: Platform::Host, source });
    // Stride, times; bytes of an access, lines of it.
    for (stride, times, bytes, lines) in
        [(4, 1, 512, 4), (4, 3, 512, 4), (0, 2, 16, 1), (2, 1, 264, 3), (32, 1, 512, 32)]
    {
        let trace = Trace::default();
        let options = Options {
            compiler: Compiler::tracing(),
            trace: Some(trace.clone()),
            ..Options::default()
        };
        let mut driver = SoftDriver::new(options);
        let mut room = |what| {
            let buffer = driver.allocate(what, 64 * 128, Placement::Device).expect("room");
            Operand { buffer, offset: 0, bytes: 64 * 128, element: lily_ops::ElementType::U32 }
        };
        let bindings = vec![
            Binding::new(room("weights"), Access::Read),
            Binding::new(room("result"), Access::Write),
        ];
        let mut r = Recorder::default();
        r.dispatch("planted", [1, 1, 1], 64, bindings, &PlantArgs { stride, times }, 0);
        let mut list = r.finish(true);
        list.pipelines = driver.pipelines(&text, &["planted"]).expect("it compiles");
        trace.start(Vec::new());
        driver.submit(&Arc::new(list)).expect("it runs");
        let traced = trace.stop();
        let accesses = 2 * u64::from(times);
        let want = Counts {
            bytes: accesses * bytes + 4,
            accesses: accesses + 1,
            lines: accesses * lines + 1,
            ideal_lines: accesses * bytes.div_ceil(128) + 1,
        };
        let got = traced.total(Class::Weights);
        assert_eq!(got.loads, want, "stride {stride}, {times} times");
        let one = Counts { bytes: 4, accesses: 1, lines: 1, ideal_lines: 1 };
        assert_eq!(traced.total(Class::Activations).stores, one);
        // No lane has read word 5 where strides are none or wide.
        let distinct = match stride {
            0 => 20,
            2 => 63 * 8 + 16,
            32 => 64 * 16 + 4,
            _ => 64 * 16,
        };
        assert_eq!(traced.unique[&Class::Weights], [distinct, 0]);
    }
}
