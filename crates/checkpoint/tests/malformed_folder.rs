//! Every way in which the files of a checkpoint can fail to belong together.

mod common;

use std::fs;
use std::path::Path;

use common::*;
use lily_checkpoint::CheckpointError::{File, Folder, Index, Shards};
use lily_checkpoint::{
    Checkpoint, Dtype, FileProblem, FolderProblem, ForeignWeights, IndexProblem, JsonProblem,
    MAX_CONFIG_BYTES, ShardsProblem,
};

fn shards_problem(dir: impl AsRef<Path>) -> ShardsProblem {
    match refused(dir) {
        Shards { problem, .. } => problem,
        other => panic!("{other}"),
    }
}

fn index_problem(dir: impl AsRef<Path>) -> IndexProblem {
    match refused(dir) {
        Index { file, problem } => {
            assert!(file.ends_with("model.safetensors.index.json"), "{file}");
            problem
        }
        other => panic!("{other}"),
    }
}

// The shards as a set.

#[test]
fn missing_shards() {
    // By the index.
    let dir = sharded();
    index(&dir, &[("a", SHARD_1), ("b", SHARD_2), ("c", "model-3.safetensors")], 8);
    fs::remove_file(dir.path().join(SHARD_2)).unwrap();
    assert_eq!(
        shards_problem(&dir),
        ShardsProblem::Missing(vec![SHARD_2.into(), "model-3.safetensors".into()])
    );
    // By the numbering.
    let dir = sharded();
    fs::remove_file(dir.path().join(SHARD_1)).unwrap();
    assert_eq!(shards_problem(&dir), ShardsProblem::Missing(vec![SHARD_1.into()]));
}

#[cfg(unix)]
#[test]
fn a_dangling_link_is_not_taken_for_absent() {
    let dir = sharded();
    for name in ["model.safetensors.index.json", "config.json"] {
        let path = dir.path().join(name);
        let _ = fs::remove_file(&path);
        std::os::unix::fs::symlink("../../blobs/gone", &path).unwrap();
        match refused(&dir) {
            File { file, problem: FileProblem::Dangling { target } } => {
                assert!(file.ends_with(name) && target == "../../blobs/gone", "{file} {target}");
            }
            other => panic!("{other}"),
        }
        fs::remove_file(&path).unwrap();
    }
    fs::write(dir.path().join("config.json"), "{}").unwrap();
    std::os::unix::fs::symlink("gone", dir.path().join("tokenizer.json")).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let error = checkpoint.text_file("tokenizer.json").unwrap_err().to_string();
    assert!(error.contains("a link to gone") && error.contains("mend or delete"), "{error}");
    assert_eq!(checkpoint.text_file("tokenizer_config.json").unwrap(), None);
}

#[test]
fn the_config_alone() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), r#"{"a": 1, "a": 2}"#).unwrap();
    let error = Checkpoint::read_config(dir.path()).unwrap_err().to_string();
    assert!(error.contains("config.json") && error.contains("`a` occurs twice"), "{error}");
    fs::write(dir.path().join("config.json"), r#"{"a": 1}"#).unwrap();
    assert_eq!(Checkpoint::read_config(dir.path()).unwrap()["a"], 1);
}

#[cfg(unix)]
#[test]
fn dangling_symlink_is_a_missing_shard() {
    // What the Hugging Face cache looks like when a blob was deleted.
    let dir = sharded();
    fs::remove_file(dir.path().join(SHARD_2)).unwrap();
    std::os::unix::fs::symlink("../../blobs/gone", dir.path().join(SHARD_2)).unwrap();
    assert_eq!(shards_problem(&dir), ShardsProblem::Missing(vec![SHARD_2.into()]));
    index(&dir, &[("a", SHARD_1), ("b", SHARD_2)], 8);
    assert_eq!(shards_problem(&dir), ShardsProblem::Missing(vec![SHARD_2.into()]));
}

#[test]
fn shard_that_is_a_folder() {
    let dir = folder(&[("config.json", b"{}")]);
    fs::create_dir(dir.path().join("model.safetensors")).unwrap();
    assert!(matches!(refused(&dir), File { problem: FileProblem::NotAFile, .. }));
}

#[test]
fn single_file_and_numbered_shards_without_an_index() {
    let dir = sharded();
    fs::write(dir.path().join("model.safetensors"), shard(&[])).unwrap();
    assert_eq!(shards_problem(&dir), ShardsProblem::Ambiguous);
}

#[test]
fn shards_of_two_sets() {
    for other in ["model-00003-of-00003.safetensors", "model-1-of-2.safetensors"] {
        let dir = sharded();
        fs::write(dir.path().join(other), shard(&[])).unwrap();
        assert!(matches!(shards_problem(&dir), ShardsProblem::MixedSet { .. }), "{other}");
    }
}

#[test]
fn duplicate_tensor_across_shards() {
    let duplicate = ShardsProblem::DuplicateTensor {
        tensor: "a".into(),
        first: SHARD_1.into(),
        second: SHARD_2.into(),
    };
    let dir = sharded();
    let both = shard(&[("b", Dtype::U8, &[4]), ("a", Dtype::U8, &[4])]);
    fs::write(dir.path().join(SHARD_2), both).unwrap();
    assert_eq!(shards_problem(&dir), duplicate);
    index(&dir, &[("a", SHARD_1), ("b", SHARD_2)], 8);
    assert_eq!(shards_problem(&dir), duplicate);
}

#[test]
fn no_tensor_at_all() {
    assert_eq!(shards_problem(single(&raw("{}", b""))), ShardsProblem::NoTensors);
}

// The index.

#[test]
fn index_names_a_tensor_that_its_shard_lacks() {
    let dir = sharded();
    index(&dir, &[("a", SHARD_1), ("b", SHARD_2), ("c", SHARD_2)], 8);
    assert_eq!(
        index_problem(&dir),
        IndexProblem::MissingTensor { tensor: "c".into(), shard: SHARD_2.into() }
    );
}

#[test]
fn shard_holds_a_tensor_that_the_index_lacks() {
    let dir = sharded();
    let more = shard(&[("b", Dtype::U8, &[4]), ("x", Dtype::U8, &[1])]);
    fs::write(dir.path().join(SHARD_2), more).unwrap();
    index(&dir, &[("a", SHARD_1), ("b", SHARD_2)], 8);
    assert_eq!(
        index_problem(&dir),
        IndexProblem::UnlistedTensor { tensor: "x".into(), shard: SHARD_2.into() }
    );
}

#[test]
fn index_assigns_a_tensor_to_another_shard() {
    let dir = sharded();
    index(&dir, &[("a", SHARD_2), ("b", SHARD_1)], 8);
    assert_eq!(
        index_problem(&dir),
        IndexProblem::WrongShard {
            tensor: "a".into(),
            indexed: SHARD_2.into(),
            actual: SHARD_1.into()
        }
    );
}

#[test]
fn total_size_contradicts_the_tensors() {
    let dir = sharded();
    index(&dir, &[("a", SHARD_1), ("b", SHARD_2)], 9);
    assert_eq!(index_problem(&dir), IndexProblem::TotalSize { indexed: 9, actual: 8 });
}

#[test]
fn shard_names_cannot_leave_the_folder() {
    let outside = folder(&[("x.safetensors", &shard(&[("a", Dtype::U8, &[4])]))]);
    let absolute = outside.path().join("x.safetensors");
    let long = format!("{}.safetensors", "n".repeat(300));
    for name in [
        &long,
        absolute.to_str().unwrap(),
        "../x.safetensors",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "C:x.safetensors",
        "..",
        ".",
        "",
        "x\0.safetensors",
        "x.bin",
    ] {
        let dir = sharded();
        index(&dir, &[("a", name)], 4);
        assert_eq!(index_problem(&dir), IndexProblem::ShardName { shard: name.into() });
    }
}

#[test]
fn malformed_index() {
    let problem = |text: &[u8]| {
        let dir = sharded();
        fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
        index_problem(&dir)
    };
    let json = IndexProblem::Json;
    assert_eq!(problem(b"\xff"), json(JsonProblem::NotUtf8 { at: 0 }));
    assert_eq!(problem(b"[]"), json(JsonProblem::NotAnObject));
    assert!(matches!(problem(b"{"), IndexProblem::Json(JsonProblem::Syntax(_))));
    let text = format!(r#"{{"weight_map":{{"a":"{SHARD_1}","b":"{SHARD_2}","a":"{SHARD_2}"}}}}"#);
    assert_eq!(problem(text.as_bytes()), json(JsonProblem::DuplicateKey("a".into())));
    for text in ["{}", r#"{"weight_map":{}}"#, r#"{"weight_map":["a"]}"#] {
        assert_eq!(problem(text.as_bytes()), IndexProblem::NoWeightMap, "{text}");
    }
    let text = br#"{"weight_map":{"a":1}}"#;
    assert_eq!(problem(text), IndexProblem::Entry { tensor: "a".into() });
    let text = br#"{"metadata":1,"weight_map":{"a":"a.safetensors"}}"#;
    assert_eq!(problem(text), IndexProblem::Metadata);
    let text = br#"{"metadata":{"total_size":"8"},"weight_map":{"a":"a.safetensors"}}"#;
    assert_eq!(problem(text), IndexProblem::TotalSizeType);
}

// Config and text files.

fn config_problem(config: &[u8]) -> FileProblem {
    let weights = shard(&[("a", Dtype::U8, &[4])]);
    match refused(folder(&[("config.json", config), ("model.safetensors", &weights)])) {
        File { file, problem } => {
            assert!(file.ends_with("config.json"), "{file}");
            problem
        }
        other => panic!("{other}"),
    }
}

#[test]
fn config_missing() {
    let dir = folder(&[("model.safetensors", &shard(&[("a", Dtype::U8, &[4])]))]);
    assert!(matches!(
        refused(&dir),
        File { file, problem: FileProblem::Missing } if file.ends_with("config.json")
    ));
}

#[test]
fn config_malformed() {
    let json = FileProblem::Json;
    assert_eq!(config_problem(b"{\"\xff\"}"), json(JsonProblem::NotUtf8 { at: 2 }));
    assert_eq!(config_problem(b"[]"), json(JsonProblem::NotAnObject));
    assert_eq!(
        config_problem(br#"{"text_config":{"layers":4,"layers":8}}"#),
        json(JsonProblem::DuplicateKey("layers".into()))
    );
    for bad in ["", "{", "{\"a\":NaN}"] {
        assert!(
            matches!(config_problem(bad.as_bytes()), FileProblem::Json(JsonProblem::Syntax(_))),
            "{bad}"
        );
    }
    let mut deep = br#"{"a":"#.repeat(1000);
    deep.extend(b"1");
    deep.extend(b"}".repeat(1000));
    assert!(matches!(config_problem(&deep), FileProblem::Json(JsonProblem::Syntax(_))));
}

#[test]
fn config_too_large() {
    let cap = MAX_CONFIG_BYTES as usize;
    let mut config = b"{}".to_vec();
    config.resize(cap + 1, b' ');
    assert_eq!(config_problem(&config), FileProblem::TooLarge { cap: MAX_CONFIG_BYTES });
    let weights = shard(&[("a", Dtype::U8, &[4])]);
    let dir = folder(&[("config.json", &config[..cap]), ("model.safetensors", &weights)]);
    assert!(Checkpoint::open(dir.path()).is_ok());
}

#[test]
fn text_file_errors() {
    let weights = shard(&[("a", Dtype::U8, &[4])]);
    let dir = folder(&[
        ("config.json", b"{}"),
        ("model.safetensors", &weights),
        ("tokenizer.json", b"ab\xffc"),
    ]);
    fs::create_dir(dir.path().join("sub")).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let problem = |name: &str| match checkpoint.text_file(name) {
        Err(File { problem, .. }) => problem,
        other => panic!("{other:?}"),
    };
    assert_eq!(problem("tokenizer.json"), FileProblem::NotUtf8 { at: 2 });
    assert_eq!(problem("sub"), FileProblem::NotAFile);
    for name in ["../config.json", "/etc/hostname", "sub/x", "", ".."] {
        assert_eq!(problem(name), FileProblem::BadName, "{name}");
    }
    assert_eq!(checkpoint.text_file("chat_template.jinja").unwrap(), None);
}

// The folder.

#[test]
fn folder_missing_or_not_a_folder() {
    let dir = single(&shard(&[("a", Dtype::U8, &[4])]));
    let problem = |path: &str| match refused(dir.path().join(path)) {
        Folder { problem, .. } => problem,
        other => panic!("{other}"),
    };
    assert!(matches!(problem("nowhere"), FolderProblem::Missing));
    assert!(matches!(problem("model.safetensors"), FolderProblem::NotAFolder));
    // A name too long for the file system: unreadable for root too.
    assert!(matches!(problem(&"n".repeat(300)), FolderProblem::Unreadable(_)));
}

#[cfg(unix)]
#[test]
fn folder_unreadable() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let set_mode = |mode| fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode));
    set_mode(0o100).unwrap();
    let root_reads_all = fs::read_dir(dir.path()).is_ok();
    if !root_reads_all {
        let error = refused(&dir);
        assert!(matches!(error, Folder { problem: FolderProblem::Unreadable(_), .. }));
    }
    set_mode(0o700).unwrap();
}

#[test]
fn folder_without_weights() {
    for (file, expected) in [
        ("README.md", None),
        ("model-Q4_K_M.gguf", Some(ForeignWeights::Gguf)),
        ("pytorch_model.bin", Some(ForeignWeights::PyTorch)),
        ("weights.npz", Some(ForeignWeights::Npz)),
        ("adapter.safetensors", Some(ForeignWeights::OtherSafetensors)),
    ] {
        // No config.json either: the wrong format is the more useful thing to say.
        let error = refused(folder(&[(file, b"x")]));
        let Folder { problem: FolderProblem::NoWeights { found }, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(*found, expected, "{file}");
        if expected == Some(ForeignWeights::Gguf) {
            assert!(error.hint().contains(".gguf"));
        }
    }
}
