/* The forms of wgmma that attention needs beside those of wgmma.cuh, bf16 with f32 sums, K = 16:
 * A from registers, and B whose K runs along rows (values of a tile, read as they lie).
 *
 * A thread's part of A [64, 16]: rows 16 warp + lane / 4 (+ 8) and columns 2 (lane % 4) (+ 8), two
 * values a register: {row, row + 8, row's columns + 8, both}. */
#ifndef YARD_OPS_CUDA_WGMMA_ATTEND_CUH
#define YARD_OPS_CUDA_WGMMA_ATTEND_CUH

#include "ops/cuda/wgmma.cuh"

/* B of [K, N] with 128-byte rows of 64 columns, swizzled by 128 bytes: rows of 8 lie 1024 bytes
 * apart, the next 64 columns chunk_bytes. The next 16 of K are +128. */
static __device__ __forceinline__ uint64_t wgmma_descriptor_rows(uint32_t address,
                                                                 uint32_t chunk_bytes)
{
    return (uint64_t)((address & 0x3ffffu) >> 4) | (uint64_t)(chunk_bytes >> 4) << 16 |
           (uint64_t)64 << 32 | (uint64_t)1 << 62;
}

/* A of [64, 16] without swizzle: [2][64] pieces of 16 bytes, 8 values each. */
static __device__ __forceinline__ uint64_t wgmma_descriptor_step(uint32_t address)
{
    return (uint64_t)((address & 0x3ffffu) >> 4) | (uint64_t)64 << 16 | (uint64_t)8 << 32;
}

/* clang-format off */
#define YARD_NAMES_256 YARD_NAMES_128 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define YARD_SIXTEEN(i) YARD_FOUR(i), YARD_FOUR(i + 4), YARD_FOUR(i + 8), YARD_FOUR(i + 12)
#define YARD_REGS_256 YARD_REGS_128, YARD_SIXTEEN(64), YARD_SIXTEEN(80), YARD_SIXTEEN(96), \
                      YARD_SIXTEEN(112)

/* d [64, 256] (+)= a . b, both in shared memory, b by rows. */
static __device__ __forceinline__ void multiply_rows_256(float (&d)[128], uint64_t a, uint64_t b,
                                                         int keep)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" YARD_NAMES_256
                 "}, %128, %129, p, 1, 1, 0, 1;\n}"
                 : YARD_REGS_256
                 : "l"(a), "l"(b), "r"(keep));
}

/* d [64, 64] (+)= a . b^T, a in registers. */
static __device__ __forceinline__ void multiply_registers_64(float (&d)[32], const uint32_t *a,
                                                             uint64_t b, int keep)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" YARD_NAMES_64
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
                 : YARD_REGS_64
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

/* d [64, 128] += a . b, a in registers, b by rows. */
static __device__ __forceinline__ void multiply_registers_rows_128(float (&d)[64],
                                                                   const uint32_t *a, uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" YARD_NAMES_128
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : YARD_REGS_128
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
/* clang-format on */

#endif
