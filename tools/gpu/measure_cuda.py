#!/usr/bin/env python3
"""Checks and times Lily on this machine's GPU in one go, beside llama.cpp if its sources or its build are there. No network is needed.

    measure_cuda.py --lily PROGRAM --work DIR --out DIR [--llama DIR] [--test BINARY …] [--only PART,…]

WORK keeps what takes long to make: the synthetic checkpoint (`lily bench synth --layers 40`, 19.5 GB), the same shape for llama.cpp,
a slice with uneven experts, and llama.cpp's build. The next call uses them again. OUT gets at most six files: summary.txt, results.json
(every figure and round), figures.tsv (records as in bench/results), prefill.svg and decode.svg, logs.tar.gz (all that the commands said).

Parts, in their order; each has a time limit, one that fails leaves a line and the others go on:

    correctness  the program's self-test; the demo model's log-probabilities beside mlx-lm's; the test binaries given by --test; 1,000
                 decode steps five times, then without graphs, early starts and token handoff, and with log-probabilities: the same ids
                 each time; compute-sanitizer on the demo model where it is installed
    roofline     kernels alone beside their read-only twins
    by_op        seconds by operation of a prompt and of decode steps; a snapshot to the host and back
    decode       `lily run` with sampling at 4K, 32K and 128K
    frontiers    both phases over 256 … 128K, beside llama.cpp where there is one
    slots        1, 2, 4, 8 answers at once through `lily serve`
    ablate       each optimisation left out, at the lengths that the original published its effect for

llama.cpp is built on the cores, with low priority, while the first parts run; frontiers, slots and ablate wait for it. What does not fit
into --seconds is said and left to the next call. With 600 s a call: `--only correctness,roofline,by_op,decode` builds everything too,
then `--only frontiers`, then `--only slots,ablate`.

--short with --device cpu and --model models/demo runs every part in a minute without a GPU: that is how this program is tested.
Exit status: 0 if nothing failed, 1 if a part did, 2 for wrong arguments.
"""
import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time

ROOT = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
# Seconds that a part may take.
LIMITS = {"correctness": 300, "roofline": 60, "by_op": 60, "decode": 120, "frontiers": 450, "slots": 150, "ablate": 420}
LLAMA_ARGS = "-ngl 99 -fa 1 -b 2048 -ub 2048"
# Between the request to end and the end by force.
GRACE = 20

# Lengths, full and short.
SIZES = {
    False: {"prompt": 4000, "steps": 1000, "again": 5, "decode": [(4000, 256), (32000, 256), (130000, 256)], "by_op": 4096, "by_op_prompt": 4096,
            "slots": ("1,2,4,8", 4000, 256), "lengths": "", "decode_tokens": 64, "roofline": (4096, 4096), "sanitize": (64, 16),
            "goldens": ["perplexity.json", "logprobs.json", "perplexity-long.json"]},
    True: {"prompt": 40, "steps": 24, "again": 2, "decode": [(40, 16), (80, 16)], "by_op": 32, "by_op_prompt": 32,
           "slots": ("1,2", 64, 300), "lengths": "16,32", "decode_tokens": 4, "roofline": (16, 32), "sanitize": (16, 4), "goldens": ["perplexity.json"]},
}
# How far the perplexity over a few hundred positions may be from mlx-lm's, in per cent: as far as right runs were seen (docs/numerics.md).
SHORT_TEXTS = {"perplexity.json": 0.3, "logprobs.json": 0.8}
# What mlx-lm's own run in bf16 comes to over perplexity.json, in per cent. Over more positions it is told beside the bound.
NARROW = 0.045
# Switches, prompts, contexts: the original's lengths, for each the effect it published, in per cent.
ABLATIONS = [
    (["dequantize_in_gemm", "gpu_routing"], [512], [], {"dequantize_in_gemm": 77.4, "gpu_routing": 89.0}),
    (["adaptive_tiles", "chunked_scan"], [2048], [], {"adaptive_tiles": 13.2}),
    (["register_scan"], [2048], [], {"register_scan": 5.6}),
    (["coalesced_kv"], [], [3840], {"coalesced_kv": 2.1}),
    (["fuse_norm", "fuse_conv", "fuse_scan_norm", "fuse_qk_prep", "fuse_experts_in", "fuse_experts_out", "matrix_gemv", "token_handoff", "concurrent",
      "reuse_buffers", "graphs", "early_starts"], [], [4096], {}),
    (["pack_heads"], [], [32768], {"pack_heads": 23.8}),
    (["fixed_block", "matrix_attention"], [], [32768, 65536, 131072], {"fixed_block": (7.7, 27.4, 40.2)}),
]
SKEWED = (["adaptive_tiles"], [2048], [], {})
SKEW_LAYERS, SKEW = 8, 1.0


def stop(process, gently):
    """Ends a process that this program started, with all that it started."""
    for number, patience in ((signal.SIGINT, GRACE), (signal.SIGKILL, None)) if gently else ((signal.SIGKILL, None),):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except (subprocess.TimeoutExpired, ProcessLookupError):
            pass


class Session:
    """What all parts share: arguments, the end of the time, logs."""

    def __init__(self, o):
        self.o, self.sizes = o, SIZES[o.short]
        self.begin = time.monotonic()
        self.logs = os.path.join(o.work, "logs")
        self.records = os.path.join(o.work, "records")
        for folder in (o.work, o.out, self.logs):
            os.makedirs(folder, exist_ok=True)
        shutil.rmtree(self.records, ignore_errors=True)
        self.cuda = o.device.startswith("cuda")
        self.model = o.model or os.path.join(o.work, "model-%d" % o.layers)
        self.gguf = o.gguf or os.path.join(o.work, "model-%d.gguf" % o.layers)
        self.skewed = os.path.join(o.work, "skewed-%d" % SKEW_LAYERS)
        self.running = []

    def left(self):
        return self.o.seconds - (time.monotonic() - self.begin)

    def run(self, name, argv, limit, env=None, cwd=None):
        """Status (None: out of time), stdout, seconds. What it says is kept in the logs."""
        begin = time.monotonic()
        paths = [os.path.join(self.logs, name + "." + end) for end in ("out", "err")]
        with open(paths[0], "wb") as out, open(paths[1], "wb") as err:
            err.write((" ".join(argv) + "\n").encode())
            err.flush()
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=cwd, start_new_session=True)
            self.running.append(process)
            try:
                status = process.wait(max(limit, 1))
            except subprocess.TimeoutExpired:
                stop(process, True)
                status = None
            finally:
                self.running.remove(process)
        with open(paths[0], "rb") as out:
            return status, out.read().decode(errors="replace"), time.monotonic() - begin

    def said(self, name):
        """The last line that a command said on stderr."""
        with open(os.path.join(self.logs, name + ".err"), errors="replace") as err:
            lines = [line.strip() for line in err.readlines()[1:] if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        return ((errors or lines or ["nothing was said"])[-1])[:300]

    def lily(self, *args):
        return [self.o.lily, *args]


class Job(threading.Thread):
    """Something that is made beside the parts. `path` appears when it is whole."""

    def __init__(self, session, name, path, make):
        super().__init__(daemon=True)
        self.session, self.job, self.path, self.make = session, name, path, make
        self.trouble, self.seconds = None, 0.0
        self.start()

    def run(self):
        begin = time.monotonic()
        try:
            if not os.path.exists(self.path):
                self.make()
        except Exception as e:  # a part that needs it says so
            self.trouble = str(e)
        self.seconds = time.monotonic() - begin

    def need(self, limit):
        self.join(max(limit, 0))
        if self.is_alive():
            raise Failed("%s is not there yet after %.0f s; the next call goes on with it" % (self.job, time.monotonic() - self.session.begin))
        if self.trouble:
            raise Failed("%s: %s" % (self.job, self.trouble))


class Failed(Exception):
    pass


def synthetic(session, name, path, option, *more):
    """Makes a synthetic checkpoint; one that was not finished does not get its name."""

    def make():
        draft = path + ".part"
        shutil.rmtree(draft, ignore_errors=True)
        if os.path.isfile(draft):
            os.remove(draft)
        log = "synth-" + os.path.basename(path)
        status, _, _ = session.run(log, session.lily("bench", "synth", option, draft, *more), session.left())
        if status != 0:
            raise Failed("lily bench synth ended with %s: %s" % (status, session.said(log)))
        os.rename(draft, path)

    return Job(session, name, path, make)


def llama(session):
    """The folder of llama.cpp's build, and the job that builds it."""
    source = os.path.realpath(session.o.llama)
    for place in ("", "bin", "build/bin"):
        if os.path.isfile(os.path.join(source, place, "llama-bench")):
            return source, None
    build = os.path.join(session.o.work, "llama-build")

    def make():
        cmake = shutil.which("cmake")
        if not cmake or not os.path.isfile(os.path.join(source, "CMakeLists.txt")):
            raise Failed("%s has neither llama-bench nor CMakeLists.txt, or cmake is missing" % source)
        env = dict(os.environ)
        toolkit = os.environ.get("CUDA_PATH", "/usr/local/cuda")
        env["PATH"] = env["PATH"] + os.pathsep + os.path.join(toolkit, "bin")
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
                   "-DLLAMA_BUILD_UI=OFF", "-DBUILD_SHARED_LIBS=OFF"]
        options += ["-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native"] if session.cuda else []
        options += ["-GNinja"] if shutil.which("ninja") else []
        jobs = str(max((os.cpu_count() or 2) - 2, 1))
        for step, argv in (("configure", [cmake, "-S", source, "-B", build, *options]),
                           ("build", ["nice", "-n", "19", cmake, "--build", build, "--target", "llama-bench", "--parallel", jobs])):
            status, _, _ = session.run("llama-" + step, argv, session.left(), env=env)
            if status != 0:
                raise Failed("%s ended with %s: %s" % (step, status, session.said("llama-" + step)))

    return build, Job(session, "llama.cpp", os.path.join(build, "bin", "llama-bench"), make)


class Part:
    def __init__(self, session, name, limit, jobs):
        self.session, self.name, self.jobs = session, name, jobs
        self.end = time.monotonic() + min(limit, session.left())
        self.lines, self.values, self.failures = [], {}, []

    def left(self):
        return self.end - time.monotonic()

    def say(self, line):
        self.lines.append(line)
        print("    " + line, flush=True)

    def fail(self, line):
        self.failures.append(line)
        self.say("FAILED: " + line)

    def need(self, *names, keep=0):
        """Waits until these are there; `keep` seconds of the part's time are left."""
        for name in names:
            if name in self.jobs:
                self.jobs[name].need(self.left() - keep)

    def quiet(self):
        """Waits until nothing is built on the cores any more, as long as half the part's time is left."""
        job = self.jobs.get("llama")
        if job:
            job.join(max(self.left() / 2, 0))
            if job.is_alive():
                self.say("llama.cpp is being built meanwhile: what the host takes is too long")

    def run(self, name, argv, env=None, cwd=None):
        """What a command printed; None if it failed, which is told."""
        if self.left() <= 1:
            self.fail("%s: not begun, the time of this part is over" % name)
            return None
        status, out, seconds = self.session.run(self.name + "-" + name, argv, self.left(), env, cwd)
        self.values[name + "_seconds"] = round(seconds, 2)
        if status is None:
            self.fail("%s: out of time after %.0f s" % (name, seconds))
            # Who was asked to end may have told what it had.
            return out or None
        if status != 0:
            self.fail("%s: status %d: %s" % (name, status, self.session.said(self.name + "-" + name)))
            return None
        return out

    def json(self, name, argv):
        out = self.run(name, argv)
        try:
            value = json.loads(out) if out else None
        except ValueError:
            self.fail("%s printed no JSON" % name)
            return None
        if value is not None:
            self.values[name] = value
        return value


def ids_file(session, count):
    """Token ids without a pattern that a kernel could profit from; the demo model's vocabulary has them too."""
    path = os.path.join(session.o.work, "ids-%d.json" % count)
    with open(path, "w") as file:
        json.dump([(i * 7919 + i * i * 31) % 4000 + 10 for i in range(count)], file)
    return path


def generate(part, name, prompt, tokens, *more):
    s = part.session
    argv = s.lily("run", "--device", s.o.device, "--model", s.model, "--token-ids", ids_file(s, prompt), "--context", str(prompt + tokens + 16),
                  "--max-tokens", str(tokens), "--seed", "7", "--json", "--quiet", *more)
    value = part.json(name, argv)
    if value is None:
        return None, None
    t = value["timings"]
    rate = lambda what: t[what + "_tokens"] / t[what + "_seconds"] if t[what + "_seconds"] else 0.0
    value.pop("logprobs", None)
    return value["token_ids"], (rate("prefill"), rate("decode"), len(value["token_ids"]))


def correctness(part):
    s, o = part.session, part.session.o
    report = os.path.join(s.logs, "self-test.json")
    out = part.run("self-test", s.lily("doctor", "--self-test", "--device", o.device, "--report", report))
    for line in (out or "").splitlines()[1:]:
        part.say(line.strip())
    if os.path.exists(report):
        with open(report) as file:
            part.values["self_test"] = json.load(file)
    goldens(part)
    env = dict(os.environ, LILY_NEEDS_CUDA="1", LILY_GPU="cuda") if s.cuda else None
    for test in o.test:
        name = os.path.basename(test)
        out = part.run("test-" + name, [os.path.realpath(test), "--nocapture"], env=env)
        results = [line for line in (out or "").splitlines() if line.startswith("test result") or " cases" in line or line.startswith("cases")]
        for line in results:
            part.say("%s: %s" % (name, line))
    decode_steps(part)
    sanitizer = shutil.which("compute-sanitizer", path=os.environ.get("PATH", "") + ":/usr/local/cuda/bin") if s.cuda else None
    for tool in ("memcheck", "racecheck") if sanitizer else ():
        prompt, tokens = s.sizes["sanitize"]
        argv = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
        argv += s.lily("run", "--device", o.device, "--model", os.path.join(ROOT, "models", "demo"), "--token-ids", ids_file(s, prompt), "--max-tokens",
                       str(tokens), "--quiet", "--json")
        before = len(part.failures)
        if part.run(tool, argv) is not None and len(part.failures) == before:
            part.say("compute-sanitizer %s on the demo model: clean" % tool)


def goldens(part):
    """The demo model's log-probabilities beside mlx-lm's in float32. Over a long text no further than mlx-lm's own runs in bf16 with other orders
    of sums: the ratio by one standard error more than the furthest of them, the differences of single positions not at all."""
    s = part.session
    demo = os.path.join(ROOT, "models", "demo")
    for name in s.o.goldens.split(",") if s.o.goldens else s.sizes["goldens"]:
        path = os.path.join(demo, "golden", name)
        argv = s.lily("bench", "score", "--device", s.o.device, "--model", demo, "--golden", path, "--json")
        value = part.json("score-" + name.split(".")[0], argv + recorded(s, "numerics against mlx-lm in f32"))
        if not value:
            continue
        # What is no number is null in JSON, and beyond every bound.
        number = lambda key: float("nan") if value["all"][key] is None else value["all"][key]
        apart, mean, bound, most = 100 * (number("ratio") - 1), number("mean_logprob_difference"), SHORT_TEXTS.get(name), None
        line = "%s, %d positions: perplexity %+.3f %% from mlx-lm's" % (name, number("positions"), apart)
        if bound is None:
            with open(path) as file:
                own = json.load(file)["bf16_f32acc"]
            ratios = [100 * (ratio - 1) for ratio in own["perplexity_ratios"]]
            bound, most = max(map(abs, ratios)) + 100 * max(own["standard_errors"]), max(own["mean_logprob_differences"])
            line += ", %s %.3f %%; its own runs" % ("within" if abs(apart) <= NARROW else "beyond", NARROW)
            line += " in bf16 %+.3f to %+.3f %%" % (min(ratios), max(ratios))
        line += " (allowed %.3f %%); log-probabilities differ by %.5f" % (bound, mean)
        line += " (allowed %.5f)" % most if most else ""
        if value["all"]["top1_equal"] is not None:
            line += "; most probable token equal at %d of %d" % (number("top1_equal"), number("top1_positions"))
        right = abs(apart) <= bound and (most is None or mean <= most)
        (part.say if right else part.fail)(line)


def decode_steps(part):
    """The same ids every time, and with what changes no bit."""
    s = part.session
    part.need("model")
    prompt, steps = s.sizes["prompt"], s.sizes["steps"]
    first, rates = None, []
    for i in range(s.sizes["again"]):
        ids, rate = generate(part, "run-%d" % (i + 1), prompt, steps)
        if ids is None:
            continue
        first = first or ids
        rates.append(rate[1])
        if ids != first:
            part.fail("run %d: its ids are others than the first's from token %d on" % (i + 1, first_difference(ids, first)))
    if first is None:
        return
    part.say("%d decode steps behind %d tokens, %d times: %s tokens/s" % (len(first) - 1, prompt, len(rates), ", ".join("%.1f" % r for r in rates)))
    others = [("--logprobs", "0")]
    others += [("--without", name) for name in ("graphs", "early_starts", "token_handoff")] if s.cuda else [("--isa", "portable"), ("--threads", "1")]
    for other in others:
        what = "-".join(other).strip("-")
        ids, rate = generate(part, what, prompt, steps, *other)
        if ids is not None and ids != first:
            part.fail("%s: other ids from token %d on" % (what, first_difference(ids, first)))
        elif ids is not None:
            part.say("%s: the same ids, %.1f tokens/s" % (what, rate[1]))


def first_difference(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def recorded(s, why):
    return ["--record", s.records, "--why", why]


def roofline(part):
    s = part.session
    part.need("model")
    prefill, decode = s.sizes["roofline"]
    argv = s.lily("bench", "roofline", "--device", s.o.device, "--model", s.model, "--prefill", str(prefill), "--decode", str(decode), "--json")
    argv += ["--memory", "1", "--rounds", "1"] if s.o.short else []
    value = part.json("roofline", argv + recorded(s, "kernels alone"))
    if not value:
        return
    part.say("reads at %.0f GB/s (%s)" % (value["bytes_per_second"] / 1e9, value["how"]))
    median = lambda list: sorted(list)[len(list) // 2] if list else 0.0
    # On a GPU ten of each step, by what all launches take.
    step = lambda row: row["kernel"].split(": ")[0] if s.cuda else ""
    whole = lambda row: median(row["seconds"]) * (row["calls"] if s.cuda else 1)
    for name in dict.fromkeys(step(row) for row in value["kernels"]):
        rows = [row for row in value["kernels"] if step(row) == name]
        for row in sorted(rows, key=lambda row: -whole(row))[:10]:
            limit = "%.1f %% of the limit" % (100 * row["of_limit"]) if row.get("of_limit") else "no limit known"
            limit += " (%s)" % row["bound_by"] if row.get("bound_by") else ""
            if row.get("inside_seconds") is not None:
                limit += ", inside %.1f us" % (1e6 * row["inside_seconds"])
                limit += ", %.1f %%" % (100 * row["of_limit_inside"]) if row["of_limit_inside"] else ""
            twin = median(row.get("read_only_seconds") or [])
            part.say("%s: %.1f us, read-only twin %.1f us, %s" % (row["kernel"], 1e6 * median(row["seconds"]), 1e6 * twin, limit))


def by_op(part):
    s = part.session
    part.need("model")
    argv = s.lily("bench", "run", "--device", s.o.device, "--model", s.model, "--by-op", "--snapshots", "--no-floors", "--rounds", "1", "--prefill",
                  str(s.sizes["by_op_prompt"]), "--decode", str(s.sizes["by_op"]), "--decode-tokens", "8", "--json")
    value = part.json("by_op", argv + recorded(s, "seconds by operation")) or {}
    for point in value.get("operations", []):
        if point["trouble"]:
            part.fail("%s at %d: %s" % (point["phase"], point["length"], point["trouble"]))
            continue
        top = sorted(point["operations"], key=lambda op: -op["seconds"])[:4]
        shares = ", ".join("%s %.0f %%" % (op["operation"], 100 * op["seconds"] / point["seconds"]) for op in top)
        part.say("%s at %d, %.3f ms a step: %s" % (point["phase"], point["length"], 1e3 * point["seconds"] / point["steps"], shares))
    for copy in value.get("snapshots", []):
        if copy["trouble"]:
            part.fail("snapshot at %d: %s" % (copy["context"], copy["trouble"]))
            continue
        part.say("snapshot at %d, %.1f MB: %.1f ms to the host, %.1f ms back and one token"
                 % (copy["context"], copy["bytes"] / 1e6, 1e3 * copy["to_host_seconds"][0], 1e3 * copy["resumed_seconds"][0]))


def decode(part):
    part.need("model")
    for prompt, tokens in part.session.sizes["decode"]:
        ids, rate = generate(part, "behind-%d" % prompt, prompt, tokens)
        if ids is not None:
            part.say("behind %d tokens: prefill %.0f, decode %.1f tokens/s over %d tokens" % (prompt, rate[0], rate[1], rate[2] - 1))


def frontiers(part):
    s, o = part.session, part.session.o
    part.need("model")
    beside = bool(o.llama)
    try:
        part.need("gguf", "llama", keep=5 if o.short else 120)
    except Failed as e:
        part.fail("%s: measured without llama.cpp" % e)
        beside = False
    plots = os.path.join(o.work, "plots")
    command = ["compare", "--peer", "llama.cpp=" + s.llama, "--gguf", s.gguf, "--peer-timeout", "180"] if beside else ["run"]
    command += ["--llama-args", LLAMA_ARGS] if beside and s.cuda else []
    lengths = o.lengths or s.sizes["lengths"]
    argv = s.lily("bench", *command, "--device", o.device, "--model", s.model, "--rounds", str(o.rounds), "--decode-tokens",
                  str(s.sizes["decode_tokens"]), "--plots", plots, "--json")
    argv += ["--prefill", lengths, "--decode", lengths] if lengths else []
    argv += ["--no-floors"] if o.short else []
    value = part.json("frontiers", argv + recorded(s, "frontiers"))
    for point in ((value or {}).get("measured") or {}).get("points", []):
        cells = []
        for e in point["engines"]:
            ratio = " (%.2f times)" % e["ratio"] if e.get("ratio") else ""
            cells.append("%s %.1f tokens/s%s" % (e["engine"], e["tokens_per_second"], ratio) if e["tokens_per_second"] else
                         "%s: %s" % (e["engine"], e["trouble"]))
        part.say("%s at %d: %s" % (point["phase"], point["length"], ", ".join(cells)))
        part.failures += ["%s at %d: %s" % (point["phase"], point["length"], e["trouble"]) for e in point["engines"] if e["trouble"]]
    for name in ("prefill.svg", "decode.svg"):
        if os.path.exists(os.path.join(plots, name)):
            shutil.copy(os.path.join(plots, name), o.out)


def slots(part):
    s = part.session
    part.need("model")
    part.quiet()
    numbers, prompt, tokens = s.sizes["slots"]
    argv = [sys.executable, os.path.join(ROOT, "tools", "serving", "slots.py"), "--lily", s.o.lily, "--model", s.model, "--slots", numbers,
            "--prompt-tokens", str(prompt), "--tokens", str(tokens), "--port", str(s.o.port), "--lily-arg=--device", "--lily-arg=" + s.o.device]
    argv += ["--no-stops"] if s.o.short else []
    part.values["slots"] = []
    for line in (part.run("slots", argv) or "").splitlines():
        count, rate, each, prompts = line.split("\t")
        part.values["slots"].append({"slots": int(count), "tokens_per_second": float(rate), "prompts": prompts})
        part.say("%s slots: %s tokens/s in sum, %s each, %s" % (count, rate, each, prompts))


def ablate_one(part, name, model, switches, prefill, decode, published):
    s = part.session
    argv = s.lily("bench", "ablate", "--device", s.o.device, "--model", model, "--rounds", str(max(s.o.rounds, 2)), "--decode-tokens",
                  str(s.sizes["decode_tokens"]), "--json")
    argv += [*(word for switch in switches for word in ("--switch", switch))]
    argv += ["--prefill", ",".join(map(str, prefill))] if prefill else []
    argv += ["--decode", ",".join(map(str, decode))] if decode else []
    for entry in (part.json(name, argv + recorded(s, "ablation " + name)) or {}).get("switches", []):
        for i, point in enumerate(entry["measured"]["points"]):
            without = point["engines"][1]
            apple = published.get(entry["switch"])
            apple = apple[i] if isinstance(apple, tuple) else apple
            beside = "" if apple is None else " (the original on Apple silicon: +%.1f %%)" % apple
            where = "%s, %s at %d" % (entry["switch"], point["phase"], point["length"])
            if without["ratio"]:
                part.say("%s%s: %+.1f %%%s" % (where, " with uneven experts" if model == s.skewed else "", 100 * (without["ratio"] - 1), beside))
            else:
                part.fail("%s: %s" % (where, without["trouble"] or point["engines"][0]["trouble"]))
        for at in entry.get("cache") or []:
            rates = ["%s %s %.0f GB/s" % (read["what"], "on" if read["coalesced_kv"] else "off", read["bytes_per_second"] / 1e9) for read in at["reads"]]
            part.say("K and V of %d tokens alone, coalesced_kv: %s" % (at["context"], at["trouble"] or ", ".join(rates)))


def ablate(part):
    s = part.session
    part.need("model")
    part.quiet()
    if not s.cuda:
        length = 32 if s.o.short else 512
        ablate_one(part, "cpu", s.model, ["chunks", "threads"], [length], [length], {})
        return
    for switches, prefill, decode, published in ABLATIONS:
        if s.o.short:
            prefill, decode = [64][:len(prefill)], [64][:len(decode)]
        ablate_one(part, switches[0], s.model, switches, prefill, decode, published)
    if "skewed" in part.jobs:
        part.need("skewed")
        ablate_one(part, "skewed", s.skewed, *SKEWED)


PARTS = {"correctness": correctness, "roofline": roofline, "by_op": by_op, "decode": decode, "frontiers": frontiers, "slots": slots, "ablate": ablate}


def prepare(s, wanted):
    """Begins what the parts need and is not there."""
    jobs = {}
    if s.o.llama:
        s.llama, build = llama(s)
        if build:
            jobs["llama"] = build
        if not s.o.gguf:
            jobs["gguf"] = synthetic(s, "the checkpoint for llama.cpp", s.gguf, "--gguf", "--layers", str(s.o.layers))
    if not s.o.model:
        jobs["model"] = synthetic(s, "the synthetic checkpoint", s.model, "--out", "--layers", str(s.o.layers))
        if "ablate" in wanted and s.cuda and not s.o.short:
            jobs["skewed"] = synthetic(s, "the slice with uneven experts", s.skewed, "--out", "--layers", str(SKEW_LAYERS), "--router-skew", str(SKEW))
    return jobs


def perform(s, name, jobs):
    limit = s.o.limit.get(name, LIMITS[name])
    print("%s: at most %.0f s" % (name, min(limit, s.left())), flush=True)
    part, begin = Part(s, name, limit, jobs), time.monotonic()
    if "llama" in jobs and jobs["llama"].is_alive():
        part.say("llama.cpp is being built on the cores")
    if part.left() < 5:
        part.failures.append("not begun")
        part.say("not begun: the time is over; call again with --only %s" % name)
    else:
        try:
            PARTS[name](part)
        except Failed as e:
            part.fail(str(e))
        except Exception as e:  # whatever a command printed, the other parts go on
            part.fail("%s: %s" % (type(e).__name__, e))
    return {"part": name, "passed": not part.failures, "seconds": round(time.monotonic() - begin, 1), "lines": part.lines,
            "failures": part.failures, "values": part.values}


def write(s, results, jobs):
    o = s.o
    with open(os.path.join(o.out, "results.json"), "w") as file:
        json.dump({"device": o.device, "lily": o.lily, "seconds": round(time.monotonic() - s.begin, 1), "short": o.short, "parts": results}, file, indent=1)
    with open(os.path.join(o.out, "summary.txt"), "w") as file:
        for result in results:
            file.write("%s: %s (%.1f s)\n" % (result["part"], "passed" if result["passed"] else "FAILED", result["seconds"]))
            file.writelines("    %s\n" % line for line in result["lines"])
        for job in jobs.values():
            state = "not finished" if job.is_alive() else job.trouble or "there after %.1f s" % job.seconds
            file.write("made for it: %s: %s\n" % (job.job, state))
    if os.path.isdir(s.records):
        with open(os.path.join(o.out, "figures.tsv"), "w") as file:
            for i, name in enumerate(sorted(os.listdir(s.records))):
                with open(os.path.join(s.records, name)) as record:
                    file.writelines(record.readlines()[min(i, 1):])
    with tarfile.open(os.path.join(o.out, "logs.tar.gz"), "w:gz") as archive:
        archive.add(s.logs, "logs")


def arguments():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--lily", required=True, help="the built program")
    ap.add_argument("--work", required=True, help="folder that keeps checkpoints and llama.cpp's build; 50 GB for all 40 layers")
    ap.add_argument("--out", required=True, help="folder for the results")
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--layers", type=int, default=40, help="of the synthetic checkpoint")
    ap.add_argument("--model", help="a checkpoint to use instead of the synthetic one")
    ap.add_argument("--gguf", help="its file for llama.cpp")
    ap.add_argument("--llama", help="a folder with llama-bench or with llama.cpp's sources, which are built then")
    ap.add_argument("--test", action="append", default=[], metavar="BINARY", help="a built test to run, such as those of lily-cuda and lily-conformance")
    ap.add_argument("--only", default=",".join(PARTS), help="parts to run")
    ap.add_argument("--short", action="store_true", help="every part at small sizes")
    ap.add_argument("--goldens", default="", metavar="FILE,…", help="of models/demo/golden, instead of those that belong to the sizes")
    ap.add_argument("--lengths", default="", help="prompts and contexts of the frontiers, such as 4096,32768")
    ap.add_argument("--rounds", type=int, default=1, help="measurements of each point of the frontiers")
    ap.add_argument("--seconds", type=float, default=570, help="that all of it may take")
    ap.add_argument("--limit", action="append", default=[], metavar="PART=SECONDS", help="another limit for a part")
    ap.add_argument("--port", type=int, default=18080)
    o = ap.parse_args()
    o.only = [name for name in o.only.split(",") if name]
    for name in o.only:
        if name not in PARTS:
            ap.error("there is no part %s; there are %s" % (name, ", ".join(PARTS)))
    try:
        o.limit = {name: float(value) for name, value in (item.split("=") for item in o.limit)}
    except ValueError:
        ap.error("--limit takes PART=SECONDS")
    for name in o.limit:
        if name not in PARTS:
            ap.error("there is no part %s; there are %s" % (name, ", ".join(PARTS)))
    o.lily, o.work, o.out = os.path.realpath(o.lily), os.path.realpath(o.work), os.path.realpath(o.out)
    if not os.access(o.lily, os.X_OK):
        ap.error("%s cannot be run" % o.lily)
    return o


def main():
    s = Session(arguments())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    wanted = [name for name in PARTS if name in s.o.only]
    results, jobs = [], {}
    try:
        jobs = prepare(s, wanted)
        for name in wanted:
            results.append(perform(s, name, jobs))
            # What was found survives what may come.
            write(s, results, jobs)
        for job in jobs.values():
            if job.is_alive():
                print("%s: being made for the next call" % job.job, flush=True)
                job.join(max(s.left(), 0))
        write(s, results, jobs)
    finally:
        for process in list(s.running):
            stop(process, False)
    failed = [result["part"] for result in results if not result["passed"]]
    print("failed: %s" % ", ".join(failed) if failed else "all passed", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
