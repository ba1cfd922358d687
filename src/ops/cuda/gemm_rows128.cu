/* Many rows: tiles of 128 rows, two sets of accumulators. */
#include "ops/cuda/gemm_consume.cuh"

typedef gemm_shape<true, false, 2, 128, 16, 6, 1, false, true> shape;

const yard_gemm_variant yard_gemm_rows128 = {
    "rows128",
    YARD_FP8_E4M3,
    shape::WIDTH,
    9,
    { 1, 16, 32, 48, 64, 80, 96, 112, 128 },
    GEMM_TILE_ROWS,
    false,
    gemm_open<shape>,
    gemm_launch<shape>,
};
