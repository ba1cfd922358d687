/* Many rows in bf16, of one matrix or of groups. */
#include "ops/cuda/gemm_consume.cuh"

typedef gemm_shape<false, false, 2, 128, 16, 6, 1, false, false> shape;

const yard_gemm_variant yard_gemm_rows128_bf16 = {
    "rows128_bf16",
    YARD_BF16,
    shape::WIDTH,
    9,
    { 1, 16, 32, 48, 64, 80, 96, 112, 128 },
    GEMM_TILE_ROWS,
    false,
    gemm_open<shape>,
    gemm_launch<shape>,
};
