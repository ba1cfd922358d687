/* mla_expand_kv: keys and values of one head from cached latents, 64 positions at a time, by two
 * warpgroups of a block; the blocks of a cluster take tiles by turns. */
#ifndef YARD_OPS_CUDA_MLA_EXPAND_CUH
#define YARD_OPS_CUDA_MLA_EXPAND_CUH

#include "ops/cuda/mla_prefill.h"
#include "ops/cuda/quantise.cuh"
#include "ops/cuda/softmax.cuh"
#include "ops/cuda/wgmma_attend.cuh"

enum {
    EXPAND_THREADS = 256,
    EXPAND_ROWS = 64,
    EXPAND_BOXES = 8,          /* of weights that lie in shared memory */
    EXPAND_BOX_BYTES = 16384,  /* 128 rows of 128 bytes */
    EXPAND_CHUNK_BYTES = 8192, /* 64 positions, 128 bytes each */
    EXPAND_X_AT = EXPAND_BOXES * EXPAND_BOX_BYTES,
    EXPAND_SCALE_AT = EXPAND_X_AT + EXPAND_ROWS * PREFILL_RANK * 2,
    EXPAND_BYTES = EXPAND_SCALE_AT + EXPAND_ROWS * (PREFILL_RANK / YARD_GROUP) * 4,
    EXPAND_BARRIER = 2, /* named */
};

/* n positions of a sequence from `first` on; row of the page table. */
struct expand_range {
    const int32_t *pages;
    uint32_t first, n;
    size_t slot; /* first row of the workspace */
};

static __device__ __forceinline__ size_t cached_row_of(const expand_range &r, uint32_t i)
{
    const uint32_t p = r.first + i;

    return (size_t)r.pages[p / YARD_PAGE_TOKENS] * YARD_PAGE_TOKENS + p % YARD_PAGE_TOKENS;
}

static __device__ __forceinline__ const uint16_t *latent_of(const yard_prefill_task &t,
                                                            const expand_range &r, uint32_t i)
{
    return (const uint16_t *)t.cache.data + cached_row_of(r, i) * t.cache.width;
}

/* The same of an FP8 cache. */
static __device__ __forceinline__ const uint8_t *codes_of(const yard_prefill_task &t,
                                                          const expand_range &r, uint32_t i)
{
    return (const uint8_t *)t.cache.data + cached_row_of(r, i) * PREFILL_CODES_BYTES;
}

static __device__ __forceinline__ uint32_t e4m3_pair(uint32_t pair, float inverse)
{
    float lo = __uint_as_float(pair << 16), hi = __uint_as_float(pair & 0xffff0000u);
    uint16_t code;

    /* a scale below 2^-128 has no finite inverse; zeros stay zeros */
    lo = lo == 0.0f ? lo : __fmul_rn(lo, inverse);
    hi = hi == 0.0f ? hi : __fmul_rn(hi, inverse);
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(code) : "f"(hi), "f"(lo));
    return code;
}

static __device__ __forceinline__ uint32_t larger_pair(uint32_t a, uint32_t b)
{
    return __vmaxu2(a & 0x7fff7fffu, b & 0x7fff7fffu);
}

/* Latents of 64 positions, rounded to FP8 as yard_ops.quantise does: half a warp takes 128 of a
 * position. Zeros beyond the range. */
static __device__ __forceinline__ void load_rounded(const yard_prefill_task &t,
                                                    const expand_range &r, uint8_t *shared,
                                                    uint32_t tile, uint32_t thread)
{
    enum { AT_ONCE = 8, HALVES = EXPAND_THREADS / 16, GROUPS = PREFILL_RANK / YARD_GROUP };
    const uint32_t lane = thread % 16;
    float *scales = (float *)(shared + EXPAND_SCALE_AT);

    for (uint32_t item = thread / 16; item < EXPAND_ROWS * GROUPS; item += HALVES * AT_ONCE) {
        uint4 raw[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const uint32_t at = item + i * HALVES, row = at / GROUPS, group = at % GROUPS;
            const uint32_t p = tile * EXPAND_ROWS + row;
            raw[i] = make_uint4(0, 0, 0, 0);
            if (p < r.n)
                raw[i] = *(const uint4 *)(latent_of(t, r, p) + group * YARD_GROUP + lane * 8);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const uint32_t at = item + i * HALVES, row = at / GROUPS, group = at % GROUPS;
            uint32_t pair =
                larger_pair(larger_pair(raw[i].x, raw[i].y), larger_pair(raw[i].z, raw[i].w));
#pragma unroll
            for (int distance = 8; distance > 0; distance /= 2)
                pair = larger_pair(pair, __shfl_xor_sync(0xffffffffu, pair, distance));
            const float scale =
                group_scale(__uint_as_float(max(pair << 16, pair & 0xffff0000u)), t.ue8m0);
            const float inverse = __frcp_rn(scale);
            *(uint2 *)(shared + EXPAND_X_AT + group * EXPAND_CHUNK_BYTES + row * 128 +
                       (lane / 2 ^ row % 8) * 16 + lane % 2 * 8) =
                make_uint2(e4m3_pair(raw[i].x, inverse) | e4m3_pair(raw[i].y, inverse) << 16,
                           e4m3_pair(raw[i].z, inverse) | e4m3_pair(raw[i].w, inverse) << 16);
            if (lane == 0)
                scales[row * GROUPS + group] = scale;
        }
    }
}

/* The same of an FP8 cache, which has them rounded. */
static __device__ __forceinline__ void load_codes(const yard_prefill_task &t, const expand_range &r,
                                                  uint8_t *shared, uint32_t tile, uint32_t thread)
{
    enum { PIECES = PREFILL_RANK / 16, GROUPS = PREFILL_RANK / YARD_GROUP };

#pragma unroll 8
    for (uint32_t i = thread; i < EXPAND_ROWS * PIECES; i += EXPAND_THREADS) {
        const uint32_t row = i / PIECES, piece = i % PIECES, p = tile * EXPAND_ROWS + row;
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (p < r.n)
            raw = *(const uint4 *)(codes_of(t, r, p) + piece * 16);
        *(uint4 *)(shared + EXPAND_X_AT + piece / 8 * EXPAND_CHUNK_BYTES + row * 128 +
                   (piece % 8 ^ row % 8) * 16) = raw;
    }
    if (thread < EXPAND_ROWS) {
        const uint32_t p = tile * EXPAND_ROWS + thread;
        float4 scales = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
        if (p < r.n)
            scales = *(const float4 *)(codes_of(t, r, p) + PREFILL_SCALE_AT);
        ((float4 *)(shared + EXPAND_SCALE_AT))[thread] = scales;
    }
}

/* The values of an FP8 cache. */
static __device__ __forceinline__ void load_widened(const yard_prefill_task &t,
                                                    const expand_range &r, uint8_t *shared,
                                                    uint32_t tile, uint32_t thread)
{
    enum { PIECES = PREFILL_RANK / 8 };

#pragma unroll 4
    for (uint32_t i = thread; i < EXPAND_ROWS * PIECES; i += EXPAND_THREADS) {
        const uint32_t row = i / PIECES, piece = i % PIECES, p = tile * EXPAND_ROWS + row;
        uint4 wide = make_uint4(0, 0, 0, 0);
        if (p < r.n) {
            const uint8_t *from = codes_of(t, r, p);
            const uint2 raw = *(const uint2 *)(from + piece * 8);
            const float scale = ((const float *)(from + PREFILL_SCALE_AT))[piece * 8 / YARD_GROUP];
            wide = make_uint4(widen_pair(raw.x, scale), widen_pair(raw.x >> 16, scale),
                              widen_pair(raw.y, scale), widen_pair(raw.y >> 16, scale));
        }
        *(uint4 *)(shared + EXPAND_X_AT + piece / 8 * EXPAND_CHUNK_BYTES + row * 128 +
                   (piece % 8 ^ row % 8) * 16) = wide;
    }
}

/* Those of a bf16 cache. */
static __device__ __forceinline__ void load_plain(const yard_prefill_task &t, const expand_range &r,
                                                  uint8_t *shared, uint32_t tile, uint32_t thread)
{
    enum { PIECES = PREFILL_RANK / 8 };

#pragma unroll 8
    for (uint32_t i = thread; i < EXPAND_ROWS * PIECES; i += EXPAND_THREADS) {
        const uint32_t row = i / PIECES, piece = i % PIECES, p = tile * EXPAND_ROWS + row;
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (p < r.n)
            raw = *(const uint4 *)(latent_of(t, r, p) + piece * 8);
        *(uint4 *)(shared + EXPAND_X_AT + piece / 8 * EXPAND_CHUNK_BYTES + row * 128 +
                   (piece % 8 ^ row % 8) * 16) = raw;
    }
}

/* A warpgroup's columns of 64 positions. */
template <int N>
static __device__ __forceinline__ void store_columns(const float (&d)[N], uint16_t *to, uint32_t ld)
{
    const uint32_t row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;

    store_row<0>(d, 1.0f, to + (size_t)row * ld, true);
    store_row<1>(d, 1.0f, to + (size_t)(row + 8) * ld, true);
}

static __device__ __forceinline__ void
copy_rotated(const yard_prefill_task &t, const expand_range &r, uint32_t tile, uint32_t thread)
{
#pragma unroll
    for (uint32_t i = thread; i < EXPAND_ROWS * 8; i += EXPAND_THREADS) {
        const uint32_t p = tile * EXPAND_ROWS + i / 8;
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (p < r.n)
            raw = t.cache.dtype == YARD_FP8_E4M3
                      ? *(const uint4 *)(codes_of(t, r, p) + PREFILL_ROPE_AT + i % 8 * 16)
                      : *(const uint4 *)(latent_of(t, r, p) + PREFILL_RANK + i % 8 * 8);
        *(uint4 *)(t.keys + (r.slot + p) * PREFILL_KEY + PREFILL_NOPE + i % 8 * 8) = raw;
    }
}

/* FP8: a warpgroup has 128 columns, keys or values; sums are promoted every 128 of K. */
static __device__ __forceinline__ void multiply_rounded(const yard_prefill_task &t,
                                                        const expand_range &r, uint8_t *shared,
                                                        uint32_t tile, uint32_t head, uint32_t half)
{
    enum { GROUPS = PREFILL_RANK / YARD_GROUP };
    const uint32_t row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const float *scale = (const float *)(shared + EXPAND_SCALE_AT) + row * GROUPS;
    const float *w_scale = t.w_scale + (size_t)(head * 2 + half) * t.w_scale_ld;
    const uint32_t base = shared_address(shared);
    float acc[64], sum[64];

#pragma unroll
    for (int i = 0; i < 64; i++)
        sum[i] = 0.0f;
#pragma unroll 1
    for (uint32_t k = 0; k < GROUPS; k++) {
        const uint64_t x = wgmma_descriptor(base + EXPAND_X_AT + k * EXPAND_CHUNK_BYTES);
        const uint64_t w = wgmma_descriptor(base + (half * GROUPS + k) * EXPAND_BOX_BYTES);
        const float ws = __ldg(w_scale + k);
        const float s0 = scale[k] * ws, s1 = scale[8 * GROUPS + k] * ws;
        pin(acc);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++)
            wgmma<true, 128>::issue(acc, x + 2 * i, w + 2 * i, i > 0);
        wgmma_commit();
        wgmma_wait<0>();
        pin(acc);
#pragma unroll
        for (int i = 0; i < 64; i++)
            sum[i] = fmaf(acc[i], i % 4 < 2 ? s0 : s1, sum[i]);
    }
    const size_t first = r.slot + tile * EXPAND_ROWS;
    if (half == 0)
        store_columns(sum, t.keys + first * PREFILL_KEY, PREFILL_KEY);
    else
        store_columns(sum, t.values + first * PREFILL_V, PREFILL_V);
}

/* bf16: keys in one pass, values in another, a warpgroup has 64 columns. */
static __device__ __forceinline__ void multiply_plain(const yard_prefill_task &t,
                                                      const expand_range &r, uint8_t *shared,
                                                      uint32_t tile, uint32_t pass, uint32_t half)
{
    const uint32_t base = shared_address(shared);
    float acc[32];

    pin(acc);
    wgmma_fence();
#pragma unroll 4
    for (uint32_t k = 0; k < PREFILL_RANK / 64; k++) {
        const uint64_t x = wgmma_descriptor(base + EXPAND_X_AT + k * EXPAND_CHUNK_BYTES);
        const uint64_t w = wgmma_descriptor(base + k * EXPAND_BOX_BYTES + half * 64 * 128);
#pragma unroll
        for (int i = 0; i < 4; i++)
            wgmma<false, 64>::issue(acc, x + 2 * i, w + 2 * i, k > 0 || i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(acc);
    const size_t first = r.slot + tile * EXPAND_ROWS;
    if (pass == 0)
        store_columns(acc, t.keys + first * PREFILL_KEY + half * 64, PREFILL_KEY);
    else
        store_columns(acc, t.values + first * PREFILL_V + half * 64, PREFILL_V);
}

/* Whole tiles of 128 positions are written. thread: below 256; w_bar: a barrier of one arrival, in
 * phase *w_phase. */
static __device__ __forceinline__ void expand(const yard_tensor_map *map,
                                              const yard_prefill_task &t, const expand_range &r,
                                              uint8_t *shared, uint32_t head, uint32_t thread,
                                              uint32_t rank, uint32_t n_ranks, uint32_t w_bar,
                                              uint32_t *w_phase)
{
    const uint32_t half = __shfl_sync(0xffffffffu, thread / 128, 0);
    const uint32_t n_tiles = (r.n + 127) / 128 * 2, base = shared_address(shared);
    const bool codes = t.cache.dtype == YARD_FP8_E4M3;

    for (uint32_t pass = 0; pass < (t.fp8 ? 1u : 2u); pass++) {
        if (thread == 0) {
            const uint32_t row = t.w_first + head * PREFILL_OUT + pass * PREFILL_NOPE;
            barrier_expect(w_bar, EXPAND_BOXES * EXPAND_BOX_BYTES);
            for (uint32_t i = 0; i < EXPAND_BOXES; i++)
                if (t.fp8)
                    tma_load(base + i * EXPAND_BOX_BYTES, map, i % 4 * 128, row + i / 4 * 128,
                             w_bar);
                else
                    tma_load(base + i * EXPAND_BOX_BYTES, map, i * 64, row, w_bar);
        }
        __syncwarp();
        for (uint32_t tile = rank, n = 0; tile < n_tiles; tile += n_ranks, n++) {
            if (t.fp8 && codes)
                load_codes(t, r, shared, tile, thread);
            else if (t.fp8)
                load_rounded(t, r, shared, tile, thread);
            else if (codes)
                load_widened(t, r, shared, tile, thread);
            else
                load_plain(t, r, shared, tile, thread);
            if (pass == 0)
                copy_rotated(t, r, tile, thread);
            fence_async_shared(); /* wgmma reads what these stores wrote */
            named_sync(EXPAND_BARRIER, EXPAND_THREADS);
            if (n == 0)
                barrier_wait(w_bar, *w_phase);
            if (t.fp8)
                multiply_rounded(t, r, shared, tile, head, half);
            else
                multiply_plain(t, r, shared, tile, pass, half);
            named_sync(EXPAND_BARRIER, EXPAND_THREADS); /* the tile is read before the next one */
        }
        if (rank >= n_tiles)
            barrier_wait(w_bar, *w_phase); /* nobody goes on while a copy is under way */
        *w_phase ^= 1;
    }
}

#endif
