"""Conversations for the template fixtures: written ones for each trait of a chat, and seeded random ones."""
import random
import re

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a place <now> & \"then\"",
    "parameters": {"type": "object", "properties": {
        "city": {"type": "string", "description": "Stadt, z. B. Köln"},
        "days": {"type": "integer", "default": 3, "minimum": 0.5}}, "required": ["city"]}}}
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}, "strict": True}

TEXTS = [
    "Hi", "  padded \n", "", "two\nlines", "Grüße, 世界 😀", "<b>bold</b> & 'quoted' \"text\"", "{{ not }} {% a %} {# tag #}",
    "a\tb\\c", "trailing newline\n\n", "100 % sure", "ends with <", "| pipes | and |> arrows", "x" * 40, "e\u0301 combined",
    "\u00a0hard space\u00a0", "line\u2028sep", "None", "true", "[1, 2]", "1.0",
]
ARGUMENTS = [
    {}, {"city": "Köln"}, {"city": "Rome", "days": 3}, {"flag": True, "none": None, "f": 1.0, "big": 1e16, "small": 1e-7},
    {"nested": {"list": [1, [2, {"k": "v"}], []], "empty": {}}, "text": "multi\nline <x>"},
    {"path": "a\\b", "quote": "say \"hi\"", "n": -5, "u": 18446744073709551615},
]


def line_breaks(line):
    return line.replace("⏎", "\n").replace("␍", "\r").replace("␉", "\t")


def snippets(text):
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        parts = [line] if "{%" in line else re.split(r"(?<=\}\})[ |]+(?=\{\{)", line)
        for part in parts:
            yield line_breaks(part)


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return dict({"role": "assistant", "content": text}, **more)


def call(name, arguments):
    return {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(text):
    return {"role": "tool", "tool_call_id": "call_0", "content": text}


def written():
    hi = user("Hi")
    two = [user("1"), assistant("<think>\nold\n</think>\n\ntwo"), user("3")]
    yield {"messages": [hi]}
    yield {"messages": [hi], "generate": False}
    yield {"messages": [hi], "enable_thinking": False}
    yield {"messages": [hi], "enable_thinking": True}
    yield {"messages": [system("Be brief."), hi]}
    yield {"messages": [system(""), hi]}
    yield {"messages": [system("  x  "), hi], "tools": [WEATHER]}
    yield {"messages": [hi], "tools": [WEATHER, SEARCH]}
    yield {"messages": [system("s"), hi], "tools": []}
    yield {"messages": two}
    yield {"messages": two, "kwargs": {"preserve_thinking": True}}
    yield {"messages": two, "kwargs": {"preserve_thinking": False}}
    yield {"messages": [hi, assistant("a", reasoning_content="why\n"), user("more")]}
    yield {"messages": [hi, assistant("a", reasoning_content="why")], "generate": False}
    yield {"messages": [hi, assistant("a", reasoning_content="")], "generate": False}
    yield {"messages": [hi, assistant("a", reasoning_content=None)], "generate": False}
    yield {"messages": [hi, assistant("<think>\nunfinished")]}
    yield {"messages": [hi, assistant("no open</think>rest")]}
    yield {"messages": [hi, assistant("<think>a</think>b<think>c</think>d")]}
    for arguments in ARGUMENTS:
        yield {"messages": [hi, assistant("", tool_calls=[call("f", arguments)]), tool("done")], "tools": [WEATHER]}
    yield {"messages": [hi, assistant("text first", tool_calls=[call("f", {}), call("g", {"x": 1})]), tool("1"), tool("2"), assistant("ok")]}
    yield {"messages": [hi, assistant(None, tool_calls=[call("f", {})]), tool("1"), user("and?"), assistant("", tool_calls=[{"name": "flat", "arguments": {"a": "b"}}]), tool("")]}
    yield {"messages": [hi, assistant("x", tool_calls=[]), user("y")]}
    yield {"messages": [hi, assistant("x", tool_calls=None), user("y")]}
    yield {"messages": [user([{"type": "text", "text": "part one "}, {"type": "text", "text": "part two"}])]}
    yield {"messages": [system([{"type": "text", "text": "s"}]), user([{"type": "text", "text": ""}])]}
    yield {"messages": [user([])]}
    yield {"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]}
    yield {"messages": [hi, {"role": "assistant", "content": None}, user("again")]}
    yield {"messages": [user(None)]}
    yield {"messages": [{"role": "user"}]}
    yield {"messages": []}
    yield {"messages": [system("only")]}
    yield {"messages": [hi, system("late")]}
    yield {"messages": [system("a"), system("b"), hi]}
    yield {"messages": [system("a"), assistant("b"), tool("c")]}
    yield {"messages": [hi, {"role": "robot", "content": "x"}]}
    yield {"messages": [{"role": "developer", "content": "x"}, hi]}
    yield {"messages": [tool("orphan"), hi]}
    yield {"messages": [hi, hi, assistant("a"), assistant("b"), hi]}
    yield {"messages": [hi], "kwargs": {"reasoning_effort": "high", "model_identity": "You are Lily."}}
    yield {"messages": [dict(hi, name="Ann", extra={"k": [1, None]})]}
    yield {"messages": [user("q"), assistant("", tool_calls=[call("f", {"x": "</parameter>"})]), tool("</tool_response>"), tool("x")]}
    for text in TEXTS:
        yield {"messages": [system(text), user("q " + text), assistant(text), user(text + "?")]}


def drawn(count):
    dice = random.Random(3)
    for _ in range(count):
        messages = [system(dice.choice(TEXTS))] if dice.random() < 0.5 else []
        for _ in range(dice.randrange(1, 4)):
            messages.append(user(dice.choice(TEXTS)))
            for _ in range(dice.randrange(3)):
                more = {}
                if dice.random() < 0.4:
                    more["reasoning_content"] = dice.choice(TEXTS)
                calls = dice.randrange(3)
                if calls:
                    more["tool_calls"] = [call(dice.choice("fgh"), dice.choice(ARGUMENTS)) for _ in range(calls)]
                messages.append(assistant(dice.choice(TEXTS), **more))
                messages += [tool(dice.choice(TEXTS)) for _ in range(calls)]
        chat = {"messages": messages, "generate": dice.random() < 0.8}
        if dice.random() < 0.4:
            chat["tools"] = dice.sample([WEATHER, SEARCH], dice.randrange(3))
        if dice.random() < 0.3:
            chat["enable_thinking"] = dice.random() < 0.5
        if dice.random() < 0.3:
            chat["kwargs"] = {"preserve_thinking": True}
        yield chat


def all_chats():
    return [*written(), *drawn(62)]
