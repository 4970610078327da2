//! Reasoning, text and calls: fed at every split, the parts are those of the whole.

use std::sync::{Arc, LazyLock};

use lily_chat::{AnswerParser, CallPart, End, Part, StopMatcher, Tools};
use proptest::prelude::*;
use serde_json::json;

static TOOLS: LazyLock<Arc<Tools>> = LazyLock::new(|| {
    let string = json!({"type": "string"});
    let function = |name: &str, properties: serde_json::Value| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}});
    let tools = [
        function("read", json!({"path": string})),
        function("add", json!({"a": {"type": "integer"}, "b": {"type": ["number", "null"]}})),
        function("ping", json!({})),
    ];
    Arc::new(Tools::new(&tools).unwrap())
});

/// An answer put together again.
#[derive(Debug, Default, PartialEq)]
struct Answer {
    reasoning: String,
    content: String,
    /// Name, arguments, complete.
    calls: Vec<(String, String, bool)>,
    cut: bool,
}

impl Answer {
    fn take(&mut self, parts: Vec<Part>, raw: &str) {
        for part in parts {
            match part {
                Part::Reasoning(text) => {
                    assert!(!text.is_empty());
                    self.reasoning += &text;
                }
                Part::Content { text, at } => {
                    assert!(!text.is_empty());
                    assert_eq!(&raw[at..at + text.len()], text, "text is told with its place");
                    self.content += &text;
                }
                Part::Call(CallPart::Begin { name }) => {
                    self.calls.push((name, String::new(), false));
                }
                Part::Call(CallPart::Arguments(piece)) => {
                    self.calls.last_mut().unwrap().1 += &piece
                }
                Part::Call(CallPart::End) => self.calls.last_mut().unwrap().2 = true,
            }
        }
    }
}

fn answer<'t>(
    pieces: impl IntoIterator<Item = &'t str>,
    raw: &str,
    thinking: bool,
    end: End,
) -> Answer {
    answer_with(pieces, raw, thinking, Some(Arc::clone(&TOOLS)), end)
}

fn answer_with<'t>(
    pieces: impl IntoIterator<Item = &'t str>,
    raw: &str,
    thinking: bool,
    tools: Option<Arc<Tools>>,
    end: End,
) -> Answer {
    let mut parser = AnswerParser::new(thinking, tools);
    let mut answer = Answer::default();
    for piece in pieces {
        answer.take(parser.push(piece), raw);
    }
    let (parts, cut) = parser.finish(end);
    answer.take(parts, raw);
    answer.cut = cut;
    for (_, arguments, complete) in &answer.calls {
        let valid = serde_json::from_str::<serde_json::Value>(arguments).is_ok();
        assert_eq!(valid, *complete, "{arguments}");
    }
    answer
}

fn letters(text: &str) -> Vec<&str> {
    text.split_inclusive(|_: char| true).collect()
}

/// Whole, by letters, and cut once at each place.
fn check(text: &str, thinking: bool, end: End, expected: &Answer) {
    assert_eq!(answer([text], text, thinking, end), *expected, "whole: {text:?}");
    assert_eq!(answer(letters(text), text, thinking, end), *expected, "letters: {text:?}");
    for (at, _) in text.char_indices() {
        let (a, b) = text.split_at(at);
        assert_eq!(answer([a, b], text, thinking, end), *expected, "{a:?} {b:?}");
    }
}

fn call(name: &str, parameters: &[(&str, &str)]) -> String {
    let parameters: String = parameters
        .iter()
        .map(|(key, value)| format!("<parameter={key}>\n{value}\n</parameter>\n"))
        .collect();
    format!("<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
}

fn expect(reasoning: &str, content: &str, calls: &[(&str, &str)]) -> Answer {
    let calls = calls.iter().map(|(name, json)| ((*name).into(), (*json).into(), true)).collect();
    Answer { reasoning: reasoning.into(), content: content.into(), calls, cut: false }
}

#[test]
fn calls_and_text() {
    let read = |path: &str| call("read", &[("path", path)]);
    let table = [
        ("a  \n b\n".into(), expect("", "a  \n b\n", &[])),
        (format!("Go:{}", call("ping", &[])), expect("", "Go:", &[("ping", "{}")])),
        (
            format!("\n a\n\n{}\n\n", read("x")),
            expect("", "\n a", &[("read", "{\"path\": \"x\"}")]),
        ),
        (
            format!("{}{}\n b \n", read("x"), call("add", &[("a", "1"), ("b", "Null")])),
            expect(
                "",
                "b \n",
                &[("read", "{\"path\": \"x\"}"), ("add", "{\"a\": 1, \"b\": null}")],
            ),
        ),
        (read("\n a \n\n"), expect("", "", &[("read", "{\"path\": \"\\n a \\n\\n\"}")])),
        (read(""), expect("", "", &[("read", "{\"path\": \"\"}")])),
        (
            "<tool_call><function=read><parameter=path>\n</parameter></function></tool_call>"
                .into(),
            expect("", "", &[("read", "{\"path\": \"\"}")]),
        ),
        (
            read("a</parameter>\n</function>\nb</parameter></tool_call><parameter=c>"),
            expect(
                "",
                "",
                &[(
                    "read",
                    "{\"path\": \"a</parameter>\\n</function>\\nb</parameter></tool_call><parameter=c>\"}",
                )],
            ),
        ),
        (
            read("\n</parameter>\n</parameter"),
            expect("", "", &[("read", "{\"path\": \"\\n</parameter>\\n</parameter\"}")]),
        ),
        ("x <tool_call> y".into(), expect("", "x <tool_call> y", &[])),
        (
            "x <tool_call>\n<function=f>\n y".into(),
            expect("", "x <tool_call>\n<function=f>\n y", &[]),
        ),
        ("x <tool_call>\n".into(), expect("", "x <tool_call>\n", &[])),
        (
            "<<tool_call><function=".to_owned() + "ping></function></tool_call>",
            expect("", "<", &[("ping", "{}")]),
        ),
        (
            "<function=ping></function> </parameter>".into(),
            expect("", "<function=ping></function> </parameter>", &[]),
        ),
        ("<tool_call>\n<function=ping>\n</function>\n".into(), expect("", "", &[("ping", "{}")])),
        (
            read("x").trim_end_matches("</tool_call>").into(),
            expect("", "", &[("read", "{\"path\": \"x\"}")]),
        ),
    ];
    for (text, expected) in table {
        check(&text, false, End::Turn, &expected);
    }
}

#[test]
fn without_tools_all_is_text() {
    let text = format!("a\n{}\n", call("read", &[("path", "x")]));
    let got = answer_with(letters(&text), &text, false, None, End::Turn);
    assert_eq!(got, expect("", &text, &[]));
}

#[test]
fn a_call_that_is_cut_is_none() {
    let whole = call("read", &[("path", "a b")]);
    for (at, _) in whole.char_indices() {
        for end in [End::Turn, End::Cut] {
            let text = format!("Well. {}", &whole[..at]);
            let got = answer(letters(&text), &text, false, end);
            let only_closer_missing =
                end == End::Turn && at >= whole.len() - "\n</tool_call>".len();
            let complete = got.calls.iter().filter(|call| call.2).count();
            assert_eq!(complete, usize::from(only_closer_missing), "{text:?}");
            let bare = if end == End::Turn { "<tool_call>\n".len() } else { "<tool_call".len() };
            let (content, cut) = match at {
                0 => ("Well. ".to_owned(), false),
                at if at <= bare => (text.clone(), false),
                _ => ("Well.".to_owned(), !only_closer_missing),
            };
            assert_eq!((got.content, got.cut), (content, cut), "{text:?} {end:?}");
        }
    }
}

#[test]
fn thoughts() {
    let table = [
        ("a\n</think>\n\nb\n", expect("a", "b\n", &[])),
        ("\n\n  a\n\n b  \n\n</think>\n\n\n  c", expect("  a\n\n b  ", "  c", &[])),
        ("a</think>b</think>c", expect("a", "b</think>c", &[])),
        ("\n</think>\n\n", expect("", "", &[])),
        ("<think>\na</think>b", expect("a", "b", &[])),
        ("\n<think>\n<think></think>b", expect("<think>", "b", &[])),
        ("a <think></thin\n", expect("a <think></thin", "", &[])),
        ("a<", expect("a<", "", &[])),
    ];
    for (text, expected) in table {
        check(text, true, End::Turn, &expected);
        check(text, true, End::Cut, &expected);
    }
}

#[test]
fn calls_while_thinking() {
    let read = call("read", &[("path", "a")]);
    let json = "{\"path\": \"a\"}";
    let reasoned = |text: &str| expect(text, "", &[]);
    let quoted = format!("Like\n{read}\nor so");
    let chain = format!("x\n{read}\n{read}\nno");
    let undeclared = format!("x\n{}", call("format", &[("d", "c")]));
    let open = "x\n<tool_call>\n<function=read>\n<parameter=path>\na";
    let table = [
        (format!("Hm.\n\n{read}\n"), expect("Hm.", "", &[("read", json)])),
        (read.clone(), expect("", "", &[("read", json)])),
        (format!("Hm.\n{read}{read}"), expect("Hm.", "", &[("read", json), ("read", json)])),
        (format!("Hm.\n{read}\n</think>\n\n Now"), expect("Hm.", " Now", &[("read", json)])),
        (
            format!("Hm.\n{read}\n</think>\n\n{read}"),
            expect("Hm.", "", &[("read", json), ("read", json)]),
        ),
        (format!("Hm. {read}"), reasoned(&format!("Hm. {read}"))),
        (quoted.clone(), reasoned(&quoted)),
        (chain.clone(), reasoned(&chain)),
        (undeclared.clone(), reasoned(&undeclared)),
        (open.into(), reasoned(open)),
        (format!("{open}</think>b"), expect(open, "b", &[])),
        // An open call before a real one takes it for its value.
        (
            format!("x\n<tool_call>\nno\n{read}"),
            expect("x\n<tool_call>\nno", "", &[("read", json)]),
        ),
        (format!("a</think>{read}"), expect("a", "", &[("read", json)])),
    ];
    for (text, expected) in table {
        check(&text, true, End::Turn, &expected);
    }
    // A cut is not the end of the turn: an example could go on.
    check(&format!("Hm.\n{read}"), true, End::Cut, &reasoned(&format!("Hm.\n{read}")));
}

fn fragment() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => prop::sample::select(vec![
            "<tool_call>", "</tool_call>", "<function=read>", "<function=ping>", "<function=", "</function>",
            "<parameter=path>", "<parameter=a>", "<parameter=", "</parameter>", "<think>", "</think>", "\n", "\n\n",
            " ", "<", ">", "</", "\t", "1", "null",
        ]).prop_map(str::to_owned),
        1 => "[a-z<>/=\\n \"\\\\é🙂]{0,6}",
        1 => prop::sample::select(vec!["a", "\n x\n", "1", "</parameter>"])
            .prop_map(|value| call("read", &[("path", value)])),
        1 => prop::sample::select(vec!["7", "x"]).prop_map(|value| call("add", &[("a", value), ("b", "1.50")])),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn streamed_equals_whole(
        fragments in prop::collection::vec(fragment(), 0..14),
        thinking: bool,
        turn: bool,
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let text = fragments.concat();
        let end = if turn { End::Turn } else { End::Cut };
        let whole = answer([text.as_str()], &text, thinking, end);
        prop_assert_eq!(&answer(letters(&text), &text, thinking, end), &whole);
        let places: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        let places: std::collections::BTreeSet<usize> =
            cuts.iter().map(|cut| *cut.get(&places)).chain([0]).collect::<_>();
        let mut ends: Vec<usize> = places.iter().skip(1).copied().collect();
        ends.push(text.len());
        let pieces: Vec<&str> = places.iter().zip(ends).map(|(from, to)| &text[*from..to]).collect();
        prop_assert_eq!(&answer(pieces, &text, thinking, end), &whole);
    }

    #[test]
    fn nothing_is_lost(fragments in prop::collection::vec(fragment(), 0..10), thinking: bool) {
        // Without calls and think tags, the parts hold every character but newlines at the seams.
        let text = fragments.concat().replace("<tool_call>", "<tool>").replace("think>", "thought>");
        let got = answer([text.as_str()], &text, thinking, End::Turn);
        match thinking {
            true => prop_assert_eq!(got.reasoning, text.trim_matches('\n')),
            false => prop_assert_eq!(got.content, text),
        }
    }

    #[test]
    fn stops_in_a_stream_are_those_of_the_whole(
        text in "[ab<é]{0,24}",
        stops in prop::collection::vec("[ab<é]{1,4}", 0..4),
    ) {
        let matched = |pieces: Vec<&str>| {
            let mut matcher = StopMatcher::new(stops.clone());
            let mut outputs: Vec<_> = pieces.into_iter().map(|piece| matcher.push(piece)).collect();
            outputs.push(matcher.finish());
            let by = outputs.iter().find_map(|output| output.stopped_by);
            (outputs.into_iter().map(|output| output.text).collect::<String>(), by)
        };
        let whole = matched(vec![&text]);
        prop_assert_eq!(&matched(letters(&text)), &whole);
        for (at, _) in text.char_indices() {
            prop_assert_eq!(&matched(vec![&text[..at], &text[at..]]), &whole);
        }
    }
}
