# What the tests of commands share; sourced by them. Sets model, dir (removed at exit) and n_failed.
set -u
model=models/demo
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
n_failed=0

fail()
{
    echo "FAIL: $*" >&2
    n_failed=$((n_failed + 1))
}
