/* The plain C definition of the inner kernels. */
#include <assert.h>
#include <math.h>

#include "ops/cpu/cpu.h"
#include "ops/cpu/exp.h"

float yard_cpu_exp(float x)
{
    float n, r, p;

    if (!(x >= EXP_MIN))
        return x != x ? x : 0.0f;
    if (x > EXP_MAX)
        x = EXP_MAX;
    n = nearbyintf(x * EXP_LOG2E);
    r = fmaf(n, -EXP_LN2_HIGH, x);
    r = fmaf(n, -EXP_LN2_LOW, r);
    p = EXP_C6;
    p = fmaf(p, r, EXP_C5);
    p = fmaf(p, r, EXP_C4);
    p = fmaf(p, r, EXP_C3);
    p = fmaf(p, r, EXP_C2);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    return p * yard_f32_from_bits((uint32_t)((int32_t)n + 127) << 23);
}

static float add_eight(const float *lane)
{
    const float a = lane[0] + lane[4], b = lane[1] + lane[5];
    const float c = lane[2] + lane[6], d = lane[3] + lane[7];

    return (a + c) + (b + d);
}

static float add_lanes(const float *lane)
{
    float eight[8];

    for (int l = 0; l < 8; l++)
        eight[l] = lane[l] + lane[l + 8];
    return add_eight(eight);
}

/* A few groups at most: decoded values in order, then in pairs. */
static void decode_pairs(yard_dtype dtype, const void *src, uint32_t n, float *dst)
{
    const size_t bytes = yard_dtype_bytes(dtype);

    for (uint32_t at = 0; at < n; at += CHUNK) {
        const uint32_t left = n - at < CHUNK ? n - at : CHUNK;
        float value[CHUNK] = { 0 };

        yard_convert_c.decode(dtype, (const uint8_t *)src + at * bytes, left, value);
        for (uint32_t l = 0; l < LANES; l++) {
            dst[at + l] = value[2 * l + 1];
            dst[at + LANES + l] = value[2 * l];
        }
    }
}

static void pairs_to_quads(float *values, uint32_t n)
{
    for (; n > 0; n -= CHUNK, values += CHUNK) {
        float pairs[CHUNK];

        memcpy(pairs, values, sizeof(pairs));
        for (uint32_t i = 0; i < LANES; i++) {
            float *quad = values + i % 2 * LANES + i / 2;

            quad[0] = pairs[i];
            quad[SCALED_LANES] = pairs[LANES + i];
        }
    }
}

/* Lanes of x . w over n elements, n a multiple of n_lanes. */
static void dot_lanes(const float *x, const float *w, uint32_t n, uint32_t n_lanes, float *lane)
{
    for (uint32_t i = 0; i < n; i += n_lanes)
        for (uint32_t l = 0; l < n_lanes; l++)
            lane[l] = fmaf(x[i + l], w[i + l], lane[l]);
}

/* Adds a group, or less, of x . w to its outer lanes. */
static void dot_group(const float *x, const float *w, uint32_t n, float factor, float *outer)
{
    float lane[SCALED_LANES] = { 0 };

    dot_lanes(x, w, n, SCALED_LANES, lane);
    for (uint32_t l = 0; l < SCALED_LANES; l++)
        outer[l] = fmaf(lane[l], factor, outer[l]);
}

/* Adds x . w to the outer lanes; factor: of the first group, those of others MAX_TILE_ROWS on. */
static void dot_one(const float *x, const float *w, uint32_t n_k, const float *factor, float *outer)
{
    const uint32_t n = pad_lanes(n_k);

    if (!factor) {
        dot_lanes(x, w, n, LANES, outer);
        return;
    }
    for (uint32_t k = 0; k < n; k += YARD_GROUP, factor += MAX_TILE_ROWS)
        dot_group(x + k, w + k, n - k < YARD_GROUP ? n - k : YARD_GROUP, *factor, outer);
}

static void dot(const dot_args *a)
{
    const size_t n_lanes = a->factor ? SCALED_LANES : LANES;

    assert(a->lanes || (a->y && !a->continued)); /* sums that are carried have a place */
    for (uint32_t m = 0; m < a->n_x; m++)
        for (uint32_t n = 0; n < a->n_w; n++) {
            float *carried = a->lanes ? a->lanes + ((size_t)m * a->n_w + n) * n_lanes : NULL;
            float outer[LANES] = { 0 };

            if (a->continued)
                memcpy(outer, carried, n_lanes * sizeof(*outer));
            dot_one(a->x + m * a->x_ld, a->w + n * a->w_ld, a->n_k,
                    a->factor ? a->factor + m : NULL, outer);
            if (a->y)
                a->y[m * a->y_ld + n] = a->factor ? add_eight(outer) : add_lanes(outer);
            else
                memcpy(carried, outer, n_lanes * sizeof(*outer));
        }
}

/* One group's worth of w at a time, decoded on the stack. */
static float raw_dot_one(const raw_dot_args *a, uint32_t m, uint32_t n)
{
    const size_t element_bytes = yard_dtype_bytes(a->w_dtype);
    const uint8_t *w = (const uint8_t *)a->w + n * a->w_ld * element_bytes;
    float outer[LANES] = { 0 };

    for (uint32_t k = 0, group = 0; k < a->n_k; k += YARD_GROUP, group++) {
        const uint32_t n_group = a->n_k - k < YARD_GROUP ? a->n_k - k : YARD_GROUP;
        const float *x = a->x + m * a->x_ld + k;
        float values[YARD_GROUP];

        decode_pairs(a->w_dtype, w + k * element_bytes, n_group, values);
        if (a->w_scale) {
            const float x_scale = a->x_scale ? a->x_scale[m * a->x_scale_ld + group] : 1.0f;

            pairs_to_quads(values, pad_lanes(n_group));
            dot_group(x, values, pad_lanes(n_group), x_scale * a->w_scale[n][group], outer);
        } else {
            dot_lanes(x, values, pad_lanes(n_group), LANES, outer);
        }
    }
    return a->w_scale ? add_eight(outer) : add_lanes(outer);
}

static void raw_dot(const raw_dot_args *a)
{
    for (uint32_t m = 0; m < a->n_x; m++)
        for (uint32_t n = 0; n < a->n_w; n++)
            a->y[m * a->y_ld + n] = raw_dot_one(a, m, n);
}

static void axpy(const float *x, size_t x_ld, uint32_t n_x, const float *w, size_t w_ld,
                 uint32_t n_r, uint32_t n_c, float *acc, size_t acc_ld)
{
    for (uint32_t m = 0; m < n_x; m++)
        for (uint32_t r = 0; r < n_r; r++)
            for (uint32_t c = 0; c < n_c; c++)
                acc[m * acc_ld + c] = fmaf(x[m * x_ld + r], w[r * w_ld + c], acc[m * acc_ld + c]);
}

static float scale_max(float *x, uint32_t n, float f, float max)
{
    for (uint32_t i = 0; i < n; i++) {
        x[i] *= f;
        if (x[i] > max)
            max = x[i];
    }
    return max;
}

static void scale(float *acc, uint32_t n, float f)
{
    for (uint32_t i = 0; i < n; i++)
        acc[i] *= f;
}

static float sum_squares(const float *x, uint32_t n)
{
    float lane[SQUARE_LANES] = { 0 };

    for (uint32_t i = 0; i < n; i++)
        lane[i % SQUARE_LANES] = fmaf(x[i], x[i], lane[i % SQUARE_LANES]);
    for (uint32_t half = SQUARE_LANES / 2; half >= 8; half /= 2)
        for (uint32_t l = 0; l < half; l++)
            lane[l] += lane[l + half];
    return add_eight(lane);
}

static float exp_sum(float *x, uint32_t n, float max)
{
    float lane[8] = { 0 };

    for (uint32_t i = 0; i < n; i++) {
        x[i] = yard_cpu_exp(x[i] - max);
        lane[i % 8] += x[i];
    }
    return add_eight(lane);
}

static void silu_mul(const float *gate, const float *up, uint32_t n, float *y)
{
    for (uint32_t i = 0; i < n; i++)
        y[i] = gate[i] / (1.0f + yard_cpu_exp(-gate[i])) * up[i];
}

const cpu_kernels yard_cpu_kernels_c = {
    .name = "c",
    .reason = "plain C definition",
    .convert = &yard_convert_c,
    .decode_pairs = decode_pairs,
    .pairs_to_quads = pairs_to_quads,
    .dot = dot,
    .raw_dot = raw_dot,
    .axpy = axpy,
    .scale_max = scale_max,
    .scale = scale,
    .sum_squares = sum_squares,
    .exp_sum = exp_sum,
    .silu_mul = silu_mul,
};
