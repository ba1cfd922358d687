#!/usr/bin/env bash
# Dispatch and combine on a machine with 4 or 8 GPUs: the conformance suite at EP4 and EP8 (TP 1, 2,
# 4, 8 are drawn at random), then the times. bench/ep8.sh [BUILD_DIR [OUT_DIR]]
#
# OUT_DIR/ep8.jsonl gets the rows, OUT_DIR/ep8.log what the tests said; a short table comes last.
# With fewer GPUs than ranks several ranks share one: right, but no measure of speed.
set -uo pipefail

build=${1:-build} out=${2:-$build/ep8}
program=$build/switchyard test=$build/ep_gpu_test
repeats=${REPEATS:-200} cases=${CASES:-100}
mkdir -p "$out"
n_gpus=$(ls /dev/nvidia[0-9]* 2>/dev/null | wc -l)
if [[ $n_gpus == 0 ]]; then
    echo "ep8: no GPU here" >&2
    exit 77
fi
for file in "$program" "$test"; do
    [[ -x $file ]] || { echo "ep8: no $file; 'make gpu-test' builds it" >&2; exit 1; }
done
sizes=(4 8)
((n_gpus >= 4)) || sizes=(2)
((n_gpus >= 8)) || sizes=("${sizes[0]}")

rc=0
suite=many
((n_gpus >= 4)) || suite=conformance
"$test" "$suite" --scale "$cases" 2>&1 | tee "$out/ep8.log" || rc=1

: >"$out/ep8.jsonl"
for ranks in "${sizes[@]}"; do
    for routing in uniform grouped; do
        echo "ep8: EP$ranks, $routing routing" >&2
        "$program" bench ep --device cuda --ranks "$ranks" --routing "$routing" --launch graph \
            --tokens 1,2,4,8,16,32,64,128,4096 --repeat "$repeats" --json >>"$out/ep8.jsonl" || rc=1
    done
    # What is not here (NCCL, libyard-ep-nvshmem) is named and left out.
    "$program" bench ep --device cuda --ranks "$ranks" --transports nvlink,nvshmem --launch graph \
        --modes partial --layouts expert --tokens 1,8,32,128 --peer nccl,nvshmem \
        --repeat "$repeats" --json >>"$out/ep8.jsonl" || rc=1
done

python3 - "$out/ep8.jsonl" <<'EOF'
import json, sys
print(f"{'transport':9} {'ranks':>5} {'routing':8} {'mode':8} {'layout':7} {'tokens':>6} {'dispatch':>9} {'combine':>9} "
      f"{'pair':>9}  verified   (us, p50, largest of all ranks)")
cases = {}
for row in map(json.loads, open(sys.argv[1])):
    c = row["case"]
    if "phase" not in c: # limits of the GPUs
        continue
    key = c["transport"], row["ranks"], c.get("routing", "uniform"), c["mode"], c["layout"], c["tokens"]
    cases.setdefault(key, {})[c["phase"]] = row
for key, phases in cases.items():
    times = " ".join(f"{phases[p]['p50_us']:9.1f}" for p in ("dispatch", "combine", "pair"))
    right = all(row["verified"] for row in phases.values())
    print(f"{key[0]:9} {key[1]:5} {key[2]:8} {key[3]:8} {key[4]:7} {key[5]:6} {times}  {'yes' if right else 'NO'}")
EOF
exit $rc
