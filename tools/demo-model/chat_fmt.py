"""Renders messages in the Qwen3.6 chat format, as (text, is_target) pieces. Equal to chat_template.jinja
(checked by `chat_fmt.py`)."""
import json

TOOL_HEAD = "# Tools\n\nThese functions are available to you:\n\n<tools>"
TOOL_TAIL = ("\n</tools>\n\nTo call a function, write a block of exactly this form, with nothing after it:\n\n<tool_call>\n"
             "<function=function_name>\n<parameter=parameter_name>\nvalue\n</parameter>\n</function>\n</tool_call>\n\n"
             "Fill in every required parameter. Several blocks may follow one another. "
             "If no function fits, answer in plain words.")


def js(v):
    return json.dumps(v, ensure_ascii=False)


def pieces(messages, tools=None, preserve=False, thinking=True, head=TOOL_HEAD, tail=TOOL_TAIL, every=False):
    """[(text, target)]; target pieces are what the model writes after the last user query
    (with every=True: all assistant turns). The last message must be the assistant's."""
    out, cur = [], ""
    sys_text = messages[0]["content"].strip() if messages[0]["role"] == "system" else None
    if tools:
        cur += "<|im_start|>system\n" + head + "".join("\n" + js(t) for t in tools) + tail
        if sys_text:
            cur += "\n\n" + sys_text
        cur += "<|im_end|>\n"
    elif sys_text is not None:
        cur += f"<|im_start|>system\n{sys_text}<|im_end|>\n"
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    n = len(messages)
    for i, m in enumerate(messages):
        role, content = m["role"], (m.get("content") or "").strip()
        if role == "user":
            cur += f"<|im_start|>user\n{content}<|im_end|>\n"
        elif role == "tool":
            if messages[i - 1]["role"] != "tool":
                cur += "<|im_start|>user"
            cur += f"\n<tool_response>\n{content}\n</tool_response>"
            if i == n - 1 or messages[i + 1]["role"] != "tool":
                cur += "<|im_end|>\n"
        elif role == "assistant":
            think = (m.get("reasoning_content") or "").strip()
            cur += "<|im_start|>assistant\n"
            body = ""
            block = preserve or i > last
            if block:
                if think:
                    cur += "<think>\n"; body = f"{think}\n</think>\n\n"
                else:
                    cur += "<think>\n\n</think>\n\n"
            body += content
            for j, call in enumerate(m.get("tool_calls") or []):
                body += ("\n\n" if content else "") if j == 0 else "\n"
                body += f"<tool_call>\n<function={call['name']}>\n"
                for k, v in call["arguments"].items():
                    body += f"<parameter={k}>\n{v if isinstance(v, str) else js(v)}\n</parameter>\n"
                body += "</function>\n</tool_call>"
            body += "<|im_end|>"
            if block or every:
                out.append((cur, 0)); out.append((body, 1)); cur = "\n"
            else:
                cur += body + "\n"
    if cur:
        out.append((cur, 0))
    return out


def text(*a, **k):
    return "".join(t for t, _ in pieces(*a, **k))


def prompt(messages, tools=None, thinking=True, preserve=False):
    """prompt with the generation header, as apply_chat_template(add_generation_prompt=True) gives it"""
    dummy = messages + [dict(role="assistant", content="", reasoning_content="x" if thinking else "")]
    ps = pieces(dummy, tools, preserve)
    k = max(i for i, p in enumerate(ps) if p[1])
    return "".join(t for t, _ in ps[:k])


if __name__ == "__main__":
    import random, sys
    from pathlib import Path
    import jinja2, synth
    env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda v, **k: js(v)
    def fail(m):
        raise ValueError(m)
    env.globals["raise_exception"] = fail
    t = env.from_string((Path(__file__).resolve().parents[2] / "models/demo/chat_template.jinja").read_text())
    g = synth.Gen(Path(sys.argv[1]), 77); bad = 0
    for i in range(2000):
        c = g.chat()
        msgs = [dict(m) for m in c["messages"]]
        for m in msgs:
            if m.get("tool_calls"):
                m["tool_calls"] = [dict(type="function", function=x) for x in m["tool_calls"]]
        a = text(c["messages"], c.get("tools"), preserve=c.get("preserve", False))
        b = t.render(messages=msgs, tools=c.get("tools"), preserve_thinking=c.get("preserve", False), add_generation_prompt=False)
        q = prompt(c["messages"][:-1], c.get("tools"), thinking=bool(i % 2), preserve=c.get("preserve", False))
        r = t.render(messages=msgs[:-1], tools=c.get("tools"), preserve_thinking=c.get("preserve", False), add_generation_prompt=True, enable_thinking=bool(i % 2))
        if a != b or q != r:
            bad += 1
            if bad < 3:
                print(repr(a), "\n", repr(b), "\n", repr(q), "\n", repr(r))
    print("template check:", 2000 - bad, "of 2000 equal")
