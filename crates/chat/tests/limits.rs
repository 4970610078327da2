//! No template can exhaust a stack, the memory or anyone's patience.

mod common;

use common::{TOKENIZER, template, user};
use lily_chat::{ChatError, ChatTemplate, RenderInput};
use serde_json::{Value, json};

fn limited(source: &str) {
    match template(source).render(&user("x")) {
        Err(ChatError::Limit { .. } | ChatError::Render { .. }) => {}
        other => panic!("{source}: {:?}", other.map(|text| text.len())),
    }
}

#[test]
fn sizes_are_limited() {
    for source in [
        "{{ 'x' * 100000000000 }}",
        "{{ [1] * 100000000000 }}",
        "{{ range(100000000000) | list }}",
        "{{ '%1000000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ 'x' | indent(100000000000) }}",
        "{{ 'x'.center(100000000000) }}",
        "{{ 'x'.zfill(100000000000) }}",
        "{{ 'x' | center(100000000000) }}",
        "{{ '\\t'.expandtabs(100000000000) }}",
        "{{ [1] | batch(10000000000, 'x') | list }}",
        "{{ [1] | slice(10000000000, 'x') | list }}",
        "{{ 10 ** 1000000000 }}",
        "{{ ([1] * 100000000000)[1:2] }}",
        "{{ ([1] * 100000000000)[::-1] }}",
        "{{ dict([[1, 2]] * 100000000000) }}",
        "{{ {} | tojson(separators=[1] * 100000000000) }}",
        "{% set n = namespace(s='xy') %}{% for i in range(60) %}{% set n.s = n.s.replace('x', n.s) %}{% endfor %}",
        "{% set n = namespace(s='xy') %}{% for i in range(60) %}{% set n.s = n.s.join([n.s, n.s]) %}{% endfor %}",
        "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    ] {
        limited(source);
    }
}

#[test]
fn recursion_is_limited() {
    for source in [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{{ varargs }}{{ f(n, n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{{ caller() }}{% endmacro %}{{ f() }}",
        "{% include 'chat_template' %}",
        "{% for n in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% set n = namespace() %}{% set n.x = n %}{{ n }}",
        "{% set n = namespace() %}{% set n.x = [n] %}{{ n ~ '' }}",
    ] {
        limited(source);
    }
    // What published templates need is far below.
    let schema = "{% macro f(n) %}{% if n %}{% for i in [1] %}{{ f(n - 1) }}{% endfor %}{% else %}end{% endif %}{% endmacro %}{{ f(40) }}";
    assert_eq!(template(schema).render(&user("x")).unwrap(), "end");
}

#[test]
fn nesting_of_values_is_limited() {
    let grow = |step: &str, then: &str| {
        format!(
            "{{% set n = namespace(x=[]) %}}{{% for i in range(90000) %}}{{% set n.x = {step} %}}{{% endfor %}}{then}"
        )
    };
    for (step, then) in [
        ("[n.x]", "done"),
        ("{'a': n.x}", "{{ n.x }}"),
        ("[[[[n.x]]]]", "{{ n.x | tojson }}"),
        ("(n.x,)", "{{ n.x == n.x }}"),
        ("[n.x, n.x]", "{{ n.x }}"),
    ] {
        limited(&grow(step, then));
    }
    // Slices are copies, so they do not pile up.
    let sliced = template(&grow("n.x[0:] + []", "{% for y in n.x %}{{ y }}{% endfor %}done"));
    assert_eq!(sliced.render(&user("x")).unwrap(), "done");
    // Through the arguments of macros, and all that one call can wrap.
    let wraps = format!("{{% set x = {}x{} %}}", "[".repeat(20), "]".repeat(20)).repeat(200);
    let filters = format!("{{% set x = x{} %}}", " | batch(1) | list".repeat(400)).repeat(3);
    for wrap in [wraps, filters] {
        for then in [
            "",
            "{{ x ~ '' }}",
            "{{ x == x[0] }}",
            "{{ x in [x[0]] }}",
            "{{ [x, 1] | unique | list | length }}",
            "{{ x is iterable }}",
        ] {
            limited(&format!(
                "{{% macro f(x, n) %}}{wrap}{{% if n %}}{{{{ f(x, n - 1) }}}}{{% else %}}{then}{{{{ x }}}}{{% endif %}}{{% endmacro %}}{{{{ f([1], 60) }}}}"
            ));
        }
    }
    let brackets = ("[".repeat(20), "]".repeat(20));
    limited(&format!(
        "{{% macro f(x) %}}{{{{ f({}x{}) }}}}{{% endmacro %}}{{{{ f(1) }}}}",
        brackets.0, brackets.1
    ));
}

#[test]
fn doubled_lists_are_printed_up_to_the_limit() {
    let set = "{% set x = [x, x] %}".repeat(60);
    limited(&format!("{{% set x = 'word' %}}{set}{{{{ x }}}}"));
    limited(&format!("{{% set x = 'word' %}}{set}{{{{ x | tojson }}}}"));
}

/// What a hostile template may do to a list of 2^60 words, or of as many items, in order to have it
/// written as text.
#[test]
fn doubled_values_are_never_written_out() {
    let nested = format!("{{% set x = 'word' %}}{}", "{% set x = [x, x] %}".repeat(60));
    let long = "{% set x = ['word'] * 100000000000 %}".to_owned();
    let repeated = "{% set x = [[[[['word'] * 9999] * 9999] * 9999] * 9999] * 9999 %}".to_owned();
    let mapped = format!("{{% set x = 'word' %}}{}", "{% set x = {1: x, 2: x} %}".repeat(60));
    let pairs = "{% set x = [[1, 2]] * 100000000000 %}".to_owned();
    limited(&format!("{pairs}{{{{ x | urlencode }}}}"));
    for set in [long, repeated, mapped, pairs] {
        for write in
            ["x ~ ''", "x | upper", "[x] | join", "'{}'.format(x)", "x is lower", "x + x ~ ''"]
        {
            limited(&format!("{set}{{{{ {write} }}}}"));
        }
    }
    {
        let set = nested;
        for write in [
            "x ~ ''",
            "'' ~ x",
            "1 + ('a' ~ 'b' ~ x) | length",
            "'x' if 'a' ~ x else 'y'",
            "f(x ~ 'a')",
            "['a' ~ x][0]",
            "{'a' ~ x: 1}",
            "x | string",
            "x | upper",
            "x | lower",
            "x | capitalize",
            "x | title",
            "x | trim",
            "x | safe",
            "x | e",
            "x | pprint",
            "x | replace('a', 'b')",
            "'a' | replace('a', x)",
            "'a' | replace(x, 'b')",
            "'a' | trim(x)",
            "'%s' | format(x)",
            "'{}'.format(x)",
            "x | indent",
            "x | truncate(5)",
            "x | center(5)",
            "x | wordcount",
            "x | urlencode",
            "x | tojson",
            "[x] | join",
            "[x] | map('upper') | list",
            "[x] | map('string') | list",
            "x is lower",
            "joiner(x)()",
            "'a'.join([x])",
            "'a'.replace('a', x)",
            "raise_exception(x)",
            "strftime_now(x)",
        ] {
            limited(&format!("{set}{{{{ {write} }}}}"));
        }
        let callable = format!("{set}{{{{ x is callable }}}}");
        assert_eq!(template(&callable).render(&user("x")).unwrap(), "False");
    }
    for step in ["x + x", "(x + x) + x", "x + []", "[] + x", "x + [1, 2]"] {
        let set = |of: &str| {
            format!("{{% set x = {of} %}}{}", format!("{{% set x = {step} %}}").repeat(60))
        };
        for of in ["[]", "'' | list", "[1]"] {
            let source = format!("{}{{{{ x | length > 200 }}}}", set(of));
            // Either they stay small, or they are stopped.
            match template(&source).render(&user("x")) {
                Ok(text) => assert_eq!(text, "False"),
                Err(error) => assert!(matches!(error, ChatError::Limit { .. }), "{error}"),
            }
        }
    }
    // Texts that double are stopped before they are made.
    for step in ["x ~ x", "x + x", "x * 2", "[x, x] | join", "x.replace('w', x)"] {
        let set = format!("{{% set x = {step} %}}").repeat(60);
        limited(&format!("{{% set x = 'word' %}}{set}{{{{ x | length }}}}"));
    }
}

#[test]
fn sources_beyond_reason_are_refused() {
    let many = |part: &str| part.repeat(100_000);
    for source in [
        format!("{{{{ {}1{} }}}}", many("("), many(")")),
        format!("{{{{ {}1 }}}}", many("not ")),
        format!("{{{{ {}1 }}}}", many("-")),
        format!("{{{{ 1{} }}}}", many(" + 1")),
        format!("{{{{ 1{} }}}}", many(" ~ 1")),
        format!("{{{{ 1{} }}}}", many(" if 1 else 1")),
        format!("{{{{ 1{} }}}}", many("|string")),
        format!("{{{{ a{} }}}}", many(".a")),
        format!("{{{{ {} }}}}", many("[")),
        format!("{{% if 1 %}}{}{{% endif %}}", many("{% elif 1 %}")),
        many("{% if true %}"),
        many("{% generation %}"),
        many("{% macro a() %}"),
        "x".repeat(2 << 20),
    ] {
        let error = ChatTemplate::new(&source, &TOKENIZER).unwrap_err();
        assert!(matches!(error, ChatError::TemplateSyntax { .. }), "{error}");
    }
    // Just below the limits, everything compiles, renders and is dropped.
    for part in [" + 1", " ~ 1", " if 1 else 1", "|string", " and 1"] {
        let source = format!("{{{{ 1{} }}}}", part.repeat(1000));
        assert!(template(&source).render(&user("x")).is_ok(), "{part}");
    }
}

#[test]
fn nested_input_is_limited() {
    let nested = |depth: usize| (0..depth).fold(json!("x"), |inner, _| json!([inner]));
    let with = |value: Value| RenderInput {
        messages: vec![json!({"role": "user", "content": "x", "extra": value})],
        ..RenderInput::default()
    };
    let printing = template("{{ messages[0].extra }}{{ messages[0].extra | tojson }}");
    assert!(printing.render(&with(nested(100))).is_ok());
    let error = printing.render(&with(nested(1000))).unwrap_err();
    assert!(matches!(error, ChatError::Limit { .. }), "{error}");
}
