/* The Hopper instructions that have no intrinsic: barriers that count bytes, the bulk tensor copy
 * engine (TMA), and what surrounds the matrix instructions. Shared memory addresses are 32-bit. */
#ifndef YARD_OPS_CUDA_PTX_CUH
#define YARD_OPS_CUDA_PTX_CUH

#include <cuda_runtime_api.h>

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* ---- mbarrier ------------------------------------------------------------------------ */

static __device__ __forceinline__ void barrier_init(uint32_t bar, uint32_t n_arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(n_arrivals));
}

/* Makes the inits visible to the copy engine and to the other blocks of the cluster. */
static __device__ __forceinline__ void barrier_init_fence(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint32_t bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

/* Arrives, and lets the phase wait for n_bytes of copies too. */
static __device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t n_bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(n_bytes)
                 : "memory");
}

/* The phase waits for n_bytes of copies more; somebody arrives later. */
static __device__ __forceinline__ void barrier_expect_more(uint32_t bar, uint32_t n_bytes)
{
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(n_bytes)
                 : "memory");
}

/* The same barrier of block `rank` of the cluster. No .release.cluster: it would drain all earlier
 * memory operations of the thread, and the readers of the stage have nothing to publish. */
static __device__ __forceinline__ void barrier_arrive_at(uint32_t bar, uint32_t rank)
{
    asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(bar),
                 "r"(rank)
                 : "memory");
}

static __device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity)
{
    asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}

static __device__ __forceinline__ void cluster_sync(void)
{
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

static __device__ __forceinline__ uint32_t cluster_rank(void)
{
    uint32_t rank;

    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* A barrier of n_threads threads of the block (a multiple of 32). */
static __device__ __forceinline__ void named_sync(uint32_t id, uint32_t n_threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
}

/* Arrives at such a barrier, and goes on. */
static __device__ __forceinline__ void named_arrive(uint32_t id, uint32_t n_threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
}

/* ---- bulk tensor copies -------------------------------------------------------------- */

static __device__ __forceinline__ uint64_t policy_evict_first(void)
{
    uint64_t policy;

    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* Brings a map near before its first use. */
static __device__ __forceinline__ void tma_prefetch_map(const void *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Box (col, row) of the map to shared memory; completes on bar. */
static __device__ __forceinline__ void tma_load(uint32_t to, const void *map, uint32_t col,
                                                uint32_t row, uint32_t bar)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(map), "r"(bar), "r"(col), "r"(row)
                 : "memory");
}

/* The same for data that is read once. */
static __device__ __forceinline__ void tma_load_hint(uint32_t to, const void *map, uint32_t col,
                                                     uint32_t row, uint32_t bar, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
                 "l"(map), "r"(bar), "r"(col), "r"(row), "l"(policy)
                 : "memory");
}

/* n_bytes in a row, all three of them multiples of 16; completes on bar. */
static __device__ __forceinline__ void bulk_load(uint32_t to, const void *from, uint32_t n_bytes,
                                                 uint32_t bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(n_bytes), "r"(bar)
                 : "memory");
}

/* Box (0, row, chunk) of a map of three dimensions. */
static __device__ __forceinline__ void tma_load_3d(uint32_t to, const void *map, uint32_t col,
                                                   uint32_t row, uint32_t chunk, uint32_t bar)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
                 "l"(map), "r"(bar), "r"(col), "r"(row), "r"(chunk)
                 : "memory");
}

/* Box (0, head, row, 0) of a map of four dimensions. */
static __device__ __forceinline__ void tma_load_4d(uint32_t to, const void *map, uint32_t head,
                                                   uint32_t row, uint32_t bar)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%5, %3, %4, %5}], [%2];" ::"r"(to),
                 "l"(map), "r"(bar), "r"(head), "r"(row), "r"(0)
                 : "memory");
}

/* N bytes (4, 8 or 16) to shared memory; copy_wait waits for all of the thread's. */
template <int N> static __device__ __forceinline__ void copy_ahead(uint32_t to, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(N)
                 : "memory");
}

static __device__ __forceinline__ void copy_wait(void)
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* The map itself, which the first copy would wait for. */
static __device__ __forceinline__ void prefetch_map(const void *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* To the same place of every block of the cluster in mask; completes on each one's bar. */
static __device__ __forceinline__ void tma_load_multicast(uint32_t to, const void *map,
                                                          uint32_t col, uint32_t row, uint32_t bar,
                                                          uint16_t mask)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
                 "l"(map), "r"(bar), "r"(col), "r"(row), "h"(mask)
                 : "memory");
}

/* ---- programmatic dependent launch --------------------------------------------------- */

/* Lets the next kernel of the stream begin its own prologue. */
static __device__ __forceinline__ void allow_next_kernel(void)
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/* Everything the kernels before this one wrote is visible from here on. */
static __device__ __forceinline__ void wait_previous_kernel(void)
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

/* ---- wgmma --------------------------------------------------------------------------- */

/* A tile of rows of 128 bytes, swizzled by 128 bytes, 1024-byte aligned; rows of 8 lie 1024 bytes
 * apart. The next 32 bytes of K are +2. */
static __device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address)
{
    return (uint64_t)((address & 0x3ffffu) >> 4) | (uint64_t)1 << 16 | (uint64_t)64 << 32 |
           (uint64_t)1 << 62;
}

/* Orders accesses to the registers that wgmma will read and write. */
static __device__ __forceinline__ void wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING> static __device__ __forceinline__ void wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* Keeps the compiler from moving uses of d across this point: it does not know that wgmma runs on
 * after its instruction. */
template <int N> static __device__ __forceinline__ void pin(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}

/* Shared memory written by ordinary stores, to be read by wgmma or the copy engine: in every
 * writing thread, before the barrier. */
static __device__ __forceinline__ void fence_async_shared(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Adds to *p; what the thread has seen, and its block before a barrier, is visible to whoever then
 * acquires *p. Returns what was there. */
static __device__ __forceinline__ uint32_t add_acq_rel(uint32_t *p, uint32_t x)
{
    uint32_t before;

    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(p), "r"(x)
                 : "memory");
    return before;
}

/* No order with anything else. */
static __device__ __forceinline__ uint32_t load_relaxed(const uint32_t *p)
{
    uint32_t value;

    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}

/* What another block published with an atomic after __threadfence. */
static __device__ __forceinline__ uint32_t load_acquire(const uint32_t *p)
{
    uint32_t value;

    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}

/* Words of shared memory by their address. */
static __device__ __forceinline__ uint32_t load_shared(uint32_t from)
{
    uint32_t x;

    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}

static __device__ __forceinline__ void store_shared(uint32_t to, uint32_t x)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

/* ---- small things -------------------------------------------------------------------- */

/* lo in the lower half. */
static __device__ __forceinline__ uint32_t pack_bf16(float lo, float hi)
{
    uint32_t r;

    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

static __device__ __forceinline__ void store_matrix(uint32_t to, uint32_t a, uint32_t b, uint32_t c,
                                                    uint32_t d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

static __device__ __forceinline__ void load_matrix(uint32_t from, uint32_t *x)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
}

static __device__ __forceinline__ void store_matrix_transposed(uint32_t to, uint32_t a, uint32_t b,
                                                               uint32_t c, uint32_t d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

#endif
