/* One matrix and more rows than few_fp8 has in a tile: rows on M, split K. A tile of 128 rows reads
 * w once where two of 64 read it twice, and K is cut because there are too few of them. */
#include "ops/cuda/gemm_consume.cuh"

typedef gemm_shape<true, false, 2, 128, 16, 6, 1, true, true> shape;

const yard_gemm_variant yard_gemm_many_fp8 = {
    "many_fp8",
    YARD_FP8_E4M3,
    shape::WIDTH,
    9,
    { 1, 16, 32, 48, 64, 80, 96, 112, 128 },
    GEMM_TILE_ROWS,
    true,
    gemm_open<shape>,
    gemm_launch<shape>,
};
