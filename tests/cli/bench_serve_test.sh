# switchyard bench serve against a server whose answers are known: that everything is counted, that
# wrong, refused and broken answers are told, and usage. Nothing depends on how long anything takes.
set -u
dir=$(mktemp -d)
python3 tests/cli/completions_mock.py >"$dir/port" 2>"$dir/mock.err" &
mock=$!
trap 'kill $mock 2>/dev/null; rm -rf "$dir"' EXIT
n_failed=0

fail()
{
    echo "FAIL: $*" >&2
    n_failed=$((n_failed + 1))
}

# expect RC ARGUMENT..
expect()
{
    local want=$1 got
    shift
    "$SWITCHYARD" bench serve "$@" >"$dir/out" 2>"$dir/err" </dev/null
    got=$?
    [ "$got" -eq "$want" ] ||
        fail "bench serve $*: want exit code $want, got $got: $(cat "$dir/err" "$dir/mock.err")"
}

# is EXPRESSION: of the rows by metric, in r
is()
{
    python3 - "$dir/out" "$1" <<'EOF' || fail "want $1, got $(cat "$dir/out")"
import json, sys
r = {row["case"]["metric"]: row for row in map(json.loads, open(sys.argv[1]))}
sys.exit(not eval(sys.argv[2]))
EOF
}

until [ -s "$dir/port" ] || ! kill -0 $mock 2>/dev/null; do sleep 0.02; done
url=http://127.0.0.1:$(cat "$dir/port")

"$SWITCHYARD" bench --help | grep -q '  serve ' || fail "bench --help does not list serve"
expect 0 --help
grep -q '^ *switchyard bench serve ' "$dir/out" || fail "--help without an example"
expect 2 --url ftp://somewhere
expect 2 --url 127.0.0.1
expect 2 --clients 0
expect 2 --lengths long
expect 2 --ids 9-3
expect 2 --prefix-tokens 5
expect 2 --clients 2 --rate 5 --plot "$dir"
expect 1 --url http://127.0.0.1:1
grep -q 'is the server running' "$dir/err" || fail "no server: $(cat "$dir/err")"

small="--url $url --prompt-tokens 6 --output-tokens 5 --json"
expect 0 $small --clients 3 --requests 20
is 'r.keys() == {"ttft", "itl", "e2e"} and all(x["verified"] for x in r.values())'
is 'r["ttft"]["done"] == 20 and r["ttft"]["p50_us"] <= r["ttft"]["p90_us"] <= r["ttft"]["p99_us"]'
is 'r["itl"]["cached_share"] == 0.5 and r["itl"]["tokens_per_s"] > 0'
expect 0 $small --rate 200 --requests 20 --lengths chat --prefixes 2 --prefix-tokens 8
is 'r["e2e"]["done"] == 20 and r["e2e"]["case"]["rate"] == 200 and r["e2e"]["verified"]'
expect 0 $small --clients 4 --requests 24 --distinct 3 --model plain --api-key right
is 'r["e2e"]["verified"] and r["e2e"]["wrong"] == 0'

expect 1 $small --clients 4 --requests 24 --distinct 3 --model wrong
is 'r["e2e"]["done"] == 24 and r["e2e"]["wrong"] == 12 and not r["e2e"]["verified"]'
grep -q 'answers are not what was asked for' "$dir/err" || fail "wrong texts are not told"
expect 1 $small --clients 2 --requests 12 --model refusing
is 'r["e2e"]["refused"] == 4 and r["e2e"]["done"] == 8 and not r["e2e"]["verified"]'
grep -q 'the queue is full' "$dir/err" || fail "the server's words are not told"
expect 1 $small --clients 2 --requests 12 --model breaking
is 'r["e2e"]["failed"] == 4 and r["e2e"]["done"] == 8'
expect 1 $small --clients 1 --requests 4 --model good --api-key false
grep -q 'wrong key' "$dir/err" || fail "the server's words are not told"

local="--in-process models/demo --threads 1 --prompt-tokens 6 --output-tokens 5 --json"
expect 0 $local --clients 3 --requests 7
is 'r["e2e"]["done"] == 7 and r["e2e"]["verified"] and r["e2e"]["case"]["server"] == "in process"'
expect 0 $local --rate 100 --requests 5 --prefixes 1 --prefix-tokens 130
is 'r["e2e"]["done"] == 5 and r["ttft"]["cached_share"] > 0.5'
expect 1 --in-process "$dir/nowhere"

if command -v gnuplot >/dev/null; then
    expect 0 --url "$url" --prompt-tokens 6 --output-tokens 5 --clients 1,2 --plot "$dir"
    grep -q '</svg>' "$dir/serve.svg" || fail "no drawing"
    [ "$(grep -vc '^#' "$dir/serve.tsv")" -eq 2 ] || fail "serve.tsv: $(cat "$dir/serve.tsv")"
fi
expect 1 --url "$url" --clients 1 --plot "$dir/nowhere"

[ $n_failed -eq 0 ]
