#!/usr/bin/env bash
# A scripted session with OpenAI's Python and JavaScript packages. Usage: run.sh LILY
#
# Packages are installed into $SDK_DIR (default: target/sdk). A failed installation is a failure.
set -euo pipefail
lily=$(realpath "${1:?usage: run.sh LILY}")
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
dir=${SDK_DIR:-$root/target/sdk}
key=sk-session
mkdir -p "$dir/python" "$dir/js"
if ! cmp -s "$here/requirements.txt" "$dir/python/installed"; then
    python3 -m pip install --quiet --disable-pip-version-check --root-user-action ignore --upgrade --target "$dir/python" -r "$here/requirements.txt"
    cp "$here/requirements.txt" "$dir/python/installed"
fi
cp "$here/package.json" "$here/session.mjs" "$dir/js/"
(cd "$dir/js" && npm install --silent --no-audit --no-fund)

log=$(mktemp)
"$lily" serve --model "$root/models/demo" --replay "$here/replay.jsonl" --port 0 --api-key "$key" 2>"$log" &
server=$!
trap 'kill "$server" 2>/dev/null || true; rm -f "$log"' EXIT
for _ in $(seq 300); do
    base=$(grep -o 'http://[^ ]*/v1' "$log" | head -n 1 || true)
    [ -n "$base" ] && break
    kill -0 "$server" || { cat "$log"; exit 1; }
    sleep 0.1
done
[ -n "$base" ] || { cat "$log"; exit 1; }
PYTHONPATH="$dir/python" python3 "$here/session.py" "$base" "$key"
node "$dir/js/session.mjs" "$base" "$key"
