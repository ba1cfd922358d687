# switchyard serve with the demo model: its command line, deaths of its processes, its end.
. tests/cli/common.sh

server=
engine_a=
engine_b=
trap 'for p in $server $engine_a $engine_b; do kill -KILL $p 2>/dev/null; done; wait; rm -rf "$dir"' EXIT

# wait_until COMMAND..: for minutes
wait_until()
{
    local until=$((SECONDS + 200))
    while [ $SECONDS -lt $until ]; do
        "$@" >/dev/null 2>&1 && return 0
        sleep 0.05
    done
    fail "never came true: $*"
    return 1
}

# start ARGUMENT..: sets server and url. Nothing here is about how fast an engine is; one thread is not
# held up by another that waits for a processor.
start()
{
    : >"$dir/out"
    "$SWITCHYARD" serve "$model" --port 0 --drain-timeout 300 "$@" >"$dir/out" 2>"$dir/err" &
    server=$!
    wait_until grep -q '^ready: ' "$dir/out" || cat "$dir/err"
    url=$(grep -o 'http://[0-9.]*:[0-9]*' "$dir/out" | head -n 1)
}

# stop CODE: SIGTERM, and the exit code that follows
stop()
{
    kill -TERM $server
    wait $server
    local got=$?
    server=
    [ $got -eq "$1" ] || fail "want exit code $1 after SIGTERM, got $got: $(cat "$dir/err")"
}

status() # CURL-ARGUMENT..
{
    curl -s -o "$dir/body" -w '%{http_code}' "$@"
}

is_ready()
{
    [ "$(status "$url/health/ready")" = 200 ]
}

is_not_ready()
{
    ! is_ready
}

child() # NAME: the process of our own
{
    pgrep -P $server -f "switchyard $1 "
}

has() # METRIC-AND-VALUE
{
    local line="^switchyard_$1\$"
    wait_until eval 'curl -s "$url/metrics" | grep -q "$line"'
}

gone() # PID
{
    ! kill -0 "$1" 2>/dev/null
}

one='{"model":"demo","prompt":"One","max_tokens":4,"temperature":0}'
whole='{"model":"demo","prompt":"One","max_tokens":100,"temperature":0,"ignore_eos":true}'
long='{"model":"demo","prompt":"One day","max_tokens":400,"temperature":0,"ignore_eos":true,"stream":true}'

# ---- the command line

usage() # WORDS ARGUMENT..
{
    local words=$1 got
    shift
    timeout 200 "$SWITCHYARD" serve "$@" >"$dir/out" 2>"$dir/err" </dev/null
    got=$?
    [ $got -eq 2 ] || [ $got -eq 1 ] || fail "serve $*: want a failure, got $got"
    grep -q -- "$words" "$dir/err" || fail "serve $*: want '$words', got: $(cat "$dir/err")"
}
usage 'MODEL'
usage '--port' "$model" --port 70000
usage '--ranks' "$model" --ranks 0
usage '--api-key' "$model" --api-key ''
usage 'nowhere' nowhere
usage '--api-key-file' "$model" --api-key-file "$dir/none"
usage '--engines' "$model" --engines ,
usage 'bad' "$model" --port 0 --engines bad
usage '--ranks=2: .*--engines' "$model" --port 0 --engines "unix:$dir/e" --ranks 2
usage '--exact: .*--engines' "$model" --port 0 --exact --engines "unix:$dir/e"
usage 'the engine ended' "$model" --port 0 --ranks 3 --tp 2 # which the engine refuses

# ---- a life

XDG_RUNTIME_DIR=$dir/none start --threads 1 --access-log "$dir/log" --served-model-name demo # then /tmp
grep -q "curl $url/v1/chat/completions" "$dir/out" || fail "no curl line: $(cat "$dir/out")"
[ "$(status "$url/v1/completions" -d "$one")" = 200 ] || fail "an answer: $(cat "$dir/body")"
want=$(python3 -c 'import json,sys; print(json.load(sys.stdin)["choices"])' <"$dir/body")
[ "$(status "$url/v1/completions" -d '{')" = 400 ] || fail "half a body"
usage 'cannot listen' "$model" --port "${url##*:}"

# kill -9 of the front: its clients lose their connections, the engine stays
engine_pid=$(child engine)
front_pid=$(child serve)
kill -KILL "$front_pid"
wait_until is_ready
[ "$(child engine)" = "$engine_pid" ] || fail "the engine was started again for nothing"
[ "$(child serve)" != "$front_pid" ] || fail "the front is the dead one"
[ "$(status "$url/v1/completions" -d "$one")" = 200 ] || fail "after the front's death: $(cat "$dir/body")"

# kill -9 of the only engine under load: what has streamed ends with an error event, what has not is
# answered by the next engine, and what comes before that one is there is refused
curl -sN "$url/v1/completions" -d "${long/400/4000}" >"$dir/stream" &
curl=$!
wait_until grep -q 'data: {' "$dir/stream"
kill -STOP $server # which starts the next one
curl -s "$url/v1/completions" -d "${whole/100/2000}" >"$dir/whole" &
waiting=$!
has 'scheduler_sent 2'
kill -KILL "$engine_pid"
wait $curl
[ "$(status -D "$dir/head" "$url/v1/completions" -d "$one")" = 503 ] || fail "without an engine: $(cat "$dir/body")"
grep -qi '^retry-after: [1-9]' "$dir/head" || fail "503 without Retry-After: $(cat "$dir/head")"
is_ready && fail "ready without an engine"
kill -CONT $server
wait $waiting
grep -q '"completion_tokens":2000' "$dir/whole" || fail "an answer of two engines: $(cat "$dir/whole")"
grep -q '^data: {"error":{' "$dir/stream" || fail "want an error event: $(tail -n 3 "$dir/stream")"
grep -q 'DONE' "$dir/stream" && fail "an error and an end"
wait_until is_ready
[ "$(status "$url/v1/completions" -d "$one")" = 200 ] || fail "after the engine's death: $(cat "$dir/body")"
got=$(python3 -c 'import json,sys; print(json.load(sys.stdin)["choices"])' <"$dir/body")
[ "$got" = "$want" ] || fail "after the engine's death: want $want, got $got"

# SIGTERM: a stream that runs ends well, and nothing is left
curl -sN "$url/v1/completions" -d "$long" >"$dir/stream" &
curl=$!
wait_until grep -q 'data: {' "$dir/stream"
engine_pid=$(child engine)
front_pid=$(child serve)
stop 0
wait $curl
grep -q 'DONE' "$dir/stream" || fail "the end of a stream that ran at SIGTERM: $(tail -n 3 "$dir/stream")"
gone "$engine_pid" || fail "the engine outlived the service"
gone "$front_pid" || fail "the front outlived the service"
python3 - "$dir/log" <<'EOF' || fail "the access log: $(cat "$dir/log")"
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
done = [l for l in lines if l["uri"] == "/v1/completions" and l["status"] == 200]
assert len(done) >= 3 and all(l["output_tokens"] == 4 for l in done[:1]), done
assert any(l["status"] == 400 for l in lines) and any(l["status"] == 503 for l in lines)
assert len({l["id"] for l in lines}) == len(lines)
EOF

# what stays stopped is replaced, and does not keep the service from ending
start --threads 1
for name in engine serve; do
    stopped=$(child $name)
    kill -STOP "$stopped"
    wait_until gone "$stopped"
    wait_until is_ready
    [ "$(status "$url/v1/completions" -d "$one")" = 200 ] || fail "after a stopped $name: $(cat "$dir/body")"
done
stopped=$(child serve)
kill -STOP "$stopped"
kill -TERM $server
wait_until gone "$stopped" && wait_until gone $server
wait $server || fail "a stopped front at SIGTERM: want exit code 0, got $?"
server=

# the supervisor's own death takes the others with it
start --threads 1
engine_pid=$(child engine)
front_pid=$(child serve)
rank_pid=$(pgrep -P "$engine_pid" | head -n 1)
kill -KILL $server
wait $server 2>/dev/null
server=
wait_until gone "$engine_pid"
wait_until gone "$front_pid"
wait_until gone "$rank_pid"

# ---- nobody reads the messages any more

mkfifo "$dir/pipe"
mkdir "$dir/runtime"
XDG_RUNTIME_DIR=$dir/runtime "$SWITCHYARD" serve "$model" --port 0 >"$dir/pipe" 2>&1 &
server=$!
sed '/curl http/q' <"$dir/pipe" >"$dir/out"
url=$(grep -o 'http://[0-9.]*:[0-9]*' "$dir/out" | head -n 1)
engine_pid=$(child engine)
kill -KILL "$engine_pid" # the news of which have no reader
restarted()
{
    child engine | grep -qvx "$engine_pid"
}
answers()
{
    [ "$(status "$url/v1/completions" -d "$one")" = 200 ]
}
wait_until restarted
wait_until answers
stop 0
[ -z "$(ls "$dir/runtime")" ] || fail "left behind: $(ls "$dir/runtime")"

# ---- a front of two pods

for name in a b; do
    "$SWITCHYARD" engine "$model" --threads 1 --listen "unix:$dir/$name" >"$dir/$name.out" 2>"$dir/$name.err" &
    eval "engine_$name=$!"
done
start --engines "unix:$dir/a,unix:$dir/b"
up()
{
    curl -s "$url/health/ready" | grep -q "\"engines_up\":$1"
}
wait_until up 2
# requests that wait or have streamed nothing survive the death of a pod
for i in 1 2 3 4 5 6 7 8; do
    curl -s -o "$dir/answer$i" "$url/v1/completions" -d "${whole/One/One $i}" &
    eval "curl$i=$!"
done
has 'scheduler_accepted_total 8'
kill -KILL $engine_a
wait $engine_a 2>/dev/null
engine_a=
for i in 1 2 3 4 5 6 7 8; do
    eval "wait \$curl$i"
    grep -q '"completion_tokens":100' "$dir/answer$i" || fail "request $i: $(cat "$dir/answer$i")"
done
wait_until up 1
"$SWITCHYARD" engine "$model" --listen "unix:$dir/a" >"$dir/a.out" 2>"$dir/a.err" &
engine_a=$!
wait_until up 2
kill -KILL $engine_a $engine_b
wait $engine_a $engine_b 2>/dev/null
engine_a=
engine_b=
wait_until is_not_ready
[ "$(status "$url/v1/completions" -d "$one")" = 503 ] || fail "without engines: $(cat "$dir/body")"
stop 0

exit $((n_failed > 0))
