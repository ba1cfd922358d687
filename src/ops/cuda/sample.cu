/* Sampling: bias, penalties, greedy, temperature, top-k, top-p, min-p and the draw. The CPU
 * definition's tokens: weights are the same whole numbers there. */
#include "ops/cuda/sample.h"

#include "ops/cuda/sample_draw.cuh"
#include "ops/cuda/sample_look.cuh"

enum {
    LOOK_BLOCKS = 4, /* of a processor */
    WEIGH_BLOCKS = 4,
    GATHER_BLOCKS = 4
};

/* How the rows are cut. */
typedef struct cut {
    uint32_t n_rows, n_slices, slice; /* logits of a slice */
} cut;

/* The same in all kernels; without a division, for which the count's reader would wait. */
static __device__ __forceinline__ cut cut_rows(const sample_args &n)
{
    const uint32_t n_all = (uint32_t)*n.a.n_rows;
    const uint32_t n_rows = n_all > n.first ? min(n_all - n.first, n.n_slots) : 0;
    cut c = { n_rows, n.way[0].n_slices, n.way[0].slice };

#pragma unroll
    for (uint32_t i = 1; i < CUTS; i++)
        if (n_rows > n.way[i - 1].max_rows) {
            c.n_slices = n.way[i].n_slices;
            c.slice = n.way[i].slice;
        }
    return c;
}

static __device__ __forceinline__ piece piece_at(const sample_args &n, const cut &c, uint32_t idx)
{
    const uint32_t slot = idx / c.n_slices;
    piece w;

    w.row = n.first + slot;
    w.slot = &n.slots[slot];
    w.n_slices = c.n_slices;
    w.slice = idx % c.n_slices;
    w.first = min(w.slice * c.slice, n.a.n_vocab);
    w.n = min(c.slice, n.a.n_vocab - w.first);
    return w;
}

static __global__ void __launch_bounds__(SAMPLE_THREADS, LOOK_BLOCKS)
    sample_look_kernel(const __grid_constant__ sample_args n)
{
    allow_next_kernel();
    wait_previous_kernel();
    const cut c = cut_rows(n);
    for (uint32_t i = blockIdx.x; i < c.n_rows * c.n_slices; i += gridDim.x) {
        look(n, piece_at(n, c, i));
        __syncthreads(); /* nobody needs shared memory any more */
    }
}

/* Backwards: the cache holds what the first kernel has read last. */
static __global__ void __launch_bounds__(SAMPLE_THREADS, WEIGH_BLOCKS)
    sample_weigh_kernel(const __grid_constant__ sample_args n)
{
    allow_next_kernel();
    wait_previous_kernel();
    const cut c = cut_rows(n);
    const uint32_t n_pieces = c.n_rows * c.n_slices;
    for (uint32_t i = blockIdx.x; i < n_pieces; i += gridDim.x) {
        const piece w = piece_at(n, c, n_pieces - 1 - i);
        if (n.a.rows[w.row].params.temperature > 0.0f)
            weigh(n, w);
        else if (w.slice == 0 && threadIdx.x < WARP_LANES)
            finish_greedy(n, w);
        __syncthreads(); /* nobody needs shared memory any more */
    }
}

static __global__ void __launch_bounds__(SAMPLE_THREADS, GATHER_BLOCKS)
    sample_gather_kernel(const __grid_constant__ sample_args n)
{
    allow_next_kernel();
    wait_previous_kernel();
    const cut c = cut_rows(n);
    for (uint32_t i = blockIdx.x; i < c.n_rows * c.n_slices; i += gridDim.x) {
        gather(n, piece_at(n, c, i));
        __syncthreads(); /* nobody needs shared memory any more */
    }
}

/* Rows that may be sampled by one round of the kernels. */
enum { MAX_SLOTS = 512 };

size_t yard_cuda_sample_bytes(uint32_t max_rows)
{
    return min(max_rows, (uint32_t)MAX_SLOTS) * sizeof(sample_slot);
}

yard_status yard_cuda_sample_open(yard_sample_space *space, uint32_t max_rows, yard_error *err)
{
    const size_t n_bytes = yard_cuda_sample_bytes(max_rows);
    int device = 0, n_processors = 0;
    cudaError_t code = cudaGetDevice(&device);

    space->max_rows = max_rows;
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&n_processors, cudaDevAttrMultiProcessorCount, device);
    if (code == cudaSuccess)
        code = cudaMalloc(&space->slots, n_bytes);
    if (code == cudaSuccess)
        code = cudaMemset(space->slots, 0, n_bytes);
    if (code != cudaSuccess)
        return yard_fail(err, code == cudaErrorMemoryAllocation ? YARD_ENOMEM : YARD_EDEVICE,
                         "sample: %s", cudaGetErrorString(code));
    space->n_room = (uint32_t)n_processors * WEIGH_BLOCKS;
    return YARD_OK;
}

void yard_cuda_sample_close(yard_sample_space *space)
{
    cudaFree(space->slots);
}

/* Slices of whole batches: the shortest of which the rows have no more than blocks run at once, but
 * not so long that blocks have nothing to do at the end. */
static void set_cuts(sample_args *n, uint32_t n_room)
{
    const uint32_t batch = BATCH * BATCH_STEP, n_batches = yard_ceil_div(n->a.n_vocab, batch);
    const uint32_t least = yard_ceil_div(n_batches, MAX_SLICES);

    for (uint32_t i = 0; i < CUTS; i++) {
        const uint32_t each = max(least, i + 1);

        n->way[i].slice = each * batch;
        n->way[i].n_slices = yard_ceil_div(n_batches, each);
        n->way[i].max_rows = n_room / n->way[i].n_slices;
    }
}

yard_status yard_cuda_sample_launch(const yard_sample_args *a, const yard_sample_space *space,
                                    void *stream, yard_error *err)
{
    const uint32_t n_slots = min(space->max_rows, (uint32_t)MAX_SLOTS);
    const uint32_t n_blocks = min(n_slots * MAX_SLICES, space->n_room);
    sample_args n = {};
    yard_status st = YARD_OK;

    if (!space->slots)
        return yard_fail(err, YARD_EINVAL, "sample: want max_vocab above 0 in the limits, got 0");
    if (a->n_vocab == 0 || a->n_vocab > MAX_SLICES * MAX_SLICE)
        return yard_fail(err, YARD_EINVAL, "sample: want 1 to %d ids, got %u",
                         MAX_SLICES * MAX_SLICE, a->n_vocab);
    n.a = *a;
    n.slots = (sample_slot *)space->slots;
    n.n_slots = n_slots;
    n.wide = (uintptr_t)a->logits % 16 == 0 && a->n_vocab % 4 == 0;
    set_cuts(&n, space->n_room);
    for (; st == YARD_OK && n.first < space->max_rows; n.first += n_slots) {
        st = launch_rows(sample_look_kernel, n_blocks, SAMPLE_THREADS, sizeof(sample_shared), n,
                         "sample", stream, err);
        if (st == YARD_OK)
            st = launch_rows(sample_weigh_kernel, n_blocks, SAMPLE_THREADS, sizeof(sample_shared),
                             n, "sample", stream, err);
        if (st == YARD_OK)
            st = launch_rows(sample_gather_kernel, n_blocks, SAMPLE_THREADS, sizeof(sample_shared),
                             n, "sample", stream, err);
    }
    return st;
}
