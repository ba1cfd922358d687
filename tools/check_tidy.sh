#!/usr/bin/env bash
# clang-tidy over every source of the rooms and the program: check_tidy.sh BUILD_DIR
# The checks are in .clang-tidy. Exits with 77 when there is no clang-tidy.
set -uo pipefail

build=$1
root=$(cd "$(dirname "$0")/.." && pwd)
tidy=$(command -v clang-tidy || command -v clang-tidy-14 || command -v clang-tidy-18) || {
    echo "tidy: skipped, there is no clang-tidy (tools/deps.sh long installs it)"
    exit 77
}
[[ -f "$build/compile_commands.json" ]] || {
    echo "tidy: $build/compile_commands.json is missing; configure first"
    exit 1
}
cd "$root" || exit 1
# check_tidy.h turns yard_fail into a macro, which its own definition does not survive
mapfile -t files < <(find src -name '*.c' -not -path '*/cuda/*' -not -path src/base/status.c | sort)

tidy_files() { # arguments of clang-tidy; files on standard input
    xargs -0 -n 1 -P "${JOBS:-$(nproc)}" "$tidy" -p "$build" --quiet --warnings-as-errors='*' "$@" \
        2> >(grep -v -e 'warnings* generated' -e 'Suppressed' -e 'Use -header-filter' >&2)
}
printf '%s\0' "${files[@]}" | tidy_files --extra-arg=-include --extra-arg="$root/tools/check_tidy.h" &&
    printf '%s\0' src/base/status.c | tidy_files
rc=$?
if [[ $rc == 0 ]]; then
    echo "tidy: $((${#files[@]} + 1)) files, nothing found"
    exit 0
fi
echo "tidy: failed"
exit 1
