/* MLA decode on tensor cores: absorbed attention over the paged latent cache of DeepSeek models,
 * bf16 or FP8, rank 512 and 64 rotated dimensions. Plain C. */
#ifndef YARD_OPS_CUDA_MLA_DECODE_H
#define YARD_OPS_CUDA_MLA_DECODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "ops/cuda/gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MLA_RANK = 512,
    MLA_ROPE = 64,
    MLA_WIDTH = MLA_RANK + MLA_ROPE,
    MLA_CODES_CHUNKS = 5, /* of 128 bytes: an FP8 row's codes and scales */
    MLA_ROWS = 64,        /* query rows (heads of some tokens) of a thread block */
    MLA_BOX_HEADS = 8,    /* that the copy engine brings at once */
    MLA_MAX_CHAIN = 4,    /* tokens of a sequence that read the cache together */
    MLA_MAX_SPLITS = 16,  /* of a row in the deterministic table */
    MLA_MAX_BLOCKS = 160,
    /* partial results kept at once, a block: [64, 512] bf16 and 64 f32 */
    MLA_BLOCK_ROOMS = 2,
    MLA_VALUE_WARPS = 8,
    MLA_FIXED_BLOCK_ROOMS = 2 * MLA_MAX_SPLITS, /* deterministic */
    MLA_ITEM_BYTES = 16,
    MLA_SPLIT_BYTES = 8,
    MLA_RECORD_BYTES = 4096,
    MLA_PATIENCE_NS = 1000000,
    MLA_ROOM_BYTES = MLA_ROWS * MLA_RANK * 2
};

/* Where the blocks of a launch meet; zeros at first. left: a block waited in vain, by turns. pairs:
 * two blocks share a row, and each warp adds one, in the room of the first part; who finds an odd
 * number is the second. */
typedef struct yard_mla_meeting {
    uint32_t arrived, left[2];
    uint32_t pairs[MLA_BLOCK_ROOMS * MLA_MAX_BLOCKS][MLA_VALUE_WARPS];
} yard_mla_meeting;

/* A stream's memory for the kernel. Plans are made before the kernels ahead are done, so a launch
 * must not write where the one before still reads: there are two of each, taken by turns. The
 * launch before the last is done: the last one waited for it before it let this one begin. */
typedef struct yard_mla_workspace {
    void *items;   /* [2, MLA_MAX_BLOCKS, max_items] MLA_ITEM_BYTES: what each block does */
    void *splits;  /* [2, MLA_MAX_BLOCKS, MLA_MAX_BLOCKS] MLA_SPLIT_BYTES: where parts lie, in each
                    * block's words */
    void *records; /* [2, MLA_MAX_BLOCKS] MLA_RECORD_BYTES: plans to find again; zeros at first */
    void *partial; /* [rooms] MLA_ROOM_BYTES */
    float *lse;    /* [rooms, 64] log2 of sums of exponentials */
    yard_mla_meeting *meeting;
    uint32_t patience_ns; /* how long a block waits for the others */
    uint32_t n_thread_blocks, max_items, max_rows;
    uint32_t turn;
} yard_mla_workspace;

typedef struct yard_mla_decode_task {
    yard_batch batch;
    uint32_t n_heads, head_dim;
    float scale_log2;         /* softmax_scale * log2(e) */
    yard_rows q_latent, q, y; /* bf16, whole 16-byte pieces a head */
    bool deterministic;
    bool boxes;        /* heads come in whole boxes of MLA_BOX_HEADS: queries can be copied so */
    uint32_t max_rows; /* those two are set by the launch */
    yard_mla_workspace space;
} yard_mla_decode_task;

/* How the copy engine sees the task's memory; queries if it has boxes. */
typedef struct yard_mla_decode_maps {
    bool fp8; /* which cache */
    /* boxes of [3 chunks of 64 columns, 64 rows]; FP8: of [5 chunks of 128 bytes, 64 rows], codes
     * and scales, and keys are the rotated ones, [1 chunk of 64 columns, 64 rows] */
    yard_tensor_map cache, keys;
    yard_tensor_map latent, rotated; /* [8 chunks or 1, 1 row, MLA_BOX_HEADS heads] */
} yard_mla_decode_maps;

/* How many thread blocks run at once; raises the shared memory limit. Errors of both: YARD_EDEVICE.
 */
yard_status yard_cuda_mla_decode_open(uint32_t *n_thread_blocks, yard_error *err);
/* space is the stream's; t's is not read. */
yard_status yard_cuda_mla_decode_launch(const yard_mla_decode_maps *maps,
                                        const yard_mla_decode_task *t, yard_mla_workspace *space,
                                        void *stream, yard_error *err);

#ifdef __cplusplus
}
#endif

#endif
