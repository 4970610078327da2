#!/usr/bin/env bash
# Shows that the targets reach what they should: in a copy of the source, a panic is planted behind the last branch of
# each parser, and each target must find its own within 60 seconds.
#
#   fuzz/planted.sh [SECONDS]
set -euo pipefail
# Under the fuzzer, templates run on the main stack; see crates/chat/src/limits.rs.
ulimit -s 1048576
here=$(cd "$(dirname "$0")" && pwd)
seconds=${1:-60}
copy=${PLANTED_DIR:-$(mktemp -d)}
mkdir -p "$copy"
cp -rp "$here/../crates" "$here/../Cargo.toml" "$here/../Cargo.lock" "$copy/"
mkdir -p "$copy/models" "$copy/fuzz"
cp -r "$here/../models/demo" "$copy/models/"
cp -r "$here"/{Cargo.toml,Cargo.lock,fuzz_targets,seeds,dictionaries} "$copy/fuzz/"
python3 "$here/plant.py" "$copy"
cd "$copy/fuzz"
cargo +nightly fuzz build
for target in template tokenizer detokenizer stop tools reasoning header config index; do
  mkdir -p "corpus/$target"
  dictionary=()
  [ -f "dictionaries/$target" ] && dictionary=("-dict=dictionaries/$target")
  log="$copy/$target.log"
  start=$(date +%s)
  if cargo +nightly fuzz run "$target" "corpus/$target" "seeds/$target" -- "${dictionary[@]}" \
      -max_total_time="$seconds" -max_len=4096 >"$log" 2>&1; then
    echo "$target: the planted panic was NOT found within $seconds s"
    exit 1
  fi
  grep -q "planted: $target" "$log" || { tail -n 30 "$log"; echo "$target: another failure"; exit 1; }
  echo "$target: found after $(($(date +%s) - start)) s, $(grep -oE '^#[0-9]+' "$log" | tail -n 1) executions"
done
