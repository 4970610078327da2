//! Which chains of the real model's plan are fused, and that their order is right.

use std::collections::BTreeMap;
use std::sync::Arc;

use lily_bench::synth::Shape;
use lily_device::{Device, Limits, PrepareError};
use lily_gpu::fuse::{Group, groups};
use lily_gpu::program::{Head, Kind, Recording};
use lily_gpu::report::{StepReport, decode};
use lily_gpu::{Driver, GpuDevice, Profile, StepShape, Tuning};
use lily_model::{Precision, plan_of_config};
use lily_ops::{Op, Plan};
use lily_softgpu::{Options, SoftDriver};

fn plan() -> Plan {
    let config = Shape::qwen3_6_35b_a3b(Shape::REAL_LAYERS).config();
    plan_of_config("real", &config, Precision::Standard).expect("the real config").1
}

fn kind(plan: &Plan, group: &Group) -> String {
    match group {
        Group::Op(i) => plan.nodes().nth(*i).map_or("none", |n| n.op.name()).into(),
        Group::Projections { gated, .. } => {
            format!("projections of {}", if gated.is_some() { "moe" } else { "mixer" })
        }
        Group::ConvPrep { .. } => "conv prep".into(),
        Group::ScanNorm { .. } => "scan norm".into(),
        Group::GatedAttention { .. } => "gated attention".into(),
        Group::ProjectAdd { .. } => "project add".into(),
        Group::ExpertsOut { .. } => "experts out".into(),
    }
}

/// Each operation is in one group, and no group reads what a later one writes.
fn check_order(plan: &Plan, groups: &[Group]) {
    let ops: Vec<&Op> = plan.nodes().map(|n| &n.op).collect();
    let mut written = vec![false; plan.values.len()];
    let mut seen = vec![false; ops.len()];
    for group in groups {
        for &i in &group.nodes() {
            assert!(!std::mem::replace(&mut seen[i], true), "operation {i} is in two groups");
            let inner: Vec<_> = group.nodes().iter().flat_map(|n| ops[*n].writes()).collect();
            for v in ops[i].reads() {
                assert!(
                    written[v.0 as usize] || inner.contains(&v),
                    "{group:?} reads {v:?} too early"
                );
            }
        }
        for &i in &group.nodes() {
            ops[i].writes().iter().for_each(|v| written[v.0 as usize] = true);
        }
    }
    assert!(seen.iter().all(|s| *s), "an operation is in no group");
}

fn counts(tuning: &Tuning, decode: bool) -> BTreeMap<String, usize> {
    let plan = plan();
    let groups = groups(&plan, tuning, decode);
    check_order(&plan, &groups);
    let mut counts = BTreeMap::new();
    for group in &groups {
        *counts.entry(kind(&plan, group)).or_default() += 1;
    }
    counts
}

#[test]
fn chains_of_a_decode_step() {
    let want: BTreeMap<String, usize> = [
        ("embed", 1),
        ("projections of mixer", 40),
        ("conv prep", 30),
        ("scan norm", 30),
        ("attention_prep", 10),
        ("gated attention", 10),
        ("project add", 40),
        ("projections of moe", 40),
        ("router", 40),
        ("experts_in", 40),
        ("experts out", 40),
        ("gather_rows", 1),
        ("rms_norm", 1),
        ("linear", 1),
    ]
    .map(|(k, n)| (k.to_string(), n))
    .into();
    assert_eq!(counts(&Tuning::default(), true), want);
}

#[test]
fn chains_of_a_prefill_step() {
    let counts = counts(&Tuning::default(), false);
    assert_eq!(counts["conv prep"], 30);
    assert_eq!(counts["project add"], 40);
    assert_eq!(counts["moe_combine"], 40);
    assert!(!counts.contains_key("scan norm") && !counts.contains_key("projections of moe"));
}

#[test]
fn a_switch_takes_its_chains_apart() {
    let off = |name: &str| counts(&Tuning::without(name).unwrap(), true);
    assert_eq!(off("fuse_norm")["rms_norm"], 81);
    assert_eq!(off("fuse_conv")["causal_conv"], 30);
    assert_eq!(off("fuse_scan_norm")["gated_rms_norm"], 30);
    assert_eq!(off("fuse_experts_out")["moe_combine"], 40);
}

/// The decode step of the real shape at 4,096 tokens, as a GPU of either kind records it.
#[test]
fn the_recorded_decode_step() {
    for name in ["metal", "cuda"] {
        let profile = Profile::named(name).expect("a known profile");
        let recording = Recording::virtual_of(&plan(), &Tuning::default(), &profile).unwrap();
        let step = decode(&recording, 4096).unwrap();
        let ratio = step.bytes as f64 / step.bytes_floor as f64;
        println!("{name}: {} dispatches, {} stages, {ratio:.4}", step.dispatches, step.stages);
        assert!(step.dispatches <= 420, "{name}: {} dispatches", step.dispatches);
        assert!(step.stages <= 340, "{name}: {} stages", step.stages);
        assert!(ratio <= 1.03, "{name}: {ratio} of the floor's bytes");
    }
}

/// Between powers of two it is the list of the next one that a step runs: here with the launches of slots from 32K tokens on.
#[test]
fn a_step_is_recorded_for_its_bucket() {
    let profile = Profile::named("cuda").expect("a known profile");
    let recording = Recording::virtual_of(&plan(), &Tuning::default(), &profile).unwrap();
    let [small, between, bucket] = [4096, 20_000, 32_768].map(|n| decode(&recording, n).unwrap());
    assert_eq!(between.dispatches, small.dispatches + 10);
    let list = |r: &StepReport| (r.dispatches, r.stages, r.scratch);
    assert_eq!(list(&between), list(&bucket));
    // Bytes are those of its own tokens.
    let ratio = between.bytes as f64 / between.bytes_floor as f64;
    assert!(
        small.bytes < between.bytes && between.bytes < bucket.bytes && ratio <= 1.03,
        "{ratio}"
    );
}

/// Each switch changes what is recorded, or, where it is no matter of the plan, the text's kernels.
#[test]
fn a_switch_changes_the_recorded_steps() {
    let profile = Profile::named("cuda").expect("a known profile");
    let kernels = |tuning: &Tuning, rows: u32, context: u32| {
        let recording = Recording::virtual_of(&plan(), tuning, &profile).unwrap();
        let limits = Limits::new(1, context as usize, rows as usize);
        let shape = StepShape { segments: vec![rows], outputs: 1, context };
        let kind = Kind { shape, tables: 0, head: Head::Sample { greedy: true } };
        let (list, scratch) = recording.record_virtual(&limits, &kind).unwrap();
        let names: Vec<&str> = list.dispatches.iter().map(|d| d.kernel).collect();
        let args: Vec<Vec<u8>> = list.dispatches.iter().map(|d| d.args.clone()).collect();
        (names, args, list.stages.len(), scratch)
    };
    let both = |tuning: &Tuning| (kernels(tuning, 1, 65_536), kernels(tuning, 512, 4096));
    let on = both(&Tuning::default());
    // Handed to the host by the program, not by what is recorded here: see the tests of whole models.
    let elsewhere = ["token_handoff"];
    for (name, _) in Tuning::SWITCHES.iter().filter(|(name, _)| !elsewhere.contains(name)) {
        let mut off = Tuning::without(name).unwrap();
        // The scan token by token, whose switch it is, has the long segments only without chunks.
        let on = match *name == "register_scan" {
            true => {
                off.chunked_scan = false;
                &both(&Tuning::without("chunked_scan").unwrap())
            }
            false => &on,
        };
        assert!(both(&off) != *on, "{name} changes nothing that is recorded");
    }
}

/// Sizes that no kernel is right for are refused by name when a model is accepted, and not computed wrongly.
#[test]
fn sizes_that_no_kernel_takes_are_refused() {
    let heads = |head_dim, mrope_section| Shape { head_dim, mrope_section, ..Shape::tiny() };
    let cases = [
        (heads(64, [3, 3, 2]), None),
        (heads(96, [4, 4, 4]), None),
        // 64 of 80 elements would be computed.
        (heads(80, [4, 3, 3]), Some("heads of 80 elements")),
        // More threadgroup memory than there is.
        (heads(512, [22, 21, 21]), Some("heads of 512 elements")),
        (Shape { linear_key_dim: 48, ..Shape::tiny() }, Some("heads of 48 × 32")),
        (Shape { linear_value_dim: 80, ..Shape::tiny() }, Some("heads of 32 × 80")),
    ];
    for (shape, refused) in cases {
        let plan = plan_of_config("tiny", &shape.config(), Precision::Standard).unwrap().1;
        let options = Options::default();
        let recording =
            Recording::virtual_of(&plan, &Tuning::default(), &options.profile).map(drop);
        let profile = options.profile.clone();
        let open = move || Ok(Box::new(SoftDriver::new(options.clone())) as Box<dyn Driver>);
        let device = GpuDevice::new(profile, Tuning::default(), Box::new(open));
        let prepared = device.prepare(Arc::new(plan), Vec::new(), Limits::new(1, 64, 16));
        let prepared = prepared.err();
        match refused {
            Some(what) => {
                let why = recording.unwrap_err();
                assert!(why.contains(what) && why.contains("--device cpu"), "{why}");
                let refusal = matches!(&prepared, Some(PrepareError::Unsupported { operations, .. }) if *operations == why);
                assert!(refusal, "{prepared:?}");
            }
            None => {
                assert_eq!(recording, Ok(()));
                assert!(prepared.is_none(), "{prepared:?}");
            }
        }
    }
}

/// Experts of a decode step start early where they read nothing ahead that the stage before wrote: with the chain of the second projection
/// they all do, without it the second projection's input is of the stage before.
#[test]
fn experts_that_start_early() {
    let starts = |tuning: &Tuning, op: &str| -> Vec<bool> {
        let profile = Profile::named("h200").expect("a known profile");
        let recording = Recording::virtual_of(&plan(), tuning, &profile).unwrap();
        let limits = Limits::new(1, 4096, 1);
        let shape = StepShape { segments: vec![1], outputs: 1, context: 4096 };
        let kind = Kind { shape, tables: 0, head: Head::Sample { greedy: true } };
        let (list, _) = recording.record_virtual(&limits, &kind).unwrap();
        let early = list.early_starts();
        let experts = list.dispatches.iter().zip(early);
        experts
            .filter(|(d, _)| d.op == op && d.kernel.starts_with("decode_experts"))
            .map(|(_, early)| early)
            .collect()
    };
    let on = Tuning::default();
    assert_eq!(starts(&on, "experts_in"), [true; 40]);
    assert_eq!(starts(&on, "experts out + shared + residual"), [true; 40]);
    let apart = Tuning::without("fuse_experts_out").expect("a switch");
    assert_eq!(starts(&apart, "experts_in"), [true; 40]);
    assert_eq!(starts(&apart, "experts_out"), [false; 40]);
}

/// Routing costs two launches a layer on the device, and no wait; by the host a wait in each layer of a chunk.
#[test]
fn what_routing_costs() {
    for name in ["metal", "h200"] {
        let profile = Profile::named(name).expect("a known profile");
        let recorded = |tuning: &Tuning| {
            let recording = Recording::virtual_of(&plan(), tuning, &profile).unwrap();
            let limits = Limits::new(1, 4096, 512);
            let shape = StepShape { segments: vec![512], outputs: 1, context: 4096 };
            let kind = Kind { shape, tables: 0, head: Head::Sample { greedy: true } };
            recording.record_virtual(&limits, &kind).unwrap().0
        };
        let on = recorded(&Tuning::default());
        let off = recorded(&Tuning::without("gpu_routing").expect("a switch"));
        assert_eq!((on.breaks.len(), off.breaks.len()), (0, 40), "{name}: the host steps in");
        assert_eq!(on.dispatches.len() - off.dispatches.len(), 2 * 40, "{name}: launches");
    }
}
