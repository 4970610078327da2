//! Well-formed checkpoints: what they give, and what `verify` says about them.

mod common;

use std::collections::BTreeMap;
use std::fs;

use common::*;
use lily_checkpoint::write::{HeaderStyle, SafetensorsWriter, TensorSpec, WriteError};
use lily_checkpoint::{
    Checkpoint, CheckpointError, ChecksumStatus, Dtype, ListedStatus, NonFinite, TensorBytes,
    VerifyReport, parse_header,
};

fn names(checkpoint: &Checkpoint) -> Vec<&str> {
    checkpoint.tensors().map(|tensor| tensor.name.as_str()).collect()
}

#[test]
fn single_file() {
    let weights =
        shard(&[("z", Dtype::BF16, &[2, 3]), ("a", Dtype::U32, &[]), ("e", Dtype::F64, &[0])]);
    let dir = folder(&[
        ("config.json", br#"{"model_type":"tiny"}"#),
        ("model.safetensors", &weights),
        ("chat_template.jinja", "é".as_bytes()),
    ]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.source(), dir.path().display().to_string());
    assert_eq!(checkpoint.config()["model_type"], "tiny");
    assert_eq!(checkpoint.text_file("chat_template.jinja").unwrap().unwrap(), "é");
    assert_eq!(checkpoint.text_file("tokenizer.json").unwrap(), None);
    assert_eq!(names(&checkpoint), ["a", "e", "z"]);
    assert_eq!(checkpoint.total_bytes(), 16);

    let z = checkpoint.get("z").unwrap();
    assert_eq!((z.dtype, z.shape.as_slice()), (Dtype::BF16, &[2, 3][..]));
    let expected: Vec<u8> = (0..12).collect();
    assert_eq!(z.data.map(), expected);
    let mut copy = [0; 12];
    z.data.read_into(&mut copy).unwrap();
    assert_eq!(copy[..], expected);
    assert_eq!(z.data.slice(4, 3).unwrap().map(), [4, 5, 6]);
    assert_eq!(TensorBytes::from(z.data.clone()).as_slice(), expected);
    assert!(checkpoint.get("e").unwrap().data.is_empty());
    assert!(checkpoint.get("y").is_none());

    let [shard] = checkpoint.shards() else { panic!("one shard") };
    assert_eq!((shard.name(), shard.len()), ("model.safetensors", weights.len() as u64));
    assert_eq!(shard.path(), Some(dir.path().join("model.safetensors").as_path()));
}

#[test]
fn shards_without_an_index() {
    let dir = sharded();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(names(&checkpoint), ["a", "b"]);
    assert_eq!(checkpoint.get("b").unwrap().data.shard().name(), SHARD_2);
    assert_eq!(checkpoint.shards().len(), 2);
}

#[test]
fn index_decides_which_files_count() {
    let dir = sharded();
    // Neither of these is named by the index, so neither is looked at.
    fs::write(dir.path().join("model.safetensors"), b"stale").unwrap();
    fs::write(dir.path().join("model-00003-of-00003.safetensors"), b"stale").unwrap();
    index(&dir, &[("a", SHARD_1), ("b", SHARD_2)], 8);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(names(&checkpoint), ["a", "b"]);
    assert_eq!(checkpoint.total_bytes(), 8);
}

#[cfg(unix)]
#[test]
fn symlinked_files() {
    let blobs = single(&shard(&[("a", Dtype::U8, &[4])]));
    let dir = folder(&[]);
    for name in ["config.json", "model.safetensors"] {
        std::os::unix::fs::symlink(blobs.path().join(name), dir.path().join(name)).unwrap();
    }
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.get("a").unwrap().data.map(), [0, 1, 2, 3]);
}

#[test]
fn data_at_every_alignment() {
    for padding in 0..8 {
        let header = r#"{"a":{"dtype":"F64","shape":[2],"data_offsets":[0,16]}}"#;
        let header = header.to_owned() + &" ".repeat(padding);
        let mut data = 1.5f64.to_le_bytes().to_vec();
        data.extend(f64::NAN.to_le_bytes());
        let dir = single(&raw(header, &data));
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        assert_eq!(checkpoint.get("a").unwrap().data.map(), data);
        let report = checkpoint.verify(|_| ()).unwrap();
        assert_eq!((report.non_finite[0].count, report.non_finite[0].first_index), (1, 1));
    }
}

#[test]
fn embedded() {
    let weights: &'static [u8] = shard(&[("a", Dtype::I16, &[2])]).leak();
    let files: [(&str, &'static [u8]); 3] =
        [("config.json", br#"{"n":1}"#), ("tokenizer.json", b"{}"), ("model.safetensors", weights)];
    let checkpoint = Checkpoint::from_static("demo", &files).unwrap();
    assert_eq!(checkpoint.source(), "demo");
    assert_eq!(checkpoint.config()["n"], 1);
    let text = checkpoint.text_file("tokenizer.json").unwrap();
    assert!(matches!(text, Some(std::borrow::Cow::Borrowed("{}"))));
    let data = &checkpoint.get("a").unwrap().data;
    assert_eq!(data.map(), [0, 1, 2, 3]);
    assert_eq!(data.map().as_ptr(), weights[weights.len() - 4..].as_ptr(), "no copy");
    assert_eq!(data.shard().path(), None);
    assert!(checkpoint.verify(|_| ()).unwrap().is_clean());

    let error = Checkpoint::from_static("demo", &files[..2]).unwrap_err();
    assert!(matches!(error, CheckpointError::Folder { .. }), "{error}");
}

#[test]
fn can_be_shared_between_threads() {
    fn shared<T: Send + Sync + 'static>() {}
    shared::<Checkpoint>();
    shared::<TensorBytes>();
    shared::<CheckpointError>();
}

#[test]
fn file_cut_after_opening_is_a_read_error() {
    let dir = single(&shard(&[("a", Dtype::U8, &[4])]));
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let file =
        fs::OpenOptions::new().write(true).open(dir.path().join("model.safetensors")).unwrap();
    file.set_len(checkpoint.shards()[0].len() - 1).unwrap();
    let error = checkpoint.get("a").unwrap().data.read_into(&mut [0; 4]).unwrap_err();
    assert!(matches!(error, CheckpointError::Io { action: "read", .. }), "{error}");
    assert!(checkpoint.verify(|_| ()).is_err());
}

// verify

/// A checkpoint of one tensor a (name, type, bytes).
fn verify(tensors: &[(&str, Dtype, Vec<u8>)]) -> VerifyReport {
    let specs: Vec<TensorSpec> = tensors
        .iter()
        .map(|(name, dtype, bytes)| TensorSpec::new(*name, *dtype, [bytes.len() / dtype.size()]))
        .collect();
    let mut writer = SafetensorsWriter::new(Vec::new(), &specs, HeaderStyle::Mlx).unwrap();
    for (name, _, bytes) in tensors {
        writer.write(name, bytes).unwrap();
    }
    let dir = single(&writer.finish().unwrap());
    Checkpoint::open(dir.path()).unwrap().verify(|_| ()).unwrap()
}

#[test]
fn non_finite_values_are_found_in_every_float_type() {
    let f32s = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let halves = |values: &[u16]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let found = |tensor: &str, count, first_index| NonFinite {
        tensor: tensor.into(),
        file: "model.safetensors".into(),
        count,
        first_index,
    };
    let report = verify(&[
        // Largest finite value, then -inf, NaN.
        ("d.bf16", Dtype::BF16, halves(&[0x7f7f, 0xff80, 0x3f80, 0x7fc1])),
        ("c.f16", Dtype::F16, halves(&[0x7bff, 0x0001, 0x7c00])),
        ("b.f32", Dtype::F32, f32s(&[f32::MAX, f32::INFINITY])),
        ("a.f64", Dtype::F64, f64::NEG_INFINITY.to_le_bytes().to_vec()),
        // The same bits are no floats here.
        ("u32", Dtype::U32, f32s(&[f32::NAN])),
        ("u16", Dtype::U16, halves(&[0x7f80])),
        ("fine", Dtype::F32, f32s(&[0.0, -0.0, f32::MIN_POSITIVE / 2.0])),
    ]);
    assert_eq!(
        report.non_finite,
        [found("a.f64", 1, 0), found("b.f32", 1, 1), found("c.f16", 1, 2), found("d.bf16", 2, 1)]
    );
    assert!(!report.is_clean());
    assert_eq!(report.tensors, 7);
    let text = report.to_string();
    assert!(text.contains("`d.bf16` holds 2 values"), "{text}");
    assert!(text.ends_with("NOT clean"), "{text}");
}

#[test]
fn positions_count_across_read_chunks() {
    // Longer than one chunk of 4 MiB, at an odd offset.
    let mut bytes = vec![0; (4 << 20) + 64];
    let last = bytes.len() / 4 - 1;
    bytes[last * 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    let report = verify(&[("pad", Dtype::U8, vec![1; 3]), ("x", Dtype::F32, bytes)]);
    assert_eq!((report.non_finite[0].count, report.non_finite[0].first_index), (1, last as u64));
}

#[test]
fn checksum_is_that_of_the_file() {
    // sha256sum of: 8-byte length 63, the header below, "abc".
    let header = r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}          "#;
    let bytes = raw(header, b"abc");
    let dir = single(&bytes);
    let report = Checkpoint::open(dir.path()).unwrap().verify(|_| ()).unwrap();
    let [shard] = report.shards.as_slice() else { panic!("one shard") };
    assert_eq!(shard.bytes, bytes.len() as u64);
    assert_eq!(shard.sha256, "821ab7f0a450fdacaca5765f2ffa581309910a405af4b54f3e794a4837debdb4");
    assert_eq!(shard.status, ChecksumStatus::Unlisted);
    assert!(report.is_clean());
    assert!(report.to_string().ends_with("\nclean"));
}

#[test]
fn progress_counts_up_to_the_total() {
    let dir = sharded();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let mut calls = Vec::new();
    checkpoint.verify(|done| calls.push(done)).unwrap();
    assert_eq!(calls, [4, 8]);
    assert_eq!(checkpoint.total_bytes(), 8);
}

#[test]
fn checksum_lists_are_compared() {
    let dir = sharded();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let digests: Vec<String> =
        checkpoint.verify(|_| ()).unwrap().shards.into_iter().map(|shard| shard.sha256).collect();
    let write = |name: &str, text: String| fs::write(dir.path().join(name), text).unwrap();
    let statuses = || -> Vec<ChecksumStatus> {
        let report = checkpoint.verify(|_| ()).unwrap();
        report.shards.into_iter().map(|shard| shard.status).collect()
    };
    let matches = |list: &str| ChecksumStatus::Match { list: list.into() };

    let wrong = "0".repeat(64);
    write("SHA256SUMS", format!("{}  {SHARD_1}\n{wrong}  {SHARD_2}\n", digests[0]));
    let mismatch = ChecksumStatus::Mismatch { list: "SHA256SUMS".into(), expected: wrong };
    assert_eq!(statuses(), [matches("SHA256SUMS"), mismatch]);
    assert!(!checkpoint.verify(|_| ()).unwrap().is_clean());

    // The shard's own list is the more specific one.
    let own = format!("{SHARD_2}.sha256");
    write(&own, format!("{} *{SHARD_2}\n", digests[1].to_uppercase()));
    assert_eq!(statuses(), [matches("SHA256SUMS"), matches(&own)]);
    write(&own, digests[1].clone());
    assert_eq!(statuses(), [matches("SHA256SUMS"), matches(&own)]);

    // What is listed beside the shards.
    let (good, bad) = (digests[0].clone(), "1".repeat(64));
    write("copy.bin", String::new());
    fs::copy(dir.path().join(SHARD_1), dir.path().join("copy.bin")).unwrap();
    let list = |config: &str| {
        format!("{config}  config.json\n{good}  copy.bin\n{bad}  README.md\n{bad}  a/b\n")
    };
    write("SHA256SUMS", list(&bad));
    let report = checkpoint.verify(|_| ()).unwrap();
    let listed: Vec<(&str, &ListedStatus)> =
        report.listed.iter().map(|listed| (listed.file.as_str(), &listed.status)).collect();
    let [
        (_, ListedStatus::Missing),
        (_, ListedStatus::Elsewhere),
        (_, mismatch),
        (_, ListedStatus::Match),
    ] = listed.as_slice()
    else {
        panic!("{listed:?}")
    };
    let ListedStatus::Mismatch { sha256, expected } = mismatch else { panic!("{listed:?}") };
    assert_eq!(expected, &bad);
    assert!(!report.is_clean());
    let text = report.to_string();
    for words in [
        "`README.md` is in SHA256SUMS and not in the folder",
        "`config.json`  (DIFFERS",
        "`copy.bin` (no weights",
    ] {
        assert!(text.contains(words), "{text}");
    }
    write("SHA256SUMS", list(sha256));
    assert!(checkpoint.verify(|_| ()).unwrap().is_clean());

    write("SHA256SUMS", "nonsense\n".into());
    let error = checkpoint.verify(|_| ()).unwrap_err();
    assert!(matches!(error, CheckpointError::ChecksumList { line: 1, .. }), "{error}");
}

// The writer.

#[test]
fn mlx_style_is_what_mlx_writes() {
    let specs = [TensorSpec::new("b", Dtype::U8, [3]), TensorSpec::new("a", Dtype::BF16, [1, 2])];
    let mut writer = SafetensorsWriter::new(Vec::new(), &specs, HeaderStyle::Mlx).unwrap();
    assert_eq!(writer.data_bytes(), 7);
    writer.write("b", &[1]).unwrap();
    writer.write("b", &[2, 3]).unwrap();
    writer.write("a", &[4, 5, 6, 7]).unwrap();
    let header = concat!(
        r#"{"__metadata__":{"format":"mlx"},"#,
        r#""a":{"data_offsets":[3,7],"dtype":"BF16","shape":[1,2]},"#,
        r#""b":{"data_offsets":[0,3],"dtype":"U8","shape":[3]}}"#
    );
    let bytes = writer.finish().unwrap();
    assert_eq!(bytes, raw(header, &[1, 2, 3, 4, 5, 6, 7]));
    let parsed = parse_header(&bytes, bytes.len() as u64, "f").unwrap();
    assert_eq!(parsed.metadata, BTreeMap::from([("format".into(), "mlx".into())]));
}

#[test]
fn writer_refuses_what_would_be_malformed() {
    let new = |specs: &[TensorSpec]| SafetensorsWriter::new(Vec::new(), specs, HeaderStyle::Mlx);
    let ab = [
        TensorSpec::new("a", Dtype::U16, [2]),
        TensorSpec::new("empty", Dtype::U16, [0]),
        TensorSpec::new("b", Dtype::U8, [1]),
    ];
    let mut writer = new(&ab).unwrap();
    assert!(matches!(writer.write("b", &[0]), Err(WriteError::OutOfOrder { .. })));
    writer.write("a", &[0; 3]).unwrap();
    assert!(matches!(
        writer.write("a", &[0; 2]),
        Err(WriteError::TooLong { wanted: 4, given: 5, .. })
    ));
    writer.write("a", &[0]).unwrap();
    assert!(matches!(
        writer.write("a", &[0]),
        Err(WriteError::OutOfOrder { expected: Some(next), .. }) if next == "b"
    ));
    assert!(matches!(
        writer.finish(),
        Err(WriteError::Incomplete { tensor, given: 0, .. }) if tensor == "b"
    ));

    for bad in [
        vec![TensorSpec::new("", Dtype::U8, [1])],
        vec![TensorSpec::new("__metadata__", Dtype::U8, [1])],
        vec![TensorSpec::new("a", Dtype::U8, [usize::MAX, 2])],
        vec![TensorSpec::new("a", Dtype::U8, [1]), TensorSpec::new("a", Dtype::U8, [1])],
    ] {
        assert!(matches!(new(&bad), Err(WriteError::BadTensor(_))), "{bad:?}");
    }
}

#[test]
fn writer_creates_a_file_that_opens() {
    let dir = folder(&[("config.json", b"{}")]);
    let specs = [TensorSpec::new("a", Dtype::U8, [2])];
    let path = dir.path().join("model.safetensors");
    let mut writer = SafetensorsWriter::create(&path, &specs, HeaderStyle::Padded).unwrap();
    writer.write("a", &[8, 9]).unwrap();
    writer.finish().unwrap();
    index(&dir, &[("a", "model.safetensors")], 2);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let a = &checkpoint.get("a").unwrap().data;
    assert_eq!((a.map(), a.offset() % 8), (&[8, 9][..], 0));
}
