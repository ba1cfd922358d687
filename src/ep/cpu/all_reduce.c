/* The sum over an instance's ranks on the CPU: everybody puts its rows to everybody, and adds all
 * of them in the order of ranks. One hop; the rows of a decode step are few, and what a longer
 * chunk would save by two hops is small beside its products.
 *
 * Landing places alternate between two sets. When s writes sum n + 2 into r's memory, s has
 * finished sum n + 1, so it has r's rows n + 1, which r sent after it had read sum n: the set is
 * free. The same holds for s's own rows, which transports that do not copy at once read from its
 * heap: s has all rows n + 1, sent after their senders had received its rows n. */
#include <stdlib.h>

#include "base/convert.h"
#include "ep/ep.h"
#include "fabric/fabric.h"

enum { ALIGN = 64, MAX_TP = 64, N_SETS = 2 };

struct yard_all_reduce {
    yard_all_reduce_config config;
    const yard_convert *convert;
    uint32_t rank, first; /* first: of the instance */
    uint64_t epoch;       /* sums so far */
    yard_status status;   /* sticky */
    yard_error err;
};

static size_t row_bytes(const yard_all_reduce_config *c)
{
    return c->n_cols * sizeof(float);
}

static size_t slot_bytes(const yard_all_reduce_config *c)
{
    return yard_align_up(c->max_rows * row_bytes(c), ALIGN);
}

/* Words first, then the sets, each with a slot per rank. */
static yard_sym word_at(const yard_all_reduce *r, uint32_t source)
{
    return r->config.heap_at + (source - r->first) * sizeof(uint64_t);
}

static yard_sym slot_at(const yard_all_reduce *r, uint32_t source)
{
    const yard_all_reduce_config *c = &r->config;
    const uint64_t slot = r->epoch % N_SETS * c->tp + (source - r->first);

    return c->heap_at + yard_align_up(c->tp * sizeof(uint64_t), ALIGN) + slot * slot_bytes(c);
}

size_t yard_all_reduce_heap_bytes(const yard_all_reduce_config *c)
{
    return yard_align_up(c->tp * sizeof(uint64_t), ALIGN) + N_SETS * c->tp * slot_bytes(c);
}

static yard_status check(const yard_all_reduce_config *c, yard_error *err)
{
    const uint32_t n_ranks = yard_fabric_size(c->fabric);
    const size_t has = yard_fabric_heap_bytes(c->fabric), want = yard_all_reduce_heap_bytes(c);

    if (c->tp == 0 || c->tp > MAX_TP || n_ranks % c->tp != 0)
        return yard_fail(err, YARD_EINVAL,
                         "all-reduce: tp: want a divisor of %u ranks, at most %d, got %u", n_ranks,
                         MAX_TP, c->tp);
    if (c->heap_at % ALIGN != 0 || c->heap_at > has || want > has - c->heap_at)
        return yard_fail(err, YARD_EINVAL,
                         "all-reduce: want a heap of %zu bytes from a multiple of %d on, got %llu "
                         "of %zu",
                         want, ALIGN, (unsigned long long)c->heap_at, has);
    return YARD_OK;
}

yard_status yard_all_reduce_create(yard_all_reduce **out, const yard_all_reduce_config *config,
                                   yard_error *err)
{
    const yard_status st = check(config, err);
    yard_all_reduce *r;

    if (st != YARD_OK)
        return st;
    r = calloc(1, sizeof(*r));
    if (!r)
        return yard_fail(err, YARD_ENOMEM, "all-reduce: %zu bytes", sizeof(*r));
    r->config = *config;
    r->convert = yard_convert_best();
    r->rank = yard_fabric_rank(config->fabric);
    r->first = r->rank / config->tp * config->tp;
    *out = r;
    return YARD_OK;
}

void yard_all_reduce_destroy(yard_all_reduce *r)
{
    free(r);
}

static yard_status put_rows(yard_all_reduce *r, const float *x, size_t n_bytes)
{
    yard_fabric *f = r->config.fabric;
    const yard_sym own = slot_at(r, r->rank);
    const void *src = x;

    if (!yard_fabric_copies(f)) {
        void *staged = yard_fabric_local(f, own);
        memcpy(staged, x, n_bytes);
        src = staged;
    }
    for (uint32_t i = 1; i < r->config.tp; i++) {
        const uint32_t peer = r->first + (r->rank - r->first + i) % r->config.tp;
        const yard_status st =
            yard_fabric_put_signal(f, own, src, n_bytes, word_at(r, r->rank), 1, peer);
        if (st != YARD_OK)
            return st;
    }
    return YARD_OK;
}

static yard_status wait_rows(const yard_all_reduce *r)
{
    yard_fabric *f = r->config.fabric;
    const yard_deadline until = yard_fabric_deadline(f, r->config.timeout_us);

    for (uint32_t i = 0; i < r->config.tp; i++) {
        const uint32_t peer = r->first + i;
        yard_status st = YARD_OK;

        if (peer != r->rank)
            st = yard_fabric_wait_until(f, word_at(r, peer), r->epoch, peer, until);
        if (st != YARD_OK)
            return st;
    }
    return YARD_OK;
}

/* The own rows are read where they are: each value before it is replaced. */
static void add_rows(const yard_all_reduce *r, float *x, uint32_t n_rows)
{
    const uint32_t tp = r->config.tp, n_cols = r->config.n_cols;
    const void *rows[MAX_TP];
    float ones[MAX_TP];

    for (uint32_t i = 0; i < tp; i++)
        ones[i] = 1.0f;
    for (uint32_t t = 0; t < n_rows; t++) {
        float *const own = x + (size_t)t * n_cols;

        for (uint32_t i = 0; i < tp; i++)
            rows[i] = r->first + i == r->rank
                          ? (const void *)own
                          : yard_fabric_local(r->config.fabric,
                                              slot_at(r, r->first + i) + t * row_bytes(&r->config));
        r->convert->weighted_sum(YARD_F32, rows, ones, tp, n_cols, YARD_F32, own);
    }
}

yard_status yard_all_reduce_sum(yard_all_reduce *r, float *x, const int32_t *n_rows,
                                yard_stream stream)
{
    yard_status st;

    (void)stream;
    if (r->status != YARD_OK || *n_rows == 0)
        return r->status;
    if (*n_rows < 0 || (uint32_t)*n_rows > r->config.max_rows)
        return yard_fail(&r->err, YARD_EINVAL, "all-reduce: rows: want 0 to %u, got %d",
                         r->config.max_rows, *n_rows);
    r->epoch++;
    st = put_rows(r, x, (uint32_t)*n_rows * row_bytes(&r->config));
    if (st == YARD_OK)
        st = wait_rows(r);
    if (st != YARD_OK) {
        r->status = st;
        return yard_fail(&r->err, st, "rank %u, all-reduce: %s", r->rank,
                         yard_fabric_error(r->config.fabric));
    }
    add_rows(r, x, (uint32_t)*n_rows);
    return YARD_OK;
}

const char *yard_all_reduce_error(const yard_all_reduce *r)
{
    return r->err.message;
}
