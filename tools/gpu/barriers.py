#!/usr/bin/env python3
"""Takes each barrier and each wait for copies out of each kernel, one at a time, and shows that a test sees it.

usage: barriers.py [--only TEXT] [--jobs N] [--table FILE]     leaves each out; --table renews the section of FILE between its marks
       barriers.py --check FILE                                whether that section names the barriers that there are: runs nothing

Runs small tests of lily-softgpu with SOFTGPU_FAULT set: first under ThreadSanitizer (SOFTGPU_SANITIZER), then plain (NaN-filled threadgroup
memory, random order), at last whole test binaries, plain. Fails on a barrier that no test misses: it is not needed, or a case
is missing. Boundaries between the stages of recorded lists are the test gpu_edges of lily-conformance.
"""
import argparse
import concurrent.futures
import glob
import json
import os
import re
import subprocess
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
KERNELS = os.path.join(ROOT, "crates", "gpu", "kernels")
BEGIN, END = "<!-- barriers: tools/gpu/barriers.py -->", "<!-- end of barriers -->"
# Where a file's barriers show: test binary and test, of conformance the case.
TESTS = {
    "attention_decode": [("attention", "small_decode_in_every_form")],
    "attention_prefill": [("attention", "small_prompts_in_every_form")],
    "attention_tile_simdgroup": [("attention", "small_prompts_in_every_form")],
    "attention_tile_mma": [("attention", "small_prompts_by_mma")],
    "attention_units": [("attention", "small_pages_by_mma")],
    "delta": [("delta", "small_decode")],
    "delta_chunk": [("chunks", "small_chunks")],
    "elementwise": [("conformance", "rms_norm/2/128")],
    "gemv": [("gemv", "small_fused_forms"), ("conformance", "linear/q4-f32/8x2048->48")],
    "gemv_mma": [("gemv", "small_products_by_mma")],
    "moe_decode": [("moe", "small_fused_chain")],
    "moe_mma": [("moe", "small_experts_by_mma"), ("moe", "one_threadgroup_takes_all_blocks")],
    "route": [("conformance", "experts_in/q4-f32/17/tile")],
    "sample": [("sample", "small_draws")],
    "gemm_mma": [("tiles", "small_mma_sync")],
    "gemm_wgmma": [("tiles", "small_wgmma")],
    "tile_mpp": [("tiles", "small_tensor_operations")],
    "tile_plain": [("tiles", "small_plain_loop")],
    "tile_simdgroup": [("tiles", "small_simdgroup_matrices")],
}
SECONDS = 600


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
    """File, line and name of each, waits for copies too: its function and which of it, so that a name outlives other changes."""
    for path in sorted(glob.glob(os.path.join(KERNELS, "*"))):
        file = os.path.basename(path)
        if file.startswith("platform_"):
            continue
        function, count, waits = "", 0, 0
        with open(path) as text:
            for number, line in enumerate(text, 1):
                code = line.partition("//")[0]
                head = re.search(r"\bFN\s[\w\s*]*?(\w+)\(|^\s*KERNEL\((\w+)", code)
                if head:
                    function, count, waits = head[1] or head[2], 0, 0
                if re.search(r"tg_barrier\(\)|simd_fence\(\)", code):
                    count += 1
                    yield file, number, f"{file}: {function}, {count}"
                if re.search(r"copy_wait(_but_one)?\(\);", code):
                    waits += 1
                    yield file, number, f"{file}: {function}, wait {waits}"


def outcome(executable, fault, case, sanitizer):
    """How a test saw the fault, or None."""
    conformance = os.path.basename(executable).startswith("conformance")
    environment = dict(os.environ, SOFTGPU_FAULT=fault, SOFTGPU_SANITIZER=sanitizer, CASES=case, RUST_BACKTRACE="0")
    command = [executable, "--test-threads=1", *([] if conformance else [case])]
    try:
        run = subprocess.run(command, cwd=os.path.join(ROOT, "crates", "softgpu"), env=environment, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return None
    if run.returncode == 0:
        return None
    if "kernels do not compile" in run.stdout or "error:" in run.stdout and "data race" not in run.stdout and "panicked" not in run.stdout:
        sys.exit(f"{fault}: the test does not run\n{run.stdout[-3000:]}")
    for what in ["data race", "divergent", "NaN"]:
        if what in run.stdout:
            return what
    return "changed result"


def seen(file, fault, executables):
    family = max((f for f in TESTS if file.startswith(f)), key=len)
    tests = TESTS[family]
    for sanitizer in ["thread", ""]:
        for test, case in tests:
            how = outcome(executables[test], fault, case, sanitizer)
            if how:
                return how, f"{test}: {case}", "ThreadSanitizer" if sanitizer else "plain"
    for test in {test for test, _ in tests}:
        how = outcome(executables[test], fault, "", "")
        if how:
            return how, test, "plain"
    return None


def controls(files, executables):
    """The same tests without a fault find nothing."""
    for test, case in sorted({pair for f in files for pair in TESTS[max((t for t in TESTS if f.startswith(t)), key=len)]}):
        for sanitizer in ["thread", ""]:
            how = outcome(executables[test], "", case, sanitizer)
            if how:
                sys.exit(f"{test} {case} fails without a fault ({sanitizer or 'plain'}): {how}")
    print("without a fault no test fails", flush=True)


def section(file):
    """What lies before, between and behind the marks."""
    with open(file) as text:
        parts = re.split(f"({re.escape(BEGIN)}\n|{re.escape(END)})", text.read())
    if len(parts) != 5:
        sys.exit(f"{file}: no section between {BEGIN} and {END}")
    return parts[0] + parts[1], parts[2], parts[3] + parts[4]


def check(file):
    there = {name for _, _, name in barriers()}
    named = set(re.findall(r"^\| `([^`]+)` \|", section(file)[1], re.MULTILINE))
    wrong = [f"{name}: not in the table" for name in sorted(there - named)]
    wrong += [f"{name}: in the table, but not in the kernels" for name in sorted(named - there)]
    print(f"{len(there & named)} barriers and waits are in the table of {file}")
    sys.exit("\n".join(wrong + ["run tools/gpu/barriers.py --table " + file]) if wrong else 0)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--only", default="")
    arguments.add_argument("--jobs", type=int, default=2)
    arguments.add_argument("--table")
    arguments.add_argument("--check")
    arguments = arguments.parse_args()
    if arguments.check:
        check(arguments.check)
    executables = binaries()
    sites = [site for site in barriers() if arguments.only in site[2]]

    controls({file for file, _, _ in sites}, executables)

    def row(site):
        file, line, name = site
        found = seen(file, f"{file}:{line}", executables)
        row = (f"`{name}`", *(found or ("NOT SEEN", "", "")))
        print("| " + " | ".join(row) + " |", flush=True)
        return row

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        rows = list(pool.map(row, sites))
    if arguments.table:
        before, old, behind = section(arguments.table)
        lines = {line.split("|")[1].strip(): line for line in old.splitlines() if line.startswith("| `")}
        lines.update({row[0]: "| " + " | ".join(row) + " |" for row in rows})
        kept = [lines[f"`{name}`"] for _, _, name in barriers() if f"`{name}`" in lines]
        with open(arguments.table, "w") as text:
            text.write(before + "| barrier, or wait for copies: file, function, which of it | without it | test | run |\n|---|---|---|---|\n")
            text.write("\n".join(kept) + "\n" + behind)
    missed = [row[0] for row in rows if row[1] == "NOT SEEN"]
    sys.exit(f"no test misses: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
