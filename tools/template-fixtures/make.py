#!/usr/bin/env python3
"""Writes crates/chat/tests/fixtures/templates.json: what Python's jinja2 makes of templates and conversations.

    pip install jinja2==3.1.6
    python3 tools/template-fixtures/make.py

The environment is built as Hugging Face transformers builds it (`utils/chat_template_utils.py`). Three kinds of
cases are written: conversations through the demo model's template, conversations through constructs.jinja, and
the single lines of snippets.txt. Nothing depends on the day: `strftime_now` is held at one moment.
"""
import datetime
import json
from pathlib import Path

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

import conversations

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FIXTURES = ROOT / "crates/chat/tests/fixtures"
NOW = datetime.datetime(2024, 2, 29, 12, 59, 59)

VARIABLES = {
    "data": {"b": [1, 2.5, -0.0, True, None], "a": "é<&>\"'\\\n\t\u0001\u007f", "nested": {"k": {}, "e": [], "ü": "😀"}},
    "list": [1, 2, 3, 4, 5],
    "text": "Some <b>text</b> here",
    "floats": [0.1, 1e15, 1e16, 1e-5, 0.0001, 1.5e300, 5e-324, 123456.789, -2.0, 1e22, 3.0e-7],
    "ints": [0, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1],
    "odd": ["\u0000\b\f\r\u001f", "\u2028\u2029", "\ufeff", "😀é", "\u00a0", "'", '"', "</script>", "a\\b"],
    "tree": [{"v": 1, "kids": [{"v": 2, "kids": [{"v": 3}]}, {"v": 4}]}, {"v": 5}],
    "people": [
        {"name": "Ann", "city": "Rome", "age": 40},
        {"name": "Bob", "city": "Oslo", "age": 31},
        {"name": "Cid", "city": "Rome", "age": 25, "zip": 7},
    ],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": "done"},
    ],
}


class GenerationTag(Extension):
    """The `generation` block of transformers' AssistantTracker, without its bookkeeping."""

    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_generation_support"), [], [], body).set_lineno(lineno)

    @jinja2.pass_eval_context
    def _generation_support(self, context, caller):
        return caller()


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(format):
        return NOW.strftime(format)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


def outcome(env, source, variables):
    """The text, or what kind of error: `raised` by the template, `syntax`, `undefined`, or `other`."""
    try:
        return {"text": env.from_string(source).render(**variables)}
    except jinja2.exceptions.TemplateSyntaxError:
        return {"error": "syntax"}
    except jinja2.exceptions.UndefinedError:
        return {"error": "undefined"}
    except jinja2.exceptions.TemplateError as error:
        if type(error) is jinja2.exceptions.TemplateError:
            return {"error": "raised", "message": str(error.message)}
        return {"error": "other"}
    except Exception:
        return {"error": "other"}


def render_chat(env, source, chat):
    variables = dict(chat.get("kwargs", {}))
    variables.update(messages=chat["messages"], tools=chat.get("tools"), add_generation_prompt=chat.get("generate", True))
    if "enable_thinking" in chat:
        variables["enable_thinking"] = chat["enable_thinking"]
    return outcome(env, source, variables)


def main():
    env = environment()
    snippets = [[source, outcome(env, source, VARIABLES)] for source in conversations.snippets((HERE / "snippets.txt").read_text())]
    templates = {
        "demo": (ROOT / "models/demo/chat_template.jinja").read_text(),
        "constructs": (FIXTURES / "constructs.jinja").read_text(),
    }
    chats = conversations.all_chats()
    out = {
        "made_with": "jinja2 " + jinja2.__version__,
        "now": int(NOW.replace(tzinfo=datetime.timezone.utc).timestamp()),
        "variables": VARIABLES,
        "snippets": snippets,
        "chats": [
            dict(chat, **{name: render_chat(env, source, chat) for name, source in templates.items()}) for chat in chats
        ],
    }
    text = "{\n" + ",\n".join(
        json.dumps(key) + ": " + (
            "[\n" + ",\n".join(json.dumps(i, ensure_ascii=False, separators=(",", ":")) for i in value) + "\n]"
            if isinstance(value, list) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        ) for key, value in out.items()
    ) + "\n}\n"
    (FIXTURES / "templates.json").write_text(text)
    kinds = {}
    for _, result in snippets:
        kinds[result.get("error", "text")] = kinds.get(result.get("error", "text"), 0) + 1
    print(len(chats), "conversations,", len(snippets), "snippets", kinds, len(text.encode()), "bytes")


if __name__ == "__main__":
    main()
