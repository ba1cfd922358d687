# switchyard generate: usage, JSON, seeds, stop strings, prompts as text and as ids, Ctrl-C.
. tests/cli/common.sh

generate()
{
    "$SWITCHYARD" generate "$@"
}

# expect RC ARGUMENT..: the exit code; a failure (1) is told in one line that names the command
expect()
{
    local want=$1 got
    shift
    generate "$@" >"$dir/out" 2>"$dir/err" </dev/null
    got=$?
    [ "$got" -eq "$want" ] || fail "generate $*: want exit code $want, got $got: $(cat "$dir/err")"
    [ "$want" -eq 0 ] || grep -q '^switchyard generate: ' "$dir/err" ||
        fail "generate $*: want a line that names the command, got: $(cat "$dir/err")"
    [ "$want" -ne 1 ] || [ "$(wc -l <"$dir/err")" -eq 1 ] ||
        fail "generate $*: want one line, got: $(cat "$dir/err")"
}

# same WHAT A B: equal, and something
same()
{
    [ -n "$2" ] && [ "$2" = "$3" ] || fail "$1: '$2' and '$3' differ"
}

# member NAME <line: a member of the JSON object on one line
member()
{
    python3 -c 'import json, sys
line = sys.stdin.read()
assert line.endswith("\n") and line.count("\n") == 1, repr(line)
o = json.loads(line)
assert list(o) == ["text", "ids", "finish_reason"], list(o)
v = o[sys.argv[1]]
print(",".join(map(str, v)) if isinstance(v, list) else json.dumps(v))' "$1"
}

# ---- usage ----
expect 2
expect 2 $model
expect 2 --prompt x
expect 2 $model --prompt ''
expect 2 $model --prompt x --ids 1
expect 2 $model --ids 1,x
expect 2 $model --ids ' , '
expect 2 $model $model --prompt x
expect 2 $model --prompt x --max-tokens 0
expect 2 $model --prompt x --kv-dtype fp4
expect 2 $model --prompt x --kv-dtype ''
expect 1 $model --prompt x --kv-dtype fp8 --exact
expect 1 tests/golden/families/mixtral --ids 1 --kv-dtype fp8
grep -q 'want a model that caches latents, got mixtral' "$dir/err" || fail "FP8 of mixtral: $(cat "$dir/err")"
expect 2 $model --prompt x --temperature -1
expect 2 $model --prompt x --temperature nan
expect 2 $model --prompt x --top-p 0
expect 2 $model --prompt x --top-p 1.5
expect 2 $model --prompt x --min-p 2
expect 2 $model --prompt x --top-k -1
expect 2 $model --prompt x --repetition-penalty 0
expect 2 $model --prompt x --logit-bias 5
expect 2 $model --prompt x --logit-bias a:1
expect 2 $model --prompt x --stop ''
expect 2 $model --prompt x --threads 0
expect 2 $model --prompt x --no-such-option
expect 0 --help
grep -q 'Usage: switchyard generate' "$dir/out" || fail "--help: no usage line"
grep -q 'Examples:' "$dir/out" || fail "--help: no examples"

# ---- bad input ----
printf 'a\xffb' >"$dir/bad.txt"
: >"$dir/empty.txt"
python3 -c 'print(",".join(["5"] * 5000))' >"$dir/long.ids"
expect 1 "$dir/nowhere" --prompt x
grep -qx "switchyard generate: $dir/nowhere: no such model directory" "$dir/err" ||
    fail "no model directory: $(cat "$dir/err")"
expect 1 "$dir/empty.txt" --prompt x
grep -q "empty.txt: want a model directory, found a file" "$dir/err" ||
    fail "a file as the model: $(cat "$dir/err")"
long=$(printf '%0200d/' 1 2 3 4 5 6)
expect 1 $model --prompt-file "$dir/$long/none"
grep -q "generate: $dir/0.*\[\.\.\]0.*/none: cannot open: No such file or directory$" "$dir/err" ||
    fail "a long path: $(cat "$dir/err")"
expect 1 "$dir/nowhere" --ids 1
expect 1 "$dir" --ids 1
expect 1 $model --prompt-file "$dir/nowhere.txt"
expect 1 $model --prompt-file "$dir/bad.txt"
expect 1 $model --prompt-file "$dir/empty.txt"
expect 1 $model --ids-file "$dir/empty.txt"
expect 1 $model --ids 99999
grep -q 99999 "$dir/err" || fail "an id outside the vocabulary is not named: $(cat "$dir/err")"
expect 1 $model --ids 1 --logit-bias 99999:1
expect 1 $model --ids-file "$dir/long.ids"
expect 2 $model --ids 1 --cpu-variant no-such-variant
expect 2 $model --ids 1 --device gpu
grep -q "device: want cpu or cuda, got 'gpu'" "$dir/err" || fail "--device gpu: $(cat "$dir/err")"
expect 2 $model --ids 1 --device cuda --cuda-variant slow
expect 2 $model --ids 1 --cuda-variant fast
grep -q 'cuda-variant: want --device cuda' "$dir/err" || fail "--cuda-variant alone: $(cat "$dir/err")"
expect 2 $model --ids 1 --device cpu --cuda-choices nowhere

# What is no file of choices is never taken for an empty one.
refuses_choices()
{
    expect 1 $model --ids 1 --device cuda --cuda-choices "$dir/choices"
    grep -qE "made without nvcc|$dir/choices: $1" "$dir/err" ||
        fail "--cuda-choices, want '$1': $(cat "$dir/err")"
}

refuses_choices 'open: '
for text in '' '# a comment\n \n'; do
    printf "$text" >"$dir/choices"
    refuses_choices 'want lines .*, found none'
done
for line in '7168 2048 some few_fp8' '7168 2048 64' '7168 2048 64 few_fp8 8' '-1 2048 64 few_fp8' \
    '7168 2048 64 few_fp8:-8' '7168 2048 99999999999 few_fp8' '7168 2048 64 few_fp8:8:999' \
    '7168 2048 64 no_kernel' '{"choices": []}'; do
    printf '7168 2048 64 few_fp8:8\n%s\n' "$line" >"$dir/choices"
    refuses_choices 'line 2: want '
done
if ! ls /dev/nvidia[0-9]* >/dev/null 2>&1; then
    expect 1 $model --ids 1 --device cuda
    grep -q 'cuda' "$dir/err" || fail "no GPU: $(cat "$dir/err")"
fi

# ---- text, ids and JSON ----
expect 0 $model --prompt 'In the beginning' --max-tokens 16
text=$(cat "$dir/out")
[ -n "$text" ] || fail "no text"
generate $model --prompt 'In the beginning' --max-tokens 16 --json >"$dir/json" || fail "--json"
ids=$(member ids <"$dir/json")
same "text with and without --json" "$(python3 -c 'import json, sys
print(json.load(sys.stdin)["text"])' <"$dir/json")" "$text"
same "16 ids" "$(echo "$ids" | tr ',' '\n' | wc -l)" 16
same "finish_reason" "$(member finish_reason <"$dir/json")" '"length"'

prompt_ids=$(printf 'In the beginning' | "$SWITCHYARD" tokenize $model --json |
    python3 -c 'import json, sys; print(",".join(map(str, json.load(sys.stdin)["ids"])))')
same "--ids and --prompt" \
    "$(generate $model --ids "$prompt_ids" --max-tokens 16 --json | member ids)" "$ids"
echo "$prompt_ids" | tr ',' '\n' >"$dir/prompt.ids"
same "--ids-file and --prompt" \
    "$(generate --max-tokens 16 --json --ids-file "$dir/prompt.ids" $model | member ids)" "$ids"
same "--prompt-file and --prompt" \
    "$(printf 'In the beginning' | generate $model --prompt-file - --max-tokens 16 --json | member ids)" \
    "$ids"
same "one thread and two" \
    "$(generate $model --prompt 'In the beginning' --threads 1 --max-tokens 16 --json | member ids)" \
    "$(generate $model --prompt 'In the beginning' --threads 2 --max-tokens 16 --json | member ids)"
same "chunks of the prompt" \
    "$(generate $model --prompt 'In the beginning' --max-batch-tokens 1 --max-tokens 16 --json | member ids)" \
    "$ids"

# ---- the end: end-of-sequence, --ignore-eos, stop strings ----
question='<｜begin▁of▁sentence｜><｜User｜>What is a horse?<｜Assistant｜>'
generate $model --prompt "$question" --json >"$dir/json"
same "finish_reason of an answer" "$(member finish_reason <"$dir/json")" '"stop"'
answer_ids=$(member ids <"$dir/json")
same "the end id" "${answer_ids##*,}" 1
member text <"$dir/json" | grep -q 'end▁of' && fail "a special token is in the text"
n=$(echo "$answer_ids" | tr ',' '\n' | wc -l)
same "ids with --ignore-eos go on" \
    "$(generate $model --prompt "$question" --ignore-eos --max-tokens $((n + 4)) --json | member ids |
        cut -d, -f1-"$n")" "$answer_ids"
same "finish_reason with --ignore-eos" \
    "$(generate $model --prompt "$question" --ignore-eos --max-tokens $((n + 4)) --json |
        member finish_reason)" '"length"'

answer=$(generate $model --prompt "$question")
stop=$(printf '%s' "$answer" | cut -c6-9)
same "text before a stop string" "$(generate $model --prompt "$question" --stop 'never' --stop "$stop")" \
    "${answer%%"$stop"*}"
same "finish_reason of a stop string" \
    "$(generate $model --prompt "$question" --stop "$stop" --json | member finish_reason)" '"stop"'

# ---- sampling ----
sampled()
{
    generate $model --prompt 'In the beginning' --max-tokens 24 --temperature 1.2 --json "$@" | member ids
}
same "a fixed seed" "$(sampled --seed 7)" "$(sampled --seed 7)"
same "the default seed" "$(sampled)" "$(sampled --seed 0)"
[ "$(sampled --seed 7)" != "$(sampled --seed 8)" ] || fail "seeds 7 and 8 give the same text"
same "top-k 1 and greedy" "$(sampled --top-k 1 | cut -d, -f1-16)" "$ids"
same "a small top-p and greedy" "$(sampled --top-p 0.0001 | cut -d, -f1-16)" "$ids"
same "min-p 1 and greedy" "$(sampled --min-p 1 | cut -d, -f1-16)" "$ids"
same "a bias that forces" \
    "$(generate $model --ids 5 --max-tokens 3 --logit-bias 77:1000 --json | member ids)" 77,77,77
same "a bias that forbids" \
    "$(generate $model --prompt 'In the beginning' --max-tokens 16 --logit-bias "${ids%%,*}:-1e30" --json |
        member ids | tr ',' '\n' | grep -cx "${ids%%,*}")" 0
same "a presence penalty: no id twice" \
    "$(generate $model --ids 5 --max-tokens 40 --presence-penalty 1000 --ignore-eos --json | member ids |
        tr ',' '\n' | sort | uniq -d | wc -l)" 0

# ---- a checkpoint without a tokenizer ----
mkdir "$dir/bare"
for file in "$PWD/$model"/config.json "$PWD/$model"/model*; do
    ln -s "$file" "$dir/bare/"
done
same "ids are printed" "$(generate "$dir/bare" --ids "$prompt_ids" --max-tokens 16)" "$ids"
same "ids with --json" \
    "$(generate "$dir/bare" --ids "$prompt_ids" --max-tokens 16 --json | member ids)" "$ids"
same "text with --json" \
    "$(generate "$dir/bare" --ids "$prompt_ids" --max-tokens 16 --json | member text)" null
expect 1 "$dir/bare" --prompt x
expect 1 "$dir/bare" --ids 1 --stop x

# ---- Ctrl-C: the text so far stays, exit code 130 ----
python3 - "$SWITCHYARD" $model <<'PY' || fail "Ctrl-C"
import signal, subprocess, sys
p = subprocess.Popen([sys.argv[1], "generate", sys.argv[2], "--prompt", "In the beginning",
                      "--ignore-eos", "--max-tokens", "4000"],
                     stdout=subprocess.PIPE, stderr=subprocess.PIPE)
first = p.stdout.read(1)
p.send_signal(signal.SIGINT)
rest, err = p.communicate(timeout=300)
assert first and p.returncode == 130 and err == b"", (first, p.returncode, err)
PY

# ---- a full disk ----
if [ -e /dev/full ]; then
    generate $model --prompt 'In the beginning' --max-tokens 4 >/dev/full 2>"$dir/err"
    same "exit code on a full disk" $? 1
    same "lines on a full disk" "$(wc -l <"$dir/err")" 1
fi

[ "$n_failed" -eq 0 ] || { echo "$n_failed failed" >&2; exit 1; }
