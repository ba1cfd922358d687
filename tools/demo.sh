#!/usr/bin/env bash
# The main job on the demo checkpoint: the service with two instances on two ranks that share the
# experts (EP2 DP2), asked through the OpenAI API. On a terminal it stays until Ctrl-C; elsewhere it
# ends. demo.sh path/to/switchyard
set -euo pipefail

program=$1
model=$(cd "$(dirname "$0")/.." && pwd)/models/demo
questions=('What is a horse?' 'What is the capital of France?' 'What is 27 + 15?')
dir=$(mktemp -d)
trap '[[ -z "${server:-}" ]] || { kill "$server" 2>/dev/null && wait "$server" || true; }; rm -rf "$dir"' EXIT

fail() {
    echo "make demo: failed, $*" >&2
    sed 's/^/  /' "$dir/log" >&2
    exit 1
}

# ask QUESTION: prints the answer as it comes; $dir/events keeps the stream
ask() {
    jq -n --arg question "$1" '{model: "demo", temperature: 0, max_tokens: 64, stream: true,
        stream_options: {include_usage: true}, messages: [{role: "user", content: $question}]}' |
        curl -sSN --max-time 60 -H 'Content-Type: application/json' -d @- "$url/v1/chat/completions" |
        sed -un 's/^data: \({.*\)/\1/p' | tee "$dir/events" |
        jq -rj --unbuffered '.error.message // .choices[0].delta.content // empty'
    echo
}

"$program" serve "$model" --ranks 2 --port 0 >"$dir/log" 2>&1 &
server=$!
until url=$(sed -n 's/^ready: \(http[^ ]*\) .*/\1/p' "$dir/log") && [[ -n "$url" ]]; do
    kill -0 "$server" 2>/dev/null || { server=; fail "the service ended before it was ready:"; }
    sleep 0.05
done
grep '^ready: ' "$dir/log"

tokens=0 begin=$(date +%s%N)
for question in "${questions[@]}"; do
    printf '\n> %s\n' "$question"
    ask "$question" || fail "no answer to '$question':"
    n=$(jq -rs '[.[] | .usage.completion_tokens // 0] | max // 0' "$dir/events")
    [[ "$n" -gt 0 ]] || fail "no answer to '$question':"
    tokens=$((tokens + n))
done
ms=$((($(date +%s%N) - begin) / 1000000))
echo
echo "make demo: ok, ${#questions[@]} questions answered by models/demo on 2 ranks, $tokens tokens in $ms ms," \
     "one question at a time"

if [[ -t 1 ]]; then
    echo "The service goes on at $url until Ctrl-C; try: $program bench serve --url $url"
    wait "$server" || true
else
    echo "Start it again: $program serve $model --ranks 2"
fi
