"""A session with OpenAI's Python package. Usage: session.py BASE_URL KEY"""
import json
import sys

import openai

base, key = sys.argv[1:]
client = openai.OpenAI(base_url=base, api_key=key, max_retries=0, timeout=20)
model = client.models.list().data[0].id
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}}


def same(got, want):
    assert got == want, "got %r, want %r" % (got, want)


def user(text):
    return [{"role": "user", "content": text}]


assert client.models.retrieve(model).id == model

r = client.chat.completions.create(model=model, messages=user("[chat]"))
same((r.choices[0].message.content, r.choices[0].finish_reason), ("Hello.", "stop"))
same(r.choices[0].message.reasoning_content, "A greeting.")
same(r.usage.total_tokens, r.usage.prompt_tokens + r.usage.completion_tokens)

text, thoughts, usage, reasons = "", "", None, []
stream = client.chat.completions.create(model=model, messages=user("[stream]"), stream=True, stream_options={"include_usage": True})
for chunk in stream:
    usage = chunk.usage or usage
    for choice in chunk.choices:
        text += choice.delta.content or ""
        thoughts += getattr(choice.delta, "reasoning_content", None) or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
same((text, thoughts, reasons), ("one two three 🙂", "Count.", ["stop"]))
assert usage.completion_tokens > 0

messages = user("[tool] weather in Rome?")
for streamed in (False, True):
    if streamed:
        with client.chat.completions.stream(model=model, messages=messages, tools=[WEATHER]) as events:
            for _ in events:
                pass
            choice = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(model=model, messages=messages, tools=[WEATHER]).choices[0]
    call = choice.message.tool_calls[0]
    same((choice.finish_reason, call.function.name), ("tool_calls", "weather"))
    same(json.loads(call.function.arguments), {"city": "Rome", "days": 2})
result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
r = client.chat.completions.create(model=model, messages=messages + [choice.message, result] + user("[result] so?"), tools=[WEATHER])
same(r.choices[0].message.content, "It is sunny.")

r = client.chat.completions.create(model=model, messages=user("[chat]"), logprobs=True, top_logprobs=2)
entries = r.choices[0].logprobs.content
same(b"".join(bytes(e.bytes) for e in entries).decode(), "Hello.")
assert all(len(e.top_logprobs) == 2 and e.logprob <= 0 for e in entries)

same(len(client.chat.completions.create(model=model, messages=user("[chat]"), n=2).choices), 2)
same(client.completions.create(model=model, prompt="[none]").choices[0].text.strip()[-2:], "ok")


def fails(kind, **fields):
    try:
        client.chat.completions.create(**dict({"model": model, "messages": user("[chat]")}, **fields))
    except kind as error:
        return error
    raise AssertionError("no %s for %s" % (kind.__name__, fields))


same(fails(openai.NotFoundError, model="nope").code, "model_not_found")
same(fails(openai.BadRequestError, temperature=5).param, "temperature")
same(fails(openai.BadRequestError, messages=user("word " * 90000)).code, "context_length_exceeded")
fails(openai.InternalServerError, messages=user("[fault]"))
try:
    for _ in client.chat.completions.create(model=model, messages=user("[fault]"), stream=True):
        pass
    raise AssertionError("no error in the stream")
except openai.APIError:
    pass
try:
    openai.OpenAI(base_url=base, api_key="wrong", max_retries=0).models.list()
    raise AssertionError("a wrong key was accepted")
except openai.AuthenticationError as error:
    same(error.code, "invalid_api_key")
print("openai for Python %s: the session passed" % openai.__version__)
