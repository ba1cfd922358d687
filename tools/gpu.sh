#!/usr/bin/env bash
# gpu.sh test|bench BUILD_DIR: builds the CUDA programs and runs them. Without nvcc or a GPU it says
# so and succeeds: a machine without one is normal.
set -euo pipefail
cd "$(dirname "$0")/.."

what=$1
build=$2
nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)
if [[ -z "$nvcc" ]]; then
    echo "gpu-$what: not run, there is no nvcc in PATH or /usr/local/cuda/bin"
    exit 0
fi
cmake -G Ninja -S . -B "$build" -DYARD_CUDA=ON >"/dev/null"
if [[ $what == bench ]]; then
    cmake --build "$build" -j "${JOBS:-$(nproc)}" --target switchyard
    if ! ls /dev/nvidia[0-9]* >/dev/null 2>&1; then
        echo "gpu-bench: built, not run: no GPU here"
        exit 0
    fi
    "$build/switchyard" bench roofline --out "$build/roofline"
    "$build/switchyard" bench ops --device cuda --tokens 1,32,256
    "$build/switchyard" bench engine models/demo --device cuda --batch 1,8,32
    exit 0
fi
cmake --build "$build" -j "${JOBS:-$(nproc)}" --target gpu_test engine_gpu_test ep_gpu_test
rc=0
"$build/gpu_test" && "$build/engine_gpu_test" && "$build/ep_gpu_test" || rc=$?
if [[ $rc == 77 ]]; then
    echo "gpu-$what: built, not run: no GPU here; $build/gpu_test needs libc and the driver only"
    exit 0
fi
exit $rc
