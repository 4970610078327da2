#!/usr/bin/env python3
"""Kills `lily` with SIGKILL at random moments, starts it again, and looks for damage.

    kill9.py --lily PROGRAM --model DIR [--rounds N] [--seed S]

pull      a download from a hub on the loopback address: no name in the cache may promise what is not there, and the
          download must come to its end by being taken up again
serve     answers under way: the same port serves again at once, and greedy answers are what they were
chat      messages typed, a conversation saved: the history holds whole messages, a saved file is the old or the new one
results   rows of measurements: each line of the file is a whole row
synth     a synthetic checkpoint: what is left is refused, never taken for a checkpoint

Exits with 1 if something is damaged.
"""
import argparse
import hashlib
import http.server
import json
import os
import pty
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "api-suite"))
sys.dont_write_bytecode = True
import harness as H  # noqa: E402

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ID = "Org/Model-1"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
         "model.safetensors.index.json", "model.safetensors")


def git_sum(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub(http.server.ThreadingHTTPServer):
    """The demo model as a hub would serve it, at a few megabytes a second."""
    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {}
        for name in FILES:
            with open(os.path.join(folder, name), "rb") as f:
                self.files[name] = f.read()
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.address = "http://127.0.0.1:%d" % self.server_port

    def handle_error(self, request, client_address):
        pass                                        # who was killed hangs up


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        files = self.server.files
        if self.path.startswith("/api/models/"):
            siblings = []
            for name, data in files.items():
                entry = {"rfilename": name, "size": len(data), "blobId": git_sum(data)}
                if name.endswith(".safetensors"):
                    entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
                siblings.append(entry)
            return self.reply(200, {}, json.dumps({"sha": COMMIT, "siblings": siblings}).encode())
        data = files.get(self.path.rsplit("/", 1)[1])
        if data is None:
            return self.reply(404, {}, b"")
        tag = '"%s"' % hashlib.sha256(data).hexdigest()
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if start and self.headers.get("If-Range", tag) == tag:
            at = int(start[1])
            return self.reply(206, {"ETag": tag, "Content-Range": "bytes %d-%d/%d" % (at, len(data) - 1, len(data))}, data[at:])
        self.reply(200, {"ETag": tag}, data)

    def reply(self, status, headers, body):
        self.send_response(status)
        for k, v in headers.items():
            self.send_header(k, v)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for at in range(0, len(body), 1 << 18):
            self.wfile.write(body[at:at + (1 << 18)])
            if len(body) > 1 << 20:
                time.sleep(0.02)


class Lily:
    def __init__(self, o, home):
        self.o, self.home = o, home
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "LILY_"))}
        self.env.update(HOME=home, XDG_STATE_HOME=home + "/state", HF_HUB_CACHE=home + "/hub")

    def start(self, *args, **kw):
        return subprocess.Popen([self.o.lily, *args], env=self.env, stdin=subprocess.DEVNULL, stdout=kw.pop("stdout", subprocess.DEVNULL),
                                stderr=subprocess.DEVNULL, **kw)

    def run(self, *args):
        return subprocess.run([self.o.lily, *args], env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)

    def killed(self, after, *args):
        """Runs it and kills it; whether it was still running."""
        p = self.start(*args)
        try:
            p.wait(after)
            return False
        except subprocess.TimeoutExpired:
            p.send_signal(signal.SIGKILL)
            p.wait()
            return True


def check_cache(root):
    """Each whole blob has the sum in its name, each file of a snapshot leads to one, a ref names a whole snapshot."""
    repo = os.path.join(root, "models--Org--Model-1")
    blobs = os.path.join(repo, "blobs")
    for name in os.listdir(blobs) if os.path.isdir(blobs) else []:
        if ".incomplete" in name:
            continue
        with open(os.path.join(blobs, name), "rb") as f:
            data = f.read()
        H.check(name in (git_sum(data), hashlib.sha256(data).hexdigest()), "blob %s is not its sum" % name)
    snapshot = os.path.join(repo, "snapshots", COMMIT)
    names = [n for n in os.listdir(snapshot)] if os.path.isdir(snapshot) else []
    for name in names:
        H.check(name.startswith(".") or os.path.isfile(os.path.realpath(os.path.join(snapshot, name))), "%s leads nowhere" % name)
    ref = os.path.join(repo, "refs", "main")
    if os.path.exists(ref):
        with open(ref) as f:
            H.eq(f.read(), COMMIT, "the ref")
        H.check(set(FILES) <= set(names), "the ref names a snapshot that is not whole: %s" % names)


def pull(o, rng, lily):
    hub = Hub(o.model)
    lily.env["HF_ENDPOINT"] = hub.address
    cache = os.path.join(lily.home, "hub")
    kills = 0
    for _ in range(o.rounds):
        shutil.rmtree(cache, ignore_errors=True)
        for attempt in range(200):
            running = lily.killed(rng.uniform(0.005, 0.7), "pull", ID, "--quiet")
            check_cache(cache)
            models = json.loads(lily.run("models", "--json").stdout)["models"]
            whole = [m for m in models if m["complete"]]
            if not running:
                H.eq(len(whole), 1, "complete models after the pull ended")
                break
            kills += 1
            if whole:
                r = lily.run("inspect", ID, "--verify")
                H.eq(r.returncode, 0, "exit code of inspect --verify on what is called complete: " + r.stderr)
        else:
            raise H.Fail("200 attempts were not enough: nothing is taken up")
        H.eq(lily.run("inspect", ID, "--verify").returncode, 0, "exit code of inspect --verify")
    r = lily.run("run", "What is the capital of France?", "--model", ID, "--temperature", "0", "--no-think", "--quiet")
    H.eq(r.stdout, "The capital of France is Paris.\n", "the answer")
    return "%d kills, %d downloads brought to their end" % (kills, o.rounds)


def served(o, rng, lily):
    port = H.free_port()
    want, kills = None, 0

    def post(body, wait=60):
        c = H.Conn(port, time.monotonic() + wait)
        try:
            c.send(H.build_request("POST", "/v1/chat/completions", {"Content-Type": "application/json"}, json.dumps(body).encode(), port))
            status, hd = c.head()
            return status, b"".join(c.pieces(status, hd))
        finally:
            c.close()

    for _ in range(4 * o.rounds):
        p = lily.start("serve", "--port", str(port), "--model", o.model, "--ctx", "2048")
        end = time.monotonic() + 60
        body = {"temperature": 0, "max_tokens": 30, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        while True:
            try:
                status, data = post(body)
                break
            except OSError:
                H.check(p.poll() is None, "it does not start again on the port that it had")
                H.check(time.monotonic() < end, "it does not serve within a minute")
                time.sleep(0.02)
        H.eq(status, 200, "status")
        got = json.loads(data)["choices"][0]
        want = want or got
        H.eq(got, want, "the greedy answer after a restart")

        def noise(i):
            try:
                post({"stream": True, "max_tokens": 500, "temperature": 1.2, "messages": [{"role": "user", "content": "Story %d" % i}]})
            except (OSError, H.Fail, ValueError):
                pass                                # it is killed meanwhile
        clients = [threading.Thread(target=noise, args=(i,), daemon=True) for i in range(6)]
        for c in clients:
            c.start()
        time.sleep(rng.uniform(0, 0.8))
        p.send_signal(signal.SIGKILL)
        p.wait()
        kills += 1
        for c in clients:
            c.join(60)
            H.check(not c.is_alive(), "a client still waits for a server that is gone")
    return "%d kills" % kills


def typed(lily, lines, after, *args):
    """Types into a chat on a terminal and kills it; what it printed."""
    master, slave = pty.openpty()
    p = subprocess.Popen([lily.o.lily, "chat", *args], env=dict(lily.env, TERM="xterm"), stdin=slave, stdout=slave, stderr=slave, close_fds=True,
                         start_new_session=True)
    os.close(slave)
    out, end, lines = b"", time.monotonic() + after, list(lines)
    prompts = 0
    while time.monotonic() < end and p.poll() is None:
        if select.select([master], [], [], 0.02)[0]:
            try:
                out += os.read(master, 65536)
            except OSError:
                break
        # A prompt has come: the next line.
        if lines and out.count(b"> ") > prompts:
            prompts = out.count(b"> ")
            os.write(master, lines.pop(0).encode() + b"\r")
    if p.poll() is None:
        p.send_signal(signal.SIGKILL)
    p.wait()
    os.close(master)
    return out.decode(errors="replace")


def chat(o, rng, lily):
    history = os.path.join(lily.home, "state", "lily", "history")
    saved = os.path.join(lily.home, "talk.json")
    sent, kills = set(), 0
    for n in range(3 * o.rounds):
        lines = []
        for k in range(6):
            text = "message %d-%d %s end" % (n, k, "x" * rng.randrange(1, 200))
            lines += [text, "/save %s" % saved]
            sent.update(lines[-2:])
        out = typed(lily, lines, rng.uniform(0.3, 3), "--model", o.model, "--max-tokens", "4")
        H.check("panicked" not in out and "error:" not in out, "the chat says: " + H.short(out, 300))
        kills += 1
        if os.path.exists(history):
            with open(history, encoding="utf-8") as f:
                kept = f.read().splitlines()
            bad = [line for line in kept if line not in sent and not line.startswith("#")]
            H.check(not bad, "the history holds %r, which nobody typed" % bad[:2])
        if os.path.exists(saved):
            with open(saved, encoding="utf-8") as f:
                json.load(f)
    H.check(os.path.exists(history) and os.path.exists(saved), "nothing was typed or saved: the check checks nothing")
    return "%d kills, %d lines of history" % (kills, len(open(history).read().splitlines()))


def results(o, rng, lily):
    path = os.path.join(lily.home, "run.tsv")
    args = ("bench", "run", "--model", o.model, "--prefill", "16", "--decode", "16", "--rounds", "1", "--no-floors", "--record", lily.home)
    columns, kills = None, 0
    for _ in range(2 * o.rounds):
        kills += lily.killed(rng.uniform(0.1, 4), *args)
        if os.path.exists(path):
            with open(path, encoding="utf-8") as f:
                text = f.read()
            rows = [line.split("\t") for line in text.splitlines()]
            columns = len(rows[0])
            H.check(text.endswith("\n") and all(len(r) == columns for r in rows), "a row of the results is not whole")
    return "%d kills" % kills


def synth(o, rng, lily):
    kills = 0
    for _ in range(o.rounds):
        out = os.path.join(lily.home, "synth")
        shutil.rmtree(out, ignore_errors=True)
        running = lily.killed(rng.uniform(0.05, 1.5), "bench", "synth", "--layers", "1", "--out", out)
        kills += running
        r = lily.run("inspect", out)
        if running and not os.path.exists(os.path.join(out, "model.safetensors.index.json")):
            H.check(r.returncode != 0 or lily.run("inspect", out, "--verify").returncode == 0, "what is left of a synthetic checkpoint is taken for one")
            H.check(r.returncode == 0 or "error: " in r.stderr, "no reason is given: " + r.stderr)
        elif not running:
            H.eq(r.returncode, 0, "exit code of inspect")
        shutil.rmtree(out, ignore_errors=True)
    return "%d kills" % kills


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--lily", required=True)
    ap.add_argument("--model", required=True)
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--only", default="pull,serve,chat,results,synth")
    o = ap.parse_args()
    o.lily = os.path.realpath(o.lily)
    checks = {"pull": pull, "serve": served, "chat": chat, "results": results, "synth": synth}
    failed = 0
    for name in o.only.split(","):
        with tempfile.TemporaryDirectory() as home:
            try:
                print("%-8s %s" % (name, checks[name](o, random.Random(o.seed), Lily(o, home))), flush=True)
            except H.Fail as e:
                failed += 1
                print("FAULT %s: %s" % (name, e), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
