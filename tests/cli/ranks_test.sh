# switchyard generate on several ranks: the same text as one rank, many prompts in order, usage,
# errors, Ctrl-C, nothing left behind.
. tests/cli/common.sh

generate()
{
    "$SWITCHYARD" generate "$@"
}

# expect RC ARGUMENT..
expect()
{
    local want=$1 got
    shift
    generate "$@" >"$dir/out" 2>"$dir/err" </dev/null
    got=$?
    [ "$got" -eq "$want" ] || fail "generate $*: want exit code $want, got $got: $(cat "$dir/err")"
}

same()
{
    [ -n "$2" ] && [ "$2" = "$3" ] || fail "$1: '$2' and '$3' differ"
}

# Ports that stay free until the test ends: a process holds them that does not listen.
exec 3< <(exec python3 -c 'import signal, socket
held = [socket.socket() for _ in range(16)]
for s in held:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("127.0.0.1", 0))
    print(s.getsockname()[1], flush=True)
signal.pause()')
holder=$!
trap 'kill $holder; rm -rf "$dir"' EXIT

free_port()
{
    local port
    read -r port <&3 && echo "$port"
}

prompts=('In the beginning' 'A river' '<｜begin▁of▁sentence｜><｜User｜>What is a horse?<｜Assistant｜>' 'The king' 'Two')
printf '%s\n' "${prompts[@]:0:4}" >"$dir/prompts"
printf '\n"\\u0054wo"\n' >>"$dir/prompts"

# ---- one prompt, several prompts, several layouts ----
for prompt in "${prompts[@]}"; do
    generate $model --prompt "$prompt" --max-tokens 16 --exact
    echo
done >"$dir/want"
for layout in '--ranks 1' '--ranks 2' '--ranks 2 --tp 2' '--ranks 4 --tp 2 --transport tcp'; do
    expect 0 $model --prompts "$dir/prompts" --max-tokens 16 --exact $layout
    cmp -s "$dir/out" "$dir/want" || fail "$layout: want $(cat "$dir/want"), got $(cat "$dir/out")"
done
grep -q 'EP4 DP2 TP2; each rank: weights ' "$dir/err" || fail "no memory budget: $(cat "$dir/err")"
# quantised, TP 1: EP and batch change no bit
generate $model --prompt "${prompts[0]}" --max-tokens 48 >"$dir/want"
echo >>"$dir/want"
expect 0 $model --prompt "${prompts[0]}" --max-tokens 48 --ranks 4
cmp -s "$dir/out" "$dir/want" || fail "quantised: want $(cat "$dir/want"), got $(cat "$dir/out")"
generate $model --prompt "${prompts[0]}" --max-tokens 48 --kv-dtype fp8 >"$dir/want"
echo >>"$dir/want"
expect 0 $model --prompt "${prompts[0]}" --max-tokens 48 --ranks 2 --kv-dtype fp8
cmp -s "$dir/out" "$dir/want" || fail "FP8 cache: want $(cat "$dir/want"), got $(cat "$dir/out")"
expect 0 $model --prompt "${prompts[0]}" --max-tokens 4 --ranks 2 --tp 2 --kv-dtype fp8
expect 0 $model --prompts "$dir/prompts" --max-tokens 4 --ranks 2 --json
same "JSON" "$(python3 -c 'import json, sys
lines = [json.loads(line) for line in sys.stdin]
assert all(list(o) == ["prompt", "text", "ids", "finish_reason"] for o in lines), lines
print([o["prompt"] for o in lines], [len(o["ids"]) for o in lines])' <"$dir/out")" \
    '[0, 1, 2, 3, 4] [4, 4, 4, 4, 4]'
same "a stop string" "$(generate $model --prompt "${prompts[0]}" --ranks 2 --stop 'first' 2>"$dir/err")" \
    "$(generate $model --prompt "${prompts[0]}" --stop first)"

# ---- usage and bad input ----
expect 2 $model --prompts "$dir/prompts" --prompt x
expect 2 $model --ranks 0 --prompt x
expect 2 $model --tp 0 --prompt x
expect 2 $model --timeout 0 --prompt x
expect 1 $model --prompts "$dir/nowhere" --ranks 2
: >"$dir/empty"
expect 1 $model --prompts "$dir/empty" --ranks 2
echo '"open' >"$dir/bad"
expect 1 $model --prompts "$dir/bad" --ranks 2
grep -q 'bad: line 1: want a JSON string' "$dir/err" || fail "bad JSON: $(cat "$dir/err")"
expect 1 $model --prompt x --ranks 5
grep -q 'EP' "$dir/err" || fail "a layout that cannot be: $(cat "$dir/err")"
expect 1 $model --prompt x --ranks 3 --tp 2
grep -q 'EP is no multiple of TP; nearest: EP 3, DP 3, TP 1' "$dir/err" || fail "ranks and TP: $(cat "$dir/err")"
expect 1 $model --prompt x --ranks 2 --exact --kv-dtype fp8
grep -q 'KV cache fp8: want quantised mode, got exact' "$dir/err" || fail "exact and FP8: $(cat "$dir/err")"
expect 1 $model --prompt x --ranks 2 --transport none
grep -q "transport: want one of .*shm.*, got 'none'" "$dir/err" || fail "a transport that is not: $(cat "$dir/err")"
expect 1 $model --ids 99999 --ranks 2
grep -q 'prompt 0: .*99999' "$dir/err" || fail "an id outside the vocabulary: $(cat "$dir/err")"

# ---- two pods that cannot be one group: both say why, at once ----
# refused TEXT MODEL MODEL ARGUMENT..: the second pod has the arguments
refused()
{
    local text=$1 models=("$2" "$3") at="127.0.0.1:$(free_port)" job=() i
    shift 3
    for i in 0 1; do
        [ $i -eq 0 ] || models[1]+=" $*"
        YARD_RANK=$i YARD_SIZE=2 YARD_RENDEZVOUS=$at YARD_SECRET=words generate ${models[i]} --prompt x \
            --start-timeout 200 >"$dir/out$i" 2>"$dir/err$i" </dev/null &
        job[i]=$!
    done
    for i in 0 1; do
        wait "${job[i]}"
        [ $? -eq 1 ] && grep -q "$text" "$dir/err$i" || fail "pod $i: want '$text', got $(cat "$dir/err$i")"
    done
}

mkdir "$dir/other" "$dir/broken"
cp $model/* "$dir/other"
echo >>"$dir/other/config.json"
cp $model/*.json "$dir/broken"
refused "rank 0 has 'mode quantised', rank 1 has 'mode exact'" $model $model --exact
refused "rank 0 has 'KV cache bf16', rank 1 has 'KV cache fp8'" $model $model --kv-dtype fp8
refused "rank 0 has 'tp 1, max_tokens 512', rank [23] has 'tp 2, max_tokens 64'" "$model --ranks 2" $model --ranks 2 \
    --tp 2 --max-batch-tokens 64
refused "rank 0 has 'checkpoint .*', rank 1 has 'checkpoint " $model "$dir/other"
refused "names shard 'model-00001-of-00002.safetensors', which is not there" "$dir/broken" $model
refused "names shard 'model-00001-of-00002.safetensors', which is not there" $model "$dir/broken"
refused 'n_ranks: 4 on rank 0, 2 on rank 1' "$model --ranks 2" $model

# a pod without a request whose others never come fails all the same
YARD_RANK=1 YARD_SIZE=2 YARD_RENDEZVOUS="127.0.0.1:$(free_port)" expect 1 $model --prompt x --start-timeout 0.2
grep -q 'rank 1: fabric: rendezvous: no rank 0 at 127.0.0.1' "$dir/err" || fail "alone: $(cat "$dir/err")"

# ---- Ctrl-C ----
python3 - "$SWITCHYARD" $model <<'PY' || fail "Ctrl-C"
import signal, subprocess, sys
p = subprocess.Popen([sys.argv[1], "generate", sys.argv[2], "--prompt", "In the beginning", "--ranks", "2",
                      "--ignore-eos", "--max-tokens", "4000"],
                     stdout=subprocess.PIPE, stderr=subprocess.PIPE)
first = p.stdout.read(1)
p.send_signal(signal.SIGINT)
rest, err = p.communicate(timeout=300)
assert first and p.returncode == 130, (first, p.returncode, err)
PY

# ---- a rank is killed: the next prompts are answered ----
python3 - "$SWITCHYARD" $model <<'PY' || fail "a killed rank"
import json, os, signal, subprocess, sys
p = subprocess.Popen([sys.argv[1], "generate", sys.argv[2], "--prompts", "-", "--ranks", "2", "--json",
                      "--ignore-eos", "--max-tokens", "60"],
                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
p.stdin.write("".join(f"Number {i}\n" for i in range(96)))
p.stdin.close()
p.stdin = None
first = p.stdout.readline()
def children_of(pid):
    return open(f"/proc/{pid}/task/{pid}/children").read().split()
spawner, = children_of(p.pid)
children = children_of(spawner)
assert len(children) == 2, children
os.kill(int(children[1]), signal.SIGKILL)
rest, err = p.stdout.read(), p.stderr.read()
p.wait(timeout=300)
lines = [json.loads(line) for line in [first] + rest.strip("\n").split("\n")]
assert [o["prompt"] for o in lines] == list(range(96)), len(lines)
failed = [o for o in lines if o["finish_reason"] == "error"]
assert p.returncode == (1 if failed else 0) and len(failed) < 40, (p.returncode, len(failed))
assert all("rank" in o["error"] for o in failed)
assert all(len(o["ids"]) == 60 for o in lines if o not in failed)
assert "serves again, generation 2" in err, err
for child in [spawner] + children:
    assert not os.path.exists(f"/proc/{child}"), child
PY

[ "$n_failed" -eq 0 ] || { echo "$n_failed failed" >&2; exit 1; }
