#include "ops/cuda/mla_decode.h"

#include "ops/cuda/mla_join.cuh"
#include "ops/cuda/mla_record.cuh"
#include "ops/cuda/mla_scores.cuh"
#include "ops/cuda/mla_values.cuh"

template <bool FP8>
static __global__ void __launch_bounds__(PLAN_THREADS, 1)
    mla_decode_kernel(const __grid_constant__ yard_mla_decode_maps maps,
                      const __grid_constant__ yard_mla_decode_task t)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    const decode_shared m(raw);
    const uint32_t warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    mla_item *list = (mla_item *)t.space.items + (size_t)blockIdx.x * t.space.max_items;
    mla_splits *splits = (mla_splits *)t.space.splits + blockIdx.x * MLA_MAX_BLOCKS;
    plan_record *record = (plan_record *)t.space.records + blockIdx.x;
    plan_kept &kept = *(plan_kept *)(raw + KEPT_AT);
    block_share b;

    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < STAGES * PARTS; i++) /* FP8: who widens, and the rotated keys */
            barrier_init(m.full + 8 * i, FP8 ? VALUE_WARPS + (i % PARTS == PARTS - 1) : 1);
        for (uint32_t i = 0; i < STAGES; i++)
            barrier_init(m.codes + 8 * i, 1);
        barrier_init(m.weights_ready, SCORE_WARPS);
        barrier_init(m.values_done, VALUE_WARPS);
        barrier_init(m.queries_here, SCORE_WARPS);
        barrier_init_fence();
        prefetch_map(&maps.cache);
        if (FP8)
            prefetch_map(&maps.keys);
        if (t.boxes) {
            prefetch_map(&maps.latent);
            prefetch_map(&maps.rotated);
        }
    }
    /* The batch was there before the step, so the plan need not wait for the kernels ahead. Its
     * memory is the first tile's later. */
    if (!recall_plan(t, *record, kept)) {
        make_plan(t, *(plan_shared *)raw, kept, list, splits);
        __syncthreads(); /* the plan is complete */
        keep_plan(t, kept, record);
    }
    fence_async_shared(); /* the plan is read before the copy engine writes over it */
    __syncthreads();      /* barriers and first items are there */
    b.list = list;
    b.splits = splits;
    b.n_items = kept.n_items;
    b.lane = kept.lane;
    b.lanes = kept.lanes;
    b.halves = kept.halves;
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)SCORE_REGISTERS));
        compute_scores(maps, t, m, b);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)VALUE_REGISTERS));
        if (__shfl_sync(0xffffffffu, b.halves >> (warpgroup - 1), 0) & 1)
            compute_values<FP8>(maps, t, m, b, warpgroup - 1);
        else
            skip_values<FP8>(maps, t, m, b);
    }
    join_parts(t, m, b.splits);
}

yard_status yard_cuda_mla_decode_open(uint32_t *n_thread_blocks, yard_error *err)
{
    int device = 0, n = 0;
    cudaError_t code = cudaFuncSetAttribute(
        mla_decode_kernel<false>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);

    if (code == cudaSuccess)
        code = cudaFuncSetAttribute(mla_decode_kernel<true>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    if (code == cudaSuccess)
        code = cudaGetDevice(&device);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device);
    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "mla_decode: %s", cudaGetErrorString(code));
    *n_thread_blocks = n < MLA_MAX_BLOCKS ? (uint32_t)n : (uint32_t)MLA_MAX_BLOCKS;
    return YARD_OK;
}

yard_status yard_cuda_mla_decode_launch(const yard_mla_decode_maps *maps,
                                        const yard_mla_decode_task *t, yard_mla_workspace *space,
                                        void *stream, yard_error *err)
{
    yard_mla_decode_task task = *t;
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config = {};
    cudaError_t code;

    space->turn ^= 1;
    task.max_rows = space->max_rows;
    task.space = *space;
    task.space.items = (uint8_t *)space->items +
                       (size_t)space->turn * MLA_MAX_BLOCKS * space->max_items * MLA_ITEM_BYTES;
    task.space.splits = (uint8_t *)space->splits +
                        (size_t)space->turn * MLA_MAX_BLOCKS * MLA_MAX_BLOCKS * MLA_SPLIT_BYTES;
    task.space.records =
        (uint8_t *)space->records + (size_t)space->turn * MLA_MAX_BLOCKS * MLA_RECORD_BYTES;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    config.stream = (cudaStream_t)stream;
    config.gridDim = dim3(space->n_thread_blocks, 1, 1);
    config.blockDim = dim3(PLAN_THREADS, 1, 1);
    config.dynamicSmemBytes = SHARED_BYTES;
    code = cudaLaunchKernelEx(
        &config, maps->fp8 ? mla_decode_kernel<true> : mla_decode_kernel<false>, *maps, task);
    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "mla_decode: launch: %s", cudaGetErrorString(code));
    return YARD_OK;
}
