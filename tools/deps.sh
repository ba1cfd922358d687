#!/usr/bin/env bash
# Installs the system packages that Switchyard needs, and only those that are missing.
#
#   tools/deps.sh [build|test|long|all] [--dry-run]
#
# build: compiler, CMake, Ninja and the libraries the program links
# test:  build, and what `make test` runs: cmocka, clang for fuzzing, clang-format, python3, g++
# long:  test, and what `make test-long` adds: clang-tidy, numpy
# all:   the same as long
#
# Debian 12 and Ubuntu 24.04 are known. Elsewhere nothing is installed: the list of what is needed
# is printed, and the script succeeds if pkg-config finds the libraries.
set -euo pipefail

what=build
dry_run=0
for arg in "$@"; do
    case "$arg" in
    build | test | long | all) what=$arg ;;
    --dry-run) dry_run=1 ;;
    -h | --help) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "deps: no argument '$arg'; want build, test, long or all" >&2; exit 2 ;;
    esac
done

# package -> why; the order is the order of the list below
packages=()
declare -A why
need() {
    packages+=("$1")
    why[$1]=$2
}

# The first of the names that apt knows; the first one when it knows none (the list may be empty).
first_known() {
    local name
    for name in "$@"; do
        if apt-cache show "$name" >/dev/null 2>&1; then
            echo "$name"
            return
        fi
    done
    echo "$1"
}

installed() {
    [[ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]
}

list_build() {
    need gcc "C compiler"
    need libc6-dev "C library headers"
    need make "the commands in the Makefile"
    need cmake "build"
    need ninja-build "build"
    need pkg-config "finds the libraries below"
    need libjansson-dev "reads config.json and tokenizer.json"
    need libpcre2-dev "the tokenizer's split patterns"
    need libutf8proc-dev "the tokenizer's Unicode normalisation"
    need libevent-dev "HTTP, of the server and of the load on it"
    need curl "asks the service in make demo"
    need jq "reads its answers in make demo"
    need libmd-dev "SHA-256 of chat templates and of proofs between ranks"
    need libgrpc-dev "calls between fronts and engines (its C core)"
    need libprotobuf-c-dev "their messages"
    need protobuf-c-compiler "their messages"
}

list_test() {
    need libcmocka-dev "unit tests"
    need g++ "public headers are checked as C++ too"
    need clang "fuzz targets, second compiler"
    need "$(clang_runtime)" "sanitizer and fuzzer runtime of clang"
    need "$(first_known clang-format-14 clang-format)" "format check"
    need python3 "checks of the tree (standard library only)"
    need procps "processes of a service in tests"
    need python3-venv "packages that are clients in tests, in the build folder"
    need libfabric-dev "transport for InfiniBand and EFA: headers, and the library that tests load"
    need iproute2 "network namespaces as nodes in tests"
    need gnuplot-nox "the planner's drawings"
}

list_long() {
    need clang-tidy "static analysis"
    need python3-numpy "independent reference of the demo model"
}

# clang's runtime is a package of its own, named after the version that 'clang' stands for.
clang_runtime() {
    local version
    version=$(apt-cache depends clang 2>/dev/null | sed -n 's/^ *Depends: clang-\([0-9]*\)$/\1/p' |
        head -n 1)
    if [[ -z "$version" ]] && installed clang; then
        version=$(clang -dumpversion 2>/dev/null | cut -d. -f1)
    fi
    echo "libclang-rt-${version:-14}-dev"
}

list() {
    packages=()
    list_build
    if [[ $what != build ]]; then list_test; fi
    if [[ $what == long || $what == all ]]; then list_long; fi
}

missing_of() {
    missing=()
    local p
    for p in "${packages[@]}"; do
        installed "$p" || missing+=("$p")
    done
}

other_system() {
    echo "deps: this system has no apt. Switchyard needs, under whatever names they have here:"
    echo "  gcc 12 or clang 14 (or newer), make, cmake 3.22, ninja, pkg-config,"
    echo "  jansson, PCRE2 (8 bit), utf8proc, libmd, libevent, gRPC 1.51 (C core),"
    echo "  protobuf-c and its compiler"
    [[ $what == build ]] || echo "  cmocka, clang with its sanitizer runtime, clang-format 14, python 3.9, g++"
    local lib lost=0
    for lib in jansson libpcre2-8 libutf8proc libmd libevent_extra grpc_unsecure \
        libprotobuf-c $([[ $what == build ]] || echo cmocka); do
        if ! pkg-config --exists "$lib" 2>/dev/null; then
            echo "deps: pkg-config does not find $lib" >&2
            lost=1
        fi
    done
    [[ $lost == 0 ]] || exit 1
    echo "deps: ok, pkg-config finds every library"
    exit 0
}

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    other_system
fi

list
missing_of
if [[ ${#missing[@]} == 0 ]]; then
    echo "deps: ok, all ${#packages[@]} packages for '$what' are installed"
    exit 0
fi

if [[ $(id -u) == 0 ]]; then
    as_root=(env DEBIAN_FRONTEND=noninteractive)
    shown=""
elif command -v sudo >/dev/null && { [[ -t 0 ]] || sudo -n true 2>/dev/null; }; then
    as_root=(sudo env DEBIAN_FRONTEND=noninteractive)
    shown="sudo "
else
    as_root=()
fi
if [[ ${#as_root[@]} == 0 && $dry_run == 0 ]]; then
    echo "deps: packages are missing, and this user is neither root nor may use sudo. Run as root:" >&2
    echo "  apt-get update && apt-get install -y --no-install-recommends ${missing[*]}" >&2
    exit 1
fi

quietly() { # the output of a failed command is worth reading, that of a successful one is not
    local log
    log=$(mktemp)
    if ! "$@" >"$log" 2>&1 </dev/null; then
        tail -n 40 "$log" >&2
        rm -f "$log"
        echo "deps: failed: $*" >&2
        return 1
    fi
    rm -f "$log"
}

if [[ $dry_run == 0 ]]; then
    echo "deps: ${#missing[@]} of ${#packages[@]} packages for '$what' are missing; ${shown}apt-get update"
    quietly "${as_root[@]}" apt-get update -qq
    list # names that depend on the version are known only now
    missing_of
fi
echo "deps: installing"
for p in "${missing[@]}"; do
    printf '  %-22s %s\n' "$p" "${why[$p]}"
done
if [[ $dry_run == 1 ]]; then
    exit 0
fi
quietly "${as_root[@]}" apt-get install -y --no-install-recommends "${missing[@]}"
echo "deps: ok, installed ${#missing[@]} packages for '$what'"
