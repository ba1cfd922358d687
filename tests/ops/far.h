/* A CPU table with memory of its own, as a device has it: what the host sees of it are addresses
 * where nothing lies, so that a host that reads or writes them ends at once. Operations find the
 * memory behind the addresses in their arguments. It begins as NaNs in every format, and is never
 * used again when it is released. Operations run at once, or are recorded with their arguments: see
 * deferred.h for those that run late. */
#ifndef YARD_TESTS_OPS_FAR_H
#define YARD_TESTS_OPS_FAR_H

#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "ops/cpu/cpu.h"
#include "ops/ops.h"

/* A word of an argument struct may be a number and four bytes of padding, which hold whatever the
 * stack held, often the upper half of an address. So the lower half of these addresses is one that
 * no number in a struct has: 2^31 and more. */
static const uintptr_t far_begin = 0x123480000000;
static const size_t far_bytes = (size_t)1 << 30; /* of address space */

typedef struct far_memory {
    uint8_t *near, *far; /* where it is, and where it is said to be */
    size_t used_bytes;
} far_memory;

/* One for all streams of the program. */
static inline far_memory *far_all(void)
{
    static far_memory m;

    if (m.near)
        return &m;
    m.near = mmap(NULL, far_bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    m.far = mmap((void *)far_begin, far_bytes, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (m.near == MAP_FAILED || m.far == MAP_FAILED)
        abort();
    return &m;
}

static inline bool is_far(const void *p)
{
    return (uintptr_t)p >= far_begin && (uintptr_t)p < far_begin + far_bytes;
}

static inline void *far_find(const void *p)
{
    const far_memory *m = far_all();

    return is_far(p) ? m->near + ((const uint8_t *)p - m->far) : (void *)(uintptr_t)p;
}

/* All addresses in a struct. */
static inline void far_find_all(void *args, size_t n_bytes)
{
    for (size_t i = 0; i + sizeof(void *) <= n_bytes; i += sizeof(void *)) {
        void *p;

        memcpy(&p, (uint8_t *)args + i, sizeof(p));
        p = far_find(p);
        memcpy((uint8_t *)args + i, &p, sizeof(p));
    }
}

static inline yard_status far_allocate(void **out, yard_stream s, size_t n_bytes, yard_error *err)
{
    far_memory *m = far_all();

    (void)s;
    if (n_bytes > far_bytes - m->used_bytes)
        return yard_fail(err, YARD_ENOMEM, "far: %zu bytes", n_bytes);
    *out = m->far + m->used_bytes;
    memset(far_find(*out), 0xff, n_bytes);
    m->used_bytes += yard_align_up(n_bytes, 64);
    return YARD_OK;
}

static inline void far_release(yard_stream s, void *memory)
{
    (void)s;
    (void)memory;
}

static inline yard_status far_available(uint64_t *n_bytes, yard_stream s, yard_error *err)
{
    (void)s;
    (void)err;
    *n_bytes = far_bytes - far_all()->used_bytes;
    return YARD_OK;
}

static inline yard_status far_upload(yard_stream s, void *to, const void *host, size_t n_bytes,
                                     yard_error *err)
{
    if (!is_far(to) || is_far(host))
        abort();
    return yard_ops_cpu.upload(s, far_find(to), host, n_bytes, err);
}

static inline yard_status far_download(yard_stream s, void *host, const void *from, size_t n_bytes,
                                       yard_error *err)
{
    if (is_far(host) || !is_far(from))
        abort();
    return yard_ops_cpu.download(s, host, far_find(from), n_bytes, err);
}

/* Copies, whose addresses are far; of whole matrices, whose blocks begin at their first row. */
static inline yard_status far_prepare(struct yard_prepared **out, yard_matrix *w, yard_stream s,
                                      const yard_prepare_args *a, yard_error *err)
{
    for (uint32_t i = 0; i < a->n_matrices; i++) {
        const yard_matrix *from = &a->parts[i];
        const size_t bytes = yard_dtype_bytes(from->dtype);
        const uint32_t n_groups = yard_group_count(from->cols);
        void *values = NULL, *scale = NULL;

        if (a->n_parts != 1 || is_far(from->data) || from->row0 != 0)
            abort();
        if (far_allocate(&values, s, (size_t)from->rows * from->cols * bytes, err) != YARD_OK ||
            far_allocate(&scale, s, (size_t)from->rows * n_groups * sizeof(float), err) != YARD_OK)
            return YARD_ENOMEM;
        for (uint32_t r = 0; r < from->rows; r++)
            memcpy((uint8_t *)far_find(values) + (size_t)r * from->cols * bytes,
                   matrix_row(from, r), from->cols * bytes);
        for (uint32_t r = 0; from->scale && r < from->rows; r += from->block_rows)
            memcpy((float *)far_find(scale) + (size_t)r / from->block_rows * n_groups,
                   matrix_scale_row(from, r), n_groups * sizeof(float));
        w[i] = (yard_matrix){ .dtype = from->dtype,
                              .rows = from->rows,
                              .cols = from->cols,
                              .ld = from->cols,
                              .data = values,
                              .scale = from->scale ? scale : NULL,
                              .scale_ld = n_groups,
                              .block_rows = from->block_rows };
    }
    *out = NULL;
    return YARD_OK;
}

static inline void far_release_prepared(yard_stream s, struct yard_prepared *prepared)
{
    (void)s;
    (void)prepared;
}

/* A recorded operation, with its arguments as they were. */
typedef struct far_call {
    struct far_call *next;
    void (*run)(yard_stream s, const void *args);
    yard_batch batch;
    _Alignas(16) unsigned char args[];
} far_call;

typedef struct far_graph {
    far_call *first, **last;
} far_graph;

/* What is being recorded, and how often anything was run again. */
static far_graph *far_recording;
static uint32_t far_n_replays;

/* batch_at: where args point to the rows of a step; SIZE_MAX: they do not. */
static inline void far_issue(yard_stream s, void (*run)(yard_stream s, const void *args),
                             const void *args, size_t n_bytes, size_t batch_at)
{
    far_call *call;

    if (!far_recording) {
        run(s, args);
        return;
    }
    call = calloc(1, sizeof(*call) + n_bytes);
    if (!call)
        abort();
    call->run = run;
    memcpy(call->args, args, n_bytes);
    if (batch_at != SIZE_MAX) {
        const yard_batch *batch;

        memcpy(&batch, call->args + batch_at, sizeof(batch));
        call->batch = *batch;
        batch = &call->batch;
        memcpy(call->args + batch_at, &batch, sizeof(batch));
    }
    *far_recording->last = call;
    far_recording->last = &call->next;
}

static inline yard_status far_capture_begin(yard_stream s, yard_error *err)
{
    (void)s;
    (void)err;
    if (far_recording)
        abort();
    far_recording = calloc(1, sizeof(*far_recording));
    if (!far_recording)
        abort();
    far_recording->last = &far_recording->first;
    return YARD_OK;
}

static inline yard_status far_capture_end(yard_graph **out, yard_stream s, yard_error *err)
{
    (void)s;
    (void)err;
    *out = (yard_graph *)(void *)far_recording;
    far_recording = NULL;
    return YARD_OK;
}

static inline yard_status far_replay(yard_stream s, yard_graph *graph, float *us, yard_error *err)
{
    (void)us;
    (void)err;
    for (far_call *call = ((far_graph *)(void *)graph)->first; call; call = call->next)
        call->run(s, call->args);
    far_n_replays++;
    return YARD_OK;
}

static inline void far_release_graph(yard_stream s, yard_graph *graph)
{
    far_graph *g = (far_graph *)(void *)graph;

    (void)s;
    for (far_call *call = g ? g->first : NULL, *next; call; call = next) {
        next = call->next;
        free(call);
    }
    free(g);
}

#define FAR(op)                                                                                    \
    static inline void far_run_##op(yard_stream s, const void *args)                               \
    {                                                                                              \
        yard_##op##_args near = *(const yard_##op##_args *)args;                                   \
                                                                                                   \
        far_find_all(&near, sizeof(near));                                                         \
        yard_ops_cpu.op(s, &near);                                                                 \
    }                                                                                              \
    static inline void far_##op(yard_stream s, const yard_##op##_args *a)                          \
    {                                                                                              \
        far_issue(s, far_run_##op, a, sizeof(*a), SIZE_MAX);                                       \
    }

/* Those that have the rows of a step beside. */
#define FAR_BATCH(op)                                                                              \
    static inline void far_run_##op(yard_stream s, const void *args)                               \
    {                                                                                              \
        yard_##op##_args near = *(const yard_##op##_args *)args;                                   \
        yard_batch batch = *near.batch;                                                            \
                                                                                                   \
        far_find_all(&batch, sizeof(batch));                                                       \
        far_find_all(&near, sizeof(near));                                                         \
        near.batch = &batch;                                                                       \
        yard_ops_cpu.op(s, &near);                                                                 \
    }                                                                                              \
    static inline void far_##op(yard_stream s, const yard_##op##_args *a)                          \
    {                                                                                              \
        far_issue(s, far_run_##op, a, sizeof(*a), offsetof(yard_##op##_args, batch));              \
    }

#ifndef YARD_TESTS_OPS_DEFERRED_H
typedef yard_rms_norm_args yard_rms_norm_quant_args;
typedef yard_silu_mul_args yard_silu_mul_quant_args;
#endif

FAR(embed)
FAR(rms_norm_quant)
FAR(linear)
FAR(head_linear)
FAR_BATCH(rope_q)
FAR_BATCH(rope_append_kv)
FAR_BATCH(mla_decode)
FAR_BATCH(mla_prefill)
FAR_BATCH(gqa_append_kv)
FAR_BATCH(gqa_attend)
FAR(moe_route)
FAR(moe_scatter)
FAR(count_offsets)
FAR(moe_gather)
FAR(silu_mul_quant)
FAR(residual_add)
FAR(quantise)
FAR(select_rows)

#undef FAR
#undef FAR_BATCH

static inline void far_run_grouped_linear(yard_stream s, const void *args)
{
    const yard_grouped_linear_args *a = args;
    yard_grouped_linear_args near = *a;
    yard_matrix *w = calloc(a->n_groups, sizeof(*w));

    if (!w)
        abort();
    memcpy(w, a->w, a->n_groups * sizeof(*w));
    far_find_all(&near, sizeof(near));
    far_find_all(w, a->n_groups * sizeof(*w));
    near.w = w;
    yard_ops_cpu.grouped_linear(s, &near);
    free(w);
}

static inline void far_grouped_linear(yard_stream s, const yard_grouped_linear_args *a)
{
    far_issue(s, far_run_grouped_linear, a, sizeof(*a), SIZE_MAX);
}

static inline void far_sample(yard_stream s, const yard_sample_args *a)
{
    yard_sample_args near = *a;
    const int32_t n = *(const int32_t *)far_find(a->n_rows);
    yard_sample_row *rows = calloc((size_t)n + 1, sizeof(*rows));

    if (!rows || !is_far(a->rows))
        abort();
    far_find_all(&near, sizeof(near));
    memcpy(rows, near.rows, (size_t)n * sizeof(*rows));
    for (int32_t i = 0; i < n; i++) /* a device would not find lists of the host */
        if (!is_far(rows[i].prompt) || !is_far(rows[i].output) || !is_far(rows[i].bias_value))
            abort();
    far_find_all(rows, (size_t)n * sizeof(*rows));
    near.rows = rows;
    yard_ops_cpu.sample(s, &near);
    free(rows);
}

static inline yard_status far_open(yard_stream *out, const yard_ops_config *config, yard_error *err)
{
    return yard_ops_cpu.open(out, config, err);
}

static inline void far_close(yard_stream s)
{
    yard_ops_cpu.close(s);
}

static inline size_t far_workspace_bytes(const yard_ops_config *config)
{
    return yard_ops_cpu.workspace_bytes(config);
}

static inline const char *far_describe(yard_stream s)
{
    return yard_ops_cpu.describe(s);
}

static inline void far_synchronise(yard_stream s)
{
    yard_ops_cpu.synchronise(s);
}

static inline yard_status far_check(yard_stream s, yard_error *err)
{
    return yard_ops_cpu.check(s, err);
}

static const yard_ops far_ops = {
    .name = "far",
    .workspace_bytes = far_workspace_bytes,
    .open = far_open,
    .close = far_close,
    .describe = far_describe,
    .synchronise = far_synchronise,
    .check = far_check,
    .available = far_available,
    .allocate = far_allocate,
    .release = far_release,
    .upload = far_upload,
    .download = far_download,
    .prepare = far_prepare,
    .release_prepared = far_release_prepared,
    .capture_begin = far_capture_begin,
    .capture_end = far_capture_end,
    .replay = far_replay,
    .release_graph = far_release_graph,
    .embed = far_embed,
    .rms_norm_quant = far_rms_norm_quant,
    .linear = far_linear,
    .grouped_linear = far_grouped_linear,
    .head_linear = far_head_linear,
    .rope_q = far_rope_q,
    .rope_append_kv = far_rope_append_kv,
    .mla_decode = far_mla_decode,
    .mla_prefill = far_mla_prefill,
    .gqa_append_kv = far_gqa_append_kv,
    .gqa_attend = far_gqa_attend,
    .moe_route = far_moe_route,
    .moe_scatter = far_moe_scatter,
    .count_offsets = far_count_offsets,
    .moe_gather = far_moe_gather,
    .silu_mul_quant = far_silu_mul_quant,
    .residual_add = far_residual_add,
    .quantise = far_quantise,
    .select_rows = far_select_rows,
    .sample = far_sample,
};

#endif
