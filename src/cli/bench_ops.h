/* What the files of `switchyard bench ops` share.
 *
 * A *case* is one operation at one size. A *set* is everything one call of it touches, in one block
 * of memory: laid out once over host memory, where it is filled, and again over every block on the
 * device. Calls walk over so many sets that no cache still holds what the next one reads.
 *
 * A device is one file bench_ops_<name>.c and a line of the table in bench_ops.c. */
#ifndef YARD_CLI_BENCH_OPS_H
#define YARD_CLI_BENCH_OPS_H

#include <yard/engine.h>

#include "cli/bench.h"
#include "model/model.h"

/* devices */

typedef struct yard_bench_ops_device {
    const char *name; /* "cpu", "cuda" */
    /* The device's table named "fast" or "deterministic"; NULL: it has no such one. */
    const yard_ops *(*table)(const char *name);
    /* Whether results are the definition's bits; otherwise they are compared with a tolerance. */
    bool (*exact)(const yard_ops_config *config);
    /* The hardware as rows name it; static storage. */
    const char *(*hardware)(void);
    /* Memory that operations read, n_bytes, 64-byte aligned at least; NULL when there is none. */
    void *(*alloc)(size_t n_bytes);
    void (*release)(void *block, size_t n_bytes);
    void (*upload)(void *device, const void *host, size_t n_bytes);
    void (*download)(void *host, const void *device, size_t n_bytes);
    size_t (*cache_bytes)(void); /* of the largest cache */
    /* Bytes/s of a plain read and operations/s (two a multiply-add) with activations of a dtype
     * that the hardware reaches in this very run; not above 0 when that failed. */
    double (*read_rate)(const yard_ops_config *config);
    double (*flop_rate)(const yard_ops_config *config, yard_dtype x);
    /* Operations read weights where they lie; otherwise the table's prepare brings them there. */
    bool in_place;
    /* Tables are variants of one, by their names; otherwise the command line picks the variant. */
    bool tables_are_variants;
    /* The duration of fn(ctx), which enqueues one call. */
    double (*time_us)(const yard_ops *ops, yard_stream s, void (*fn)(void *ctx), void *ctx);
} yard_bench_ops_device;

extern const yard_bench_ops_device yard_bench_ops_cpu, yard_bench_ops_cuda;

/* a BLAS to compare with */

typedef struct yard_bench_blas yard_bench_blas;

/* Opens the library at path (as dlopen takes it). Errors: YARD_EIO, YARD_ENOTSUP without
 * cblas_sgemm. */
yard_status yard_bench_blas_open(yard_bench_blas **out, const char *path, uint32_t n_threads,
                                 yard_error *err);
void yard_bench_blas_close(yard_bench_blas *blas); /* NULL is fine */

/* Times, flops, bytes and verified of x [m, k] . w [n, k]^T in f32. */
yard_status yard_bench_blas_time(const yard_bench_blas *blas, uint32_t m, uint32_t n, uint32_t k,
                                 uint32_t n_repeats, yard_bench_row *row, yard_error *err);

/* cases */

typedef struct yard_bench_ops_size {
    const yard_model_config *model;
    uint32_t n_tokens;
    uint32_t context;   /* positions of a cached sequence that decode reads */
    uint32_t n_experts; /* of this rank */
    yard_kv_dtype kv_dtype;
} yard_bench_ops_size;

/* An output: n_rows rows of n_cols values are compared. */
typedef struct yard_bench_ops_out {
    yard_rows rows; /* dtype F32 with whole: 32-bit integers */
    uint32_t n_rows, n_cols;
    bool whole;
} yard_bench_ops_out;

/* What is filled on the host before it is uploaded; NULL for what only is written. */
typedef struct yard_bench_ops_fill {
    void *at;
    yard_dtype dtype;
    size_t n;
    bool positive; /* scales */
    /* n values in each of so many rows, row_bytes apart; 0: n in all */
    size_t n_rows, row_bytes;
} yard_bench_ops_fill;

enum { BENCH_OPS_MAX_FILLS = 16, BENCH_OPS_MAX_OUTS = 2, BENCH_OPS_SHAPE_BYTES = 96 };

typedef struct yard_bench_ops_set {
    yard_arena arena; /* base NULL: only measured */
    union {
        yard_linear_args linear;
        yard_grouped_linear_args grouped;
        yard_head_linear_args head;
        yard_mla_decode_args decode;
        yard_mla_prefill_args prefill;
        yard_gqa_attend_args gqa;
        yard_gqa_append_kv_args gqa_append;
        yard_moe_route_args route;
        yard_moe_scatter_args scatter;
        yard_moe_gather_args gather;
        yard_rms_norm_args norm;
        yard_silu_mul_args silu;
        yard_quantise_args quantise;
        yard_rope_q_args rope_q;
        yard_rope_append_kv_args append;
        yard_residual_add_args residual;
        yard_sample_args sample;
    } args;
    yard_batch batch;
    yard_matrix *w; /* of grouped_linear: a host array, malloc'd, freed with the set */
    struct yard_prepared *prepared; /* of products on devices that are not in place */
    int32_t *n_rows;
    yard_bench_ops_fill fills[BENCH_OPS_MAX_FILLS];
    uint32_t n_fills;
    yard_bench_ops_out outs[BENCH_OPS_MAX_OUTS];
    uint32_t n_outs;
} yard_bench_ops_set;

typedef struct yard_bench_ops_case {
    const char *op;   /* as in ops.h */
    const char *what; /* which use of it: "q_b" */
    /* False: the model has no such use. */
    bool (*applies)(const yard_bench_ops_size *size);
    /* Puts everything into set->arena and set->args; called over NULL to measure. Integers are
     * written when host is true. */
    void (*place)(const struct yard_bench_ops_case *c, const yard_bench_ops_size *size,
                  yard_bench_ops_set *set, bool host);
    void (*run)(const yard_ops *ops, yard_stream s, const yard_bench_ops_set *set);
    /* Puts what the table prepares from host's weights into set; NULL: no weights. */
    yard_status (*prepare)(const yard_ops *ops, yard_stream s, const yard_bench_ops_set *host,
                           yard_bench_ops_set *set, yard_error *err);
    /* Cuts a call to a piece that the definition computes quickly. */
    void (*shrink)(yard_bench_ops_set *set);
    /* Bytes that must move, operations, and the text of the shape. */
    void (*count)(const struct yard_bench_ops_case *c, const yard_bench_ops_size *size,
                  const yard_bench_ops_set *host, double *bytes, double *flops,
                  char shape[BENCH_OPS_SHAPE_BYTES]);
    yard_dtype x; /* of the activations: which peak counts */
    uint32_t id;  /* private to the file of the case */
} yard_bench_ops_case;

/* All cases of a file; *n is their number. */
const yard_bench_ops_case *yard_bench_ops_products(uint32_t *n);
const yard_bench_ops_case *yard_bench_ops_latent(uint32_t *n);
const yard_bench_ops_case *yard_bench_ops_moe(uint32_t *n);
const yard_bench_ops_case *yard_bench_ops_rows(uint32_t *n);
const yard_bench_ops_case *yard_bench_ops_gqa(uint32_t *n);
const yard_bench_ops_case *yard_bench_ops_sample(uint32_t *n);

/* for the files of cases: memory of a set */

void *yard_bench_ops_take(yard_bench_ops_set *set, yard_dtype dtype, size_t n, bool fill);
float *yard_bench_ops_take_scales(yard_bench_ops_set *set, size_t n);
int32_t *yard_bench_ops_take_ints(yard_bench_ops_set *set, size_t n);
/* Rows of activations, scales too when FP8. */
yard_rows yard_bench_ops_take_rows(yard_bench_ops_set *set, yard_dtype dtype, size_t n_rows,
                                   uint32_t n_cols, bool fill);
yard_matrix yard_bench_ops_take_matrix(yard_bench_ops_set *set, yard_dtype dtype, uint32_t rows,
                                       uint32_t cols, uint32_t block_rows);
void yard_bench_ops_add_out(yard_bench_ops_set *set, yard_rows rows, uint32_t n_rows,
                            uint32_t n_cols, bool whole);
/* The number of rows, as operations read it. */
int32_t *yard_bench_ops_take_count(yard_bench_ops_set *set, uint32_t n, bool host);

/* set->batch and a cache for it, of size->kv_dtype. Tokens are the last ones of sequences,
 * n_generated each, whose pages lie in random order; 0: all are one prompt. */
void yard_bench_ops_place_batch(const yard_bench_ops_size *size, yard_bench_ops_set *set,
                                uint32_t n_generated, bool host);
yard_kv_layer yard_bench_ops_place_cache(const yard_bench_ops_size *size, yard_bench_ops_set *set,
                                         uint32_t n_generated, bool fill);

double yard_bench_ops_matrix_bytes(const yard_matrix *m);
double yard_bench_ops_rows_bytes(yard_rows x, double n_rows, double n_cols);

/* Cuts a call to max_rows rows, whose result is their first n_cols columns. */
void yard_bench_ops_shrink_rows(yard_bench_ops_set *set, uint32_t max_rows, uint32_t n_cols);
/* For calls that the definition computes quickly as they are. */
void yard_bench_ops_shrink_nothing(yard_bench_ops_set *set);

/* Fixed values for everything that is to be filled. */
void yard_bench_ops_fill_set(yard_bench_ops_set *set);

/* Whether the outputs of got are those of want, both in host memory: want says how much of them. */
bool yard_bench_ops_agrees(const yard_bench_ops_set *got, const yard_bench_ops_set *want,
                           bool exact);

/* A fixed sequence of whole numbers below n. */
uint32_t yard_bench_ops_random(uint64_t *state, uint32_t n);

#endif
