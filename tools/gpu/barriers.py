#!/usr/bin/env python3
"""Takes each barrier out of each kernel, and each boundary between the stages of recorded lists, one at a time, and shows that a test sees it.

usage: barriers.py [--only TEXT] [--table FILE]

Runs the tests of lily-softgpu with SOFTGPU_FAULT set: first plain (NaN-filled threadgroup memory, random order), then under
ThreadSanitizer (SOFTGPU_SANITIZER). Fails on a barrier that no test misses. Barriers in files of other platforms (tile_mma.h:
CUDA, tile_mpp.h: Metal 4) never reach this text and are listed as such.
"""
import argparse
import glob
import json
import os
import re
import subprocess
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
KERNELS = os.path.join(ROOT, "crates", "gpu", "kernels")
ELSEWHERE = {"tile_mma.h": "CUDA's", "tile_mpp.h": "Metal 4's"}
# Where a file's kernels are tested: test binary, and CASES of the conformance test or a part of the names of other tests.
TESTS = {
    "attention": [("conformance", "attention/"), ("attention", "")],
    "delta": [("delta", "")],
    "elementwise": [("conformance", "rms_norm/")],
    "gemv": [("conformance", "linear/"), ("gemv", "")],
    "moe_decode": [("moe", ""), ("conformance", "experts")],
    "route": [("conformance", "experts_in"), ("moe", "")],
    "moe": [("conformance", "experts"), ("moe", "")],
    "sample": [("sample", "")],
    "tile": [("conformance", "linear/"), ("conformance", "experts_in")],
    "stage": [("delta", "layers_do_not_wait")],
}


def binaries():
    """Test name: executable."""
    command = ["cargo", "test", "--locked", "-p", "lily-softgpu", "--no-run", "--message-format=json"]
    output = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True).stdout
    found = {}
    for line in output.splitlines():
        message = json.loads(line)
        if message.get("executable"):
            found[message["target"]["name"]] = message["executable"]
    return found


def barriers():
    """(file, line) of each."""
    for path in sorted(glob.glob(os.path.join(KERNELS, "*"))):
        name = os.path.basename(path)
        if name.startswith("platform_"):
            continue
        with open(path) as file:
            for number, line in enumerate(file, 1):
                if re.search(r"tg_barrier\(\)|simd_fence\(\)", line.partition("//")[0]):
                    yield name, number


def outcome(executable, fault, cases, sanitizer):
    """How a test saw the fault, or None."""
    environment = dict(os.environ, SOFTGPU_FAULT=fault, SOFTGPU_SANITIZER=sanitizer, CASES=cases, RUST_BACKTRACE="0")
    try:
        names = [] if executable.split("/")[-1].startswith("conformance") else cases.split()
        run = subprocess.run([executable, *names], cwd=os.path.join(ROOT, "crates", "softgpu"), env=environment, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=1200)
    except subprocess.TimeoutExpired:
        return None
    if run.returncode == 0:
        return None
    for what in ["data race", "divergent", "NaN"]:
        if what in run.stdout:
            return what
    return "changed result"


def seen(fault, tests, executables):
    for sanitizer in ["", "thread"]:
        for test, cases in tests:
            if test in executables:
                how = outcome(executables[test], fault, cases, sanitizer)
                if how:
                    return how, f"{test} {cases}".strip(), "ThreadSanitizer" if sanitizer else "plain"
    return None


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--only", default="")
    arguments.add_argument("--table")
    arguments = arguments.parse_args()
    executables = binaries()
    faults = list(barriers()) + [("stage", 1), ("stage", 2)]
    rows, missed = [], []
    for name, line in faults:
        fault = f"{name}:{line}"
        if arguments.only not in fault:
            continue
        if name in ELSEWHERE:
            row = (fault, "not in this text", ELSEWHERE[name], "")
        else:
            family = max((f for f in TESTS if name.startswith(f)), key=len)
            found = seen(fault, TESTS[family], executables)
            row = (fault, *(found or ("NOT SEEN", "", "")))
            if not found:
                missed.append(fault)
        rows.append(row)
        print(" | ".join(row), flush=True)
    if arguments.table:
        with open(arguments.table, "w") as file:
            file.write("| barrier | without it | test | run |\n|---|---|---|---|\n")
            file.writelines("| " + " | ".join(row) + " |\n" for row in rows)
    sys.exit(f"no test misses: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
