//! Lists under sanitizers: planted mistakes are found, the kernels have none.

use std::sync::Arc;

use lily_gpu::args::KernelArgs;
use lily_gpu::text::platform_header;
use lily_gpu::{
    Access, Binding, Driver, DriverError, Operand, Placement, Platform, Recorder, Text, kernel_args,
};
use lily_softgpu::{Options, Sanitizer, SoftDriver};

kernel_args! {
    /// Of the planted kernels.
    pub struct PlantArgs { words: u32, shift: u32 }
}

const KERNELS: &str = "
KERNEL(next_in_group, 64, OUT(0, uint, x), ARGS(1, PlantArgs, p)) {
  SHARED(uint, t, 64);
  t[k_thread.x] = k_thread.x;
  BARRIER
  x[k_group.x * 64 + k_thread.x] = t[(k_thread.x + p.shift) % 64];
}
KERNEL(next_in_simd, 64, OUT(0, uint, x), ARGS(1, PlantArgs, p)) {
  SHARED(uint, t, 64);
  t[k_thread.x] = k_thread.x;
  FENCE
  x[k_group.x * 64 + k_thread.x] = t[k_simd * 32 + (k_lane + p.shift) % 32];
}
KERNEL(add_one, 64, OUT(0, uint, x), ARGS(1, PlantArgs, p)) {
  const uint i = k_group.x * 64 + k_thread.x;
  if (i < p.words) x[i + p.shift] += 1;
}
KERNEL(one_cell, 64, OUT(0, uint, x), ARGS(1, PlantArgs, p)) {
  if (k_thread.x == 0) x[p.shift] = 1;
}
KERNEL(shared_overflow, 64, OUT(0, uint, x), ARGS(1, PlantArgs, p)) {
  uint local[4] = {1, 2, 3, 4};
  x[k_thread.x] = local[(k_thread.x + p.shift) & 7];
}
";

fn text(barrier: &str, fence: &str) -> Arc<Text> {
    let header = platform_header("platform_cpu.h").unwrap();
    let kernels = KERNELS.replace("BARRIER", barrier).replace("FENCE", fence);
    let source = format!("{header}\n{}\n{kernels}", PlantArgs::declaration());
    Arc::new(Text { platform: Platform::Host, source })
}

/// Runs kernels, each with its shift, on one buffer of 256 words, of which they bind 128.
fn run(
    sanitizer: Sanitizer,
    text: &Arc<Text>,
    kernels: &[(&'static str, u32)],
    barriers: bool,
) -> Result<Vec<u32>, DriverError> {
    let options = Options { sanitizer: Some(sanitizer), ..Options::default() };
    let mut driver = SoftDriver::new(options);
    let buffer = driver.allocate("words", 1024, Placement::Device)?;
    let operand = Operand { buffer, offset: 0, bytes: 512, element: lily_ops::ElementType::U32 };
    let access = if barriers { Access::Write } else { Access::Constant };
    let mut r = Recorder::default();
    for (kernel, shift) in kernels {
        let args = PlantArgs { words: 128, shift: *shift };
        r.dispatch(kernel, [2, 1, 1], 64, vec![Binding::new(operand, access)], &args, 0);
    }
    let mut list = r.finish(true);
    let names: Vec<&'static str> = kernels.iter().map(|(name, _)| *name).collect();
    list.pipelines = driver.pipelines(text, &names)?;
    driver.submit(&Arc::new(list))?;
    let mut bytes = vec![0u8; 1024];
    driver.read(buffer, 0, &mut bytes)?;
    Ok(bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

/// The kernel and the report, which names the kernel's code.
fn report(result: Result<Vec<u32>, DriverError>) -> (String, String) {
    match result.expect_err("a planted mistake must be found") {
        DriverError::Kernel { kernel, reason } => {
            let first = reason.lines().find(|l| l.contains("#0")).unwrap_or(&reason);
            assert!(first.contains(&kernel) || reason.contains("runtime error"), "{reason}");
            (kernel, reason)
        }
        other => panic!("{other}"),
    }
}

#[test]
fn right_kernels_are_clean_and_their_results_come_back() {
    let text = text("tg_barrier();", "simd_fence();");
    for sanitizer in [Sanitizer::Thread, Sanitizer::Address] {
        let list = [("next_in_group", 1), ("add_one", 0), ("add_one", 0), ("next_in_simd", 3)];
        let words = run(sanitizer, &text, &list[..3], true).unwrap();
        assert!((0..128).all(|i| words[i] == (i as u32 % 64 + 1) % 64 + 2), "{words:?}");
        assert!(words[128..].iter().all(|w| *w == 0));
        let words = run(sanitizer, &text, &list, true).unwrap();
        assert_eq!(words[..3], [3, 4, 5]);
    }
}

#[test]
fn a_missing_barrier_is_a_race() {
    let (kernel, reason) =
        report(run(Sanitizer::Thread, &text("", "simd_fence();"), &[("next_in_group", 1)], true));
    assert_eq!(kernel, "next_in_group");
    assert!(reason.contains("data race"), "{reason}");
    let (kernel, reason) =
        report(run(Sanitizer::Thread, &text("tg_barrier();", ""), &[("next_in_simd", 1)], true));
    assert_eq!(kernel, "next_in_simd");
    assert!(reason.contains("data race"), "{reason}");
}

#[test]
fn dispatches_without_a_barrier_race() {
    let text = text("tg_barrier();", "simd_fence();");
    // Each thread of the second touches what the thread of the same place of the first wrote.
    let two = [("add_one", 0), ("add_one", 0)];
    let (_, reason) = report(run(Sanitizer::Thread, &text, &two, false));
    assert!(reason.contains("data race"), "{reason}");
    // Threadgroups of one dispatch.
    let (_, reason) = report(run(Sanitizer::Thread, &text, &[("one_cell", 0)], true));
    assert!(reason.contains("data race"), "{reason}");
}

#[test]
fn what_is_not_bound_is_out_of_bounds() {
    let text = text("tg_barrier();", "simd_fence();");
    // One element behind the binding, inside the buffer.
    let (kernel, reason) = report(run(Sanitizer::Address, &text, &[("add_one", 1)], true));
    assert_eq!(kernel, "add_one");
    assert!(reason.contains("use-after-poison"), "{reason}");
    // Behind the buffer.
    let (_, reason) = report(run(Sanitizer::Address, &text, &[("one_cell", 256)], true));
    assert!(reason.contains("heap-buffer-overflow"), "{reason}");
    // Behind an array of a thread's own.
    let (_, reason) = report(run(Sanitizer::Address, &text, &[("shared_overflow", 2)], true));
    assert!(
        reason.contains("out of bounds") || reason.contains("stack-buffer-overflow"),
        "{reason}"
    );
}
