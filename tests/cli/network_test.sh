# switchyard generate on 2 to 4 machines: network namespaces without a common loopback, joined by a
# bridge, each with its pod, told by variables as launchers set them who is who. Needs root.
. tests/cli/common.sh

[ "$(id -u)" -eq 0 ] || { echo "skipped: network namespaces need root"; exit 77; }
for tool in ip unshare nsenter; do
    command -v $tool >/dev/null || { echo "skipped: no $tool"; exit 77; }
done
unshare -n ip link add name yard0 type bridge 2>/dev/null ||
    { echo "skipped: no network namespaces or bridges here"; exit 77; }

pids=()
stop()
{
    kill "${pids[@]}" 2>/dev/null
    wait 2>/dev/null
    rm -rf "$dir"
}
trap stop EXIT

# namespace: a new one, that ends with its process; its process in $namespace
namespace()
{
    unshare -n sleep 600 &
    namespace=$!
    pids+=("$namespace")
    disown # or the shell tells of its end
    until [ "$(readlink /proc/$namespace/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do
        sleep 0.01
    done
}

in_namespace()
{
    local pid=$1
    shift
    nsenter -t "$pid" -n "$@"
}

namespace
hub=$namespace
in_namespace $hub ip link add name yard0 type bridge
in_namespace $hub ip link set yard0 up
machine=()
for i in 0 1 2 3; do
    namespace
    machine[i]=$namespace
    ip link add name yard0 netns "$namespace" type veth peer name "yard1$i" netns $hub
    in_namespace $hub ip link set "yard1$i" master yard0 up
    in_namespace "$namespace" ip link set lo up
    in_namespace "$namespace" ip addr add "10.118.0.$((i + 1))/24" dev yard0
    in_namespace "$namespace" ip link set yard0 up
done

printf 'In the beginning\nA river\nThe king\nTwo\nGold\n' >"$dir/prompts"
"$SWITCHYARD" generate $model --prompts "$dir/prompts" --max-tokens 16 --exact --json >"$dir/want" 2>/dev/null

# run MACHINES ARGUMENT..: every machine's answers together are those of one rank
run()
{
    local n=$1 job=()
    shift
    for ((i = 0; i < n; i++)); do
        YARD_RANK=$i YARD_SIZE=$n YARD_RENDEZVOUS=10.118.0.1:7118 YARD_SECRET=words \
            YARD_BIND_HOST=10.118.0.$((i + 1)) in_namespace "${machine[i]}" "$SWITCHYARD" generate $model \
            --prompts "$dir/prompts" --max-tokens 16 --exact --json "$@" >"$dir/out$i" 2>"$dir/err$i" &
        job[i]=$!
    done
    for ((i = 0; i < n; i++)); do
        wait "${job[i]}" || fail "$n machines, $*: $i: $(cat "$dir/err$i")"
    done
    for ((i = 0; i < n; i++)); do
        cat "$dir/out$i"
        rm "$dir/out$i"
    done | sort -t: -k2 -n >"$dir/got"
    cmp -s "$dir/want" "$dir/got" || fail "$n machines, $*: want $(cat "$dir/want"), got $(cat "$dir/got")"
}

run 2
run 2 --ranks 2 --tp 2
run 3 --ranks 2
run 4

# A rank of the second machine is killed when the first answer is there: every prompt ends with one
# line somewhere, with its text or with an error that names a rank. With one rank a machine that is
# in the middle, and both pods serve again; with two it may be at the end, and the pods with it.
for ((i = 0; i < 96; i++)); do
    echo "Number $i"
done >"$dir/many"
many=(generate $model --prompts "$dir/many" --max-tokens 60 --ignore-eos --exact --json)
"$SWITCHYARD" "${many[@]}" >"$dir/want" 2>/dev/null
for n_ranks in 1 2; do
    job=()
    for i in 0 1; do
        YARD_RANK=$i YARD_SIZE=2 YARD_RENDEZVOUS=10.118.0.1:7119 YARD_SECRET=words \
            YARD_BIND_HOST=10.118.0.$((i + 1)) in_namespace "${machine[i]}" "$SWITCHYARD" "${many[@]}" \
            --ranks $n_ranks --start-timeout 100 >"$dir/out$i" 2>"$dir/err$i" &
        job[i]=$!
    done
    until [ -s "$dir/out1" ] || ! kill -0 "${job[1]}" 2>/dev/null; do
        sleep 0.01
    done
    { # with two ranks they may be gone already
        read -r pod <"/proc/${job[1]}/task/${job[1]}/children" # of a subshell; nsenter became the pod
        read -r spawner <"/proc/${pod% }/task/${pod% }/children"
        read -r first second <"/proc/${spawner% }/task/${spawner% }/children"
        kill -KILL "${second:-$first}"
    } 2>/dev/null
    wait "${job[@]}"
    python3 - "$dir" $n_ranks <<'PY' || fail "a killed rank: $(cat "$dir/err0" "$dir/err1")"
import json, sys
dir = sys.argv[1]
want = [json.loads(line) for line in open(dir + "/want")]
got = sorted((json.loads(line) for i in "01" for line in open(dir + "/out" + i)), key=lambda o: o["prompt"])
assert [o["prompt"] for o in got] == list(range(96)), [o["prompt"] for o in got]
failed = [o for o in got if o["finish_reason"] == "error"]
assert len(failed) < 40 and all("rank" in o["error"] for o in failed), failed
assert all(o == want[o["prompt"]] for o in got if o not in failed)
assert sys.argv[2] == "2" or all("serves again, generation 2" in open(dir + "/err" + i).read() for i in "01")
PY
done

# an instance never spans machines
YARD_RANK=0 YARD_SIZE=2 YARD_RENDEZVOUS=10.118.0.1:7118 "$SWITCHYARD" generate $model --prompt x --tp 2 2>"$dir/err"
[ $? -eq 1 ] && grep -q 'an instance is on one machine' "$dir/err" ||
    fail "an instance over machines: $(cat "$dir/err")"

[ "$n_failed" -eq 0 ] || { echo "$n_failed failed" >&2; exit 1; }
