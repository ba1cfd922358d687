/* The matrix product kernel: its shapes, and what lies where in shared memory. */
#ifndef YARD_OPS_CUDA_GEMM_SHAPE_CUH
#define YARD_OPS_CUDA_GEMM_SHAPE_CUH

#include "ops/cuda/gemm.h"

#include "ops/cuda/ptx.cuh"
#include "ops/cuda/wgmma.cuh"

enum { WARPGROUP = 128, SCALE_THREADS = 96, PRODUCER_WARPS = 4 };

/* STEP: rows of x are rounded up to it; 0 (swapped): 8, 16, 24, 32, 48, 64, 96, 128. */
template <bool FP8_, bool SWAPPED_, int WARPGROUPS_, int WIDTH_, int STEP_, int STAGES_,
          int CLUSTER_, bool SPLIT_, bool PAIRED_, int W_ROWS_ = GEMM_TILE_ROWS>
struct gemm_shape {
    static constexpr int W_ROWS = W_ROWS_; /* of w in a tile */
    static constexpr int W_SCALES = (W_ROWS + GEMM_TILE_ROWS - 1) / GEMM_TILE_ROWS;
    static constexpr bool FP8 = FP8_, SWAPPED = SWAPPED_, SPLIT = SPLIT_, PAIRED = PAIRED_;
    static constexpr bool HEADS = false; /* see yard_gemm_args */
    /* of one matrix, and of heads, the first stages have their w before rows are known */
    static constexpr bool EARLY = SPLIT || !SWAPPED;
    static constexpr int WARPGROUPS = WARPGROUPS_, WIDTH = WIDTH_, STEP = STEP_, STAGES = STAGES_,
                         CLUSTER = CLUSTER_;
    static constexpr int CONSUMERS = WARPGROUPS * WARPGROUP;
    static constexpr int THREADS = CONSUMERS + WARPGROUP;
    /* what a block starts with (168 or 128 a thread) is all that its warpgroups can share out */
    static constexpr int CONSUMER_REGISTERS = WARPGROUPS == 3 ? 152 : 224;
    static constexpr int PRODUCER_REGISTERS = 56;
    static_assert(CONSUMERS * CONSUMER_REGISTERS + WARPGROUP * PRODUCER_REGISTERS <=
                      THREADS * (65536 / THREADS / 8 * 8),
                  "registers");
    static constexpr int W_BYTES = W_ROWS * GEMM_BLOCK_BYTES;
    static constexpr int X_BYTES = WIDTH * GEMM_BLOCK_BYTES;
    static constexpr int STAGE_BYTES = W_BYTES + X_BYTES;
    static constexpr int SCALE_WIDTH = (WIDTH + 15) / 16 * 16;
    static constexpr int SCALES = FP8 ? W_SCALES * SCALE_WIDTH : 0; /* floats a stage */
    static constexpr int SCALE_BYTES = (SCALES * 4 * STAGES + 1023) / 1024 * 1024;
    static constexpr int FULL_ARRIVALS = FP8 ? 1 + SCALE_THREADS / 32 : 1;
    /* rows on M: columns of y that a warp stores at a time; three warpgroups leave less room */
    static constexpr int STORE_COLUMNS = WARPGROUPS == 3 ? 32 : 64;
    static constexpr int STORE_BYTES = SWAPPED ? 1024 : 16 * STORE_COLUMNS * 2; /* of a warp */
    static constexpr int GROUP_BYTES = GEMM_MAX_GROUPS * 8;
    static constexpr int SHARED_BYTES = 1024 + STAGES * STAGE_BYTES + SCALE_BYTES +
                                        CONSUMERS / 32 * STORE_BYTES + STAGES * 16 + 64 +
                                        (SPLIT ? 16 : GROUP_BYTES);
    static_assert(SWAPPED ? WARPGROUPS == 2 : WIDTH == 64 * WARPGROUPS, "rows of a tile");
    static_assert(!SPLIT || (WIDTH <= GEMM_SPLIT_WIDTH && CLUSTER == 1),
                  "the workspace of partial sums");
    static_assert(SHARED_BYTES <= 232448, "shared memory of a block");

    static constexpr __host__ __device__ int width_after(int w)
    {
        return STEP ? w + STEP : w < 32 ? w + 8 : w < 64 ? w + 16 : w + 32;
    }
    /* How many rows of x are loaded for a tile of n. */
    static __device__ __forceinline__ int width_of(int n)
    {
        if constexpr (STEP > 0) {
            return (n + STEP - 1) / STEP * STEP;
        } else {
            int w = MIN_WIDTH;
            while (w < n)
                w = width_after(w);
            return w;
        }
    }
    static constexpr int MIN_WIDTH = STEP ? STEP : 8;
};

/* Where things lie in shared memory. */
template <class S> struct gemm_shared {
    uint32_t stages, scales_address, stores, full, empty;
    float *scales;
    int32_t *first, *count; /* [n_groups] */
    uint32_t *word;         /* two, for broadcasts */

    __device__ __forceinline__ explicit gemm_shared(char *raw)
    {
        stages = (shared_address(raw) + 1023u) & ~1023u;
        char *at = raw + (stages - shared_address(raw)) + S::STAGES * S::STAGE_BYTES;
        scales = (float *)at;
        at += S::SCALE_BYTES;
        stores = shared_address(at);
        at += S::CONSUMERS / 32 * S::STORE_BYTES;
        full = shared_address(at);
        empty = full + S::STAGES * 8;
        at += S::STAGES * 16;
        word = (uint32_t *)at;
        first = (int32_t *)(at + 16);
        count = first + (S::SPLIT ? 1 : GEMM_MAX_GROUPS);
    }
    __device__ __forceinline__ uint32_t w(int stage) const
    {
        return stages + stage * S::STAGE_BYTES;
    }
    __device__ __forceinline__ uint32_t x(int stage) const
    {
        return w(stage) + S::W_BYTES;
    }
};

/* A position in the ring. */
template <class S> struct gemm_ring {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance()
    {
        if (++stage == S::STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

#endif
