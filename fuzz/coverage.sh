#!/usr/bin/env bash
# Line coverage of each parser over the inputs of its corpus and seeds, after a run.
#
#   fuzz/coverage.sh [TARGET…]
#
# Needs the component llvm-tools of nightly. The corpus is $FUZZ_CORPUS (default: corpus/ here).
set -euo pipefail
ulimit -s 1048576
cd "$(dirname "$0")"
# The source files of each parser.
declare -A files=(
  [template]="chat/src/source.rs chat/src/concat.rs chat/src/template.rs"
  [tokenizer]="chat/src/tokenizer.rs chat/src/tokenizer/definition.rs chat/src/tokenizer/added.rs chat/src/tokenizer/alphabet.rs chat/src/tokenizer/pieces.rs"
  [detokenizer]="chat/src/detokenizer.rs"
  [stop]="chat/src/stop.rs"
  [header]="checkpoint/src/header.rs checkpoint/src/json.rs checkpoint/src/dtype.rs"
  [config]="model/src/config.rs model/src/fields.rs model/src/rope.rs model/src/quantization.rs chat/src/defaults.rs"
  [index]="checkpoint/src/index.rs checkpoint/src/json.rs"
)
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(template tokenizer detokenizer stop header config index)
triple=$(rustc +nightly -vV | sed -n 's/^host: //p')
llvm_cov=$(rustc +nightly --print sysroot)/lib/rustlib/$triple/bin/llvm-cov
corpus=${FUZZ_CORPUS:-corpus}
build=${CARGO_TARGET_DIR:-target}/$triple/coverage/$triple/release
for target in "${targets[@]}"; do
  cargo +nightly fuzz coverage "$target" "$corpus/$target" "seeds/$target" >/dev/null 2>&1
  sources=()
  for file in ${files[$target]}; do sources+=("$(realpath ../crates)/$file"); done
  "$llvm_cov" export "$build/$target" -instr-profile="coverage/$target/coverage.profdata" -summary-only \
    "${sources[@]}" | python3 -c "
import json, sys
data = json.load(sys.stdin)['data'][0]
for file in data['files']:
    lines = file['summary']['lines']
    print('  %-50s %5d of %5d lines' % (file['filename'].split('/crates/')[1], lines['covered'], lines['count']))
lines = data['totals']['lines']
print('$target: %.1f %% of %d lines' % (lines['percent'], lines['count']))"
done
