#!/usr/bin/env python3
"""Compiles the CUDA text with NVRTC to PTX and to a cubin for sm_90: no GPU, no toolkit header.

usage: check_cuda.py cuda.cu [--spills BYTES] [--early FILE]

Fails where the kernels that wait for their inputs are not those named in FILE, on errors, on double arithmetic and where a kernel spills more than BYTES (0); prints registers, shared memory and spills of
each kernel. NVRTC comes from `pip install nvidia-cuda-nvrtc-cu12`, or NVRTC names the library.
"""
import argparse
import ctypes
import glob
import os
import re
import sys
import sysconfig

ARCHITECTURE = "sm_90a"


def library():
    if os.environ.get("NVRTC"):
        return ctypes.CDLL(os.environ["NVRTC"])
    folder = sysconfig.get_paths()["purelib"] + "/nvidia/cuda_nvrtc/lib/"
    for builtins in glob.glob(folder + "libnvrtc-builtins.so*"):
        ctypes.CDLL(builtins, ctypes.RTLD_GLOBAL)
    found = [f for f in glob.glob(folder + "libnvrtc.so*") if "alt" not in f]
    if not found:
        sys.exit("NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12")
    return ctypes.CDLL(found[0])


def compile_text(source):
    """PTX, cubin and the assembler's log."""
    nvrtc, program, size = library(), ctypes.c_void_p(), ctypes.c_size_t()

    def get(what):
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(max(size.value, 1))
        getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw[: size.value]

    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None) == 0
    options = [f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", "--ptxas-options=-v", "--disable-warnings"]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options)))
    log = get("ProgramLog").rstrip(b"\0").decode()
    if failed:
        sys.exit(f"NVRTC refuses the text:\n{log}")
    return get("PTX").rstrip(b"\0").decode(), get("CUBIN"), log


def resources(log):
    """Kernel: registers, bytes of shared memory, bytes of spills, bytes of stack."""
    table = {}
    for part in log.split("Compiling entry function")[1:]:
        name = re.search(r"'(\w+)'", part)[1]
        stack, stores, loads = map(int, re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part).groups())
        shared = re.search(r"(\d+) bytes smem", part)
        table[name] = (int(re.search(r"Used (\d+) registers", part)[1]), int(shared[1]) if shared else 0, max(stores, loads), stack)
    return table


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("text")
    arguments.add_argument("--spills", type=int, default=0)
    arguments.add_argument("--early")
    arguments = arguments.parse_args()
    with open(arguments.text, "rb") as file:
        ptx, cubin, log = compile_text(file.read())
    table, wrong = resources(log), []
    entries = set(re.findall(r"\.entry (\w+)", ptx))
    if entries != set(table):
        wrong.append(f"no figures for {sorted(entries - set(table))}")
    if arguments.early:
        parts = re.split(r"\.entry (\w+)", ptx)[1:]
        bodies = list(zip(parts[::2], parts[1::2]))
        waiting = {name for name, body in bodies if "griddepcontrol.wait" in body}
        sooner = {name for name, body in bodies if "griddepcontrol.launch_dependents" in body.partition("griddepcontrol.wait")[0]}
        with open(arguments.early) as file:
            lines = [line.split() for line in file]
        listed = {line[0] for line in lines} & entries # some shapes do without a kernel
        listed_sooner = {line[0] for line in lines if line[1:] == ["sooner"]} & entries
        for name in sorted(sooner ^ listed_sooner):
            wrong.append(f"{name} is listed as letting the next stage begin before its own inputs are there, or does so: not both")
        wrong += [f"{name} waits for its inputs and is not listed as early" for name in sorted(waiting - listed)]
        wrong += [f"{name} is listed as early and does not wait for its inputs" for name in sorted(listed - waiting)]
    if not cubin.startswith(b"\x7fELF"):
        wrong.append(f"no cubin for {ARCHITECTURE}")
    wrong += [f"double arithmetic: {line.strip()}" for line in ptx.splitlines() if ".f64" in line][:5]
    print(f"{'kernel':32} registers  shared  spills  stack")
    for name, (registers, shared, spills, stack) in sorted(table.items()):
        print(f"{name:32} {registers:9} {shared:7} {spills:7} {stack:6}")
        if spills > arguments.spills:
            wrong.append(f"{name} spills {spills} bytes, at most {arguments.spills} are allowed")
    print(f"{len(table)} kernels, PTX {len(ptx)} bytes, cubin {len(cubin)} bytes for {ARCHITECTURE}")
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
