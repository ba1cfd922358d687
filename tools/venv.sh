#!/usr/bin/env bash
# A Python environment with exactly the packages of a requirements file: venv.sh DIR REQUIREMENTS
#
# Made once, and again when the file has changed; several callers wait for one another. Nothing is
# installed elsewhere. Prints the path of its python. Exits with 77, the code of a skipped test, where
# it cannot be made: no python3-venv, or no package index within reach.
set -euo pipefail

[[ $# == 2 ]] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
dir=$1
requirements=$2

mkdir -p "$(dirname "$dir")"
exec 9>"$dir.lock"
flock 9
if ! cmp -s "$requirements" "$dir/requirements.txt"; then
    rm -rf "$dir"
    if ! { python3 -m venv "$dir" && "$dir/bin/python" -m pip install --quiet --no-input \
        --disable-pip-version-check --only-binary :all: --requirement "$requirements"; } \
        >"$dir.log" 2>&1; then
        echo "venv: cannot install $(tr '\n' ' ' <"$requirements"): $(tail -n 1 "$dir.log")" >&2
        rm -rf "$dir"
        exit 77
    fi
    cp "$requirements" "$dir/requirements.txt"
fi
echo "$dir/bin/python"
