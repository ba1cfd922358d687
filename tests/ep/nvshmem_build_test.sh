#!/usr/bin/env bash
# libyard-ep-nvshmem compiles and links against two versions of NVSHMEM, from wheels in environments
# below the build folder; it exports its table and needs nothing but NVSHMEM's host library and libc.
# ctest: long (120 MB of wheels, minutes of nvcc on two cores)
set -uo pipefail

command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc ]] || { echo "no nvcc here"; exit 77; }
rc=0
for version in 3.4.5 3.3.24; do
    python=$(tools/venv.sh "$YARD_BUILD_DIR/nvshmem-$version" "tests/ep/nvshmem/$version.txt") || exit $?
    folder=$("$python" -c 'import nvidia.nvshmem as n; print(list(n.__path__)[0])') || exit 1
    build=$YARD_BUILD_DIR/with-nvshmem-$version
    library=$build/libyard-ep-nvshmem.so
    mkdir -p "$build"
    if ! { cmake -G Ninja -S . -B "$build" -DYARD_CUDA=ON -DYARD_TESTS=OFF "-DYARD_NVSHMEM=$folder" &&
        cmake --build "$build" --target yard_ep_nvshmem; } >"$build/log" 2>&1; then
        tail -n 30 "$build/log"
        echo "NVSHMEM $version: does not build"
        rc=1
        continue
    fi
    needed=$(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
        grep -vE '^(libnvshmem_host\.so\.3|libc\.so\.6|libm\.so\.6|ld-linux.*)$')
    [[ -z "$needed" ]] || { echo "NVSHMEM $version: needs also $needed"; rc=1; }
    nm -D --defined-only "$library" | grep -q ' yard_nvshmem_library$' ||
        { echo "NVSHMEM $version: no table"; rc=1; }
    grep -q "^$version" <(strings "$library") || { echo "NVSHMEM $version: names another version"; rc=1; }
done
exit $rc
