//! Any `model.safetensors.index.json` beside two small shards: a checkpoint, or an error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use lily_checkpoint::Checkpoint;

/// A shard of one tensor `a` of one byte.
const SHARD: &[u8] =
    b"\x38\0\0\0\0\0\0\0{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}   \x07";
/// The same with a tensor `b`.
const OTHER: &[u8] =
    b"\x38\0\0\0\0\0\0\0{\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}   \x07";

fuzz_target!(|data: &[u8]| {
    // An embedded checkpoint wants bytes that live for ever; these live as long as the checkpoint.
    let kept: *mut [u8] = Box::into_raw(Box::from(data));
    // SAFETY: `kept` came from a box that is freed below, after the last use.
    let index: &'static [u8] = unsafe { &*kept };
    let files = [
        ("config.json", b"{}".as_slice()),
        ("model.safetensors.index.json", index),
        ("m1.safetensors", SHARD),
        ("m2.safetensors", OTHER),
    ];
    drop(Checkpoint::from_static("fuzzed", &files).map(|checkpoint| checkpoint.total_bytes()));
    // SAFETY: the checkpoint and its error are gone; nothing else holds `index`.
    drop(unsafe { Box::from_raw(kept) });
});
