/* Whole cache pages, in and out of the layers' caches. */
#include <stdlib.h>

#include "model/forward_impl.h"
#include "model/memory.h"

static uint32_t cached_layers(const yard_model *m)
{
    return m->config.n_layers + (m->options.mtp ? 1 : 0);
}

static size_t layer_page_bytes(const yard_model *m)
{
    return (size_t)YARD_PAGE_TOKENS *
           yard_model_kv_row_bytes(&m->config, m->options.layout.tp, m->cached);
}

static uint8_t *page_at(const yard_model *m, uint32_t layer_idx, int32_t page)
{
    return (uint8_t *)m->layers[layer_idx].cache.data + (size_t)page * layer_page_bytes(m);
}

size_t yard_model_page_bytes(const yard_model *m)
{
    return cached_layers(m) * layer_page_bytes(m);
}

yard_status yard_model_read_page(yard_model *m, int32_t page, void *out, yard_error *err)
{
    const size_t n_bytes = layer_page_bytes(m);
    yard_status st = YARD_OK;

    for (uint32_t i = 0; i < cached_layers(m) && st == YARD_OK; i++)
        st = m->ops->download(m->stream, (uint8_t *)out + i * n_bytes, page_at(m, i, page), n_bytes,
                              err);
    return st;
}

yard_status yard_model_write_page(yard_model *m, int32_t page, const void *data, yard_error *err)
{
    const size_t n_bytes = layer_page_bytes(m);
    yard_status st = YARD_OK;

    for (uint32_t i = 0; i < cached_layers(m) && st == YARD_OK; i++)
        st = m->ops->upload(m->stream, page_at(m, i, page), (const uint8_t *)data + i * n_bytes,
                            n_bytes, err);
    return st;
}

yard_status yard_model_copy_page(yard_model *m, int32_t from, int32_t to, yard_error *err)
{
    void *data = malloc(yard_model_page_bytes(m));
    yard_status st;

    if (!data)
        return yard_fail(err, YARD_ENOMEM, "page: %zu bytes", yard_model_page_bytes(m));
    st = yard_model_read_page(m, from, data, err);
    if (st == YARD_OK)
        st = yard_model_write_page(m, to, data, err);
    free(data);
    return st;
}
