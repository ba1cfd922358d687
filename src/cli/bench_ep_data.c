#include "cli/bench_ep_data.h"

#include <math.h>
#include <stdlib.h>

enum { ROUTING_SEED = 4, KIND_EXPERT = 1, KIND_WEIGHT, KIND_ROW, KIND_RESULT, KIND_GROUP };

static uint64_t mix(uint64_t z)
{
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static uint64_t random_of(uint64_t seed, uint64_t kind, uint64_t a, uint64_t b)
{
    return mix(mix(mix(seed << 8 ^ kind) ^ a) ^ b);
}

/* Bit g: token `at` takes experts of group g. */
static uint32_t groups_of(const yard_bench_ep_shape *s, size_t at)
{
    uint32_t kept = 0;

    if (!s->grouped)
        return ~0u;
    for (uint64_t i = 0; __builtin_popcount(kept) < YARD_BENCH_EP_GROUPS_KEPT; i++)
        kept |= 1u << random_of(ROUTING_SEED, KIND_GROUP, at, i) % YARD_BENCH_EP_GROUPS;
    return kept;
}

static void route_token(yard_bench_ep_data *d, size_t at)
{
    const yard_bench_ep_shape *s = &d->shape;
    const uint32_t kept = groups_of(s, at);
    int32_t *expert = d->expert + at * s->top_k;

    for (uint32_t k = 0, n_tries = 0; k < s->top_k; n_tries++) {
        const int32_t e =
            (int32_t)(random_of(ROUTING_SEED, KIND_EXPERT, at, n_tries) % s->n_experts);
        bool taken = !(kept >> (uint32_t)e * YARD_BENCH_EP_GROUPS / s->n_experts & 1);

        for (uint32_t j = 0; j < k; j++)
            taken |= expert[j] == e;
        if (!taken)
            expert[k++] = e;
    }
    for (uint32_t k = 0; k < s->top_k; k++)
        d->weight[at * s->top_k + k] =
            (float)(random_of(ROUTING_SEED, KIND_WEIGHT, at, k) >> 40) * 0x1p-24f;
}

static uint32_t rank_of(const yard_bench_ep_data *d, int32_t expert)
{
    return (uint32_t)expert / d->n_local;
}

/* Rows of token `at` that concern rank: *n_experts of its experts; true when there are any. */
static bool names_rank(const yard_bench_ep_data *d, size_t at, uint32_t rank, uint32_t *n_experts)
{
    *n_experts = 0;
    for (uint32_t k = 0; k < d->shape.top_k; k++)
        *n_experts += rank_of(d, d->expert[at * d->shape.top_k + k]) == rank;
    return *n_experts > 0;
}

/* Adds what token `at` of source makes this rank and others send and receive. */
static void count_token(yard_bench_ep_data *d, uint32_t source, size_t at)
{
    const uint32_t half = d->shape.n_ranks / 2;
    bool is_away = false; /* for the other node */
    uint32_t n;

    if (names_rank(d, at, d->rank, &n)) {
        d->arrival[d->n_arrivals++] = (uint32_t)at;
        d->n_routed += n;
        if (source != d->rank) {
            d->n_rows_in++;
            d->n_results_out += d->shape.partial ? 1 : n;
        }
    }
    for (uint32_t r = 0; source == d->rank && r < d->shape.n_ranks; r++)
        if (r != d->rank && names_rank(d, at, r, &n)) {
            const bool is_near = (r < half) == (d->rank < half);

            d->n_rows_out++;
            d->n_results_in += d->shape.partial ? 1 : n;
            d->n_node_rows_out += is_near;
            is_away |= !is_near;
        }
    d->n_node_rows_out += is_away;
}

/* Expert-major order: by local expert, then by arrival. */
static void order_rows(yard_bench_ep_data *d)
{
    const uint32_t top_k = d->shape.top_k;
    uint32_t row = 0;

    for (uint32_t e = 0; e < d->n_local; e++)
        for (uint32_t i = 0; i < d->n_arrivals; i++)
            for (uint32_t k = 0; k < top_k; k++) {
                const uint32_t at = d->arrival[i];

                if (d->expert[(size_t)at * top_k + k] != (int32_t)(d->rank * d->n_local + e))
                    continue;
                d->origin[row] =
                    (yard_bench_ep_origin){ at / d->shape.n_tokens, at % d->shape.n_tokens, k };
                d->arrival_of[row++] = i;
                d->count[e]++;
            }
}

/* Called twice: to measure, then to place. The largest number of rows is taken: who has how many is
 * known only afterwards. */
static void lay_out(yard_bench_ep_data *d, yard_arena *arena)
{
    const yard_bench_ep_shape *s = &d->shape;
    const size_t n_all = (size_t)s->n_ranks * s->n_tokens;
    const uint32_t per_token = s->top_k < d->n_local ? s->top_k : d->n_local;

    d->expert = yard_arena_take(arena, n_all * s->top_k * sizeof(*d->expert));
    d->weight = yard_arena_take(arena, n_all * s->top_k * sizeof(*d->weight));
    d->x = yard_arena_take(arena, (size_t)s->n_tokens * s->hidden);
    d->x_scale = yard_arena_take(arena, (size_t)s->n_tokens * d->n_groups * sizeof(float));
    d->count = yard_arena_take(arena, d->n_local * sizeof(*d->count));
    d->arrival = yard_arena_take(arena, n_all * sizeof(*d->arrival));
    d->arrival_of = yard_arena_take(arena, n_all * per_token * sizeof(*d->arrival_of));
    d->origin = yard_arena_take(arena, n_all * per_token * sizeof(*d->origin));
}

yard_status yard_bench_ep_data_create(yard_bench_ep_data **out, const yard_bench_ep_shape *shape,
                                      uint32_t rank, yard_error *err)
{
    const size_t n_all = (size_t)shape->n_ranks * shape->n_tokens;
    yard_bench_ep_data plan = { .shape = *shape,
                                .rank = rank,
                                .n_local = shape->n_experts / shape->n_ranks,
                                .n_groups = yard_group_count(shape->hidden) };
    yard_bench_ep_data *d = malloc(sizeof(*d));
    yard_arena arena = { 0 };

    lay_out(&plan, &arena);
    arena.size_bytes = arena.used_bytes;
    arena.used_bytes = 0;
    arena.base = yard_alloc(arena.size_bytes);
    if (!d || !arena.base) {
        free(d);
        free(arena.base);
        return yard_fail(err, YARD_ENOMEM, "bench: no memory for the inputs of %u tokens",
                         shape->n_tokens);
    }
    *d = plan;
    lay_out(d, &arena); /* d->expert is the block's start */
    for (size_t at = 0; at < n_all; at++)
        route_token(d, at);
    for (size_t at = 0; at < n_all; at++)
        count_token(d, (uint32_t)(at / shape->n_tokens), at);
    order_rows(d);
    d->expert_y = yard_alloc((size_t)d->n_routed * yard_bench_ep_result_bytes(d));
    if (!d->expert_y) {
        yard_bench_ep_data_destroy(d);
        return yard_fail(err, YARD_ENOMEM, "bench: no memory for %u result rows", plan.n_routed);
    }
    *out = d;
    return YARD_OK;
}

void yard_bench_ep_data_destroy(yard_bench_ep_data *d)
{
    if (!d)
        return;
    free(d->expert_y);
    free(d->expert);
    free(d);
}

/* No NaN; each group has a 448 and a power of two as scale, so that the codes are also what the
 * values quantise to. */
void yard_bench_ep_make_row(const yard_bench_ep_data *d, uint32_t source, uint32_t token,
                            uint8_t *codes, float *scale)
{
    const uint64_t start = random_of(d->seed, KIND_ROW, source, token);

    for (uint32_t i = 0; i < d->shape.hidden; i++) {
        const uint8_t code = (uint8_t)(mix(start + i / 8) >> i % 8 * 8);
        codes[i] = (code & 0x7f) == 0x7f || i % YARD_GROUP == 0 ? (code | 0x7eu) & 0xfeu : code;
    }
    for (uint32_t i = 0; i < d->n_groups; i++)
        scale[i] = ldexpf(1.0f, -(int)(mix(~start + i) >> 40) % 8);
}

/* A result: either sign, 0.5 to 2. */
static void make_result(const yard_bench_ep_data *d, uint32_t source, uint32_t token, uint32_t k,
                        uint16_t *y)
{
    const uint64_t start =
        random_of(d->seed, KIND_RESULT, source, (uint64_t)token * YARD_BENCH_EP_MAX_TOP_K + k);

    for (uint32_t i = 0; i < d->shape.hidden; i++)
        y[i] = (uint16_t)((mix(start + i / 4) >> i % 4 * 16 & 0x80ff) | 0x3f00);
}

void yard_bench_ep_fill(yard_bench_ep_data *d, uint64_t seed)
{
    d->seed = seed;
    for (uint32_t t = 0; t < d->shape.n_tokens; t++)
        yard_bench_ep_make_row(d, d->rank, t, d->x + (size_t)t * d->shape.hidden,
                               d->x_scale + (size_t)t * d->n_groups);
    for (uint32_t row = 0; row < d->n_routed; row++)
        make_result(d, d->origin[row].source, d->origin[row].token, d->origin[row].k,
                    d->expert_y + (size_t)row * d->shape.hidden);
}

static bool check_counts(const yard_bench_ep_data *d, const int32_t *count, yard_error *err)
{
    for (uint32_t e = 0; count && e < d->n_local; e++)
        if (count[e] != d->count[e]) {
            yard_fail(err, YARD_EDEVICE, "expert %u: want %d rows, got %d",
                      d->rank * d->n_local + e, d->count[e], count[e]);
            return false;
        }
    return true;
}

static bool is_flat(const yard_bench_ep_data *d)
{
    return d->shape.layout == YARD_BENCH_EP_FLAT;
}

static bool is_expert_major(const yard_bench_ep_data *d)
{
    return d->shape.layout == YARD_BENCH_EP_EXPERT;
}

static bool check_index(const yard_bench_ep_data *d, const int32_t *row_index, uint32_t max_tokens,
                        yard_error *err)
{
    for (uint32_t row = 0; row_index && row < d->n_routed; row++) {
        const yard_bench_ep_origin *o = &d->origin[row];
        const uint32_t want = is_flat(d) ? d->arrival_of[row] : o->source * max_tokens + o->token;

        if ((uint32_t)row_index[row] != want) {
            yard_fail(err, YARD_EDEVICE, "row_index[%u]: want %u, got %d", row, want,
                      row_index[row]);
            return false;
        }
    }
    return true;
}

/* Row `row` of expert_x, or the token's own row in place, is the wire row of token `at` (source *
 * n_tokens + token). */
static bool check_row(const yard_bench_ep_data *d, uint32_t row, uint32_t at, uint32_t max_tokens,
                      const uint8_t *expert_x, const float *expert_x_scale, uint8_t *codes,
                      float *scale, yard_error *err)
{
    const uint32_t source = at / d->shape.n_tokens, token = at % d->shape.n_tokens;

    if (d->shape.layout == YARD_BENCH_EP_IN_PLACE)
        row = source * max_tokens + token;
    yard_bench_ep_make_row(d, source, token, codes, scale);
    if (!memcmp(codes, expert_x + (size_t)row * d->shape.hidden, d->shape.hidden) &&
        !memcmp(scale, expert_x_scale + (size_t)row * d->n_groups, d->n_groups * sizeof(*scale)))
        return true;
    yard_fail(err, YARD_EDEVICE, "expert_x row %u: want token %u of rank %u, got other bytes", row,
              token, source);
    return false;
}

bool yard_bench_ep_check_dispatch(const yard_bench_ep_data *d, const uint8_t *expert_x,
                                  const float *expert_x_scale, const int32_t *count,
                                  const int32_t *row_index, uint32_t max_tokens, yard_error *err)
{
    const uint32_t n_rows = is_expert_major(d) ? d->n_routed : d->n_arrivals;
    uint8_t *codes = malloc(d->shape.hidden);
    float *scale = malloc(d->n_groups * sizeof(*scale));
    bool right = codes && scale;

    if (!right)
        yard_fail(err, YARD_ENOMEM, "bench: no memory for a row");
    right = right && check_counts(d, count, err) && check_index(d, row_index, max_tokens, err);
    for (uint32_t row = 0; right && row < n_rows; row++)
        right = check_row(d, row, d->arrival[is_expert_major(d) ? d->arrival_of[row] : row],
                          max_tokens, expert_x, expert_x_scale, codes, scale, err);
    free(codes);
    free(scale);
    return right;
}

/* Adds weight * result of expert k to sum. */
static void add_result(const yard_bench_ep_data *d, uint32_t token, uint32_t k, uint16_t *result,
                       float *sum)
{
    const size_t at = (size_t)d->rank * d->shape.n_tokens + token;
    const float weight = d->weight[at * d->shape.top_k + k];

    make_result(d, d->rank, token, k, result);
    for (uint32_t i = 0; i < d->shape.hidden; i++)
        sum[i] = fmaf(yard_f32_from_bf16(result[i]), weight, sum[i]);
}

/* y of one token: exact in order of k; partial: by rank, each part rounded to bf16. */
static void define_token(const yard_bench_ep_data *d, uint32_t token, uint16_t *result, float *part,
                         float *y)
{
    const yard_bench_ep_shape *s = &d->shape;
    const size_t at = (size_t)d->rank * s->n_tokens + token;
    uint32_t n;

    memset(y, 0, s->hidden * sizeof(*y));
    for (uint32_t k = 0; !s->partial && k < s->top_k; k++)
        add_result(d, token, k, result, y);
    for (uint32_t r = 0; s->partial && r < s->n_ranks; r++) {
        if (!names_rank(d, at, r, &n))
            continue;
        memset(part, 0, s->hidden * sizeof(*part));
        for (uint32_t k = 0; k < s->top_k; k++)
            if (rank_of(d, d->expert[at * s->top_k + k]) == r)
                add_result(d, token, k, result, part);
        for (uint32_t i = 0; i < s->hidden; i++)
            y[i] += yard_bf16_round(part[i]);
    }
}

bool yard_bench_ep_check_combine(const yard_bench_ep_data *d, const float *y, yard_error *err)
{
    const size_t n = d->shape.hidden;
    uint16_t *result = malloc(n * sizeof(*result));
    float *part = malloc(n * sizeof(*part)), *want = malloc(n * sizeof(*want));
    bool right = result && part && want;

    if (!right)
        yard_fail(err, YARD_ENOMEM, "bench: no memory for a row");
    for (uint32_t t = 0; right && t < d->shape.n_tokens; t++) {
        define_token(d, t, result, part, want);
        for (size_t i = 0; i < n && d->shape.y_bf16; i++)
            want[i] = yard_bf16_round(want[i]);
        right = memcmp(want, y + t * n, n * sizeof(*y)) == 0;
        if (!right)
            yard_fail(err, YARD_EDEVICE, "y of token %u: not the sum that the definition gives", t);
    }
    free(result);
    free(part);
    free(want);
    return right;
}

double yard_bench_ep_dispatch_bytes(const yard_bench_ep_data *d)
{
    const uint32_t n_rows = is_expert_major(d) ? d->n_routed : is_flat(d) ? d->n_arrivals : 0;

    return ((double)d->n_rows_in + n_rows) * (double)yard_bench_ep_row_bytes(d);
}

double yard_bench_ep_combine_bytes(const yard_bench_ep_data *d)
{
    return (double)d->n_routed * (double)yard_bench_ep_result_bytes(d) +
           (double)d->shape.n_tokens * d->shape.hidden *
               (d->shape.y_bf16 ? sizeof(uint16_t) : sizeof(float));
}
