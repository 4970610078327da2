//! The driver itself: what it runs, what it refuses, what it catches.

use std::sync::Arc;

use lily_gpu::kernels::common::{SlotHeader, declarations};
use lily_gpu::{
    Access, Binding, Buffer, Driver, DriverError, Operand, Placement, Platform, Recorder, Shape,
    Text, kernel_args,
};
use lily_softgpu::{Options, SoftDriver};

mod args {
    use super::kernel_args;
    kernel_args! {
        /// Of `fill_words`.
        pub struct FillArgs { words: u32, value: u32 }
    }
}
use args::FillArgs;

fn operand(buffer: Buffer, bytes: u64) -> Operand {
    Operand { buffer, offset: 0, bytes, element: lily_ops::ElementType::U32 }
}

/// Runs one kernel of `text` on a buffer of 256 words.
fn run(
    text: Text,
    kernel: &'static str,
    groups: u32,
    threads: u32,
) -> Result<Vec<u32>, DriverError> {
    let mut driver = SoftDriver::new(Options::default());
    let buffer = driver.allocate("words", 1024, Placement::Device)?;
    let mut r = Recorder::default();
    let binding = Binding::new(operand(buffer, 1024), Access::Write);
    r.dispatch(
        kernel,
        [groups, 1, 1],
        threads,
        vec![binding],
        &FillArgs { words: 200, value: 7 },
        0,
    );
    let mut list = r.finish(true);
    list.pipelines = driver.pipelines(&Arc::new(text), &[kernel])?;
    let submission = driver.submit(&Arc::new(list))?;
    driver.wait(submission)?;
    assert_eq!(driver.stats().launches[kernel], 1);
    let mut bytes = vec![0u8; 1024];
    driver.read(buffer, 0, &mut bytes)?;
    Ok(bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

/// The text of the shape, with `kernels` behind it.
fn text_with(kernels: &str) -> Text {
    let mut text = Text::new(Platform::Host, &Shape::default());
    text.source += kernels;
    text
}

fn error(kernels: &str, name: &'static str) -> String {
    run(text_with(kernels), name, 2, 64).expect_err("it must be caught").to_string()
}

#[test]
fn a_kernel_runs() {
    let words = run(text_with(""), "fill_words", 1, 256).unwrap();
    assert!(words[..200].iter().all(|w| *w == 7) && words[200..].iter().all(|w| *w == 0));
}

#[test]
fn divergence_is_named() {
    let kernel = "KERNEL(bad, 64, OUT(0, uint, y), ARGS(1, FillArgs, p)) {
        SHARED(uint, s, 64); s[k_thread.x] = 1; if (k_thread.x < 32) { tg_barrier(); } y[k_thread.x] = s[k_thread.x]; }";
    let e = error(kernel, "bad");
    assert!(e.contains("bad failed: barrier not reached by all threads"), "{e}");
    let kernel = "KERNEL(bad, 64, OUT(0, uint, y), ARGS(1, FillArgs, p)) {
        uint v = 1; if (k_lane < 16) v = simd_sum(v); else v = simd_max(v); y[k_thread.x] = v; }";
    assert!(error(kernel, "bad").contains("divergent simdgroup"));
    let kernel = "KERNEL(bad, 64, OUT(0, uint, y), ARGS(1, FillArgs, p)) {
        if (k_lane < 16) return; y[k_thread.x] = simd_sum(1u); }";
    assert!(error(kernel, "bad").contains("simdgroup not complete"));
}

#[test]
fn threadgroup_memory_starts_as_nan_and_is_bounded() {
    let kernel = "KERNEL(odd, 64, OUT(0, uint, y), ARGS(1, FillArgs, p)) {
        SHARED(float, s, 64); y[k_thread.x] = s[k_thread.x] != s[k_thread.x]; s[k_thread.x] = 1.0f; }";
    let words = run(text_with(kernel), "odd", 2, 64).unwrap();
    assert!(words[..64].iter().all(|w| *w == 1), "also in a second threadgroup");
    let kernel = "KERNEL(bad, 64, OUT(0, uint, y), ARGS(1, FillArgs, p)) {
        SHARED(float, s, 8193); s[k_thread.x] = 1.0f; y[0] = 1; }";
    assert!(error(kernel, "bad").contains("32 KiB"));
}

#[test]
fn simd_operations() {
    let kernel = "KERNEL(ops, 64, OUT(0, uint, y), ARGS(1, FillArgs, p)) {
        const uint v = simd_exclusive_sum(k_lane), w = simd_sum(k_lane) + simd_max(k_lane) * 1000 + simd_min(k_lane + 3) * 100000;
        const uint x = simd_shuffle(k_lane, 5u) + simd_shuffle_xor(k_lane, 1u) * 100;
        if (k_thread.x == 7) { y[0] = v; y[1] = w; y[2] = x; y[3] = uint(simd_sum(1.5f)); y[4] = uint(simd_max(float(k_lane))); y[5] = simd_any(k_lane == 3); }
        else { simd_sum(1.5f); simd_max(1.0f); simd_any(k_lane == 3); } }";
    // Operations of one line on both branches would still be two places: the emulator tells.
    let e = error(kernel, "ops");
    assert!(e.contains("divergent"), "{e}");
    let kernel = "KERNEL(ops, 64, OUT(0, uint, y), ARGS(1, FillArgs, p)) {
        const uint v = simd_exclusive_sum(k_lane), w = simd_sum(k_lane) + simd_max(k_lane) * 1000 + simd_min(k_lane + 3) * 100000;
        const uint x = simd_shuffle(k_lane, 5u) + simd_shuffle_xor(k_lane, 1u) * 100;
        const float f = simd_sum(1.5f), g = simd_max(float(k_lane)); const bool b = simd_any(k_lane == 3);
        if (k_thread.x == 7) { y[0] = v; y[1] = w; y[2] = x; y[3] = uint(f); y[4] = uint(g); y[5] = b; } }";
    let words = run(text_with(kernel), "ops", 1, 64).unwrap();
    assert_eq!(words[..6], [21, 496 + 31_000 + 300_000, 5 + 600, 48, 31, 1]);
}

#[test]
fn mistakes_of_the_caller_are_refused() {
    let mut driver = SoftDriver::new(Options::default());
    let buffer = driver.allocate("words", 64, Placement::Device).unwrap();
    assert!(driver.write(buffer, 60, &[0; 8]).is_err());
    assert!(driver.read(Buffer(9), 0, &mut [0]).is_err());
    assert!(matches!(
        driver.allocate("huge", 1 << 60, Placement::Device),
        Err(DriverError::OutOfMemory { .. })
    ));
    let text = Arc::new(text_with(""));
    let e = driver.pipelines(&text, &["no_such_kernel"]).unwrap_err();
    assert!(e.to_string().contains("no kernel no_such_kernel"), "{e}");
    let broken = Arc::new(text_with("int x = ;"));
    assert!(matches!(driver.pipelines(&broken, &["fill_words"]), Err(DriverError::Compile { .. })));

    let mut submit = |bindings: Vec<Binding>, header: bool, threads| {
        let mut r = Recorder::default();
        match header {
            true => {
                let args = SlotHeader { position: 0, last_token: 0, generated: 0, parity: 0 };
                r.dispatch("fill_words", [1, 1, 1], threads, bindings, &args, 0);
            }
            false => {
                let args = FillArgs { words: 4, value: 1 };
                r.dispatch("fill_words", [1, 1, 1], threads, bindings, &args, 0);
            }
        }
        let mut list = r.finish(true);
        list.pipelines = driver.pipelines(&text, &["fill_words"]).unwrap();
        driver.submit(&Arc::new(list)).map_err(|e| e.to_string())
    };
    let whole = Binding::new(operand(buffer, 64), Access::Write);
    assert!(submit(vec![whole.clone()], false, 256).is_ok());
    assert!(submit(vec![], false, 256).unwrap_err().contains("it takes 1"));
    assert!(submit(vec![whole.clone()], true, 256).unwrap_err().contains("bytes of arguments"));
    assert!(submit(vec![whole.clone()], false, 512).unwrap_err().contains("at most 256"));
    let beyond = Binding::new(operand(buffer, 80), Access::Write);
    assert!(submit(vec![beyond], false, 256).unwrap_err().contains("which has 64"));
    assert!(declarations().contains("struct SlotHeader"));
}

/// What a self-test goes through is what there is.
#[test]
fn every_listed_kernel_is_there() {
    let mut driver = SoftDriver::new(Options::default());
    let text = Arc::new(Text::new(Platform::Host, &Shape::default()));
    let names: Vec<&'static str> =
        lily_gpu::text::kernels(Platform::Host).into_iter().map(|name| &*name.leak()).collect();
    let pipelines = driver.pipelines(&text, &names).expect("each is in the text");
    assert_eq!(pipelines.len(), names.len());
}
