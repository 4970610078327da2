#!/bin/sh
# Lily beside llama.cpp on this CPU, from nothing: builds both, writes slices of the real model's shape with random weights,
# measures them in alternating rounds, and keeps tables, plots and records.
#
#     tools/bench-peers/compare_cpu.sh WORK [LAYERS…]
#
# WORK is a folder for llama.cpp, the slices (5 GB for 4 layers, 16 GB for 16) and what comes out: compare-N.txt, and
# plots-N/prefill.svg and decode.svg. LAYERS are 4 and 16 if none are named. Raw rounds are appended to
# bench/results/compare.tsv. What is there already is used again.
#
# Environment: LILY, the program to measure (else target/release/lily is built), LLAMA, a build of llama.cpp (else it is
# built in WORK), ROUNDS (3), PREFILL (512,2048), DECODE (512,4096), DECODE_TOKENS (32), RECORD (bench/results),
# WHY (text for the record), MORE (more arguments, such as "--dropped").
#
# Nothing else may run meanwhile: llama.cpp's threads wait for each other by spinning.
set -eu

[ $# -ge 1 ] || { echo "usage: $0 WORK [LAYERS…]" >&2; exit 2; }
mkdir -p "$1"
work=$(cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- 4 16
cd "$(dirname "$0")/../.."

if [ -z "${LILY:-}" ]; then
    cargo build --release --package lily
    LILY="${CARGO_TARGET_DIR:-target}/release/lily"
fi
if [ -z "${LLAMA:-}" ]; then
    LLAMA="$work/llama.cpp"
    [ -x "$LLAMA/build/bin/llama-bench" ] || tools/bench-peers/build_llama_cpp.sh "$work"
fi

for layers in "$@"; do
    slice="$work/slice$layers"
    # A file that was not finished does not get its name.
    if [ ! -d "$slice" ]; then
        rm -rf "$slice.part"
        "$LILY" bench synth --layers "$layers" --out "$slice.part"
        mv "$slice.part" "$slice"
    fi
    if [ ! -f "$slice.gguf" ]; then
        rm -f "$slice.part.gguf"
        "$LILY" bench synth --layers "$layers" --gguf "$slice.part.gguf"
        mv "$slice.part.gguf" "$slice.gguf"
    fi
    # shellcheck disable=SC2086 # MORE is several arguments
    "$LILY" bench compare --model "$slice" --gguf "$slice.gguf" --peer "llama.cpp=$LLAMA" \
        --prefill "${PREFILL:-512,2048}" --decode "${DECODE:-512,4096}" --decode-tokens "${DECODE_TOKENS:-32}" \
        --rounds "${ROUNDS:-3}" --plots "$work/plots-$layers" --record "${RECORD:-bench/results}" \
        --why "${WHY:-Lily beside llama.cpp, $layers layers}" ${MORE:-} > "$work/compare-$layers.part"
    mv "$work/compare-$layers.part" "$work/compare-$layers.txt"
    cat "$work/compare-$layers.txt"
done
