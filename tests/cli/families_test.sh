# The other families from the command line: synth, inspect, generate, chat, plan.
. tests/cli/common.sh

families=tests/golden/families

# run RC TEXT COMMAND ARGUMENT..: the exit code, and a text on standard output or error
run()
{
    local want=$1 text=$2 got
    shift 2
    "$SWITCHYARD" "$@" >"$dir/out" 2>"$dir/err" <"$dir/in"
    got=$?
    [ "$got" -eq "$want" ] || fail "$*: want exit code $want, got $got: $(cat "$dir/err")"
    grep -qF -- "$text" "$dir/out" "$dir/err" || fail "$*: want '$text', got: $(cat "$dir/out" "$dir/err")"
}

: >"$dir/in"
for family in mixtral mixtral_window deepseek_v2_lite deepseek_v2 kimi_k2 mixtral_fp8 deepseek_v2_fp8; do
    run 0 'layers       ' inspect $families/$family
    # the first greedy ids of the third prompt, which values.json has
    ids=$(python3 - $families/$family/values.json <<'PY'
import json, sys
prompt = json.load(open(sys.argv[1]))["prompts"][2]
print(",".join(map(str, prompt["ids"])), ",".join(map(str, prompt["greedy"][:6])))
PY
    )
    run 0 "${ids#* }" generate $families/$family --ids "${ids% *}" --max-tokens 6 --exact --ignore-eos
    [ "$(cat "$dir/out")" = "${ids#* }" ] || fail "$family: want ${ids#* }, got $(cat "$dir/out")"
done
run 1 'the model has no multi-token-prediction module' logits $families/mixtral --ids 1,2 --mtp
run 1 'tokenizer.json: cannot open' generate $families/kimi_k2 --prompt x --max-tokens 1

# Published dimensions, small in depth only, up to the directory's refusal.
run 1 'want an empty directory' synth --arch kimi-k2 --layers 2 --out $families

# Mixtral with a tokenizer of its kind and its chat template.
mixtral=$dir/mixtral
sed 's/"vocab_size": 112/"vocab_size": 660/' $families/mixtral/config.json >"$dir/config.json"
run 0 '' synth --config "$dir/config.json" --out "$mixtral"
cp tests/golden/metaspace/tokenizer.json "$mixtral"
python3 - >"$mixtral/tokenizer_config.json" <<'PY'
import json
turn = "(message['role'] == 'user') != (loop.index0 % 2 == 0)"
template = (
    "{{ bos_token }}{% for message in messages %}{% if " + turn + " %}{{ raise_exception('Conversation roles must alternate "
    "user/assistant/user/assistant/...') }}{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + "
    "' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% else %}{{ raise_exception("
    "'Only user and assistant roles are supported!') }}{% endif %}{% endfor %}")
print(json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}))
PY
run 0 '' tokenize "$mixtral" --text 'The engine' --json
run 0 '' generate "$mixtral" --prompt 'The engine' --max-tokens 5
printf 'Hello\nAgain\n' >"$dir/in"
run 0 '' chat "$mixtral" --temperature 0 --max-tokens 4
run 1 'template mixtral-instruct wants user and assistant in turn' chat "$mixtral" --system 'Be brief.'
: >"$dir/in"

# The planner takes the same figures from a published config.json as from its own table.
for pair in mixtral_8x7b:mixtral-8x7b deepseek_v2_lite:deepseek-v2-lite kimi_k2:kimi-k2; do
    mkdir "$dir/${pair%:*}"
    cp "tests/fuzz/corpus/config/${pair%:*}" "$dir/${pair%:*}/config.json"
    for model in "$dir/${pair%:*}" "${pair#*:}"; do
        "$SWITCHYARD" plan --model "$model" --gpu h200 --ep 8 --tp 1 --batch 16 --kv 1000 >"$dir/out" 2>"$dir/err" ||
            fail "plan $model: $(cat "$dir/err")"
        sed 1,2d "$dir/out" >"$dir/plan.$([ "$model" = "${pair#*:}" ] && echo named || echo read)"
    done
    cmp -s "$dir/plan.named" "$dir/plan.read" ||
        fail "plan: ${pair#*:} and its config.json differ: $(diff "$dir/plan.named" "$dir/plan.read" | head -5)"
done
