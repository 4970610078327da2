//! Multiply-adds that recorded lists count, beside those that the plan cannot do without: the real shape, on a device that is not there.

use std::collections::BTreeMap;

use lily_bench::Point;
use lily_bench::floors::Work;
use lily_bench::synth::{Shape, Synth};
use lily_device::Limits;
use lily_gpu::kernels::common::StepShape;
use lily_gpu::program::{Head, Kind, Recording};
use lily_gpu::{Access, CommandList, Profile, Tuning, text};
use lily_ops::{Op, Plan};

fn record(plan: &Plan, profile: &str, tuning: &Tuning, rows: u32, context: u32) -> CommandList {
    let profile = Profile::named(profile).unwrap();
    let recording = Recording::virtual_of(plan, tuning, &profile).unwrap();
    let (rows_most, context_most) = (rows as usize, context as usize);
    let limits = Limits {
        slots: 1,
        context: context_most,
        rows: rows_most,
        outputs: 1,
        pages: context_most.div_ceil(lily_ops::plan::PAGE_TOKENS),
        undo: false,
    };
    let shape = StepShape { segments: vec![rows], outputs: 1, context };
    let kind = Kind { shape, tables: 0, head: Head::Sample { greedy: true } };
    recording.record_virtual(&limits, &kind).unwrap().0
}

/// Multiply-adds of the recurrence's kernels, and of all others.
fn split(list: &CommandList) -> (f64, f64) {
    let recurrence = |kernel: &str| {
        ["delta_scan", "delta_chunk", "scan_norm"].iter().any(|name| kernel.starts_with(name))
    };
    let sum = |wanted: bool| {
        let of = list.dispatches.iter().filter(|d| recurrence(d.kernel) == wanted);
        of.map(|d| d.work as f64).sum()
    };
    (sum(true), sum(false))
}

/// The same of the plan: three passes over the states for each token.
fn needed(plan: &Plan, point: Point, tokens: usize) -> (f64, f64) {
    let layers = plan.body.iter().filter(|n| matches!(n.op, Op::DeltaScan(_))).count();
    let recurrence = 3.0 * (layers * tokens * plan.state.recurrent_len()) as f64;
    (recurrence, Work::of(plan, point).macs - recurrence)
}

#[test]
fn lists_count_what_the_plan_multiplies() {
    let plan = Synth::new(Shape::qwen3_6_35b_a3b(40)).plan().unwrap();
    let on = Tuning::default();
    let by_tokens = Tuning::without("chunked_scan").unwrap();
    // Three passes by the plan. Token by token the state decays in one more. In chunks of 32 tokens matrix units multiply more for fewer
    // steps: states of 128 by 128 and what is f32 in two parts of bf16 each.
    let chunks =
        (4 * 4 * 146 * 2048 + 24 * 4 * 2048 + 32 * 16 * 32) as f64 / (32 * 128 * 128) as f64;
    for (rows, context, profile, tuning, passes) in [
        (4096, 4096, "h200", &on, chunks),
        (4096, 4096, "h200", &by_tokens, 4.0),
        (512, 4096, "h200", &on, chunks),
        (4096, 4096, "m5-max", &on, 4.0),
        (1, 4096, "h200", &on, 4.0),
        (1, 4096, "m5-max", &on, 4.0),
    ] {
        let list = record(&plan, profile, tuning, rows, context);
        let (recurrence, rest) = split(&list);
        // A chunk behind a context: what the whole takes less what the context takes.
        let point = |tokens| Point::Prefill { tokens };
        let (want_recurrence, want) = match (rows, context) {
            (1, _) => needed(&plan, Point::Decode { context: 4095, tokens: 1 }, 1),
            (r, c) if r == c => needed(&plan, point(4096), 4096),
            (r, c) => {
                let (all, before) = (c as usize, (c - r) as usize);
                let [(a, b), (x, y)] = [all, before].map(|n| needed(&plan, point(n), n));
                // Logits are asked for once in each of the two.
                let lm_head = (plan.vocab * 2048) as f64;
                (a - x, b - y + lm_head)
            }
        };
        let at = format!("{rows} rows on {profile}");
        assert_eq!(recurrence, want_recurrence / 3.0 * passes, "{at}: recurrence");
        // The plan's count has norms, convolution taps and gates' constants too, a multiply-add a token each: no kernel's products.
        let apart = rest / want - 1.0;
        assert!((-1.5e-3..=0.0).contains(&apart), "{at}: {rest} of {want}, {apart}");
    }
}

#[test]
fn kernels_without_products_count_none() {
    let plan = Synth::new(Shape::qwen3_6_35b_a3b(4)).plan().unwrap();
    let mut counted: BTreeMap<&str, bool> = BTreeMap::new();
    for (rows, context) in [(1, 4096), (8, 4096), (512, 4096), (1, 40_000)] {
        for name in Tuning::SWITCHES.iter().map(|(name, _)| *name) {
            let tuning = Tuning::without(name).unwrap();
            for profile in ["h200", "m4-max"] {
                for d in record(&plan, profile, &tuning, rows, context).dispatches {
                    *counted.entry(d.kernel).or_default() |= d.work > 0;
                }
            }
        }
    }
    let multiply = [
        "attention_fixed",
        "attention_split",
        "decode_experts",
        "delta_chunk",
        "delta_scan",
        "experts_",
        "flash_attention",
        "gemm_",
        "gemv_",
        "scan_norm",
    ];
    for (kernel, counts) in &counted {
        assert_eq!(*counts, multiply.iter().any(|m| kernel.starts_with(m)), "{kernel}");
    }
    assert!(counted.len() > 30, "{counted:?}");
}

/// What kernels that begin early read in front of their inputs, beside what is bound as `ReadAhead`: segments, headers, states; where those are bound.
const UNMARKED: [(&str, std::ops::RangeInclusive<usize>); 3] =
    [("scan_norm_4", 5..=7), ("scan_norm_8", 5..=7), ("conv_prep", 2..=4)];

#[test]
fn nothing_that_may_still_run_writes_what_an_early_kernel_reads() {
    let plan = Synth::new(Shape::qwen3_6_35b_a3b(8)).plan().unwrap();
    let mut looked = 0;
    let tunings: Vec<Tuning> = std::iter::once(Tuning::default())
        .chain(Tuning::SWITCHES.iter().filter_map(|(name, _)| Tuning::without(name)))
        .collect();
    for (tuning, rows) in tunings.iter().flat_map(|t| [1, 8, 40].map(|rows| (t, rows))) {
        let list = record(&plan, "h200", tuning, rows, 4096);
        let early = list.early_starts();
        let mut running: Vec<usize> = Vec::new();
        for stage in list.stages() {
            for i in stage.clone().filter(|i| early[*i]) {
                let d = &list.dispatches[i];
                let Some((_, ahead)) = UNMARKED.iter().find(|(k, _)| *k == d.kernel) else {
                    continue;
                };
                let written = running.iter().flat_map(|r| &list.dispatches[*r].bindings);
                for w in written.filter(|b| b.access == Access::Write) {
                    for a in &d.bindings[ahead.clone()] {
                        let meets = a.buffer == w.buffer
                            && a.hazard.start < w.hazard.end
                            && w.hazard.start < a.hazard.end;
                        assert!(!meets, "{} reads what is written by {running:?}", d.kernel);
                        looked += 1;
                    }
                }
            }
            let sooner = |i: usize| text::EARLIER.contains(&list.dispatches[i].kernel);
            if !stage.clone().any(sooner) {
                running.clear();
            }
            running.extend(stage);
        }
    }
    assert!(looked > 100, "{looked}");
}

/// Which kernels are never left out, of all steps of the real shape that lists are recorded for.
#[test]
fn kernels_that_others_find_their_memory_by() {
    let plan = Synth::new(Shape::qwen3_6_35b_a3b(4)).plan().expect("a plan");
    let limits = Limits::new(8, 512, 64);
    let tunings: Vec<Tuning> = std::iter::once(Tuning::default())
        .chain(Tuning::SWITCHES.iter().filter_map(|(name, _)| Tuning::without(name)))
        .collect();
    let mut found = std::collections::BTreeSet::new();
    let mut all = std::collections::BTreeSet::new();
    for (profile, tuning) in
        ["softgpu", "h200"].iter().flat_map(|p| tunings.iter().map(move |t| (p, t)))
    {
        let profile = Profile::named(profile).expect("known");
        let recording = Recording::virtual_of(&plan, tuning, &profile).expect("it can be recorded");
        for segments in [vec![1], vec![1; 8], vec![64]] {
            for head in [
                Head::Finish,
                Head::Sample { greedy: true },
                Head::Sample { greedy: false },
                Head::Rows { first: 0 },
            ] {
                let outputs = segments.len() as u32;
                let shape = StepShape { segments: segments.clone(), outputs, context: 512 };
                let kind = Kind { shape, tables: 0, head };
                let (list, _) =
                    recording.record_virtual(&limits, &kind).expect("it can be recorded");
                all.extend(list.dispatches.iter().map(|d| d.kernel));
                found.extend(
                    list.dispatches.iter().filter(|d| d.writes_indices()).map(|d| d.kernel),
                );
            }
        }
    }
    let found: Vec<&str> = found.into_iter().collect();
    let want = [
        "finish_step",
        "route_count",
        "route_scatter",
        "router_256",
        "sample_bins",
        "sample_pick",
        "sample_scan",
    ];
    assert_eq!(found, want);
    assert!(all.len() > 2 * found.len(), "{all:?}");
}
