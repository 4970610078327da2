#!/usr/bin/env bash
# Line coverage of each parser over the inputs of its corpus (a run's, see run.sh) and its seeds.
#
#   fuzz/coverage.sh
#
# In a copy of the source, each target becomes a test that replays the inputs, with Lily's own crates instrumented and
# their dependencies not. The corpus is $FUZZ_CORPUS (default: corpus/ here). Needs the component llvm-tools of nightly.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
corpus=$(realpath "${FUZZ_CORPUS:-$here/corpus}")
tools=$(rustc +nightly --print sysroot)/lib/rustlib/$(rustc +nightly -vV | sed -n 's/^host: //p')/bin
copy=${COVERAGE_DIR:-$(mktemp -d)}
mkdir -p "$copy/models" "$copy/fuzz"
cp -rp "$here/../crates" "$here/../Cargo.toml" "$here/../Cargo.lock" "$copy/"
cp -r "$here/../models/demo" "$copy/models/"
cp -r "$here"/{fuzz_targets,seeds} "$copy/fuzz/"
python3 "$here/replay.py" "$copy"
printf '#!/bin/sh\nexec "$@" -C instrument-coverage --cfg fuzzing\n' >"$copy/instrument"
chmod +x "$copy/instrument"
cd "$copy"
# Under the fuzzer, templates run on the caller's stack; see crates/chat/src/limits.rs.
export RUST_MIN_STACK=$((1 << 30)) RUSTC_WORKSPACE_WRAPPER=$copy/instrument

# measure PACKAGE TEST INPUTS FILE…
measure() {
  local package=$1 test=$2 inputs=$3 sources=() binary
  shift 3
  for file in "$@"; do sources+=("$copy/crates/$file"); done
  binary=$(cargo test -q -p "$package" --test "replay_$test" --no-run --message-format=json |
    sed -n 's/.*"executable":"\([^"]*replay_[^"]*\)".*/\1/p')
  (cd "$copy/crates/chat" && LLVM_PROFILE_FILE=$copy/$test.profraw REPLAY=$corpus/$inputs:$copy/fuzz/seeds/$inputs \
    "$binary" -q >/dev/null)
  "$tools/llvm-profdata" merge -sparse "$copy/$test.profraw" -o "$copy/$test.profdata"
  "$tools/llvm-cov" export "$binary" -instr-profile="$copy/$test.profdata" -summary-only "${sources[@]}" | python3 -c "
import json, sys
data = json.load(sys.stdin)['data'][0]
for file in data['files']:
    lines = file['summary']['lines']
    print('  %-40s %4d of %4d lines' % (file['filename'].split('/crates/')[1], lines['covered'], lines['count']))
lines = data['totals']['lines']
print('$test: %.1f %% of %d lines' % (lines['percent'], lines['count']))"
}

measure lily-chat template template chat/src/{source,concat,template}.rs
measure lily-chat tokenizer tokenizer chat/src/tokenizer.rs chat/src/tokenizer/{definition,added,alphabet,pieces}.rs
measure lily-chat detokenizer detokenizer chat/src/detokenizer.rs
measure lily-chat stop stop chat/src/stop.rs
measure lily-chat tools tools chat/src/{answer,marks}.rs chat/src/tools/{call,content,follow,schema}.rs
measure lily-chat reasoning reasoning chat/src/{answer,marks,reasoning}.rs chat/src/tools/{call,follow}.rs
measure lily-chat defaults config chat/src/defaults.rs
measure lily-checkpoint header header checkpoint/src/{header,json,dtype}.rs
measure lily-checkpoint index index checkpoint/src/{index,json}.rs
measure lily-model config config model/src/{config,fields,rope,quantization}.rs
