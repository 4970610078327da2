#!/usr/bin/env python3
"""Checks kernel texts with clang's C++ for OpenCL, which knows address spaces as Metal does.

usage: check_kernels.py FOLDER    (a folder of `cargo run -p lily-gpu --example kernel_text -- FOLDER`)

1. Every pointer and reference names its address space, spaces never mix, no double, nothing that Metal lacks.
2. The same text behind platform_metal.h, against a stand-in of Apple's headers.
3. Planted mistakes (bad/*.metal): each marked line is named, and no other.

CLANG names the compiler (clang-22 by default).
"""
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
CLANG = os.environ.get("CLANG", "clang-22")
# -cl-ext must go through -Xclang, or it is ignored.
BASE = [CLANG, "-x", "cl", "-cl-std=clc++2021", "-Xclang", "-cl-ext=-cl_khr_fp64,-__opencl_c_fp64", "-Xclang",
        "-finclude-default-header", "-fsyntax-only", "-ferror-limit=0", "-Wno-unused"]
LOCATION = re.compile(r"(<|, )(?:([^<>,:\s]+\.[a-z]+):)?(?:line:)?(\d+):\d+")
NODE = re.compile(r"[| `-]*(\w+) ")
TYPED = {"ParmVarDecl", "VarDecl", "FieldDecl", "FunctionDecl", "CStyleCastExpr", "CXXReinterpretCastExpr"}
SPACE = re.compile(r"__(global|local|constant|private)\b")
FORBIDDEN = {"LambdaExpr": "a lambda", "GotoStmt": "goto", "CXXNewExpr": "new", "CXXTryStmt": "try",
             "CXXMethodDecl": "a member function"}


def clang(source, extra):
    return subprocess.run(BASE + extra + ["-"], input=source, text=True, capture_output=True)


def errors(result):
    """(file, line, message) of each error."""
    found = []
    for line in result.stderr.splitlines():
        # A number without `f` is only warned of: without double it is a float, but Metal and CUDA differ.
        m = re.match(r"(.*?):(\d+):\d+: (?:(?:fatal )?error|warning(?=: double precision constant)): (.*)", line)
        if m:
            found.append((os.path.basename(m[1]), int(m[2]), m[3]))
    if result.returncode and not found:
        found.append(("", 0, result.stderr.strip() or "clang failed"))
    return found


def unnamed(dump, files):
    """Declarations and casts of `files` whose pointers or references name no space, and forbidden constructs."""
    found, name, line, hidden = [], None, 0, None
    for text in dump.splitlines():
        for m in LOCATION.finditer(text.split("'")[0]):
            if m[2]:
                name = os.path.basename(m[2])
            if m[2] or "line:" in m[0]:
                line = int(m[3])
        kind = NODE.match(text)
        if not kind:
            continue
        depth, kind = kind.start(1), kind[1]
        if hidden is not None and depth <= hidden:
            hidden = None
        # What the compiler makes itself, a copy constructor say, is not the text's.
        if hidden is None and " implicit " in text and (kind == "FunctionDecl" or re.match(r"CXX\w+Decl$", kind)) and kind != "CXXRecordDecl":
            hidden = depth
        if name not in files or hidden is not None or " implicit " in text:
            continue
        if kind in FORBIDDEN:
            found.append((name, line, FORBIDDEN[kind]))
        if kind == "VarDecl" and text.rstrip().endswith((" static", " static cinit", " static callinit")) and "_site" not in text:
            found.append((name, line, "a static variable"))
        if kind not in TYPED:
            continue
        m = re.search(r"'([^']*)'", text)
        # Outside templates clang writes __generic where a space is missing, in a template's pattern nothing.
        parts = re.split(r"[*&]", re.sub(r"\[[^]]*\]", "", m[1]))[:-1] if m and kind != "FunctionDecl" else []
        if (m and "__generic" in m[1]) or any(not SPACE.search(part) for part in parts):
            found.append((name, line, f"no address space: {kind} '{m[1]}'"))
    return found


def check(folder, files):
    paths = [f if os.path.isabs(f) else os.path.join(folder, f) for f in files]
    head = [os.path.join(folder, f) for f in ("shape.h", "platform_check.h", "arguments.h")]
    source = "".join(f'#include "{path}"\n' for path in head + paths)
    found = errors(clang(source, ["-Werror=double-promotion"]))
    dump = clang(source, ["-Xclang", "-ast-dump", "-fno-color-diagnostics"]).stdout
    return list(dict.fromkeys(found + unnamed(dump, {os.path.basename(p) for p in paths})))


def check_metal(folder, files):
    # The front end takes variables in local memory in kernel functions only, and kernels are plain functions to it.
    shared = "#undef SHARED\n#define SHARED(T, name, n) threadgroup T (&name)[n] = *(threadgroup T(*)[n])16\n"
    kernel = "#undef KERNEL\n#define KERNEL(name, maxthreads, ...) void name(__VA_ARGS__, K_IDS)\n"
    include = [f'#include "{os.path.join(folder, f)}"\n' for f in ["shape.h", "platform_metal.h"]]
    rest = [f'#include "{os.path.join(folder, f)}"\n' for f in ["arguments.h"] + files]
    flags = ["-I" + os.path.join(HERE, "stand-in"), "-Wno-unknown-attributes", "-Wno-ignored-attributes"]
    return errors(clang("".join(include) + shared + kernel + "".join(rest), flags))


def planted(folder, files):
    wrong, directory = [], os.path.join(HERE, "bad")
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        with open(path) as text:
            want = {i + 1 for i, line in enumerate(text) if line.rstrip().endswith("// bad")}
        got = {line for file, line, _ in check(folder, files + [path]) if file == name}
        wrong += [f"{name}:{line}: a planted mistake was not caught" for line in sorted(want - got)]
        wrong += [f"{name}:{line}: called a mistake, but it is none" for line in sorted(got - want)]
        print(f"{name}: {len(want & got)} of {len(want)} planted mistakes caught")
    return wrong


def main():
    folder = os.path.abspath(sys.argv[1])
    with open(os.path.join(folder, "files")) as names:
        files = names.read().split()
    wrong = [f"{f}:{n}: {m}" for f, n, m in check(folder, files)]
    print(f"address spaces: {len(files)} kernel files, {len(wrong)} mistakes")
    metal = [f"{f}:{n}: {m} (behind platform_metal.h)" for f, n, m in check_metal(folder, files)]
    print(f"platform_metal.h: {len(metal)} mistakes")
    wrong += metal + planted(folder, files)
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
