/* Many rows: tiles of 192 rows. Three warpgroups overlap by themselves (one promotes, two
 * multiply), with a register budget that has no room for a second set of accumulators. */
#include "ops/cuda/gemm_consume.cuh"

typedef gemm_shape<true, false, 3, 192, 16, 5, 1, false, false> shape;

const yard_gemm_variant yard_gemm_rows192 = {
    "rows192",
    YARD_FP8_E4M3,
    shape::WIDTH,
    13,
    { 1, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192 },
    GEMM_TILE_ROWS,
    false,
    gemm_open<shape>,
    gemm_launch<shape>,
};
