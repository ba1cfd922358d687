/* What a synthetic checkpoint consists of, and where in its shards. */
#include <math.h>
#include <stdlib.h>

#include "model/synth_parts.h"

typedef struct planner {
    yard_synth_plan *plan;
    const yard_model_config *c;
    uint64_t shard_bytes, used_bytes; /* used: of the shard being filled */
    yard_error *err;
} planner;

static yard_synth_tensor *add(planner *p, const char *name, const char *suffix, yard_dtype dtype,
                              uint32_t n_dims, const uint32_t *shape)
{
    yard_synth_plan *plan = p->plan;
    yard_synth_tensor *t;

    if (plan->n_tensors == plan->max_tensors) {
        const uint32_t room = plan->max_tensors ? 2 * plan->max_tensors : 256;
        yard_synth_tensor *larger = realloc(plan->tensors, room * sizeof(*larger));
        if (!larger)
            return NULL;
        plan->tensors = larger;
        plan->max_tensors = room;
    }
    t = &plan->tensors[plan->n_tensors++];
    *t = (yard_synth_tensor){ .dtype = dtype, .n_dims = n_dims, .shape = { shape[0], shape[1] } };
    snprintf(t->name, sizeof(t->name), "%s%s", name, suffix);
    t->n_bytes = yard_dtype_bytes(dtype) * (uint64_t)shape[0] * (n_dims == 2 ? shape[1] : 1);
    return t;
}

/* Deviations that keep activations near 1: a normalised input and weights of 1 / sqrt(fan in). */
static void choose_size(yard_synth_tensor *t, yard_tensor_kind kind)
{
    switch (kind) {
    case YARD_TENSOR_NORM:
        t->mean = 1;
        t->sigma = 0.1f;
        break;
    case YARD_TENSOR_BIAS:
        t->mean = 0.5f; /* positive: see the family's group mask */
        t->sigma = 0.05f;
        break;
    case YARD_TENSOR_EMBEDDING:
        t->sigma = 1;
        break;
    case YARD_TENSOR_PROJECTION:
        t->sigma = 0.5f / sqrtf((float)t->shape[1]); /* each layer adds a quarter of the variance */
        break;
    case YARD_TENSOR_HEAD:
    case YARD_TENSOR_ROUTER:
        t->sigma = 1 / sqrtf((float)t->shape[1]);
        break;
    }
}

static void place(planner *p, uint32_t first)
{
    yard_synth_plan *plan = p->plan;
    uint64_t n_bytes = 0;

    for (uint32_t i = first; i < plan->n_tensors; i++)
        n_bytes += plan->tensors[i].n_bytes;
    if (plan->n_shards == 0 || (p->used_bytes > 0 && p->used_bytes + n_bytes > p->shard_bytes)) {
        plan->n_shards++;
        p->used_bytes = 0;
    }
    for (uint32_t i = first; i < plan->n_tensors; i++)
        plan->tensors[i].shard_idx = plan->n_shards - 1;
    p->used_bytes += n_bytes;
    plan->total_bytes += n_bytes;
}

/* A tensor and its scales go into one shard. */
static yard_status plan_tensor(void *ctx, const yard_tensor_spec *spec)
{
    planner *p = ctx;
    const bool fp8 = spec->kind == YARD_TENSOR_PROJECTION && p->c->fp8;
    const uint32_t first = p->plan->n_tensors;
    const yard_dtype dtype = fp8                              ? YARD_FP8_E4M3
                             : spec->kind == YARD_TENSOR_BIAS ? YARD_F32
                                                              : YARD_BF16;
    yard_synth_tensor *t = add(p, spec->name, "", dtype, spec->n_dims, spec->shape);
    float sigma;

    if (!t)
        goto no_memory;
    choose_size(t, spec->kind);
    sigma = t->sigma;
    if (fp8) {
        const uint32_t blocks[2] = { yard_ceil_div(spec->shape[0], p->c->block_rows),
                                     yard_group_count(spec->shape[1]) };
        t = add(p, spec->name, "_scale_inv", YARD_F32, 2, blocks);
        if (!t)
            goto no_memory;
        t->is_scale = true;
        t->sigma = sigma;
    }
    place(p, first);
    return YARD_OK;
no_memory:
    return yard_fail(p->err, YARD_ENOMEM, "synth: no memory for %u tensors", first + 1);
}

/* Wide elements first, as the reference writer does: every tensor is then aligned to its own. */
static int by_shard_and_width(const void *a, const void *b)
{
    const yard_synth_tensor *x = a, *y = b;
    const size_t x_width = yard_dtype_bytes(x->dtype), y_width = yard_dtype_bytes(y->dtype);

    if (x->shard_idx != y->shard_idx)
        return x->shard_idx < y->shard_idx ? -1 : 1;
    if (x_width != y_width)
        return x_width > y_width ? -1 : 1;
    return strcmp(x->name, y->name);
}

yard_status yard_synth_plan_make(yard_synth_plan *plan, const yard_model_config *c,
                                 uint64_t shard_bytes, yard_error *err)
{
    planner p = { .plan = plan, .c = c, .shard_bytes = shard_bytes, .err = err };
    const yard_status st = yard_tensor_walk(c, NULL, plan_tensor, &p);
    uint64_t at = 0;

    if (st)
        return st;
    qsort(plan->tensors, plan->n_tensors, sizeof(*plan->tensors), by_shard_and_width);
    for (uint32_t i = 0; i < plan->n_tensors; i++) {
        yard_synth_tensor *t = &plan->tensors[i];
        if (i > 0 && t->shard_idx != t[-1].shard_idx)
            at = 0;
        t->begin = at;
        at += t->n_bytes;
    }
    return YARD_OK;
}
