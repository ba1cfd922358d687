/* The number formats of activations on the device, to the bit as the plain C definition has them.
 */
#ifndef YARD_OPS_CUDA_QUANTISE_CUH
#define YARD_OPS_CUDA_QUANTISE_CUH

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "ops/cuda/launch.h"
#include "ops/cuda/ptx.cuh"

/* As yard_bf16_round; host functions of base.h cannot be called here. */
static __device__ __forceinline__ float bf16_round(float x)
{
    const uint32_t bits = __float_as_uint(x);

    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return __uint_as_float((bits | 0x400000u) & 0xffff0000u);
    return __uint_as_float((bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
}

/* Round to nearest even, saturating; a NaN becomes 0x7f, as in yard_e4m3_from_f32. */
static __device__ __forceinline__ uint8_t e4m3_from_f32(float x)
{
    uint16_t pair;

    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
    return (uint8_t)pair;
}

/* The same for two, a in the lower byte. */
static __device__ __forceinline__ uint16_t e4m3_pair(float a, float b)
{
    uint16_t pair;

    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
    return pair;
}

/* The smallest power of two that is not below x; x > 0 and finite. */
static __device__ __forceinline__ float power_of_two_above(float x)
{
    const uint32_t bits = __float_as_uint(x);

    if (bits < 0x800000u) /* subnormal: the bits are a whole number of 2^-149 */
        return __uint_as_float(bits <= 1 ? bits : 1u << (32 - __clz((int)(bits - 1))));
    return __uint_as_float((bits + 0x7fffffu) & 0xff800000u);
}

/* amax / 448, correctly rounded, for the magnitude of a bf16 number: a product and one correction,
 * which all 32,640 of them were compared with. Infinity stays. */
static __device__ __forceinline__ float over_448(float amax)
{
    const float per = 1.0f / 448.0f;
    const float q = __fmul_rn(amax, per);
    const float exact = __fmaf_rn(__fmaf_rn(-448.0f, q, amax), per, q);

    return amax < __uint_as_float(0x7f800000u) ? exact : amax;
}

static __device__ __forceinline__ float group_scale(float amax, bool ue8m0)
{
    const float exact = over_448(amax);

    if (amax == 0.0f)
        return 1.0f;
    return ue8m0 ? power_of_two_above(exact) : exact;
}

static __device__ __forceinline__ float e4m3_value(uint8_t code)
{
    uint32_t halves;

    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)code));
    return __half2float(__ushort_as_half((uint16_t)(halves & 0xffffu)));
}

/* bf16 of two codes times their scale, the lower first: a value of an FP8 cache. */
static __device__ __forceinline__ uint32_t widen_pair(uint32_t codes, float scale)
{
    uint32_t halves;

    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)codes));
    return pack_bf16(__fmul_rn(__half2float(__ushort_as_half((uint16_t)halves)), scale),
                     __fmul_rn(__half2float(__ushort_as_half((uint16_t)(halves >> 16))), scale));
}

static __device__ __forceinline__ float plain_value(yard_dtype dtype, const void *data, size_t at)
{
    switch (dtype) {
    case YARD_F32:
        return ((const float *)data)[at];
    case YARD_BF16:
        return __uint_as_float((uint32_t)((const uint16_t *)data)[at] << 16);
    case YARD_F16:
        return __half2float(__ushort_as_half(((const uint16_t *)data)[at]));
    default:
        return e4m3_value(((const uint8_t *)data)[at]);
    }
}

#endif
