/* A CPU table whose operations run as late as the interface allows: not before somebody waits for
 * the stream, and then on another thread. Host code that reads what an operation writes, or changes
 * what one will read, without waiting, gets other results than with yard_ops_cpu. */
#ifndef YARD_TESTS_OPS_DEFERRED_H
#define YARD_TESTS_OPS_DEFERRED_H

#include <pthread.h>
#include <stdlib.h>

#include "ops/ops.h"

typedef struct deferred_call {
    struct deferred_call *next;
    void (*run)(yard_stream s, const void *args); /* an operation of yard_ops_cpu */
    void (*host)(void *ctx);                      /* or a call of another room */
    _Alignas(16) unsigned char args[];
} deferred_call;

typedef struct deferred_stream {
    yard_stream inner;
    deferred_call *first, **last;
} deferred_stream;

static inline deferred_stream *deferred_of(yard_stream s)
{
    return (deferred_stream *)(void *)s;
}

static inline void deferred_push(yard_stream stream, void (*run)(yard_stream s, const void *args),
                                 void (*host)(void *ctx), const void *args, size_t n_bytes)
{
    deferred_stream *s = deferred_of(stream);
    deferred_call *call = malloc(sizeof(*call) + n_bytes);

    if (!call)
        abort();
    *call = (deferred_call){ .run = run, .host = host };
    memcpy(call->args, args, n_bytes);
    *s->last = call;
    s->last = &call->next;
}

static inline void *deferred_run(void *ctx)
{
    deferred_stream *s = ctx;

    for (deferred_call *call = s->first, *next; call; call = next) {
        next = call->next;
        if (call->run)
            call->run(s->inner, call->args);
        else
            call->host(call->args);
        free(call);
    }
    s->first = NULL;
    s->last = &s->first;
    return NULL;
}

static inline void deferred_synchronise(yard_stream stream)
{
    pthread_t thread;

    if (pthread_create(&thread, NULL, deferred_run, deferred_of(stream)) != 0)
        abort();
    pthread_join(thread, NULL);
}

static inline yard_status deferred_check(yard_stream stream, yard_error *err)
{
    return yard_ops_cpu.check(deferred_of(stream)->inner, err);
}

static inline yard_status deferred_upload(yard_stream stream, void *to, const void *host,
                                          size_t n_bytes, yard_error *err)
{
    deferred_synchronise(stream);
    return yard_ops_cpu.upload(deferred_of(stream)->inner, to, host, n_bytes, err);
}

static inline yard_status deferred_download(yard_stream stream, void *host, const void *from,
                                            size_t n_bytes, yard_error *err)
{
    deferred_synchronise(stream);
    return yard_ops_cpu.download(deferred_of(stream)->inner, host, from, n_bytes, err);
}

static inline yard_status deferred_available(uint64_t *n_bytes, yard_stream stream, yard_error *err)
{
    return yard_ops_cpu.available(n_bytes, deferred_of(stream)->inner, err);
}

static inline yard_status deferred_allocate(void **out, yard_stream stream, size_t n_bytes,
                                            yard_error *err)
{
    return yard_ops_cpu.allocate(out, deferred_of(stream)->inner, n_bytes, err);
}

static inline void deferred_release(yard_stream stream, void *memory)
{
    yard_ops_cpu.release(deferred_of(stream)->inner, memory);
}

static inline yard_status deferred_open(yard_stream *out, const yard_ops_config *config,
                                        yard_error *err)
{
    deferred_stream *s = calloc(1, sizeof(*s));
    yard_status st;

    if (!s)
        abort();
    s->last = &s->first;
    st = yard_ops_cpu.open(&s->inner, config, err);
    if (st == YARD_OK)
        *out = (yard_stream)(void *)s;
    else
        free(s);
    return st;
}

static inline void deferred_close(yard_stream stream)
{
    if (!stream)
        return;
    deferred_synchronise(stream);
    yard_ops_cpu.close(deferred_of(stream)->inner);
    free(deferred_of(stream));
}

static inline size_t deferred_workspace_bytes(const yard_ops_config *config)
{
    return yard_ops_cpu.workspace_bytes(config);
}

static inline const char *deferred_describe(yard_stream stream)
{
    return yard_ops_cpu.describe(deferred_of(stream)->inner);
}

static inline void deferred_issue(yard_stream s, void (*fn)(void *ctx), const void *ctx,
                                  size_t n_bytes)
{
    deferred_push(s, NULL, fn, ctx, n_bytes);
}

#define DEFER(op)                                                                                  \
    static inline void deferred_run_##op(yard_stream s, const void *args)                          \
    {                                                                                              \
        yard_ops_cpu.op(s, args);                                                                  \
    }                                                                                              \
    static inline void deferred_##op(yard_stream s, const yard_##op##_args *a)                     \
    {                                                                                              \
        deferred_push(s, deferred_run_##op, NULL, a, sizeof(*a));                                  \
    }

typedef yard_rms_norm_args yard_rms_norm_quant_args;
typedef yard_silu_mul_args yard_silu_mul_quant_args;

DEFER(embed)
DEFER(rms_norm_quant)
DEFER(linear)
DEFER(grouped_linear)
DEFER(head_linear)
DEFER(rope_q)
DEFER(rope_append_kv)
DEFER(mla_decode)
DEFER(mla_prefill)
DEFER(gqa_append_kv)
DEFER(gqa_attend)
DEFER(moe_route)
DEFER(moe_scatter)
DEFER(count_offsets)
DEFER(moe_gather)
DEFER(silu_mul_quant)
DEFER(residual_add)
DEFER(quantise)
DEFER(select_rows)
DEFER(sample)

#undef DEFER

static const yard_ops deferred_ops = {
    .name = "deferred",
    .in_host_memory = true,
    .workspace_bytes = deferred_workspace_bytes,
    .open = deferred_open,
    .close = deferred_close,
    .describe = deferred_describe,
    .synchronise = deferred_synchronise,
    .check = deferred_check,
    .available = deferred_available,
    .allocate = deferred_allocate,
    .release = deferred_release,
    .upload = deferred_upload,
    .download = deferred_download,
    .issue = deferred_issue,
    .embed = deferred_embed,
    .rms_norm_quant = deferred_rms_norm_quant,
    .linear = deferred_linear,
    .grouped_linear = deferred_grouped_linear,
    .head_linear = deferred_head_linear,
    .rope_q = deferred_rope_q,
    .rope_append_kv = deferred_rope_append_kv,
    .mla_decode = deferred_mla_decode,
    .mla_prefill = deferred_mla_prefill,
    .gqa_append_kv = deferred_gqa_append_kv,
    .gqa_attend = deferred_gqa_attend,
    .moe_route = deferred_moe_route,
    .moe_scatter = deferred_moe_scatter,
    .count_offsets = deferred_count_offsets,
    .moe_gather = deferred_moe_gather,
    .silu_mul_quant = deferred_silu_mul_quant,
    .residual_add = deferred_residual_add,
    .quantise = deferred_quantise,
    .select_rows = deferred_select_rows,
    .sample = deferred_sample,
};

#endif
