/* bench ops: the memory of a set, and what fills it. */
#include "cli/bench_ops.h"

void *yard_bench_ops_take(yard_bench_ops_set *set, yard_dtype dtype, size_t n, bool fill)
{
    void *at = yard_arena_take(&set->arena, n * yard_dtype_bytes(dtype));

    if (fill && set->n_fills < BENCH_OPS_MAX_FILLS)
        set->fills[set->n_fills++] = (yard_bench_ops_fill){ .at = at, .dtype = dtype, .n = n };
    return at;
}

float *yard_bench_ops_take_scales(yard_bench_ops_set *set, size_t n)
{
    float *at = yard_bench_ops_take(set, YARD_F32, n, true);

    set->fills[set->n_fills - 1].positive = true;
    return at;
}

int32_t *yard_bench_ops_take_ints(yard_bench_ops_set *set, size_t n)
{
    return yard_arena_take(&set->arena, n * sizeof(int32_t));
}

int32_t *yard_bench_ops_take_count(yard_bench_ops_set *set, uint32_t n, bool host)
{
    set->n_rows = yard_bench_ops_take_ints(set, 1);
    if (host)
        *set->n_rows = (int32_t)n;
    return set->n_rows;
}

yard_rows yard_bench_ops_take_rows(yard_bench_ops_set *set, yard_dtype dtype, size_t n_rows,
                                   uint32_t n_cols, bool fill)
{
    const size_t n_scales = n_rows * yard_group_count(n_cols);
    yard_rows rows = { .dtype = dtype, .ld = n_cols };

    rows.data = yard_bench_ops_take(set, dtype, n_rows * n_cols, fill);
    if (dtype == YARD_FP8_E4M3)
        rows.scale = fill ? yard_bench_ops_take_scales(set, n_scales)
                          : yard_bench_ops_take(set, YARD_F32, n_scales, false);
    return rows;
}

yard_matrix yard_bench_ops_take_matrix(yard_bench_ops_set *set, yard_dtype dtype, uint32_t rows,
                                       uint32_t cols, uint32_t block_rows)
{
    yard_matrix m = { .dtype = dtype, .rows = rows, .cols = cols, .ld = cols };

    m.data = yard_bench_ops_take(set, dtype, (size_t)rows * cols, true);
    if (dtype == YARD_FP8_E4M3) {
        m.scale_ld = yard_group_count(cols);
        m.block_rows = block_rows;
        m.scale =
            yard_bench_ops_take_scales(set, (size_t)yard_ceil_div(rows, block_rows) * m.scale_ld);
    }
    return m;
}

void yard_bench_ops_add_out(yard_bench_ops_set *set, yard_rows rows, uint32_t n_rows,
                            uint32_t n_cols, bool whole)
{
    if (set->n_outs < BENCH_OPS_MAX_OUTS)
        set->outs[set->n_outs++] = (yard_bench_ops_out){ rows, n_rows, n_cols, whole };
}

double yard_bench_ops_matrix_bytes(const yard_matrix *m)
{
    const double n = (double)m->rows * m->cols * (double)yard_dtype_bytes(m->dtype);

    return m->scale ? n + 4.0 * yard_ceil_div(m->rows, m->block_rows) * yard_group_count(m->cols)
                    : n;
}

double yard_bench_ops_rows_bytes(yard_rows x, double n_rows, double n_cols)
{
    const double n = n_rows * n_cols * (double)yard_dtype_bytes(x.dtype);

    return x.dtype == YARD_FP8_E4M3 ? n + 4 * n_rows * yard_group_count((uint32_t)n_cols) : n;
}

uint32_t yard_bench_ops_random(uint64_t *state, uint32_t n)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((*state >> 33) % n);
}

enum { PATTERN = 16411 };   /* a prime: rows of a matrix differ */
enum { PATTERN_ROWS = 97 }; /* as many rows of a list differ */

/* Values of both signs around 0, as wide as a quantised group's; scales keep products near 1. */
static float value_of(uint64_t *state, bool positive)
{
    const float unit = (float)yard_bench_ops_random(state, 1 << 24) * 0x1p-23f - 1.0f;

    return positive ? 0.001f * (2.0f + unit) : unit;
}

static void put_value(yard_dtype dtype, float value, uint8_t *at)
{
    const uint16_t half = yard_bf16_from_f32(value);

    switch (dtype) {
    case YARD_FP8_E4M3:
        *at = yard_e4m3_from_f32(448.0f * value);
        break;
    case YARD_BF16:
        memcpy(at, &half, sizeof(half));
        break;
    default:
        memcpy(at, &value, sizeof(value));
    }
}

static void fill_rows(const yard_bench_ops_fill *f, uint64_t state)
{
    const size_t width = yard_dtype_bytes(f->dtype), n_bytes = f->n * width;
    uint8_t *at = f->at;

    for (size_t row = 0; row < f->n_rows; row++, at += f->row_bytes)
        for (size_t k = 0; k < n_bytes && row < PATTERN_ROWS; k += width)
            put_value(f->dtype, value_of(&state, f->positive), at + k);
    at = f->at;
    for (size_t row = PATTERN_ROWS; row < f->n_rows; row++, at += f->row_bytes)
        memcpy(at + PATTERN_ROWS * f->row_bytes, at, n_bytes);
}

void yard_bench_ops_fill_set(yard_bench_ops_set *set)
{
    for (uint32_t i = 0; i < set->n_fills; i++) {
        const yard_bench_ops_fill *f = &set->fills[i];
        const size_t width = yard_dtype_bytes(f->dtype), n_bytes = f->n * width;
        size_t done = (f->n < PATTERN ? f->n : PATTERN) * width;
        uint64_t state = i + 1;
        uint8_t *at = f->at;

        if (f->n_rows > 0) {
            fill_rows(f, state);
            continue;
        }
        for (size_t k = 0; k < done; k += width)
            put_value(f->dtype, value_of(&state, f->positive), at + k);
        for (; done < n_bytes; done += done < n_bytes - done ? done : n_bytes - done)
            memcpy(at + done, at, done < n_bytes - done ? done : n_bytes - done);
    }
}

static double out_value(const yard_bench_ops_out *o, size_t row, size_t col)
{
    const size_t i = row * o->rows.ld + col;

    switch (o->rows.dtype) {
    case YARD_FP8_E4M3:
        return (double)yard_f32_from_e4m3(((const uint8_t *)o->rows.data)[i]) *
               (double)o->rows.scale[row * yard_group_count(o->rows.ld) + col / YARD_GROUP];
    case YARD_BF16:
        return (double)yard_f32_from_bf16(((const uint16_t *)o->rows.data)[i]);
    default:
        return (double)((const float *)o->rows.data)[i];
    }
}

/* What a value may be off, of the largest of its row: another order of summation, one rounding of
 * the stored form. */
static double tolerance_of(yard_dtype dtype)
{
    return dtype == YARD_FP8_E4M3 ? 0x1p-3 : dtype == YARD_BF16 ? 0x1p-7 : 1e-4;
}

static bool same_bits(const yard_bench_ops_out *a, const yard_bench_ops_out *b, size_t row)
{
    const size_t width = yard_dtype_bytes(a->rows.dtype), at = row * a->rows.ld * width;
    const size_t n_scales = yard_group_count(a->n_cols),
                 scales = row * yard_group_count(a->rows.ld);

    return memcmp((uint8_t *)a->rows.data + at, (uint8_t *)b->rows.data + at, a->n_cols * width) ==
               0 &&
           (a->rows.dtype != YARD_FP8_E4M3 ||
            memcmp(a->rows.scale + scales, b->rows.scale + scales, n_scales * sizeof(float)) == 0);
}

static bool close_enough(const yard_bench_ops_out *got, const yard_bench_ops_out *want, size_t row)
{
    double largest = 0;

    for (uint32_t c = 0; c < want->n_cols; c++) {
        const double value = out_value(want, row, c);
        largest = value > largest ? value : -value > largest ? -value : largest;
    }
    for (uint32_t c = 0; c < want->n_cols; c++) {
        const double off = out_value(got, row, c) - out_value(want, row, c);
        if (!((off < 0 ? -off : off) <= largest * tolerance_of(want->rows.dtype)))
            return false;
    }
    return true;
}

bool yard_bench_ops_agrees(const yard_bench_ops_set *got, const yard_bench_ops_set *want,
                           bool exact)
{
    for (uint32_t i = 0; i < want->n_outs; i++)
        for (size_t row = 0; row < want->outs[i].n_rows; row++)
            if (!same_bits(&want->outs[i], &got->outs[i], row) &&
                (exact || want->outs[i].whole || !close_enough(&got->outs[i], &want->outs[i], row)))
                return false;
    return true;
}

void yard_bench_ops_shrink_rows(yard_bench_ops_set *set, uint32_t max_rows, uint32_t n_cols)
{
    if ((uint32_t)*set->n_rows > max_rows)
        *set->n_rows = (int32_t)max_rows;
    set->outs[0].n_rows = (uint32_t)*set->n_rows;
    set->outs[0].n_cols = n_cols;
}

void yard_bench_ops_shrink_nothing(yard_bench_ops_set *set)
{
    (void)set;
}
