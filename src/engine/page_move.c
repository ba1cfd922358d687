/* Pages of the cache out of an engine, and into another that has the same page root. */
#include <stdlib.h>

#include "engine/engine_impl.h"

size_t yard_engine_page_bytes(const yard_engine *e)
{
    return yard_model_page_bytes(e->model);
}

yard_status yard_engine_export_page(yard_engine *e, yard_page_hash name, void *out, bool *generated)
{
    const int32_t page = yard_page_pool_find(&e->pool, name);

    if (page == YARD_NO_PAGE)
        return yard_fail(&e->err, YARD_EAGAIN, "page %016llx..: not in the cache now",
                         (unsigned long long)name.word[0]);
    *generated = e->pool.page[page].generated;
    return yard_model_read_page(e->model, page, out, &e->err);
}

void yard_cache_place(yard_engine *e, const yard_page_import *in)
{
    int32_t page;

    if (yard_page_pool_find(&e->pool, in->name) != YARD_NO_PAGE)
        return;
    page = yard_page_pool_take(&e->pool);
    if (page == YARD_NO_PAGE)
        return;
    if (yard_model_write_page(e->model, page, in->data, NULL) == YARD_OK)
        yard_cache_add(e, page, in->name, in->generated);
    yard_page_pool_drop(&e->pool, page);
}

yard_status yard_engine_import_page(yard_engine *e, yard_page_hash name, bool generated,
                                    const void *data)
{
    command c = { .import = { .name = name, .generated = generated } };

    if (e->cache == YARD_CACHE_OFF || (generated && e->cache == YARD_CACHE_STRICT))
        return yard_fail(&e->err, YARD_EINVAL, "page: want %s, got %s",
                         e->cache == YARD_CACHE_OFF ? "the prefix cache on" : "prompt tokens only",
                         e->cache == YARD_CACHE_OFF ? "it off" : "generated ones");
    if (!e->fabric) {
        yard_cache_place(e, &(yard_page_import){ name, generated, (void *)(uintptr_t)data });
        return YARD_OK;
    }
    c.import.data = malloc(yard_engine_page_bytes(e));
    if (!c.import.data)
        return yard_fail(&e->err, YARD_ENOMEM, "page: %zu bytes", yard_engine_page_bytes(e));
    memcpy(c.import.data, data, yard_engine_page_bytes(e));
    return yard_group_command(e, &c);
}
