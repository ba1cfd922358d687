/* What the kernels of combine share: the sum of a token's rows. */
#ifndef YARD_EP_CUDA_COMBINE_CUH
#define YARD_EP_CUDA_COMBINE_CUH

#include "ep/cuda/device.cuh"

/* The common shapes, with the own share kept apart: see cuda.h. */
struct ep_cuda_apart : ep_cuda_common {
};
template <typename ARGS> static constexpr bool keeps_own_apart = false;
template <> constexpr bool keeps_own_apart<ep_cuda_apart> = true;

template <bool BF16> DEVICE uint4 pack(const float value[8])
{
    if constexpr (BF16)
        return make_uint4(bf16_pair(value[0], value[1]), bf16_pair(value[2], value[3]),
                          bf16_pair(value[4], value[5]), bf16_pair(value[6], value[7]));
    else
        return make_uint4(__float_as_uint(value[0]), __float_as_uint(value[1]),
                          __float_as_uint(value[2]), __float_as_uint(value[3]));
}

/* For words of a result that look like poison: NaNs again. */
template <bool BF16> DEVICE uint32_t not_poison(void)
{
    return BF16 ? 0xfffefffeu : POISON - 1;
}

/* Vector v of the rows of a token, FLIGHT of them under way at a time, in the order of choices:
 * added to sum with their weights, or, when exact, stored a result_pitch apart. my_row, or -1, and
 * my_weight: of this lane's choice. */
template <bool BF16, bool EXACT, uint32_t FLIGHT, typename ARGS>
DEVICE void take_rows(const ARGS &a, int32_t my_row, float my_weight, uint32_t v, bool exists,
                      uint8_t *to, float sum[8])
{
#pragma unroll 1
    for (uint32_t m = __ballot_sync(ALL_LANES, my_row >= 0); m;) {
        uint4 in[FLIGHT];
        uint32_t rest = m;

#pragma unroll
        for (uint32_t i = 0; i < FLIGHT; i++, rest &= rest - 1) {
            const uint32_t row = (uint32_t)__shfl_sync(ALL_LANES, my_row, __ffs((int)rest) - 1);
            if (rest && exists)
                in[i] = get_vector((const uint8_t *)a.expert_y + (uint64_t)row * a.result_bytes,
                                   v * VECTOR, a.result_bytes, a.wide);
        }
#pragma unroll
        for (uint32_t i = 0; i < FLIGHT; i++, m &= m - 1) {
            const uint32_t k = (uint32_t)__ffs((int)m) - 1;
            const float w = EXACT ? 0.0f : __shfl_sync(ALL_LANES, my_weight, k);

            if (m == 0 || !exists)
                continue;
            if (EXACT)
                store_relaxed(to + (uint64_t)k * a.result_pitch,
                              without_poison(in[i], not_poison<BF16>()));
            else
                accumulate<BF16>(sum, in[i], w);
        }
    }
}

#endif
