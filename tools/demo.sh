#!/usr/bin/env bash
# The main job on the demo checkpoint: questions answered greedily, all at once, by two instances on
# two ranks that share the experts (EP2 DP2). demo.sh path/to/switchyard
set -euo pipefail

program=$1
model=$(cd "$(dirname "$0")/.." && pwd)/models/demo
questions=('What is a horse?' 'What is the capital of France?' 'What is 27 + 15?')

# `generate` adds nothing to its prompts, so the chat markers of the model are written out
answers=$(printf '<｜begin▁of▁sentence｜><｜User｜>%s<｜Assistant｜>\n' "${questions[@]}" |
    "$program" generate "$model" --max-tokens 64 --prompts - --ranks 2) || {
    echo "make demo: failed, '$program generate' said why above" >&2
    exit 1
}
mapfile -t answer <<<"$answers"
for i in "${!questions[@]}"; do
    if [[ -z "${answer[i]:-}" ]]; then
        echo "make demo: failed, no answer to '${questions[i]}'" >&2
        exit 1
    fi
    printf '\n> %s\n%s\n' "${questions[i]}" "${answer[i]}"
done
echo
echo "make demo: ok, ${#questions[@]} questions answered by models/demo on 2 ranks; now try: $program chat models/demo"
