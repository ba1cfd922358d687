#!/usr/bin/env bash
# Builds and runs tests: test.sh short|long|asan|tsan|fuzz
#
# short: what CI runs: every ctest entry that is not labelled long, the entries labelled sanitize
#        under ASan+UBSan and under TSan, every fuzz target
# long:  entries labelled long, the whole suite under ASan+UBSan, more fuzzing
#
# Packages are installed by tools/deps.sh, not here. The last line is "N passed, N failed", over all
# parts; a part that could not be built counts as one failure. Files are written to build*/ only.
# Environment: JOBS, FUZZ_SECONDS (all targets together), SAN_CC (compiler for sanitizers, default
# $CC), FUZZ_CC (default clang).
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

JOBS=${JOBS:-$(nproc)}
FUZZ_SECONDS=${FUZZ_SECONDS:-120}
export PYTHONDONTWRITEBYTECODE=1
total_passed=0
total_failed=0
summary=()

say() {
    printf '\n== %s (%s)\n' "$1" "$(date -u +%H:%M:%S)"
}

count() { # part passed failed [note]
    total_passed=$((total_passed + $2))
    total_failed=$((total_failed + $3))
    summary+=("$(printf '%-28s %4d passed %4d failed%s' "$1" "$2" "$3" "${4:+, $4}")")
}

# build DIR TARGET CMAKE_ARGUMENT...
build() {
    local dir=$1 target=$2
    shift 2
    mkdir -p "$dir"
    if ! cmake -G Ninja -S . -B "$dir" "$@" >"$dir/configure.log" 2>&1; then
        tail -n 40 "$dir/configure.log"
        return 1
    fi
    cmake --build "$dir" --target "$target" -j "$JOBS" >"$dir/build.log" 2>&1 || {
        grep -v '^\[' "$dir/build.log" | head -n 80
        return 1
    }
    echo "built $dir"
}

# Kernels with 32 bits of address randomisation break the shadow memory of older sanitizers.
fixed_addresses=()
if setarch -R true 2>/dev/null; then
    fixed_addresses=(setarch -R)
fi

# run_ctest PART DIR CTEST_ARGUMENT...
run_ctest() {
    local part=$1 dir=$2 log line failed all skipped
    shift 2
    log=$dir/ctest.log
    local wrap=()
    if [[ $dir != build ]]; then wrap=("${fixed_addresses[@]}"); fi
    "${wrap[@]}" ctest --test-dir "$dir" -j "$JOBS" --output-on-failure "$@" 2>&1 </dev/null | tee "$log"
    line=$(grep -E '^[0-9]+% tests passed, [0-9]+ tests failed out of [0-9]+' "$log" | tail -n 1)
    if [[ -z "$line" ]]; then
        if grep -q 'No tests were found' "$log"; then
            count "$part" 0 0 "no such test"
        else
            count "$part" 0 1 "ctest did not finish"
        fi
        return
    fi
    failed=$(sed -E 's/.* ([0-9]+) tests failed.*/\1/' <<<"$line")
    all=$(sed -E 's/.*out of ([0-9]+).*/\1/' <<<"$line")
    skipped=$(grep -cE '^[[:space:]]*[0-9]+ - .* \(Skipped\)$' "$log")
    if [[ $skipped == 0 ]]; then
        count "$part" $((all - failed)) "$failed"
    else
        count "$part" $((all - failed - skipped)) "$failed" "$skipped skipped"
    fi
}

plain() { # ctest arguments
    say "plain build"
    if build build all -DYARD_TESTS=ON; then
        run_ctest "$1" build "${@:2}"
    else
        count "$1" 0 1 "build failed"
    fi
}

export ASAN_OPTIONS=${ASAN_OPTIONS:-abort_on_error=0:detect_stack_use_after_return=1:allocator_may_return_null=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
export TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1}

sanitized() { # part dir sanitizers target, ctest arguments
    local part=$1 dir=$2 sanitizers=$3 target=$4
    shift 4
    say "$part"
    if build "$dir" "$target" -DYARD_TESTS=ON -DYARD_CUDA=OFF "-DYARD_SANITIZE=$sanitizers" \
        ${SAN_CC:+"-DCMAKE_C_COMPILER=$SAN_CC"}; then
        run_ctest "$part" "$dir" "$@"
    else
        count "$part" 0 1 "build failed"
    fi
}

fuzz() {
    local targets target what seconds rc passed=0 failed=0 seeds
    say "fuzzing, $FUZZ_SECONDS s in all"
    if ! build build-fuzz fuzz_targets -DYARD_TESTS=OFF -DYARD_CUDA=OFF -DYARD_FUZZ=ON \
        "-DCMAKE_C_COMPILER=${FUZZ_CC:-clang}"; then
        count "fuzzing" 0 1 "build failed"
        return
    fi
    mapfile -t targets < <(find build-fuzz/fuzz -maxdepth 1 -type f -name '*_fuzz' 2>/dev/null | sort)
    if [[ ${#targets[@]} == 0 ]]; then
        count "fuzzing" 0 0 "no targets"
        return
    fi
    seconds=$((FUZZ_SECONDS / ${#targets[@]}))
    if [[ $seconds -lt 1 ]]; then seconds=1; fi
    for target in "${targets[@]}"; do
        what=$(basename "$target" _fuzz)
        # New inputs go to the build folder; the seeds in the tree are read only.
        mkdir -p "build-fuzz/corpus/$what" "build-fuzz/crashes"
        seeds=()
        if [[ -d tests/fuzz/corpus/$what ]]; then seeds=("tests/fuzz/corpus/$what"); fi
        "${fixed_addresses[@]}" "$target" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=3000 \
            -print_final_stats=1 -artifact_prefix="build-fuzz/crashes/$what-" \
            "build-fuzz/corpus/$what" "${seeds[@]}" >"build-fuzz/$what.log" 2>&1 </dev/null
        rc=$?
        if [[ $rc == 0 ]]; then
            passed=$((passed + 1))
            echo "$what: ok, $(sed -n 's/^stat::number_of_executed_units: *//p' "build-fuzz/$what.log") inputs in $seconds s"
        else
            failed=$((failed + 1))
            tail -n 60 "build-fuzz/$what.log"
            echo "$what: FAILED; the input is in build-fuzz/crashes/; again: $target FILE"
        fi
    done
    count "fuzzing" "$passed" "$failed"
}

case "${1:-}" in
short)
    plain "tests" -LE '^long$' --no-tests=error
    sanitized "sanitizers address+undefined" build-asan address,undefined sanitize_subset -L '^sanitize$' -LE '^long$'
    sanitized "sanitizer thread" build-tsan thread sanitize_subset -L '^sanitize$' -LE '^long$'
    fuzz
    ;;
long)
    plain "long tests" -L '^long$'
    sanitized "all tests under ASan+UBSan" build-asan address,undefined all -LE '^long$'
    fuzz
    ;;
asan) sanitized "sanitizers address+undefined" build-asan address,undefined sanitize_subset -L '^sanitize$' ;;
tsan) sanitized "sanitizer thread" build-tsan thread sanitize_subset -L '^sanitize$' ;;
fuzz) fuzz ;;
*)
    sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac

say "summary after $((SECONDS / 60)) min $((SECONDS % 60)) s"
printf '%s\n' "${summary[@]}"
mkdir -p build
echo "$total_passed passed, $total_failed failed" | tee build/test.result
[[ $total_failed == 0 && $total_passed -gt 0 ]]
