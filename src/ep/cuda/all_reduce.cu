/* The sum over an instance's ranks in one kernel. Landing places are filled with poison, which
 * valid data never has: rows prove their own arrival, word by word, and whoever has read a place
 * poisons it again. That is done when the kernel ends, before this rank sends rows of the next sum,
 * which a peer has before it writes the place again (all_reduce_impl.h).
 *
 * A thread takes the same vectors of a row on every rank: it sends its rank's to the peers, all of
 * them first, then waits for theirs. Blocks that wait have sent, so blocks that are not resident
 * yet keep nobody from finishing. */
#include "ep/cuda/all_reduce.h"

#include "ep/cuda/device.cuh"

DEVICE uint64_t landing_at(const ep_cuda_args &a, const ep_cuda_sum &s, uint32_t epoch,
                           uint32_t source, uint32_t vector)
{
    const uint32_t slot = epoch % 2 * a.tp + (source - s.first);

    return s.at_sets + slot * s.slot_bytes + (uint64_t)vector * VECTOR;
}

/* acc += the values of v; f32 takes the first four. */
template <bool BF16> DEVICE void add(float (&acc)[8], uint4 v)
{
    const uint32_t word[4] = { v.x, v.y, v.z, v.w };

#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (BF16) {
            acc[2 * i] = __fadd_rn(acc[2 * i], __uint_as_float(word[i] << 16));
            acc[2 * i + 1] = __fadd_rn(acc[2 * i + 1], __uint_as_float(word[i] & 0xffff0000u));
        } else {
            acc[i] = __fadd_rn(acc[i], __uint_as_float(word[i]));
        }
    }
}

template <bool BF16> DEVICE uint4 rounded(const float (&acc)[8])
{
    if constexpr (BF16)
        return make_uint4(bf16_pair(acc[0], acc[1]), bf16_pair(acc[2], acc[3]),
                          bf16_pair(acc[4], acc[5]), bf16_pair(acc[6], acc[7]));
    else
        return make_uint4(__float_as_uint(acc[0]), __float_as_uint(acc[1]), __float_as_uint(acc[2]),
                          __float_as_uint(acc[3]));
}

DEVICE void send(const ep_cuda_args &a, const ep_cuda_sum &s, uint32_t epoch, uint32_t vector)
{
    const uint8_t *own = (const uint8_t *)s.x + (uint64_t)vector * VECTOR;
    const uint4 v = without_poison(load_plain(own), a.poison_substitute);
    const uint64_t at = landing_at(a, s, epoch, a.rank, vector);

    for (uint32_t i = 1; i < a.tp; i++)
        store_relaxed(place(a, s.first + (a.rank - s.first + i) % a.tp, at), v);
}

template <bool BF16>
DEVICE void receive(const ep_cuda_args &a, const ep_cuda_sum &s, uint32_t epoch, uint32_t vector)
{
    uint8_t *own = (uint8_t *)s.x + (uint64_t)vector * VECTOR;
    float acc[8] = {};

    for (uint32_t r = s.first; r < s.first + a.tp; r++) {
        uint8_t *p = place(a, a.rank, landing_at(a, s, epoch, r, vector));
        uint4 v;

        if (r == a.rank) {
            v = without_poison(load_plain(own), a.poison_substitute);
        } else {
            v = load_relaxed(p);
            if (!await_vector(a, p, &v, EP_FAULT_SUM, r))
                return;
            store_plain(p, poison());
        }
        add<BF16>(acc, v);
    }
    store_plain(own, rounded<BF16>(acc));
}

/* The last block ends the sum: nobody reads the epoch any more. */
DEVICE void finish(const ep_cuda_sum &s, uint32_t epoch)
{
    __syncthreads();
    if (threadIdx.x != 0 || atomicAdd(&s.state->n_done, 1u) != gridDim.x - 1)
        return;
    s.state->n_done = 0;
    s.state->epoch = epoch + 1;
}

template <bool BF16>
static __global__ void __launch_bounds__(ALL_REDUCE_THREADS, ALL_REDUCE_BLOCKS_PER_SM)
    all_reduce_kernel(const __grid_constant__ ep_cuda_args a, const __grid_constant__ ep_cuda_sum s)
{
    const uint32_t epoch = load_word(&s.state->epoch), failed = load_word(a.error);
    const int32_t n_rows = load_shallow(s.n_rows);
    const uint32_t first = blockIdx.x * ALL_REDUCE_THREADS + threadIdx.x;
    const uint32_t step = gridDim.x * ALL_REDUCE_THREADS;

    if (failed || n_rows == 0) /* the same on all blocks: no sum begins */
        return;
    if (n_rows < 0 || (uint32_t)n_rows > s.max_rows) {
        report(a, EP_FAULT_TOKENS, n_rows);
        return;
    }
    const uint32_t n = (uint32_t)n_rows * s.row_vectors;
    for (uint32_t v = first; v < n; v += step)
        send(a, s, epoch, v);
    for (uint32_t v = first; v < n; v += step)
        receive<BF16>(a, s, epoch, v);
    finish(s, epoch);
}

cudaError_t yard_ep_cuda_launch_all_reduce(const ep_cuda_args *a, const ep_cuda_sum *s,
                                           uint32_t n_blocks, cudaStream_t stream)
{
    if (s->bf16)
        all_reduce_kernel<true><<<n_blocks, ALL_REDUCE_THREADS, 0, stream>>>(*a, *s);
    else
        all_reduce_kernel<false><<<n_blocks, ALL_REDUCE_THREADS, 0, stream>>>(*a, *s);
    return cudaGetLastError();
}
