#!/usr/bin/env bash
# check_golden.sh demo|families: the checkpoints of tests/golden against their values, through independent
# implementations in numpy. Exits with 77 when no python3 has numpy.
root=$(cd "$(dirname "$0")/.." && pwd)
case $1 in
demo) check=("$root/tools/demo-model/check_numpy.py" "$root/models/demo" "$root/tests/golden") ;;
families) check=("$root/tools/families/reference.py" "$root/tests/golden/families") ;;
*) echo "usage: check_golden.sh demo|families" >&2 && exit 2 ;;
esac
for python in python3 /usr/bin/python3; do
    if "$python" -c 'import numpy' 2>/dev/null; then
        exec "$python" "${check[@]}"
    fi
done
echo "golden_numpy: skipped, no python3 has numpy (tools/deps.sh long installs it)"
exit 77
