#!/usr/bin/env bash
# An installed libyard serves a C and a C++ program, shared and static, through pkg-config.
set -euo pipefail

if [[ -n "${YARD_SANITIZE:-}" ]]; then
    echo "skipped: a sanitized library serves sanitized programs only"
    exit 77
fi
prefix=$(mktemp -d)
trap 'rm -rf "$prefix"' EXIT
CC=${CC:-cc}
CXX=${CXX:-$(command -v c++ || command -v g++ || command -v clang++ || true)}

cmake --install "$YARD_BUILD_DIR" --prefix "$prefix/usr" >"$prefix/log" || {
    cat "$prefix/log"
    exit 1
}
for file in bin/switchyard lib/libyard.a lib/libyard.so lib/pkgconfig/yard.pc include/yard/status.h; do
    [[ -e "$prefix/usr/$file" ]] || {
        echo "not installed: $file"
        exit 1
    }
done
"$prefix/usr/bin/switchyard" --version

export PKG_CONFIG_PATH=$prefix/usr/lib/pkgconfig
cat >"$prefix/user.c" <<'C'
#include <stdio.h>
#include <string.h>

#include <yard/engine.h>
#include <yard/status.h>

int main(void)
{
    yard_error err;

    memset(&err, 0, sizeof(err));
    if (yard_fail(&err, YARD_EINVAL, "want %d", 7) != YARD_EINVAL || strcmp(err.message, "want 7"))
        return 1;
    if (err.status != YARD_EINVAL || strcmp(yard_status_name(YARD_OK), "ok"))
        return 1;
    puts(yard_status_name(err.status));
    return 0;
}
C
cp "$prefix/user.c" "$prefix/user.cc"

# try NAME COMMAND...: builds and runs one user program
try() {
    local name=$1
    shift
    "$@" -o "$prefix/$name"
    LD_LIBRARY_PATH=$prefix/usr/lib "$prefix/$name" | grep -qx 'invalid argument' || {
        echo "$name: wrong answer"
        exit 1
    }
    echo "$name: ok"
}

# the example of libyard-ep, alone and as two ranks
for kind in shared static; do
    libs=$(pkg-config --libs yard-ep)
    [[ $kind == static ]] && libs=$(pkg-config --static --libs yard-ep) && libs=${libs/-lyard-ep/-l:libyard-ep.a}
    # shellcheck disable=SC2046,SC2086
    "$CC" -std=c17 -Wall -Wextra -Werror examples/ep.c $(pkg-config --cflags yard-ep) $libs \
        -o "$prefix/ep-$kind"
    LD_LIBRARY_PATH=$prefix/usr/lib "$prefix/usr/bin/switchyard" run --ranks 2 -- "$prefix/ep-$kind" \
        >"$prefix/ep.out"
    [[ $(grep -c 'token 3 came back as 8, want 8' "$prefix/ep.out") == 2 ]] || {
        echo "ep-$kind: wrong answer"
        cat "$prefix/ep.out"
        exit 1
    }
    echo "ep-$kind: ok"
done

# the example of libyard-ops
for kind in shared static; do
    libs=$(pkg-config --libs yard-ops)
    [[ $kind == static ]] && libs=$(pkg-config --static --libs yard-ops) &&
        libs=${libs/-lyard-ops/-l:libyard-ops.a}
    # shellcheck disable=SC2046,SC2086
    "$CC" -std=c17 -Wall -Wextra -Werror examples/ops.c $(pkg-config --cflags yard-ops) $libs \
        -o "$prefix/ops-$kind"
    LD_LIBRARY_PATH=$prefix/usr/lib "$prefix/ops-$kind" >"$prefix/ops.out"
    grep -q 'x\[1\] became code 0x7e times 0.00223' "$prefix/ops.out" || {
        echo "ops-$kind: wrong answer"
        cat "$prefix/ops.out"
        exit 1
    }
    echo "ops-$kind: ok"
done

read -ra cflags <<<"$(pkg-config --cflags yard)"
read -ra shared <<<"$(pkg-config --libs yard)"
# with both kinds installed, the linker takes the shared one unless the archive is named
static=$(pkg-config --static --libs yard)
read -ra static <<<"${static/-lyard/-l:libyard.a}"

try c-shared "$CC" -std=c17 -Wall -Wextra -Werror "$prefix/user.c" "${cflags[@]}" "${shared[@]}"
try c-static "$CC" -std=c17 -Wall -Wextra -Werror "$prefix/user.c" "${cflags[@]}" "${static[@]}"
if [[ -z "$CXX" ]]; then
    echo "c++: not tried, there is no C++ compiler"
    exit 0
fi
try c++-shared "$CXX" -std=c++17 -Wall -Wextra -Werror "$prefix/user.cc" "${cflags[@]}" "${shared[@]}"
try c++-static "$CXX" -std=c++17 -Wall -Wextra -Werror "$prefix/user.cc" "${cflags[@]}" "${static[@]}"
