#include "model/synth_values.h"

#include <math.h>

enum { N_QUANTILES = 256 };

/* Standard deviation of the FP8 codes: the outermost of 256 quantiles, 2.89, then lies at 416,
 * below the largest code. */
static const float fp8_sigma = 144.0f;

/* splitmix64 (Steele, Lea, Flood 2014): its n-th output is a function of n. */
static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static uint64_t random_word(uint64_t key, uint64_t n)
{
    return mix(key + n * 0x9e3779b97f4a7c15u);
}

/* z with P(Z < z) = p, by bisection: it runs 256 times in all. */
static double gaussian_quantile(double p)
{
    double low = -8, high = 8;

    for (int i = 0; i < 60; i++) {
        const double middle = (low + high) / 2;
        if (erfc(-middle / sqrt(2)) / 2 < p)
            low = middle;
        else
            high = middle;
    }
    return low;
}

void yard_synth_gaussian_init(yard_synth_gaussian *g)
{
    for (int i = 0; i < N_QUANTILES; i++)
        g->z[i] = (float)gaussian_quantile((i + 0.5) / N_QUANTILES);
}

void yard_synth_source_init(yard_synth_source *s, const yard_synth_gaussian *g, uint64_t seed,
                            const char *name, yard_dtype dtype, float mean, float sigma)
{
    s->key = mix(seed + 0x9e3779b97f4a7c15u);
    for (; *name; name++)
        s->key = mix(s->key ^ (unsigned char)*name);
    s->dtype = dtype;
    for (int i = 0; i < N_QUANTILES; i++) {
        if (dtype == YARD_FP8_E4M3)
            s->table.u8[i] = yard_e4m3_from_f32(g->z[i] * fp8_sigma);
        else if (dtype == YARD_BF16)
            s->table.u16[i] = yard_bf16_from_f32(mean + g->z[i] * sigma);
        else
            s->table.f32[i] = mean + g->z[i] * sigma;
    }
}

static void fill_u8(const yard_synth_source *s, uint8_t *out, uint64_t word_idx, size_t n)
{
    for (size_t i = 0; i < n; i += 8, word_idx++) {
        const uint64_t r = random_word(s->key, word_idx);
        uint8_t eight[8];
        for (int j = 0; j < 8; j++)
            eight[j] = s->table.u8[r >> 8 * j & 0xff];
        memcpy(out + i, eight, n - i < 8 ? n - i : 8);
    }
}

static void fill_u16(const yard_synth_source *s, uint16_t *out, uint64_t word_idx, size_t n)
{
    for (size_t i = 0; i < n; i += 8, word_idx++) {
        const uint64_t r = random_word(s->key, word_idx);
        for (size_t j = 0; j < 8 && i + j < n; j++)
            out[i + j] = s->table.u16[r >> 8 * j & 0xff];
    }
}

static void fill_f32(const yard_synth_source *s, float *out, uint64_t word_idx, size_t n)
{
    for (size_t i = 0; i < n; i += 8, word_idx++) {
        const uint64_t r = random_word(s->key, word_idx);
        for (size_t j = 0; j < 8 && i + j < n; j++)
            out[i + j] = s->table.f32[r >> 8 * j & 0xff];
    }
}

void yard_synth_fill(const yard_synth_source *s, void *out, uint64_t first, size_t n)
{
    if (s->dtype == YARD_FP8_E4M3)
        fill_u8(s, out, first / 8, n);
    else if (s->dtype == YARD_BF16)
        fill_u16(s, out, first / 8, n);
    else
        fill_f32(s, out, first / 8, n);
}

void yard_synth_fill_scales(const yard_synth_source *s, float *out, uint64_t first, size_t n,
                            float sigma, bool ue8m0)
{
    const float base = sigma / fp8_sigma;

    for (size_t i = 0; i < n; i++) {
        const uint64_t r = random_word(s->key, first + i);
        /* Blocks differ, so that a scale taken from the wrong block shows. */
        if (ue8m0)
            out[i] = exp2f(roundf(log2f(base)) - (float)(r >> 63));
        else
            out[i] = base * (0.75f + 0.5f * (float)(r >> 40) * 0x1p-24f);
    }
}
