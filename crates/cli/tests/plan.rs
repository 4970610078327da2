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

#[test]
fn what_it_cannot_plan_is_said() {
    let unknown = lily(&["plan", "--device", "abacus"]);
    assert_eq!(unknown.code, Some(2));
    assert!(unknown.stderr.contains("m5-max"), "{}", unknown.stderr);
    let switch = lily(&["plan", "--without", "gravity"]);
    assert!(switch.stderr.contains("fuse_norm"), "{}", switch.stderr);
    let off = lily(&["plan", "--without", "concurrent", "--json"]);
    assert_eq!(off.code, Some(0), "{}", off.stderr);
    let plan: Value = serde_json::from_str(&off.stdout).expect("one JSON object");
    assert_eq!(plan["decode"]["dispatches"], plan["decode"]["stages"]);
}
