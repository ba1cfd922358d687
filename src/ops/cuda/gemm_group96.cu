/* Groups of few rows each: weights stream past, two blocks share the rows of x. */
#include "ops/cuda/gemm_consume.cuh"

/* 7 stages of 28 KB: what it takes to keep a memory of 4.7 TB/s busy. */
typedef gemm_shape<true, true, 2, 96, 16, 7, 2, false, false> shape;

const yard_gemm_variant yard_gemm_group96 = {
    "group96",
    YARD_FP8_E4M3,
    shape::WIDTH,
    7,
    { 1, 8, 16, 24, 32, 40, 48 },
    GEMM_TILE_ROWS,
    false,
    gemm_open<shape>,
    gemm_launch<shape>,
};
