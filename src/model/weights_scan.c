#include "model/weights_scan.h"

#include <math.h>
#include <stdio.h>

/* A chunk is long enough to hide the hand-out of tasks and short enough to share the end evenly;
 * a batch is what one progress notice covers. */
enum { CHUNK_BYTES = 1 << 20, BATCH_CHUNKS = 256 };

#define NONE UINT64_MAX

typedef struct chunk {
    const yard_tensor *tensor;
    bool scales;
    yard_span rows, cols;
    uint64_t bad; /* out: first bad element of the tensor, or NONE */
} chunk;

/* A value is not finite when its exponent bits are all ones (in e4m3: all bits but the sign).
 * Adding one at their lowest place then carries into the cleared sign bit, and nowhere else: eight
 * bytes at a time need no loop over lanes. */
static const struct {
    uint64_t mask, one, carry;
} lanes[YARD_DTYPE_COUNT] = {
    [YARD_F32] = { 0x7f8000007f800000u, 0x0080000000800000u, 0x8000000080000000u },
    [YARD_BF16] = { 0x7f807f807f807f80u, 0x0080008000800080u, 0x8000800080008000u },
    [YARD_F16] = { 0x7c007c007c007c00u, 0x0400040004000400u, 0x8000800080008000u },
    [YARD_FP8_E4M3] = { 0x7f7f7f7f7f7f7f7fu, 0x0101010101010101u, 0x8080808080808080u },
};

static uint64_t word_at(const uint8_t *bytes, size_t n_bytes)
{
    uint64_t word = 0;

    memcpy(&word, bytes, n_bytes);
    return word;
}

/* Byte offset of the 8-byte word with the first bad value, NONE when there is none. */
static uint64_t find_bad_word(const uint8_t *bytes, size_t n_bytes, yard_dtype dtype)
{
    enum { STRIDE = 256 };
    const uint64_t mask = lanes[dtype].mask, one = lanes[dtype].one, carry = lanes[dtype].carry;
    size_t i = 0;

    for (; i + STRIDE <= n_bytes; i += STRIDE) {
        uint64_t seen = 0;
        for (size_t j = 0; j < STRIDE; j += 8)
            seen |= (word_at(bytes + i + j, 8) & mask) + one;
        if (seen & carry)
            break;
    }
    for (; i < n_bytes; i += 8) {
        const size_t left = n_bytes - i;
        if (((word_at(bytes + i, left < 8 ? left : 8) & mask) + one) & carry)
            return i;
    }
    return NONE;
}

static bool is_bad(const uint8_t *bytes, yard_dtype dtype)
{
    const uint64_t word = word_at(bytes, yard_dtype_bytes(dtype));

    return (((word & lanes[dtype].mask) + lanes[dtype].one) & lanes[dtype].carry) != 0;
}

static uint64_t find_bad_value(const uint8_t *bytes, size_t n_bytes, yard_dtype dtype)
{
    const size_t width = yard_dtype_bytes(dtype);
    uint64_t at = find_bad_word(bytes, n_bytes, dtype);

    if (at == NONE)
        return NONE;
    while (!is_bad(bytes + at, dtype))
        at += width;
    return at / width;
}

/* A positive finite number's bits are 1 .. 0x7f7fffff. */
static uint64_t find_bad_scale(const uint8_t *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((uint32_t)word_at(bytes + 4 * i, 4) - 1u >= 0x7f7fffffu)
            return i;
    return NONE;
}

static uint64_t row_length(const yard_tensor *t)
{
    return t->n_dims ? t->shape[t->n_dims - 1] : 1;
}

/* Index in the tensor of the first bad one of n elements from first on, or NONE. */
static uint64_t scan_elements(const chunk *c, uint64_t first, size_t n)
{
    const yard_dtype dtype = c->tensor->dtype;
    const size_t width = yard_dtype_bytes(dtype);
    const uint8_t *bytes = (const uint8_t *)c->tensor->data + first * width;
    const uint64_t bad =
        c->scales ? find_bad_scale(bytes, n) : find_bad_value(bytes, n * width, dtype);

    return bad == NONE ? NONE : first + bad;
}

static void scan_chunk(void *ctx, uint32_t task_idx, uint32_t thread_idx)
{
    chunk *c = (chunk *)ctx + task_idx;
    const uint64_t length = row_length(c->tensor), first = c->rows.first * length + c->cols.first;

    (void)thread_idx;
    c->bad = NONE;
    if (c->cols.n == length) {
        c->bad = scan_elements(c, first, c->rows.n * length);
        return;
    }
    for (uint32_t i = 0; i < c->rows.n && c->bad == NONE; i++)
        c->bad = scan_elements(c, first + i * length, c->cols.n);
}

static float value_at(const yard_tensor *t, uint64_t i)
{
    const uint8_t *bytes = (const uint8_t *)t->data + i * yard_dtype_bytes(t->dtype);
    const uint64_t word = word_at(bytes, yard_dtype_bytes(t->dtype));

    switch (t->dtype) {
    case YARD_BF16:
        return yard_f32_from_bf16((uint16_t)word);
    case YARD_F16:
        return yard_f32_from_f16((uint16_t)word);
    case YARD_FP8_E4M3:
        return yard_f32_from_e4m3((uint8_t)word);
    default:
        return yard_f32_from_bits((uint32_t)word);
    }
}

static yard_status report_bad(const chunk *c, yard_error *err)
{
    const yard_tensor *t = c->tensor;
    const uint64_t n_cols = row_length(t);
    const unsigned long long row = c->bad / n_cols, col = c->bad % n_cols;
    const float value = value_at(t, c->bad);
    char found[32] = "NaN"; /* printf may give it a sign */

    if (!isnan(value))
        snprintf(found, sizeof(found), "%g", (double)value);
    if (c->scales)
        return yard_fail(err, YARD_EFORMAT,
                         "%s: tensor '%.200s': block [%llu, %llu]: want a finite scale above 0, "
                         "found %s",
                         t->file, t->name, row, col, found);
    return yard_fail(err, YARD_EFORMAT,
                     "%s: tensor '%.200s': row %llu, column %llu: want a finite %s, found %s",
                     t->file, t->name, row, col, yard_dtype_name(t->dtype), found);
}

/* Where the scan stands. */
typedef struct cursor {
    const yard_checkpoint *ckpt;
    const yard_tensor_use *use;
    uint32_t tensor_idx;
    uint32_t n_rows; /* done of the tensor */
} cursor;

static uint64_t row_bytes(const cursor *at, uint32_t tensor_idx)
{
    return (uint64_t)at->use[tensor_idx].cols.n *
           yard_dtype_bytes(yard_checkpoint_tensor(at->ckpt, tensor_idx)->dtype);
}

/* The next chunks in the order of the files, at most BATCH_CHUNKS. */
static uint32_t cut_batch(cursor *at, chunk *chunks, uint64_t *n_bytes)
{
    uint32_t n = 0;

    while (n < BATCH_CHUNKS && at->tensor_idx < yard_checkpoint_tensor_count(at->ckpt)) {
        const yard_tensor_use *use = &at->use[at->tensor_idx];
        const uint32_t left = use->rows.n - at->n_rows;
        uint64_t most;

        if (left == 0 || use->cols.n == 0) {
            at->tensor_idx++;
            at->n_rows = 0;
            continue;
        }
        most = CHUNK_BYTES / row_bytes(at, at->tensor_idx);
        most = most == 0 ? 1 : most;
        chunks[n] =
            (chunk){ .tensor = yard_checkpoint_tensor(at->ckpt, at->tensor_idx),
                     .scales = use->role == YARD_ROLE_SCALES,
                     .rows = { use->rows.first + at->n_rows, left < most ? left : (uint32_t)most },
                     .cols = use->cols };
        at->n_rows += chunks[n].rows.n;
        *n_bytes += chunks[n].rows.n * row_bytes(at, at->tensor_idx);
        n++;
    }
    return n;
}

static yard_status scan_all(cursor *at, yard_pool *pool, const yard_notify *notify, yard_error *err)
{
    chunk chunks[BATCH_CHUNKS];
    uint64_t done_bytes = 0, total_bytes = 0;
    uint32_t n;

    for (uint32_t i = 0; i < yard_checkpoint_tensor_count(at->ckpt); i++)
        total_bytes += at->use[i].rows.n * row_bytes(at, i);
    while ((n = cut_batch(at, chunks, &done_bytes)) > 0) {
        yard_pool_run(pool, scan_chunk, chunks, n);
        for (uint32_t i = 0; i < n; i++)
            if (chunks[i].bad != NONE)
                return report_bad(&chunks[i], err);
        yard_progress(notify, "weights", done_bytes, total_bytes);
    }
    return YARD_OK;
}

yard_status yard_weights_scan(const yard_checkpoint *ckpt, const yard_tensor_use *use,
                              uint32_t n_threads, const yard_notify *notify, yard_error *err)
{
    cursor at = { .ckpt = ckpt, .use = use };
    yard_pool *pool = NULL;
    yard_status st = yard_pool_create(&pool, n_threads, err);

    if (!st)
        st = scan_all(&at, pool, notify, err);
    yard_pool_destroy(pool);
    return st;
}
