# switchyard plan: one point, sweep, validate, scale; refusals, JSON, files, and the numbers of the document.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
n_failed=0

fail()
{
    echo "FAIL: $*" >&2
    n_failed=$((n_failed + 1))
}

# expect RC ARGUMENT..: the exit code; a failure is told on standard error, and prints nothing
expect()
{
    local want=$1 got
    shift
    "$SWITCHYARD" plan "$@" >"$dir/out" 2>"$dir/err" </dev/null
    got=$?
    [ "$got" -eq "$want" ] || fail "plan $*: want exit code $want, got $got: $(cat "$dir/err")"
    if [ "$want" -ne 0 ]; then
        grep -q '^switchyard plan' "$dir/err" || fail "plan $*: no message that names the command"
        [ ! -s "$dir/out" ] || fail "plan $*: output with an error: $(head -c 200 "$dir/out")"
    fi
}

# says TEXT: the last message
says()
{
    grep -qF -- "$1" "$dir/err" || fail "want '$1' in: $(cat "$dir/err")"
}

# ---- refusals: usage, with the legal values ----
expect 2 --gpu h1000
says 'legal: h100, h200, h800, h20, b200, gb200'
expect 2 --model gpt
says 'legal: deepseek-v3'
expect 1 --model models # a directory, without a / too
says 'models/config.json: cannot open'
expect 2 --schedule fast
says 'legal: none, dispatch-overlap, micro-batch'
expect 2 --nic token-ring
says 'legal: cx7, efa, cx8'
expect 2 --efficiency best
says 'legal: floor, article, public'
expect 2 --weights fp6
says 'legal: fp8, bf16, nvfp4'
expect 2 --copies twice
expect 2 --batch 0
expect 2 --batch -3
expect 2 --batch 1e9
expect 2 --kv 99999999999
expect 2 --acceptance 1.5
expect 2 --acceptance nan
expect 2 --imbalance 0.2
expect 2 --price -1
expect 2 --ep 8,16
says 'plan sweep'
expect 2 nonsense
says 'legal: sweep, validate, scale'
expect 2 sweep --prefill
expect 2 --prefill --batch 4
expect 2 --chunk 4096
says 'of --prefill alone'
expect 2 sweep --one-node-gpu h3
expect 2 sweep --min-speed fast
expect 2 validate now
expect 2 scale --model llama-3-70b
# ---- refusals: layouts and files ----
expect 1 --ep 7
says 'legal: 1, 2, 4, 8, 16, 32, 64, 128, 256'
expect 1 --ep 24 --tp 3
says 'legal: 1, 2, 4, 8'
expect 1 --ep 16 --tp 16
expect 1 --kv 0
expect 1 --model "$dir/nowhere/"
expect 1 --gpu-file "$dir/nowhere.json"
echo '{"name": "x", "speed": 3}' >"$dir/gpu.json"
expect 1 --gpu-file "$dir/gpu.json"
says 'unknown field speed; legal: name, hbm_gb'
echo '{"bench":"mla_decode","device":"NVIDIA A100","p50_us":10,"floor_us":8,"verified":true}' \
    >"$dir/rows.jsonl"
expect 1 --measured "$dir/rows.jsonl"
says 'A100'
echo '{"bench":"mla_decode","device":"NVIDIA H100","p50_us":7,"floor_us":8,"verified":true}' \
    >"$dir/rows.jsonl"
expect 1 --measured "$dir/rows.jsonl"
says 'below its floor'
echo '[1, 2, 3]' >"$dir/load.json"
expect 1 --ep 8 --load-file "$dir/load.json"
expect 1 sweep --min-speed 9999
says 'fastest'
expect 1 sweep --ep 7
expect 1 sweep --out "$dir/no/such/folder"

# ---- one point ----
expect 0 --help
grep -q 'Examples:' "$dir/out" || fail "--help: no examples"
expect 0 --ep 128 --batch 128 --schedule micro-batch --json
python3 - "$dir/out" <<'EOF' || fail "JSON of a point"
import json, sys
p = json.load(open(sys.argv[1]))
for key in ("layer_us", "step_ms", "tokens_per_s_per_request", "tokens_per_s_per_node", "memory_gb", "fits"):
    assert key in p, key
assert abs(p["layer_us"] / 1896 - 1) < 0.1, p["layer_us"]
assert p["fits"] and p["memory_gb"] < 80
names = [k["name"] for k in p["kernels"]]
assert len(names) == len(set(names)) == 23, names
for k in p["kernels"]:
    assert k["us"] >= k["floor_us"] > 0, k
    assert k["origin"] in ("measured", "published", "fitted", "assumed"), k
    assert k["source"], k
EOF
expect 0 --ep 8 --batch 128 --json # article A's EP8 on H100: timed, but it does not fit
python3 - "$dir/out" <<'EOF' || fail "a point that does not fit"
import json, sys
p = json.load(open(sys.argv[1]))
assert not p["fits"] and "GB" in p["why"] and abs(p["layer_us"] / 1802 - 1) < 0.1
EOF
expect 0 --model models/demo --ep 2 --batch 4
expect 0 --prefill --gpu h800 --ep 32 --copies node --efficiency deepseek --schedule micro-batch
expect 0 --ep 8 --imbalance 1.5
grep -q 'busiest rank 1.50 x' "$dir/out" || fail "imbalance is hidden"
echo '[2, 1, 1, 1, 1, 1, 1, 1]' >"$dir/load.json"
expect 0 --ep 8 --load-file "$dir/load.json"
grep -q 'measured' "$dir/out" || fail "a measured load is not said to be measured"
echo '{"bench":"mla_decode","device":"NVIDIA H100","p50_us":10,"floor_us":8,"verified":true}' \
    >"$dir/rows.jsonl"
expect 0 --measured "$dir/rows.jsonl"
grep -q 'mla_attention.*measured' "$dir/out" || fail "a measured efficiency is not said to be measured"
expect 0 --gpu h200 --ep 32 --measured bench/results/ops-h200.jsonl # the rows in the tree are good for a plan
grep -q 'moe_gate_up.*measured' "$dir/out" || fail "measured products are not said to be measured"

expect 0 --ep 128 --batch 64 --out "$dir/point"
grep -q '<svg' "$dir/point/timeline.svg" || fail "no timeline"
sed 's/"vocab_size"/"index_topk": 2048, "vocab_size"/' models/demo/config.json >"$dir/config.json"
expect 1 --model "$dir/" # a field that may change the cost
says 'index_topk'

expect 0 --model kimi-k2 # drafts from nowhere are said
grep -q '^drafts .*no draft module' "$dir/out" || fail "drafts without a module go unsaid"
expect 0
grep -q '^drafts' "$dir/out" && fail "deepseek-v3 has a draft module"

# ---- sweep ----
expect 0 sweep --out "$dir/plots"
grep -q '^Run decode on' "$dir/out" || fail "no recommendation"
for file in frontier.dat frontier.gp layer.dat layer.gp crossover.dat crossover.gp roofline.dat \
    roofline.gp timeline.svg report.html; do
    [ -s "$dir/plots/$file" ] || fail "no $file"
done
if command -v gnuplot >/dev/null; then
    for file in frontier layer crossover roofline; do
        [ -s "$dir/plots/$file.svg" ] && [ -s "$dir/plots/$file.png" ] || fail "$file was not drawn"
    done
fi
[ "$(grep -c '<svg' "$dir/plots/report.html")" -ge 1 ] || fail "report.html has no drawing"
for what in 'h200: rates published' 'h100: rates published' '<b>article</b>' '<b>deepseek</b>'; do
    grep -q "$what" "$dir/plots/report.html" || fail "report.html: no origin: $what"
done
grep -q 'https\?://[^w]' "$dir/plots/report.html" && fail "report.html needs other files"
# without gnuplot: tables and data, and no failure
(
    PATH=$dir/empty
    "$SWITCHYARD" plan sweep --out "$dir/bare" >"$dir/out" 2>"$dir/err"
) || fail "a sweep without gnuplot fails"
says 'no gnuplot'
[ -s "$dir/bare/frontier.gp" ] && [ -s "$dir/bare/timeline.svg" ] || fail "no data without gnuplot"
# drawings of an earlier run of another GPU stay out of the report
(
    PATH=$dir/empty
    "$SWITCHYARD" plan sweep --gpu h20 --out "$dir/plots" >"$dir/out" 2>"$dir/err"
) || fail "a second sweep without gnuplot fails"
[ ! -e "$dir/plots/frontier.svg" ] || fail "a drawing of another run is left"
[ "$(grep -c '<svg' "$dir/plots/report.html")" -eq 1 ] || fail "report.html holds stale drawings"
# layouts that have no figures of EP 8 to 128
expect 0 sweep --ep 144 --redundant 32 --out "$dir/spare"
[ -s "$dir/spare/timeline.svg" ] && [ ! -e "$dir/spare/layer.dat" ] || fail "figures of EP 144"
expect 0 sweep --gpu gb200 --weights nvfp4 --out "$dir/rack"
grep -q '^set yrange \[1:15000\]' "$dir/rack/roofline.gp" || fail "the roof of FP4 is that of FP8"
expect 0 sweep --json
python3 - "$dir/out" <<'EOF' || fail "JSON of a sweep"
import json, sys
answer = json.load(open(sys.argv[1]))
points = answer["points"]
assert len(points) == 160
assert all(p["fits"] for p in points if p["frontier"])
assert {p["ep"] for p in points if p["best"]} >= {8, 128}
assert answer["decision"]["decode"] in points and answer["decision"]["usd_per_million_output_tokens"] > 0
EOF
expect 0 sweep --json --min-speed 50 --max-ttft 700
python3 - "$dir/out" <<'EOF' || fail "JSON of a decision"
import json, sys
d = json.load(open(sys.argv[1]))["decision"]
assert d["decode"]["tokens_per_s_per_request"] >= 50
assert d["prefill"]["ttft_ms"] <= 700 and d["prefill"]["chunk"] < 16384 # fewer tokens a step
EOF
expect 0 sweep --json --kv 10000000
grep -q '"decision":null' "$dir/out" || fail "a decision where nothing fits"
# a wish that nothing meets is an error, in JSON as well
expect 1 sweep --json --min-speed 9999
says 'fastest'
expect 1 sweep --max-ttft 1
says 'the fastest takes'
expect 1 sweep --kv 10000000
says 'no layout fits in memory'
expect 1 sweep --gpus 4
says 'at most 4 GPUs'
# every EP and TP of a list is in the answer, or refused
expect 1 sweep --ep 3,8
says 'EP 3: want'
expect 1 sweep --tp 3,8
says 'legal: 1, 2, 4, 8'
# the GPU that is named is the GPU of all layouts, and measurements are of no other
expect 0 sweep --gpu h100
grep -q h200 "$dir/out" && fail "H200 where --gpu h100 was asked for"
expect 0 sweep --measured "$dir/rows.jsonl"
grep -q h200 "$dir/out" && fail "H200 with measurements of H100"
expect 2 sweep --measured "$dir/rows.jsonl" --one-node-gpu h200
says 'legal: h100'
expect 0 sweep --one-node-gpu h200 --one-node-price 9.99 --ep 8
grep -q 'at 9.99 USD a GPU hour (given)' "$dir/out" || fail "--one-node-price has no effect"
expect 2 sweep --gpu h100 --one-node-price 3
# without a price throughput decides
expect 0 sweep --gpu h100 --price 0
grep -q '^Run decode on 64 x h100 .* 128 requests' "$dir/out" || fail "for nothing: $(grep '^Run decode' "$dir/out")"
grep -q 'no price of h100 is known' "$dir/out" || fail "a price of nothing"
# imbalance and loads are of the decode group; the prefill pool has another EP
expect 0 sweep --ep 32,64 --imbalance 20
expect 0 sweep --ep 8 --gpu h200 --load-file "$dir/load.json" --occupancy 0.5
grep -q '50 % occupancy (given)' "$dir/out" || fail "a given occupancy is called fitted"
if [ -w /dev/full ]; then
    "$SWITCHYARD" plan --json >/dev/full 2>"$dir/err" && fail "a full disk goes unnoticed"
    [ "$(grep -c . "$dir/err")" -eq 1 ] || fail "a full disk is told twice: $(cat "$dir/err")"
fi

# ---- validate, scale, the document ----
expect 0 validate --frozen bench/plan/predictions.jsonl
expect 0 validate --json
sed 's/"predicted":[0-9.]*/"predicted":1.0/' bench/plan/predictions.jsonl >"$dir/other.jsonl"
expect 1 validate --frozen "$dir/other.jsonl"
says 'was predicted as'
expect 0 scale --batch 64
expect 0 scale --batch 64 --json
expect 2 validate --fit --json
{ head -n -1 bench/plan/predictions.jsonl; head -n 1 bench/plan/predictions.jsonl; } >"$dir/other.jsonl"
expect 1 validate --frozen "$dir/other.jsonl" # one twice, one not at all
says 'for the second time'
expect 2 scale --batch 1,2
expect 2 scale --tp 2,4
expect 2 scale --out "$dir/scale"
expect 2 scale --requests 1e9
expect 1 scale --requests 1e6 --output-tokens 10000000
says 'at most 1e+06 groups'
expect 0 scale --price 0
grep -q nan "$dir/out" && fail "scale: nan without a price"
expect 0 scale --ep 8 --batch 64
grep -q 'DO NOT FIT' "$dir/out" || fail "scale: a day on groups that do not fit"
echo '[1]' >"$dir/hours.json"
expect 1 scale --hours-file "$dir/hours.json"
python3 -B tools/planner_doc.py "$SWITCHYARD" docs/planner.md >"$dir/out" ||
    fail "docs/planner.md is stale: $(cat "$dir/out")"

[ "$n_failed" -eq 0 ] || { echo "$n_failed failed" >&2; exit 1; }
