//! Sloppy messages: one test for each rule of `lily_chat::tolerance`.

mod common;

use common::{TEMPLATE, input, template};
use lily_chat::{ChatError, ChatTemplate, Rule, marks};
use serde_json::{Value, json};

const PLAIN: &str = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}";

fn tolerant(template: &ChatTemplate, messages: Value) -> (String, Vec<(Rule, usize)>) {
    let rendered = template.render_tolerant(&input(messages)).unwrap();
    let repairs = rendered.repairs.iter().map(|repair| (repair.rule, repair.message)).collect();
    (marks::unmark(&rendered.text).into_owned(), repairs)
}

/// Messages in both forms give the same prompt, by these rules.
fn same(sloppy: Value, clean: Value, rules: &[(Rule, usize)]) {
    let (text, repairs) = tolerant(&TEMPLATE, sloppy);
    assert_eq!(text, marks::unmark(&TEMPLATE.render(&input(clean)).unwrap()));
    assert_eq!(repairs, rules);
}

fn refused(messages: Value, place: &str) {
    match TEMPLATE.render_tolerant(&input(messages)) {
        Err(error @ ChatError::Message { .. }) => {
            assert!(error.to_string().starts_with(place), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn clean_messages_are_not_touched() {
    let messages = json!([
        {"role": "system", "content": "s"}, {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
        {"role": "tool", "content": "t"},
    ]);
    same(messages.clone(), messages, &[]);
}

#[test]
fn content_that_is_no_text_becomes_text() {
    let printed = tolerant(
        &template(PLAIN),
        json!([{"role": "user"}, {"role": "user", "content": null}, {"role": "user", "content": 1.5},
               {"role": "user", "content": {"type": "text", "text": "x"}}, {"role": "user", "content": true}]),
    );
    assert_eq!(printed.0, "[user|][user|][user|1.5][user|x][user|true]");
    assert_eq!(printed.1, (0..5).map(|at| (Rule::Content, at)).collect::<Vec<_>>());
}

#[test]
fn parts_are_joined_and_only_text_is_read() {
    same(
        json!([{"role": "user", "content": ["a", {"type": "text", "text": " b"}, {"type": "input_text", "text": " c"},
                {"text": " d"}, {"type": "refusal", "refusal": " e"}]}]),
        json!([{"role": "user", "content": "a b c d e"}]),
        &[(Rule::Parts, 0)],
    );
    for kind in ["image_url", "input_audio", "file", "what"] {
        let part = json!({"type": kind, "text": "x", "image_url": {"url": "data:"}});
        refused(
            json!([{"role": "user", "content": ["a", part]}]),
            "messages[0].content[1]: it is a part of type",
        );
    }
}

#[test]
fn roles_are_brought_into_form() {
    same(
        json!([{"role": "Developer", "content": "s"}, {"role": " USER ", "content": "u"}]),
        json!([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]),
        &[(Rule::Role, 0), (Rule::Role, 1)],
    );
    let knows = template("{% for m in messages %}{{ m.role }}{% endfor %}{# developer #}");
    assert_eq!(tolerant(&knows, json!([{"role": "developer", "content": "s"}])).0, "developer");
    let old = json!([{"role": "function", "name": "f", "content": "r"}]);
    assert_eq!(tolerant(&template(PLAIN), old).0, "[tool|r]");
}

#[test]
fn reasoning_and_calls_have_old_names() {
    same(
        json!([{"role": "user", "content": "u"}, {"role": "assistant", "content": null, "reasoning": "why",
                "tool_calls": null, "function_call": {"name": "f", "arguments": "{\"a\": 1}"}}]),
        json!([{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "reasoning_content": "why",
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}]),
        &[(Rule::Content, 1), (Rule::Reasoning, 1), (Rule::Calls, 1)],
    );
    same(
        json!([{"role": "user", "content": "u"}, {"role": "assistant", "content": "a", "tool_calls": null}]),
        json!([{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]),
        &[(Rule::Calls, 1)],
    );
}

#[test]
fn arguments_that_are_no_object_are_wrapped() {
    let with = |arguments: Value| {
        json!([{"role": "user", "content": "u"}, {"role": "assistant", "content": "",
               "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}])
    };
    for bad in [
        json!("not json"),
        json!("{\"a\": "),
        json!("[1]"),
        json!([1, "x"]),
        json!(7),
        json!("\"<b>\""),
    ] {
        same(with(bad.clone()), with(json!({ "arguments": bad })), &[(Rule::Arguments, 1)]);
    }
    for empty in [json!(null), json!(""), json!("  ")] {
        same(with(empty), with(json!({})), &[]);
    }
}

#[test]
fn system_messages_may_come_late_and_often() {
    same(
        json!([{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "u"},
               {"role": "system", "content": "a\n\nb"}, {"role": "system", "content": "c"}]),
        json!([{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "u"},
               {"role": "user", "content": "System message:\nc"}]),
        &[(Rule::LeadingSystem, 1), (Rule::RepeatedSystem, 3), (Rule::LateSystem, 4)],
    );
    // A template that takes them anywhere gets them as they are.
    let messages = json!([{"role": "user", "content": "u"}, {"role": "system", "content": "s"}]);
    assert_eq!(tolerant(&template(PLAIN), messages), ("[user|u][system|s]".into(), vec![]));
}

#[test]
fn a_late_system_message_leaves_the_prefix_as_it_was() {
    let mut messages =
        vec![json!({"role": "system", "content": "s"}), json!({"role": "user", "content": "u"})];
    let before = tolerant(&TEMPLATE, json!(messages)).0;
    messages.push(json!({"role": "system", "content": "late"}));
    let after = tolerant(&TEMPLATE, json!(messages)).0;
    assert!(after.starts_with(&before), "{before}\n{after}");
}

#[test]
fn a_chat_without_a_user_goes_on() {
    let call = json!({"function": {"name": "f", "arguments": {}}});
    let rest = [
        json!({"role": "assistant", "content": "", "tool_calls": [call]}),
        json!({"role": "tool", "content": "r"}),
    ];
    let system = json!({"role": "system", "content": "s"});
    let go_on = json!({"role": "user", "content": "Continue."});
    same(
        json!([system, rest[0], rest[1]]),
        json!([system, go_on, rest[0], rest[1]]),
        &[(Rule::NoUser, 1)],
    );
    same(json!([system]), json!([system, go_on]), &[(Rule::NoUser, 1)]);
    same(json!([rest[0], rest[1]]), json!([go_on, rest[0], rest[1]]), &[(Rule::NoUser, 0)]);
}

#[test]
fn a_result_without_a_call_is_kept() {
    // The demo template takes it; a strict one gets a user's message.
    let messages = json!([{"role": "user", "content": "u"}, {"role": "tool", "content": "r"}]);
    same(messages.clone(), messages.clone(), &[]);
    let strict = template(
        "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}[{{ m.role }}|{{ m.content }}]{% endfor %}",
    );
    let expected = "[user|u][user|Tool result:\nr]".to_owned();
    assert_eq!(tolerant(&strict, messages), (expected, vec![(Rule::OrphanTool, 1)]));
}

#[test]
fn what_no_rule_covers_is_an_error_that_names_the_place() {
    refused(json!([]), "messages: the list is empty");
    refused(json!(["hi"]), "messages[0]: it is not an object");
    refused(json!([{"content": "x"}]), "messages[0]: it has no role");
    refused(json!([{"role": "assistant", "tool_calls": "x"}]), "messages[0]: its tool_calls");
    for call in [
        json!({}),
        json!({"function": {}}),
        json!({"function": {"name": ""}}),
        json!(3),
        json!({"function": null}),
    ] {
        refused(
            json!([{"role": "assistant", "tool_calls": [call]}]),
            "messages[0].tool_calls[0]: it names no function",
        );
    }
    let robot = json!([{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}]);
    match TEMPLATE.render_tolerant(&input(robot)) {
        Err(ChatError::Refused { message }) => assert_eq!(message, "Unexpected message role."),
        other => panic!("{other:?}"),
    }
}

#[test]
fn big_numbers_in_argument_strings_keep_their_digits() {
    let big = "123456789012345678901234567890123456789012345678901";
    let text = format!(
        r#"{{"a": -{big}, "b": [{big}, 18446744073709551616], "s": "{big}", "i": -9223372036854775808}}"#
    );
    let messages = json!([{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}]);
    let (shown, repairs) = tolerant(
        &template(
            "{{ messages[1].tool_calls[0].function.arguments | tojson }}|{{ messages[1].tool_calls[0].function.arguments.a }}",
        ),
        messages,
    );
    assert_eq!(shown, format!("{text}|-{big}"));
    assert_eq!(repairs, [(Rule::Content, 1)]);
}
