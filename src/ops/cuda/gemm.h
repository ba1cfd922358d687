/* The matrix product kernel: y = x . w^T for one or many groups of rows, FP8 with block scales or
 * bf16, on tensor cores. One template (gemm.cuh), one variant a file (gemm_*.cu). Weights are what
 * prepare.c made: rows padded with zeros to whole 128s, columns to whole 16 bytes.
 *
 * Plain C: CUDA's types are opaque here. */
#ifndef YARD_OPS_CUDA_GEMM_H
#define YARD_OPS_CUDA_GEMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "ops/ops.h"

enum {
    GEMM_TILE_ROWS = 128,   /* rows of w in a tile */
    GEMM_W_BOX = 64,        /* rows of w in a box, for tiles of other heights */
    GEMM_BLOCK_BYTES = 128, /* of K in a stage: 128 FP8 or 64 bf16 values */
    GEMM_MAX_GROUPS = 512,
    GEMM_MAX_BOXES = 16,
    GEMM_MAX_ARRIVALS = 65536,
    GEMM_MAX_BLOCKS = 160,  /* thread blocks of a launch: more than Hopper has processors */
    GEMM_SPLIT_WIDTH = 128, /* rows of x in a tile, at most, where K is split */
};

/* A CUtensorMap. */
typedef struct yard_tensor_map {
    uint64_t opaque[16];
} __attribute__((aligned(64))) yard_tensor_map;

/* x in boxes of several heights, because a tile's width is only known on the device: box[0] has one
 * row (gathered x), box[i] variant->box_rows[i]. */
typedef struct yard_gemm_maps {
    yard_tensor_map w;
    yard_tensor_map box[GEMM_MAX_BOXES];
} yard_gemm_maps;

/* Device pointers, as in yard_grouped_linear_args. */
typedef struct yard_gemm_args {
    uint32_t n_groups;
    uint32_t n_boxes;         /* maps of x that are there */
    const int32_t *offset;    /* [n_groups + 1]; NULL: one group from row 0 on */
    const int32_t *row_count; /* [n_groups]; [1] when offset is NULL; NULL: up to the next offset */
    const int32_t *x_index;
    const float *x_scale; /* [.., n_blocks]; FP8 only */
    const float *w_scale; /* [n_groups, group_rows / 128, n_blocks] */
    void *y;
    uint32_t y_ld;
    bool y_f32;
    bool y_aligned;       /* bf16: rows of 16-byte pieces */
    uint32_t n_out;       /* rows of w that count */
    uint32_t n_tiles;     /* of w, in one group */
    uint32_t group_rows;  /* of w, from one group to the next: a multiple of 128 */
    uint32_t n_blocks;    /* of K */
    uint32_t first_group; /* of w */
    bool w_once;          /* each row of w is read by one tile only: no need to keep it in L2 */
    /* split K (variants that can): blocks of K a thread block takes at least; 0: whole tiles */
    uint32_t min_blocks;
    uint32_t tile_width; /* rows of x in a tile there, at most */
    bool early;          /* there is one tile of rows at most, so w's order is known beforehand */
    float *partial;      /* [2 * n_thread_blocks, 128, max_width] */
    uint32_t *arrivals;  /* [tiles] zero before and after */
    /* Heads (variants that are for them): every group has all row_count[0] rows. Group g reads them
     * from column g * x_step of x and rows [w_first + g * w_step, ..) of w, and writes from column
     * g * y_step of y; rows whose row_mask (may be NULL) is 0 are not written. */
    uint32_t x_step, w_first, w_step, y_step;
    const uint8_t *row_mask;
} yard_gemm_args;

typedef struct yard_gemm_variant {
    const char *name;
    yard_dtype dtype;
    uint32_t max_width; /* rows of x in a tile */
    uint32_t n_boxes;   /* box 0 included */
    uint32_t box_rows[GEMM_MAX_BOXES];
    uint32_t w_rows; /* rows of w in a tile */
    bool splits;
    /* Once per device: raises the shared memory limit, says how many blocks run at once. */
    yard_status (*open)(uint32_t *n_thread_blocks, yard_error *err);
    yard_status (*launch)(const yard_gemm_maps *maps, const yard_gemm_args *a,
                          uint32_t n_thread_blocks, void *stream, yard_error *err);
} yard_gemm_variant;

extern const yard_gemm_variant yard_gemm_few_fp8;       /* linear, to 128 rows a tile, split K */
extern const yard_gemm_variant yard_gemm_few_bf16;      /* the same for bf16 */
extern const yard_gemm_variant yard_gemm_many_fp8;      /* linear, more rows, split K */
extern const yard_gemm_variant yard_gemm_group96;       /* groups of up to 96 rows */
extern const yard_gemm_variant yard_gemm_group144;      /* groups of some more */
extern const yard_gemm_variant yard_gemm_rows128;       /* many rows, 128 a tile */
extern const yard_gemm_variant yard_gemm_rows192;       /* many rows, 192 a tile */
extern const yard_gemm_variant yard_gemm_wide192;       /* many rows, 128 a tile, 192 columns */
extern const yard_gemm_variant yard_gemm_group144_bf16; /* some of these for bf16 */
extern const yard_gemm_variant yard_gemm_rows128_bf16;
extern const yard_gemm_variant yard_gemm_heads_bf16; /* one matrix a head, the same rows for all */

#ifdef __cplusplus
}
#endif

#endif
