#include "attention_gpu_test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"

enum { SHARED_PAGES = 96 };

uint32_t scene_below(gpu_test *t, uint32_t n)
{
    return (uint32_t)(gpu_test_random(t) % n);
}

static uint32_t pages_of(const scene_seq *q)
{
    return yard_ceil_div(q->length, YARD_PAGE_TOKENS);
}

/* Values in (-1, 1): any 16 bits of a pattern whose exponents are small. */
static void fill_pages(const scene *s, uint32_t n_pages)
{
    const size_t n = (size_t)n_pages * YARD_PAGE_TOKENS * s->width;

    for (size_t i = 0; i < n; i += 4) {
        uint64_t bits = gpu_test_random(s->b->t);
        for (size_t j = i; j < i + 4 && j < n; j++, bits >>= 16) {
            const float value = (float)(int16_t)(bits & 0xffff) * 0x1p-15f;
            if (s->cache.dtype == YARD_BF16)
                ((uint16_t *)s->pages.host)[j] = yard_bf16_from_f32(value);
            else
                ((float *)s->pages.host)[j] = value;
        }
    }
}

/* Sequence i ends in page SHARED_PAGES + i; its other pages are anybody's. */
static void choose_pages(scene *s)
{
    const size_t row_bytes = s->width * yard_dtype_bytes(s->cache.dtype);
    int32_t *table = s->page_table.host;

    for (uint32_t i = 0; i < s->n_seqs; i++) {
        const uint32_t n = pages_of(&s->seqs[i]), used = s->seqs[i].length - (n - 1) * 64;
        uint8_t *last = (uint8_t *)s->pages.host + (SHARED_PAGES + i) * 64 * row_bytes;
        for (uint32_t j = 0; j + 1 < n; j++)
            table[i * s->page_ld + j] = (int32_t)scene_below(s->b->t, SHARED_PAGES);
        table[i * s->page_ld + n - 1] = (int32_t)(SHARED_PAGES + i);
        memset(last + used * row_bytes, 0xff, (64 - used) * row_bytes);
    }
}

static void list_rows(scene *s)
{
    uint32_t row = 0;

    for (uint32_t i = 0; i < s->n_seqs; i++)
        for (uint32_t j = 0; j < s->seqs[i].n_rows; j++, row++) {
            ((int32_t *)s->position.host)[row] =
                (int32_t)(s->seqs[i].length - s->seqs[i].n_rows + j);
            ((int32_t *)s->seq.host)[row] = (int32_t)i;
            ((uint8_t *)s->absorbed.host)[row] = s->seqs[i].absorbed;
        }
    *(int32_t *)s->n_tokens.host = (int32_t)s->n_rows;
}

bool scene_upload(scene *s)
{
    const bed *b = s->b;

    return twin_upload(b, &s->n_tokens) && twin_upload(b, &s->position) &&
           twin_upload(b, &s->seq) && twin_upload(b, &s->absorbed) &&
           twin_upload(b, &s->page_table) && twin_upload(b, &s->pages);
}

bool scene_create(const bed *b, scene *s, const scene_seq *seqs, uint32_t n_seqs, uint32_t width,
                  yard_dtype dtype)
{
    *s = (scene){ .b = b, .seqs = seqs, .n_seqs = n_seqs, .width = width, .page_ld = 1 };
    s->cache = (yard_kv_layer){ .dtype = dtype, .width = width };
    for (uint32_t i = 0; i < n_seqs; i++) {
        s->n_rows += seqs[i].n_rows;
        s->page_ld = pages_of(&seqs[i]) > s->page_ld ? pages_of(&seqs[i]) : s->page_ld;
    }
    if (!twin_create(b, &s->n_tokens, sizeof(int32_t)) ||
        !twin_create(b, &s->position, s->n_rows * sizeof(int32_t)) ||
        !twin_create(b, &s->seq, s->n_rows * sizeof(int32_t)) ||
        !twin_create(b, &s->absorbed, s->n_rows) ||
        !twin_create(b, &s->page_table, (size_t)n_seqs * s->page_ld * sizeof(int32_t)) ||
        !twin_create(b, &s->pages,
                     (size_t)(SHARED_PAGES + n_seqs) * 64 * width * yard_dtype_bytes(dtype)))
        return false;
    fill_pages(s, SHARED_PAGES + n_seqs);
    choose_pages(s);
    list_rows(s);
    s->cache.data = s->pages.device;
    s->batch = (yard_batch){ .n_tokens = s->n_tokens.device,
                             .token = s->position.device,
                             .position = s->position.device,
                             .seq = s->seq.device,
                             .absorbed = s->absorbed.device,
                             .page_table = s->page_table.device,
                             .page_table_ld = s->page_ld };
    return scene_upload(s);
}

static void narrow_row(const uint16_t *values, uint32_t kv_rank, uint32_t rope_dims, bool ue8m0,
                       uint8_t *row)
{
    const yard_latent_row at = yard_latent_row_of(YARD_FP8_E4M3, kv_rank, rope_dims);
    float latent[1024];

    if (values[0] == 0xffff) /* beyond the sequence: stays NaN */
        return;
    for (uint32_t c = 0; c < kv_rank; c++)
        latent[c] = yard_f32_from_bf16(values[c]);
    yard_convert_c.quantise(latent, kv_rank, ue8m0, row, (float *)(void *)(row + at.scale_at));
    memcpy(row + at.rope_at, values + kv_rank, rope_dims * sizeof(*values));
}

bool scene_make_fp8(scene *s, uint32_t kv_rank, bool ue8m0)
{
    const uint32_t rope_dims = s->width - kv_rank;
    const size_t row_bytes = yard_latent_row_of(YARD_FP8_E4M3, kv_rank, rope_dims).n_bytes;
    const size_t n_rows = (size_t)(SHARED_PAGES + s->n_seqs) * 64;
    twin narrow;

    if (!twin_create(s->b, &narrow, n_rows * row_bytes))
        return false;
    memset(narrow.host, 0xff, narrow.n_bytes);
    for (size_t row = 0; row < n_rows; row++)
        narrow_row((const uint16_t *)s->pages.host + row * s->width, kv_rank, rope_dims, ue8m0,
                   (uint8_t *)narrow.host + row * row_bytes);
    twin_destroy(s->b, &s->pages);
    s->pages = narrow;
    s->kv_rank = kv_rank;
    s->cache.dtype = YARD_FP8_E4M3;
    s->cache.data = narrow.device;
    return twin_upload(s->b, &s->pages);
}

static double narrow_value(const scene *s, size_t row, uint32_t col)
{
    const yard_latent_row at = yard_latent_row_of(YARD_FP8_E4M3, s->kv_rank, s->width - s->kv_rank);
    const uint8_t *stored = (const uint8_t *)s->pages.host + row * at.n_bytes;

    if (col >= s->kv_rank)
        return (double)yard_f32_from_bf16(
            ((const uint16_t *)(const void *)(stored + at.rope_at))[col - s->kv_rank]);
    return (double)yard_bf16_round(
        yard_f32_from_e4m3(stored[col]) *
        ((const float *)(const void *)(stored + at.scale_at))[col / YARD_GROUP]);
}

bool scene_widen(scene *s)
{
    const uint32_t row_bytes =
        yard_latent_row_of(YARD_FP8_E4M3, s->kv_rank, s->width - s->kv_rank).n_bytes;
    const size_t n_rows = s->pages.n_bytes / row_bytes;
    twin wide;

    if (!twin_create(s->b, &wide, n_rows * s->width * sizeof(uint16_t)))
        return false;
    for (size_t row = 0; row < n_rows; row++)
        for (uint32_t c = 0; c < s->width; c++)
            ((uint16_t *)wide.host)[row * s->width + c] =
                yard_bf16_from_f32((float)narrow_value(s, row, c));
    twin_destroy(s->b, &s->pages);
    s->pages = wide;
    s->cache.dtype = YARD_BF16;
    s->cache.data = wide.device;
    return twin_upload(s->b, &s->pages);
}

void scene_destroy(scene *s)
{
    twin_destroy(s->b, &s->n_tokens);
    twin_destroy(s->b, &s->position);
    twin_destroy(s->b, &s->seq);
    twin_destroy(s->b, &s->absorbed);
    twin_destroy(s->b, &s->page_table);
    twin_destroy(s->b, &s->pages);
}

void scene_values(const scene *s, uint32_t seq, uint32_t position, uint32_t col, uint32_t n,
                  double *out)
{
    const int32_t page = ((const int32_t *)s->page_table.host)[seq * s->page_ld + position / 64];
    const size_t row = (size_t)page * 64 + position % 64, at = row * s->width + col;

    for (uint32_t c = 0; c < n; c++)
        out[c] = s->cache.dtype == YARD_FP8_E4M3 ? narrow_value(s, row, col + c)
                 : s->cache.dtype == YARD_BF16
                     ? (double)yard_f32_from_bf16(((const uint16_t *)s->pages.host)[at + c])
                     : (double)((const float *)s->pages.host)[at + c];
}

/* [n], the caller's to free. */
static double *softmax_weights(const double *q, const double *key, uint32_t n_q, uint32_t n,
                               double scale)
{
    double *weight = malloc((n + 1) * sizeof(*weight)), sum = 0, most = -INFINITY;

    for (uint32_t p = 0; p < n; p++) {
        weight[p] = 0;
        for (uint32_t c = 0; c < n_q; c++)
            weight[p] += q[c] * key[(size_t)p * n_q + c];
        weight[p] *= scale;
        most = weight[p] > most ? weight[p] : most;
    }
    for (uint32_t p = 0; p < n; p++)
        sum += weight[p] = exp(weight[p] - most);
    for (uint32_t p = 0; p < n; p++)
        weight[p] /= sum;
    return weight;
}

void attend_reference(const double *q, const double *key, uint32_t n_q, const double *value,
                      uint32_t n_v, uint32_t n, double scale, double *out)
{
    double *weight = softmax_weights(q, key, n_q, n, scale);

    memset(out, 0, n_v * sizeof(*out));
    for (uint32_t p = 0; p < n; p++)
        for (uint32_t c = 0; c < n_v; c++)
            out[c] += weight[p] * value[(size_t)p * n_v + c];
    free(weight);
}

void attend_blur(const double *q, const double *key, uint32_t n_q, const double *blur, uint32_t n_v,
                 uint32_t n, double scale, double *out)
{
    double *weight = softmax_weights(q, key, n_q, n, scale);

    memset(out, 0, n_v * sizeof(*out));
    for (uint32_t p = 0; p < n; p++)
        for (uint32_t c = 0; c < n_v; c++)
            out[c] += weight[p] * weight[p] * blur[(size_t)p * n_v + c] * blur[(size_t)p * n_v + c];
    for (uint32_t c = 0; c < n_v; c++)
        out[c] = sqrt(out[c]);
    free(weight);
}

bool scene_close(const rows_twin *y, uint32_t row, uint32_t col, uint32_t n, const double *want,
                 const double *blur, scene_error *error)
{
    const double tolerance = y->host.dtype == YARD_BF16 ? 0x1p-7 : 0x1p-14;
    double largest = 0, worst = 0;

    for (uint32_t c = 0; c < n; c++)
        largest = fabs(want[c]) > largest ? fabs(want[c]) : largest;
    for (uint32_t c = 0; c < n; c++) {
        const double off = rows_value(&y->host, 0, row, col + c) - want[c];
        const double allowed = largest * tolerance + (blur ? 4 * blur[c] : 0) + 1e-30;
        worst = fmax(worst, isnan(off) ? INFINITY : fabs(off) / allowed);
        error->off += off * off;
        error->size += want[c] * want[c];
    }
    error->worst = fmax(error->worst, worst);
    return worst <= 1;
}
