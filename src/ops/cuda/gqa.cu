/* Grouped-query attention on tensor cores (mma), bf16, heads of 64 or 128. A block takes one kv
 * head and a group of up to 16 query rows: the heads that share it, of some consecutive rows of one
 * sequence. Its warps walk over tiles of 16 positions by turns, each with a ring of its own, and
 * join their sums in the end, in order. Which warp takes a tile depends on its position alone, and
 * rows see only what is theirs, so a row's result does not depend on its group. */
#include "ops/cuda/attention.h"

#include "ops/cuda/softmax.cuh"

enum {
    GQA_THREADS = 256,
    GQA_WARPS = GQA_THREADS / 32,
    GQA_ROWS = 16,
    GQA_TILE = 16, /* positions */
    GQA_STAGES = 3,
    GQA_BLOCKS = 132
};

template <int DIMS> struct gqa_layout {
    static constexpr uint32_t row_bytes = DIMS * 2;
    static constexpr uint32_t tile_bytes = GQA_TILE * row_bytes; /* keys; values follow */
    static constexpr uint32_t warp_bytes = GQA_STAGES * 2 * tile_bytes;
    static constexpr uint32_t shared_bytes = GQA_WARPS * warp_bytes;
    static_assert(GQA_WARPS * GQA_ROWS * (DIMS + 2) * 4 <= shared_bytes, "sums of all warps");
};

/* Rows of the batch that go together. */
struct gqa_group {
    uint32_t row, n_rows, kv_head;
    uint32_t first_tile, end_tile, n_keys; /* n_keys: of the last row */
};

static __device__ __forceinline__ void copy_piece(uint32_t to, const void *from, bool wanted)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(wanted ? 16 : 0) /* the rest is zeros */
                 : "memory");
}

static __device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
}

static __device__ __forceinline__ void load_matrices_transposed(uint32_t (&x)[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
}

/* d [16, 8] += a [16, 16] . b [8, 16]^T */
static __device__ __forceinline__ void multiply(float *d, const uint32_t *a, uint32_t b0,
                                                uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* A row begins a group where its sequence does, and at positions that are whole multiples. */
static __device__ __forceinline__ bool make_group(const yard_attend_args &a, uint32_t row,
                                                  uint32_t n_rows, gqa_group &g)
{
    const uint32_t most = GQA_ROWS / a.n_shared;
    const int32_t *seq = a.batch.seq, *position = a.batch.position;

    if (row > 0 && seq[row] == seq[row - 1] && (uint32_t)position[row] % most)
        return false;
    g.row = row;
    g.n_rows = 1;
    while (row + g.n_rows < n_rows && seq[row + g.n_rows] == seq[row] &&
           (uint32_t)position[row + g.n_rows] % most)
        g.n_rows++;
    const uint32_t end = (uint32_t)position[row] + 1;
    g.n_keys = end + g.n_rows - 1;
    g.first_tile = a.window && end > a.window ? (end - a.window) / GQA_TILE : 0;
    g.end_tile = (g.n_keys + GQA_TILE - 1) / GQA_TILE;
    return true;
}

/* Query row r of the group: a head of a row; beyond the last one there is none. */
static __device__ __forceinline__ bool query_of(const yard_attend_args &a, const gqa_group &g,
                                                uint32_t r, uint32_t *row, uint32_t *head)
{
    *row = g.row + r / a.n_shared;
    *head = g.kv_head * a.n_shared + r % a.n_shared;
    return r / a.n_shared < g.n_rows;
}

template <int DIMS>
static __device__ __forceinline__ void load_queries(const yard_attend_args &a, const gqa_group &g,
                                                    uint32_t (&q)[DIMS / 4])
{
    const uint32_t lane = threadIdx.x % 32;

#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t row, head;
        const bool wanted = query_of(a, g, lane / 4 + 8 * half, &row, &head);
        const uint32_t *from = (const uint32_t *)((const uint16_t *)a.q0.rows.data +
                                                  (size_t)row * a.q0.rows.ld + head * DIMS) +
                               lane % 4;
#pragma unroll
        for (int k = 0; k < DIMS / 16; k++) {
            q[4 * k + half] = wanted ? from[8 * k] : 0;
            q[4 * k + 2 + half] = wanted ? from[8 * k + 4] : 0;
        }
    }
}

/* Keys and values of a tile, 16-byte pieces exchanged by the row. */
template <int DIMS>
static __device__ __forceinline__ void fetch_tile(const yard_attend_args &a, const gqa_group &g,
                                                  uint32_t tile, uint32_t to)
{
    enum { PIECES = DIMS / 8 };
    const uint32_t lane = threadIdx.x % 32, p0 = tile * GQA_TILE;

    if (tile < g.end_tile) {
        const int32_t page = a.batch.page_table[(size_t)a.batch.seq[g.row] * a.batch.page_table_ld +
                                                p0 / YARD_PAGE_TOKENS];
        const uint16_t *from =
            (const uint16_t *)a.cache.data +
            ((size_t)page * YARD_PAGE_TOKENS + p0 % YARD_PAGE_TOKENS) * a.cache.width;
#pragma unroll
        for (uint32_t i = lane; i < GQA_TILE * PIECES; i += 32) {
            const uint32_t r = i / PIECES, piece = i % PIECES;
            const uint16_t *key =
                from + (size_t)r * a.cache.width + g.kv_head * a.key_stride + piece * 8;
            const uint32_t at = to + r * DIMS * 2 + (piece ^ r % 8) * 16;
            const bool wanted = p0 + r < g.n_keys;
            copy_piece(at, key, wanted);
            copy_piece(at + gqa_layout<DIMS>::tile_bytes, key + a.value_first, wanted);
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* A thread's part of the sums of a warp. */
template <int DIMS> struct gqa_sums {
    row_state s0, s1;
    float o[DIMS / 2];
};

template <int DIMS>
static __device__ __forceinline__ void
attend_tile(const yard_attend_args &a, const uint32_t (&q)[DIMS / 4], gqa_sums<DIMS> &s,
            uint32_t keys, float scale, const int (&low)[2], const int (&high)[2])
{
    const uint32_t lane = threadIdx.x % 32, r = lane % 8, matrix = lane / 8;
    const uint32_t values = keys + gqa_layout<DIMS>::tile_bytes;
    /* keys: matrices of 8 positions by 8 dims, dims first; values: positions first */
    const uint32_t key_row = r + matrix / 2 * 8, value_row = r + matrix % 2 * 8;
    float d[8] = {};

#pragma unroll
    for (int k = 0; k < DIMS / 16; k++) {
        uint32_t x[4];
        load_matrices(x, keys + key_row * DIMS * 2 + ((2 * k + matrix % 2) ^ key_row % 8) * 16);
        multiply(d, q + 4 * k, x[0], x[1]);
        multiply(d + 4, q + 4 * k, x[2], x[3]);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const int col = j / 4 * 8 + (int)(lane % 4 * 2) + j % 2, half = j % 4 / 2;
        if (col < low[half] || col >= high[half])
            d[j] = -INFINITY;
    }
    shrink_rows(s.o, soften(d, s.s0, s.s1, scale, GQA_TILE, GQA_TILE));
    const uint32_t weights[4] = { pack_bf16(d[0], d[1]), pack_bf16(d[2], d[3]),
                                  pack_bf16(d[4], d[5]), pack_bf16(d[6], d[7]) };
#pragma unroll
    for (int k = 0; k < DIMS / 16; k++) {
        uint32_t x[4];
        load_matrices_transposed(x, values + value_row * DIMS * 2 +
                                        ((2 * k + matrix / 2) ^ value_row % 8) * 16);
        multiply(s.o + 8 * k, weights, x[0], x[1]);
        multiply(s.o + 8 * k + 4, weights, x[2], x[3]);
    }
}

/* The warps' sums through shared memory to y. */
template <int DIMS>
static __device__ __forceinline__ void join_warps(const yard_attend_args &a, const gqa_group &g,
                                                  const gqa_sums<DIMS> &s, float *shared)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float *sums = shared + warp * GQA_ROWS * DIMS;
    float2 *states = (float2 *)(shared + GQA_WARPS * GQA_ROWS * DIMS);
    const float total0 = row_sum(s.s0.sum), total1 = row_sum(s.s1.sum);

    __syncthreads(); /* all tiles are read: their place is taken */
#pragma unroll
    for (int j = 0; j < DIMS / 8; j++) {
        float *to = sums + lane / 4 * DIMS + 8 * j + lane % 4 * 2;
        *(float2 *)to = make_float2(s.o[4 * j], s.o[4 * j + 1]);
        *(float2 *)(to + 8 * DIMS) = make_float2(s.o[4 * j + 2], s.o[4 * j + 3]);
    }
    if (lane % 4 == 0) {
        states[warp * GQA_ROWS + lane / 4] = make_float2(s.s0.reference, total0);
        states[warp * GQA_ROWS + lane / 4 + 8] = make_float2(s.s1.reference, total1);
    }
    __syncthreads(); /* the sums are there */
    for (uint32_t i = threadIdx.x; i < GQA_ROWS * DIMS / 2; i += GQA_THREADS) {
        const uint32_t r = i / (DIMS / 2), col = i % (DIMS / 2) * 2;
        uint32_t row, head;
        float most = lowest_log2, total = 0.0f, x = 0.0f, y = 0.0f;
        if (!query_of(a, g, r, &row, &head))
            continue;
        for (int w = 0; w < GQA_WARPS; w++)
            most = fmaxf(most, states[w * GQA_ROWS + r].x);
        for (int w = 0; w < GQA_WARPS; w++) {
            const float2 state = states[w * GQA_ROWS + r];
            const float2 part = *(const float2 *)(shared + (w * GQA_ROWS + r) * DIMS + col);
            const float weight = exp2_fast(state.x - most);
            total = fmaf(weight, state.y, total);
            x = fmaf(weight, part.x, x);
            y = fmaf(weight, part.y, y);
        }
        *(uint32_t *)((uint16_t *)a.y.data + (size_t)row * a.y.ld + head * DIMS + col) =
            pack_bf16(x / total, y / total);
    }
    __syncthreads(); /* .. and read before the next group's tiles */
}

template <int DIMS>
static __device__ __forceinline__ void attend_group(const yard_attend_args &a, const gqa_group &g,
                                                    char *shared, float scale)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t ring = shared_address(shared) + warp * gqa_layout<DIMS>::warp_bytes;
    const uint32_t first = g.first_tile / GQA_WARPS * GQA_WARPS + warp;
    uint32_t q[DIMS / 4], fetched = 0;
    int end[2];
    gqa_sums<DIMS> s;

    load_queries<DIMS>(a, g, q);
    s.s0 = s.s1 = row_state{ lowest_log2, 0.0f };
#pragma unroll
    for (int i = 0; i < DIMS / 2; i++)
        s.o[i] = 0.0f;
#pragma unroll
    for (int half = 0; half < 2; half++) { /* positions that the thread's two rows see */
        const uint32_t i = (lane / 4 + 8 * half) / a.n_shared;
        end[half] = i < g.n_rows ? (int)(g.n_keys - g.n_rows + i + 1) : 0;
    }
    for (; fetched < GQA_STAGES - 1; fetched++)
        fetch_tile<DIMS>(a, g, first + fetched * GQA_WARPS,
                         ring + fetched * 2 * gqa_layout<DIMS>::tile_bytes);
    for (uint32_t i = 0, tile = first; tile < g.end_tile; i++, tile += GQA_WARPS, fetched++) {
        int low[2], high[2];
        fetch_tile<DIMS>(a, g, first + fetched * GQA_WARPS,
                         ring + fetched % GQA_STAGES * 2 * gqa_layout<DIMS>::tile_bytes);
        asm volatile("cp.async.wait_group %0;" ::"n"((int)GQA_STAGES - 1) : "memory");
        __syncwarp(); /* all lanes' copies of the tile are there */
#pragma unroll
        for (int half = 0; half < 2; half++) {
            high[half] = end[half] - (int)(tile * GQA_TILE);
            low[half] = a.window ? high[half] - (int)a.window : -1;
        }
        attend_tile<DIMS>(a, q, s, ring + i % GQA_STAGES * 2 * gqa_layout<DIMS>::tile_bytes, scale,
                          low, high);
        __syncwarp(); /* .. and read before they are written again */
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    join_warps<DIMS>(a, g, s, (float *)shared);
}

/* Grid: kv heads by rows. */
template <int DIMS>
static __global__ void __launch_bounds__(GQA_THREADS)
    gqa_kernel(const __grid_constant__ yard_attend_args a)
{
    extern __shared__ __align__(128) char shared[];
    const uint32_t n_rows = (uint32_t)*a.batch.n_tokens;
    gqa_group g;

    g.kv_head = blockIdx.x;
    for (uint32_t row = blockIdx.y; row < n_rows; row += gridDim.y)
        if (make_group(a, row, n_rows, g))
            attend_group<DIMS>(a, g, shared, a.scale * 1.44269504f);
}

template <int DIMS>
static yard_status launch(const yard_attend_args *a, uint32_t max_rows, void *stream,
                          yard_error *err)
{
    const uint32_t n_kv_heads = a->n_heads / a->n_shared;
    /* About a block a processor; an odd number of rows apart, since groups of a prompt begin a
     * power of two apart. */
    const uint32_t apart = n_kv_heads < GQA_BLOCKS ? (GQA_BLOCKS / n_kv_heads - 1) | 1u : 1;
    const uint32_t n_rows = max_rows < apart ? max_rows : apart;
    cudaError_t code =
        cudaFuncSetAttribute(gqa_kernel<DIMS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             gqa_layout<DIMS>::shared_bytes);

    if (n_rows == 0)
        return YARD_OK;
    if (code == cudaSuccess) {
        gqa_kernel<DIMS><<<dim3(n_kv_heads, n_rows), GQA_THREADS, gqa_layout<DIMS>::shared_bytes,
                           (cudaStream_t)stream>>>(*a);
        code = cudaGetLastError();
    }
    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "gqa_attend: launch: %s", cudaGetErrorString(code));
    return YARD_OK;
}

yard_status yard_cuda_gqa_launch(const yard_attend_args *a, uint32_t max_rows, void *stream,
                                 yard_error *err)
{
    return a->n_v == 128 ? launch<128>(a, max_rows, stream, err)
                         : launch<64>(a, max_rows, stream, err);
}
