/* Binding a checkpoint's tensors to their places. */
#include "model/weights.h"
#include "base/convert.h"

#include <stdio.h>
#include <stdlib.h>

#include "model/tensor_table.h"
#include "model/weights_scan.h"

/* A set of dtypes, by bits. */
enum {
    F32 = 1 << YARD_F32,
    BF16 = 1 << YARD_BF16,
    F16 = 1 << YARD_F16,
    FP8 = 1 << YARD_FP8_E4M3,
    PLAIN = F32 | BF16 | F16
};

struct yard_converted {
    struct yard_converted *next;
    _Alignas(64) float values[];
};

typedef struct binder {
    const yard_model_config *c;
    yard_share share;
    const char *dir;
    yard_weights *w;
    yard_tensor_use *use; /* [tensor count] what was bound */
    yard_error *err;
} binder;

static void list_dtypes(uint32_t allowed, char *text, size_t n_bytes)
{
    size_t n = 0;

    for (yard_dtype d = 0; d < YARD_DTYPE_COUNT; d++) {
        const char *const before = n == 0 ? "" : allowed >> (d + 1) ? ", " : " or ";
        if (allowed & 1u << d)
            n += (size_t)snprintf(text + n, n_bytes - n, "%s%s", before, yard_dtype_name(d));
    }
}

static yard_status fail_shape(const yard_tensor *t, const uint32_t *want, uint32_t n_dims,
                              yard_error *err)
{
    char expected[64], found[128];
    size_t n = 0;

    snprintf(expected, sizeof(expected), n_dims == 1 ? "[%u]" : "[%u, %u]", want[0],
             n_dims == 1 ? 0 : want[1]);
    found[0] = '\0';
    for (uint32_t i = 0; i < t->n_dims; i++)
        n += (size_t)snprintf(found + n, sizeof(found) - n, i ? ", %llu" : "%llu",
                              (unsigned long long)t->shape[i]);
    return yard_fail(err, YARD_EFORMAT, "%s: tensor '%s': shape: want %s, found [%s]", t->file,
                     t->name, expected, found);
}

static yard_status check_tensor(const yard_tensor *t, uint32_t allowed, const uint32_t *want,
                                uint32_t n_dims, yard_error *err)
{
    bool same = t->n_dims == n_dims;

    if (!(allowed & 1u << t->dtype)) {
        char list[64];
        list_dtypes(allowed, list, sizeof(list));
        return yard_fail(err, YARD_EFORMAT, "%s: tensor '%s': dtype: want %s, found %s", t->file,
                         t->name, list, yard_dtype_name(t->dtype));
    }
    for (uint32_t i = 0; i < n_dims && same; i++)
        same = t->shape[i] == want[i];
    return same ? YARD_OK : fail_shape(t, want, n_dims, err);
}

/* Finds, checks and marks as bound, of it that part (of a vector: all). */
static yard_status take(binder *b, const yard_tensor **out, const char *name, uint32_t allowed,
                        const uint32_t *shape, uint32_t n_dims, yard_tensor_use use)
{
    const yard_tensor *t = yard_checkpoint_find(b->w->ckpt, name);
    yard_status st;

    if (!t)
        return yard_fail(b->err, YARD_EFORMAT, "%s: tensor '%s': missing", b->dir, name);
    st = check_tensor(t, allowed, shape, n_dims, b->err);
    if (st)
        return st;
    b->use[t - yard_checkpoint_tensor(b->w->ckpt, 0)] = use;
    *out = t;
    return YARD_OK;
}

/* The blocks of that size that the span touches. */
static yard_span blocks_of(yard_span s, uint32_t block)
{
    return (yard_span){ s.first / block, yard_ceil_div(s.first + s.n, block) - s.first / block };
}

static yard_status take_scale(binder *b, yard_matrix *m, const yard_tensor_spec *spec)
{
    char scale_name[YARD_TENSOR_NAME_BYTES + 16];
    const uint32_t shape[2] = { yard_ceil_div(spec->shape[0], b->c->block_rows),
                                yard_group_count(spec->shape[1]) };
    yard_tensor_use use = { .role = YARD_ROLE_ELSEWHERE };
    const yard_tensor *t = NULL;
    yard_status st;

    if (m->rows > 0)
        use = (yard_tensor_use){ YARD_ROLE_SCALES, blocks_of(spec->part[0], b->c->block_rows),
                                 blocks_of(spec->part[1], YARD_GROUP) };
    snprintf(scale_name, sizeof(scale_name), "%s_scale_inv", spec->name);
    st = take(b, &t, scale_name, F32, shape, 2, use);
    if (st)
        return st;
    m->scale = t->data;
    m->scale_ld = shape[1];
    m->block_rows = b->c->block_rows;
    return YARD_OK;
}

/* The share's part of a matrix. Some FP8 checkpoints keep a few projections plain. */
static yard_status take_matrix(binder *b, yard_matrix *m, const yard_tensor_spec *spec)
{
    const bool fp8 = spec->kind == YARD_TENSOR_PROJECTION && b->c->fp8;
    const yard_span rows = spec->part[0], cols = spec->part[1];
    const yard_tensor_use use = { rows.n ? YARD_ROLE_VALUES : YARD_ROLE_ELSEWHERE, rows, cols };
    const yard_tensor *t = NULL;
    yard_status st = take(b, &t, spec->name, fp8 ? PLAIN | FP8 : PLAIN, spec->shape, 2, use);
    size_t first;

    if (st)
        return st;
    first = (size_t)rows.first * spec->shape[1] + cols.first;
    *m = (yard_matrix){ .dtype = t->dtype,
                        .rows = rows.n,
                        .cols = cols.n,
                        .ld = spec->shape[1],
                        .data = (const uint8_t *)t->data + first * yard_dtype_bytes(t->dtype),
                        .row0 = rows.first,
                        .col0 = cols.first };
    return t->dtype == YARD_FP8_E4M3 ? take_scale(b, m, spec) : YARD_OK;
}

/* A whole vector. */
static yard_status take_vector(binder *b, yard_vector *v, const yard_tensor_spec *spec)
{
    const yard_tensor_use use = { YARD_ROLE_VALUES, { 0, 1 }, { 0, spec->shape[0] } };
    const yard_tensor *t = NULL;
    const yard_status st = take(b, &t, spec->name, PLAIN, spec->shape, 1, use);

    if (st == YARD_OK)
        *v = (yard_vector){ .dtype = t->dtype, .n = spec->shape[0], .data = t->data };
    return st;
}

/* An F32 copy of a vector, for readers that do not take its dtype. */
static yard_status convert_to_f32(binder *b, yard_vector *v)
{
    const size_t n_bytes = sizeof(struct yard_converted) + v->n * sizeof(float);
    struct yard_converted *copy = yard_alloc(n_bytes);

    if (!copy)
        return yard_fail(b->err, YARD_ENOMEM, "weights: %zu bytes", n_bytes);
    yard_convert_c.decode(v->dtype, v->data, v->n, copy->values);
    copy->next = b->w->converted;
    b->w->converted = copy;
    v->dtype = YARD_F32;
    v->data = copy->values;
    return YARD_OK;
}

static yard_status take_norm(binder *b, yard_vector *v, const yard_tensor_spec *spec)
{
    const yard_status st = take_vector(b, v, spec);

    if (st)
        return st;
    return v->dtype == YARD_F16 ? convert_to_f32(b, v) : YARD_OK; /* norms read F32 and BF16 */
}

static yard_status take_bias(binder *b, const float **bias, const yard_tensor_spec *spec)
{
    yard_vector v;
    yard_status st = take_vector(b, &v, spec);

    if (!st && v.dtype != YARD_F32)
        st = convert_to_f32(b, &v);
    if (!st)
        *bias = v.data;
    return st;
}

static yard_layer_weights *layer_of(yard_weights *w, uint32_t layer_idx)
{
    return layer_idx < w->n_layers ? &w->layers[layer_idx] : &w->mtp[layer_idx - w->n_layers].layer;
}

/* Where spec's matrix, vector or pointer lies. The array of a layer's experts is made at its first
 * one: a description that promises more layers than the files have costs no memory. */
static yard_status find_place(binder *b, const yard_tensor_spec *spec, char **place)
{
    yard_weights *w = b->w;
    yard_matrix **experts;

    switch (spec->scope) {
    case YARD_SCOPE_MODEL:
        *place = (char *)w + spec->place;
        break;
    case YARD_SCOPE_LAYER:
        *place = (char *)layer_of(w, spec->layer_idx) + spec->place;
        break;
    case YARD_SCOPE_MTP:
        *place = (char *)&w->mtp[spec->layer_idx - w->n_layers] + spec->place;
        break;
    case YARD_SCOPE_EXPERT:
        experts = (yard_matrix **)((char *)layer_of(w, spec->layer_idx) + spec->place);
        if (!*experts)
            *experts = calloc(b->share.experts.n, sizeof(**experts));
        if (!*experts)
            return yard_fail(b->err, YARD_ENOMEM, "weights: %u experts", b->share.experts.n);
        *place = (char *)&(*experts)[spec->expert_idx - b->share.experts.first];
        break;
    }
    return YARD_OK;
}

static yard_status bind_tensor(void *ctx, const yard_tensor_spec *spec)
{
    binder *b = ctx;
    yard_matrix unused;
    char *place = NULL;
    yard_status st;

    if (spec->part[0].n == 0) /* another rank's: checked as the own ones are, and not read */
        return take_matrix(b, &unused, spec);
    st = find_place(b, spec, &place);
    if (st)
        return st;
    switch (spec->kind) {
    case YARD_TENSOR_NORM:
        return take_norm(b, (yard_vector *)place, spec);
    case YARD_TENSOR_BIAS:
        return take_bias(b, (const float **)place, spec);
    default:
        return take_matrix(b, (yard_matrix *)place, spec);
    }
}

static yard_status bind_all(binder *b)
{
    const yard_model_config *c = b->c;
    yard_weights *w = b->w;
    yard_status st;

    w->layers = calloc(c->n_layers, sizeof(*w->layers));
    w->mtp = calloc(c->n_mtp ? c->n_mtp : 1, sizeof(*w->mtp));
    if (!w->layers || !w->mtp)
        return yard_fail(b->err, YARD_ENOMEM, "weights: %u layers", c->n_layers);
    w->n_layers = c->n_layers;
    w->n_mtp = c->n_mtp;
    for (uint32_t i = 0; i < c->n_layers + c->n_mtp; i++)
        layer_of(w, i)->is_moe = i >= c->n_dense_layers;
    st = yard_tensor_walk(c, &b->share, bind_tensor, b);
    if (!st && c->tied_embedding)
        w->head = w->embed;
    return st;
}

/* Some exports store a table that follows from the description. */
static bool is_derived(const char *name)
{
    static const char ending[] = ".self_attn.rotary_emb.inv_freq";
    const size_t n = strlen(name), n_ending = sizeof(ending) - 1;

    return n >= n_ending && !strcmp(name + n - n_ending, ending);
}

static yard_status check_surplus(const binder *b)
{
    const yard_tensor *first = NULL;
    uint32_t n = 0;

    for (uint32_t i = 0; i < yard_checkpoint_tensor_count(b->w->ckpt); i++) {
        const yard_tensor *t = yard_checkpoint_tensor(b->w->ckpt, i);
        if (b->use[i].role != YARD_ROLE_UNREAD || is_derived(t->name))
            continue;
        if (n++ == 0)
            first = t;
    }
    if (n == 0)
        return YARD_OK;
    return yard_fail(b->err, YARD_EFORMAT,
                     "%s: tensor '%.200s': surplus: nothing in config.json asks for it (%u such "
                     "tensors in all)",
                     first->file, first->name, n);
}

yard_status yard_weights_load(yard_weights **out, const char *dir, const yard_model_config *config,
                              const yard_share *share, uint32_t n_threads,
                              const yard_notify *notify, yard_error *err)
{
    binder b = { .c = config, .dir = dir, .err = err };
    yard_status st;

    b.share = share ? *share : yard_layout_share(config, (yard_layout){ 1, 1, 1 }, 0);

    b.w = calloc(1, sizeof(*b.w));
    if (!b.w)
        return yard_fail(err, YARD_ENOMEM, "weights: %zu bytes", sizeof(*b.w));
    st = yard_checkpoint_open(&b.w->ckpt, dir, notify, err);
    if (st)
        goto out;
    b.use = calloc((size_t)yard_checkpoint_tensor_count(b.w->ckpt) + 1, sizeof(*b.use));
    if (!b.use) {
        st = yard_fail(err, YARD_ENOMEM, "weights: no memory for %u tensors",
                       yard_checkpoint_tensor_count(b.w->ckpt));
        goto out;
    }
    st = bind_all(&b);
    if (!st)
        st = check_surplus(&b);
    if (!st)
        st = yard_weights_scan(b.w->ckpt, b.use, n_threads, notify, err);
    if (st)
        goto out;
    *out = b.w;
    b.w = NULL;
out:
    free(b.use);
    yard_weights_free(b.w);
    return st;
}

static void free_layer(yard_layer_weights *l)
{
    free(l->moe.gate);
    free(l->moe.up);
    free(l->moe.down);
}

void yard_weights_free(yard_weights *weights)
{
    if (!weights)
        return;
    for (uint32_t i = 0; i < weights->n_layers; i++)
        free_layer(&weights->layers[i]);
    for (uint32_t i = 0; i < weights->n_mtp; i++)
        free_layer(&weights->mtp[i].layer);
    free(weights->layers);
    free(weights->mtp);
    while (weights->converted) {
        struct yard_converted *next = weights->converted->next;
        free(weights->converted);
        weights->converted = next;
    }
    yard_checkpoint_close(weights->ckpt);
    free(weights);
}
