/* Rows that are copied or added up: embed, select_rows, residual_add. */
#include "ops/cuda/launch.h"

#include "ops/cuda/rows.cuh"

typedef struct embed_args {
    yard_embed_args a;
    bool wide;
} embed_args;

static __global__ void __launch_bounds__(ITEM_THREADS)
    embed_kernel(const __grid_constant__ embed_args n)
{
    const yard_embed_args &a = n.a;
    const yard_rows table = { a.table.dtype, a.table.ld, (void *)a.table.data, NULL };
    const yard_rows x = { YARD_F32, a.table.cols, a.x, NULL };
    const uint32_t n_cols = a.table.cols;

    each_eight(a.n_rows, n_cols, [&](uint32_t row, uint32_t col) {
        const size_t from = (size_t)a.token[row] * table.ld;
        eight value = {};
        if (table.dtype == YARD_BF16 || table.dtype == YARD_F32) {
            value = load_values(table, from, col, n_cols, n.wide);
        } else {
            for (uint32_t c = 0; c < LANE_COLS && col + c < n_cols; c++)
                value.v[c] = plain_value(table.dtype, table.data, from + col + c);
        }
        store_values(x, (size_t)row * n_cols, col, n_cols, n.wide, value);
    });
}

yard_status yard_cuda_embed_launch(const yard_embed_args *a, uint32_t max_rows, void *stream,
                                   yard_error *err)
{
    const uint32_t n_cols = a->table.cols;
    const yard_rows table = { a->table.dtype, a->table.ld, (void *)a->table.data, NULL };
    const yard_rows x = { YARD_F32, n_cols, a->x, NULL };
    const embed_args n = { *a, is_wide(&table, n_cols) && is_wide(&x, n_cols) };

    return launch_rows(embed_kernel, eight_blocks(max_rows, n_cols), ITEM_THREADS, 0, n, "embed",
                       stream, err);
}

typedef struct select_args {
    yard_select_rows_args a;
    bool wide;
} select_args;

static __global__ void __launch_bounds__(ITEM_THREADS)
    select_rows_kernel(const __grid_constant__ select_args n)
{
    const yard_select_rows_args &a = n.a;
    const yard_rows x = { YARD_F32, a.n_cols, (void *)a.x, NULL };
    const yard_rows out = { YARD_F32, a.n_cols, a.out, NULL };

    each_eight(a.n_rows, a.n_cols, [&](uint32_t row, uint32_t col) {
        store_values(out, (size_t)row * a.n_cols, col, a.n_cols, n.wide,
                     load_values(x, (size_t)a.index[row] * a.n_cols, col, a.n_cols, n.wide));
    });
}

yard_status yard_cuda_select_rows_launch(const yard_select_rows_args *a, uint32_t max_rows,
                                         void *stream, yard_error *err)
{
    const yard_rows x = { YARD_F32, a->n_cols, (void *)a->x, NULL };
    const yard_rows out = { YARD_F32, a->n_cols, a->out, NULL };
    const select_args n = { *a, is_wide(&x, a->n_cols) && is_wide(&out, a->n_cols) };

    return launch_rows(select_rows_kernel, eight_blocks(max_rows, a->n_cols), ITEM_THREADS, 0, n,
                       "select_rows", stream, err);
}

typedef struct residual_args {
    yard_residual_add_args a;
    bool wide;
} residual_args;

static __device__ __forceinline__ void add_eight(eight *x, const yard_rows &rows, uint32_t row,
                                                 uint32_t col, uint32_t n_cols, bool wide)
{
    const eight add = load_values(rows, (size_t)row * rows.ld, col, n_cols, wide);

#pragma unroll
    for (int i = 0; i < LANE_COLS; i++)
        x->v[i] = __fadd_rn(x->v[i], add.v[i]);
}

static __global__ void __launch_bounds__(ITEM_THREADS)
    residual_add_kernel(const __grid_constant__ residual_args n)
{
    const yard_residual_add_args &a = n.a;
    const yard_rows x = { YARD_F32, a.n_cols, a.x, NULL };

    each_eight(a.n_rows, a.n_cols, [&](uint32_t row, uint32_t col) {
        eight sum = load_values(x, (size_t)row * a.n_cols, col, a.n_cols, n.wide);
        if (a.a.data)
            add_eight(&sum, a.a, row, col, a.n_cols, n.wide);
        if (a.b.data)
            add_eight(&sum, a.b, row, col, a.n_cols, n.wide);
        store_values(x, (size_t)row * a.n_cols, col, a.n_cols, n.wide, sum);
    });
}

yard_status yard_cuda_residual_add_launch(const yard_residual_add_args *a, uint32_t max_rows,
                                          void *stream, yard_error *err)
{
    const yard_rows x = { YARD_F32, a->n_cols, a->x, NULL };
    const residual_args n = { *a, is_wide(&x, a->n_cols) && is_wide(&a->a, a->n_cols) &&
                                      is_wide(&a->b, a->n_cols) };

    return launch_rows(residual_add_kernel, eight_blocks(max_rows, a->n_cols), ITEM_THREADS, 0, n,
                       "residual_add", stream, err);
}
