#!/usr/bin/env bash
# The demo checkpoint against tests/golden through an independent implementation in numpy.
# Exits with 77 when no python3 has numpy.
root=$(cd "$(dirname "$0")/.." && pwd)
for python in python3 /usr/bin/python3; do
    if "$python" -c 'import numpy' 2>/dev/null; then
        exec "$python" "$root/tools/demo-model/check_numpy.py" "$root/models/demo" "$root/tests/golden" "$@"
    fi
done
echo "golden_numpy: skipped, no python3 has numpy (tools/deps.sh long installs it)"
exit 77
