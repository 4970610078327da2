//! `lily inspect`, `lily bench synth`, `lily licenses`, `lily --version`.

mod common;

use std::fs;

use common::{fails, file, fixture_without, json, lily, repository};

#[test]
fn the_demo_model() {
    let value = json(&["inspect", "--json", "--context", "4096", "--threads", "1"]);
    assert_eq!(value["model"], "lily-demo-4bit");
    assert_eq!(value["shape"]["layers"], 8);
    assert_eq!(value["tensors"]["layout"], "MLX");
    assert_eq!(value["tensors"]["claimed"], value["tensors"]["count"]);
    assert!(value["tensors"]["list"].is_null() && value["verify"].is_null());
    let sum = |field: &str| -> u64 {
        let classes = value["weights"]["classes"].as_array().unwrap();
        classes.iter().map(|c| c[field].as_u64().unwrap()).sum()
    };
    assert_eq!(value["weights"]["bytes"], sum("bytes"));
    assert_eq!(value["weights"]["bytes_per_token"], sum("bytes_per_token"));
    let memory = &value["memory"];
    let parts = ["weights", "copies", "kv", "state", "scratch"];
    let total: u64 = parts.iter().map(|p| memory[p].as_u64().unwrap()).sum();
    // What was copied need not stay mapped.
    let once = memory["weights_read_once"].as_u64().unwrap();
    assert_eq!(once, memory["copies"].as_u64().unwrap());
    assert_eq!(memory["total"], total - once);
    assert_eq!(memory["kv"], 4096 * memory["kv_per_token"].as_u64().unwrap());
    // Two layers of K and V of one head of 256 elements, bf16.
    assert_eq!(memory["kv_per_token"], 2 * 2 * 256 * 2);
    let text = lily(&["inspect"]).stdout;
    for part in
        ["routed experts", "4-bit", "8-bit", "bf16", "read per token", "KV cache", "none skipped"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let folder = repository().join("models/demo");
    let same = json(&["inspect", folder.to_str().unwrap(), "--json"]);
    assert_eq!(same["weights"], value["weights"]);
}

#[test]
fn skipped_tensors_and_the_list() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture_without(&dir, "tiny-c", &[]);
    let value = json(&["inspect", &model, "--tensors", "--json"]);
    let skipped = &value["tensors"]["skipped"][0];
    assert_eq!((&skipped["rule"], &skipped["tensors"]), (&"vision tower".into(), &4.into()));
    let list = value["tensors"]["list"].as_array().unwrap();
    assert_eq!(list.len() as u64, value["tensors"]["count"].as_u64().unwrap());
    assert!(list.iter().all(|t| t["role"].is_string() != t["skipped"].is_string()));
    let text = lily(&["inspect", &model, "--tensors"]).stdout;
    assert!(text.contains("skipped as vision tower: 4 of"), "{text}");
    assert!(text.contains("language_model.model.norm.weight BF16 [192] -> norm"), "{text}");
}

#[test]
fn verification() {
    let value = json(&["inspect", "demo", "--verify", "--json"]);
    assert_eq!(value["verify"]["clean"], true);
    let dir = tempfile::tempdir().unwrap();
    let model = fixture_without(&dir, "tiny-c", &[]);
    assert!(lily(&["inspect", &model, "--verify"]).stdout.contains("clean"));
    // A wrong checksum.
    let list = dir.path().join("checkpoint/SHA256SUMS");
    fs::write(&list, format!("{}  model-00001-of-00003.safetensors\n", "0".repeat(64))).unwrap();
    let run = lily(&["inspect", &model, "--verify"]);
    assert_eq!(run.code, Some(1), "{run:?}");
    assert!(run.stdout.contains("NOT clean") && run.stderr.contains("hint: "), "{run:?}");
    // Files that are no weights are compared too; one that is not there is told.
    fs::write(&list, format!("{0}  config.json\n{0}  README.md\n", "0".repeat(64))).unwrap();
    let run = lily(&["inspect", &model, "--verify"]);
    assert_eq!(run.code, Some(1), "{run:?}");
    assert!(run.stdout.contains("`config.json`  (DIFFERS"), "{run:?}");
    assert!(run.stdout.contains("`README.md` is in SHA256SUMS and not in the folder"), "{run:?}");
    fs::remove_file(list).unwrap();
    // A scale that is not finite: the last two bytes of a file of bf16 and u32 tensors.
    let index =
        fs::read_to_string(dir.path().join("checkpoint/model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_str(&index).unwrap();
    let name = index["weight_map"]
        .as_object()
        .unwrap()
        .iter()
        .find(|(n, _)| n.ends_with("in_proj_z.scales"));
    let path = dir.path().join("checkpoint").join(name.unwrap().1.as_str().unwrap());
    let mut bytes = fs::read(&path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let entries: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let at = 8 + header + entries[name.unwrap().0]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[at..at + 2].copy_from_slice(&0x7FC0u16.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let run = lily(&["inspect", &model, "--verify", "--json"]);
    assert_eq!(run.code, Some(1), "{run:?}");
    let value: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    assert_eq!(value["verify"]["non_finite"][0]["tensor"], name.unwrap().0.as_str());
}

#[test]
fn a_config_alone_has_budgets() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("synth");
    let out = out.to_str().unwrap();
    let synth = ["bench", "synth", "--layers", "40", "--config-only", "--out", out];
    assert_eq!(lily(&synth).code, Some(0));
    let value = json(&["inspect", out, "--json", "--context", "32768"]);
    assert_eq!(value["weights"]["bytes"], 19_508_787_456u64);
    assert_eq!(value["weights"]["bytes_per_token"], 1_669_561_728u64);
    assert_eq!(value["memory"]["kv"], 20_480u64 * 32_768);
    assert_eq!(value["memory"]["state"], 62_914_560u64 + 1_474_560);
    assert!(value["tensors"].is_null());
    assert!(lily(&["inspect", out]).stdout.contains("config.json only"));
    fails(&["inspect", out, "--verify"], 1, &["no tensors", "hint: "]);
    fails(&synth, 1, &["is not empty", "empty this one first"]);
    fails(&["bench", "synth", "--layers", "0", "--out", "x"], 2, &["1..=1024"]);
    let skewed = ["bench", "synth", "--layers", "1", "--router-skew", "-1", "--out", "x"];
    fails(&skewed, 1, &["must lie between 0 (even) and 10"]);
}

#[test]
fn what_is_no_checkpoint() {
    fails(&["inspect", "/no/such/folder"], 1, &["no such folder", "check the spelling"]);
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir, "config.json", "{}");
    fails(&["inspect", &path], 1, &["file, not a folder"]);
    let folder = dir.path().to_str().unwrap();
    fails(&["inspect", folder], 1, &["model_type is missing", "take the config.json"]);
    file(&dir, "config.json", "{");
    fails(&["inspect", folder], 1, &["config.json: not valid JSON", "download the file again"]);
}

#[test]
fn versions_and_licences() {
    assert!(lily(&["--version"]).stdout.starts_with("lily "));
    let text = lily(&["licenses"]).stdout;
    for part in ["Apache", "GeoNames", "WordNet"] {
        assert!(text.contains(part), "{part}");
    }
}
