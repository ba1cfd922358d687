/* The matrix product kernel, second half: the consumers, and the kernel itself. */
#ifndef YARD_OPS_CUDA_GEMM_CONSUME_CUH
#define YARD_OPS_CUDA_GEMM_CONSUME_CUH

#include "ops/cuda/gemm.cuh"

/* Which part of the block's work is this thread's. */
struct gemm_thread {
    int warpgroup, warp, lane; /* warp: in its warpgroup */
    int consumer;              /* number among all consumer threads */
    uint32_t store;            /* its warp's buffer in shared memory */
};

/* ---- one stage --------------------------------------------------------------------------- */

/* sum += acc times the scales of the thread's elements. */
template <class S, int WIDTH>
__device__ __forceinline__ void promote(float (&sum)[WIDTH / 2], const float (&acc)[WIDTH / 2],
                                        const float *scales, const gemm_thread &me)
{
    if constexpr (S::SWAPPED) {
        const float4 *table = (const float4 *)scales + me.lane % 4;
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j += 2) {
            const float4 s = table[j * 2];
            sum[4 * j] = fmaf(acc[4 * j], s.x, sum[4 * j]);
            sum[4 * j + 1] = fmaf(acc[4 * j + 1], s.y, sum[4 * j + 1]);
            sum[4 * j + 2] = fmaf(acc[4 * j + 2], s.x, sum[4 * j + 2]);
            sum[4 * j + 3] = fmaf(acc[4 * j + 3], s.y, sum[4 * j + 3]);
            if (j + 1 < WIDTH / 8) {
                sum[4 * j + 4] = fmaf(acc[4 * j + 4], s.z, sum[4 * j + 4]);
                sum[4 * j + 5] = fmaf(acc[4 * j + 5], s.w, sum[4 * j + 5]);
                sum[4 * j + 6] = fmaf(acc[4 * j + 6], s.z, sum[4 * j + 6]);
                sum[4 * j + 7] = fmaf(acc[4 * j + 7], s.w, sum[4 * j + 7]);
            }
        }
    } else {
        const float *row = scales + me.warpgroup * 64 + me.warp * 16 + me.lane / 4;
        const float s0 = row[0], s1 = row[8];
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i += 4) {
            sum[i] = fmaf(acc[i], s0, sum[i]);
            sum[i + 1] = fmaf(acc[i + 1], s0, sum[i + 1]);
            sum[i + 2] = fmaf(acc[i + 2], s1, sum[i + 2]);
            sum[i + 3] = fmaf(acc[i + 3], s1, sum[i + 3]);
        }
    }
}

/* Starts the products of the next stage. keep: acc goes on from what it holds. */
template <class S, int WIDTH>
__device__ __forceinline__ void issue(float (&acc)[WIDTH / 2], const gemm_shared<S> &m,
                                      const gemm_ring<S> &ring, const gemm_thread &me, bool keep)
{
    const uint32_t mine = me.warpgroup * 64 * GEMM_BLOCK_BYTES;
    uint64_t a, b;

    barrier_wait(m.full + ring.stage * 8, ring.parity);
    if constexpr (S::SWAPPED) {
        a = wgmma_descriptor(m.w(ring.stage) + mine);
        b = wgmma_descriptor(m.x(ring.stage));
    } else {
        a = wgmma_descriptor(m.x(ring.stage) + mine);
        b = wgmma_descriptor(m.w(ring.stage));
    }
    pin(acc);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < GEMM_BLOCK_BYTES / 32; i++)
        wgmma<S::FP8, WIDTH>::issue(acc, a + 2 * i, b + 2 * i, keep || i > 0);
    wgmma_commit();
}

/* The warp has read all it wanted of the stage. */
template <class S>
__device__ __forceinline__ void release(const gemm_shared<S> &m, int stage, const gemm_thread &me)
{
    const uint32_t empty = m.empty + stage * 8;

    __syncwarp();
    if (S::CLUSTER > 1) {
        if (me.lane < S::CLUSTER)
            barrier_arrive_at(empty, me.lane);
    } else if (me.lane == 0) {
        barrier_arrive(empty);
    }
}

/* ---- a tile's loop over K ---------------------------------------------------------------- */

template <class S, int WIDTH>
__device__ __forceinline__ void one_block(float (&sum)[WIDTH / 2], const gemm_shared<S> &m,
                                          gemm_ring<S> &ring, const gemm_thread &me)
{
    float acc[WIDTH / 2];

    issue<S, WIDTH>(acc, m, ring, me, false);
    wgmma_wait<0>();
    pin(acc);
    promote<S, WIDTH>(sum, acc, m.scales + ring.stage * S::SCALES, me);
    release(m, ring.stage, me);
    ring.advance();
}

/* Two sets of accumulators: one is promoted while the products of the other run. Four blocks of K a
 * turn, and nothing in flight from one turn to the next: the compiler would serialise all of it. */
template <class S, int WIDTH>
__device__ __forceinline__ void four_blocks(float (&sum)[WIDTH / 2], const gemm_shared<S> &m,
                                            gemm_ring<S> &ring, const gemm_thread &me)
{
    float even[WIDTH / 2], odd[WIDTH / 2];
    int stage;

    issue<S, WIDTH>(even, m, ring, me, false);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        stage = ring.stage;
        ring.advance();
        issue<S, WIDTH>(odd, m, ring, me, false);
        wgmma_wait<1>();
        pin(even);
        promote<S, WIDTH>(sum, even, m.scales + stage * S::SCALES, me);
        release(m, stage, me);
        stage = ring.stage;
        ring.advance();
        if (i + 2 < 4) {
            issue<S, WIDTH>(even, m, ring, me, false);
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        pin(odd);
        promote<S, WIDTH>(sum, odd, m.scales + stage * S::SCALES, me);
        release(m, stage, me);
    }
}

template <class S, int WIDTH>
__device__ __forceinline__ void multiply(float (&sum)[WIDTH / 2], const gemm_tile &t,
                                         const gemm_shared<S> &m, gemm_ring<S> &ring,
                                         const gemm_thread &me)
{
    int k = t.k0;

#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++)
        sum[i] = 0.0f;
    if constexpr (!S::FP8) { /* nothing to scale: the sums are the accumulators */
        for (; k < t.k1; k++) {
            issue<S, WIDTH>(sum, m, ring, me, true);
            wgmma_wait<0>();
            pin(sum);
            release(m, ring.stage, me);
            ring.advance();
        }
        return;
    }
    /* three sets of more than 48 registers do not fit in swapped form, with its scales */
    if constexpr (S::PAIRED && !(S::SWAPPED && WIDTH > 96)) {
        for (; (t.k1 - k) % 4; k++)
            one_block<S, WIDTH>(sum, m, ring, me);
        for (; k < t.k1; k += 4)
            four_blocks<S, WIDTH>(sum, m, ring, me);
    } else {
        for (; k < t.k1; k++)
            one_block<S, WIDTH>(sum, m, ring, me);
    }
}

/* A warpgroup whose rows of x all lie beyond the tile's last one: no product, no energy. */
template <class S>
__device__ __forceinline__ void skip(const gemm_tile &t, const gemm_shared<S> &m,
                                     gemm_ring<S> &ring, const gemm_thread &me)
{
    for (int k = t.k0; k < t.k1; k++) {
        barrier_wait(m.full + ring.stage * 8, ring.parity);
        release(m, ring.stage, me);
        ring.advance();
    }
}

/* ---- split K ----------------------------------------------------------------------------- */

/* Adds up the pieces of a cut tile. Every thread block but the last one to come leaves its sums in
 * memory; the last adds them all, in the order of K whoever it is, and has the result. Elements lie
 * where the same thread of any block finds them again. False: another block goes on. */
template <class S, int WIDTH>
__device__ __forceinline__ bool join_pieces(float (&sum)[WIDTH / 2], const yard_gemm_args &a,
                                            const gemm_shared<S> &m, const gemm_tile &t,
                                            const gemm_thread &me)
{
    const uint32_t row_tiles = split_walk<S>::row_tiles_of(a, m.count[0]);
    const uint32_t n_units = a.n_tiles * row_tiles * a.n_blocks;
    const gemm_share share(n_units, split_walk<S>::n_workers(n_units, a.min_blocks, gridDim.x));
    const uint32_t begin = t.unit * a.n_blocks;
    const uint32_t first = share.worker_of(begin), last = share.worker_of(begin + a.n_blocks - 1);
    const size_t slot_floats = (size_t)GEMM_TILE_ROWS * S::WIDTH;
    /* a worker has at most two cut tiles: the one it begins in, slot 0, and the one it ends in */
    const auto slot = [&](uint32_t worker) {
        const uint32_t idx = 2 * worker + (share.begin(worker) >= begin ? 0 : 1);
        return (float4 *)(a.partial + idx * slot_floats) + me.consumer;
    };

    float4 *mine = slot(blockIdx.x);
#pragma unroll
    for (int i = 0; i < WIDTH / 8; i++)
        mine[i * S::CONSUMERS] =
            make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
    /* the sums are in memory before the count says so, and the count is read before the sums */
    __threadfence();
    named_sync(1, S::CONSUMERS);
    if (me.consumer == 0)
        *m.word = atomicAdd(&a.arrivals[t.unit], 1);
    named_sync(1, S::CONSUMERS);
    if (*m.word != last - first)
        return false;
    __threadfence();
    if (me.consumer == 0)
        a.arrivals[t.unit] = 0;
#pragma unroll
    for (int i = 0; i < WIDTH / 8; i++) {
        float4 total = __ldcg(slot(first) + i * S::CONSUMERS);
        for (uint32_t worker = first + 1; worker <= last; worker++) {
            const float4 piece = __ldcg(slot(worker) + i * S::CONSUMERS);
            total.x += piece.x;
            total.y += piece.y;
            total.z += piece.z;
            total.w += piece.w;
        }
        sum[4 * i] = total.x;
        sum[4 * i + 1] = total.y;
        sum[4 * i + 2] = total.z;
        sum[4 * i + 3] = total.w;
    }
    return true;
}

/* ---- results ----------------------------------------------------------------------------- */

static __device__ __forceinline__ void store_one(const yard_gemm_args &a, const gemm_tile &t,
                                                 int row, int col, float value)
{
    const size_t at = (size_t)(t.row + row) * a.y_ld + col;

    if (row >= t.n_rows || col >= (int)a.n_out)
        return;
    if (a.y_f32)
        ((float *)a.y)[at] = value;
    else
        ((uint16_t *)a.y)[at] = (uint16_t)(pack_bf16(value, 0.0f) & 0xffffu);
}

/* 16 bytes of bf16 to one row of y; n_out is a multiple of 8 here. */
static __device__ __forceinline__ void store_eight(const yard_gemm_args &a, const gemm_tile &t,
                                                   int row, int col, const void *from)
{
    if (row < t.n_rows && col < (int)a.n_out)
        *(uint4 *)((uint16_t *)a.y + (size_t)(t.row + row) * a.y_ld + col) = *(const uint4 *)from;
}

/* Swapped: 16 columns of y (rows of w) by 16 rows at a time through the warp's buffer, transposed.
 * The 16-byte halves of a buffer row are exchanged in every other four rows: no bank conflicts. */
template <class S, int WIDTH>
__device__ __forceinline__ void store_swapped(const float (&sum)[WIDTH / 2],
                                              const yard_gemm_args &a, const gemm_tile &t,
                                              const gemm_thread &me, char *buffer)
{
    const int col = t.w_tile * GEMM_TILE_ROWS + me.warpgroup * 64 + me.warp * 16;

    if (!a.y_aligned) {
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++)
            store_one(a, t, i / 4 * 8 + me.lane % 4 * 2 + i % 2, col + me.lane / 4 + i % 4 / 2 * 8,
                      sum[i]);
        return;
    }
#pragma unroll
    for (int j = 0; j < WIDTH / 8; j += 2) {
        char *half = buffer + j / 2 % 2 * 512;
        const int to = me.lane % 8 + me.lane / 16 * 8, side = me.lane / 8 % 2;
        const uint32_t address =
            me.store + j / 2 % 2 * 512 + to * 32 + ((side ^ (to / 4 % 2)) * 16);
        const int from = me.lane / 2, from_side = me.lane % 2;
        constexpr int LAST = WIDTH / 8 - 1;
        const bool two = j < LAST;

        store_matrix_transposed(address, pack_bf16(sum[4 * j], sum[4 * j + 1]),
                                pack_bf16(sum[4 * j + 2], sum[4 * j + 3]),
                                two ? pack_bf16(sum[4 * (j + two)], sum[4 * (j + two) + 1]) : 0,
                                two ? pack_bf16(sum[4 * (j + two) + 2], sum[4 * (j + two) + 3])
                                    : 0);
        __syncwarp();
        if (two || from < 8)
            store_eight(a, t, j * 8 + from, col + from_side * 8,
                        half + from * 32 + (from_side ^ (from / 4 % 2)) * 16);
    }
    __syncwarp(); /* the buffer is free for the next tile */
}

/* Rows of x on M: 16 rows by 32 columns at a time through the warp's buffer. */
template <class S, int WIDTH>
__device__ __forceinline__ void store_rows(const float (&sum)[WIDTH / 2], const yard_gemm_args &a,
                                           const gemm_tile &t, const gemm_thread &me, char *buffer)
{
    const int row = me.warpgroup * 64 + me.warp * 16, col = t.w_tile * GEMM_TILE_ROWS;

    if (!a.y_aligned) {
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++)
            store_one(a, t, row + me.lane / 4 + i % 4 / 2 * 8,
                      col + i / 4 * 8 + me.lane % 4 * 2 + i % 2, sum[i]);
        return;
    }
#pragma unroll
    for (int part = 0; part < WIDTH / 32; part++) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            const int i = part * 16 + j * 4;
            const int to = me.lane % 16, piece = j + me.lane / 16;
            store_matrix(me.store + to * 64 + (piece ^ (to / 2 % 4)) * 16,
                         pack_bf16(sum[i], sum[i + 1]), pack_bf16(sum[i + 2], sum[i + 3]),
                         pack_bf16(sum[i + 4], sum[i + 5]), pack_bf16(sum[i + 6], sum[i + 7]));
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int from = i * 8 + me.lane / 4, piece = me.lane % 4;
            store_eight(a, t, row + from, col + part * 32 + piece * 8,
                        buffer + from * 64 + (piece ^ (from / 2 % 4)) * 16);
        }
        __syncwarp();
    }
}

/* ---- the kernel -------------------------------------------------------------------------- */

template <class S, int WIDTH>
__device__ __forceinline__ void do_tile(const yard_gemm_args &a, const gemm_tile &t,
                                        const gemm_shared<S> &m, gemm_ring<S> &ring,
                                        const gemm_thread &me, char *buffer)
{
    float sum[WIDTH / 2];

    if (!S::SWAPPED && me.warpgroup * 64 >= t.n_rows) {
        skip(t, m, ring, me);
        return;
    }
    multiply<S, WIDTH>(sum, t, m, ring, me);
    if constexpr (S::SPLIT) {
        if (t.k1 - t.k0 < (int)a.n_blocks && !join_pieces<S, WIDTH>(sum, a, m, t, me))
            return;
    }
    if constexpr (S::SWAPPED)
        store_swapped<S, WIDTH>(sum, a, t, me, buffer);
    else
        store_rows<S, WIDTH>(sum, a, t, me, buffer);
}

/* The instructions of each width are other code: a chain of comparisons picks it. */
template <class S, int WIDTH>
__device__ __forceinline__ void pick_width(const yard_gemm_args &a, const gemm_tile &t,
                                           const gemm_shared<S> &m, gemm_ring<S> &ring,
                                           const gemm_thread &me, char *buffer)
{
    if constexpr (S::width_after(WIDTH) > S::WIDTH) {
        do_tile<S, WIDTH>(a, t, m, ring, me, buffer);
    } else {
        if (t.width == WIDTH)
            do_tile<S, WIDTH>(a, t, m, ring, me, buffer);
        else
            pick_width<S, S::width_after(WIDTH)>(a, t, m, ring, me, buffer);
    }
}

template <class S>
__device__ __forceinline__ void consume(const yard_gemm_args &a, const gemm_shared<S> &m,
                                        int thread, char *stores)
{
    const gemm_thread me = { thread / WARPGROUP, thread % WARPGROUP / 32, thread % 32, thread,
                             m.stores + thread / 32 * S::STORE_BYTES };
    char *buffer = stores + thread / 32 * S::STORE_BYTES;
    gemm_walk<S> walk(a, m);
    gemm_ring<S> ring;
    gemm_tile t;

    while (walk.next(a, m, t)) {
        if constexpr (S::SWAPPED)
            pick_width<S, S::MIN_WIDTH>(a, t, m, ring, me, buffer);
        else
            do_tile<S, GEMM_TILE_ROWS>(a, t, m, ring, me, buffer);
    }
}

template <class S>
__device__ __forceinline__ void read_groups(const yard_gemm_args &a, const gemm_shared<S> &m)
{
    if (!a.offset) {
        if (threadIdx.x == 0) {
            m.count[0] = *a.row_count;
            m.first[0] = 0;
        }
        return;
    }
    for (uint32_t g = threadIdx.x; g < a.n_groups; g += blockDim.x) {
        m.first[g] = a.offset[g];
        m.count[g] = a.row_count ? a.row_count[g] : a.offset[g + 1] - a.offset[g];
    }
}

template <class S>
static __global__ void __launch_bounds__(S::THREADS, 1)
    gemm_kernel(const __grid_constant__ yard_gemm_maps maps,
                const __grid_constant__ yard_gemm_args a)
{
    extern __shared__ char raw[];
    const gemm_shared<S> m(raw);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

    int n_early = 0;

    if (threadIdx.x == S::CONSUMERS) { /* the thread that will load */
        for (int i = 0; i < S::STAGES; i++) {
            barrier_init(m.full + i * 8, S::FULL_ARRIVALS);
            barrier_init(m.empty + i * 8, S::CLUSTER * S::CONSUMERS / 32);
        }
        barrier_init_fence();
        if constexpr (S::SPLIT)
            n_early = a.early ? load_early<S>(maps, a, m) : 0;
    }
    allow_next_kernel();
    wait_previous_kernel();
    read_groups(a, m);
    if (S::CLUSTER > 1)
        cluster_sync();
    __syncthreads();

    if (warp < S::CONSUMERS / 32) {
        if constexpr (S::WARPGROUPS == 3)
            asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
        else
            asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        consume<S>(a, m, threadIdx.x, (char *)m.scales + S::SCALE_BYTES);
    } else {
        if constexpr (S::WARPGROUPS == 3)
            asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        else
            asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (warp == S::CONSUMERS / 32) {
            if (S::SPLIT && m.count[0] == 0)
                drop_early(m, n_early);
            load_tiles<S>(maps, a, m, lane, n_early);
        } else if constexpr (S::FP8) {
            load_scales<S>(a, m, threadIdx.x - S::CONSUMERS - 32);
        }
    }
    /* other blocks of the cluster arrive at this one's barriers until all are done */
    if (S::CLUSTER > 1) {
        __syncwarp();
        cluster_sync();
    }
}

/* ---- host side --------------------------------------------------------------------------- */

template <class S>
static void fill_config(cudaLaunchConfig_t *config, cudaLaunchAttribute *attributes,
                        uint32_t n_thread_blocks, void *stream)
{
    *config = {};
    config->gridDim = dim3(n_thread_blocks, 1, 1);
    config->blockDim = dim3(S::THREADS, 1, 1);
    config->dynamicSmemBytes = S::SHARED_BYTES;
    config->stream = (cudaStream_t)stream;
    config->attrs = attributes;
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = S::CLUSTER;
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    config->numAttrs = S::CLUSTER > 1 ? 2 : 1;
}

template <class S> static yard_status gemm_open(uint32_t *n_thread_blocks, yard_error *err)
{
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config;
    int device = 0, n_processors = 0, n_clusters = 0;
    cudaError_t code = cudaFuncSetAttribute(
        gemm_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::SHARED_BYTES);

    if (code == cudaSuccess)
        code = cudaGetDevice(&device);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&n_processors, cudaDevAttrMultiProcessorCount, device);
    if (code == cudaSuccess && S::CLUSTER > 1) {
        fill_config<S>(&config, attributes, n_processors / S::CLUSTER * S::CLUSTER, NULL);
        config.attrs = attributes + 1;
        config.numAttrs = 1;
        code = cudaOccupancyMaxActiveClusters(&n_clusters, gemm_kernel<S>, &config);
    }
    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "gemm: %s", cudaGetErrorString(code));
    *n_thread_blocks = S::CLUSTER > 1 ? n_clusters * S::CLUSTER : n_processors;
    return YARD_OK;
}

template <class S>
static yard_status gemm_launch(const yard_gemm_maps *maps, const yard_gemm_args *a,
                               uint32_t n_thread_blocks, void *stream, yard_error *err)
{
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config;
    cudaError_t code;

    fill_config<S>(&config, attributes, n_thread_blocks, stream);
    code = cudaLaunchKernelEx(&config, gemm_kernel<S>, *maps, *a);
    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "gemm: launch: %s", cudaGetErrorString(code));
    return YARD_OK;
}

#endif
