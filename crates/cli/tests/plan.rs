//! `lily plan`: the steps that a GPU would record.

mod common;

use common::lily;
use serde_json::Value;

#[test]
fn steps_of_a_config_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("full").display().to_string();
    let made = lily(&["bench", "synth", "--layers", "40", "--config-only", "--out", &out]);
    assert_eq!(made.code, Some(0), "{}", made.stderr);
    for device in ["metal", "cuda"] {
        let run =
            lily(&["plan", "--model", &out, "--device", device, "--context", "4096", "--json"]);
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        let plan: Value = serde_json::from_str(&run.stdout).expect("one JSON object");
        for phase in ["decode", "prefill"] {
            for figure in ["dispatches", "stages", "bytes", "bytes_floor"] {
                assert!(plan[phase][figure].as_u64().is_some_and(|n| n > 0), "{phase} {figure}");
            }
        }
        let decode = |figure: &str| plan["decode"][figure].as_f64().expect("a number");
        assert!(decode("dispatches") <= 420.0 && decode("stages") <= 340.0, "{device}");
        assert!(decode("bytes") / decode("bytes_floor") <= 1.03, "{device}");
    }
}

/// A threshold changes what is recorded.
#[test]
fn thresholds_can_be_others() {
    let chunk = |more: &[&str]| -> Value {
        let args = ["plan", "--context", "64", "--chunk", "8", "--json"];
        let run = lily(&[&args[..], more].concat());
        assert_eq!(run.code, Some(0), "{}", run.stderr);
        let plan: Value = serde_json::from_str(&run.stdout).expect("one JSON object");
        plan["prefill"].clone()
    };
    let now = chunk(&[]);
    assert_eq!(now, chunk(&["--threshold", "expert_rows=8"]));
    assert_ne!(now, chunk(&["--threshold", "expert_rows=4"]), "8 rows grouped by expert");
}

#[test]
fn what_it_cannot_plan_is_said() {
    let unknown = lily(&["plan", "--device", "abacus"]);
    assert_eq!(unknown.code, Some(2));
    assert!(unknown.stderr.contains("m5-max"), "{}", unknown.stderr);
    let switch = lily(&["plan", "--without", "gravity"]);
    assert!(switch.stderr.contains("fuse_norm"), "{}", switch.stderr);
    for (given, said) in
        [("gravity=3", "split_groups"), ("gemv_lanes=5", "power of two"), ("flash_rows", "NAME=N")]
    {
        let refused = lily(&["plan", "--threshold", given]);
        assert_eq!(refused.code, Some(2), "{refused:?}");
        assert!(refused.stderr.contains(said), "{}", refused.stderr);
    }
    let off = lily(&["plan", "--without", "concurrent", "--json"]);
    assert_eq!(off.code, Some(0), "{}", off.stderr);
    let plan: Value = serde_json::from_str(&off.stdout).expect("one JSON object");
    assert_eq!(plan["decode"]["dispatches"], plan["decode"]["stages"]);
}
