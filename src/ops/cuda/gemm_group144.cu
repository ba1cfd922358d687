/* Groups of more rows than group96 takes, where a tile as wide as the group beats tiles of 128. */
#include "ops/cuda/gemm_consume.cuh"

typedef gemm_shape<true, true, 2, 144, 16, 6, 1, false, false> shape;

const yard_gemm_variant yard_gemm_group144 = {
    "group144",
    YARD_FP8_E4M3,
    shape::WIDTH,
    10,
    { 1, 16, 32, 48, 64, 80, 96, 112, 128, 144 },
    GEMM_TILE_ROWS,
    false,
    gemm_open<shape>,
    gemm_launch<shape>,
};
