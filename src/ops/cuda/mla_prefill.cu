#include "ops/cuda/mla_prefill.h"

#include "ops/cuda/mla_expand.cuh"

/* A cluster takes a head: its blocks expand the latents of a range of positions to keys and values
 * in the cluster's workspace, each some tiles; then each attends to them with some tiles of 128
 * query rows: a producer brings tiles of 128 keys and values, two warpgroups have 64 query rows
 * each. Scores of the next tile are multiplied while those of this one are softened and its values
 * are added. Blocks of a cluster read the same keys at about the same time, so most of that is
 * L2's. What does not fit into one range goes on with the running sums of the last. */
enum {
    PREFILL_THREADS = 384,
    TILE = 128, /* query rows, and keys */
    KEY_CHUNKS = PREFILL_KEY / 64,
    VALUE_CHUNKS = PREFILL_V / 64,
    CHUNK_BYTES = TILE * 128,
    KEY_BYTES = KEY_CHUNKS * CHUNK_BYTES,
    VALUE_BYTES = VALUE_CHUNKS * CHUNK_BYTES,
    PREFILL_STAGES = 2,
    KEYS_AT = KEY_BYTES, /* queries before */
    VALUES_AT = KEYS_AT + PREFILL_STAGES * KEY_BYTES,
    BARRIERS_AT = VALUES_AT + PREFILL_STAGES * VALUE_BYTES,
    SHARED_BYTES = BARRIERS_AT + 8 * (4 * PREFILL_STAGES + 1),
    CONSUMER_WARPS = 8,
    QUERY_BARRIER = 3 /* named; and 4 */
};
static_assert((int)EXPAND_BYTES <= (int)BARRIERS_AT, "what expanding needs");
static_assert(SHARED_BYTES <= 227 * 1024, "shared memory of a block");

struct prefill_shared {
    uint8_t *bytes;
    uint32_t base, key_full, key_empty, value_full, value_empty, weights;

    __device__ __forceinline__ explicit prefill_shared(uint8_t *raw)
    {
        bytes = raw;
        base = shared_address(raw);
        key_full = base + BARRIERS_AT;
        key_empty = key_full + 8 * PREFILL_STAGES;
        value_full = key_empty + 8 * PREFILL_STAGES;
        value_empty = value_full + 8 * PREFILL_STAGES;
        weights = value_empty + 8 * PREFILL_STAGES;
    }
};

/* ---- who does what --------------------------------------------------------------------------- */

/* Prompt rows of one sequence: consecutive positions. */
struct span {
    uint32_t row, n, position;
};

/* The first row from `from` on that stop() holds for; all warps search alike. */
template <typename F>
static __device__ __forceinline__ uint32_t find_row(uint32_t from, uint32_t n, F stop)
{
    enum { AT_ONCE = 8 };

    for (uint32_t base = from; base < n; base += 32 * AT_ONCE) {
        bool hit[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++)
            hit[k] = stop(min(base + 32 * k + threadIdx.x % 32, n - 1));
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const uint32_t bits = __ballot_sync(0xffffffffu, hit[k]);
            if (bits) /* beyond the last row: the last row again, so n at most */
                return min(base + 32 * k + __ffs((int)bits) - 1, n - 1);
        }
    }
    return n;
}

static __device__ __forceinline__ bool next_span(const yard_batch &b, uint32_t n_rows, span &s)
{
    s.row = find_row(s.row + s.n, n_rows, [&](uint32_t i) { return !b.absorbed[i]; });
    if (s.row >= n_rows)
        return false;
    const int32_t seq = b.seq[s.row];
    s.n =
        find_row(s.row + 1, n_rows, [&](uint32_t i) { return b.absorbed[i] || b.seq[i] != seq; }) -
        s.row;
    s.position = (uint32_t)b.position[s.row];
    return true;
}

/* A tile of query rows, and what it sees of the range. */
struct query_tile {
    uint32_t row, n, position; /* of its first row */
    uint32_t n_blocks;         /* of 128 keys */
    bool is_first, is_last;    /* range that the tile sees */
};

/* What was written for the copy engine, and where it will write, is in order for all blocks. */
static __device__ __forceinline__ void sync_blocks(void)
{
    asm volatile("fence.proxy.async;" ::: "memory");
    cluster_sync();
    asm volatile("fence.proxy.async;" ::: "memory");
}

/* The walk of a block, for both roles alike. */
template <typename Role>
static __device__ __forceinline__ void walk(const yard_prefill_task &t, uint32_t n_ranks,
                                            Role &role)
{
    const uint32_t rank = blockIdx.x % n_ranks, cluster = blockIdx.x / n_ranks;
    const uint32_t n_clusters = gridDim.x / n_ranks, n_rows = (uint32_t)*t.batch.n_tokens;

    for (uint32_t head = cluster; head < t.n_heads; head += n_clusters)
        for (span s = {}; next_span(t.batch, n_rows, s);) {
            const uint32_t n_keys = s.position + s.n, n_tiles = (s.n + TILE - 1) / TILE;
            expand_range r;
            r.pages = t.batch.page_table + (size_t)t.batch.seq[s.row] * t.batch.page_table_ld;
            r.slot = (size_t)cluster * PREFILL_RANGE;
            for (r.first = 0; r.first < n_keys; r.first += PREFILL_RANGE) {
                r.n = min((uint32_t)PREFILL_RANGE, n_keys - r.first);
                role.expand(r, head, rank);
                sync_blocks();
                for (uint32_t round = 0; round * n_ranks < n_tiles; round++) {
                    /* long tiles last to first and back: about as much for all blocks */
                    const uint32_t i = round * n_ranks + (round % 2 ? n_ranks - 1 - rank : rank);
                    if (i >= n_tiles)
                        continue;
                    query_tile q;
                    const uint32_t at = (n_tiles - 1 - i) * TILE;
                    q.row = s.row + at;
                    q.n = min((uint32_t)TILE, s.n - at);
                    q.position = s.position + at;
                    const uint32_t end = q.position + q.n; /* of what its last row sees */
                    if (end <= r.first)
                        continue;
                    q.n_blocks = (min(r.n, end - r.first) + TILE - 1) / TILE;
                    q.is_first = r.first == 0;
                    q.is_last = end <= r.first + r.n;
                    role.attend(r, q, head);
                }
                sync_blocks();
            }
        }
}

/* ---- producer -------------------------------------------------------------------------------- */

struct producer {
    const prefill_shared &m;
    const yard_tensor_map *keys, *values;
    uint32_t tiles; /* so far */

    __device__ __forceinline__ void expand(const expand_range &, uint32_t, uint32_t)
    {
    }

    __device__ __forceinline__ void attend(const expand_range &r, const query_tile &q, uint32_t)
    {
        if (threadIdx.x == 0)
            for (uint32_t i = 0; i < q.n_blocks; i++) {
                const uint32_t n = tiles + i, stage = n % PREFILL_STAGES;
                const uint32_t phase = (n / PREFILL_STAGES & 1) ^ 1;
                const uint32_t row = (uint32_t)r.slot + i * TILE;
                barrier_wait(m.key_empty + 8 * stage, phase);
                barrier_expect(m.key_full + 8 * stage, KEY_BYTES);
                tma_load_3d(m.base + KEYS_AT + stage * KEY_BYTES, keys, 0, row, 0,
                            m.key_full + 8 * stage);
                barrier_wait(m.value_empty + 8 * stage, phase);
                barrier_expect(m.value_full + 8 * stage, VALUE_BYTES);
                tma_load_3d(m.base + VALUES_AT + stage * VALUE_BYTES, values, 0, row, 0,
                            m.value_full + 8 * stage);
            }
        tiles += q.n_blocks;
        __syncwarp();
    }
};

/* ---- consumers ------------------------------------------------------------------------------- */

struct consumer {
    const prefill_shared &m;
    const yard_prefill_task &t;
    const yard_tensor_map *weights;
    uint32_t n_ranks, half;
    uint32_t tiles, weights_phase;

    __device__ __forceinline__ void expand(const expand_range &r, uint32_t head, uint32_t rank)
    {
        ::expand(weights, t, r, m.bytes, head, threadIdx.x - 128, rank, n_ranks, m.weights,
                 &weights_phase);
    }

    __device__ __forceinline__ uint32_t stage_of(uint32_t i) const
    {
        return (tiles + i) % PREFILL_STAGES;
    }

    __device__ __forceinline__ void wait_full(uint32_t bars, uint32_t i) const
    {
        barrier_wait(bars + 8 * stage_of(i), (tiles + i) / PREFILL_STAGES & 1);
    }

    __device__ __forceinline__ void load_queries(const query_tile &q, uint32_t head) const
    {
        enum { PIECES = PREFILL_KEY / 8 };
        const uint32_t thread = threadIdx.x % 128;

        named_sync(QUERY_BARRIER + half, 128); /* the last tile's are read by all warps */
#pragma unroll 4
        for (uint32_t i = thread; i < 64 * PIECES; i += 128) {
            const uint32_t row = half * 64 + i / PIECES, piece = i % PIECES;
            uint4 raw = make_uint4(0, 0, 0, 0);
            if (row < q.n)
                raw = *(const uint4 *)((const uint16_t *)t.q.data + (size_t)(q.row + row) * t.q.ld +
                                       head * PREFILL_KEY + piece * 8);
            *(uint4 *)(m.bytes + piece / 8 * CHUNK_BYTES + row * 128 + (piece % 8 ^ row % 8) * 16) =
                raw;
        }
        fence_async_shared(); /* wgmma reads what these stores wrote */
        named_sync(QUERY_BARRIER + half, 128);
    }

    __device__ __forceinline__ void issue_scores(float (&d)[64], uint32_t i) const
    {
        const uint64_t query = wgmma_descriptor(m.base + half * 64 * 128);
        const uint64_t key = wgmma_descriptor(m.base + KEYS_AT + stage_of(i) * KEY_BYTES);

        wgmma_fence();
#pragma unroll
        for (int k = 0; k < PREFILL_KEY / 16; k++) {
            const uint64_t at = k / 4 * (CHUNK_BYTES / 16) + k % 4 * 2;
            wgmma<false, 128>::issue(d, query + at, key + at, k > 0);
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void issue_values(float (&d)[64], const uint32_t (&p)[32],
                                                 uint32_t i) const
    {
        const uint64_t value =
            wgmma_descriptor_rows(m.base + VALUES_AT + stage_of(i) * VALUE_BYTES, CHUNK_BYTES);

        wgmma_fence();
#pragma unroll
        for (int k = 0; k < TILE / 16; k++)
            multiply_registers_rows_128(d, p + 4 * k, value + 128 * k);
        wgmma_commit();
    }

    static __device__ __forceinline__ void pack(const float (&d)[64], uint32_t (&p)[32])
    {
#pragma unroll
        for (int i = 0; i < 32; i++)
            p[i] = pack_bf16(d[2 * i], d[2 * i + 1]);
    }

    /* The running softmax of the thread's two rows, and its part of their sums. */
    struct sums {
        row_state s0, s1;
        float o[64];
    };

    __device__ __forceinline__ size_t place(const query_tile &q, uint32_t row, uint32_t head) const
    {
        return (size_t)(q.row + row) * t.n_heads + head;
    }

    __device__ __forceinline__ void load_sums(const query_tile &q, uint32_t head, uint32_t row,
                                              sums &s) const
    {
        const uint32_t lane = threadIdx.x % 4;

        s.s0 = s.s1 = row_state{ lowest_log2, 0.0f };
#pragma unroll
        for (int i = 0; i < 64; i++)
            s.o[i] = 0.0f;
        if (q.is_first)
            return;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (row + 8 * r >= q.n)
                continue;
            const size_t at = place(q, row + 8 * r, head);
            const float2 state = *(const float2 *)(t.states + at * 2);
            row_state &to = r ? s.s1 : s.s0;
            to.reference = state.x;
            to.sum = lane == 0 ? state.y : 0.0f; /* the four threads' are added in the end */
#pragma unroll
            for (int j = 0; j < 16; j++) {
                const float2 x = *(const float2 *)(t.sums + at * PREFILL_V + 8 * j + 2 * lane);
                s.o[4 * j + 2 * r] = x.x;
                s.o[4 * j + 2 * r + 1] = x.y;
            }
        }
    }

    __device__ __forceinline__ void keep_sums(const query_tile &q, uint32_t head, uint32_t row,
                                              const sums &s, float total0, float total1) const
    {
        const uint32_t lane = threadIdx.x % 4;

#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (row + 8 * r >= q.n)
                continue;
            const size_t at = place(q, row + 8 * r, head);
            if (lane == 0)
                *(float2 *)(t.states + at * 2) =
                    make_float2(r ? s.s1.reference : s.s0.reference, r ? total1 : total0);
#pragma unroll
            for (int j = 0; j < 16; j++)
                *(float2 *)(t.sums + at * PREFILL_V + 8 * j + 2 * lane) =
                    make_float2(s.o[4 * j + 2 * r], s.o[4 * j + 2 * r + 1]);
        }
    }

    __device__ __forceinline__ void finish(const query_tile &q, uint32_t head, uint32_t row,
                                           const sums &s) const
    {
        const float total0 = row_sum(s.s0.sum), total1 = row_sum(s.s1.sum);
        uint16_t *to = (uint16_t *)t.y.data + (size_t)(q.row + row) * t.y.ld + head * PREFILL_V;

        if (!q.is_last) {
            keep_sums(q, head, row, s, total0, total1);
            return;
        }
        store_row<0>(s.o, 1.0f / total0, to, row < q.n);
        store_row<1>(s.o, 1.0f / total1, to + 8 * (size_t)t.y.ld, row + 8 < q.n);
    }

    __device__ __forceinline__ void attend(const expand_range &r, const query_tile &q,
                                           uint32_t head)
    {
        const uint32_t row = half * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        /* keys of the range that this warpgroup's last row sees */
        const int last = (int)(q.position + min(q.n, half * 64 + 64)) - (int)r.first;
        const int seen = half * 64 < q.n ? min(last, (int)r.n) : 0;
        const uint32_t n = seen > 0 ? (uint32_t)(seen + TILE - 1) / TILE : 0;
        int n0 = (int)(q.position + row + 1) - (int)r.first - (int)(threadIdx.x % 4 * 2);
        uint32_t p[32];
        float d[64];
        sums s;

        load_queries(q, head);
        load_sums(q, head, row, s);
        if (n > 0) {
            wait_full(m.key_full, 0);
            issue_scores(d, 0);
            wgmma_wait<0>();
            pin(d);
            arrive_warp(m.key_empty + 8 * stage_of(0));
            shrink_rows(s.o, soften(d, s.s0, s.s1, t.scale_log2, n0, n0 + 8));
            pack(d, p);
            for (uint32_t i = 0; i + 1 < n; i++) {
                wait_full(m.key_full, i + 1);
                issue_scores(d, i + 1);
                wait_full(m.value_full, i);
                pin(s.o);
                issue_values(s.o, p, i);
                wgmma_wait<1>();
                pin(d);
                arrive_warp(m.key_empty + 8 * stage_of(i + 1));
                n0 -= TILE;
                const float2 factor = soften(d, s.s0, s.s1, t.scale_log2, n0, n0 + 8);
                wgmma_wait<0>();
                pin(s.o);
                arrive_warp(m.value_empty + 8 * stage_of(i));
                shrink_rows(s.o, factor);
                pack(d, p); /* not before the product with the last weights is done */
            }
            wait_full(m.value_full, n - 1);
            pin(s.o);
            issue_values(s.o, p, n - 1);
            wgmma_wait<0>();
            pin(s.o);
            arrive_warp(m.value_empty + 8 * stage_of(n - 1));
        }
        for (uint32_t i = n; i < q.n_blocks; i++) { /* for the other warpgroup only */
            wait_full(m.key_full, i);
            arrive_warp(m.key_empty + 8 * stage_of(i));
            wait_full(m.value_full, i);
            arrive_warp(m.value_empty + 8 * stage_of(i));
        }
        tiles += q.n_blocks;
        finish(q, head, row, s);
    }
};

/* ---- the kernel ------------------------------------------------------------------------------ */

static __global__ void __launch_bounds__(PREFILL_THREADS, 1)
    mla_prefill_kernel(const __grid_constant__ yard_tensor_map weights,
                       const __grid_constant__ yard_tensor_map keys,
                       const __grid_constant__ yard_tensor_map values,
                       const __grid_constant__ yard_prefill_task t, uint32_t n_ranks)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    const prefill_shared m(raw);
    const uint32_t warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);

    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < PREFILL_STAGES; i++) {
            barrier_init(m.key_full + 8 * i, 1);
            barrier_init(m.value_full + 8 * i, 1);
            barrier_init(m.key_empty + 8 * i, CONSUMER_WARPS);
            barrier_init(m.value_empty + 8 * i, CONSUMER_WARPS);
        }
        barrier_init(m.weights, 1);
        barrier_init_fence();
    }
    __syncthreads(); /* the barriers are there before anybody waits for them */
    wait_previous_kernel();
    allow_next_kernel();
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        producer role = { m, &keys, &values, 0 };
        walk(t, n_ranks, role);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consumer role = { m, t, &weights, n_ranks, warpgroup - 1, 0, 0 };
        walk(t, n_ranks, role);
    }
}

static void configure(cudaLaunchConfig_t *config, cudaLaunchAttribute *attributes,
                      uint32_t n_clusters)
{
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = PREFILL_CLUSTER;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config->attrs = attributes;
    config->numAttrs = 2;
    config->gridDim = dim3(n_clusters * PREFILL_CLUSTER, 1, 1);
    config->blockDim = dim3(PREFILL_THREADS, 1, 1);
    config->dynamicSmemBytes = SHARED_BYTES;
}

yard_status yard_cuda_mla_prefill_open(uint32_t *n_clusters, yard_error *err)
{
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = {};
    int n = 0;
    cudaError_t code = cudaFuncSetAttribute(
        mla_prefill_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);

    configure(&config, attributes, 1);
    config.numAttrs = 1;
    if (code == cudaSuccess)
        code = cudaOccupancyMaxActiveClusters(&n, mla_prefill_kernel, &config);
    if (code != cudaSuccess || n < 1)
        return yard_fail(err, YARD_EDEVICE, "mla_prefill: %s", cudaGetErrorString(code));
    *n_clusters = n < PREFILL_MAX_CLUSTERS ? (uint32_t)n : (uint32_t)PREFILL_MAX_CLUSTERS;
    return YARD_OK;
}

yard_status yard_cuda_mla_prefill_launch(const yard_tensor_map *w, const yard_prefill_task *t,
                                         const yard_prefill_workspace *space, void *stream,
                                         yard_error *err)
{
    yard_prefill_task task = *t;
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = {};
    cudaError_t code;

    task.keys = space->keys;
    task.values = space->values;
    task.sums = space->sums;
    task.states = space->states;
    configure(&config, attributes, t->n_heads < space->n_clusters ? t->n_heads : space->n_clusters);
    config.stream = (cudaStream_t)stream;
    code = cudaLaunchKernelEx(&config, mla_prefill_kernel, *w, space->key_map, space->value_map,
                              task, (uint32_t)PREFILL_CLUSTER);
    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "mla_prefill: launch: %s", cudaGetErrorString(code));
    return YARD_OK;
}
