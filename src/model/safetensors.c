/* One safetensors image: 8 bytes of header length (little-endian), a JSON header, the data. */
#include "model/safetensors.h"

#include <stdlib.h>

#include "model/json_reader.h"

/* The limit of the reference implementation. */
enum { LENGTH_BYTES = 8, MAX_HEADER_BYTES = 100000000 };

static const struct {
    const char *name;
    yard_dtype dtype;
} dtypes[] = {
    { "F32", YARD_F32 }, { "BF16", YARD_BF16 }, { "F16", YARD_F16 }, { "F8_E4M3", YARD_FP8_E4M3 }
};

enum { N_DTYPES = sizeof(dtypes) / sizeof(dtypes[0]) };

/* A tensor with the place of its data, for sorting. */
typedef struct entry {
    yard_tensor tensor;
    uint64_t begin, end;
} entry;

typedef struct image {
    const uint8_t *bytes;
    const char *file;
    uint64_t data_at; /* offset of the data part in the file */
    uint64_t data_bytes;
    entry *entries;
    uint32_t n_entries;
    yard_error *err;
} image;

static yard_status read_header(image *im, size_t n_bytes, json_t **header)
{
    uint64_t length = 0;

    if (n_bytes < LENGTH_BYTES)
        return yard_fail(im->err, YARD_EFORMAT,
                         "%s: header length: want %d bytes, the file has %zu", im->file,
                         LENGTH_BYTES, n_bytes);
    for (int i = 0; i < LENGTH_BYTES; i++)
        length |= (uint64_t)im->bytes[i] << 8 * i;
    if (length > n_bytes - LENGTH_BYTES)
        return yard_fail(im->err, YARD_EFORMAT,
                         "%s: header length: want at most %zu (the rest of the file), found %llu",
                         im->file, n_bytes - LENGTH_BYTES, (unsigned long long)length);
    if (length > MAX_HEADER_BYTES)
        return yard_fail(im->err, YARD_EFORMAT, "%s: header length: want at most %d, found %llu",
                         im->file, MAX_HEADER_BYTES, (unsigned long long)length);
    im->data_at = LENGTH_BYTES + length;
    im->data_bytes = n_bytes - im->data_at;
    return yard_json_parse_object(header, (const char *)im->bytes + LENGTH_BYTES, (size_t)length,
                                  im->file, im->err);
}

static yard_status read_dtype(const image *im, yard_tensor *t, const json_t *value)
{
    const char *name = json_string_value(value);
    char what[YARD_JSON_DESCRIBE_BYTES];

    if (!name)
        return yard_fail(im->err, YARD_EFORMAT,
                         "%s: tensor '%.200s': dtype: want a string, found %s", im->file, t->name,
                         yard_json_describe(value, what));
    for (int i = 0; i < N_DTYPES; i++) {
        if (strcmp(dtypes[i].name, name) != 0)
            continue;
        t->dtype = dtypes[i].dtype;
        return YARD_OK;
    }
    return yard_fail(im->err, YARD_ENOTSUP,
                     "%s: tensor '%.200s': dtype: want F32, BF16, F16 or F8_E4M3, found '%.32s'",
                     im->file, t->name, name);
}

/* Also the size in bytes, which fits 64 bits or the shape is refused. */
static yard_status read_shape(const image *im, yard_tensor *t, const json_t *value)
{
    const size_t n_dims = json_array_size(value);
    uint64_t n_bytes = yard_dtype_bytes(t->dtype);
    char what[YARD_JSON_DESCRIBE_BYTES];

    if (!json_is_array(value) || n_dims > YARD_MAX_DIMS)
        return yard_fail(im->err, YARD_EFORMAT,
                         "%s: tensor '%.200s': shape: want a list of at most %d sizes, found %s",
                         im->file, t->name, YARD_MAX_DIMS, yard_json_describe(value, what));
    for (size_t i = 0; i < n_dims; i++) {
        const json_t *dim = json_array_get(value, i);
        const json_int_t n = json_integer_value(dim);
        if (!json_is_integer(dim) || n < 0)
            return yard_fail(im->err, YARD_EFORMAT,
                             "%s: tensor '%.200s': shape[%zu]: want a whole number, found %s",
                             im->file, t->name, i, yard_json_describe(dim, what));
        t->shape[i] = (uint64_t)n;
        if (__builtin_mul_overflow(n_bytes, (uint64_t)n, &n_bytes))
            return yard_fail(im->err, YARD_EFORMAT,
                             "%s: tensor '%.200s': shape: its size does not fit 64 bits", im->file,
                             t->name);
    }
    t->n_dims = (uint32_t)n_dims;
    t->n_bytes = (size_t)n_bytes;
    return YARD_OK;
}

static yard_status fail_offsets(const image *im, const yard_tensor *t, const json_t *value)
{
    char first[YARD_JSON_DESCRIBE_BYTES], second[YARD_JSON_DESCRIBE_BYTES];

    if (json_array_size(value) != 2)
        return yard_fail(im->err, YARD_EFORMAT,
                         "%s: tensor '%.200s': data_offsets: want [begin, end] with begin <= end, "
                         "found %s",
                         im->file, t->name, yard_json_describe(value, first));
    return yard_fail(im->err, YARD_EFORMAT,
                     "%s: tensor '%.200s': data_offsets: want [begin, end] with begin <= end, "
                     "found [%s, %s]",
                     im->file, t->name, yard_json_describe(json_array_get(value, 0), first),
                     yard_json_describe(json_array_get(value, 1), second));
}

static yard_status read_offsets(const image *im, entry *e, const json_t *value)
{
    const yard_tensor *t = &e->tensor;
    const json_t *begin = json_array_get(value, 0), *end = json_array_get(value, 1);
    const json_int_t from = json_integer_value(begin), to = json_integer_value(end);

    if (json_array_size(value) != 2 || !json_is_integer(begin) || !json_is_integer(end) ||
        from < 0 || to < from)
        return fail_offsets(im, t, value);
    if ((uint64_t)to > im->data_bytes)
        return yard_fail(im->err, YARD_EFORMAT,
                         "%s: tensor '%.200s': data_offsets: want an end of at most %llu (the "
                         "file's data), found %lld",
                         im->file, t->name, (unsigned long long)im->data_bytes, (long long)to);
    if ((uint64_t)(to - from) != t->n_bytes)
        return yard_fail(im->err, YARD_EFORMAT,
                         "%s: tensor '%.200s': data_offsets: want %zu bytes by shape and dtype, "
                         "found %lld",
                         im->file, t->name, t->n_bytes, (long long)(to - from));
    e->begin = (uint64_t)from;
    e->end = (uint64_t)to;
    return YARD_OK;
}

static yard_status read_entry(const image *im, entry *e, const char *name, const json_t *value)
{
    yard_tensor *t = &e->tensor;
    char what[YARD_JSON_DESCRIBE_BYTES];
    yard_status st;

    t->name = name;
    t->file = im->file;
    if (!json_is_object(value))
        return yard_fail(im->err, YARD_EFORMAT, "%s: tensor '%.200s': want an object, found %s",
                         im->file, name, yard_json_describe(value, what));
    st = read_dtype(im, t, json_object_get(value, "dtype"));
    if (!st)
        st = read_shape(im, t, json_object_get(value, "shape"));
    if (!st)
        st = read_offsets(im, e, json_object_get(value, "data_offsets"));
    if (st)
        return st;
    /* Mappings start at a page, so the offset in the file decides. */
    if ((im->data_at + e->begin) % yard_dtype_bytes(t->dtype))
        return yard_fail(im->err, YARD_EFORMAT,
                         "%s: tensor '%.200s': data: want an offset in the file divisible by %zu, "
                         "found %llu",
                         im->file, name, yard_dtype_bytes(t->dtype),
                         (unsigned long long)(im->data_at + e->begin));
    t->data = im->bytes + im->data_at + e->begin;
    return YARD_OK;
}

static yard_status read_entries(image *im, json_t *header)
{
    im->entries = calloc(json_object_size(header) + 1, sizeof(*im->entries));
    if (!im->entries)
        return yard_fail(im->err, YARD_ENOMEM, "%s: no memory for %zu tensors", im->file,
                         json_object_size(header));
    for (void *i = json_object_iter(header); i; i = json_object_iter_next(header, i)) {
        const char *name = json_object_iter_key(i);
        yard_status st;
        if (!strcmp(name, "__metadata__"))
            continue;
        st = read_entry(im, &im->entries[im->n_entries++], name, json_object_iter_value(i));
        if (st)
            return st;
    }
    return YARD_OK;
}

static int by_place(const void *a, const void *b)
{
    const entry *x = a, *y = b;

    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

/* The format wants the data part covered exactly: no overlap, no hole, nothing behind. */
static yard_status check_cover(const image *im)
{
    uint64_t at = 0;

    for (uint32_t i = 0; i < im->n_entries; i++) {
        const entry *e = &im->entries[i];
        if (e->begin < at)
            return yard_fail(im->err, YARD_EFORMAT,
                             "%s: tensor '%.200s' overlaps '%.200s': want a begin of %llu, found "
                             "%llu",
                             im->file, e->tensor.name, im->entries[i - 1].tensor.name,
                             (unsigned long long)at, (unsigned long long)e->begin);
        if (e->begin > at)
            return yard_fail(im->err, YARD_EFORMAT,
                             "%s: tensor '%.200s': hole before it: want a begin of %llu, found "
                             "%llu",
                             im->file, e->tensor.name, (unsigned long long)at,
                             (unsigned long long)e->begin);
        at = e->end;
    }
    if (at != im->data_bytes)
        return yard_fail(im->err, YARD_EFORMAT,
                         "%s: want the data to end at %llu with the last tensor, found %llu bytes",
                         im->file, (unsigned long long)at, (unsigned long long)im->data_bytes);
    return YARD_OK;
}

yard_status yard_safetensors_parse(const void *bytes, size_t n_bytes, const char *file,
                                   yard_status (*each)(void *ctx, const yard_tensor *t,
                                                       yard_error *err),
                                   void *ctx, yard_error *err)
{
    image im = { .bytes = bytes, .file = file, .err = err };
    json_t *header = NULL;
    yard_status st = read_header(&im, n_bytes, &header);

    if (!st)
        st = read_entries(&im, header);
    if (!st) {
        qsort(im.entries, im.n_entries, sizeof(*im.entries), by_place);
        st = check_cover(&im);
    }
    for (uint32_t i = 0; i < im.n_entries && !st; i++)
        st = each(ctx, &im.entries[i].tensor, err);
    free(im.entries);
    json_decref(header);
    return st;
}
