# The openai package against switchyard serve and its own engine, with the demo model: what it finds is in
# openai_client.py.
set -uo pipefail

python=$(tools/venv.sh "$YARD_BUILD_DIR/clients" tests/serve/requirements.txt) || exit $?
dir=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill -KILL $server 2>/dev/null; wait; rm -rf "$dir"' EXIT
"$SWITCHYARD" serve models/demo --port 0 --threads 1 --drain-timeout 300 --api-key not-this --api-key secret >"$dir/out" 2>"$dir/err" &
server=$!
until url=$(grep -o 'http://[0-9.]*:[0-9]*' "$dir/out" | head -n 1) && [ -n "$url" ]; do
    kill -0 $server 2>/dev/null || { cat "$dir/err" >&2; exit 1; }
    sleep 0.05
done
"$python" -B tests/serve/openai_client.py "$url" secret "$SWITCHYARD" models/demo || { cat "$dir/err" >&2; exit 1; }
kill -TERM $server
wait $server
code=$?
server=
[ $code -eq 0 ] || { echo "FAIL: want exit code 0 after SIGTERM, got $code" >&2; exit 1; }
