/* Attention of any shape and dtype in f32, tile by tile in ascending order as the definition has
 * it: for what the tensor-core kernels do not take. Correct and simple; speed is not the point. */
#include "ops/cuda/attention.h"

#include "ops/cuda/values.cuh"

enum {
    LANES = 32,
    PLAIN_THREADS = 128,
    PLAIN_WARPS = PLAIN_THREADS / LANES,
    PLAIN_MAX_DIMS = 1024,
    COLS_A_THREAD = PLAIN_MAX_DIMS / PLAIN_THREADS,
    PLAIN_MAX_BLOCKS = 4096, /* the rest is a loop */
    SPAN_ROWS = 8,           /* rows of a block in the multi-head form */
    SPAN_THREADS = 256,
    MAX_SHARED_BYTES = 227 * 1024
};

static __device__ __forceinline__ float sum_lanes(float x)
{
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

/* The cache's row of a position of a batch row's sequence. */
static __device__ __forceinline__ size_t cache_row(const yard_batch &b, uint32_t row, uint32_t p)
{
    const int32_t page = b.page_table[(size_t)b.seq[row] * b.page_table_ld + p / YARD_PAGE_TOKENS];

    return (size_t)page * YARD_PAGE_TOKENS + p % YARD_PAGE_TOKENS;
}

static __device__ void load_query(const yard_attend_query &q, uint32_t row, uint32_t head,
                                  float *to)
{
    for (uint32_t c = threadIdx.x; c < q.dims; c += PLAIN_THREADS)
        to[c] = plain_value(q.rows.dtype, q.rows.data,
                            (size_t)row * q.rows.ld + (size_t)head * q.stride + q.first + c);
}

struct plain_shared {
    float query[PLAIN_MAX_DIMS];
    float score[YARD_PAGE_TOKENS];
    uint64_t at[YARD_PAGE_TOKENS]; /* cache row of each position of the page */
};

/* Scores of positions [from, end), all in one page, a warp each. */
static __device__ void score_page(const yard_attend_args &a, plain_shared &m, uint32_t row,
                                  uint32_t kv_head, uint32_t from, uint32_t end)
{
    const uint32_t warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const uint32_t dims = a.q0.dims + a.q1.dims;

    for (uint32_t p = from + warp; p < end; p += PLAIN_WARPS) {
        const size_t at = cache_row(a.batch, row, p);
        float sum = 0.0f;
        for (uint32_t c = lane; c < dims; c += LANES)
            sum = fmaf(m.query[c],
                       cached_value(a.cache, a.cached, a.kv_rank, at, kv_head * a.key_stride + c),
                       sum);
        sum = sum_lanes(sum) * a.scale;
        if (lane == 0) {
            m.score[p - from] = sum;
            m.at[p - from] = at;
        }
    }
}

static __device__ void attend_row(const yard_attend_args &a, plain_shared &m, uint32_t row,
                                  uint32_t head)
{
    const uint32_t kv_head = head / a.n_shared, n_keys = (uint32_t)a.batch.position[row] + 1;
    const uint32_t first = a.window && n_keys > a.window ? n_keys - a.window : 0;
    float acc[COLS_A_THREAD] = {}, largest = -INFINITY, total = 0.0f;

    load_query(a.q0, row, head, m.query);
    load_query(a.q1, row, head, m.query + a.q0.dims);
    __syncthreads();
    for (uint32_t from = first; from < n_keys;) {
        const uint32_t page_end = (from / YARD_PAGE_TOKENS + 1) * YARD_PAGE_TOKENS;
        const uint32_t end = min(page_end, n_keys);
        float most = largest, shrink;
        score_page(a, m, row, kv_head, from, end);
        __syncthreads(); /* scores are there before they are read */
        for (uint32_t j = 0; j < end - from; j++)
            most = fmaxf(most, m.score[j]);
        shrink = expf(largest - most);
        largest = most;
        total *= shrink;
        for (int i = 0; i < COLS_A_THREAD; i++)
            acc[i] *= shrink;
        for (uint32_t j = 0; j < end - from; j++) {
            const float weight = expf(m.score[j] - largest);
            total += weight;
#pragma unroll
            for (int i = 0; i < COLS_A_THREAD; i++) {
                const uint32_t c = threadIdx.x + i * PLAIN_THREADS;
                if (c < a.n_v)
                    acc[i] = fmaf(weight,
                                  cached_value(a.cache, a.cached, a.kv_rank, m.at[j],
                                               a.value_first + kv_head * a.value_stride + c),
                                  acc[i]);
            }
        }
        __syncthreads(); /* .. and read before the next page's are written */
        from = end;
    }
    for (int i = 0; i < COLS_A_THREAD; i++) {
        const uint32_t c = threadIdx.x + i * PLAIN_THREADS;
        if (c < a.n_v)
            store_value(a.y.dtype, a.y.data, (size_t)row * a.y.ld + (size_t)head * a.n_v + c,
                        acc[i] / total);
    }
}

static __global__ void __launch_bounds__(PLAIN_THREADS)
    attend_f32_kernel(const __grid_constant__ yard_attend_args a)
{
    __shared__ plain_shared m;
    const uint64_t n_items = (uint64_t)*a.batch.n_tokens * a.n_heads;

    for (uint64_t i = blockIdx.x; i < n_items; i += gridDim.x) {
        const uint32_t row = (uint32_t)(i / a.n_heads);
        if (a.which == ATTEND_ALL_ROWS || a.batch.absorbed[row])
            attend_row(a, m, row, (uint32_t)(i % a.n_heads));
    }
}

static uint32_t clamp_blocks(uint64_t n)
{
    return n < PLAIN_MAX_BLOCKS ? (uint32_t)n : (uint32_t)PLAIN_MAX_BLOCKS;
}

static yard_status launched(const char *what, yard_error *err)
{
    const cudaError_t code = cudaGetLastError();

    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "%s: launch: %s", what, cudaGetErrorString(code));
    return YARD_OK;
}

yard_status yard_cuda_attend_launch(const yard_attend_args *a, uint32_t max_rows, void *stream,
                                    yard_error *err)
{
    const uint32_t n_blocks = clamp_blocks((uint64_t)max_rows * a->n_heads);

    if (a->q0.dims + a->q1.dims > PLAIN_MAX_DIMS || a->n_v > PLAIN_MAX_DIMS)
        return yard_fail(err, YARD_EINVAL, "attention: want heads of at most %d, got %u and %u",
                         PLAIN_MAX_DIMS, a->q0.dims + a->q1.dims, a->n_v);
    if (n_blocks == 0)
        return YARD_OK;
    attend_f32_kernel<<<n_blocks, PLAIN_THREADS, 0, (cudaStream_t)stream>>>(*a);
    return launched("attention", err);
}

/* ---- multi-head form over expanded latents --------------------------------------------------- */

struct expanded_args {
    yard_mla_prefill_args a;
    yard_batch batch;
    yard_latent_row cached;
    uint32_t tile; /* positions expanded at once; divides a page */
};

/* f32, in this order: latents [tile, rank], keys [tile, nope + rope], values [tile, v], and of the
 * eight rows: queries, scores, sums; then the largest score, the total and the shrink of each. */
struct expanded_shared {
    float *latent, *key, *value, *query, *score, *acc, *largest, *total, *shrink;
};

static __host__ __device__ size_t expanded_floats(const yard_mla_prefill_args &a, uint32_t tile)
{
    const uint32_t head_dim = a.nope_dims + a.rope_dims;

    return (size_t)tile * (a.kv_rank + head_dim + a.v_dims) +
           SPAN_ROWS * (head_dim + tile + a.v_dims + 3);
}

static __device__ expanded_shared lay_out(const yard_mla_prefill_args &a, uint32_t tile, float *at)
{
    const uint32_t head_dim = a.nope_dims + a.rope_dims;
    expanded_shared m;

    m.latent = at;
    m.key = m.latent + tile * a.kv_rank;
    m.value = m.key + tile * head_dim;
    m.query = m.value + tile * a.v_dims;
    m.score = m.query + SPAN_ROWS * head_dim;
    m.acc = m.score + SPAN_ROWS * tile;
    m.largest = m.acc + SPAN_ROWS * a.v_dims;
    m.total = m.largest + SPAN_ROWS;
    m.shrink = m.total + SPAN_ROWS;
    return m;
}

/* Latents of n positions from p0 on, rounded to FP8 where the weights are FP8 (which changes none
 * that an FP8 cache has); a warp a group. */
static __device__ void load_latents(const expanded_args &x, const expanded_shared &m, uint32_t row,
                                    uint32_t p0, uint32_t n)
{
    const yard_mla_prefill_args &a = x.a;
    const uint32_t warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const uint32_t n_groups = (a.kv_rank + YARD_GROUP - 1) / YARD_GROUP;

    for (uint32_t i = warp; i < n * n_groups; i += SPAN_THREADS / LANES) {
        const uint32_t j = i / n_groups, first = i % n_groups * YARD_GROUP;
        const uint32_t end = min(first + YARD_GROUP, a.kv_rank);
        const size_t at = cache_row(x.batch, row, p0 + j);
        float *to = m.latent + j * a.kv_rank, amax = 0.0f;
        for (uint32_t c = first + lane; c < end; c += LANES) {
            to[c] = cached_value(a.cache, x.cached, a.kv_rank, at, c);
            if (a.quantise)
                to[c] = bf16_round(to[c]);
            amax = fmaxf(amax, fabsf(to[c]));
        }
        if (!a.quantise)
            continue;
        for (int distance = LANES / 2; distance > 0; distance /= 2)
            amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, distance));
        const float scale = group_scale(amax, a.ue8m0), inverse = __frcp_rn(scale);
        for (uint32_t c = first + lane; c < end; c += LANES)
            if (to[c] != 0.0f)
                to[c] = e4m3_value(e4m3_from_f32(__fmul_rn(to[c], inverse))) * scale;
    }
}

/* Keys and values of one head. */
static __device__ void expand_tile(const expanded_args &x, const expanded_shared &m, uint32_t row,
                                   uint32_t head, uint32_t p0, uint32_t n)
{
    const yard_mla_prefill_args &a = x.a;
    const uint32_t n_out = a.nope_dims + a.v_dims, head_dim = a.nope_dims + a.rope_dims;

    for (uint32_t i = threadIdx.x; i < n * n_out; i += SPAN_THREADS) {
        const uint32_t j = i % n, o = i / n; /* neighbours share a row of weights */
        float sum = 0.0f;
        for (uint32_t c = 0; c < a.kv_rank; c++)
            sum = fmaf(m.latent[j * a.kv_rank + c], w_value(&a.kv_b, (size_t)head * n_out + o, c),
                       sum);
        if (a.y.dtype == YARD_BF16) /* what a projection would have stored */
            sum = bf16_round(sum);
        if (o < a.nope_dims)
            m.key[j * head_dim + o] = sum;
        else
            m.value[j * a.v_dims + o - a.nope_dims] = sum;
    }
    for (uint32_t i = threadIdx.x; i < n * a.rope_dims; i += SPAN_THREADS) {
        const uint32_t j = i / a.rope_dims, c = i % a.rope_dims;
        m.key[j * head_dim + a.nope_dims + c] = cached_value(
            a.cache, x.cached, a.kv_rank, cache_row(x.batch, row, p0 + j), a.kv_rank + c);
    }
}

/* Row r of the block's sees n_seen of the tile's positions; a warp a row. */
static __device__ void join_tile(const yard_mla_prefill_args &a, const expanded_shared &m,
                                 uint32_t tile, uint32_t r, uint32_t n_seen)
{
    const uint32_t lane = threadIdx.x % LANES, head_dim = a.nope_dims + a.rope_dims;
    float *score = m.score + r * tile, *acc = m.acc + r * a.v_dims;
    const float *query = m.query + r * head_dim;
    float most = m.largest[r], total = 0.0f;

    for (uint32_t j = 0; j < n_seen; j++) {
        float sum = 0.0f;
        for (uint32_t c = lane; c < head_dim; c += LANES)
            sum = fmaf(query[c], m.key[j * head_dim + c], sum);
        sum = sum_lanes(sum) * a.softmax_scale;
        most = fmaxf(most, sum);
        if (lane == 0)
            score[j] = sum;
    }
    __syncwarp();
    const float shrink = expf(m.largest[r] - most);
    for (uint32_t j = 0; j < n_seen; j++)
        total += expf(score[j] - most);
    for (uint32_t c = lane; c < a.v_dims; c += LANES) {
        float sum = acc[c] * shrink;
        for (uint32_t j = 0; j < n_seen; j++)
            sum = fmaf(expf(score[j] - most), m.value[j * a.v_dims + c], sum);
        acc[c] = sum;
    }
    __syncwarp();
    if (lane == 0) {
        m.largest[r] = most;
        m.total[r] = m.total[r] * shrink + total;
    }
}

/* Rows [row, row + n) are consecutive positions of one sequence. */
static __device__ void attend_span(const expanded_args &x, const expanded_shared &m, uint32_t row,
                                   uint32_t n, uint32_t head)
{
    const yard_mla_prefill_args &a = x.a;
    const uint32_t head_dim = a.nope_dims + a.rope_dims, r = threadIdx.x / LANES;
    const uint32_t position = (uint32_t)x.batch.position[row], n_keys = position + n;

    for (uint32_t i = threadIdx.x; i < n * head_dim; i += SPAN_THREADS)
        m.query[i] =
            plain_value(a.q.dtype, a.q.data,
                        (size_t)(row + i / head_dim) * a.q.ld + head * head_dim + i % head_dim);
    for (uint32_t i = threadIdx.x; i < n * a.v_dims; i += SPAN_THREADS)
        m.acc[i] = 0.0f;
    if (threadIdx.x < SPAN_ROWS) {
        m.largest[threadIdx.x] = -INFINITY;
        m.total[threadIdx.x] = 0.0f;
    }
    for (uint32_t p0 = 0; p0 < n_keys; p0 += x.tile) {
        const uint32_t n_here = min(x.tile, n_keys - p0);
        load_latents(x, m, row, p0, n_here);
        __syncthreads(); /* latents, and at first queries and sums, are there */
        expand_tile(x, m, row, head, p0, n_here);
        __syncthreads(); /* keys and values are there */
        if (r < n && position + r >= p0)
            join_tile(a, m, x.tile, r, min(n_here, position + r + 1 - p0));
        __syncthreads(); /* .. and read before the next tile's are written */
    }
    for (uint32_t i = threadIdx.x; i < n * a.v_dims; i += SPAN_THREADS)
        store_value(a.y.dtype, a.y.data,
                    (size_t)(row + i / a.v_dims) * a.y.ld + head * a.v_dims + i % a.v_dims,
                    m.acc[i] / m.total[i / a.v_dims]);
    __syncthreads(); /* sums are read before the next rows' are written */
}

static __global__ void __launch_bounds__(SPAN_THREADS)
    attend_expanded_f32_kernel(const __grid_constant__ expanded_args x)
{
    extern __shared__ float floats[];
    const expanded_shared m = lay_out(x.a, x.tile, floats);
    const yard_batch &b = x.batch;
    const uint32_t n_rows = (uint32_t)*b.n_tokens, head = blockIdx.y;

    for (uint32_t first = blockIdx.x * SPAN_ROWS; first < n_rows; first += gridDim.x * SPAN_ROWS) {
        const uint32_t end = min(first + SPAN_ROWS, n_rows);
        for (uint32_t row = first, next; row < end; row = next) {
            next = row + 1;
            if (b.absorbed[row])
                continue;
            while (next < end && b.seq[next] == b.seq[row] && !b.absorbed[next])
                next++;
            attend_span(x, m, row, next - row, head);
        }
    }
}

yard_status yard_cuda_attend_expanded_launch(const yard_mla_prefill_args *a, uint32_t max_rows,
                                             void *stream, yard_error *err)
{
    const uint32_t n_blocks = clamp_blocks(yard_ceil_div(max_rows, SPAN_ROWS));
    expanded_args x;
    size_t bytes;
    cudaError_t code;

    x.a = *a;
    x.batch = *a->batch;
    x.cached = yard_latent_row_of(a->cache.dtype, a->kv_rank, a->rope_dims);
    x.tile = YARD_PAGE_TOKENS;
    while (x.tile > 1 && expanded_floats(*a, x.tile) * sizeof(float) > MAX_SHARED_BYTES)
        x.tile /= 2;
    bytes = expanded_floats(*a, x.tile) * sizeof(float);
    if (bytes > MAX_SHARED_BYTES)
        return yard_fail(err, YARD_EINVAL, "mla_prefill: rank %u, heads %u+%u/%u: no kernel",
                         a->kv_rank, a->nope_dims, a->rope_dims, a->v_dims);
    if (n_blocks == 0)
        return YARD_OK;
    code = cudaFuncSetAttribute(attend_expanded_f32_kernel,
                                cudaFuncAttributeMaxDynamicSharedMemorySize, MAX_SHARED_BYTES);
    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "mla_prefill: %s", cudaGetErrorString(code));
    attend_expanded_f32_kernel<<<dim3(n_blocks, a->n_heads), SPAN_THREADS, bytes,
                                 (cudaStream_t)stream>>>(x);
    return launched("mla_prefill", err);
}
