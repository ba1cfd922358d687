#!/usr/bin/env bash
# The main job on the demo checkpoint: questions answered greedily. demo.sh path/to/switchyard
set -euo pipefail

program=$1
model=$(cd "$(dirname "$0")/.." && pwd)/models/demo
n=0

for question in 'What is a horse?' 'What is the capital of France?' 'What is 27 + 15?'; do
    echo
    echo "> $question"
    # `generate` adds nothing to its prompt, so the chat markers of the model are written out
    answer=$("$program" generate "$model" --max-tokens 64 \
        --prompt "<｜begin▁of▁sentence｜><｜User｜>$question<｜Assistant｜>") || {
        echo "make demo: failed, '$program generate' said why above" >&2
        exit 1
    }
    if [[ -z "$answer" ]]; then
        echo "make demo: failed, no answer" >&2
        exit 1
    fi
    echo "$answer"
    n=$((n + 1))
done
echo
echo "make demo: ok, $n questions answered by models/demo; now try: $program chat models/demo"
