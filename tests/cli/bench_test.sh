# switchyard bench: usage, rows as JSON and as a table, and the tables of docs/performance.md.
. tests/cli/common.sh

# expect RC ARGUMENT..
expect()
{
    local want=$1 got
    shift
    "$SWITCHYARD" bench "$@" >"$dir/out" 2>"$dir/err" </dev/null
    got=$?
    [ "$got" -eq "$want" ] || fail "bench $*: want exit code $want, got $got: $(cat "$dir/err")"
}

expect 2
grep -q '  engine ' "$dir/err" || fail "bench alone does not list the benchmarks"
expect 0 --help
expect 2 no-such-benchmark
expect 0 engine --help
expect 2 engine a b
expect 2 engine --threads 0
expect 2 engine --threads 1,
expect 2 engine --batch x
expect 2 engine --decode-tokens 1
for wrong in '--tp 2' '--transport tcp'; do
    expect 2 engine $wrong
    grep -q -- "${wrong% *}: only with --ranks" "$dir/err" || fail "$wrong: $(cat "$dir/err")"
done
for wrong in '--ranks 2 --prompt-tokens 16,32' '--mixed --threads 1,2'; do
    expect 2 engine $wrong
    grep -q 'want one number with --' "$dir/err" || fail "$wrong: $(cat "$dir/err")"
done
expect 1 engine "$dir/nowhere" --repeat 1
[ "$(grep -c '^switchyard bench engine: ' "$dir/err")" -eq 1 ] ||
    fail "a missing model: want one line, got: $(cat "$dir/err")"

small="models/demo --threads 1,2 --prompt-tokens 70 --batch 1,3 --decode-tokens 4 --repeat 2"
expect 0 engine $small --json
cp "$dir/out" "$dir/rows.jsonl"
python3 - "$dir/rows.jsonl" <<'PY' || fail "rows"
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
assert len(rows) == 8, len(rows)
for row in rows:
    assert list(row) == ["bench", "case", "p50_us", "p90_us", "p99_us", "min_us", "floor_us", "bytes",
                         "flops", "verified", "device", "ranks", "commit", "date"] + (
        ["fraction"] if row["floor_us"] is not None else []), list(row)
    assert row["bench"] == "engine" and row["verified"] is True and row["ranks"] == 1, row
    assert 0 < row["min_us"] <= row["p50_us"] <= row["p99_us"], row
    decode = row["case"]["phase"] == "decode"
    assert row["case"]["tokens"] == row["case"]["batch"] * (1 if decode else 70), row
    assert (row["floor_us"] is not None) == decode and row["flops"] > 0, row
PY

expect 0 engine models/demo --threads 1 --prompt-tokens 8 --batch 1 --decode-tokens 2 --repeat 1
[ "$(wc -l <"$dir/out")" -eq 3 ] || fail "the table: want a head and 2 rows, got: $(cat "$dir/out")"

# ---- engine on several ranks ----
expect 1 engine --ranks 3 --tp 2
grep -q 'want a multiple of --tp 2, got 3' "$dir/err" || fail "ranks and TP: $(cat "$dir/err")"
expect 0 engine --ranks 2 --batch 1,3 --decode-tokens 4 --repeat 2 --json
python3 - "$dir/out" <<'PY' || fail "rows of ranks"
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
phases = [(row["ranks"], row["case"]["phase"]) for row in rows]
assert phases == [(1, "start"), (1, "decode"), (1, "decode"), (2, "start"), (2, "decode"), (2, "decode"),
                  (2, "agreement"), (2, "idle"), (2, "wake")], phases
assert all(row["verified"] and row["bench"] == "engine-ranks" for row in rows), rows
assert [row["case"]["tokens"] for row in rows if row["case"]["phase"] == "decode"] == [1, 3, 2, 6], rows
PY
expect 0 engine --ranks 2 --tp 2 --batch 1 --decode-tokens 4 --repeat 2 --kv-dtype fp8 --json
[ "$(grep -c '"kv":"fp8_e4m3"' "$dir/out")" -eq "$(wc -l <"$dir/out")" ] || fail "the cache's type: $(cat "$dir/out")"

# ---- load: every rank reads what it holds ----
expect 2 load --ranks 0
expect 1 load "$dir/nowhere"
expect 1 load --ranks 5
grep -q '24 experts do not divide by EP 5; nearest: EP 4, DP 4, TP 1' "$dir/err" || fail "$(cat "$dir/err")"
expect 0 load --ranks 1,3 --repeat 1 --json
[ "$(grep -c '"bench":"load",.*"verified":true' "$dir/out")" -eq 4 ] || fail "load: $(cat "$dir/out")"

# ---- tables for people from rows ----
mkdir "$dir/results"
cp "$dir/rows.jsonl" "$dir/results/engine.jsonl"
printf '# Performance\n\n<!-- bench:engine phase=decode -->\nold\n<!-- /bench -->\n\nText.\n' >"$dir/page.md"
tables()
{
    python3 tools/bench_tables.py --results "$dir/results" --page "$dir/page.md" "$@"
}
tables --check 2>/dev/null && fail "bench_tables.py --check accepts an old table"
tables || fail "bench_tables.py"
tables --check || fail "bench_tables.py --check refuses its own table"
[ "$(grep -c '^| [0-9]' "$dir/page.md")" -eq 4 ] || fail "want 4 rows of decode: $(cat "$dir/page.md")"
grep -q '^old' "$dir/page.md" && fail "the old table is still there"
[ "$(tail -1 "$dir/page.md")" = "Text." ] || fail "text after the table is lost"
echo '{"bench": "engine"}' >>"$dir/results/engine.jsonl"
tables 2>/dev/null && fail "bench_tables.py accepts a row without its members"

[ "$n_failed" -eq 0 ] || { echo "$n_failed failed" >&2; exit 1; }
