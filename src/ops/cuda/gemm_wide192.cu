/* Many rows: tiles of 128 rows by 192 columns. They read less of shared memory and of L2 for a
 * product than tiles of 128 by 128, and are more even for short K. */
#include "ops/cuda/gemm_consume.cuh"

typedef gemm_shape<true, false, 2, 128, 16, 5, 1, false, false, 192> shape;

const yard_gemm_variant yard_gemm_wide192 = {
    "wide192",
    YARD_FP8_E4M3,
    shape::WIDTH,
    9,
    { 1, 16, 32, 48, 64, 80, 96, 112, 128 },
    shape::W_ROWS,
    false,
    gemm_open<shape>,
    gemm_launch<shape>,
};
