#!/usr/bin/env bash
# The engine RPC as others speak it: Python's grpcio against `switchyard engine`, with the messages of
# proto/engine.proto read at run time. What it finds is in foreign_client.py.
set -uo pipefail

python=$(tools/venv.sh "$YARD_BUILD_DIR/clients" tests/serve/requirements.txt) || exit $?
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
protoc-c --descriptor_set_out="$dir/engine.desc" -I proto proto/engine.proto || exit 1
"$python" -B tests/serve/foreign_client.py "$SWITCHYARD" models/demo "$dir"
