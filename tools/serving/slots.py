#!/usr/bin/env python3
"""Tokens a second of answers that are made at once by one `lily serve`, for several numbers of them.

    slots.py --lily PROGRAM --model DIR [--slots 1,2,4,8] [--prompt-tokens 4000] [--tokens 256] [--no-stops] [--lily-arg ARG …]

All prompts differ from their first words on, so that nothing of them is kept. What counts is the time in which all answers of a
number are being made: from the last one's first token to the first one's last. A checkpoint without tokenizer (`lily bench synth`)
gets that of the demo model beside it. Prints a line for each number: slots, tokens a second in sum, and for each.
"""
import argparse
import concurrent.futures
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time

DEMO = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "models", "demo")


def with_tokenizer(model, folder):
    if not os.path.isdir(model) or os.path.exists(os.path.join(model, "tokenizer.json")):
        return model
    for name in os.listdir(model):
        os.symlink(os.path.join(os.path.realpath(model), name), os.path.join(folder, name))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        os.symlink(os.path.realpath(os.path.join(DEMO, name)), os.path.join(folder, name))
    return folder


def stops(model):
    """A bias that keeps the tokens away that end an answer, where the tokenizer has them."""
    if not os.path.exists(os.path.join(model, "tokenizer.json")):
        return {}
    with open(os.path.join(model, "generation_config.json")) as file:
        ids = json.load(file).get("eos_token_id", [])
    return {str(id): -100 for id in (ids if isinstance(ids, list) else [ids])}


def prompt(o, n):
    """About so many tokens of words that begin otherwise for each number."""
    return "%d: " % n + " ".join("%d" % ((n * 7919 + i * 104729) % 900 + 100) for i in range(o.prompt_tokens // 4))


def answer(o, port, n):
    """When each event with text came, of the clock that all processes share, and the usage."""
    body = {"model": "m", "prompt": prompt(o, n), "max_tokens": o.tokens, "temperature": 1, "seed": n, "stream": True,
            "stream_options": {"include_usage": True}, "logit_bias": o.bias}
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    c.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    r = c.getresponse()
    if r.status != 200:
        print("status %d: %s" % (r.status, r.read(500)), file=sys.stderr)
        return None
    lines = []
    for line in r:
        lines.append((time.monotonic(), line))
    at, usage = [], None
    for came, line in lines: # only now: it takes longer than a token
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if event.get("error"):
                print(event["error"], file=sys.stderr)
                return None
            if event.get("usage"):
                usage = event["usage"]
            elif event.get("choices") and event["choices"][0].get("text"):
                at.append(came)
    return at, usage


def together(o, port, first, count):
    # A process each: one interpreter reads about a thousand events a second.
    with concurrent.futures.ProcessPoolExecutor(count) as pool:
        result = list(pool.map(answer, [o] * count, [port] * count, range(first, first + count)))
    if None in result or not all(at and usage for at, usage in result):
        sys.exit("an answer failed")
    begin, end = max(at[0] for at, _ in result), min(at[-1] for at, _ in result)
    if begin >= end:
        sys.exit("the answers do not overlap (%s): give more --tokens" % ", ".join("%d events in %.3f s" % (len(a), a[-1] - a[0]) for a, _ in result))
    # A token that is part of a character has no event of its own: events stand for tokens in proportion.
    tokens = sum(sum(begin < t <= end for t in at) / (len(at) - 1) * (usage["completion_tokens"] - 1) for at, usage in result)
    prompts = sorted(usage["prompt_tokens"] for _, usage in result)
    return tokens / (end - begin), prompts


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--lily", required=True)
    ap.add_argument("--model", required=True)
    ap.add_argument("--slots", default="1,2,4,8")
    ap.add_argument("--prompt-tokens", type=int, default=4000)
    ap.add_argument("--tokens", type=int, default=256)
    ap.add_argument("--no-stops", action="store_true", help="no answer ends before it has all tokens")
    ap.add_argument("--port", type=int, default=18080)
    ap.add_argument("--lily-arg", action="append", default=[])
    o = ap.parse_args()
    numbers = [int(n) for n in o.slots.split(",")]
    o.bias = stops(o.model) if o.no_stops else {}
    with tempfile.TemporaryDirectory() as folder:
        model = with_tokenizer(o.model, folder)
        context = str(o.prompt_tokens * 2 + o.tokens)
        server = subprocess.Popen([o.lily, "serve", "--model", model, "--port", str(o.port), "--parallel", str(max(numbers)), "--ctx", context, "--any-model",
                                   *o.lily_arg])
        try:
            for _ in range(600):
                try:
                    c = http.client.HTTPConnection("127.0.0.1", o.port, timeout=5)
                    c.request("GET", "/health")
                    if c.getresponse().status == 200:
                        break
                except OSError:
                    pass
                if server.poll() is not None:
                    sys.exit("the server ended")
                time.sleep(0.5)
            together(o, o.port, 0, 1)
            for n in numbers:
                rate, prompts = together(o, o.port, 1000 * n, n)
                print("%d\t%.1f\t%.1f\tprompts of %d to %d tokens" % (n, rate, rate / n, prompts[0], prompts[-1]), flush=True)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
