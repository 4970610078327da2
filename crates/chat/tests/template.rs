//! The template environment, and the chat format of section 7.2 of the model description.

mod common;

use common::{TEMPLATE, TOKENIZER, controls, input, shown, template, user};
use lily_chat::{ChatError, ChatTemplate, RenderInput};
use serde_json::{Map, json};

#[test]
fn thinking_is_asked_for_unless_switched_off() {
    let with = |enable_thinking| RenderInput { enable_thinking, ..user("Hi") };
    let start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n";
    assert_eq!(shown(&TEMPLATE, &with(None)), start);
    assert_eq!(shown(&TEMPLATE, &with(Some(true))), start);
    assert_eq!(shown(&TEMPLATE, &with(Some(false))), format!("{start}\n</think>\n\n"));
}

#[test]
fn inline_thinking_is_split_off_by_the_template() {
    let messages = json!([
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "<think>\nold\n</think>\n\ntwo"},
        {"role": "user", "content": "3"},
        {"role": "assistant", "content": "<think>\nnew\n</think>\n\nfour <think> five"},
    ]);
    let dropped = "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n<think>\nnew\n</think>\n\nfour <think> five<|im_end|>\n";
    assert_eq!(shown(&TEMPLATE, &input(messages.clone())), dropped);

    let mut kept = input(messages.clone());
    kept.kwargs.insert("preserve_thinking".into(), json!(true));
    assert_eq!(
        shown(&TEMPLATE, &kept),
        dropped.replace("\ntwo", "\n<think>\nold\n</think>\n\ntwo")
    );
    // The third <think> is text: only the template's own pairs are control tokens.
    let think = TOKENIZER.id_of("<think>").unwrap();
    let count = |input: &RenderInput| {
        let controls = controls(&TEMPLATE, input);
        controls.iter().filter(|id| **id == think).count()
    };
    assert_eq!((count(&input(messages)), count(&kept)), (1, 2));
}

#[test]
fn a_template_that_does_not_split_thinking_gets_it_as_text() {
    let plain = template("{% for m in messages %}{{ m.content }}{% endfor %}");
    let messages = input(json!([{"role": "assistant", "content": "<think>a</think>b"}]));
    assert_eq!(shown(&plain, &messages), "<think>a</think>b");
    assert_eq!(controls(&plain, &messages), Vec::<u32>::new());
}

#[test]
fn tool_arguments_may_be_a_json_string() {
    let with = |arguments| {
        input(json!([
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": null, "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": arguments}}]},
            {"role": "tool", "content": "one"},
            {"role": "tool", "content": "two"},
        ]))
    };
    let object =
        json!({"z": "text <b>", "a": 1.0, "n": null, "t": true, "l": [1, "é"], "o": {"k": "v"}});
    let expected = "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call>\n<function=f>\n<parameter=z>\ntext <b>\n</parameter>\n<parameter=a>\n1.0\n</parameter>\n<parameter=n>\nnull\n</parameter>\n<parameter=t>\ntrue\n</parameter>\n<parameter=l>\n[1, \"é\"]\n</parameter>\n<parameter=o>\n{\"k\": \"v\"}\n</parameter>\n</function>\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n";
    assert_eq!(shown(&TEMPLATE, &with(object.clone())), expected);
    assert_eq!(shown(&TEMPLATE, &with(json!(object.to_string()))), expected);
    let none = shown(&TEMPLATE, &with(json!("")));
    assert!(none.contains("<function=f>\n</function>"), "{none}");

    for bad in [json!("{\"a\": "), json!("[1]"), json!(7)] {
        let error = TEMPLATE.render(&with(bad)).unwrap_err();
        assert!(
            error.to_string().starts_with("messages[1].tool_calls[0]: its arguments are not"),
            "{error}"
        );
    }
}

#[test]
fn refusals_of_the_template_are_told_in_its_words() {
    let cases = [
        (json!([]), "No messages provided."),
        (json!([{"role": "system", "content": "a"}]), "No user query found in messages."),
        (
            json!([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]),
            "System message must be at the beginning.",
        ),
        (
            json!([{"role": "user", "content": "a"}, {"role": "robot", "content": "b"}]),
            "Unexpected message role.",
        ),
    ];
    for (messages, expected) in cases {
        match TEMPLATE.render(&input(messages)) {
            Err(ChatError::Refused { message }) => assert_eq!(message, expected),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn malformed_messages_are_named() {
    for (messages, place) in
        [(json!(["hi"]), "messages[0]"), (json!([{"content": "x"}]), "messages[0]")]
    {
        let error = TEMPLATE.render(&input(messages)).unwrap_err().to_string();
        assert!(error.starts_with(place), "{error}");
    }
}

#[test]
fn the_environment_is_that_of_hugging_face() {
    let cases = [
        // trim_blocks and lstrip_blocks, no newline at the end.
        ("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"),
        ("{{ ' x '.strip() }}{{ 'a-b'.split('-')[-1] }}{{ 'xay'.startswith('xa') }}", "xbTrue"),
        (
            "{{ '\\n\\nx'.lstrip('\\n') }}{{ {'a': 1}.items() | list | length }}{{ {'a': 1}.get('b') }}",
            "x1None",
        ),
        (
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "02",
        ),
        (
            "{{ {'b': [1, 2.0, none, true], 'a': '<é&\\''} | tojson }}",
            "{\"b\": [1, 2.0, null, true], \"a\": \"<é&'\"}",
        ),
        ("{{ {'a': [1]} | tojson(indent=2) }}", "{\n  \"a\": [\n    1\n  ]\n}"),
        ("{{ [1, {'a': 2}] | tojson(separators=(',', ':')) }}", "[1,{\"a\":2}]"),
        (
            "{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=true, sort_keys=true) }}",
            "{\"a\": 1, \"b\": \"\\u00e9\"}",
        ),
        ("{{ true }} {{ none }} {{ 1.0 }} {{ true | string }}", "True None 1.0 True"),
        ("{{ missing }}{{ missing is defined }}{{ tools is none }}", "FalseTrue"),
        ("{{ word }}|{{ add_generation_prompt }}", "high|True"),
        ("{{ strftime_now('%Y') | int > 2024 }}", "True"),
    ];
    let mut with_word = user("x");
    with_word.kwargs = Map::from_iter([
        ("word".to_owned(), json!("high")),
        ("add_generation_prompt".to_owned(), json!(false)),
    ]);
    for (source, expected) in cases {
        assert_eq!(shown(&template(source), &with_word), expected, "{source}");
    }
}

#[test]
fn endless_templates_end() {
    let endless = [
        "{% for i in range(90000) %}{% for i in range(90000) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% for i in range(99) %}{{ 'x' * 1000000 }}{% endfor %}",
    ];
    for source in endless {
        let error = template(source).render(&user("x")).unwrap_err();
        assert!(
            matches!(error, ChatError::Limit { .. } | ChatError::Render { .. }),
            "{source}: {error}"
        );
    }
}

#[test]
fn long_chats_stay_within_the_limits() {
    let turn = |n: usize| {
        let role = if n.is_multiple_of(2) { "user" } else { "assistant" };
        json!({"role": role, "content": format!("turn {n} <b>")})
    };
    let long = RenderInput { messages: (0..10_001).map(turn).collect(), ..user("") };
    assert!(TEMPLATE.render(&long).is_ok());
    assert!(TEMPLATE.render(&user(&"word < ".repeat(1 << 20))).is_ok());
}

#[test]
fn templates_that_do_not_compile_are_errors() {
    for source in ["{% if %}", "{{ 'x' ", "\u{10FFF0}"] {
        let error = ChatTemplate::new(source, &TOKENIZER).unwrap_err();
        assert!(matches!(error, ChatError::TemplateSyntax { .. }), "{error}");
    }
}
