# switchyard bench ep: usage, the fields of its rows, and that what was exchanged is right. Small
# shapes; nothing here depends on how long anything takes.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
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
    "$SWITCHYARD" bench ep "$@" >"$dir/out" 2>"$dir/err" </dev/null
    got=$?
    [ "$got" -eq "$want" ] ||
        fail "bench ep $*: want exit code $want, got $got: $(cat "$dir/err")"
}

"$SWITCHYARD" bench --help | grep -q '  ep ' || fail "bench --help does not list ep"
expect 0 --help
grep -q 'dispatch = ' "$dir/out" || fail "--help without the formula of the bytes"
grep -q '^ *switchyard bench ep ' "$dir/out" || fail "--help without an example"
expect 2 --device tpu
expect 2 --transports shm,pigeon
expect 2 --transports shm,
expect 2 --modes inexact
expect 2 --layouts round
expect 2 --tokens 0
expect 2 --ranks 3 --experts 16
expect 2 --top-k 9 --experts 8
expect 2 --repeat 0

small="--hidden 200 --experts 12 --top-k 3 --tokens 1,5 --repeat 7"
expect 0 $small --json
cp "$dir/out" "$dir/rows.jsonl"
expect 0 $small --json --ranks 3 --transports shm,memcpy,socket
grep -q 'socket.* left out' "$dir/err" || fail "3 ranks: want socket left out: $(cat "$dir/err")"
cat "$dir/out" >>"$dir/rows.jsonl"
python3 - "$dir/rows.jsonl" <<'PY' || fail "rows"
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
seen = {}
for row in rows:
    case = row["case"]
    assert list(row) == ["bench", "case", "p50_us", "p90_us", "p99_us", "min_us", "floor_us", "bytes",
                         "flops", "verified", "device", "ranks", "commit", "date"] + (
        ["fraction"] if row["floor_us"] is not None else []), list(row)
    assert list(case)[:8] == ["transport", "phase", "mode", "layout", "tokens", "hidden", "experts",
                              "top_k"], list(case)
    assert set(list(case)[8:]) <= {"variant", "link"}, list(case)
    assert row["bench"] == "ep" and row["verified"] is True, row
    assert 0 < row["min_us"] <= row["p50_us"] <= row["p99_us"], row
    assert (case["hidden"], case["experts"], case["top_k"]) == (200, 12, 3), row
    network = case["transport"] in ("tcp", "libfabric", "socket")
    assert (case.get("link") in ("namespaces", "loopback")) == network, row
    assert (row["floor_us"] is None) == (case["transport"] in ("memcpy", "socket")), row
    key = row["ranks"], case["transport"], case.get("variant")
    seen[key] = seen.get(key, 0) + 1
# 3 phases, 2 modes, 2 layouts, 2 numbers of tokens
for ranks in 2, 3:
    assert seen[ranks, "shm", None] == seen[ranks, "shm", "copied"] == 24, seen
    assert seen[ranks, "memcpy", None] == 24, seen
assert seen[2, "socket", "stream"] == 12 and seen[2, "socket", "pingpong"] == 2, seen
# the formula: dispatch is (rows in + rows of expert_x) x (200 + 4 x 2) bytes, combine has 400 for
# each row of expert_y and 800 for each row of y
def row_bytes(transport, phase, layout, tokens):
    return [r["bytes"] for r in rows
            if r["ranks"] == 2 and r["case"]["transport"] == transport
            and (r["case"]["phase"], r["case"]["layout"], r["case"]["tokens"]) ==
            (phase, layout, tokens)]
for tokens in 1, 5:
    for layout in "expert", "flat":
        dispatch = set(row_bytes("shm", "dispatch", layout, tokens))
        combine = set(row_bytes("memcpy", "combine", layout, tokens))
        assert len(dispatch) == len(combine) == 1, (dispatch, combine)
        assert dispatch.pop() % 208 == 0 and combine.pop() % 400 == 0
PY

# rows where they landed: nothing but the rows that come in is copied
expect 0 $small --json --transports shm,memcpy --layouts in-place
for transport in shm memcpy; do
    [ "$(grep -c "\"$transport\".*\"in-place\".*\"verified\":true" "$dir/out")" -ge 12 ] ||
        fail "in-place: want 12 verified rows of $transport: $(cat "$dir/out" "$dir/err")"
done

# two nodes: one copy for each of its ranks, or one for the node; the rows are counted inside
expect 0 --ranks 4 --hidden 200 --experts 12 --top-k 5 --tokens 1,7 --repeat 5 --transports shm+tcp --json
for variant in rank-copy node-copy; do
    [ "$(grep -c "\"shm+tcp\".*\"$variant\".*\"verified\":true" "$dir/out")" -eq 24 ] ||
        fail "$variant: want 24 verified rows: $(cat "$dir/out" "$dir/err")"
done

# the peer made with MPI is optional; where it was built and can start, its rows are right too
helper=$(dirname "$SWITCHYARD")/ep_mpi
if [ ! -x "$helper" ]; then
    echo "no MPI rows here"
else
    expect 0 $small --json --transports mpi,memcpy
    grep -c '"transport":"mpi".*"variant":"\(padded\|counts\)".*"verified":true' "$dir/out" \
        >"$dir/n"
    [ "$(cat "$dir/n")" -eq 12 ] || grep -q 'mpi .*left out' "$dir/err" ||
        fail "want 12 rows of MPI, got $(cat "$dir/n"): $(cat "$dir/err")"
fi

# more ranks than this machine may have CPUs, odd sizes, a table
expect 0 --ranks 4 --hidden 33 --experts 8 --top-k 8 --tokens 3 --repeat 3 --transports shm
grep -q ' NO ' "$dir/out" && fail "the table: rows are wrong: $(cat "$dir/out")"
grep -q '^  combine  = ' "$dir/out" || fail "the table: no formula in its foot"

[ "$n_failed" -eq 0 ] || { echo "$n_failed failed" >&2; exit 1; }
