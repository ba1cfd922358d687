/* Greedy rows that neither bias nor penalties change: the first of the largest logits, read once
 * from where they lie. Small blocks, a cluster a row, so that all of them are on the way together.
 * The sampling kernel behind this one has the other rows. */
#include "ops/cuda/launch.h"

#include "ops/cuda/sample.cuh"

enum {
    GREEDY_THREADS = 256,
    GREEDY_WARPS = GREEDY_THREADS / WARP_LANES,
    GREEDY_LOADS = 4, /* vectors of a thread that are on their way together */
    GREEDY_MAX_ROWS = 128
};

/* A candidate, and 1 where a logit is not finite. */
typedef struct greedy_shared {
    candidate warp[GREEDY_WARPS];
    pair told[2][CLUSTER]; /* rank 0's; two sets take turns */
} greedy_shared;

/* The same of the thread's part of the slice. */
static __device__ __forceinline__ pair largest_of_part(const float *slice, uint32_t first,
                                                       uint32_t n)
{
    const float none = -CUDART_INF_F;
    largest_seen seen = { none, 0 };
    float finite = 0.0f;

    for (uint32_t at = threadIdx.x * 4; at < n; at += GREEDY_LOADS * GREEDY_THREADS * 4) {
        float4 x[GREEDY_LOADS];
#pragma unroll
        for (uint32_t l = 0; l < GREEDY_LOADS; l++) {
            const uint32_t i = at + l * GREEDY_THREADS * 4;
            x[l] = i < n ? *(const float4 *)(slice + i) : make_float4(none, none, none, none);
        }
#pragma unroll
        for (uint32_t l = 0; l < GREEDY_LOADS; l++) {
            const uint32_t i = at + l * GREEDY_THREADS * 4;
            see_four(&seen, x[l], first + i);
            finite = i < n ? finite_so_far(finite, x[l]) : finite;
        }
    }
    return (pair){ candidate_seen(seen), finite != finite };
}

/* The largest of a warp's, in all lanes. */
static __device__ __forceinline__ candidate largest_of_warp(candidate key)
{
    const uint32_t order = __reduce_max_sync(0xffffffffu, (uint32_t)(key >> 32));
    const bool has = (uint32_t)(key >> 32) == order;

    return (uint64_t)order << 32 | __reduce_max_sync(0xffffffffu, has ? (uint32_t)key : 0u);
}

static __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(GREEDY_THREADS, 8)
    sample_greedy_kernel(const __grid_constant__ sample_args n)
{
    __shared__ greedy_shared m;
    const yard_sample_args &a = n.a;
    const uint32_t rank = cluster_rank(), lane = threadIdx.x % WARP_LANES;
    const uint32_t first = min(rank * n.slice, a.n_vocab), size = min(n.slice, a.n_vocab - first);
    uint32_t turn = 0;

    allow_next_kernel();
    cluster_sync(); /* all blocks are there before one writes to another's memory */
    wait_previous_kernel();
    for (uint32_t row = blockIdx.x / CLUSTER; row < (uint32_t)*a.n_rows;
         row += gridDim.x / CLUSTER) {
        if (!is_plain_greedy(n, &a.rows[row]))
            continue;
        const pair mine = largest_of_part(a.logits + (size_t)row * a.n_vocab + first, first, size);
        candidate key = largest_of_warp(mine.a);
        if (lane == 0)
            m.warp[threadIdx.x / WARP_LANES] = key;
        const bool not_finite = __syncthreads_or((int)mine.b);
        if (threadIdx.x < WARP_LANES) {
            key = largest_of_warp(lane < GREEDY_WARPS ? m.warp[lane] : 0);
            if (lane == 0)
                *(pair *)__cluster_map_shared_rank(&m.told[turn][rank], 0) =
                    (pair){ key, not_finite };
        }
        /* All ranks have told; a set is written again two barriers later. Nobody writes to rank 0
         * behind the last one, so blocks may leave. */
        cluster_sync();
        if (rank == 0 && threadIdx.x < WARP_LANES) {
            const pair told = lane < CLUSTER ? m.told[turn][lane] : (pair){ 0, 0 };
            const bool finite = !__any_sync(0xffffffffu, told.b != 0);
            key = largest_of_warp(told.a);
            if (lane == 0) {
                a.token[row] = (int32_t)id_of(key);
                if (a.finite)
                    a.finite[row] = finite;
            }
        }
        turn = 1 - turn;
    }
}

yard_status yard_cuda_sample_greedy_launch(const sample_args *n, uint32_t max_rows, void *stream,
                                           yard_error *err)
{
    return launch_rows(sample_greedy_kernel, grid_for(max_rows, 1, GREEDY_MAX_ROWS) * CLUSTER,
                       GREEDY_THREADS, 0, *n, "sample", stream, err);
}
