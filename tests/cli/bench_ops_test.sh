# switchyard bench ops: usage, rows of every operation, and that the planner takes them.
. tests/cli/common.sh

# expect RC ARGUMENT..
expect()
{
    local want=$1 got
    shift
    "$SWITCHYARD" bench ops "$@" >"$dir/out" 2>"$dir/err" </dev/null
    got=$?
    [ "$got" -eq "$want" ] || fail "bench ops $*: want exit code $want, got $got: $(cat "$dir/err")"
}

says()
{
    grep -q -- "$1" "$dir/err" || fail "want '$1' in: $(cat "$dir/err")"
}

expect 0 --help
grep -q 'Examples:' "$dir/out" || fail "--help: no examples"
expect 2 surplus
expect 2 --tokens 0
expect 2 --table slow
says 'fast or deterministic'
expect 1 --model no-such-model
says 'no-such-model'
expect 1 --model models # a directory, without a / too
says 'models/config.json: cannot open'
expect 1 --device abacus
says "got 'abacus'"
expect 2 --kv-dtype fp4
expect 1 --model mixtral-8x7b --kv-dtype fp8
says 'want a model that caches latents, got mixtral-8x7b'
expect 1 --model deepseek-v2-lite --experts 99
says 'want at most the 64 of deepseek-v2-lite, got 99'
expect 1 --ops no_such_op
says 'no_such_op'
expect 1 --ops moe_route,no_such_op # one that is known does not hide it
says "got 'no_such_op'"
expect 1 --model models/demo/ --ops gqa_attend # of other models
says "no operation of models/demo/ is named in 'gqa_attend'"
expect 1 --ops q_b --tokens 1 --model models/demo/ --blas "$dir/no-library.so"
says 'no-library.so'
expect 1 --model models/demo/ --ops quantise --table fast # the CPU has one table
says 'no fast table'

# The GPU's plots: what is wrong is said before a device is looked for.
"$SWITCHYARD" bench roofline --help >"$dir/out" || fail "bench roofline --help"
grep -q 'Examples:' "$dir/out" || fail "bench roofline --help: no examples"
refuses()
{
    "$SWITCHYARD" bench roofline "$@" >"$dir/out" 2>"$dir/err" && fail "bench roofline takes $*"
    [ ! -s "$dir/out" ] || fail "bench roofline $*: a table without rows: $(cat "$dir/out")"
    grep -q '^switchyard bench roofline: ' "$dir/err" || fail "bench roofline $*: $(cat "$dir/err")"
}
refuses --products gate_up,nothing
says "got 'nothing'"
refuses --batch 0
refuses --kernels ,
says 'got none'
refuses --kernels abacus
says "no cuda\|got 'abacus'"
refuses --choices "$dir/nowhere"
says "no cuda\|$dir/nowhere: open: "

expect 0 --model models/demo/ --tokens 1,5 --context 70 --repeat 2 --json
cp "$dir/out" "$dir/rows.jsonl"
python3 - "$dir/rows.jsonl" <<'PY' || fail "rows"
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
ops = {row["case"]["op"] for row in rows}
assert ops == {"linear", "grouped_linear", "head_linear", "mla_decode", "mla_prefill", "moe_route",
               "moe_scatter", "moe_gather", "rms_norm_quant", "silu_mul_quant", "quantise",
               "rope_append_kv", "rope_q", "residual_add", "sample"}, ops
for row in rows:
    case = row["case"]
    assert row["bench"] == "ops" and row["verified"] is True, row
    assert case["tokens"] in (1, 5) and case["table"] == "deterministic" and case["shape"], row
    assert 0 < row["min_us"] <= row["p50_us"] and row["floor_us"] > 0 and row["bytes"] > 0, row
    assert abs(row["fraction"] * row["p50_us"] / row["floor_us"] - 1) < 1e-3, row
    assert row["variant"].startswith("cpu, ") and row["commit"] and row["date"], row
products = [row for row in rows if row["case"]["op"] == "linear"]
assert all(row["flops"] > 0 for row in products)
PY

expect 0 --model models/demo/ --ops q_b,moe_route --tokens 3 --repeat 1 --cpu-variant c
[ "$(wc -l <"$dir/out")" -eq 3 ] || fail "the table: want a head and 2 rows, got: $(cat "$dir/out")"

# The planner takes efficiencies from such rows; it knows GPUs, so the device gets the name of one,
# and a time below the floor (somebody else took the processor while the floor was measured) is
# lifted to it.
python3 - "$dir/rows.jsonl" >"$dir/gpu.jsonl" <<'PY'
import json, sys
for line in open(sys.argv[1]):
    row = json.loads(line)
    row["device"] = "NVIDIA H100"
    row["p50_us"] = max(row["p50_us"], row["floor_us"])
    print(json.dumps(row))
PY
"$SWITCHYARD" plan --gpu h100 --ep 8 --batch 8 --measured "$dir/gpu.jsonl" >"$dir/plan" 2>"$dir/err" ||
    fail "plan --measured: $(cat "$dir/err")"
for kernel in q_b_proj mla_attention router_topk k_b_bmm; do
    grep -q "^$kernel.*measured" "$dir/plan" || fail "plan: $kernel is not measured"
done

[ "$n_failed" -eq 0 ] || { echo "$n_failed failed" >&2; exit 1; }
