/* Groups in bf16: weights stream past. A block by itself: pairs would read a tile of w for nothing
 * where its number is odd, and twice the bytes of w leave time to read x again. */
#include "ops/cuda/gemm_consume.cuh"

typedef gemm_shape<false, true, 2, 144, 16, 6, 1, false, false> shape;

const yard_gemm_variant yard_gemm_group144_bf16 = {
    "group144_bf16",
    YARD_BF16,
    shape::WIDTH,
    10,
    { 1, 16, 32, 48, 64, 80, 96, 112, 128, 144 },
    GEMM_TILE_ROWS,
    false,
    gemm_open<shape>,
    gemm_launch<shape>,
};
