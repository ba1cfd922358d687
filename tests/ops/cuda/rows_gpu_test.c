/* Operations on rows, on the GPU, against the CPU's bits: norms, SiLU, sums, copies. */
#include <stdlib.h>

#include "both_gpu_test.h"

enum { SPARE_ROWS = 2, N_COUNTS = 7 };
static const uint32_t counts[N_COUNTS] = { 0, 1, 2, 7, 64, 129, 1000 };

/* Columns of the families' rows, and some that are no whole pieces. */
static const uint32_t widths[] = { 256, 100, 130, 1, 512, 1536, 2048, 4096, 7168, 9000, 16384 };
enum { N_WIDTHS = sizeof(widths) / sizeof(widths[0]), N_QUICK = 4 };

/* Every third call does not say how many rows there may be. */
static uint32_t room(uint32_t n, uint32_t variant)
{
    return variant % 3 == 2 ? 0 : n + SPARE_ROWS;
}

static void call_norm(const yard_ops *ops, yard_stream s, const void *args)
{
    ops->rms_norm_quant(s, args);
}

static void call_silu(const yard_ops *ops, yard_stream s, const void *args)
{
    ops->silu_mul_quant(s, args);
}

static void call_residual(const yard_ops *ops, yard_stream s, const void *args)
{
    ops->residual_add(s, args);
}

static void call_embed(const yard_ops *ops, yard_stream s, const void *args)
{
    ops->embed(s, args);
}

static void call_select(const yard_ops *ops, yard_stream s, const void *args)
{
    ops->select_rows(s, args);
}

static void call_quantise(const yard_ops *ops, yard_stream s, const void *args)
{
    ops->quantise(s, args);
}

/* variant counts up over the cases and picks forms and dtypes. */
static void norm_case(both *t, uint32_t n, uint32_t cols, uint32_t variant)
{
    const bed *b = &t->b;
    const bool sums = variant % 3 != 0, quant = variant % 4 != 0, plain = variant % 4 != 1;
    const uint32_t pad = variant % 5 == 4 ? 5 : variant % 5 == 3 ? 4 : 0;
    const yard_dtype x_dtype = sums || variant % 2 ? YARD_F32 : YARD_BF16;
    const yard_dtype weight_dtype = variant % 2 ? YARD_F32 : YARD_BF16;
    rows_twin x = { 0 }, add = { 0 }, weight = { 0 }, y = { 0 }, q = { 0 };
    const bool ok =
        rows_create(b, &x, x_dtype, n + SPARE_ROWS, cols, cols + pad, true) && both_vary(t, &x) &&
        rows_create(b, &add, variant % 3 == 1 ? YARD_F32 : YARD_BF16, n + SPARE_ROWS, cols,
                    cols + pad, true) &&
        both_vary(t, &add) && rows_create(b, &weight, weight_dtype, 1, cols, cols, true) &&
        rows_create(b, &y, variant % 2 ? YARD_BF16 : YARD_F32, n + SPARE_ROWS, cols, cols + pad,
                    false) &&
        rows_create(b, &q, YARD_FP8_E4M3, n + SPARE_ROWS, cols, cols, false) &&
        both_set_count(t, n);
    const yard_rows none = { 0 };
    const yard_rms_norm_args host = { .n_rows = t->n_rows.host,
                                      .max_rows = room(n, variant),
                                      .n_cols = cols,
                                      .x = x.host,
                                      .add = sums ? add.host : none,
                                      .weight_dtype = weight_dtype,
                                      .weight = weight.data.host,
                                      .eps = 1e-6f,
                                      .ue8m0 = variant % 8 >= 4,
                                      .y = { .plain = plain ? y.host : none,
                                             .quant = quant ? q.host : none } };
    yard_rms_norm_args device = host;

    device.n_rows = t->n_rows.device;
    device.x = x.device;
    device.add = sums ? add.device : none;
    device.weight = weight.data.device;
    device.y = (yard_out){ .plain = plain ? y.device : none, .quant = quant ? q.device : none };
    if (ok)
        both_run(t, call_norm, &host, &device);
    gpu_test_case(b->t, ok && both_same_rows(t, &x), "norm: %u x %u, variant %u: the sum", n, cols,
                  variant);
    gpu_test_case(b->t, ok && both_same_rows(t, &y), "norm: %u x %u, variant %u: plain", n, cols,
                  variant);
    gpu_test_case(b->t, ok && both_same_rows(t, &q), "norm: %u x %u, variant %u: quantised", n,
                  cols, variant);
    rows_destroy(b, &x);
    rows_destroy(b, &add);
    rows_destroy(b, &weight);
    rows_destroy(b, &y);
    rows_destroy(b, &q);
}

/* Rows begin with the gate whose divisor is 2 - 2^-23: what a reciprocal that is off by a unit, and
 * corrected, does not make the right quotient of. */
static bool put_odd_gates(const bed *b, rows_twin *x)
{
    const float gate = 0x1p-23f;

    for (size_t row = 0; row < x->n_rows; row++)
        if (x->host.dtype == YARD_F32)
            ((float *)x->host.data)[row * x->host.ld] = gate;
        else
            ((uint16_t *)x->host.data)[row * x->host.ld] = yard_bf16_from_f32(gate);
    return twin_upload(b, &x->data);
}

static void silu_case(both *t, uint32_t n, uint32_t cols, uint32_t variant)
{
    const bed *b = &t->b;
    const bool quant = variant % 4 != 0, plain = variant % 4 != 1;
    const uint32_t pad = variant % 5 == 4 ? 5 : variant % 5 == 3 ? 4 : 0;
    const yard_rows none = { 0 };
    rows_twin x = { 0 }, y = { 0 }, q = { 0 };
    const bool ok = rows_create(b, &x, variant % 2 ? YARD_F32 : YARD_BF16, n + SPARE_ROWS, 2 * cols,
                                2 * cols + pad, true) &&
                    both_vary(t, &x) && put_odd_gates(b, &x) &&
                    rows_create(b, &y, variant % 3 ? YARD_BF16 : YARD_F32, n + SPARE_ROWS, cols,
                                cols + pad, false) &&
                    rows_create(b, &q, YARD_FP8_E4M3, n + SPARE_ROWS, cols, cols, false) &&
                    both_set_count(t, n);
    const yard_silu_mul_args host = { .n_rows = t->n_rows.host,
                                      .max_rows = room(n, variant),
                                      .n_cols = cols,
                                      .gate_up = x.host,
                                      .ue8m0 = variant % 8 >= 4,
                                      .y = { .plain = plain ? y.host : none,
                                             .quant = quant ? q.host : none } };
    yard_silu_mul_args device = host;

    device.n_rows = t->n_rows.device;
    device.gate_up = x.device;
    device.y = (yard_out){ .plain = plain ? y.device : none, .quant = quant ? q.device : none };
    if (ok)
        both_run(t, call_silu, &host, &device);
    gpu_test_case(b->t, ok && both_same_rows(t, &y), "silu: %u x %u, variant %u: plain", n, cols,
                  variant);
    gpu_test_case(b->t, ok && both_same_rows(t, &q), "silu: %u x %u, variant %u: quantised", n,
                  cols, variant);
    rows_destroy(b, &x);
    rows_destroy(b, &y);
    rows_destroy(b, &q);
}

static void quantise_case(both *t, uint32_t n, uint32_t cols, uint32_t variant)
{
    const bed *b = &t->b;
    rows_twin x = { 0 }, q = { 0 };
    const bool ok = rows_create(b, &x, variant % 2 ? YARD_F32 : YARD_BF16, n + SPARE_ROWS, cols,
                                cols + variant % 3, true) &&
                    both_vary(t, &x) &&
                    rows_create(b, &q, YARD_FP8_E4M3, n + SPARE_ROWS, cols, cols, false) &&
                    both_set_count(t, n);
    const yard_quantise_args host = { .n_rows = t->n_rows.host,
                                      .max_rows = room(n, variant),
                                      .n_cols = cols,
                                      .x = x.host,
                                      .ue8m0 = variant % 4 >= 2,
                                      .y = q.host };
    yard_quantise_args device = host;

    device.n_rows = t->n_rows.device;
    device.x = x.device;
    device.y = q.device;
    if (ok)
        both_run(t, call_quantise, &host, &device);
    gpu_test_case(b->t, ok && both_same_rows(t, &q), "quantise: %u x %u, variant %u", n, cols,
                  variant);
    rows_destroy(b, &x);
    rows_destroy(b, &q);
}

static void residual_case(both *t, uint32_t n, uint32_t cols, uint32_t variant)
{
    const bed *b = &t->b;
    const yard_rows none = { 0 };
    rows_twin x = { 0 }, first = { 0 }, second = { 0 };
    const bool ok = rows_create(b, &x, YARD_F32, n + SPARE_ROWS, cols, cols, true) &&
                    rows_create(b, &first, variant % 2 ? YARD_F32 : YARD_BF16, n + SPARE_ROWS, cols,
                                cols + 4 * (variant % 3), true) &&
                    rows_create(b, &second, YARD_BF16, n + SPARE_ROWS, cols, cols, true) &&
                    both_set_count(t, n);
    const yard_residual_add_args host = { .n_rows = t->n_rows.host,
                                          .max_rows = room(n, variant),
                                          .n_cols = cols,
                                          .x = x.data.host,
                                          .a = first.host,
                                          .b = variant % 3 ? second.host : none };
    yard_residual_add_args device = host;

    device.n_rows = t->n_rows.device;
    device.x = x.data.device;
    device.a = first.device;
    device.b = variant % 3 ? second.device : none;
    if (ok)
        both_run(t, call_residual, &host, &device);
    gpu_test_case(b->t, ok && both_same_rows(t, &x), "residual: %u x %u, variant %u", n, cols,
                  variant);
    rows_destroy(b, &x);
    rows_destroy(b, &first);
    rows_destroy(b, &second);
}

/* embed from tables of every dtype, select_rows from its result's neighbour. */
static void copy_case(both *t, uint32_t n, uint32_t cols, uint32_t variant)
{
    enum { N_IDS = 300 };
    const bed *b = &t->b;
    const yard_dtype dtype = (yard_dtype)(variant % YARD_DTYPE_COUNT);
    rows_twin table = { 0 }, from = { 0 }, x = { 0 }, out = { 0 };
    twin index = { 0 };
    const bool ok = rows_create(b, &table, dtype, N_IDS, cols, cols + 4 * (variant % 2), true) &&
                    rows_create(b, &from, YARD_F32, N_IDS, cols, cols, true) &&
                    rows_create(b, &x, YARD_F32, n + SPARE_ROWS, cols, cols, false) &&
                    rows_create(b, &out, YARD_F32, n + SPARE_ROWS, cols, cols, false) &&
                    twin_create(b, &index, (n + 1) * sizeof(int32_t)) && both_set_count(t, n);
    const yard_embed_args embed = { .n_rows = t->n_rows.host,
                                    .max_rows = room(n, variant),
                                    .token = index.host,
                                    .table = { .dtype = dtype,
                                               .rows = N_IDS,
                                               .cols = cols,
                                               .ld = table.host.ld,
                                               .data = table.data.host },
                                    .x = x.data.host };
    const yard_select_rows_args select = { .n_rows = t->n_rows.host,
                                           .max_rows = room(n, variant),
                                           .index = index.host,
                                           .n_cols = cols,
                                           .x = from.data.host,
                                           .out = out.data.host };
    yard_embed_args device_embed = embed;
    yard_select_rows_args device_select = select;

    device_embed.n_rows = device_select.n_rows = t->n_rows.device;
    device_embed.token = device_select.index = index.device;
    device_embed.table.data = table.data.device;
    device_embed.x = x.data.device;
    device_select.x = from.data.device;
    device_select.out = out.data.device;
    for (uint32_t i = 0; ok && i < n; i++)
        ((int32_t *)index.host)[i] = (int32_t)both_below(t, N_IDS);
    if (ok && twin_upload(b, &index)) {
        both_run(t, call_embed, &embed, &device_embed);
        both_run(t, call_select, &select, &device_select);
    }
    gpu_test_case(b->t, ok && both_same_rows(t, &x), "embed: %u x %u %s", n, cols,
                  yard_dtype_name(dtype));
    gpu_test_case(b->t, ok && both_same_rows(t, &out), "select: %u x %u", n, cols);
    rows_destroy(b, &table);
    rows_destroy(b, &from);
    rows_destroy(b, &x);
    rows_destroy(b, &out);
    twin_destroy(b, &index);
}

static void refuses(both *t)
{
    yard_stream s = NULL;
    yard_error err = { 0 };
    const yard_ops_config config = { .limits = { .max_tokens = 8 } };

    if (t->b.ops->open(&s, &config, &err) != YARD_OK)
        return;
    t->b.ops->rms_norm_quant(s, &(yard_rms_norm_args){ .n_cols = 1 << 20 });
    gpu_test_case(t->b.t, t->b.ops->check(s, &err) == YARD_EINVAL, "norm: too wide is refused");
    t->b.ops->close(s);
}

void gpu_test_rows(gpu_test *test)
{
    both t;
    uint32_t variant = 0;

    if (!both_open(&t, test))
        return;
    refuses(&t);
    for (int w = 0; w < (test->quick ? N_QUICK : N_WIDTHS); w++)
        for (int c = 0; c < N_COUNTS - (int)test->quick; c++) {
            for (uint32_t forms = 0; forms < 2; forms++, variant++) {
                norm_case(&t, counts[c], widths[w], variant);
                silu_case(&t, counts[c], widths[w], variant);
            }
            quantise_case(&t, counts[c], widths[w], variant);
            residual_case(&t, counts[c], widths[w], variant);
            copy_case(&t, counts[c], widths[w], variant);
        }
    both_close(&t);
}
