/* One matrix and few rows: split K. */
#include "ops/cuda/gemm_consume.cuh"

typedef gemm_shape<true, true, 2, 96, 0, 7, 1, true, true> shape;

const yard_gemm_variant yard_gemm_few_fp8 = {
    "few_fp8",
    YARD_FP8_E4M3,
    shape::WIDTH,
    8,
    { 1, 8, 16, 24, 32, 48, 64, 96 },
    GEMM_TILE_ROWS,
    true,
    gemm_open<shape>,
    gemm_launch<shape>,
};
