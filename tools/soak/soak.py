#!/usr/bin/env python3
"""Mixed requests at once against `lily serve`, many of them given up by their clients.

    soak.py --lily PROGRAM --model DIR [--requests 10000] [--at-once 32] [--server-arg ARG …]

Each request must be answered rightly or refused rightly: greedy answers equal those given one by one before, bad
requests are a 400, clients that go away are forgotten; where log-probabilities are asked for, each token and each figure is
compared. /health must stay 200 throughout, nothing may run or wait at the end, all slots must then be there for as many long
answers, and memory (RSS) may grow by at most 16 MB between a tenth of the requests and all of them. Prints the p99 of the
times between tokens of 8 streams. Exits with 1 if a bound is missed.
"""
import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "api-suite"))
sys.dont_write_bytecode = True
import harness as H  # noqa: E402

OFF = {"chat_template_kwargs": {"enable_thinking": False}}
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}}
BAD = ({"messages": []}, {"temperature": 9}, {"model": "nobody"}, {"stop": ""}, {"messages": [{"role": "wizard", "content": "x"}]})
MOST_GROWTH = 16 << 20


def bodies():
    """Greedy requests of many forms, short enough that thousands of them run on two cores."""
    asked = ("Name a city.", "1+1=", "What is the capital of France?", "List three animals.", "Tell me a story about a whale.",
             "Translate: good morning.", "Spell cat.", "Why is the sky blue? " * 12)
    for i, text in enumerate(asked):
        base = {"temperature": 0, "max_tokens": 4 + 3 * i, "messages": [{"role": "user", "content": text}]}
        yield dict(base, **OFF)
        yield dict(base)
        yield dict(base, tools=[TOOL], **OFF)
        yield dict(base, logprobs=True, top_logprobs=2, **OFF)
        yield dict(base, temperature=1.0, seed=i, logprobs=True, top_logprobs=2, **OFF)
        yield dict(base, stop=["e", "\n\n"], frequency_penalty=0.5, **OFF)


def ask(srv, body, stream, leave=None):
    """(status, reasoning, text, calls, finish, log-probabilities); None if the client left."""
    c = H.Conn(srv.port, time.monotonic() + 300)
    try:
        body = dict(body, stream=stream)
        headers = {"Content-Type": "application/json"}
        c.send(H.build_request("POST", "/v1/chat/completions", headers, json.dumps(body).encode(), srv.port))
        if leave is not None:
            time.sleep(leave)
            c.abort()
            return None
        status, hd = c.head()
        if status != 200:
            return status, b"".join(c.pieces(status, hd)), None, None, None, None
        if stream:
            r = H.stream_result(H.sse(c.pieces(status, hd)), hd, c.clean)
            H.check(r.done and not r.error, "the stream broke off: %s" % r.error)
        else:
            r = H.plain_result(H.Resp(status, hd, b"".join(c.pieces(status, hd))))
        calls = [(x.name, x.raw) for x in r.calls] if r.finish != "length" else []
        return status, r.reasoning, r.text, calls, r.finish, r.logprobs or None
    finally:
        c.close()


def get(srv, path):
    c = H.Conn(srv.port, time.monotonic() + 60)
    c.send(H.build_request("GET", path, {}, None, srv.port))
    r = c.response("GET")
    c.close()
    return r


def rss(srv):
    with open("/proc/%d/status" % srv.proc.pid) as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("VmRSS"))


def gaps(srv):
    """Seconds between the events of 8 streams at once."""
    out = []

    def one(i):
        c = H.Conn(srv.port, time.monotonic() + 300)
        body = {"temperature": 0, "max_tokens": 64, "stream": True, "messages": [{"role": "user", "content": "Tell me story %d." % i}]}
        c.send(H.build_request("POST", "/v1/chat/completions", {}, json.dumps(body).encode(), srv.port))
        status, hd = c.head()
        at = [e.at for e in H.sse(c.pieces(status, hd)) if e.comment is None]
        out.extend(b - a for a, b in zip(at[1:], at[2:-2]))
        c.close()
    H.parallel([lambda i=i: one(i) for i in range(8)], 300)
    return sorted(out)


def slots(srv):
    """All slots run at once: none was lost."""
    limit = int(get(srv, "/metrics").text.split("\nlily_parallel_limit ")[1].split("\n")[0])
    body = {"max_tokens": 1500, "temperature": 1.5, "stream": True, "messages": [{"role": "user", "content": "Go on."}]}
    with open(os.path.join(srv.opts.model, "generation_config.json")) as f:
        ends = json.load(f)["eos_token_id"]
    body["logit_bias"] = {str(i): -100 for i in (ends if isinstance(ends, list) else [ends])}
    held = []
    for _ in range(limit):
        c = H.Conn(srv.port, time.monotonic() + 300)
        c.send(H.build_request("POST", "/v1/chat/completions", {}, json.dumps(body).encode(), srv.port))
        held.append(c)
    most, end = 0, time.monotonic() + 30
    while most < limit and time.monotonic() < end:
        running = int(get(srv, "/metrics").text.split("\nlily_requests_running ")[1].split("\n")[0])
        most = max(most, running)
    for c in held:
        c.abort()
    return most, limit


class Soak:
    def __init__(self, srv, o):
        self.srv, self.o = srv, o
        self.bodies = list(bodies())
        self.serial = [ask(srv, b, False) for b in self.bodies]
        self.next = itertools.count()
        self.faults, self.counts = [], {"right": 0, "refused": 0, "busy": 0, "left": 0}
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.early = None

    def one(self, n):
        rng = random.Random(n)
        kind = rng.random()
        i = rng.randrange(len(self.bodies))
        stream = rng.random() < 0.5
        if kind < 1 / 3:
            ask(self.srv, self.bodies[i], stream, leave=rng.random() * 0.1)
            return "left"
        if kind < 0.45:
            got = ask(self.srv, dict(self.bodies[i], **rng.choice(BAD)), stream)
            H.check(got[0] in (400, 404), "a bad request got %s" % (got,))
            return "refused"
        got = ask(self.srv, self.bodies[i], stream)
        if got[0] == 429:
            time.sleep(0.2)
            return "busy"
        H.eq(got, self.serial[i], "answer %d of body %d, stream %s" % (n, i, stream))
        return "right"

    def worker(self):
        for n in self.next:
            if n >= self.o.requests:
                return
            if n == self.o.requests // 10:
                self.early = rss(self.srv)
            try:
                kind = self.one(n)
                with self.lock:
                    self.counts[kind] += 1
            except Exception as e:
                with self.lock:
                    self.faults.append("request %d: %s: %s" % (n, type(e).__name__, e))

    def watch(self):
        while not self.over.wait(0.5):
            try:
                status = get(self.srv, "/health").status
                H.eq(status, 200, "status of /health")
            except Exception as e:
                self.faults.append("/health: %s" % e)

    def run(self):
        watch = threading.Thread(target=self.watch, daemon=True)
        watch.start()
        workers = [threading.Thread(target=self.worker) for _ in range(self.o.at_once)]
        for w in workers:
            w.start()
        for w in workers:
            w.join()
        self.over.set()
        watch.join()
        end = time.monotonic() + 10
        while True:
            m = get(self.srv, "/metrics").text
            idle = "lily_requests_running 0\n" in m and "lily_requests_waiting 0\n" in m
            if idle or time.monotonic() > end:
                break
            time.sleep(0.1)
        if not idle:
            self.faults.append("something still runs or waits at the end")
        return rss(self.srv) - (self.early or 0)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--lily", required=True)
    ap.add_argument("--model", required=True)
    ap.add_argument("--requests", type=int, default=10000)
    ap.add_argument("--at-once", type=int, default=32)
    ap.add_argument("--server-arg", action="append", default=[])
    o = ap.parse_args()
    with tempfile.TemporaryDirectory() as dir:
        mode = "replay" if "--replay" in o.server_arg else "real"
        args = iter(o.server_arg)
        replay = next((next(args) for a in args if a == "--replay"), None)
        o.server_arg = [a for a in o.server_arg if a not in ("--replay", replay)]
        srv = H.Server(o, mode, (("queue", 256), ("ctx", 2048)), replay, dir).start(120)
        try:
            soak = Soak(srv, o)
            t0 = time.monotonic()
            growth = soak.run()
            seconds = time.monotonic() - t0
            times = gaps(srv)
            most, limit = slots(srv)
        finally:
            srv.stop()
    print("%d requests in %.0f s: %s" % (o.requests, seconds, ", ".join("%d %s" % (n, k) for k, n in soak.counts.items())))
    print("RSS grew by %.1f MB from request %d to %d" % (growth / 1e6, o.requests // 10, o.requests))
    if times:
        print("8 streams: p50 %.1f ms, p99 %.1f ms between tokens" % (times[len(times) // 2] * 1e3, times[len(times) * 99 // 100] * 1e3))
    print("%d of %d slots run at the end" % (most, limit))
    if most < limit:
        soak.faults.append("slots were lost")
    if growth > MOST_GROWTH:
        soak.faults.append("RSS grew by more than %d MB" % (MOST_GROWTH >> 20))
    for fault in soak.faults[:20]:
        print("FAULT " + H.short(fault, 400))
    print("%d faults" % len(soak.faults))
    return 1 if soak.faults else 0


if __name__ == "__main__":
    sys.exit(main())
