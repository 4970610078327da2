#!/usr/bin/env bash
# Runs each fuzz target for the given number of seconds and prints its executions and coverage.
#
#   fuzz/run.sh SECONDS [TARGET…]
#
# $FUZZ_JOBS targets run at once (default: 1). New inputs go to $FUZZ_CORPUS (default: corpus/ here, not in git); a crash
# fails the script and leaves its input in artifacts/.
set -euo pipefail
# Under the fuzzer, templates run on the main stack; see crates/chat/src/limits.rs.
ulimit -s 1048576
cd "$(dirname "$0")"
corpus=${FUZZ_CORPUS:-corpus}

# one SECONDS TARGET
one() {
  local seconds=$1 target=$2 dictionary=() log executions coverage
  mkdir -p "$corpus/$target"
  [ -f "dictionaries/$target" ] && dictionary=("-dict=dictionaries/$target")
  log=$(mktemp)
  if ! cargo +nightly fuzz run "$target" "$corpus/$target" "seeds/$target" -- "${dictionary[@]}" \
      -max_total_time="$seconds" -timeout=30 -rss_limit_mb=4096 -max_len=4096 -print_final_stats=1 >"$log" 2>&1; then
    tail -n 40 "$log"
    echo "$target: FAILED"
    return 1
  fi
  executions=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  coverage=$(grep -o 'cov: [0-9]*' "$log" | tail -n 1)
  echo "$target: $executions executions in $seconds s, $coverage edges, clean"
  rm -f "$log"
}

if [ "${1:-}" = --one ]; then
  one "$2" "$3"
  exit
fi
seconds=${1:?usage: run.sh SECONDS [TARGET…]}
shift
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(template tokenizer detokenizer stop tools reasoning header config index)
cargo +nightly fuzz build
printf '%s\n' "${targets[@]}" | xargs -P "${FUZZ_JOBS:-1}" -I TARGET "./$(basename "$0")" --one "$seconds" TARGET
