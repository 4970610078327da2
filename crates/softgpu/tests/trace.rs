//! What a decode step of the real widths loads and stores, counted access by access: weights once, K and V as often as heads that are
//! not packed together need them, whole lines.

mod slice;

use std::sync::Arc;

use lily_gpu::args::KernelArgs;
use lily_gpu::kernels::common::{DeviceWeight, SLAB_UNIT};
use lily_gpu::text::platform_header;
use lily_gpu::upload::SlabLayout;
use lily_gpu::{
    Access, Binding, Buffer, Driver, Operand, Placement, Platform, Profile, Recorder, Text, Tuning,
    kernel_args,
};
use lily_ops::plan::PAGE_TOKENS;
use lily_ops::{Op, Plan, WeightFormat};
use lily_softgpu::{Class, Compiler, Counts, Options, SoftDriver, Trace, Traced};

/// Tokens before the traced one: not a whole number of pages, nor of splits.
const POSITION: usize = 1000;

fn trace(profile: &str, tuning: Tuning, position: usize) -> Traced {
    let trace = Trace::default();
    let options = Options {
        profile: Profile { platform: Platform::Host, ..Profile::named(profile).expect("known") },
        compiler: Compiler::tracing(),
        trace: Some(trace.clone()),
        ..Options::default()
    };
    let parts = parts(&slice::plan(), options.profile.max_buffer);
    let mut program = slice::program(options, tuning, position);
    trace.start(parts);
    slice::step(&mut *program);
    trace.stop()
}

/// Where scales and biases lie in the slab; norms' weights, taps and the constants of gates.
fn parts(plan: &Plan, max_buffer: u64) -> Vec<(std::ops::Range<u64>, Class)> {
    let layout = SlabLayout::new(plan, max_buffer).expect("a layout");
    assert_eq!(layout.slabs.len(), 1, "one slab");
    let taps: Vec<_> = plan
        .nodes()
        .filter_map(|n| match &n.op {
            Op::CausalConv(op) => Some(op.weight.0 as usize),
            _ => None,
        })
        .collect();
    let weights = layout.weights(plan, &[Buffer(0)]);
    let mut ranges = Vec::new();
    for (i, (weight, spec)) in weights.iter().zip(&plan.weights).enumerate() {
        let start = u64::from(weight.matrix.codes) * SLAB_UNIT;
        match spec.format {
            WeightFormat::Affine { .. } => {
                let ([_, scales, biases], _) = DeviceWeight::layout(spec, start);
                ranges.push((scales.start..biases.end, Class::Scales));
            }
            WeightFormat::Dense(_) if spec.rows == 1 || taps.contains(&i) => {
                let bytes = (spec.matrices * spec.rows * spec.cols * 4) as u64;
                ranges.push((start..start + bytes, Class::Vectors));
            }
            WeightFormat::Dense(_) => {}
        }
    }
    ranges.sort_by_key(|(r, _)| r.start);
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

/// Lines of scales and biases, of the fewest, by matrix units. Of a row's 64 bytes of scales (2,048 columns) a simdgroup takes 16, of 16 rows at once:
/// eight lines, of which the fewest would be two. Other simdgroups take the rest while the lines are in the cache. 4.08 was measured.
const SCALES_BY_UNITS: f64 = 4.1;

/// What an encoder says that a dispatch moves, and what it moved: by so much of it, and by as many bytes of headers and tables.
const CLAIMED: (f64, u64) = (0.001, 64);

/// Distinct bytes of each launch are those that its encoder counts ([`Dispatch::traffic`](lily_gpu::Dispatch::traffic)), of which
/// `lily plan` makes a step's `bytes`.
fn check_claims(what: &str, traced: &Traced, position: usize) {
    assert!(traced.launches.len() > 10, "{what}: {} launches", traced.launches.len());
    for launch in &traced.launches {
        let mut moved = launch.unique.iter().sum::<u64>();
        match launch.kernel {
            // K and V are counted up to the end of the step's last page: a recorded list serves it all.
            kernel
                if kernel.starts_with("attention_split")
                    || kernel.starts_with("attention_fixed") =>
            {
                let tokens = position as u64 + 1;
                let claims = launch.claimed > 0; // with another one's, or not at all
                moved += u64::from(claims)
                    * (tokens.next_multiple_of(PAGE_TOKENS as u64) - tokens)
                    * 2048;
            }
            // Taps are counted as the checkpoint has them, in bf16; on the device they are f32: 4 of 8,192 channels.
            "conv_prep" => moved -= 4 * 8192 * 2,
            _ => {}
        }
        let off = launch.claimed.abs_diff(moved);
        let most = (moved as f64 * CLAIMED.0) as u64 + CLAIMED.1;
        assert!(off <= most, "{what}: {launch:?}: {moved} bytes with what is known to differ");
    }
}

/// What holds of every decode step, however heads and reads are cut.
fn check(what: &str, traced: &Traced) {
    print(what, traced);
    let weights = traced.times_loaded(Class::Weights);
    assert!((1.0..=1.01).contains(&weights), "{what}: weights are loaded {weights} times");
    let state = traced.times_loaded(Class::State);
    assert!((1.0..=1.01).contains(&state), "{what}: the state is loaded {state} times");
    let scales = traced.times_loaded(Class::Scales);
    assert!((1.0..=1.01).contains(&scales), "{what}: scales are loaded {scales} times");
    let units = traced.kernels.keys().any(|(kernel, _)| kernel.starts_with("gemv_mma"));
    let most = if units { SCALES_BY_UNITS } else { 1.1 };
    for (class, most) in [(Class::Weights, 1.1), (Class::Scales, most), (Class::State, 1.1)] {
        let lines = traced.total(class).loads.lines_ratio();
        assert!(lines <= most, "{what}: {class:?} in {lines} of the fewest lines");
    }
    assert!(traced.total(Class::State).stores.lines_ratio() <= 1.1, "{what}: state stored");
    assert_eq!(traced.total(Class::Weights).stores.accesses, 0, "{what}: weights are written");
}

fn check_cache(what: &str, traced: &Traced, position: usize, times: f64, most: f64) {
    // K and V of two KV heads of 256 elements, of every token and the step's own.
    let [loaded, stored] = traced.unique[&Class::Cache];
    assert_eq!((loaded, stored), ((position as u64 + 1) * 2048, 2048), "{what}");
    let got = traced.times_loaded(Class::Cache);
    assert!((got - times).abs() < 0.005, "{what}: K and V are loaded {got} times");
    let lines = traced.total(Class::Cache).loads.lines_ratio();
    println!("{what}: K and V {got} times, {lines} of the fewest lines");
    // Strided reads are to show how much coalescing is worth.
    let strided = most > 4.0;
    assert!(lines <= most && (!strided || lines >= 4.0), "{what}: {lines} of the fewest lines");
}

#[test]
#[ignore = "needs clang++-22; .ci/gpu-checks runs it"]
fn a_decode_step_loads_what_it_must() {
    for profile in ["h200", "m4-max"] {
        for (off, kernel, times, most) in [
            ("nothing", "attention_split", 2.0, 1.1),
            ("matrix_gemv", "attention_split", 2.0, 1.1),
            ("pack_heads", "attention_split_unpacked", 8.0, 1.1),
            ("coalesced_kv", "attention_split_strided", 2.0, 8.0),
        ] {
            let what = format!("{profile} without {off}");
            let traced = trace(profile, Tuning::without(off).unwrap_or_default(), POSITION);
            assert!(traced.kernels.contains_key(&(kernel, Class::Cache)), "{what}");
            check(&what, &traced);
            check_claims(&what, &traced, POSITION);
            check_cache(&what, &traced, POSITION, times, most);
        }
    }
}

/// Where splits are whole pages.
#[test]
#[ignore = "needs clang++-22; .ci/gpu-checks runs it"]
fn a_long_context_too() {
    // Matrix units read K and V once, K in two loads of 16 of the 32 bytes that a lane wants of a row.
    for (off, kernel, times, most) in [
        ("nothing", "attention_fixed_units", 1.0, 1.6),
        ("matrix_attention", "attention_fixed", 2.0, 1.1),
    ] {
        let what = format!("h200 at 32,800 tokens without {off}");
        let traced = trace("h200", Tuning::without(off).unwrap_or_default(), 32_800);
        assert!(traced.kernels.contains_key(&(kernel, Class::Cache)), "{what}");
        check(&what, &traced);
        check_claims(&what, &traced, 32_800);
        check_cache(&what, &traced, 32_800, times, most);
    }
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
