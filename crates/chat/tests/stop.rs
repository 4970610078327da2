//! Stop strings: streamed equals whole, wherever the text is cut.

use lily_chat::{StopMatcher, StopOutput, Utf8Stream};
use proptest::prelude::*;

/// The rule, said of the whole text.
fn whole(text: &str, stops: &[String]) -> (String, Option<usize>) {
    let first = stops
        .iter()
        .enumerate()
        .filter(|(_, stop)| !stop.is_empty())
        .filter_map(|(index, stop)| text.find(stop.as_str()).map(|at| (at, stop.len(), index)))
        .min();
    match first {
        Some((at, _, index)) => (text[..at].to_owned(), Some(index)),
        None => (text.to_owned(), None),
    }
}

fn streamed<'p>(
    pieces: impl IntoIterator<Item = &'p str>,
    stops: &[String],
) -> (String, Option<usize>) {
    let mut matcher = StopMatcher::new(stops.iter().cloned());
    let mut text = String::new();
    let mut stopped_by = None;
    for piece in pieces {
        let output = matcher.push(piece);
        text += &output.text;
        stopped_by = stopped_by.or(output.stopped_by);
    }
    let last = matcher.finish();
    text += &last.text;
    assert!(matcher.held().is_empty());
    (text, stopped_by.or(last.stopped_by))
}

fn owned(stops: &[&str]) -> Vec<String> {
    stops.iter().map(|&s| s.to_owned()).collect()
}

#[test]
fn a_stop_over_token_boundaries_is_found_and_left_out() {
    let pieces = ["alpha be", "ta g", "am", "ma delta"];
    assert_eq!(streamed(pieces, &owned(&["beta gamma"])), ("alpha ".into(), Some(0)));
}

#[test]
fn text_waits_only_while_a_stop_may_begin() {
    let mut matcher = StopMatcher::new(["###"]);
    assert_eq!(matcher.push("a#").text, "a");
    assert_eq!(matcher.push("#").text, "");
    assert_eq!(matcher.held(), "##");
    assert_eq!(matcher.push("b").text, "##b");
    assert_eq!(matcher.push("x##").text, "x");
    assert_eq!(matcher.finish(), StopOutput { text: "##".into(), stopped_by: None });
    // The same matcher serves the next answer.
    assert_eq!(matcher.push("c###d"), StopOutput { text: "c".into(), stopped_by: Some(0) });
    assert_eq!(matcher.push("more"), StopOutput { text: String::new(), stopped_by: Some(0) });
}

#[test]
fn the_earliest_wins_and_then_the_shortest() {
    for (text, stops, expected) in [
        ("xabcy", vec!["abcd", "bc"], ("xa", Some(1))),
        ("xabcdy", vec!["bc", "abcd"], ("x", Some(1))),
        ("xaby", vec!["ab", "a"], ("x", Some(1))),
        ("xaby", vec!["a", "ab"], ("x", Some(0))),
        ("xa", vec!["ab", "a"], ("x", Some(1))),
        ("aab", vec!["ab"], ("a", Some(0))),
        ("é\u{301}€x", vec!["\u{301}€"], ("é", Some(0))),
        ("abc", vec!["", "zz"], ("abc", None)),
        ("abc", vec![], ("abc", None)),
        ("stop", vec!["stop"], ("", Some(0))),
    ] {
        let stops = owned(&stops);
        let expected = (expected.0.to_owned(), expected.1);
        assert_eq!(whole(text, &stops), expected, "{text} {stops:?}");
        assert_eq!(streamed([text], &stops), expected, "{text} {stops:?}");
    }
}

/// Few letters, so that stops occur, overlap and nearly occur.
fn letters(longest: usize) -> impl Strategy<Value = String> {
    let letter = prop_oneof![Just('a'), Just('b'), Just('é'), Just('€'), Just('😀'), Just('\n')];
    prop::collection::vec(letter, 0..=longest).prop_map(|letters| letters.into_iter().collect())
}

proptest! {
    #[test]
    fn streamed_equals_whole_at_every_byte_split(
        text in letters(12),
        stops in prop::collection::vec(letters(4), 0..4),
    ) {
        let expected = whole(&text, &stops);
        // Two pieces, cut at each byte; the decoder joins the halves of a character.
        for cut in 0..=text.len() {
            let mut decoder = Utf8Stream::new();
            let (mut first, mut second) = (String::new(), String::new());
            decoder.push(&text.as_bytes()[..cut], &mut first);
            decoder.push(&text.as_bytes()[cut..], &mut second);
            decoder.finish(&mut second);
            prop_assert_eq!(streamed([first.as_str(), second.as_str()], &stops), expected.clone());
        }
        // And one byte at a time.
        let mut decoder = Utf8Stream::new();
        let pieces: Vec<String> = text
            .bytes()
            .map(|byte| {
                let mut piece = String::new();
                decoder.push(&[byte], &mut piece);
                piece
            })
            .collect();
        prop_assert_eq!(streamed(pieces.iter().map(String::as_str), &stops), expected);
    }

    #[test]
    fn what_is_held_could_still_become_a_stop(
        pieces in prop::collection::vec(letters(3), 0..8),
        stops in prop::collection::vec(letters(4), 0..4),
    ) {
        let mut matcher = StopMatcher::new(stops.iter().cloned());
        for piece in &pieces {
            matcher.push(piece);
            let held = matcher.held();
            prop_assert!(
                held.is_empty() || stops.iter().any(|s| s.starts_with(held) && s != held)
            );
        }
    }
}
