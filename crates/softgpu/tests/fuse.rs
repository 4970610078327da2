//! Which chains of the real model's plan are fused, and that their order is right.

use std::collections::BTreeMap;

use lily_bench::synth::Shape;
use lily_gpu::Tuning;
use lily_gpu::fuse::{Group, groups};
use lily_model::{Precision, plan_of_config};
use lily_ops::{Op, Plan};

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
fn decode() {
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
fn prefill() {
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
