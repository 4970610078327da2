//! Every way in which a shard can be wrong, each a distinct error and never a panic.

mod common;

use common::*;
use lily_checkpoint::CheckpointError::{Header, Tensor};
use lily_checkpoint::{
    Checkpoint, Dtype, HeaderProblem, JsonProblem, MAX_HEADER_BYTES, MAX_NAME_BYTES, TensorProblem,
    parse_header,
};

fn header_problem(bytes: &[u8]) -> HeaderProblem {
    let pure = match parse_header(bytes, bytes.len() as u64, "f") {
        Err(Header { problem, .. }) => problem,
        other => panic!("{other:?}"),
    };
    match refused(single(bytes)) {
        Header { file, problem } => {
            assert!(file.ends_with("model.safetensors"), "{file}");
            assert_eq!(problem, pure, "the file and the bytes give the same answer");
            problem
        }
        other => panic!("{other}"),
    }
}

fn tensor_problem(header: &str, data: &[u8]) -> TensorProblem {
    match refused(single(&raw(header, data))) {
        Tensor { problem, .. } => problem,
        other => panic!("{other}"),
    }
}

// The file as a whole.

#[test]
fn empty_file() {
    assert_eq!(header_problem(b""), HeaderProblem::Empty);
}

#[test]
fn file_shorter_than_the_header_length() {
    assert_eq!(header_problem(b"\x02\0\0"), HeaderProblem::TooShort { file_len: 3 });
}

#[test]
fn header_longer_than_the_file() {
    let mut bytes = 1000u64.to_le_bytes().to_vec();
    bytes.extend(b"{}");
    let problem = HeaderProblem::BeyondFile { header_end: 1008, file_len: 10 };
    assert_eq!(header_problem(&bytes), problem);
}

#[test]
fn absurd_header_length() {
    for header_len in [MAX_HEADER_BYTES + 1, u64::MAX - 7, u64::MAX] {
        let mut bytes = header_len.to_le_bytes().to_vec();
        bytes.extend(b"{}");
        assert_eq!(header_problem(&bytes), HeaderProblem::AbsurdLength { header_len });
    }
    // An HTML error page saved under the file's name.
    assert!(matches!(header_problem(b"<!DOCTYPE html><html>"), HeaderProblem::AbsurdLength { .. }));
}

#[test]
fn git_lfs_pointer() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n";
    assert_eq!(header_problem(pointer), HeaderProblem::LfsPointer);
}

#[test]
fn parse_header_given_too_few_bytes() {
    let bytes = shard(&[("a", Dtype::U8, &[4])]);
    let result = parse_header(&bytes[..20], bytes.len() as u64, "f");
    assert!(matches!(
        result,
        Err(Header { problem: HeaderProblem::BeyondFile { file_len: 20, .. }, .. })
    ));
}

#[test]
fn truncated_shard() {
    let bytes = shard(&[("a", Dtype::U8, &[4]), ("b", Dtype::F32, &[3])]);
    for cut in 1..16 {
        let bytes = &bytes[..bytes.len() - cut];
        assert!(matches!(
            header_problem(bytes),
            HeaderProblem::Truncated { tensor, file_len, .. }
                if tensor == "b" && file_len == bytes.len() as u64
        ));
    }
}

#[test]
fn trailing_bytes() {
    let mut bytes = shard(&[("a", Dtype::U8, &[4])]);
    let end = bytes.len() as u64;
    bytes.push(0);
    let problem = HeaderProblem::TrailingBytes { end, file_len: end + 1 };
    assert_eq!(header_problem(&bytes), problem);
    // Bytes, but no tensor at all.
    assert!(matches!(header_problem(&raw("{}", b"x")), HeaderProblem::TrailingBytes { .. }));
}

#[test]
fn gaps_between_tensors() {
    let header = format!("{{{},{}}}", entry("b", 3, 4), entry("a", 0, 2));
    let start = 8 + header.len() as u64;
    assert_eq!(
        header_problem(&raw(&header, &[0; 4])),
        HeaderProblem::Gap { tensor: "b".into(), from: start + 2, to: start + 3 }
    );
    let header = format!("{{{}}}", entry("a", 1, 2));
    assert!(matches!(header_problem(&raw(&header, &[0; 2])), HeaderProblem::Gap { .. }));
}

#[test]
fn overlapping_tensors() {
    let overlap = HeaderProblem::Overlap { first: "a".into(), second: "b".into() };
    for (a, b) in [((0, 3), (2, 4)), ((0, 4), (0, 4)), ((0, 4), (1, 2)), ((0, 4), (2, 2))] {
        let header = format!("{{{},{}}}", entry("b", b.0, b.1), entry("a", a.0, a.1));
        assert_eq!(header_problem(&raw(header, &[0; 4])), overlap, "{a:?} {b:?}");
    }
}

// The header's JSON.

#[test]
fn header_not_json() {
    let json = |header: &[u8]| match header_problem(&raw(header, b"")) {
        HeaderProblem::Json(problem) => problem,
        other => panic!("{other:?}"),
    };
    assert_eq!(json(b"{\"\xff\xfe\":1}"), JsonProblem::NotUtf8 { at: 2 });
    assert_eq!(json(b"[]"), JsonProblem::NotAnObject);
    for bad in ["", "{", "{\"a\":}", "{} {}", "\0\0\0\0"] {
        assert!(matches!(json(bad.as_bytes()), JsonProblem::Syntax(_)), "{bad:?}");
    }
    let deep = format!("{{\"a\":{}", "[".repeat(1_000_000));
    let JsonProblem::Syntax(message) = json(deep.as_bytes()) else {
        panic!("deep nesting was accepted")
    };
    assert!(message.contains("recursion limit"), "{message}");
}

#[test]
fn duplicate_keys_in_the_header() {
    let duplicate = |key: &str| HeaderProblem::Json(JsonProblem::DuplicateKey(key.to_owned()));
    let header = format!("{{{},{}}}", entry("a", 0, 2), entry("a", 2, 4));
    assert_eq!(header_problem(&raw(header, &[0; 4])), duplicate("a"));
    let header = r#"{"a":{"dtype":"U8","shape":[2],"shape":[4],"data_offsets":[0,4]}}"#;
    assert_eq!(header_problem(&raw(header, &[0; 4])), duplicate("shape"));
    let header = r#"{"__metadata__":{"k":"1","k":"2"}}"#;
    assert_eq!(header_problem(&raw(header, b"")), duplicate("k"));
}

#[test]
fn metadata_of_the_wrong_type() {
    for value in ["1", "[]", "\"mlx\"", r#"{"format":1}"#, r#"{"format":{}}"#] {
        let header = format!(r#"{{"__metadata__":{value}}}"#);
        assert_eq!(header_problem(&raw(header, b"")), HeaderProblem::Metadata, "{value}");
    }
}

// One tensor.

#[test]
fn wrong_byte_length() {
    let header = r#"{"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,6]}}"#;
    assert_eq!(
        tensor_problem(header, &[0; 6]),
        TensorProblem::WrongLength { dtype: Dtype::BF16, shape: vec![2, 3], wanted: 12, found: 6 }
    );
}

#[test]
fn sizes_that_overflow() {
    // 2^32 · 2^32 wraps to 0 bytes, and would pass an unchecked comparison.
    for shape in
        ["[4294967296,4294967296]", "[18446744073709551615,2]", "[4294967296,4294967296,0]"]
    {
        let header = format!(r#"{{"a":{{"dtype":"U8","shape":{shape},"data_offsets":[0,0]}}}}"#);
        assert!(matches!(tensor_problem(&header, b""), TensorProblem::Overflow { .. }), "{shape}");
    }
    // Offsets that wrap once the header's length is added.
    let header = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[18446744073709551614,18446744073709551615]}}"#;
    assert!(matches!(tensor_problem(header, b"x"), TensorProblem::Overflow { .. }));
}

#[test]
fn unknown_dtype() {
    for dtype in ["F4", "bf16", "", "BF16 "] {
        let header = format!(r#"{{"a":{{"dtype":"{dtype}","shape":[1],"data_offsets":[0,2]}}}}"#);
        assert_eq!(tensor_problem(&header, &[0; 2]), TensorProblem::UnknownDtype(dtype.into()));
    }
}

#[test]
fn reversed_offsets() {
    let header = r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[2,0]}}"#;
    assert_eq!(tensor_problem(header, &[0; 2]), TensorProblem::Reversed { begin: 2, end: 0 });
}

#[test]
fn malformed_entries() {
    assert_eq!(tensor_problem(r#"{"a":[1]}"#, b""), TensorProblem::NotAnObject);
    let cases = [
        ("dtype", r#""shape":[1],"data_offsets":[0,1]"#),
        ("dtype", r#""dtype":1,"shape":[1],"data_offsets":[0,1]"#),
        ("shape", r#""dtype":"U8","data_offsets":[0,1]"#),
        ("shape", r#""dtype":"U8","shape":1,"data_offsets":[0,1]"#),
        ("shape", r#""dtype":"U8","shape":[-1],"data_offsets":[0,1]"#),
        ("shape", r#""dtype":"U8","shape":[1.0],"data_offsets":[0,1]"#),
        ("shape", r#""dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,1]"#),
        ("data_offsets", r#""dtype":"U8","shape":[1]"#),
        ("data_offsets", r#""dtype":"U8","shape":[1],"data_offsets":[0]"#),
        ("data_offsets", r#""dtype":"U8","shape":[1],"data_offsets":[0,1,2]"#),
        ("data_offsets", r#""dtype":"U8","shape":[1],"data_offsets":[-1,0]"#),
        ("data_offsets", r#""dtype":"U8","shape":[1],"data_offsets":["0","1"]"#),
    ];
    for (wrong, fields) in cases {
        let problem = tensor_problem(&format!(r#"{{"a":{{{fields}}}}}"#), b"x");
        assert!(
            matches!(problem, TensorProblem::Field { field, .. } if field == wrong),
            "{fields}: {problem}"
        );
    }
}

#[test]
fn tensor_names_empty_or_absurd() {
    let with_name = |name: &str| format!("{{{}}}", entry(name, 0, 1));
    assert_eq!(tensor_problem(&with_name(""), b"x"), TensorProblem::EmptyName);
    let long = "n".repeat(MAX_NAME_BYTES + 1);
    assert_eq!(
        tensor_problem(&with_name(&long), b"x"),
        TensorProblem::LongName { len: MAX_NAME_BYTES + 1 }
    );
    let longest = with_name(&long[1..]);
    assert!(Checkpoint::open(single(&raw(longest, b"x")).path()).is_ok());
}
