//! Any ids and any bytes: streamed text equals the whole, and no piece is empty or half a character.
#![no_main]

mod tiny;

use libfuzzer_sys::fuzz_target;
use lily_chat::{Detokenizer, Utf8Stream};

fuzz_target!(|data: &[u8]| {
    let Some((flags, data)) = data.split_first() else {
        return;
    };
    let skip = flags & 1 == 1;
    let ids: Vec<u32> =
        data.iter().map(|byte| u32::from(*byte) + u32::from(flags >> 6 & 1) * 64).collect();
    let mut stream = Detokenizer::new(tiny::TINY.clone(), skip);
    let mut text = String::new();
    for id in &ids {
        if let Some(piece) = stream.push(*id) {
            assert!(!piece.is_empty());
            text += &piece;
        }
    }
    text.extend(stream.finish());
    assert_eq!(text, tiny::TINY.decode(&ids, skip));

    let (mut stream, mut text) = (Utf8Stream::new(), String::new());
    for chunk in data.chunks(usize::from(flags >> 1 & 7) + 1) {
        stream.push(chunk, &mut text);
    }
    stream.finish(&mut text);
    assert_eq!(text, String::from_utf8_lossy(data));
});
