# switchyard tokenize and template: exact bytes, JSON, errors in one line, exit codes.
# ctest: sanitize
. tests/cli/common.sh

# equal WHAT WANT GOT
equal()
{
    [ "$2" = "$3" ] || fail "$1: want '$2', got '$3'"
}

# refused WANT_CODE WANT_TEXT COMMAND ARGUMENT..: nothing on stdout; a failure (1) is told in one
# line that names the command. Standard input is $dir/in.
refused()
{
    local want=$1 text=$2 got
    shift 2
    "$SWITCHYARD" "$@" <"$dir/in" >"$dir/out" 2>"$dir/err"
    got=$?
    [ "$got" = "$want" ] || fail "$*: want exit code $want, got $got: $(cat "$dir/err")"
    [ -s "$dir/out" ] && fail "$*: want nothing on standard output"
    grep -qF -- "$text" "$dir/err" || fail "$*: want '$text', got '$(cat "$dir/err")'"
    grep -q "^switchyard $1: " "$dir/err" || fail "$*: want the command named"
    if [ "$want" = 1 ] && [ "$(wc -l <"$dir/err")" != 1 ]; then
        fail "$*: want one line, got '$(cat "$dir/err")'"
    fi
}

# ---- tokenize ----
equal "ids" "1708 14 1203 3" "$(printf 'Hello, world!' | "$SWITCHYARD" tokenize $model)"
equal "a line end is text" "1708 201" "$(printf 'Hello\n' | "$SWITCHYARD" tokenize $model)"
equal "no text" "" "$("$SWITCHYARD" tokenize $model </dev/null)"
equal "json" '{"ids":[1708,201]}' "$(printf 'Hello\n' | "$SWITCHYARD" tokenize $model --json)"
equal "json of no text" '{"ids":[]}' "$("$SWITCHYARD" tokenize $model --json </dev/null)"
equal "added tokens" "3567" "$(printf '<think>' | "$SWITCHYARD" tokenize $model)"
plain=$(printf '<think>' | "$SWITCHYARD" tokenize --plain $model)
[ "$plain" != 3567 ] || fail "--plain: want ordinary tokens"
equal "plain ids decode" "<think>" "$(echo "$plain" | "$SWITCHYARD" tokenize $model --decode)"

echo "1708,14 1203
3" | "$SWITCHYARD" tokenize $model --decode >"$dir/out"
printf 'Hello, world!' | cmp - "$dir/out" || fail "--decode: want the exact bytes"
equal "bad UTF-8" '{"text":"'$'\xef\xbf\xbd''"}' "$(echo 130 | "$SWITCHYARD" tokenize $model -d --json)"
equal "no ids" '{"text":""}' "$("$SWITCHYARD" tokenize $model --decode --json </dev/null)"

printf 'a \0 b' | "$SWITCHYARD" tokenize $model | "$SWITCHYARD" tokenize $model -d >"$dir/out"
printf 'a \0 b' | cmp - "$dir/out" || fail "a NUL byte is text"

printf 'ab\xff' >"$dir/in"
refused 1 "0xff at offset 2" tokenize $model
refused 1 "ids: want whole numbers" tokenize $model --decode
echo "1 99999" >"$dir/in"
refused 1 "got 99999" tokenize $model --decode
refused 1 "$dir/none: no such model directory" tokenize "$dir/none"
refused 1 "$dir/none: no such model directory" template "$dir/none" -m "$dir/in"
refused 1 "$dir/in: want a model directory, found a file" tokenize "$dir/in"
echo '{"model":{}}' >"$dir/tokenizer.json"
refused 1 "model.vocab" tokenize "$dir"
refused 2 "MODEL" tokenize
refused 2 "MODEL" tokenize a b
refused 2 "--nonsense" tokenize $model --nonsense
refused 2 "--plain" tokenize $model --plain --decode
"$SWITCHYARD" tokenize --help | grep -q "Examples:" || fail "--help: want examples"
printf 'Hello' | "$SWITCHYARD" tokenize $model >/dev/full 2>"$dir/err" && fail "a full disk: want a failure"
grep -q "standard output" "$dir/err" || fail "a full disk: want it told, got '$(cat "$dir/err")'"

# ---- template ----
echo '[{"role":"user","content":"Hi"}]' >"$dir/chat.json"
prompt='<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>'
"$SWITCHYARD" template $model --messages "$dir/chat.json" >"$dir/out"
printf '%s' "$prompt" | cmp - "$dir/out" || fail "template: want the exact bytes"
equal "stdin, json" "{\"text\":\"$prompt\"}" \
    "$("$SWITCHYARD" template $model --messages - --json <"$dir/chat.json")"
equal "no generation prompt" '<｜begin▁of▁sentence｜><｜User｜>Hi' \
    "$("$SWITCHYARD" template $model -m "$dir/chat.json" --no-generation-prompt)"
equal "another template" "$prompt<think>" \
    "$("$SWITCHYARD" template $model -m "$dir/chat.json" --chat-template deepseek-r1)"
equal "template and ids" "0 3572 42 75 3573" \
    "$("$SWITCHYARD" template $model -m "$dir/chat.json" | "$SWITCHYARD" tokenize $model)"

refused 2 "'nonsense' is not known; known: demo" template $model -m "$dir/chat.json" \
    --chat-template nonsense
# ---- members that no template reads: one warning for each name, the same text ----
call='"type":"function","function":{"name":"f","arguments":"{}"'
cat >"$dir/in" <<JSON
[{"role":"user","content":[{"type":"text","text":"Hi","cache_control":{}}],"name":"Ann","bogus":null},
 {"role":"assistant","content":null,"refusal":"","annotations":[],"audio":{},"reasoning_content":"x",
  "tool_calls":[{"id":"1","index":0,$call,"strict":true}}]},
 {"role":"tool","content":"7","tool_call_id":"1","name":"f"},
 {"role":"user","content":"So?","tools":[],"name":"Bob"}]
JSON
"$SWITCHYARD" template $model -m - <"$dir/in" >"$dir/out" 2>"$dir/err" || fail "unknown members: $(cat "$dir/err")"
equal "unknown members" "switchyard: messages[0].name: unknown member ignored
switchyard: messages[0].content[0].cache_control: unknown member ignored
switchyard: messages[1].tool_calls[0].function.strict: unknown member ignored
switchyard: messages[3].tools: unknown member ignored" "$(cat "$dir/err")"
sed -e 's/,"cache_control":{}//; s/,"strict":true//; s/,"name":"[AB][a-z]*"//; s/,"tools":\[\]//' \
    -e 's/"tool_call_id":"1","name":"f"/"tool_call_id":"1"/' "$dir/in" >"$dir/plain"
equal "without them" "$(cat "$dir/out")" "$("$SWITCHYARD" template $model -m "$dir/plain" 2>&1)"
echo '[{"role":"user","bogus":1}]' >"$dir/in"
refused 1 "messages[0].content: want" template $model -m -

refused 1 "none.json" template $model -m "$dir/none.json"
echo '[{"role":"user"}]' >"$dir/in"
refused 1 "messages[0].content" template $model -m -
mkdir "$dir/other"
cp $model/tokenizer.json "$dir/other"
echo '{"chat_template":"{{ x }}","bos_token":"<s>"}' >"$dir/other/tokenizer_config.json"
refused 1 "SHA-256 $(printf '{{ x }}' | sha256sum | cut -d' ' -f1)" template "$dir/other" -m "$dir/chat.json"
refused 2 "--messages" template $model
refused 2 "MODEL" template -m "$dir/chat.json"
"$SWITCHYARD" template --help | grep -q "Examples:" || fail "--help: want examples"

[ "$n_failed" = 0 ]
