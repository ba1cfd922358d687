# switchyard chat: usage, turns from a pipe, seeds, --raw, a terminal with Ctrl-C and /reset.
. tests/cli/common.sh

chat()
{
    "$SWITCHYARD" chat "$@"
}

# expect RC ARGUMENT..: the exit code, on the input of $dir/in; a failure (1) is told in one line
expect()
{
    local want=$1 got
    shift
    chat "$@" >"$dir/out" 2>"$dir/err" <"$dir/in"
    got=$?
    [ "$got" -eq "$want" ] || fail "chat $*: want exit code $want, got $got: $(cat "$dir/err")"
    [ "$want" -ne 1 ] || [ "$(grep -c '^switchyard chat: ' "$dir/err")" -eq 1 ] ||
        fail "chat $*: want one line that names the command, got: $(cat "$dir/err")"
}

# same WHAT A B: equal, and something
same()
{
    [ -n "$2" ] && [ "$2" = "$3" ] || fail "$1: '$2' and '$3' differ"
}

# ---- usage and bad input ----
printf 'What is a horse?\n' >"$dir/in"
expect 2
expect 2 $model $model
expect 2 $model --raw --system x
expect 2 $model --raw --chat-template demo
expect 2 $model --temperature x
expect 2 $model --system "$(printf 'a\377')"
expect 2 $model --no-such-option
expect 0 --help
grep -q 'Usage: switchyard chat' "$dir/out" || fail "--help: no usage line"
expect 1 "$dir/nowhere"
expect 2 $model --chat-template no-such-template
grep -qF "'no-such-template' is not known; known: demo, deepseek-v3" "$dir/err" ||
    fail "an unknown template: $(cat "$dir/err")"
printf 'a\377b\n' >"$dir/in"
expect 1 $model
python3 -c 'print("horse " * 5000)' >"$dir/in"
expect 1 $model

# ---- turns from a pipe ----
printf 'What is a horse?\n' >"$dir/in"
expect 0 $model --temperature 0
horse=$(cat "$dir/out")
question='<｜begin▁of▁sentence｜><｜User｜>What is a horse?<｜Assistant｜>'
same "chat and generate" "$horse" "$("$SWITCHYARD" generate $model --prompt "$question")"

printf 'What is a horse?\n\nWhat are mice?\n' >"$dir/in"
expect 0 $model --temperature 0
same "two answers" "$(wc -l <"$dir/out")" 2
same "the first answer" "$(sed -n 1p "$dir/out")" "$horse"
second="${question}$horse<｜end▁of▁sentence｜><｜User｜>What are mice?<｜Assistant｜>"
same "the second answer knows the first" "$(sed -n 2p "$dir/out")" \
    "$("$SWITCHYARD" generate $model --prompt "$second")"

# commands are a terminal's: in a pipe they are text like any other
printf '/reset\n/quit\nWhat is a horse?\n' >"$dir/in"
expect 0 $model --temperature 0 --json --max-tokens 3
same "/reset and /quit in a pipe are turns" "$(wc -l <"$dir/out")" 3
printf '/reset\n' >"$dir/in"
expect 0 $model --temperature 0 --max-tokens 3
same "/reset in a pipe" "$(cat "$dir/out")" "$("$SWITCHYARD" generate $model --max-tokens 3 \
    --prompt '<｜begin▁of▁sentence｜><｜User｜>/reset<｜Assistant｜>')"
"$SWITCHYARD" chat --help | tr -s ' \n' ' ' | grep -q 'also /reset and /quit' ||
    fail "--help does not tell where commands are known"

printf 'What is a horse?\nWhat are mice?' >"$dir/in"
expect 0 $model --temperature 0 --json
same "lines of JSON" "$(python3 -c 'import json, sys
for line in sys.stdin:
    o = json.loads(line)
    assert list(o) == ["text", "ids", "finish_reason"], o
    print(o["finish_reason"])' <"$dir/out" | tr '\n' ' ')" 'stop stop '

# ---- defaults of generation_config.json (temperature 0.6), seeds ----
answer()
{
    echo 'Use the word light in a sentence.' | chat $model --max-tokens 40 --json "$@"
}
same "a fixed seed" "$(answer --seed 3 --temperature 2)" "$(answer --seed 3 --temperature 2)"
[ "$(answer --seed 3 --temperature 2)" != "$(answer --seed 4 --temperature 2)" ] ||
    fail "seeds 3 and 4 give the same text"
[ "$(answer --temperature 3)" != "$(answer --temperature 3)" ] ||
    fail "two drawn seeds give the same text"
same "the default temperature and top-p" "$(answer --seed 5)" \
    "$(answer --seed 5 --temperature 0.6 --top-p 0.95)"

# ---- --raw: each line alone, nothing added ----
printf 'In the beginning\nIn the beginning\n' >"$dir/in"
expect 0 $model --raw --temperature 0 --max-tokens 8
same "--raw and generate" "$(cat "$dir/out")" "$(for _ in 1 2; do
    "$SWITCHYARD" generate $model --prompt 'In the beginning' --max-tokens 8
    echo
done)"

# ---- an unknown template is refused, --raw and --chat-template still work ----
mkdir "$dir/other"
for file in "$PWD/$model"/*; do
    ln -s "$file" "$dir/other/"
done
rm "$dir/other/tokenizer_config.json"
sed 's/"chat_template": "/&x/' $model/tokenizer_config.json >"$dir/other/tokenizer_config.json"
printf 'What is a horse?\n' >"$dir/in"
expect 1 "$dir/other"
expect 0 "$dir/other" --raw --max-tokens 4
expect 0 "$dir/other" --chat-template demo --temperature 0
same "--chat-template demo" "$(cat "$dir/out")" "$horse"

# ---- a long conversation: the oldest turns make room, with a note ----
python3 -c 'for i in range(4): print("horse " * 1300)' >"$dir/in"
expect 0 $model --temperature 0 --max-tokens 4
same "answers of a long conversation" "$(grep -c '' "$dir/out")" 4
grep -q 'oldest turn' "$dir/err" || fail "no note about dropped turns: $(cat "$dir/err")"

# ---- a terminal: Ctrl-C stops the answer, not the program ----
for end in '\x04' '/quit\n'; do
python3 - "$SWITCHYARD" $model "$end" <<'PY' || fail "the terminal"
import os, pty, select, sys, time

pid, fd = pty.fork()
if pid == 0:
    os.execv(sys.argv[1], [sys.argv[1], "chat", sys.argv[2], "--temperature", "0", "--ignore-eos",
                           "--max-tokens", "3000"])
seen = b""

def until(text):
    global seen
    end = time.time() + 300
    while text not in seen:
        assert time.time() < end, (text, seen)
        if select.select([fd], [], [], 1)[0]:
            seen += os.read(fd, 4096)
    seen = seen[seen.index(text) + len(text):]

until(b"> ")
os.write(fd, b"What is a horse?\n")
until(b"horse?\r\n")
until(b" ")               # the answer has begun
os.write(fd, b"\x03")     # Ctrl-C in the answer
until(b"> ")
os.write(fd, b"\x03")     # Ctrl-C at the prompt: a hint
until(b"/quit or Ctrl-D")
until(b"> ")
os.write(fd, b"/reset\n")
until(b"> ")
os.write(fd, sys.argv[3].encode().decode("unicode_escape").encode()) # Ctrl-D, or a command
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert status == 0, status
PY
done

[ "$n_failed" -eq 0 ] || { echo "$n_failed failed" >&2; exit 1; }
