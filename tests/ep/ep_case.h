/* One exchange against its plain definition, for any backend: every rank makes its inputs and
 * everybody else's from the seed, runs the four calls, and compares all that it gets, bit for bit.
 */
#ifndef YARD_TESTS_EP_CASE_H
#define YARD_TESTS_EP_CASE_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <yard/ep.h>

#include "base/base.h"
#include "base/convert.h"

typedef struct ep_case {
    yard_ep_config config;
    uint32_t n_ranks;
    uint64_t seed;
    uint32_t n_steps;
    /* how tokens are spread: 0 ragged, 1 none at all, 2 all instances full, 3 only instance 0 */
    uint32_t crowd;
    /* how experts are chosen: 0 anything distinct, 1 all on one expert first, 2 many -1 */
    uint32_t taste;
} ep_case;

static inline uint64_t case_mix(uint64_t z)
{
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* A number that depends on all of its arguments. */
static inline uint64_t case_random(const ep_case *c, uint64_t step, uint64_t group, uint64_t what,
                                   uint64_t i)
{
    return case_mix(case_mix(case_mix(case_mix(c->seed ^ step << 40) ^ group << 20) ^ what) ^ i);
}

static inline uint32_t case_tokens(const ep_case *c, uint32_t step, uint32_t group)
{
    const uint32_t max = c->config.max_tokens;

    switch (c->crowd) {
    case 1:
        return 0;
    case 2:
        return max;
    case 3:
        return group == 0 ? max : 0;
    default:
        return (uint32_t)(case_random(c, step, group, 1, 0) % (max + 1));
    }
}

/* Distinct experts and weights of one token. */
static inline void case_routing(const ep_case *c, uint32_t step, uint32_t group, uint32_t t,
                                int32_t *expert, float *weight)
{
    const uint32_t n = c->config.n_experts;

    for (uint32_t k = 0; k < c->config.top_k; k++) {
        const uint64_t r = case_random(c, step, group, 2, t * 64 + k);
        bool again = true;

        expert[k] = c->taste == 1 && k == 0 ? 0 : (int32_t)(r % n);
        while (again) {
            again = false;
            for (uint32_t j = 0; j < k; j++)
                again |= expert[j] == expert[k];
            if (again)
                expert[k] = (expert[k] + 1) % (int32_t)n;
        }
        weight[k] = (float)(r >> 40) * 0x1p-24f - 0.3f;
    }
    for (uint32_t k = 0; k < c->config.top_k; k++) /* afterwards: they were distinct */
        if (c->taste == 2 && case_random(c, step, group, 3, t * 64 + k) % 2)
            expert[k] = -1;
}

static inline float case_value(const ep_case *c, uint32_t step, uint32_t group, uint32_t t,
                               uint32_t i)
{
    const uint64_t r = case_random(c, step, group, 4, (uint64_t)t * c->config.hidden + i);

    return yard_bf16_round((float)((double)(int64_t)r * 0x1p-62));
}

/* One row of x as the config's dispatch carries it: payload, scales. */
typedef struct case_row {
    float *plain;   /* [hidden] */
    uint8_t *bytes; /* payload */
    float *scale;   /* [groups] FP8 */
} case_row;

static inline size_t case_bytes(yard_ep_dtype dtype)
{
    return dtype == YARD_EP_F32 ? 4 : dtype == YARD_EP_BF16 ? 2 : 1;
}

static inline case_row case_make_row(const ep_case *c, uint32_t step, uint32_t group, uint32_t t)
{
    const uint32_t n = c->config.hidden;
    case_row row = { malloc(n * sizeof(float)), malloc(n * 4),
                     calloc(yard_group_count(n), sizeof(float)) };

    for (uint32_t i = 0; i < n; i++)
        row.plain[i] = case_value(c, step, group, t, i);
    if (c->config.dispatch == YARD_EP_FP8)
        yard_convert_c.quantise(row.plain, n, c->config.ue8m0, row.bytes, row.scale);
    else if (c->config.dispatch == YARD_EP_BF16)
        yard_convert_c.round_bf16(row.plain, n, (uint16_t *)(void *)row.bytes);
    else
        memcpy(row.bytes, row.plain, n * sizeof(float));
    return row;
}

static inline void case_free_row(case_row row)
{
    free(row.plain);
    free(row.bytes);
    free(row.scale);
}

/* What expert e makes of a row: depends on both, and on every value. */
static inline float case_expert(const ep_case *c, const case_row *row, int32_t e, uint32_t i)
{
    float x = row->plain[i];

    if (c->config.dispatch == YARD_EP_FP8)
        x = yard_f32_from_e4m3(row->bytes[i]) * row->scale[i / YARD_GROUP];
    x = x * (1.0f + 0.125f * (float)(e % 7)) + 0.01f * (float)e;
    return c->config.combine == YARD_EP_BF16 ? yard_bf16_round(x) : x;
}

/* y of one token by the definition. */
static inline void case_result(const ep_case *c, uint32_t step, uint32_t group, uint32_t t,
                               float *y)
{
    const yard_ep_config *g = &c->config;
    const uint32_t local = g->n_experts / c->n_ranks;
    case_row row = case_make_row(c, step, group, t);
    int32_t expert[32];
    float weight[32];

    case_routing(c, step, group, t, expert, weight);
    for (uint32_t i = 0; i < g->hidden; i++) {
        float sum = 0;

        if (g->mode == YARD_EP_EXACT) {
            for (uint32_t k = 0; k < g->top_k; k++)
                if (expert[k] >= 0)
                    sum = fmaf(case_expert(c, &row, expert[k], i), weight[k], sum);
        } else {
            for (uint32_t r = 0; r < c->n_ranks; r++) {
                float part = 0;
                bool any = false;
                for (uint32_t k = 0; k < g->top_k; k++)
                    if (expert[k] >= 0 && (uint32_t)expert[k] / local == r) {
                        part = fmaf(case_expert(c, &row, expert[k], i), weight[k], part);
                        any = true;
                    }
                if (any)
                    sum += g->combine == YARD_EP_BF16 ? yard_bf16_round(part) : part;
            }
        }
        y[i] = g->output == YARD_EP_BF16 ? yard_bf16_round(sum) : sum;
    }
    case_free_row(row);
}

/* One rank's memory for a case. */
typedef struct case_buffers {
    uint8_t *x;
    float *x_scale, *expert_x_scale, *weight, *want;
    int32_t *expert, *count, *row_index;
    uint8_t *expert_x, *expert_y, *y;
    uint64_t hash; /* of the rows in place, as they were received */
    yard_ep_capacity capacity;
} case_buffers;

typedef struct case_rank {
    const ep_case *c;
    yard_ep *ep;
    uint32_t rank, dp, group, n_local;
    case_buffers b[4];        /* one per round in flight */
    void (*point)(void *ctx); /* called between calls: explorers delay a rank here */
    void *point_ctx;
    char failure[512];
} case_rank;

#define CASE_FAIL(r, ...)                                                                          \
    do {                                                                                           \
        snprintf((r)->failure, sizeof((r)->failure), __VA_ARGS__);                                 \
        return false;                                                                              \
    } while (0)

static inline void case_open(case_rank *r, const ep_case *c, yard_ep *ep)
{
    const yard_ep_config *g = &c->config;

    *r = (case_rank){ .c = c, .ep = ep, .rank = yard_ep_rank(ep) };
    r->dp = c->n_ranks / g->tp;
    r->group = r->rank / g->tp;
    r->n_local = g->n_experts / c->n_ranks;
    for (uint32_t i = 0; i < g->n_rounds && i < 4; i++) {
        case_buffers *b = &r->b[i];
        const size_t t = g->max_tokens, h = g->hidden, groups = yard_group_count(g->hidden);

        yard_ep_capacity_of(g, c->n_ranks, &b->capacity, NULL);
        b->x = malloc(t * h * 4 + 1);
        b->x_scale = malloc(t * groups * sizeof(float) + 1);
        b->expert = malloc(t * g->top_k * sizeof(int32_t));
        b->weight = malloc(t * g->top_k * sizeof(float));
        b->expert_x = malloc(b->capacity.expert_x_rows * h * 4 + 1);
        b->expert_x_scale = malloc(b->capacity.expert_x_rows * groups * sizeof(float) + 1);
        b->expert_y = g->expert_y_in_place ? yard_ep_expert_y(yard_ep_get_round(ep, i))
                                           : malloc(b->capacity.expert_y_rows * h * 4 + 1);
        b->count = malloc(r->n_local * sizeof(int32_t));
        b->row_index = malloc(b->capacity.expert_y_rows * sizeof(int32_t) + 1);
        b->y = malloc(t * h * 4 + 1);
        b->want = malloc(h * sizeof(float));
    }
}

static inline void case_close(case_rank *r)
{
    for (uint32_t i = 0; i < 4; i++) {
        case_buffers *b = &r->b[i];
        free(b->x);
        free(b->x_scale);
        free(b->expert);
        free(b->weight);
        free(b->expert_x);
        free(b->expert_x_scale);
        if (!r->c->config.expert_y_in_place)
            free(b->expert_y);
        free(b->count);
        free(b->row_index);
        free(b->y);
        free(b->want);
    }
}

static inline void case_point(case_rank *r)
{
    if (r->point)
        r->point(r->point_ctx);
}

static inline bool case_call(case_rank *r, const char *call, uint32_t step, yard_status st)
{
    if (st == YARD_OK)
        return true;
    CASE_FAIL(r, "rank %u step %u %s: %s", r->rank, step, call, yard_ep_error(r->ep));
}

/* Some cases say before each exchange how many tokens an instance has at most. */
static inline uint32_t case_limit(const ep_case *c, uint32_t step)
{
    uint32_t most = 0;

    for (uint32_t group = 0; group < c->n_ranks / c->config.tp; group++)
        if (case_tokens(c, step, group) > most)
            most = case_tokens(c, step, group);
    return c->seed % 5 < 2 && step % 3 < 2 ? most : 0;
}

static inline bool case_send(case_rank *r, uint32_t i, uint32_t step)
{
    const ep_case *c = r->c;
    const yard_ep_config *g = &c->config;
    case_buffers *b = &r->b[i];
    const int32_t n_tokens = (int32_t)case_tokens(c, step, r->group);
    const bool fp8 = g->input == YARD_EP_FP8;
    yard_status st;

    for (int32_t t = 0; t < n_tokens; t++) {
        case_row row = case_make_row(c, step, r->group, (uint32_t)t);
        case_routing(c, step, r->group, (uint32_t)t, b->expert + t * (int32_t)g->top_k,
                     b->weight + t * (int32_t)g->top_k);
        if (g->input == YARD_EP_F32)
            memcpy(b->x + (size_t)t * g->hidden * 4, row.plain, g->hidden * 4);
        else if (g->input == YARD_EP_BF16)
            yard_convert_c.round_bf16(row.plain, g->hidden,
                                      (uint16_t *)(void *)b->x + (size_t)t * g->hidden);
        else
            memcpy(b->x + (size_t)t * g->hidden, row.bytes, g->hidden);
        if (fp8)
            memcpy(b->x_scale + (size_t)t * yard_group_count(g->hidden), row.scale,
                   yard_group_count(g->hidden) * sizeof(float));
        case_free_row(row);
    }
    st = yard_ep_round_limit(yard_ep_get_round(r->ep, i), case_limit(c, step));
    if (st != YARD_OK)
        return case_call(r, "round_limit", step, st);
    st = yard_ep_dispatch_send(yard_ep_get_round(r->ep, i), b->x, fp8 ? b->x_scale : NULL,
                               b->expert, b->weight, &n_tokens, NULL);
    /* the caller's buffers are free now */
    memset(b->x, 0xee, g->max_tokens * g->hidden * 4);
    memset(b->expert, 0xee, g->max_tokens * g->top_k * sizeof(int32_t));
    return case_call(r, "dispatch_send", step, st);
}

/* Where received rows are: in the caller's buffers, or where they landed. */
typedef struct case_rows {
    const uint8_t *x, *scale;
    size_t pitch_bytes, scale_pitch_bytes;
} case_rows;

static inline bool case_in_place(const ep_case *c)
{
    return c->config.layout == YARD_EP_FLAT_IN_PLACE;
}

static inline case_rows case_received(const case_rank *r, uint32_t i)
{
    const yard_ep_config *g = &r->c->config;
    case_rows rows = { r->b[i].expert_x, (const uint8_t *)r->b[i].expert_x_scale,
                       g->hidden * case_bytes(g->dispatch),
                       yard_group_count(g->hidden) * sizeof(float) };
    size_t scale_at = 0;

    if (!case_in_place(r->c))
        return rows;
    rows.x = yard_ep_expert_x(yard_ep_get_round(r->ep, i), &rows.pitch_bytes, &scale_at);
    rows.scale = rows.x + scale_at;
    rows.scale_pitch_bytes = rows.pitch_bytes;
    return rows;
}

static inline bool case_check_row(case_rank *r, uint32_t step, const case_rows *rows, size_t at,
                                  const case_row *row)
{
    const yard_ep_config *g = &r->c->config;
    const size_t n_bytes = g->hidden * case_bytes(g->dispatch);

    if (memcmp(rows->x + at * rows->pitch_bytes, row->bytes, n_bytes) != 0)
        CASE_FAIL(r, "rank %u step %u: row %zu of expert_x differs", r->rank, step, at);
    if (g->dispatch == YARD_EP_FP8 && memcmp(rows->scale + at * rows->scale_pitch_bytes, row->scale,
                                             yard_group_count(g->hidden) * sizeof(float)) != 0)
        CASE_FAIL(r, "rank %u step %u: scales of row %zu differ", r->rank, step, at);
    return true;
}

/* Of all rows in place that row_index names. */
static inline uint64_t case_hash(const case_rank *r, uint32_t i)
{
    const yard_ep_config *g = &r->c->config;
    const case_rows rows = case_received(r, i);
    const case_buffers *b = &r->b[i];
    uint64_t hash = 0;

    for (uint32_t e = 0, first = 0; e < r->n_local; e++) {
        for (int32_t n = 0; n < b->count[e]; n++) {
            const uint8_t *row =
                rows.x + (size_t)b->row_index[first + (uint32_t)n] * rows.pitch_bytes;
            for (size_t j = 0; j < g->hidden * case_bytes(g->dispatch); j++)
                hash = hash * 0x100000001b3u + row[j];
        }
        first += (uint32_t)yard_align_up((size_t)b->count[e], g->row_align);
    }
    return hash;
}

/* Receives, compares with the definition, and computes expert_y. */
static inline bool case_receive(case_rank *r, uint32_t i, uint32_t step)
{
    const ep_case *c = r->c;
    const yard_ep_config *g = &c->config;
    case_buffers *b = &r->b[i];
    const bool flat = g->layout == YARD_EP_FLAT, in_place = case_in_place(c);
    const bool has_scales = g->dispatch == YARD_EP_FP8 && !in_place;
    size_t first = 0, flat_row = 0;
    case_rows rows = { 0 };
    int32_t *next = calloc(r->n_local, sizeof(*next));
    bool ok = true;

    memset(b->expert_x, 0xdd, b->capacity.expert_x_rows * g->hidden * case_bytes(g->dispatch));
    if (!case_call(r, "dispatch_recv", step,
                   yard_ep_dispatch_recv(yard_ep_get_round(r->ep, i), in_place ? NULL : b->expert_x,
                                         has_scales ? b->expert_x_scale : NULL, b->count,
                                         b->row_index, NULL)))
        ok = false;
    if (ok)
        rows = case_received(r, i);
    if (ok) /* what peers read of the last results, they have read */
        memset(b->expert_y, 0xee, b->capacity.expert_y_rows * g->hidden * case_bytes(g->combine));
    for (uint32_t e = 0; ok && e < r->n_local; e++) {
        next[e] = (int32_t)first;
        first += yard_align_up((size_t)b->count[e], g->row_align);
    }
    for (uint32_t group = 0; ok && group < r->dp; group++)
        for (uint32_t t = 0; ok && t < case_tokens(c, step, group); t++) {
            case_row row = case_make_row(c, step, group, t);
            int32_t expert[32];
            float weight[32];
            bool here = false;

            case_routing(c, step, group, t, expert, weight);
            for (uint32_t k = 0; ok && k < g->top_k; k++) {
                const int32_t e = expert[k] - (int32_t)(r->rank * r->n_local);
                const size_t origin = group * g->max_tokens + t;
                int32_t at;
                if (expert[k] < 0 || e < 0 || e >= (int32_t)r->n_local)
                    continue;
                here = true;
                at = next[e]++;
                ok = b->row_index[at] == (int32_t)(flat ? flat_row : origin);
                if (!ok)
                    snprintf(r->failure, sizeof(r->failure), "rank %u step %u: row_index[%d] is %d",
                             r->rank, step, at, b->row_index[at]);
                ok = ok && case_check_row(r, step, &rows,
                                          flat       ? flat_row
                                          : in_place ? origin
                                                     : (size_t)at,
                                          &row);
                for (uint32_t j = 0; j < g->hidden; j++) {
                    const float y = case_expert(c, &row, expert[k], j);
                    const size_t to = (size_t)at * g->hidden + j;
                    if (g->combine == YARD_EP_BF16)
                        ((uint16_t *)(void *)b->expert_y)[to] = yard_bf16_from_f32(y);
                    else
                        ((float *)(void *)b->expert_y)[to] = y;
                }
            }
            flat_row += here;
            case_free_row(row);
        }
    first = 0;
    for (uint32_t e = 0; ok && e < r->n_local; e++) {
        if (next[e] != (int32_t)first + b->count[e]) {
            snprintf(r->failure, sizeof(r->failure), "rank %u step %u: expert %u has %d rows",
                     r->rank, step, e, b->count[e]);
            ok = false;
        }
        first += yard_align_up((size_t)b->count[e], g->row_align);
    }
    free(next);
    b->hash = ok && in_place ? case_hash(r, i) : 0;
    return ok;
}

static inline bool case_return(case_rank *r, uint32_t i, uint32_t step)
{
    const yard_ep_config *g = &r->c->config;
    case_buffers *b = &r->b[i];
    yard_status st;

    if (case_in_place(r->c) && case_hash(r, i) != b->hash)
        CASE_FAIL(r, "rank %u step %u: rows in place changed before combine_send", r->rank, step);
    st = yard_ep_combine_send(yard_ep_get_round(r->ep, i), b->expert_y, NULL);
    if (!g->expert_y_in_place)
        memset(b->expert_y, 0xee, b->capacity.expert_y_rows * g->hidden * case_bytes(g->combine));
    return case_call(r, "combine_send", step, st);
}

static inline bool case_finish(case_rank *r, uint32_t i, uint32_t step)
{
    const ep_case *c = r->c;
    const yard_ep_config *g = &c->config;
    case_buffers *b = &r->b[i];

    memset(b->y, 0xdd, g->max_tokens * g->hidden * case_bytes(g->output));
    if (!case_call(r, "combine_recv", step,
                   yard_ep_combine_recv(yard_ep_get_round(r->ep, i), b->y, NULL)))
        return false;
    for (uint32_t t = 0; t < case_tokens(c, step, r->group); t++) {
        case_result(c, step, r->group, t, b->want);
        for (uint32_t j = 0; j < g->hidden; j++) {
            const size_t at = (size_t)t * g->hidden + j;
            const float got = g->output == YARD_EP_BF16
                                  ? yard_f32_from_bf16(((uint16_t *)(void *)b->y)[at])
                                  : ((float *)(void *)b->y)[at];
            if (yard_bits_from_f32(got + 0.0f) != yard_bits_from_f32(b->want[j] + 0.0f))
                CASE_FAIL(r, "rank %u step %u: y[%u, %u]: want %a, got %a", r->rank, step, t, j,
                          (double)b->want[j], (double)got);
        }
    }
    return true;
}

/* All steps, with as many rounds in flight as the config has. False with r->failure set. */
static inline bool case_run(case_rank *r)
{
    const uint32_t n_rounds = r->c->config.n_rounds;

    for (uint32_t step = 0; step < r->c->n_steps; step += n_rounds) {
        for (uint32_t i = 0; i < n_rounds; i++) {
            case_point(r);
            if (!case_send(r, i, step + i))
                return false;
        }
        for (uint32_t i = 0; i < n_rounds; i++) {
            case_point(r);
            if (!case_receive(r, i, step + i))
                return false;
            case_point(r);
            if (!case_return(r, i, step + i))
                return false;
        }
        for (uint32_t i = 0; i < n_rounds; i++) {
            case_point(r);
            if (!case_finish(r, i, step + i))
                return false;
        }
    }
    return true;
}

static inline const char *case_describe(const ep_case *c)
{
    static _Thread_local char text[320];
    const yard_ep_config *g = &c->config;

    snprintf(text, sizeof(text),
             "seed %llu: %u ranks, tp %u, %u experts, top %u, hidden %u, tokens %u, rounds %u, "
             "align %u, dtypes %d %d %d %d, mode %d, layout %d, in place %d, crowd %u, taste %u",
             (unsigned long long)c->seed, c->n_ranks, g->tp, g->n_experts, g->top_k, g->hidden,
             g->max_tokens, g->n_rounds, g->row_align, g->dispatch, g->input, g->combine, g->output,
             g->mode, g->layout, g->expert_y_in_place, c->crowd, c->taste);
    return text;
}

/* A random case; everything but the number of ranks comes from the seed. */
static inline ep_case case_from_seed(uint64_t seed, uint32_t n_ranks, uint32_t max_hidden)
{
    static const yard_ep_config defaults = YARD_EP_CONFIG_INIT;
    ep_case c = { .config = defaults, .n_ranks = n_ranks, .seed = seed, .n_steps = 4 };
    yard_ep_config *g = &c.config;
    uint64_t r = case_mix(seed * 77 + n_ranks);
#define PICK(n) ((uint32_t)((r = case_mix(r)) % (n)))

    g->tp = 1;
    while (n_ranks % (g->tp * 2) == 0 && PICK(3) == 0)
        g->tp *= 2;
    g->n_experts = n_ranks * (1 + PICK(5));
    g->top_k = 1 + PICK(g->n_experts < 32 ? g->n_experts : 32);
    g->hidden = 1 + PICK(max_hidden);
    g->max_tokens = 1 + PICK(9);
    g->n_rounds = 1 + PICK(2);
    g->row_align = PICK(3) ? 1 : 1 + PICK(8);
    g->dispatch = (yard_ep_dtype)PICK(3);
    g->input = g->dispatch == YARD_EP_FP8 ? (yard_ep_dtype)PICK(3) : g->dispatch;
    g->combine = (yard_ep_dtype)PICK(2);
    g->output = (yard_ep_dtype)PICK(2);
    g->mode = (yard_ep_combine)PICK(2);
    g->layout = (yard_ep_layout)PICK(3);
    g->ue8m0 = PICK(2);
    g->expert_y_in_place = PICK(2);
    c.crowd = PICK(6) > 3 ? PICK(4) : 0;
    c.taste = PICK(3);
#undef PICK
    return c;
}

#endif
