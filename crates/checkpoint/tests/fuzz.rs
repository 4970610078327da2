//! Random and mutated input: never a panic, and what is accepted lies inside the file.

mod common;

use lily_checkpoint::write::{HeaderStyle, SafetensorsWriter, TensorSpec};
use lily_checkpoint::{Checkpoint, Dtype, parse_header};
use proptest::prelude::*;
use proptest::sample::Index;

use common::raw;

/// What every accepted header promises.
fn check(bytes: &[u8], file_len: u64) -> Result<bool, TestCaseError> {
    let Ok(header) = parse_header(bytes, file_len, "fuzz") else {
        return Ok(false);
    };
    let mut covered = header.data_start;
    for tensor in &header.tensors {
        prop_assert_eq!(tensor.offset, covered);
        prop_assert_eq!(tensor.dtype.tensor_bytes(&tensor.shape), Some(tensor.len));
        covered += tensor.len;
    }
    prop_assert_eq!(covered, file_len);
    Ok(true)
}

fn specs() -> impl Strategy<Value = Vec<TensorSpec>> {
    let tensor = (0..Dtype::ALL.len(), prop::collection::vec(0usize..5, 0..4));
    prop::collection::vec(tensor, 0..6).prop_map(|tensors| {
        let named = tensors.into_iter().enumerate();
        named
            .map(|(i, (dtype, shape))| TensorSpec::new(format!("t{i}"), Dtype::ALL[dtype], shape))
            .collect()
    })
}

fn file(specs: &[TensorSpec], style: HeaderStyle) -> Vec<u8> {
    let mut writer = SafetensorsWriter::new(Vec::new(), specs, style).unwrap();
    for spec in specs {
        let len = spec.dtype.tensor_bytes(&spec.shape).unwrap();
        writer.write(&spec.name, &vec![7; len as usize]).unwrap();
    }
    writer.finish().unwrap()
}

/// Digits and punctuation hit more of the parser than arbitrary bytes do.
fn mutation() -> impl Strategy<Value = (Index, u8)> {
    let byte =
        prop_oneof![any::<u8>(), prop::sample::select(b"0123456789-.e,:[]{}\"\\ tUFB".to_vec())];
    (any::<Index>(), byte)
}

fn mutate(bytes: &mut [u8], mutations: &[(Index, u8)]) {
    for (index, byte) in mutations {
        let at = index.index(bytes.len());
        bytes[at] = *byte;
    }
}

/// An entry whose fields are each plausible, but seldom together.
fn entry() -> impl Strategy<Value = String> {
    let number = || prop_oneof![0u64..20, Just(1 << 32), Just(u64::MAX), any::<u64>()];
    let dtype = prop::sample::select(vec!["U8", "BF16", "F64", "F4", ""]);
    let shape = prop::collection::vec(number(), 0..3);
    let offsets = prop_oneof![
        (0u64..20, 0u64..20).prop_map(|(begin, len)| vec![begin, begin + len]),
        prop::collection::vec(number(), 0..4),
    ];
    (0..4, dtype, shape, offsets).prop_map(|(name, dtype, shape, offsets)| {
        format!(r#""t{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":{offsets:?}}}"#)
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200), file_len: u64) {
        check(&bytes, bytes.len() as u64)?;
        check(&bytes, file_len)?;
        check(&raw(&bytes, b""), bytes.len() as u64 + 8)?;
    }

    #[test]
    fn what_the_writer_writes_is_accepted(specs in specs(), padded: bool) {
        let style = if padded { HeaderStyle::Padded } else { HeaderStyle::Mlx };
        let bytes = file(&specs, style);
        let header = parse_header(&bytes, bytes.len() as u64, "fuzz").unwrap();
        prop_assert!(check(&bytes, bytes.len() as u64)?);
        prop_assert_eq!(header.tensors.len(), specs.len());
        prop_assert!(!padded || header.data_start.is_multiple_of(8));
        for spec in &specs {
            let tensor = header.tensors.iter().find(|tensor| tensor.name == spec.name).unwrap();
            prop_assert_eq!((tensor.dtype, &tensor.shape), (spec.dtype, &spec.shape));
        }
        // Any other length is refused.
        prop_assert!(!check(&bytes, bytes.len() as u64 + 1)?);
        prop_assert!(!check(&bytes, bytes.len() as u64 - 1)?);
    }

    #[test]
    fn mutated_files(
        specs in specs(),
        mutations in prop::collection::vec(mutation(), 1..4),
        cut in any::<Index>(),
    ) {
        let mut bytes = file(&specs, HeaderStyle::Mlx);
        mutate(&mut bytes, &mutations);
        check(&bytes, bytes.len() as u64)?;
        bytes.truncate(cut.index(bytes.len()));
        check(&bytes, bytes.len() as u64)?;
    }

    // Well-formed entries whose ranges seldom cover the data.
    #[test]
    fn plausible_ranges(
        ranges in prop::collection::vec((0u64..6, 0u64..4), 0..4),
        data in 0usize..8,
    ) {
        let entries: Vec<String> = ranges
            .iter()
            .enumerate()
            .map(|(i, (begin, len))| common::entry(&format!("t{i}"), *begin, begin + len))
            .collect();
        let bytes = raw(format!("{{{}}}", entries.join(",")), &vec![0; data]);
        check(&bytes, bytes.len() as u64)?;
    }

    #[test]
    fn plausible_entries(entries in prop::collection::vec(entry(), 0..4), data in 0usize..40) {
        let bytes = raw(format!("{{{}}}", entries.join(",")), &vec![0; data]);
        check(&bytes, bytes.len() as u64)?;
    }
}

proptest! {
    // The mutated files must be 'static, so each case leaks a few hundred bytes.
    #![proptest_config(ProptestConfig {
        cases: 500,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn mutated_checkpoints(
        specs in specs(),
        which in 0usize..3,
        mutations in prop::collection::vec(mutation(), 0..3),
    ) {
        let weight_map: Vec<String> = specs
            .iter()
            .map(|spec| format!(r#""{}":"model.safetensors""#, spec.name))
            .collect();
        let mut files = [
            ("config.json", br#"{"a":{"b":[1,2]}}"#.to_vec()),
            ("model.safetensors", file(&specs, HeaderStyle::Padded)),
            (
                "model.safetensors.index.json",
                format!(r#"{{"weight_map":{{{}}}}}"#, weight_map.join(",")).into_bytes(),
            ),
        ];
        mutate(&mut files[which].1, &mutations);
        let files = files.map(|(name, bytes)| (name, &*bytes.leak()));
        if let Ok(checkpoint) = Checkpoint::from_static("fuzz", &files) {
            for tensor in checkpoint.tensors() {
                let mut copy = vec![0; tensor.data.len() as usize];
                tensor.data.read_into(&mut copy).unwrap();
                prop_assert_eq!(tensor.data.map(), copy);
            }
            prop_assert_eq!(checkpoint.verify(|_| ()).unwrap().bytes, checkpoint.total_bytes());
        } else {
            prop_assert!(!mutations.is_empty() || specs.is_empty());
        }
    }
}
