//! Any text, stops and cuts: the streamed answer equals that of the whole text.
//!
//! The input is up to four stops and the text, separated by NUL bytes; its first byte is the length of the pieces.
#![no_main]

use libfuzzer_sys::fuzz_target;
use lily_chat::StopMatcher;

fuzz_target!(|data: &str| {
    let mut parts: Vec<&str> = data.splitn(5, '\0').collect();
    let text = parts.pop().unwrap_or_default();
    let width = usize::from(data.as_bytes().first().copied().unwrap_or(0) % 5) + 1;

    let first = parts
        .iter()
        .enumerate()
        .filter(|(_, stop)| !stop.is_empty())
        .filter_map(|(index, stop)| text.find(stop).map(|at| (at, stop.len(), index)))
        .min();
    let (expected, by) = match first {
        Some((at, _, index)) => (&text[..at], Some(index)),
        None => (text, None),
    };

    let mut matcher = StopMatcher::new(parts.iter().copied());
    let (mut answer, mut stopped_by) = (String::new(), None);
    let letters: Vec<char> = text.chars().collect();
    for piece in letters.chunks(width) {
        let output = matcher.push(&piece.iter().collect::<String>());
        answer += &output.text;
        stopped_by = stopped_by.or(output.stopped_by);
    }
    let output = matcher.finish();
    answer += &output.text;
    assert_eq!((answer.as_str(), stopped_by.or(output.stopped_by)), (expected, by));
});
