# switchyard run: usage, environment of the ranks, exit codes, signals, death of the launcher.
# ctest: sanitize
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
n_failed=0

fail()
{
    echo "FAIL: $*" >&2
    n_failed=$((n_failed + 1))
}

# expect RC ARGUMENT..
expect()
{
    local want=$1 got
    shift
    "$SWITCHYARD" run "$@" >"$dir/out" 2>"$dir/err" </dev/null
    got=$?
    [ "$got" -eq "$want" ] || fail "run $*: want exit code $want, got $got: $(cat "$dir/err")"
}

# await FILE PATTERN COUNT: until so many lines match; the ranks write them
await()
{
    local n=0
    while [ "$(grep -c "$2" "$1" 2>/dev/null)" -lt "$3" ]; do
        n=$((n + 1))
        [ "$n" -lt 3000 ] || { fail "no $3 lines '$2' in $1"; return 1; }
        sleep 0.01
    done
}

# gone PID: until it no longer runs
gone()
{
    local n=0
    while kill -0 "$1" 2>/dev/null && ! grep -q '^State:.Z' "/proc/$1/status" 2>/dev/null; do
        n=$((n + 1))
        [ "$n" -lt 3000 ] || { fail "process $1 still runs"; return 1; }
        sleep 0.01
    done
}

# ---- usage ----
expect 0 --help
grep -q 'YARD_RENDEZVOUS' "$dir/out" || fail "--help does not name the variables"
expect 2
expect 2 --ranks 2
expect 2 --ranks 0 -- true
expect 2 --ranks 5000 -- true
expect 2 --ranks x -- true
expect 2 -- true
expect 2 --no-such-option --ranks 1 -- true

# ---- environment; the command's own options are its own ----
expect 0 --ranks 3 -- sh -c 'echo "$YARD_RANK $YARD_SIZE $YARD_RENDEZVOUS $YARD_SECRET $1"' x --ranks
[ "$(sort "$dir/out" | cut -d' ' -f1,2,5 | tr '\n' ';')" = "0 3 --ranks;1 3 --ranks;2 3 --ranks;" ] ||
    fail "ranks: got $(cat "$dir/out")"
[ "$(cut -d' ' -f3,4 "$dir/out" | sort -u | wc -l)" -eq 1 ] || fail "rendezvous differs between ranks"
grep -qE '^0 3 unix:switchyard-run-[0-9]+-[0-9a-f]{16} [0-9a-f]{32} ' "$dir/out" ||
    fail "rendezvous and secret: got $(cat "$dir/out")"
cp "$dir/out" "$dir/before"
expect 0 --ranks 1 sh -c 'echo "$YARD_RANK $YARD_SIZE $YARD_RENDEZVOUS $YARD_SECRET"'
for value in $(cut -d' ' -f3,4 "$dir/before" | sort -u); do
    grep -qF "$value" "$dir/out" && fail "$value again"
done
expect 0 --ranks 2 --bind-cpus -- sh -c 'grep Cpus_allowed_list /proc/self/status'
[ "$(wc -l <"$dir/out")" -eq 2 ] || fail "--bind-cpus: got $(cat "$dir/out")"
[ "$(nproc)" -lt 2 ] || [ "$(sort -u "$dir/out" | wc -l)" -eq 2 ] ||
    fail "--bind-cpus: the same CPUs for both: $(cat "$dir/out")"

# ---- exit codes ----
expect 0 --ranks 4 -- true
expect 3 --ranks 1 -- sh -c 'exit 3'
expect 127 --ranks 2 -- "$dir/nowhere"
[ "$(grep -c 'cannot run' "$dir/err")" -eq 1 ] || fail "no such command: got $(cat "$dir/err")"
expect 126 --ranks 1 -- "$dir"
expect 137 --ranks 1 -- sh -c 'kill -9 $$'
grep -q 'rank 0 (pid [0-9]*) was killed by signal 9' "$dir/err" || fail "killed: $(cat "$dir/err")"

# one fails: the others, which would sleep for long, are ended, and what a wrapper started for them
expect 7 --ranks 3 -- sh -c '[ "$YARD_RANK" = 0 ] && exec sleep 600
    [ "$YARD_RANK" = 1 ] && { until [ -s "$0" ]; do sleep 0.01; done; exit 7; }
    sh -c "sleep 600 & echo \$!; wait" & wait' "$dir/out"
grep -q 'rank 1 (pid [0-9]*) ended with exit code 7; stopping the others' "$dir/err" ||
    fail "one fails: $(cat "$dir/err")"
for pid in $(cat "$dir/out"); do
    gone "$pid"
done

# ---- signals ----
for signal in INT TERM; do
    : >"$dir/log"
    # the shell ignores SIGINT in what it runs in the background
    env --default-signal=INT "$SWITCHYARD" run --ranks 2 -- bash -c \
        'trap "echo got >>$0; exit 9" INT TERM; echo up >>$0; while :; do sleep 0.05; done' \
        "$dir/log" 2>"$dir/err" &
    launcher=$!
    await "$dir/log" up 2 && kill -$signal $launcher
    wait $launcher
    got=$?
    [ "$got" -eq 9 ] || fail "$signal: want exit code 9, got $got: $(cat "$dir/err")"
    [ "$(grep -c got "$dir/log")" -eq 2 ] || fail "$signal did not reach both ranks: $(cat "$dir/log")"
done

# ---- the launcher dies ----
: >"$dir/log"
"$SWITCHYARD" run --ranks 2 -- sh -c 'echo "pid $$" >>$0; exec sleep 600' "$dir/log" &
launcher=$!
disown # or the shell tells of its end
await "$dir/log" pid 2 && kill -KILL $launcher
gone $launcher
for pid in $(cut -d' ' -f2 "$dir/log"); do
    gone "$pid"
done

[ "$n_failed" -eq 0 ] || { echo "$n_failed failed" >&2; exit 1; }
