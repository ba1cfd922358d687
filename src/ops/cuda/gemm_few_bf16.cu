/* The same for bf16: nothing to scale, sums stay in the accumulators. */
#include "ops/cuda/gemm_consume.cuh"

typedef gemm_shape<false, true, 2, 128, 0, 6, 1, true, false> shape;

const yard_gemm_variant yard_gemm_few_bf16 = {
    "few_bf16",
    YARD_BF16,
    shape::WIDTH,
    9,
    { 1, 8, 16, 24, 32, 48, 64, 96, 128 },
    GEMM_TILE_ROWS,
    true,
    gemm_open<shape>,
    gemm_launch<shape>,
};
