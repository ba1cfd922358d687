/* The definition once more, on the device and from nothing but the seed. */
#include "ep/cuda/stress.h"

#include <cuda_fp8.h>

enum { LANES = 32, GROUP = 128, THREADS = 256 };

static __device__ uint64_t mix(uint64_t z)
{
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static __device__ uint64_t draw(const stress &s, uint32_t step, uint32_t group, uint32_t t,
                                uint32_t i)
{
    return mix(mix(s.seed ^ (uint64_t)step << 32 ^ group) ^ (uint64_t)t << 32 ^ i);
}

static __device__ uint32_t tokens_of(const stress &s, uint32_t step, uint32_t group)
{
    const uint32_t mood = (uint32_t)(draw(s, step, 1000, 0, 0) % 8);
    const uint32_t limit = s.limit[step % STRESS_STEPS], most = limit ? limit : s.max_tokens;

    if (s.full || mood == 1)
        return most;
    return mood == 0 ? 0 : (uint32_t)(draw(s, step, group, 1u << 20, 0) % (most + 1));
}

static __device__ float weight_at(const stress &s, uint32_t step, uint32_t group, uint32_t t,
                                  uint32_t k)
{
    return (float)(draw(s, step, group, t, 500 + k) >> 40) * 0x1p-24f - 0.3f;
}

/* Uniform, all on expert 0 first, half of them skipped, or all on rank 0. Distinct. */
static __device__ void experts_of(const stress &s, uint32_t step, uint32_t group, uint32_t t,
                                  int32_t *expert)
{
    const uint32_t mood = s.full ? 0 : (uint32_t)(draw(s, step, 1001, 0, 0) % 4);
    const uint32_t n = mood == 3 ? s.n_local : s.n_experts;

    for (uint32_t k = 0; k < s.top_k; k++) {
        bool again = true;
        expert[k] = mood == 1 && k == 0 ? 0 : (int32_t)(draw(s, step, group, t, 100 + k) % n);
        if (k >= n)
            expert[k] = -1;
        while (again && expert[k] >= 0) {
            again = false;
            for (uint32_t j = 0; j < k; j++)
                again |= expert[j] == expert[k];
            if (again)
                expert[k] = (expert[k] + 1) % (int32_t)n;
        }
    }
    for (uint32_t k = 0; mood == 2 && k < s.top_k; k++)
        if (draw(s, step, group, t, 200 + k) % 2)
            expert[k] = -1;
}

static __device__ float value_at(const stress &s, uint32_t step, uint32_t group, uint32_t t,
                                 uint32_t i)
{
    const uint32_t bits =
        __float_as_uint((float)(int64_t)draw(s, step, group, t, 1000 + i) * 0x1p-62f);

    return __uint_as_float((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

static __device__ uint16_t bf16_of(float x)
{
    const uint32_t bits = __float_as_uint(x);

    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/* A warp's four codes a lane of a group of 128 values, and the scale. */
static __device__ void codes_of(const stress &s, uint32_t step, uint32_t group, uint32_t t,
                                uint32_t col, uint32_t lane, uint8_t code[4], float *scale)
{
    float v[4], amax = 0;

    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t at = col + i * LANES + lane;
        v[i] = at < s.hidden ? value_at(s, step, group, t, at) : 0;
        amax = fmaxf(amax, fabsf(v[i]));
    }
    for (int d = 16; d > 0; d /= 2)
        amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, d));
    *scale = amax == 0 ? 1 : __fdiv_rn(amax, 448);
    for (uint32_t i = 0; i < 4; i++)
        code[i] =
            __nv_cvt_float_to_fp8(__fmul_rn(v[i], __frcp_rn(*scale)), __NV_SATFINITE, __NV_E4M3);
}

static __device__ float decode(uint8_t code, float scale)
{
    const __half_raw h = __nv_cvt_fp8_to_halfraw(code, __NV_E4M3);

    return __half2float(__half(h)) * scale;
}

static __device__ float apply_expert(float x, int32_t expert)
{
    const float y = fmaf(x, 1.0f + 0.125f * (float)(expert % 7), 0.01f * (float)expert);

    return __uint_as_float((uint32_t)bf16_of(y) << 16);
}

/* ---- inputs -------------------------------------------------------------------------------- */

static __global__ void inputs_kernel(stress s)
{
    const uint32_t t = blockIdx.x, step = *s.step;
    int32_t expert[STRESS_MAX_TOP_K];

    if (t == 0 && threadIdx.x == 0)
        *s.n_tokens = (int32_t)tokens_of(s, step, s.group);
    if (threadIdx.x == 0) {
        experts_of(s, step, s.group, t, expert);
        for (uint32_t k = 0; k < s.top_k; k++) {
            s.expert[t * s.top_k + k] = expert[k];
            s.weight[t * s.top_k + k] = weight_at(s, step, s.group, t, k);
        }
    }
    for (uint32_t i = threadIdx.x; i < s.hidden; i += blockDim.x) {
        s.x[(size_t)t * s.hidden + i] = bf16_of(value_at(s, step, s.group, t, i));
        s.y[(size_t)t * s.hidden + i] = 12345;
    }
    for (uint32_t e = threadIdx.x; t == 0 && e < s.n_local; e += blockDim.x)
        s.count[e] = -7;
}

cudaError_t stress_inputs(const stress *s, cudaStream_t stream)
{
    inputs_kernel<<<s->max_tokens, THREADS, 0, stream>>>(*s);
    return cudaGetLastError();
}

/* ---- dispatch ------------------------------------------------------------------------------ */

/* A block a token: its rows' places from the routing of all, then bytes, scales and expert_y. */
static __global__ void experts_kernel(stress s)
{
    const uint32_t g = blockIdx.x / s.max_tokens, t = blockIdx.x % s.max_tokens, step = *s.step;
    const uint32_t lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    __shared__ uint32_t count[256], before[256];
    __shared__ int32_t row[STRESS_MAX_TOP_K], expert[STRESS_MAX_TOP_K];

    for (uint32_t e = threadIdx.x; e < 256; e += blockDim.x)
        count[e] = before[e] = 0;
    __syncthreads();
    for (uint32_t q = threadIdx.x; q < s.dp * s.max_tokens; q += blockDim.x) {
        int32_t other[STRESS_MAX_TOP_K];
        if (q % s.max_tokens >= tokens_of(s, step, q / s.max_tokens))
            continue;
        experts_of(s, step, q / s.max_tokens, q % s.max_tokens, other);
        for (uint32_t k = 0; k < s.top_k; k++) {
            const int32_t e = other[k] - (int32_t)(s.rank * s.n_local);
            if (other[k] < 0 || e < 0 || e >= (int32_t)s.n_local)
                continue;
            atomicAdd(&count[e], 1u);
            if (q < blockIdx.x)
                atomicAdd(&before[e], 1u);
        }
    }
    __syncthreads();
    for (uint32_t e = threadIdx.x; blockIdx.x == 0 && e < s.n_local; e += blockDim.x)
        if (s.count[e] != (int32_t)count[e])
            atomicAdd(&s.n_wrong[2], 1u);
    if (t >= tokens_of(s, step, g))
        return;
    if (threadIdx.x == 0) {
        experts_of(s, step, g, t, expert);
        for (uint32_t k = 0; k < s.top_k; k++) {
            const int32_t e = expert[k] - (int32_t)(s.rank * s.n_local);
            row[k] = -1;
            if (expert[k] < 0 || e < 0 || e >= (int32_t)s.n_local)
                continue;
            row[k] = (int32_t)before[e];
            for (int32_t i = 0; i < e; i++)
                row[k] += (int32_t)((count[i] + s.row_align - 1) / s.row_align * s.row_align);
            if (s.row_index[row[k]] != (int32_t)blockIdx.x)
                atomicAdd(&s.n_wrong[2], 1u);
        }
    }
    __syncthreads();
    for (uint32_t col = warp * GROUP; col < s.hidden; col += blockDim.x / LANES * GROUP) {
        uint8_t code[4];
        float scale;
        codes_of(s, step, g, t, col, lane, code, &scale);
        for (uint32_t k = 0; k < s.top_k; k++) {
            if (row[k] < 0)
                continue;
            const size_t at = (size_t)row[k] * s.hidden + col;
            const size_t x_row = s.in_place ? blockIdx.x : (uint32_t)row[k];
            const uint8_t *x = s.expert_x + x_row * s.pitch_bytes + col;
            const uint8_t *scales = (const uint8_t *)s.expert_x_scale + x_row * s.scale_pitch_bytes;
            if (lane == 0 && ((const float *)scales)[col / GROUP] != scale)
                atomicAdd(&s.n_wrong[1], 1u);
            for (uint32_t i = 0; i < 4; i++) {
                const uint32_t c = i * LANES + lane;
                if (col + c >= s.hidden)
                    continue;
                if (x[c] != code[i])
                    atomicAdd(&s.n_wrong[0], 1u);
                s.expert_y[at + c] = bf16_of(apply_expert(decode(code[i], scale), expert[k]));
            }
        }
    }
}

cudaError_t stress_experts(const stress *s, cudaStream_t stream)
{
    experts_kernel<<<s->dp * s->max_tokens, THREADS, 0, stream>>>(*s);
    return cudaGetLastError();
}

/* ---- combine ------------------------------------------------------------------------------- */

static __global__ void results_kernel(stress s)
{
    const uint32_t t = blockIdx.x, step = *s.step;
    const uint32_t lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    __shared__ int32_t expert[STRESS_MAX_TOP_K];

    if (t >= tokens_of(s, step, s.group))
        return;
    if (threadIdx.x == 0)
        experts_of(s, step, s.group, t, expert);
    __syncthreads();
    for (uint32_t col = warp * GROUP; col < s.hidden; col += blockDim.x / LANES * GROUP) {
        uint8_t code[4];
        float scale;
        codes_of(s, step, s.group, t, col, lane, code, &scale);
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t c = col + i * LANES + lane;
            float sum = 0;
            for (uint32_t r = 0; r < (s.partial ? s.n_ranks : 1); r++) {
                float part = s.partial ? 0 : sum;
                for (uint32_t k = 0; k < s.top_k; k++)
                    if (expert[k] >= 0 && (!s.partial || expert[k] / s.n_local == r))
                        part = fmaf(apply_expert(decode(code[i], scale), expert[k]),
                                    weight_at(s, step, s.group, t, k), part);
                sum = s.partial ? sum + __uint_as_float((uint32_t)bf16_of(part) << 16) : part;
            }
            if (c < s.hidden && s.y[(size_t)t * s.hidden + c] != sum)
                atomicAdd(&s.n_wrong[3], 1u);
        }
    }
}

cudaError_t stress_results(const stress *s, cudaStream_t stream)
{
    results_kernel<<<s->max_tokens, THREADS, 0, stream>>>(*s);
    return cudaGetLastError();
}

static __global__ void next_kernel(stress s)
{
    ++*s.step;
}

cudaError_t stress_next(const stress *s, cudaStream_t stream)
{
    next_kernel<<<1, 1, 0, stream>>>(*s);
    return cudaGetLastError();
}
