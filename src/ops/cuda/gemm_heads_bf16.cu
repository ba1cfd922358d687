/* One bf16 matrix a head (k_b and v_b of latent attention): groups that have all rows, each in
 * columns of its own. */
#include "ops/cuda/gemm_consume.cuh"

struct heads_bf16_shape : gemm_shape<false, true, 2, 128, 16, 6, 1, false, false> {
    static constexpr bool HEADS = true, EARLY = true;
};
typedef heads_bf16_shape shape;

const yard_gemm_variant yard_gemm_heads_bf16 = {
    "heads_bf16",
    YARD_BF16,
    shape::WIDTH,
    9,
    { 1, 16, 32, 48, 64, 80, 96, 112, 128 },
    GEMM_TILE_ROWS,
    false,
    gemm_open<shape>,
    gemm_launch<shape>,
};
