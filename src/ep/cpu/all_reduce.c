/* The sum over an instance's ranks on the CPU: rows are put, words say that they have come. */
#include "ep/all_reduce_impl.h"

static yard_sym word_at(const yard_all_reduce *r, uint32_t source)
{
    return r->config.heap_at + (source - r->first) * sizeof(uint64_t);
}

static yard_sym slot_at(const yard_all_reduce *r, uint32_t source)
{
    const yard_all_reduce_config *c = &r->config;
    const uint64_t slot = r->epoch % ALL_REDUCE_SETS * c->tp + (source - r->first);

    return all_reduce_sets_at(c) + slot * all_reduce_slot_bytes(c);
}

static yard_status put_rows(yard_all_reduce *r, const void *x, size_t n_bytes)
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
static void add_rows(const yard_all_reduce *r, uint8_t *x, uint32_t n_rows)
{
    const uint32_t tp = r->config.tp;
    const size_t n_bytes = all_reduce_row_bytes(&r->config);
    const void *rows[ALL_REDUCE_MAX_TP];
    float ones[ALL_REDUCE_MAX_TP];

    for (uint32_t i = 0; i < tp; i++)
        ones[i] = 1.0f;
    for (uint32_t t = 0; t < n_rows; t++) {
        uint8_t *const own = x + t * n_bytes;

        for (uint32_t i = 0; i < tp; i++)
            rows[i] =
                r->first + i == r->rank
                    ? (const void *)own
                    : yard_fabric_local(r->config.fabric, slot_at(r, r->first + i) + t * n_bytes);
        r->convert->weighted_sum(r->config.dtype, rows, ones, tp, r->config.n_cols, r->config.dtype,
                                 own);
    }
}

static yard_status sum(yard_all_reduce *r, void *x, const int32_t *n_rows, yard_stream stream)
{
    yard_status st;

    (void)stream;
    if (*n_rows == 0)
        return YARD_OK;
    if (*n_rows < 0 || (uint32_t)*n_rows > r->config.max_rows)
        return yard_fail(&r->err, YARD_EINVAL, "all-reduce: rows: want 0 to %u, got %d",
                         r->config.max_rows, *n_rows);
    r->epoch++;
    st = put_rows(r, x, (uint32_t)*n_rows * all_reduce_row_bytes(&r->config));
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

const all_reduce_backend yard_all_reduce_cpu = { .sum = sum };
