/* The router and the local form of dispatch and combine. */
#include <assert.h>

#include "ops/cpu/cpu.h"

struct route_job {
    yard_stream s;
    const yard_moe_route_args *a;
};

/* Scores of one row: sigmoid of each logit, or softmax over all. */
static void score_row(const yard_moe_route_args *a, const float *logits, float *score)
{
    float largest = logits[0], sum = 0.0f;

    if (a->score == YARD_SCORE_SIGMOID) {
        for (uint32_t e = 0; e < a->n_experts; e++)
            score[e] = 1.0f / (1.0f + yard_cpu_exp(-logits[e]));
        return;
    }
    for (uint32_t e = 1; e < a->n_experts; e++)
        if (logits[e] > largest)
            largest = logits[e];
    for (uint32_t e = 0; e < a->n_experts; e++) {
        score[e] = yard_cpu_exp(logits[e] - largest);
        sum += score[e];
    }
    for (uint32_t e = 0; e < a->n_experts; e++)
        score[e] /= sum;
}

static float largest_of(const float *choice, uint32_t n)
{
    float largest = choice[0];

    for (uint32_t i = 1; i < n; i++)
        if (choice[i] > largest)
            largest = choice[i];
    return largest;
}

static float two_largest_of(const float *choice, uint32_t n)
{
    float first = choice[0], second;

    if (n == 1)
        return first;
    second = choice[1];
    if (second > first) {
        first = choice[1];
        second = choice[0];
    }
    for (uint32_t i = 2; i < n; i++) {
        if (choice[i] > first) {
            second = first;
            first = choice[i];
        } else if (choice[i] > second) {
            second = choice[i];
        }
    }
    return first + second;
}

/* Number of values that come before value i: larger, or equal with a lower index. */
static uint32_t rank_of(const float *values, uint32_t n, uint32_t i)
{
    uint32_t before = 0;

    for (uint32_t j = 0; j < n; j++)
        before += values[j] > values[i] || (values[j] == values[i] && j < i);
    return before;
}

enum { MAX_TOP_K = 64 }; /* as config.h's YARD_MAX_TOP_K */

/* The k-th largest value, -inf when fewer are numbers: what is below it is not among the first k.
 */
static float kth_largest(const float *values, uint32_t n, uint32_t k)
{
    float best[MAX_TOP_K + 1];
    uint32_t n_best = 0;

    assert(k >= 1 && k <= MAX_TOP_K); /* the interface says so */
    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = n_best;

        if (n_best == k && !(values[i] > best[k - 1]))
            continue;
        if (values[i] != values[i])
            continue;
        for (; at > 0 && best[at - 1] < values[i]; at--)
            best[at] = best[at - 1];
        best[at] = values[i];
        n_best += n_best < k;
    }
    return n_best == k ? best[k - 1] : -__builtin_inff();
}

/* choice[e] of experts outside the best groups becomes -inf. */
static void mask_groups(const yard_moe_route_args *a, float *choice, float *value)
{
    const uint32_t size = a->n_experts / a->n_groups;

    for (uint32_t g = 0; g < a->n_groups; g++)
        value[g] = a->group_value == YARD_GROUP_LARGEST ? largest_of(choice + g * size, size)
                                                        : two_largest_of(choice + g * size, size);
    for (uint32_t g = 0; g < a->n_groups; g++)
        if (rank_of(value, a->n_groups, g) >= a->top_groups)
            for (uint32_t i = 0; i < size; i++)
                choice[g * size + i] = -__builtin_inff();
}

static void route_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct route_job *job = ctx;
    const yard_moe_route_args *a = job->a;
    float *score = job->s->scratch[thread].panel;
    float *choice = score + a->n_experts, *value = choice + a->n_experts;
    int32_t *expert = a->expert + (size_t)i * a->top_k;
    float *weight = a->weight + (size_t)i * a->top_k;
    float sum = 0.0f, least;
    uint32_t n = 0;

    score_row(a, a->logits + (size_t)i * a->n_experts, score);
    for (uint32_t e = 0; e < a->n_experts; e++)
        choice[e] = a->bias ? score[e] + a->bias[e] : score[e];
    if (a->top_groups < a->n_groups)
        mask_groups(a, choice, value);
    least = kth_largest(choice, a->n_experts, a->top_k);
    /* In ascending order of ids, so that every later sum over k has one order. */
    for (uint32_t e = 0; e < a->n_experts && n < a->top_k; e++)
        if (!(choice[e] < least) && rank_of(choice, a->n_experts, e) < a->top_k) {
            expert[n] = (int32_t)e;
            weight[n] = score[e];
            sum += score[e];
            n++;
        }
    for (uint32_t k = 0; k < n; k++)
        weight[k] = (a->normalise ? weight[k] / (sum + 1e-20f) : weight[k]) * a->scale;
    for (; n < a->top_k; n++) { /* only logits that are not numbers leave a choice open */
        expert[n] = -1;
        weight[n] = 0.0f;
    }
}

void yard_cpu_moe_route(yard_stream s, const yard_moe_route_args *a)
{
    struct route_job job = { s, a };

    yard_pool_run(s->pool, route_row, &job, (uint32_t)*a->n_rows);
}

struct scatter_job {
    const yard_moe_scatter_args *a;
};

static void copy_row(yard_rows from, size_t from_row, yard_rows to, size_t to_row, uint32_t n_cols)
{
    const size_t element_bytes = yard_dtype_bytes(from.dtype);
    const uint32_t n_scales = yard_group_count(n_cols);

    memcpy((uint8_t *)to.data + to_row * to.ld * element_bytes,
           (const uint8_t *)from.data + from_row * from.ld * element_bytes, n_cols * element_bytes);
    if (from.dtype == YARD_FP8_E4M3)
        memcpy(to.scale + to_row * n_scales, from.scale + from_row * n_scales,
               n_scales * sizeof(float));
}

static void scatter_token(void *ctx, uint32_t i, uint32_t thread)
{
    const yard_moe_scatter_args *a = ((const struct scatter_job *)ctx)->a;
    const int32_t *row = a->row_index + (size_t)i * a->top_k;

    (void)thread;
    for (uint32_t k = 0; k < a->top_k; k++)
        if (row[k] >= 0)
            copy_row(a->x, i, a->expert_x, (size_t)row[k], a->n_cols);
}

void yard_cpu_moe_scatter(yard_stream s, const yard_moe_scatter_args *a)
{
    struct scatter_job job = { a };
    const size_t n = (size_t)*a->n_tokens * a->top_k;

    memset(a->offset, 0, (a->n_experts + 1) * sizeof(*a->offset));
    for (size_t i = 0; i < n; i++)
        if (a->expert[i] >= 0)
            a->offset[a->expert[i] + 1]++;
    for (uint32_t e = 0; e < a->n_experts; e++)
        a->offset[e + 1] += a->offset[e];
    for (uint32_t e = 0; e < a->n_experts; e++)
        s->list[e] = a->offset[e];
    for (size_t i = 0; i < n; i++)
        a->row_index[i] = a->expert[i] >= 0 ? s->list[a->expert[i]]++ : -1;
    for (size_t i = 0; i < n && a->row_choice; i++)
        if (a->row_index[i] >= 0)
            a->row_choice[a->row_index[i]] = (int32_t)i;
    yard_pool_run(s->pool, scatter_token, &job, (uint32_t)*a->n_tokens);
}

void yard_cpu_count_offsets(yard_stream s, const yard_count_offsets_args *a)
{
    (void)s;
    a->offset[0] = 0;
    for (uint32_t g = 0; g < a->n_groups; g++)
        a->offset[g + 1] = a->offset[g] + a->count[g];
}

struct gather_job {
    yard_stream s;
    const yard_moe_gather_args *a;
};

static void gather_token(void *ctx, uint32_t i, uint32_t thread)
{
    const struct gather_job *job = ctx;
    const yard_moe_gather_args *a = job->a;
    const size_t row_bytes = a->expert_y.ld * yard_dtype_bytes(a->expert_y.dtype);
    const int32_t *row_index = a->row_index + (size_t)i * a->top_k;
    const void *rows[MAX_TOP_K];
    float weight[MAX_TOP_K];
    uint32_t n = 0;

    (void)thread;
    for (uint32_t k = 0; k < a->top_k; k++)
        if (row_index[k] >= 0) {
            rows[n] = (const uint8_t *)a->expert_y.data + (size_t)row_index[k] * row_bytes;
            weight[n++] = a->weight[(size_t)i * a->top_k + k];
        }
    job->s->kernels->convert->weighted_sum(a->expert_y.dtype, rows, weight, n, a->n_cols, YARD_F32,
                                           a->y + (size_t)i * a->n_cols);
}

void yard_cpu_moe_gather(yard_stream s, const yard_moe_gather_args *a)
{
    struct gather_job job = { s, a };

    yard_pool_run(s->pool, gather_token, &job, (uint32_t)*a->n_tokens);
}
