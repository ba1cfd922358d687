/* Device functions of the ep kernels: memory accesses, waiting, rows of any length. */
#ifndef YARD_EP_CUDA_DEVICE_CUH
#define YARD_EP_CUDA_DEVICE_CUH

#include "ep/cuda/cuda.h"
#include "ep/cuda/transport.cuh"

#define DEVICE static __device__ __forceinline__

enum { WARP = 32, VECTOR = 16 };
static const uint32_t ALL_LANES = 0xffffffffu, POISON = 0xffffffffu;

/* The arguments as kernels for common shapes see them: what is the same in all of these is known
 * when they are compiled. At few tokens a kernel takes about as long as its code takes to arrive,
 * and this halves the code. */
struct ep_cuda_common : ep_cuda_args {
    static constexpr uint32_t top_k = 8, n_id_packets = 1, tp = 1, replica = 0, n_rank_words = 1;
    static constexpr bool wide = true;
};

static inline bool is_common(const ep_cuda_args *a)
{
    return a->top_k == 8 && a->tp == 1 && a->n_rank_words == 1 && a->wide;
}

/* ---- accesses -------------------------------------------------------------------------- */

/* Between devices, without order or fence. Of a row each word proves itself. */
DEVICE uint4 load_relaxed(const void *p)
{
    uint4 v;

    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

DEVICE void store_relaxed(void *p, uint4 v)
{
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

/* A packet is whole when its epoch has come, so it must be loaded at once. The assembler splits a
 * load, of vectors and of 128-bit numbers alike, where only some of its words are used: a new epoch
 * then came with an old count. Here the epoch depends on all words; no_bits is 0, which nobody
 * knows. */
DEVICE uint4 load_packet(const ep_cuda_args &a, const void *p)
{
    uint4 v = load_relaxed(p);

    v.w += (v.x ^ v.y ^ v.z) & a.no_bits;
    return v;
}

DEVICE void store_relaxed_half(void *p, uint32_t x, uint32_t y)
{
    asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};"
                 :
                 : "l"(p), "r"(x), "r"(y)
                 : "memory");
}

/* Past the first-level cache: a kernel that was launched before its predecessor ended may find
 * lines there from before. */
DEVICE uint4 load_plain(const void *p)
{
    uint4 v;

    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

DEVICE void store_plain(void *p, uint4 v)
{
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

template <typename T> DEVICE T load_shallow(const T *p)
{
    uint32_t v;

    static_assert(sizeof(T) == 4, "words");
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return (T)v;
}

DEVICE float load_shallow(const float *p)
{
    return __uint_as_float(load_shallow((const uint32_t *)p));
}

DEVICE uint32_t load_word(const uint32_t *p)
{
    uint32_t v;

    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

DEVICE uint32_t load_acquire(const uint32_t *p)
{
    uint32_t v;

    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

DEVICE uint64_t load_long(const uint64_t *p)
{
    uint64_t v;

    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

DEVICE void store_release(uint32_t *p, uint32_t v)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(p), "r"(v) : "memory");
}

DEVICE void add_release(uint32_t *p, uint32_t n)
{
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" : : "l"(p), "r"(n) : "memory");
}

DEVICE uint64_t now_ns(void)
{
    uint64_t t;

    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

/* The grid before this one has ended, and what it wrote is visible. */
DEVICE void wait_predecessor(void)
{
    asm volatile("griddepcontrol.wait;" : : : "memory");
}

/* The next grid may start once every block has said so. */
DEVICE void let_successor_start(void)
{
    asm volatile("griddepcontrol.launch_dependents;" : : : "memory");
}

/* ---- grids that wait for each other ------------------------------------------------------ */

/* What a block adds so that all together add EP_CUDA_DONE. */
DEVICE uint32_t block_share(void)
{
    return blockIdx.x == 0 ? EP_CUDA_DONE - (gridDim.x - 1) : 1u;
}

/* By one thread of each block, when all of the block is done: *n grows by EP_CUDA_DONE. */
DEVICE void count_block(uint32_t *n)
{
    __threadfence(); /* with the barrier before it: what the block wrote comes first */
    atomicAdd(n, block_share());
}

DEVICE bool all_counted(const uint32_t *n, uint32_t epoch)
{
    return (int32_t)(load_acquire(n) - epoch * EP_CUDA_DONE) >= 0;
}

/* ---- faults and waits ------------------------------------------------------------------ */

/* The first fault of the group stays. */
static __device__ __noinline__ void report(const ep_cuda_args &a, uint32_t what, int32_t value)
{
    if (atomicCAS(a.error, 0u, what) != 0u)
        return;
    *(volatile int32_t *)&a.host_error->value = value;
    __threadfence_system(); /* the host reads what first */
    *(volatile uint32_t *)&a.host_error->what = what;
    __threadfence_system();
}

/* Deadlines are looked at once in this many polls: a read of the clock takes longer than a poll. So
 * does one of the host's word, which is looked at about once a millisecond. */
enum { POLLS_BETWEEN = 256, POLLS_BETWEEN_LOSSES = 1024, POLLS_WITHOUT_PAUSE = 32 };

typedef struct waiting {
    uint64_t until; /* 1: not asked for yet */
    uint32_t n_polls;
} waiting;

static const waiting BEGIN_WAITING = { 1, 0 };

/* What is late because of something else, which has a name and is waited for as long. */
DEVICE bool is_consequence(uint32_t what)
{
    return what == EP_FAULT_RESULT || what == EP_FAULT_OUTPUT || what == EP_FAULT_LAYOUT;
}

/* The deadline; 0 once it has passed, the group has failed or a peer is lost. */
static __device__ __noinline__ uint64_t wait_longer(const ep_cuda_args &a, waiting w, uint32_t what,
                                                    uint32_t rank)
{
    uint64_t now;

    __nanosleep(w.n_polls < 128 ? 20 : 100);
    if (w.n_polls % POLLS_BETWEEN != 0)
        return w.until;
    now = now_ns();
    if (load_word(a.error) != 0)
        return 0;
    if (w.until == 1)
        return now + a.timeout_ns + (is_consequence(what) ? a.timeout_ns / 8 : 0);
    if (now < w.until &&
        (w.n_polls % POLLS_BETWEEN_LOSSES != 0 || *(const volatile uint32_t *)a.lost == 0))
        return w.until;
    report(a, what, (int32_t)rank);
    return 0;
}

/* False once the deadline has passed, the group has failed or a peer is lost. Who waits for longer
 * polls less often: many blocks that read the same lines without a pause can keep their writer from
 * them for ever. */
DEVICE bool may_wait(const ep_cuda_args &a, waiting *w, uint32_t what, uint32_t rank)
{
    if (++w->n_polls > POLLS_WITHOUT_PAUSE)
        w->until = wait_longer(a, *w, what, rank);
    return w->until != 0;
}

DEVICE bool is_poisoned(uint4 v)
{
    return v.x == POISON || v.y == POISON || v.z == POISON || v.w == POISON;
}

DEVICE uint4 poison(void)
{
    return make_uint4(POISON, POISON, POISON, POISON);
}

DEVICE uint32_t without_poison(uint32_t word, uint32_t substitute)
{
    return word == POISON ? substitute : word;
}

DEVICE uint4 without_poison(uint4 v, uint32_t substitute)
{
    return make_uint4(without_poison(v.x, substitute), without_poison(v.y, substitute),
                      without_poison(v.z, substitute), without_poison(v.w, substitute));
}

/* Polls a vector that was poison when it was read first. False: give up. */
DEVICE bool await_vector(const ep_cuda_args &a, const void *p, uint4 *v, uint32_t what,
                         uint32_t rank)
{
    waiting w = BEGIN_WAITING;

    while (is_poisoned(*v)) {
        if (!may_wait(a, &w, what, rank))
            return false;
        *v = load_relaxed(p);
    }
    return true;
}

DEVICE bool await_packet(const ep_cuda_args &a, const void *p, uint32_t epoch, uint4 *v,
                         uint32_t what, uint32_t rank)
{
    waiting w = BEGIN_WAITING;

    while ((*v = load_packet(a, p)).w != epoch)
        if (!may_wait(a, &w, what, rank))
            return false;
    return true;
}

static __device__ __noinline__ void waste_time(const ep_cuda_args &a, uint32_t kernel)
{
    uint32_t h;
    uint64_t begun, ns;

    h = ((blockIdx.x + blockIdx.y * 7919u) * 2654435761u) ^
        (a.delay_seed + kernel * 77 + a.rank * 1299721 +
         load_word(&a.state->combine_epoch) * 40503u);
    h = (h ^ h >> 13) * 0x5bd1e995u;
    h ^= h >> 15;
    ns = ((a.delay_seed * 7 + kernel + 3 * a.rank + load_word(&a.state->combine_epoch)) % 5 == 0
              ? 20000u
              : 0u) +
         ((h & 15) == 0 ? (h >> 8) % 15000u : 0u);
    for (begun = now_ns(); now_ns() - begun < ns;)
        ;
}

/* Tests: some blocks of some kernels come late, differently on every rank. */
DEVICE void dawdle(const ep_cuda_args &a, uint32_t kernel)
{
    if (a.delay_seed)
        waste_time(a, kernel);
}

/* ---- places ---------------------------------------------------------------------------- */

/* Whether this rank stores to the heap of another, or puts. */
DEVICE bool is_direct(const ep_cuda_args &a, uint32_t rank)
{
    return !PUTS || (a.stores[rank / WARP] >> rank % WARP & 1);
}

DEVICE uint8_t *place(const ep_cuda_args &a, uint32_t rank, uint64_t at)
{
    return a.heap[rank] + at;
}

DEVICE uint64_t count_at(const ep_cuda_args &a, uint32_t phase, uint32_t source)
{
    if (PUTS && phase == 0)
        return a.at_ids + (uint64_t)source * a.header_pitch;
    return a.at_count[phase] + source * VECTOR;
}

/* Of id packet i of an instance, n_id_packets a token. */
template <typename ARGS> DEVICE uint64_t ids_at(const ARGS &a, uint32_t group, uint32_t i)
{
    const uint32_t t = i / a.n_id_packets;

    if (PUTS)
        return count_at(a, 0, group * a.tp + t % a.tp) +
               (1 + (uint64_t)(t / a.tp) * a.n_id_packets + i % a.n_id_packets) * VECTOR;
    return a.at_ids + ((uint64_t)group * a.max_tokens * a.n_id_packets + i) * VECTOR;
}

DEVICE uint64_t weights_at(const ep_cuda_args &a, uint32_t slot, uint32_t i)
{
    if (PUTS)
        return a.at_rows + (uint64_t)slot * a.row_pitch + i * VECTOR;
    return a.at_weights + ((uint64_t)slot * a.n_weight_packets + i) * VECTOR;
}

/* slot: instance * row_slots + token */
DEVICE uint64_t row_at(const ep_cuda_args &a, uint32_t slot)
{
    return a.at_rows + (uint64_t)slot * a.row_pitch + (PUTS ? a.n_weight_packets * VECTOR : 0);
}

template <typename ARGS> DEVICE uint64_t result_at(const ARGS &a, uint32_t t, uint32_t slot)
{
    return a.at_results + (uint64_t)(t * a.top_k + slot) * a.result_pitch;
}

template <typename ARGS> DEVICE uint32_t owner_of(const ARGS &a, uint32_t group, uint32_t t)
{
    return group * a.tp + t % a.tp;
}

/* By multiplication: exact where n times the divisor is below 2^32. */
DEVICE uint32_t quotient(uint32_t n, ep_cuda_divisor d)
{
    return d.magic ? __umulhi(n, d.magic) : n;
}

DEVICE int32_t rank_of(const ep_cuda_args &a, int32_t id)
{
    return (int32_t)quotient((uint32_t)id, a.by_local);
}

DEVICE uint32_t byte_of(uint2 ids, uint32_t i)
{
    return ((i < 4 ? ids.x : ids.y) >> 8 * (i % 4)) & 255;
}

/* The packet with a rank's token count: false when its limit is not the one here. */
DEVICE bool has_our_limit(const ep_cuda_args &a, uint4 count, uint32_t rank)
{
    if (count.y == a.bound)
        return true;
    report(a, EP_FAULT_LIMIT, (int32_t)rank);
    return false;
}

#include "ep/cuda/puts.cuh"

/* ---- the caller's rows, of any length ---------------------------------------------------- */

/* Rows that are no multiple of a vector, or lie askew: rare, so kept out of the kernels' way. */
static __device__ __noinline__ uint4 get_ragged(const uint8_t *row, uint32_t at, uint32_t n_bytes)
{
    uint32_t word[4] = { 0, 0, 0, 0 };

#pragma unroll
    for (uint32_t i = 0; i < VECTOR; i++)
        if (at + i < n_bytes)
            word[i / 4] |= (uint32_t)row[at + i] << 8 * (i % 4);
    return make_uint4(word[0], word[1], word[2], word[3]);
}

static __device__ __noinline__ void put_ragged(uint8_t *row, uint32_t at, uint32_t n_bytes, uint4 v)
{
    const uint32_t word[4] = { v.x, v.y, v.z, v.w };

#pragma unroll
    for (uint32_t i = 0; i < VECTOR; i++)
        if (at + i < n_bytes)
            row[at + i] = (uint8_t)(word[i / 4] >> 8 * (i % 4));
}

/* 16 bytes at an offset of a row of n_bytes; what lies beyond it is 0. */
DEVICE uint4 get_vector(const void *row, uint32_t at, uint32_t n_bytes, bool wide)
{
    return wide ? load_plain((const uint8_t *)row + at)
                : get_ragged((const uint8_t *)row, at, n_bytes);
}

DEVICE void put_vector(void *row, uint32_t at, uint32_t n_bytes, uint4 v, bool wide)
{
    if (wide)
        store_plain((uint8_t *)row + at, v);
    else
        put_ragged((uint8_t *)row, at, n_bytes, v);
}

/* Four scales of a row, of which only those below n_cols exist. */
template <typename ARGS> DEVICE void put_scales(const ARGS &a, uint64_t row, uint32_t col, uint4 v)
{
    const uint32_t word[4] = { v.x, v.y, v.z, v.w };
    float *to = a.expert_x_scale + row * a.n_cols + col;

    if (a.wide && a.n_cols % 4 == 0) {
        store_plain(to, v);
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        if (col + i < a.n_cols)
            to[i] = __uint_as_float(word[i]);
}

/* ---- bf16 ------------------------------------------------------------------------------ */

/* Two values, rounded to nearest even, as yard_bf16_from_f32 but for the payload of a NaN. */
DEVICE uint32_t bf16_pair(float low, float high)
{
    uint32_t pair;

    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

DEVICE void widen_bf16(uint4 v, float f[8])
{
    const uint32_t word[4] = { v.x, v.y, v.z, v.w };

#pragma unroll
    for (int i = 0; i < 4; i++) {
        f[2 * i] = __uint_as_float(word[i] << 16);
        f[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
    }
}

/* value[i] += weight * v[i]; v holds 8 bf16 or 4 f32. */
template <bool BF16> DEVICE void accumulate(float value[8], uint4 v, float weight)
{
    float f[8];

    if constexpr (BF16) {
        widen_bf16(v, f);
    } else {
        f[0] = __uint_as_float(v.x);
        f[1] = __uint_as_float(v.y);
        f[2] = __uint_as_float(v.z);
        f[3] = __uint_as_float(v.w);
    }
#pragma unroll
    for (int i = 0; i < (BF16 ? 8 : 4); i++)
        value[i] = fmaf(f[i], weight, value[i]);
}

static inline cudaError_t launch(const void *kernel, const ep_cuda_args *a, const ep_cuda_launch *l)
{
    cudaLaunchAttribute overlap = {};
    cudaLaunchConfig_t config = {};
    void *args[] = { (void *)a };

    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim.x = l->n_blocks;
    config.gridDim.y = l->n_parts;
    config.blockDim.x = l->n_threads;
    config.gridDim.z = config.blockDim.y = config.blockDim.z = 1;
    config.dynamicSmemBytes = l->shared_bytes;
    config.stream = l->stream;
    config.attrs = &overlap;
    config.numAttrs = l->overlap ? 1 : 0;
    return cudaLaunchKernelExC(&config, kernel, args);
}

#endif
