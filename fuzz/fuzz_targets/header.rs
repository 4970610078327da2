//! Any beginning of a safetensors file: a header whose tensors lie inside the file, or an error.
//!
//! The first byte lengthens the file beyond the bytes that are there.
#![no_main]

use libfuzzer_sys::fuzz_target;
use lily_checkpoint::parse_header;

fuzz_target!(|data: &[u8]| {
    let Some((more, bytes)) = data.split_first() else {
        return;
    };
    let file_len = bytes.len() as u64 + u64::from(*more);
    if let Ok(header) = parse_header(bytes, file_len, "fuzzed") {
        for tensor in header.tensors {
            let end = tensor.offset.checked_add(tensor.len).expect("an end");
            assert!(end <= file_len);
            assert_eq!(tensor.dtype.tensor_bytes(&tensor.shape), Some(tensor.len));
        }
    }
});
