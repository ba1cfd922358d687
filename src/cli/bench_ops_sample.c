/* bench ops: sampling. Logits look like a model's: most far below the few that count. */
#include <math.h>
#include <stdio.h>

#include "cli/bench_ops.h"

enum { GREEDY, TOP_P };

static bool has_vocab(const yard_bench_ops_size *size)
{
    return size->model->vocab > 0;
}

/* Nearly normal, with a deviation of 3: top-p 0.9 then keeps some thousand of 129,280. */
static void fill_logits(float *x, size_t n)
{
    uint64_t state = 7;

    for (size_t i = 0; i < n; i++) {
        float sum = 0;
        for (int k = 0; k < 4; k++)
            sum += (float)yard_bench_ops_random(&state, 1 << 20) * 0x1p-19f - 1;
        x[i] = sum * 3 / sqrtf(4.0f / 3);
    }
}

static void place_sample(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                         yard_bench_ops_set *set, bool host)
{
    const uint32_t n = size->n_tokens, n_vocab = size->model->vocab;
    yard_sample_row *rows = yard_arena_take(&set->arena, n * sizeof(*rows));
    yard_sample_args *a = &set->args.sample;

    *a = (yard_sample_args){
        .n_rows = yard_bench_ops_take_count(set, n, host),
        .n_vocab = n_vocab,
        .logits = yard_bench_ops_take(set, YARD_F32, (size_t)n * n_vocab, false),
        .rows = rows,
        .token = yard_bench_ops_take_ints(set, n),
    };
    yard_bench_ops_add_out(set, (yard_rows){ .ld = 1, .data = a->token }, n, 1, true);
    for (uint32_t i = 0; host && i < n; i++)
        rows[i] = (yard_sample_row){ .params = { .temperature = c->id == TOP_P ? 1 : 0,
                                                 .top_p = 0.9f,
                                                 .repetition_penalty = 1,
                                                 .seed = i },
                                     .position = i };
    if (host)
        fill_logits(a->logits, (size_t)n * n_vocab);
}

static void run_sample(const yard_ops *ops, yard_stream s, const yard_bench_ops_set *set)
{
    ops->sample(s, &set->args.sample);
}

static void count_sample(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                         const yard_bench_ops_set *host, double *bytes, double *flops,
                         char shape[BENCH_OPS_SHAPE_BYTES])
{
    *flops = -1;
    *bytes = 4.0 * size->n_tokens * host->args.sample.n_vocab;
    snprintf(shape, BENCH_OPS_SHAPE_BYTES, "vocabulary %u, %s", host->args.sample.n_vocab,
             c->id == TOP_P ? "top-p 0.9" : "greedy");
}

const yard_bench_ops_case *yard_bench_ops_sample(uint32_t *n)
{
    static const yard_bench_ops_case list[] = {
        { "sample", "greedy", has_vocab, place_sample, run_sample, NULL,
          yard_bench_ops_shrink_nothing, count_sample, YARD_F32, GREEDY },
        { "sample", "top_p", has_vocab, place_sample, run_sample, NULL,
          yard_bench_ops_shrink_nothing, count_sample, YARD_F32, TOP_P },
    };

    *n = sizeof(list) / sizeof(list[0]);
    return list;
}
