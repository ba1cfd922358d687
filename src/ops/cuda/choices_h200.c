/* What was fastest on one H200 (2026-11-30, `switchyard bench roofline --kernels ..`): the
 * projections of a DeepSeek-V3 layer, TP 1. */
#include "ops/cuda/cuda.h"

const cuda_choice_row yard_cuda_choices_h200[] = {
    /* qkv_a */
    { 2112, 7168, 32, { &yard_gemm_few_fp8, 8, 0 } },
    { 2112, 7168, 128, { &yard_gemm_few_fp8, 14, 0 } },
    { 2112, 7168, 256, { &yard_gemm_few_fp8, 0, 48 } },
    /* q_a */
    { 1536, 7168, 32, { &yard_gemm_few_fp8, 8, 0 } },
    { 1536, 7168, 64, { &yard_gemm_few_fp8, 14, 0 } },
    { 1536, 7168, 128, { &yard_gemm_few_fp8, 14, 64 } },
    { 1536, 7168, 256, { &yard_gemm_few_fp8, 28, 64 } },
    /* kv_a */
    { 576, 7168, 8, { &yard_gemm_few_fp8, 4, 0 } },
    { 576, 7168, 32, { &yard_gemm_few_fp8, 8, 16 } },
    { 576, 7168, 64, { &yard_gemm_few_fp8, 8, 32 } },
    { 576, 7168, 256, { &yard_gemm_few_fp8, 14, 32 } },
    /* q_b */
    { 24576, 1536, 32, { &yard_gemm_few_fp8, 0, 0 } },
    { 24576, 1536, 64, { &yard_gemm_few_fp8, 0, 64 } },
    { 24576, 1536, 128, { &yard_gemm_wide192, 0, 0 } },
    { 24576, 1536, 256, { &yard_gemm_rows128, 0, 0 } },
    /* o */
    { 7168, 16384, 64, { &yard_gemm_few_fp8, 8, 0 } },
    { 7168, 16384, 128, { &yard_gemm_many_fp8, 16, 0 } },
    { 7168, 16384, 256, { &yard_gemm_rows128, 0, 0 } },
    /* shared_gate_up */
    { 4096, 7168, 64, { &yard_gemm_few_fp8, 14, 0 } },
    { 4096, 7168, 128, { &yard_gemm_few_fp8, 0, 32 } },
    { 4096, 7168, 256, { &yard_gemm_few_fp8, 0, 64 } },
    /* shared_down */
    { 7168, 2048, 16, { &yard_gemm_few_fp8, 0, 0 } },
    { 7168, 2048, 32, { &yard_gemm_few_fp8, 0, 16 } },
    { 7168, 2048, 64, { &yard_gemm_few_fp8, 0, 32 } },
    { 7168, 2048, 128, { &yard_gemm_few_fp8, 0, 64 } },
    { 7168, 2048, 256, { &yard_gemm_rows128, 0, 0 } },
    /* dense_gate_up */
    { 36864, 7168, 64, { &yard_gemm_few_fp8, 8, 0 } },
    { 36864, 7168, 128, { &yard_gemm_many_fp8, 16, 0 } },
    { 36864, 7168, 256, { &yard_gemm_wide192, 0, 0 } },
    /* dense_down */
    { 7168, 18432, 64, { &yard_gemm_few_fp8, 8, 0 } },
    { 7168, 18432, 128, { &yard_gemm_many_fp8, 16, 0 } },
    { 7168, 18432, 256, { &yard_gemm_rows128, 0, 0 } },
    /* router */
    { 256, 7168, 16, { &yard_gemm_few_bf16, 8, 0 } },
    { 256, 7168, 256, { &yard_gemm_few_bf16, 16, 32 } },
    /* eh_proj */
    { 7168, 14336, 64, { &yard_gemm_few_bf16, 8, 0 } },
    { 7168, 14336, 128, { &yard_gemm_few_bf16, 0, 64 } },
    { 7168, 14336, 256, { &yard_gemm_few_bf16, 0, 0 } },
};
const uint32_t yard_cuda_n_choices_h200 =
    sizeof(yard_cuda_choices_h200) / sizeof(yard_cuda_choices_h200[0]);
