# switchyard logits: usage, the shape of --json, positions, order, prompts as text and as ids.
. tests/cli/common.sh

logits()
{
    "$SWITCHYARD" logits "$@"
}

# expect RC ARGUMENT..: the exit code; a failure (1) is told in one line and prints nothing
expect()
{
    local want=$1 got
    shift
    logits "$@" >"$dir/out" 2>"$dir/err" </dev/null
    got=$?
    [ "$got" -eq "$want" ] || fail "logits $*: want exit code $want, got $got: $(cat "$dir/err")"
    if [ "$want" -eq 1 ]; then
        [ "$(grep -c '^switchyard logits: ' "$dir/err")" -eq 1 ] ||
            fail "logits $*: want one line that names the command, got: $(cat "$dir/err")"
        [ ! -s "$dir/out" ] || fail "logits $*: output with an error: $(head -c 200 "$dir/out")"
    fi
}

# same WHAT A B: equal, and something
same()
{
    [ -n "$2" ] && [ "$2" = "$3" ] || fail "$1: '$2' and '$3' differ"
}

expect 2
expect 2 $model
expect 2 $model --ids 1 --prompt x
expect 2 $model --ids 1 --every 0
expect 2 $model --ids 1 --top 0
expect 2 $model --ids 1 --no-such-option
expect 2 $model --ids 1 --temperature 1
expect 0 --help
grep -q 'Usage: switchyard logits' "$dir/out" || fail "--help: no usage line"
expect 1 "$dir/nowhere" --ids 1
expect 1 $model --ids 1,99999 --json
expect 1 $model --ids-file "$dir/nowhere.ids"
python3 -c 'print(" ".join(["5"] * 5000))' >"$dir/long.ids"
expect 1 $model --ids-file "$dir/long.ids" --json

# shape ARGUMENT..: positions, entries each, and whether drafts are there, of checked JSON
shape()
{
    logits $model --json "$@" | python3 -c 'import json, sys
line = sys.stdin.read()
assert line.endswith("\n") and line.count("\n") == 1
document = json.loads(line)
assert set(document) <= {"positions", "drafts", "drafts_accepted"}
for position in document["positions"]:
    assert list(position)[:2] == ["pos", "top"], position
    for top in [position["top"], position.get("draft", [])]:
        assert all(len(pair) == 2 and type(pair[0]) is int for pair in top), top
        assert top == sorted(top, key=lambda pair: (-pair[1], pair[0])), top
print(",".join(str(p["pos"]) for p in document["positions"]),
      ",".join(sorted({str(len(p["top"])) for p in document["positions"]})),
      "".join("d" if "draft" in p else "-" for p in document["positions"]))'
}
ids=0,3572,496,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28
same "the default positions" "$(shape --ids $ids)" "0,8,16,19 20 ----"
same "--every 5 --top 3" "$(shape --ids $ids --every 5 --top 3)" "0,5,10,15,19 3 -----"
same "the last position once" "$(shape --ids 1,2,3,4,5,6,7,8,9)" "0,8 20 --"
same "one id" "$(shape --ids 0)" "0 20 -"
same "--top beyond the vocabulary" "$(shape --ids 0 --top 100000)" "0 3584 -"
same "--mtp --every 1: drafts are judged" \
    "$(logits $model --ids $ids --mtp --every 1 --top 1 --json |
        python3 -c 'import json, sys
d = json.load(sys.stdin)
p = d["positions"]
ok = sum(a["draft"][0][0] == b["top"][0][0] for a, b in zip(p, p[1:]))
print(d["drafts"] == len(p) - 1, d["drafts_accepted"] == ok)')" "True True"
same "--mtp: none at the last position" "$(shape --ids $ids --mtp)" "0,8,16,19 20 ddd-"

# greedy generation takes the largest logit of the last position
same "logits and generate" \
    "$(logits $model --ids 0,3572 --json | python3 -c 'import json, sys
print(json.load(sys.stdin)["positions"][-1]["top"][0][0])')" \
    "$("$SWITCHYARD" generate $model --ids 0,3572 --max-tokens 1 --json | python3 -c 'import json, sys
print(json.load(sys.stdin)["ids"][0])')"
same "--prompt and --ids" "$(logits $model --prompt 'In the beginning' --json)" \
    "$(logits $model --json --ids "$(printf 'In the beginning' | "$SWITCHYARD" tokenize $model --json |
        python3 -c 'import json, sys; print(",".join(map(str, json.load(sys.stdin)["ids"])))')")"
same "chunks of the prompt" "$(logits $model --ids $ids --json)" \
    "$(logits $model --ids $ids --json --max-batch-tokens 3)"
[ "$(logits $model --ids $ids --json)" != "$(logits $model --ids $ids --json --exact)" ] ||
    fail "--exact changes nothing"

# ---- the table ----
expect 0 $model --prompt 'In the beginning' --every 1 --top 2
same "positions of the table" "$(grep -c '^position' "$dir/out")" 3
grep -q '"In"' "$dir/out" || fail "the table does not show the tokens: $(head -3 "$dir/out")"

[ "$n_failed" -eq 0 ] || { echo "$n_failed failed" >&2; exit 1; }
