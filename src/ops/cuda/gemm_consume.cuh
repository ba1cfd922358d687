/* The matrix product kernel, second half: the consumers, and the kernel itself. */
#ifndef YARD_OPS_CUDA_GEMM_CONSUME_CUH
#define YARD_OPS_CUDA_GEMM_CONSUME_CUH

#include "ops/cuda/gemm_results.cuh"

/* ---- one stage --------------------------------------------------------------------------- */

/* sum += acc times the scales of its columns (swapped form). */
template <int WIDTH>
__device__ __forceinline__ void promote_columns(float (&sum)[WIDTH / 2],
                                                const float (&acc)[WIDTH / 2], const float *scales,
                                                const gemm_thread &me)
{
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
}

/* Rows on M: the scales of the thread's two rows for each third of the warpgroup's columns, or for
 * all of them where the tile has one scale. */
template <class S> struct gemm_row_scales {
    static constexpr int PARTS = S::W_SCALES > 1 ? 3 : 1;
    float upper[PARTS], lower[PARTS];

    __device__ __forceinline__ gemm_row_scales(const gemm_shared<S> &m, int stage,
                                               const gemm_thread &me, const gemm_tile &t)
    {
        const float *at = m.scales + stage * S::SCALES + first_row_of<S>(t, me) + me.lane / 4;

        if constexpr (PARTS == 1) {
            upper[0] = at[0];
            lower[0] = at[8];
        } else {
            /* Of three times 64 columns the first have the first scale, the last the second, and
             * those between by turns: every other tile of 192 begins in the middle of a scale. */
            const bool late = t.w_tile % 2, halved = is_halved<S>(t);
            const bool left = halved && me.warpgroup == 0, right = halved && me.warpgroup == 1;
            const bool second[3] = { right && late, halved ? right : late, !left || late };
            const float u0 = at[0], l0 = at[8], u1 = at[S::SCALE_WIDTH],
                        l1 = at[S::SCALE_WIDTH + 8];
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
                upper[i] = second[i] ? u1 : u0;
                lower[i] = second[i] ? l1 : l0;
            }
        }
    }
};

/* sum += acc times the scales of its rows. */
template <class S, int N>
__device__ __forceinline__ void promote_rows(float (&sum)[N], const float (&acc)[N],
                                             const gemm_row_scales<S> &s)
{
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const int part = gemm_row_scales<S>::PARTS == 1 ? 0 : i / (N / 3);

        sum[i] = fmaf(acc[i], s.upper[part], sum[i]);
        sum[i + 1] = fmaf(acc[i + 1], s.upper[part], sum[i + 1]);
        sum[i + 2] = fmaf(acc[i + 2], s.lower[part], sum[i + 2]);
        sum[i + 3] = fmaf(acc[i + 3], s.lower[part], sum[i + 3]);
    }
}

/* Starts the products of the next stage. keep: acc goes on from what it holds. */
template <class S, int WIDTH>
__device__ __forceinline__ void issue(float (&acc)[WIDTH / 2], const gemm_shared<S> &m,
                                      const gemm_ring<S> &ring, const gemm_thread &me,
                                      const gemm_tile &t, bool keep)
{
    const uint32_t mine = me.warpgroup * 64 * GEMM_BLOCK_BYTES;
    uint64_t a, b;

    barrier_wait(m.full + ring.stage * 8, ring.parity);
    if constexpr (S::SWAPPED) {
        a = wgmma_descriptor(m.w(ring.stage) + mine);
        b = wgmma_descriptor(m.x(ring.stage));
    } else {
        const uint32_t half = me.warpgroup * (S::W_ROWS / 2) * GEMM_BLOCK_BYTES;
        a = wgmma_descriptor(m.x(ring.stage) + (is_halved<S>(t) ? 0 : mine));
        b = wgmma_descriptor(m.w(ring.stage) + (is_halved<S>(t) ? half : 0));
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

/* Waits for the products of a stage, all but PENDING younger sets of them, and adds them up. */
template <class S, int WIDTH, int PENDING>
__device__ __forceinline__ void finish(float (&sum)[WIDTH / 2], float (&acc)[WIDTH / 2],
                                       const gemm_shared<S> &m, int stage, const gemm_thread &me,
                                       const gemm_tile &t)
{
    if constexpr (S::SWAPPED) {
        wgmma_wait<PENDING>();
        pin(acc);
        promote_columns<WIDTH>(sum, acc, m.scales + stage * S::SCALES, me);
        release(m, stage, me);
    } else { /* two scales are soon read, and the stage is free before the sums are made */
        const gemm_row_scales<S> scales(m, stage, me, t);
        wgmma_wait<PENDING>();
        release(m, stage, me);
        pin(acc);
        promote_rows<S>(sum, acc, scales);
    }
}

template <class S, int WIDTH>
__device__ __forceinline__ void one_block(float (&sum)[WIDTH / 2], const gemm_shared<S> &m,
                                          gemm_ring<S> &ring, const gemm_thread &me,
                                          const gemm_tile &t)
{
    float acc[WIDTH / 2];

    issue<S, WIDTH>(acc, m, ring, me, t, false);
    finish<S, WIDTH, 0>(sum, acc, m, ring.stage, me, t);
    ring.advance();
}

/* Two sets of accumulators: one is promoted while the products of the other run. Four blocks of K a
 * turn, and nothing in flight from one turn to the next: the compiler would serialise all of it. */
template <class S, int WIDTH>
__device__ __forceinline__ void four_blocks(float (&sum)[WIDTH / 2], const gemm_shared<S> &m,
                                            gemm_ring<S> &ring, const gemm_thread &me,
                                            const gemm_tile &t)
{
    float even[WIDTH / 2], odd[WIDTH / 2];
    int stage;

    issue<S, WIDTH>(even, m, ring, me, t, false);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        stage = ring.stage;
        ring.advance();
        issue<S, WIDTH>(odd, m, ring, me, t, false);
        finish<S, WIDTH, 1>(sum, even, m, stage, me, t);
        stage = ring.stage;
        ring.advance();
        if (i + 2 < 4) {
            issue<S, WIDTH>(even, m, ring, me, t, false);
            finish<S, WIDTH, 1>(sum, odd, m, stage, me, t);
        } else {
            finish<S, WIDTH, 0>(sum, odd, m, stage, me, t);
        }
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
    if constexpr (!S::FP8) {
        /* nothing to scale: the sums are the accumulators, and the products of a stage may begin
         * before those of the last one have ended */
        int last = 0;
        for (; k < t.k1; k++) {
            issue<S, WIDTH>(sum, m, ring, me, t, true);
            wgmma_wait<1>();
            if (k > t.k0)
                release(m, last, me);
            last = ring.stage;
            ring.advance();
        }
        wgmma_wait<0>();
        pin(sum);
        release(m, last, me);
    } else {
        /* three sets of more than 48 registers do not fit in swapped form, with its scales */
        if constexpr (S::PAIRED && !(S::SWAPPED && WIDTH > 96)) {
            for (; (t.k1 - k) % 4; k++)
                one_block<S, WIDTH>(sum, m, ring, me, t);
            for (; k < t.k1; k += 4)
                four_blocks<S, WIDTH>(sum, m, ring, me, t);
        } else {
            for (; k < t.k1; k++)
                one_block<S, WIDTH>(sum, m, ring, me, t);
        }
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

/* ---- the kernel -------------------------------------------------------------------------- */

template <class S, int WIDTH>
__device__ __forceinline__ void do_tile(const yard_gemm_args &a, const gemm_tile &t,
                                        const gemm_shared<S> &m, gemm_ring<S> &ring,
                                        const gemm_thread &me, char *buffer)
{
    float sum[WIDTH / 2];
    bool done = true; /* this block has the whole sum */

    if (!S::SWAPPED && !S::SPLIT && !is_halved<S>(t) && me.warpgroup * 64 >= t.n_rows) {
        skip(t, m, ring, me);
        return;
    }
    multiply<S, WIDTH>(sum, t, m, ring, me);
    if constexpr (S::SPLIT)
        done = t.k1 - t.k0 == (int)a.n_blocks || join_pieces<S, WIDTH>(sum, a, m, t, me);
    if (done) {
        if (!a.y_aligned)
            store_elements<S, WIDTH>(sum, a, t, me);
        else if constexpr (S::SWAPPED)
            store_swapped<S, WIDTH>(sum, a, t, me, buffer);
        else
            store_rows<S, WIDTH>(sum, a, t, me, buffer);
    }
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

/* warp: known to be the same in all its lanes. Together with stores that do not branch, it lets the
 * compiler see that the way through the ring is the same for the warp: descriptors are computed in
 * uniform registers, and not moved there, 16 moves a stage, in front of the matrix instructions. */
template <class S>
__device__ __forceinline__ void consume(const yard_gemm_args &a, const gemm_shared<S> &m, int warp,
                                        int lane, char *stores)
{
    const gemm_thread me = { warp / 4, warp % 4, lane, (int)threadIdx.x,
                             m.stores + warp * S::STORE_BYTES };
    char *buffer = stores + warp * S::STORE_BYTES;
    gemm_walk<S> walk(a, m);
    gemm_ring<S> ring;
    gemm_tile t;

    while (walk.next(a, m, t)) {
        if constexpr (S::SWAPPED)
            pick_width<S, S::MIN_WIDTH>(a, t, m, ring, me, buffer);
        else if (is_halved<S>(t))
            do_tile<S, S::W_ROWS / 2>(a, t, m, ring, me, buffer);
        else
            do_tile<S, S::W_ROWS>(a, t, m, ring, me, buffer);
    }
}

template <class S>
__device__ __forceinline__ void read_groups(const yard_gemm_args &a, const gemm_shared<S> &m)
{
    if constexpr (S::HEADS) {
        for (uint32_t g = threadIdx.x; g < a.n_groups; g += blockDim.x) {
            m.first[g] = 0;
            m.count[g] = *a.row_count;
        }
        return;
    }
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
        if constexpr (S::EARLY)
            n_early = a.early ? load_early<S>(maps, a, m) : 0;
    }
    if (threadIdx.x > S::CONSUMERS && threadIdx.x <= S::CONSUMERS + a.n_boxes)
        tma_prefetch_map(&maps.box[threadIdx.x - S::CONSUMERS - 1]);
    allow_next_kernel();
    wait_previous_kernel();
    read_groups(a, m);
    if (S::CLUSTER > 1)
        cluster_sync();
    __syncthreads();

    if (warp < S::CONSUMERS / 32) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::CONSUMER_REGISTERS));
        consume<S>(a, m, warp, lane, (char *)m.scales + S::SCALE_BYTES);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::PRODUCER_REGISTERS));
        if (warp == S::CONSUMERS / 32) {
            if (S::EARLY && m.count[0] == 0)
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
