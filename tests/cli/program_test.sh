# What holds for every command: -h, --version, a standard output that takes nothing.
. tests/cli/common.sh

# full TEXT ARGUMENT..: exit code 1 and exactly this line when standard output is full
full()
{
    local want=$1 got
    shift
    "$SWITCHYARD" "$@" >/dev/full 2>"$dir/err" </dev/null
    got=$?
    [ "$got" -eq 1 ] || fail "$* >/dev/full: want exit code 1, got $got"
    grep -qxE -- "$want" "$dir/err" && [ "$(wc -l <"$dir/err")" -eq 1 ] ||
        fail "$* >/dev/full: want '$want', got: $(cat "$dir/err")"
}

commands='generate chat tokenize template logits inspect synth bench'
"$SWITCHYARD" --help >"$dir/help" || fail "--help: want exit code 0"
"$SWITCHYARD" -h | cmp - "$dir/help" || fail "-h is not --help"
for command in $commands run engine serve plan 'plan sweep' 'plan scale' 'plan validate' \
    'bench engine' 'bench ep' 'bench load' 'bench ops' 'bench roofline' 'bench serve'; do
    "$SWITCHYARD" $command --help >"$dir/help" || fail "$command --help: want exit code 0"
    "$SWITCHYARD" $command -h >"$dir/short" 2>&1 || fail "$command -h: want exit code 0"
    cmp -s "$dir/help" "$dir/short" || fail "$command -h is not --help: $(head -1 "$dir/short")"
    grep -q "Usage: switchyard $command" "$dir/short" || fail "$command -h: no usage"
    # a line of an example that was broken cannot be copied
    awk '/^Examples:/ { n = 1; next } /^$/ { n = 0 } n && !/^  / { print; exit 1 }' "$dir/short" >"$dir/out" ||
        fail "$command -h: an example goes on in '$(cat "$dir/out")'"
done
"$SWITCHYARD" generate $model --prompt -h --max-tokens 1 >"$dir/out" 2>&1 ||
    fail "-h as an option's value: $(cat "$dir/out")"
! grep -q Usage "$dir/out" || fail "-h as an option's value is no call for help"

if [ -w /dev/full ]; then
    line='cannot write to standard output: No space left on device'
    full "switchyard: $line" --help
    full "switchyard: $line" --version
    for command in $commands; do
        # a help text longer than the stream's buffer is written piece by piece: see below
        want=$line
        [ "$("$SWITCHYARD" $command --help | wc -c)" -lt 4096 ] ||
            want="${line%: *}(: No space left on device)?"
        full "switchyard $command: $want" $command --help
        full "switchyard $command: $want" $command -h
    done
    full "switchyard chat: $line" chat --usage
    # what was written piece by piece failed earlier: the reason is that or none, never another's
    for arguments in '--max-tokens 4' '--max-tokens 4 --json'; do
        full "switchyard generate: ${line%: *}(: No space left on device)?" \
            generate $model --ids 0,5,6 $arguments
    done
    python3 -c 'print("[{\"role\":\"user\",\"content\":\"" + "x" * 100000 + "\"}]")' >"$dir/chat.json"
    full "switchyard template: ${line%: *}(: No space left on device)?" \
        template $model -m "$dir/chat.json"
fi
"$SWITCHYARD" --version >&- 2>"$dir/err" && fail "a closed standard output: want a failure"
grep -q 'cannot write to standard output: Bad file descriptor' "$dir/err" ||
    fail "a closed standard output: $(cat "$dir/err")"

# ---- values that are wrong whatever the model is ----
"$SWITCHYARD" bench engine --cpu-variant avx1024 >"$dir/out" 2>"$dir/err"
[ $? -eq 2 ] && grep -q "cpu-variant: want c, avx2, avx512 or amx, got 'avx1024'" "$dir/err" && [ ! -s "$dir/out" ] ||
    fail "bench engine --cpu-variant avx1024: $(cat "$dir/err")"

[ "$n_failed" -eq 0 ] || { echo "$n_failed failed" >&2; exit 1; }
