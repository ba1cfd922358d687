/* The sum over an instance's ranks: its config, its backend, its errors. */
#include <stdlib.h>

#include "ep/all_reduce_impl.h"

size_t yard_all_reduce_heap_bytes(const yard_all_reduce_config *c)
{
    return all_reduce_sets_at(c) - c->heap_at + ALL_REDUCE_SETS * c->tp * all_reduce_slot_bytes(c);
}

static yard_status check(const yard_all_reduce_config *c, yard_error *err)
{
    const uint32_t n_ranks = yard_fabric_size(c->fabric);
    const size_t on_device = yard_fabric_device_heap_bytes(c->fabric);
    const size_t has = on_device ? on_device : yard_fabric_heap_bytes(c->fabric);
    const size_t want = yard_all_reduce_heap_bytes(c);

    if (c->tp == 0 || c->tp > ALL_REDUCE_MAX_TP || n_ranks % c->tp != 0)
        return yard_fail(err, YARD_EINVAL,
                         "all-reduce: tp: want a divisor of %u ranks, at most %d, got %u", n_ranks,
                         ALL_REDUCE_MAX_TP, c->tp);
    if (c->heap_at % ALL_REDUCE_ALIGN != 0 || c->heap_at > has || want > has - c->heap_at)
        return yard_fail(err, YARD_EINVAL,
                         "all-reduce: want a heap of %zu bytes from a multiple of %d on, got %llu "
                         "of %zu",
                         want, ALL_REDUCE_ALIGN, (unsigned long long)c->heap_at, has);
    if (c->dtype != YARD_F32 && c->dtype != YARD_BF16)
        return yard_fail(err, YARD_EINVAL, "all-reduce: dtype: want f32 or bf16, got %s",
                         yard_dtype_name(c->dtype));
    return YARD_OK;
}

yard_status yard_all_reduce_create(yard_all_reduce **out, const yard_all_reduce_config *config,
                                   yard_error *err)
{
    yard_status st = check(config, err);
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
    r->backend = yard_fabric_device_heap(config->fabric, r->rank) ? &yard_all_reduce_cuda
                                                                  : &yard_all_reduce_cpu;
    if (r->backend->open)
        st = r->backend->open(r, err);
    if (st != YARD_OK) {
        yard_all_reduce_destroy(r);
        return st;
    }
    *out = r;
    return YARD_OK;
}

void yard_all_reduce_destroy(yard_all_reduce *r)
{
    if (r && r->backend->close)
        r->backend->close(r);
    free(r);
}

yard_status yard_all_reduce_poll(yard_all_reduce *r)
{
    if (r->status == YARD_OK && r->backend->look)
        r->backend->look(r);
    return r->status;
}

yard_status yard_all_reduce_sum(yard_all_reduce *r, void *x, const int32_t *n_rows,
                                yard_stream stream)
{
    if (yard_all_reduce_poll(r) != YARD_OK)
        return r->status;
    return r->backend->sum(r, x, n_rows, stream);
}

const char *yard_all_reduce_error(const yard_all_reduce *r)
{
    return r->err.message;
}
